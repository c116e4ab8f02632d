from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from accelmark.report.comparison import buyer_lines, lines_of, render_comparison, summary_line
from accelmark.report.run_page import render_page
from accelmark.results.comparison import compare, context_lines
from accelmark.results.figures import FigureName
from accelmark.results.prices import Prices, costs_of, read_prices
from accelmark.results.schema import Figure, InferenceRound
from accelmark.results.sources import open_sources
from accelmark.results.statistics import mean_difference
from accelmark.results.store.loaded_run import LoadedRun, load_run
from accelmark.spec.errors import RequestError, SpecError
from accelmark.spec.number_format import THIN
from tests.made_run import loaded, measured_run


def test_the_interval_is_welchs() -> None:
    """Source: R's documentation of ``t.test``, data set ``sleep``."""
    drug_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    drug_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    difference, interval = mean_difference(drug_2, drug_1)
    assert difference == pytest.approx(-1.58)
    assert interval == pytest.approx((-3.3654832, 0.2054832), abs=1e-7)


def test_a_single_round_has_no_interval() -> None:
    assert mean_difference([1.0], [2.0, 3.0]) == (1.5, None)


def with_figure(run: LoadedRun, name: FigureName, values: tuple[float, ...]) -> LoadedRun:
    """The run with another value of a figure in each round."""
    rounds = {
        place: result.model_copy(update={"figures": {**result.figures, name: Figure(value=value)}})
        for (place, result), value in zip(run.rounds.items(), values, strict=True)
    }
    return replace(run, rounds=rounds)


@pytest.mark.parametrize(
    ("name", "before", "after", "change", "interval"),
    [
        (FigureName.METRIC_DIFFERENCE, (0.0001, 0.0002, 0.0001), (0.0013, 0.0012, 0.0014), "+0.00117", "+0.0009"),
        (FigureName.METRIC_DIFFERENCE, (-0.0001, 0.0002, 0.0), (-0.0101, -0.0102, -0.01), "−0.0101", "−0.010"),
        (FigureName.DATA_WAIT_SHARE, (0.0, 0.0, 0.0), (0.05, 0.06, 0.04), "+5.00 points", "+2.5"),
        (FigureName.TIME_TO_TARGET, (0.0, 0.0, 0.0), (900.0, 901.0, 902.0), "+15.0 min", "+15.0"),
    ],
)
def test_a_figure_around_zero_has_an_absolute_difference(
    name: FigureName, before: tuple[float, ...], after: tuple[float, ...], change: str, interval: str, tmp_path: Path
) -> None:
    run = loaded(tmp_path / "run")
    [pair] = compare([with_figure(run, name, before), with_figure(run, name, after)]).pairs
    (found,) = [difference for difference in pair.differences if difference.figure == name]
    assert (found.relative, found.relative_interval) == (None, None)
    (line,) = [line for line in lines_of(pair) if line.title == found.title]
    assert line.change.replace(THIN, " ") == change
    assert line.interval.startswith(interval)
    assert "%" not in line.change + line.interval
    [same] = compare([with_figure(run, name, before), with_figure(run, name, before)]).pairs
    assert {one.effect for one in same.differences if one.figure == name} <= {"within noise", "equal"}


def test_a_slower_run_is_worse_and_a_faster_one_better(tmp_path: Path) -> None:
    slow, fast = loaded(tmp_path / "slow", step_ms=12.0), loaded(tmp_path / "fast", step_ms=6.0)
    for baseline, other, word in ((slow, fast, "better"), (fast, slow, "worse")):
        [pair] = compare([baseline, other]).pairs
        found = {difference.figure: difference for difference in pair.differences}
        throughput = found[FigureName.THROUGHPUT_TRAIN]
        assert throughput.effect == found[FigureName.STEP_P50].effect == word
        assert throughput.interval is not None
        assert throughput.interval[0] < throughput.difference < throughput.interval[1]
        assert found[FigureName.FINAL_METRIC].effect == "equal"


def test_one_round_cannot_be_judged(tmp_path: Path) -> None:
    [pair] = compare([loaded(tmp_path / "a", rounds=1), loaded(tmp_path / "b", step_ms=20.0)]).pairs
    assert {found.effect for found in pair.differences} == {"unknown"}
    single, means = summary_line(pair), "Percentages compare geometric means over rounds."
    assert (single.startswith("A single round has no spread"), means in single) == (True, True), "there are three"
    [pair] = compare([loaded(tmp_path / "c", rounds=1), loaded(tmp_path / "d", rounds=1)]).pairs
    assert means not in summary_line(pair)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_open": True}, "open, baseline not"),
        ({"synthetic": True, "target": None}, "synthetic, baseline not"),
        ({"nproc": 2}, "1 host × 2 devices, baseline 1 host × 1 device"),
    ],
)
def test_incomparable_runs_are_refused_and_marked_when_forced(
    tmp_path: Path, changes: dict[str, object], reason: str
) -> None:
    runs = [loaded(tmp_path / "a"), loaded(tmp_path / "b", **changes)]
    with pytest.raises(RequestError, match=reason):
        compare(runs)
    [pair] = compare(runs, force=True).pairs
    assert any(reason in why for why in pair.not_comparable)
    if "nproc" in changes:
        [pair] = compare(runs, across_scales=True).pairs
        assert pair.not_comparable == ()
        assert ("hardware", "scale") in {(fact.area, fact.name) for fact in pair.differing}


def test_another_version_of_the_case_is_refused(tmp_path: Path) -> None:
    other = measured_run(tmp_path / "b")
    for result in other.glob("*/round*/result.json"):
        result.write_text(result.read_text().replace('"case_version":1', '"case_version":2'))
    with pytest.raises(RequestError, match="version 2 of the case, baseline version 1"):
        compare([loaded(tmp_path / "a"), load_run(other)])


def test_differences_are_shown_next_to_the_figures(tmp_path: Path) -> None:
    other = measured_run(tmp_path / "b", batch_size=16, precision="fp32")
    for result in other.glob("*/round*/result.json"):
        loaded_result = json.loads(result.read_text())
        loaded_result["environment"]["started"]["library_versions"]["torch"] = "9.9"
        loaded_result["environment"]["hosts"][0]["cpu"]["model"] = "Other CPU"
        finding = {"severity": "warning", "rule": "clock-held", "expected": "none", "actual": "thermal"}
        loaded_result["findings"] = [finding, finding | {"actual": "power"}]
        result.write_text(json.dumps(loaded_result))
    plan = other / "plan.json"
    plan.write_text(json.dumps(json.loads(plan.read_text()) | {"source_sha256": "0" * 64}))
    [pair] = compare([loaded(tmp_path / "a"), load_run(other)]).pairs
    found = {(fact.area, fact.name): (fact.baseline, fact.other) for fact in pair.differing}
    assert found["software", "library torch"] == (("2.13.0",), ("9.9",))
    assert found["hardware", "cpu model"] == (("Made-up CPU",), ("Other CPU",))
    assert found["settings", "batch_size"] == (("8",), ("16",))
    assert found["settings", "precision"] == (("bf16",), ("fp32",))
    assert found["source", "AccelMark's files"] == ((), ("000000000000…",))
    assert found["audit", "clock-held"] == ((), ("warning: thermal", "warning: power"))
    assert any("warning: thermal" in line and "warning: power" in line for line in context_lines(pair.differing))


def test_cases_that_only_one_run_has_are_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no case in common"):
        compare([loaded(tmp_path / "a"), loaded(tmp_path / "b", model="other")])


def test_a_directory_of_runs_expands_to_its_runs(tmp_path: Path) -> None:
    for name in ("a", "b"):
        measured_run(tmp_path / "many" / name, rounds=1)
    (tmp_path / "many" / "half").mkdir()
    (tmp_path / "many" / "half" / "plan.json").write_text("{}")
    (tmp_path / "file.txt").touch()
    runs, (problem,) = open_sources([tmp_path / "many"])
    assert [run.summary.run for run in runs] == ["a", "b"]
    assert "in progress, or was interrupted" in problem
    for name in ("gone", "file.txt"):
        with pytest.raises(RequestError, match="is no run"):
            open_sources([tmp_path / name])


def together(*runs: LoadedRun) -> LoadedRun:
    """One run with the cases of several."""
    cases = tuple(case for run in runs for case in run.summary.cases)
    rounds = {name: result for run in runs for name, result in run.rounds.items()}
    return replace(runs[0], summary=runs[0].summary.model_copy(update={"cases": cases}), rounds=rounds)


def inferred(path: Path, engine: str, batch_size: int, precision: str = "fp32") -> LoadedRun:
    """A run as one of inference would be, figures aside: GENERATED."""
    run = loaded(path, rounds=2, precision=precision, batch_size=batch_size)
    [case] = run.summary.cases
    told = InferenceRound(compiler=engine, batch_size=batch_size, metric="accuracy", tolerance=0.01)
    variant = f"{engine} {precision} batch {batch_size}"
    moved = {f"{variant}/{name}": result for name, result in run.rounds.items()}
    case = case.model_copy(update={"task": "infer", "variant": variant, "rounds": tuple(moved)})
    return replace(
        run,
        summary=run.summary.model_copy(update={"cases": (case,)}),
        rounds={name: result.model_copy(update={"task": "infer", "inference": told}) for name, result in moved.items()},
    )


def test_cases_are_paired_by_similarity_independent_of_order(tmp_path: Path) -> None:
    one, two = loaded(tmp_path / "one", rounds=2), loaded(tmp_path / "two", rounds=2, nproc=2)
    many = together(one, two)
    for baseline, other in ((many, two), (two, many), (together(two, one), two)):
        told = compare([baseline, other])
        [pair] = told.pairs
        assert (pair.baseline.key.nproc, pair.other.key.nproc) == (2, 2)
        assert pair.not_comparable == ()
        [unmatched] = told.unmatched
        assert unmatched.startswith(f"{one.summary.cases[0].key}: only ")


def test_inferences_are_matched_by_batch_and_precision_before_the_engine(tmp_path: Path) -> None:
    few = [inferred(tmp_path / f"eager{batch}", "eager", batch) for batch in (1, 16)]
    other = [inferred(tmp_path / f"engine{batch}", "engine", batch) for batch in (16, 1)]
    told = compare([together(*few), together(*other)])
    assert [(pair.baseline.variant, pair.other.variant) for pair in told.pairs] == [
        ("eager fp32 batch 1", "engine fp32 batch 1"),
        ("eager fp32 batch 16", "engine fp32 batch 16"),
    ]
    assert [pair.not_comparable for pair in told.pairs] == [(), ()]
    [pair] = compare([few[0], inferred(tmp_path / "other", "engine", 16, "bf16")], force=True).pairs
    assert pair.not_comparable == ("precision bf16, baseline fp32", "batch_size 16, baseline 1")


RENTED = "currency: EUR\ndevices: {X1: {per_hour: 3.6}, X2: {per_hour: 7.2}}\n"


def read(tmp_path: Path, text: str) -> Prices:
    file = tmp_path / "prices.yaml"
    file.write_text(text)
    prices = read_prices(file)
    assert prices is not None
    return prices


def test_costs_of_a_rented_device(tmp_path: Path) -> None:
    values = {FigureName.THROUGHPUT_TRAIN: 1000.0, FigureName.TIME_TO_TARGET: 100.0}
    costs = costs_of(read(tmp_path, RENTED), "train", "token", "X1", 2, values.get, units_per_epoch=5e6)
    assert {cost.title: cost.value for cost in costs} == {
        "Cost per million tokens": pytest.approx(2.0), "Cost per epoch": pytest.approx(10.0),
        "Cost to the target": pytest.approx(0.2),
    }  # fmt: skip
    assert not costs_of(read(tmp_path, RENTED), "train", "token", "unknown", 2, values.get)


def test_a_bought_device_costs_its_price_and_its_power(tmp_path: Path) -> None:
    text = "{currency: EUR, power_per_kwh: 0.2, pue: 1.5, devices: {X1: {price: 17532, years: 2}}}"
    prices = read(tmp_path, text)
    assert prices.device_hour("X1", 1000.0) == pytest.approx(1.0 + 0.3)
    assert prices.device_hour("X1", None) is None


def test_page_and_comparison_have_costs_and_a_buyer_s_answers(tmp_path: Path) -> None:
    prices = read(tmp_path, RENTED)
    slow, fast = loaded(tmp_path / "slow"), loaded(tmp_path / "fast", step_ms=4.0, hardware="X2")
    assert "Cost per million tokens" in render_page(slow, prices)
    assert "Cost per million tokens" not in render_page(slow)
    comparison = compare([slow, fast])
    (line,) = buyer_lines(comparison, prices)
    assert line.chips == "X2 against X1"
    assert line.faster.startswith("+")
    assert " to " in line.faster
    assert next(title for title, _, _ in line.costs) == "Cost per million tokens"
    page = render_comparison(comparison, prices=prices)
    assert page.index("For buyers") < page.index("Other differences")
    assert not buyer_lines(compare([slow, loaded(tmp_path / "other")]))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("{currency: EUR, devices: {X1: {per_hour: -1}}}", "devices.X1.per_hour"),
        ("{currency: EUR, devices: {X1: {price: 1000}}}", "devices.X1"),
        ("devices: {X1: {per_hour: 1}}", "currency"),
    ],
)
def test_bad_prices_are_one_error(tmp_path: Path, text: str, key: str) -> None:
    with pytest.raises(SpecError) as caught:
        read(tmp_path, text)
    assert [problem.key for problem in caught.value.problems] == [key]

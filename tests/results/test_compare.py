"""Runs against runs, prices and claims: intervals, refusals, costs; shipped claims, published results, bad claims."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from accelmark.cli.main import app
from accelmark.compat.published import read_published
from accelmark.report.comparison import buyer_lines, lines_of, render_comparison, summary_line
from accelmark.report.run_page import render_page
from accelmark.results.claims import CLAIMS, Claim, Reproduction, claim_files, load_claim, load_result, reproduce
from accelmark.results.comparison import compare, context_lines
from accelmark.results.figures import FigureName
from accelmark.results.prices import Prices, costs_of, read_prices
from accelmark.results.schema import Figure, InferenceRound
from accelmark.results.statistics import mean_difference
from accelmark.results.store.loaded_run import LoadedRun, load_run
from accelmark.spec.errors import RequestError, SpecError
from accelmark.spec.number_format import THIN
from tests.made_run import change_json, loaded, measured_run


def test_the_interval_is_welchs() -> None:
    """Source: R's documentation of ``t.test``, data set ``sleep``."""
    drug_1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]
    drug_2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]
    difference, interval = mean_difference(drug_2, drug_1)
    assert difference == pytest.approx(-1.58)
    assert interval == pytest.approx((-3.3654832, 0.2054832), abs=1e-7)


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
        ({"case_version": 2}, "version 2 of the case, baseline version 1"),
    ],
)
def test_incomparable_runs_are_refused_unless_forced(tmp_path: Path, changes: dict[str, object], reason: str) -> None:
    runs = [loaded(tmp_path / "a"), loaded(tmp_path / "b", **changes)]
    with pytest.raises(RequestError, match=reason):
        compare(runs)
    [pair] = compare(runs, force=True).pairs
    assert any(reason in why for why in pair.not_comparable)
    if "nproc" in changes:
        [pair] = compare(runs, across_scales=True).pairs
        assert pair.not_comparable == ()
        assert ("hardware", "scale") in {(fact.area, fact.name) for fact in pair.differing}


def test_differences_are_shown_next_to_the_figures(tmp_path: Path) -> None:
    other = measured_run(tmp_path / "b", batch_size=16, precision="fp32")
    for result in other.glob("*/round*/result.json"):
        loaded_result = json.loads(result.read_text())
        loaded_result["environment"]["started"]["library_versions"]["torch"] = "9.9"
        loaded_result["environment"]["hosts"][0]["cpu"]["model"] = "Other CPU"
        finding = {"severity": "warning", "rule": "clock-held", "expected": "none", "actual": "thermal"}
        loaded_result["findings"] = [finding, finding | {"actual": "power"}]
        result.write_text(json.dumps(loaded_result))
    change_json(other / "plan.json", source_sha256="0" * 64)
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
    rounds = {name: one.model_copy(update={"task": "infer", "inference": told}) for name, one in moved.items()}
    return replace(run, summary=run.summary.model_copy(update={"cases": (case,)}), rounds=rounds)


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


RECORDED = Path(__file__).with_name("recorded")
LLAMA, RESNET = RECORDED / "h100_llama_1.3b.result.json", RECORDED / "h100_resnet50.result.json"
URL = "https://github.com/mlcommons/training_results_v4.0"


def checked(claim: str, result: Path) -> Reproduction:
    return reproduce(*load_claim(claim), load_result(result))


@pytest.mark.parametrize("name", claim_files())
def test_a_shipped_claim_has_a_source_and_a_unit_that_fits(name: str) -> None:
    _, claim = load_claim(name)
    assert claim.source.document
    assert claim.tolerance.why


def test_a_run_that_was_easier_than_the_claim_does_not_beat_it() -> None:
    found = checked("llm-foundry-1.3b-h100", LLAMA)
    assert found.verdict == "NOT COMPARABLE"
    assert found.advantage == pytest.approx(0.096, abs=0.001)
    assert [one.kind for one in found.differences if one.favours == "run"] == ["data", "scale", "model"]
    assert {one.kind for one in found.differences if one.favours == "claim"} == {"batch"}
    assert len(found.reasons) == 2


def test_a_run_that_was_easier_and_is_slower_is_short() -> None:
    found = checked("mlperf-resnet50-h100", RESNET)
    assert found.text == "SHORT BY 20.7 %"
    assert found.differences[0].kind == "batch"
    assert {one.kind for one in found.differences} == {"batch", "software", "data", "scale"}
    assert found.interval is None
    assert found.interval_reason is not None


@pytest.mark.parametrize(
    ("claim", "result"), [("accelmark-llama-1.3b-h100", LLAMA), ("accelmark-resnet50-h100", RESNET)]
)
def test_a_run_reproduces_its_own_claim(claim: str, result: Path) -> None:
    found = checked(claim, result)
    assert found.verdict == "REPRODUCED"
    assert not found.differences


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({"value": 40000}, "BETTER"),
        ({"value": 60000}, "SHORT"),
        ({"hardware": "A100"}, "NOT COMPARABLE"),
        ({"settings": {"model.seq_length": 4096}}, "NOT COMPARABLE"),
        ({"figure": "throughput_train", "nproc": 8}, "NOT COMPARABLE"),
        ({"figure": "final_metric", "better": "lower", "steady": False}, "NOT COMPARABLE"),
    ],
)
def test_verdicts(changes: dict[str, Any], verdict: str) -> None:
    _, claim = load_claim("accelmark-llama-1.3b-h100")
    found = reproduce("changed", claim.model_copy(update=Claim.model_validate(
        claim.model_dump() | changes).model_dump(include=set(changes))), load_result(LLAMA))  # fmt: skip
    assert found.verdict == verdict


def test_a_run_of_another_case_is_refused() -> None:
    with pytest.raises(RequestError, match="resnet50"):
        checked("mlperf-resnet50-h100", LLAMA)


def test_claims_of_mlperf_and_flagperf_are_read() -> None:
    ((name, mlperf),) = read_published(RECORDED / "mlperf_resnet_result.txt", URL)
    assert name == "mlperf-resnet-h100x8"
    assert mlperf.value == pytest.approx(57209.488 / 8, abs=0.1)
    assert (mlperf.nproc, mlperf.settings["batch_size"]) == (8, 400)
    training = [claim for _, claim in read_published(RECORDED / "llama3_8B-megatron/README.md", URL)]
    assert [(one.hardware, one.num_devices, one.precision, one.value) for one in training] == [
        ("A100", 8, "bf16", 3698.7), ("H100", 8, "fp8", 10486), ("H100", 16, "bf16", 7914),
    ]  # fmt: skip
    ((_, inference),) = read_published(RECORDED / "resnet50/README.md", URL)
    assert (inference.hardware, inference.figure, inference.value) == ("A100", "inference_core", 12406)


def test_a_summary_of_mlperf_inference_is_named_by_its_directories(tmp_path: Path) -> None:
    file = tmp_path / "DGX-H100_H100-SXM-80GBx1_TRT/resnet50/Offline/performance/run_1/mlperf_log_summary.txt"
    file.parent.mkdir(parents=True)
    file.write_text("MLPerf Results Summary\nScenario : Offline\nSamples per second: 88526\nResult is : VALID\n")
    ((_, claim),) = read_published(file, URL)
    assert (claim.case, claim.hardware, claim.nproc, claim.value) == ("resnet50", "H100", 1, 88526)


def test_the_command_line_checks_a_result_and_writes_page_and_json(tmp_path: Path) -> None:
    runner, page = CliRunner(), tmp_path / "page.html"
    done = runner.invoke(app, ["reproduce", "mlperf-resnet50-h100", "--check", str(RESNET), "-o", str(page), "--json"])
    assert done.exit_code == 1
    assert json.loads(done.stdout) == json.loads(page.with_suffix(".json").read_text())
    assert "SHORT BY 20.7" in page.read_text()
    made = runner.invoke(app, ["import", "claims", str(RECORDED / "mlperf_resnet_result.txt"), "--url", URL,
                               "--out", str(tmp_path / "claims")])  # fmt: skip
    assert made.exit_code == 0, made.output
    again = ["reproduce", str(tmp_path / "claims/mlperf-resnet-h100x8.yaml"), "--check", str(RESNET)]
    assert "SHORT BY" in runner.invoke(app, again).stdout


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"source": None}, "source"),
        ({"unit": "images/s"}, "unit"),
        ({"value": -1}, "value"),
        ({"tolerance": {"ratio": 0.05}}, "tolerance.why"),
    ],
)
def test_a_bad_claim_is_one_error(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    values = yaml.safe_load((CLAIMS / "llm-foundry-1.3b-h100.yaml").read_text()) | changes
    file = tmp_path / "claim.yaml"
    file.write_text(yaml.safe_dump({name: value for name, value in values.items() if value is not None}))
    with pytest.raises(SpecError) as caught:
        load_claim(str(file))
    assert [problem.key for problem in caught.value.problems] == [key]

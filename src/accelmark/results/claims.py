"""Claims: figures that others published, and the comparison of a run with one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field, PositiveFloat, model_validator

from accelmark.results.comparison import value_text
from accelmark.results.figures import FigureName, unit_of
from accelmark.results.rounds.summary import aggregate, spread
from accelmark.results.schema import CaseResult, Figure, Mark, RoundResult, Spread, Summary
from accelmark.results.store.loaded_run import LoadedCase, LoadedRun, load_round
from accelmark.spec.errors import Problem, RequestError, RunError, SpecError, nearest
from accelmark.spec.model import FiniteSpec, Spec, parse, read_yaml
from accelmark.spec.number_format import counted, digits, percent, quantity
from accelmark.spec.plugins.catalog import load_case, plugin_directories
from accelmark.spec.settings.training import Scalar

CLAIMS: Final = Path(__file__).parents[1] / "claims"

Favoured = Literal["run", "claim", "unknown"]
Kind = Literal[
    "model", "precision", "data", "recomputation", "compilation", "scale", "batch", "parallelism", "power limit",
    "software",
]  # fmt: skip
_COSTS: Final[dict[Kind, str]] = {
    "model": "speed changes as the work per unit does",
    "precision": "at most the ratio of the chip's peak rates",
    "data": "reading and decoding may limit an accelerator; synthetic data costs nothing",
    "recomputation": "full recomputation adds a forward pass: a third of the work",
    "compilation": "fused kernels use less memory bandwidth; eager execution waits for the host",
    "scale": "gradients, weights or activations are exchanged between devices",
    "batch": "a small batch does not fill the device",
    "parallelism": "sharding exchanges weights in each step",
    "power limit": "at most the ratio of the limits",
    "software": "kernels differ between versions",
}
"""What may differ, by the cost that is expected of it, largest first -> why it costs speed."""
_PARTS: Final[tuple[tuple[str, Kind], ...]] = (
    ("model.", "model"), ("prompts.", "model"), ("batch_size", "batch"), ("gradient_accumulation_steps", "batch"),
    ("load.", "batch"), ("activation_checkpointing", "recomputation"), ("compile", "compilation"),
    ("scenarios", "model"), ("compiler", "software"), ("server", "software"), ("parallelism", "parallelism"),
    ("zero.", "parallelism"), ("tensor", "parallelism"),
)  # fmt: skip
_ORDERED: Final[dict[str, tuple[Any, ...]]] = {
    "activation_checkpointing": ("full", "selective", "off"),
    "compile": ("off", "default", "reduce-overhead", "max-autotune"),
}
"""Setting -> its values, slowest first."""


class Source(FiniteSpec):
    """Where a figure was published."""

    document: str = Field(min_length=1)
    """Repository and path, or title and publisher."""
    url: str = Field(pattern=r"^https?://\S+$")
    commit: str | None = None
    place: str | None = None
    date: str | None = None
    """When it was measured or published, as the document states it."""


class Tolerance(FiniteSpec):
    """How far a run may be from a claim that it reproduces."""

    ratio: float = Field(gt=0, le=0.5)
    why: str = Field(min_length=1)


class Difference(FiniteSpec):
    """A condition of a run that differs from the claim's."""

    kind: Kind
    claimed: str
    measured: str
    favours: Favoured
    """The side that is faster for it."""
    at_most: float | None = None
    """The largest effect that it can have, as a share; null: not known."""

    @property
    def text(self) -> str:
        """The difference in words."""
        side = {"run": "; favours the run", "claim": "; favours the claim", "unknown": ""}[self.favours]
        bound = "" if self.at_most is None else f" by at most {percent(self.at_most)}"
        return f"{self.kind}: {self.measured}, claimed {self.claimed}{side}{bound} ({_COSTS[self.kind]})"


class Claim(FiniteSpec):
    """A published figure, the conditions that its source states, and the run of AccelMark that comes closest."""

    title: str
    case: str
    """AccelMark's case that comes closest."""
    framework: str = "pytorch"
    task: Literal["train", "infer", "serve"]
    hardware: str
    """The chip, as in keys."""
    nnodes: int = Field(default=1, ge=1)
    nproc: int = Field(default=1, ge=1)
    precision: str | None
    """null: the source does not state it."""
    data: Literal["real", "synthetic"] | None
    figure: FigureName
    """The figure of AccelMark that is defined as the source's."""
    steady: bool = False
    """Whether the source leaves the first steps out: a training's rate is then the rate of its median step."""
    value: PositiveFloat
    unit: str
    better: Literal["higher", "lower"] | None = None
    """Required where the figure itself does not say it."""
    flops_per_unit: PositiveFloat | None = None
    """Of the source's model, by the source's formula."""
    settings: dict[str, Scalar | None] = Field(default_factory=dict)
    """Settings that the source states, by AccelMark's names."""
    run: dict[str, Any] = Field(default_factory=dict)
    """Further settings of the run of AccelMark: its length, the shape of its model."""
    power_limit_w: PositiveFloat | None = None
    software: str | None = None
    differs: tuple[Difference, ...] = ()
    """Conditions that no run of the case can meet."""
    source: Source
    not_stated: tuple[str, ...] = ()
    tolerance: Tolerance

    @model_validator(mode="after")
    def _directed(self) -> Claim:
        if self.figure.info.better == "neither" and self.better is None:
            raise ValueError(f"{self.figure.value}: state with 'better' whether higher or lower is better")
        return self

    @property
    def num_devices(self) -> int:
        """Devices of the published run."""
        return self.nnodes * self.nproc

    @property
    def is_rate(self) -> bool:
        """Whether higher is better."""
        return (self.better or self.figure.info.better) == "higher"


Verdict = Literal["REPRODUCED", "SHORT", "BETTER", "NOT COMPARABLE"]


class Reproduction(Spec):
    """The comparison of a run with a claim."""

    schema_version: Literal[1] = 1
    claim: str
    title: str
    source: Source
    verdict: Verdict
    text: str
    """``SHORT BY 20.7 %``."""
    claimed: float
    measured: float | None
    unit: str
    advantage: float | None
    """Speed of the run over the claimed speed, minus 1; where lower is better, the inverse ratio."""
    interval: tuple[float, float] | None
    interval_reason: str | None
    tolerance: Tolerance
    reasons: tuple[str, ...]
    differences: tuple[Difference, ...]
    """By expected cost; those that can explain the verdict first."""
    not_stated: tuple[str, ...]
    run: str
    started_at: str
    run_verdict: str
    marks: tuple[Mark, ...]
    num_rounds: int


def claim_files() -> dict[str, Path]:
    """Return the file of each claim by name: those shipped, and ``claims/`` below each directory of plug-ins."""
    places = [CLAIMS, *(directory / "claims" for directory in plugin_directories())]
    return {file.stem: file for place in places for file in sorted(place.glob("*.yaml"))}


def load_claim(name: str) -> tuple[str, Claim]:
    """Read a claim by its name or the path of its file; raises RequestError or SpecError."""
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        known = claim_files()
        if name not in known:
            raise RequestError(f"unknown claim {name!r} ({nearest(name, known)})")
        path = known[name]
    claim = parse(Claim, read_yaml(path), str(path))
    require_unit(claim, str(path))
    return path.stem, claim


def require_unit(claim: Claim, where: str) -> None:
    """Raise SpecError where a claim does not use the unit of its figure and case."""
    spec = load_case(claim.case)
    if claim.task not in spec.tasks:
        raise SpecError([Problem(where, "task", f"{claim.case} has no task {claim.task!r}")])
    part = spec.train if claim.task == "train" else spec.infer
    expected = unit_of(claim.figure, "token" if claim.task == "serve" or part is None else part.unit)
    if claim.unit != expected:
        what = f"{claim.unit!r} does not fit: {claim.figure.value} of {claim.case} is in {expected or 'no unit'!r}"
        raise SpecError([Problem(where, "unit", what)])


def reproduce(name: str, claim: Claim, run: LoadedRun) -> Reproduction:
    """Compare a run with a claim; of several cases, the closest."""
    work = (claim.case, claim.task)
    cases = [case for case in run.without_trials if (case.result.key.model, case.result.task) == work and case.rounds]
    if not cases:
        raise RequestError(f"{run.path}: has no round of {claim.case} ({claim.task}), which {name} is about")
    return max((_reproduction(name, claim, case) for case in cases), key=lambda found: -len(found.reasons))


def _reproduction(name: str, claim: Claim, case: LoadedCase) -> Reproduction:
    measured = _spread(claim, case)
    differences = list(_differences(claim, case.rounds[0], case.result.key.world_size, case.result.marks))

    def speed(figure: float) -> float:
        return (figure / claim.value if claim.is_rate else claim.value / figure) - 1

    advantage = None if measured.mean is None else speed(measured.mean) if measured.mean else -1.0
    bounds = sorted(map(speed, measured.ci95)) if measured.ci95 is not None and min(measured.ci95) > 0 else []
    reasons = [*_unfit(claim, case), *([] if measured.mean else [measured.reason or "the figure was not measured"])]
    verdict: Verdict = "NOT COMPARABLE"
    limit = claim.tolerance.ratio
    if not reasons and advantage is not None:
        verdict = "SHORT" if advantage < -limit else "BETTER" if advantage > limit else "REPRODUCED"
        eased = [gap for gap in differences if gap.favours == "run" and not (gap.at_most or 1) <= limit]
        if verdict != "SHORT" and eased:
            verdict, easier = "NOT COMPARABLE", "the run was easier than the claim's"
            reasons = [f"{easier}: {gap.kind}: {gap.measured}, claimed {gap.claimed}" for gap in eased]
    explaining = ["run", "unknown", "claim"] if (advantage or 0) > 0 else ["claim", "unknown", "run"]
    kinds = list(_COSTS)

    def rank(gap: Difference) -> tuple[object, ...]:
        return (explaining.index(gap.favours), (gap.at_most or 1) <= limit, kinds.index(gap.kind))

    size = "" if advantage is None else f" BY {digits(100 * abs(advantage), 3)} %"
    return Reproduction(
        claim=name,
        title=claim.title,
        source=claim.source,
        verdict=verdict,
        text=verdict + (size if verdict in ("SHORT", "BETTER") else ""),
        claimed=claim.value,
        measured=measured.mean,
        unit=claim.unit,
        advantage=advantage,
        interval=(bounds[0], bounds[1]) if bounds else None,
        interval_reason=None if bounds else f"{counted(measured.num_rounds, 'round')}; an interval needs two",
        tolerance=claim.tolerance,
        reasons=tuple(reasons),
        differences=tuple(sorted(differences, key=rank)),
        not_stated=claim.not_stated,
        run=case.run.summary.run,
        started_at=case.run.summary.started_at,
        run_verdict=case.result.verdict,
        marks=case.result.marks,
        num_rounds=measured.num_rounds,
    )


def _spread(claim: Claim, case: LoadedCase) -> Spread:
    """Return the figure over rounds; of a steady training, scaled from its mean step to its median step."""
    values = []
    for result in case.succeeded:
        figure = result.figures.get(claim.figure) or Figure(value=None, reason=f"the run has no {claim.figure.value}")
        rate = figure.value
        if claim.steady and rate is not None:
            seconds, median_ms = map(result.value_of, (FigureName.TRAIN_NO_EVAL_TIME, FigureName.STEP_P50))
            if not seconds or not median_ms or not result.num_steps:
                figure = Figure(value=None, reason="the median step is not known")
            else:
                mean_ms = 1e3 * seconds / result.num_steps
                figure = Figure(value=rate * (mean_ms / median_ms if claim.is_rate else median_ms / mean_ms))
        values.append(figure)
    return spread(values)


def _unfit(claim: Claim, case: LoadedCase) -> Iterator[str]:
    """Yield the reasons for which figures of a run say nothing about a claim."""
    first, key = case.rounds[0], case.result.key
    if key.hardware != claim.hardware:
        yield f"the run is on {key.hardware}, the claim on {claim.hardware}"
    figure = claim.figure.info
    grows = "per_device" not in claim.figure.value and figure.unit not in ("ratio", "") and figure.better != "neither"
    if grows and key.world_size != claim.num_devices:
        yield f"the run has {key.world_size} devices, the claim {claim.num_devices}; the figure covers all of them"
    if "edited" in case.result.marks:
        yield "files of the run were edited"
    errors = [finding for finding in case.result.findings if finding.severity == "error"]
    if case.result.verdict == "INVALID" and "synthetic" not in case.result.marks:
        yield f"the run is INVALID: {errors[0] if errors else '; '.join(case.result.reasons)}"
    for setting in ("model.seq_length", "prompts.input.mean", "prompts.output.mean", "scenarios"):
        stated, ours = claim.settings.get(setting), first.settings.get(setting)
        if stated is not None and (ours is None or ours.value != stated):
            yield f"{setting} is {value_text(ours and ours.value)} in the run, {value_text(stated)} in the claim"
    for difference in claim.differs:
        if difference.kind == "model" and difference.favours == "unknown":
            yield f"another model: {difference.measured}, claimed {difference.claimed}"


def _differences(claim: Claim, first: RoundResult, num_devices: int, marks: Iterable[str]) -> Iterator[Difference]:
    settings = {name: setting.value for name, setting in first.settings.items()}
    peaks = first.chip.peaks.model_dump(exclude_none=True) if first.chip else {}
    synthetic = "synthetic" in marks
    yield from planned_differences(claim, settings, first.precision, num_devices, synthetic=synthetic, peaks=peaks)
    names = (FigureName.FLOPS_PER_SAMPLE, FigureName.THROUGHPUT_TRAIN, FigureName.TRAIN_NO_EVAL_TIME)
    flops, rate, seconds = map(first.value_of, names)
    if claim.flops_per_unit and flops and rate and seconds:
        units = rate * seconds
        work = flops * first.num_samples / units
        ratio = work / claim.flops_per_unit
        if abs(ratio - 1) > 1e-3:
            theirs, ours = (f"{quantity(value, 'FLOP')} per {first.unit}" for value in (claim.flops_per_unit, work))
            yield _difference("model", theirs, ours, "run" if ratio < 1 else "claim", max(ratio, 1 / ratio) - 1)
    if claim.power_limit_w is not None:
        devices = [device for host in first.environment.hosts for device in host.get("devices") or ()]
        limits = [device.get("power_limit_w") for device in devices if isinstance(device, dict)]
        limit = limits[0] if limits and isinstance(limits[0], int | float) else None
        if limit != claim.power_limit_w:
            favours: Favoured = "unknown" if limit is None else "run" if limit > claim.power_limit_w else "claim"
            at_most = None if limit is None else max(limit / claim.power_limit_w, claim.power_limit_w / limit) - 1
            measured = f"{limit:g} W" if limit else "not recorded"
            yield _difference("power limit", f"{claim.power_limit_w:g} W", measured, favours, at_most)
    version = first.environment.started.get("framework_version")
    ours_text = f"{first.environment.started.get('framework', first.key.framework)} {version or ''}".strip()
    if claim.software is not None and claim.software.casefold() != ours_text.casefold():
        yield _difference("software", claim.software, ours_text, "unknown")


def _difference(kind: Kind, claimed: str, measured: str, favours: Favoured, at_most: float | None = None) -> Difference:
    return Difference(kind=kind, claimed=claimed, measured=measured, favours=favours, at_most=at_most)


def planned_differences(
    claim: Claim,
    settings: Mapping[str, Any],
    precision: str,
    num_devices: int,
    *,
    synthetic: bool,
    peaks: Mapping[str, float] | None = None,
) -> Iterator[Difference]:
    """Yield the differences that are known before a run: ``settings`` are its resolved settings by dotted key."""
    yield from claim.differs
    if claim.data is not None and synthetic != (claim.data == "synthetic"):
        ours = "synthetic data" if synthetic else "real data"
        yield _difference("data", f"{claim.data} data", ours, "run" if synthetic else "claim")
    if claim.precision is not None and precision != claim.precision:
        peak, claimed = ((peaks or {}).get(name) for name in (precision, claim.precision))
        favours: Favoured = "unknown" if not peak or not claimed else "run" if peak > claimed else "claim"
        at_most = max(peak / claimed, claimed / peak) - 1 if peak and claimed else None
        yield _difference("precision", claim.precision, precision, favours, at_most)
    if num_devices != claim.num_devices:
        favours = "run" if num_devices < claim.num_devices else "claim"
        yield _difference("scale", counted(claim.num_devices, "device"), counted(num_devices, "device"), favours)
    for name, stated in claim.settings.items():
        value = settings.get(name)
        if stated is None or value == stated:
            continue
        kind: Kind = next((part for prefix, part in _PARTS if name.startswith(prefix)), "software")
        favours = "unknown"
        if (order := _ORDERED.get(name, ())) and value in order and stated in order:
            favours = "run" if order.index(value) > order.index(stated) else "claim"
        elif kind == "batch" and isinstance(value, int | float) and isinstance(stated, int | float):
            favours = "run" if value > stated else "claim"
        yield _difference(kind, f"{name} {value_text(stated)}", f"{name} {value_text(value)}", favours)


def load_result(path: Path) -> LoadedRun:
    """Return a run of one case from the ``result.json`` of its only round, which no manifest covers."""
    result = load_round(path)
    name = f"{result.key.slug}/round{result.round}"
    synthetic = "synthetic" in result.marks
    reason = "only result.json is available: nothing could be verified" + ("; synthetic data" if synthetic else "")
    case = CaseResult(
        key=result.key, task=result.task, unit=result.unit, state=result.state, converged=result.converged,
        verdict="INVALID" if synthetic else "OPEN", reasons=(reason,), marks=result.marks, figures=aggregate([result]),
        rounds=(name,), findings=result.findings,
    )  # fmt: skip
    summary = Summary(
        accelmark_version=str((result.environment.hosts or ({},))[0].get("accelmark", "unknown")),
        run=path.name, started_at=result.started_at, finished_at="", state=result.state, vendor=result.vendor,
        cases=(case,),
    )  # fmt: skip
    if result.state != "succeeded":
        raise RunError(f"{path}: the round did not succeed: {result.reason}")
    return LoadedRun(path, summary, {name: result})

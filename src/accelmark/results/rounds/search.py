"""The figures of an AutoML search, and a search read as a run of one case and one round for tables and comparisons.

Read from ``report.json`` (figures), ``automl.json`` (configuration), the first session in ``journal.jsonl`` and the
header of its telemetry (chip).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from accelmark.results.figures import FigureName as F
from accelmark.results.read.round_dir import json_lines
from accelmark.results.read.telemetry import read_samples
from accelmark.results.rounds.summary import spread
from accelmark.results.schema import CaseResult, Environment, Figure, JobState, RoundResult, Summary, Verdict
from accelmark.results.store.loaded_run import SCHEMA_VERSION, LoadedRun, RunFiles, load_file
from accelmark.spec.errors import AccelmarkError, RunError
from accelmark.spec.key import CaseKey
from accelmark.spec.layers import Provenance, flatten
from accelmark.spec.rules import SearchRules, shipped_rules

CONFIG_FILE: Final = "automl.json"
SEARCH_REPORT: Final = "report.json"
_JOURNAL: Final = "journal.jsonl"
_RECORD: Final = "telemetry.jsonl"
_ROUND: Final = "search"
_DIGITS: Final = 12
_ENDS: Final = {
    "trials": "all its trials are done",
    "time": "its time is used up",
    "asked": "it was asked to stop",
    "exhausted": "no network within its limits allows a further morph",
    "spent": "its operations, or its time for trials, are used up",
}
_STATES: Final[dict[str, JobState]] = {
    "over": "succeeded", "stopped": "cancelled", "interrupted": "lost", "running": "running",
}  # fmt: skip
_NOT_COMPARED: Final = {"name", "dataset.directory", "dataset.train_directory", "dataset.held_out_directory"}

_CONSUMPTION: Final = (F.MEAN_POWER, F.ENERGY, F.DEVICE_UTILISATION, F.CPU_UTILISATION)


class _Part(BaseModel):
    """A part of ``report.json``; unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)


class SearchPoint(_Part):
    """The figures of a search at one time; time in hours since the first trial's start."""

    time_h: float
    operations: float
    score: float
    error: float | None
    search_error: float | None
    regulated_score: float | None
    regulated_search_score: float | None


class SearchVerdict(_Part):
    """The audit's verdict by a rule set, every reason why a search is not VALID, and disclosures."""

    rules: str
    version: int
    rules_sha256: str = ""
    verdict: Verdict
    reasons: tuple[str, ...]
    disclosures: tuple[str, ...]

    @property
    def by_rules(self) -> str:
        """The rule set with its version and, where it was recorded, the start of its hash."""
        digest = f", SHA-256 {self.rules_sha256[:_DIGITS]}" if self.rules_sha256 else ""
        return f"rules {self.rules} (version {self.version}{digest})"


class SearchUtilisation(_Part):
    """Use of the workers' time, in seconds over all workers; ``idle_share`` null before any trial ran."""

    workers: int
    available_s: float
    training_s: float
    evaluating_s: float
    data_wait_s: float = 0.0
    """The part of ``training_s`` spent waiting for data, which counts as idle."""
    idle_share: float | None


class SearchConsumption(_Part):
    """Power and utilization of the machine while trials ran; null with a reason in ``reasons``."""

    mean_power_w: float | None = None
    energy_j: float | None = None
    device_utilisation: float | None = None
    cpu_utilisation: float | None = None
    reasons: dict[str, str] = {}


def why_ended(reason: str) -> str:
    """Return the reason for which a search ended, as a clause."""
    return _ENDS.get(reason, reason)


class SearchSummary(_Part):
    """All figures of a search: ``report.json``."""

    schema_version: Literal[1] = SCHEMA_VERSION
    run: str
    status: Literal["running", "over", "stopped", "interrupted"] = Field(
        validation_alias=AliasChoices("status", "standing"), serialization_alias="standing"
    )
    ended_because: str | None
    duration_s: float
    counting: str
    dataset: str
    method: str
    trials: dict[str, int]
    """Number of trials by status."""
    trials_started: int
    epochs: int
    trained_images: int
    final: SearchPoint
    series: tuple[SearchPoint, ...]
    utilisation: SearchUtilisation
    best_trial: int | None
    consumption: SearchConsumption
    judgement: SearchVerdict
    interruptions: int
    failures: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    journal_bytes: int | None = None
    """Length of the journal that the figures are of."""

    @property
    def outcome(self) -> str:
        """The status, with the reason where it has ended."""
        status = "ended" if self.status == "over" else self.status
        return status if self.ended_because is None else f"{status}: {why_ended(self.ended_because)}"

    def to_json(self) -> str:
        """Return the text of ``report.json``."""
        return self.model_dump_json(indent=2, by_alias=True)


def search_consumption(telemetry: Path | None, host: str, span: tuple[float, float], images: int) -> SearchConsumption:
    """Compute power and utilization from a telemetry directory within a ``span`` of the host's monotonic clock."""
    if telemetry is None or not (telemetry / _RECORD).is_file():
        reason = "no telemetry was recorded; hosts of a cluster have their own monitoring"
    elif span[1] <= span[0]:
        reason = "no epoch ended in the last session"
    else:
        from accelmark.results.rounds.consumption import consumption_figures  # imports numpy

        try:
            samples = read_samples(telemetry / _RECORD)
        except AccelmarkError as error:
            return SearchConsumption(reasons=dict.fromkeys(map(str, _CONSUMPTION), str(error)))
        device_type = "accelerator" if samples.devices else "cpu"
        figures, warnings = consumption_figures({host: (samples, [span])}, images, device_type, "")
        reasons = {name.value: str(figures[name].reason) for name in _CONSUMPTION if figures[name].reason}
        values = {name.value: figures[name].value for name in _CONSUMPTION}
        remarks = {"warnings": "; ".join(warnings)} if warnings else {}
        return SearchConsumption.model_validate({**values, "reasons": reasons | remarks})
    return SearchConsumption(reasons=dict.fromkeys(map(str, _CONSUMPTION), reason))


def is_search(path: Path) -> bool:
    """Return whether a directory is an AutoML search's."""
    return (path / CONFIG_FILE).is_file()


def load_search(path: Path) -> LoadedRun:
    """Read a search as a run of one case. Raises RunError."""
    from accelmark.spec.plugins.catalog import load_vendor

    files = RunFiles(path)
    if not files.has(SEARCH_REPORT):
        raise RunError(f"{path}: this search has no report: resume it, or run 'accelmark automl report'")
    report, config = load_file(SearchSummary, files, SEARCH_REPORT), files.json(CONFIG_FILE)
    if not config:
        raise RunError(f"{path / CONFIG_FILE}: cannot be read as a JSON object")
    session = next((line for line in json_lines(path / _JOURNAL) if line.get("event") == "session-began"), {})
    headers = (line.get("header") for line in json_lines(*sorted(path.glob(f"telemetry/session*/{_RECORD}"))))
    header: dict[str, Any] = next((header for header in headers if isinstance(header, dict)), {})
    vendor = str(header.get("vendor") or "unknown")
    device = next((str(device["name"]) for device in header.get("devices") or () if device.get("name")), None)
    training, state = config.get("training"), _STATES[report.status]
    hardware = vendor.upper()
    with suppress(AccelmarkError):
        if device and (chip := load_vendor(vendor).chip_of(device, None)):
            hardware = chip.name
    nproc, marks = max(report.utilisation.workers, 1), () if state == "succeeded" else ("partial",)
    facts: dict[str, Any] = {
        "key": CaseKey(model=f"automl-{report.dataset}", framework="pytorch", hardware=hardware, nproc=nproc),
        "task": "automl", "unit": "image", "state": state, "converged": None, "marks": marks,
    }  # fmt: skip
    values = {name: value for name, value in flatten(config).items() if name not in _NOT_COMPARED}
    host = {"host": str(session.get("host") or "")}
    result = RoundResult(
        **facts,
        round=1,
        case_version=report.judgement.version,
        vendor=vendor,
        figures=_figures(report),
        reason=None if state == "succeeded" else f"the search was {report.status} ({report.ended_because or 'no end'})",
        precision=str((training.get("precision") if isinstance(training, dict) else None) or "unknown"),
        started_at=str(session.get("at") or ""),
        environment=Environment(hosts=(host,), started={"device_name": device} if device else {}),
        settings={name: Provenance(value=value, layer=CONFIG_FILE) for name, value in values.items()},
    )
    case = CaseResult(
        **facts,
        variant=_variant(report, config),
        verdict=report.judgement.verdict,
        reasons=report.judgement.reasons,
        figures={name: spread([figure]) for name, figure in result.figures.items()},
        rounds=(_ROUND,),
        warnings=(*report.judgement.disclosures, *report.failures),
    )
    summary = Summary(
        accelmark_version=str(session.get("accelmark_version") or "unknown"),
        run=path.resolve().name,
        started_at=result.started_at,
        finished_at="",
        state=state,
        vendor=vendor,
        cases=(case,),
    )
    return LoadedRun(path, summary, {_ROUND: result})


def _variant(report: SearchSummary, config: dict[str, Any]) -> str:
    """Return what comparable scores have in common: seed network, rules, counting mode, part of the data."""
    limit = (config.get("dataset") or {}).get("limit")
    rules = report.judgement.rules
    if rules not in shipped_rules(SearchRules, "searches"):  # other files may have that name
        rules = f"{rules} {report.judgement.rules_sha256[:_DIGITS]}".strip()
    parts = [f"from {config.get('network', 'an unknown network')}", f"rules {rules}"]
    parts += [f"counted by {report.counting}", *([f"{limit:,} images"] if isinstance(limit, int) else [])]
    return ", ".join(parts)


def _figures(report: SearchSummary) -> dict[F, Figure]:
    final, used = report.final, report.consumption
    no_error, not_measured = "no trial was evaluated on the held-out split", "was not measured"
    known: tuple[tuple[F, float | None, str], ...] = (
        (F.SEARCH_SCORE, final.score, ""),
        (F.SEARCH_REGULATED_SCORE, final.regulated_score, no_error),
        (F.SEARCH_HELD_OUT_ERROR, final.error, no_error),
        (F.SEARCH_VALIDATION_ERROR, final.search_error, "no trial was validated"),
        (F.SEARCH_OPERATIONS, final.operations, ""),
        (F.SEARCH_TIME, report.duration_s, ""),
        (F.SEARCH_IDLE_SHARE, report.utilisation.idle_share, "nothing ran"),
        (F.SEARCH_TRIALS, float(report.trials.get("finished", 0)), ""),
        (F.SEARCH_IMAGES, float(report.trained_images), ""),
        *((name, getattr(used, name), used.reasons.get(name) or not_measured) for name in _CONSUMPTION),
    )
    return {one: Figure(value=value, reason=reason if value is None else None) for one, value, reason in known}

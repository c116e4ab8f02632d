"""``accelmark check case NAME --frameworks ...``: compare the first steps of frameworks, and of one rank with two."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import typer
from rich.console import Console
from rich.status import Status
from rich.text import Text

from accelmark.cli import options
from accelmark.cli.machine import detect_devices
from accelmark.cli.options import Output
from accelmark.cli.runs import plan_request, setting_values
from accelmark.plan.plan import PlannedJob
from accelmark.plan.request import Detected
from accelmark.run.controller.data import DataFetcher
from accelmark.run.display.displays import RunObserver, print_hanging
from accelmark.run.equivalence import check_equivalence, check_text
from accelmark.run.preflight.hosts import run_preflight
from accelmark.run.record.states import JobStatus
from accelmark.spec.equivalence import TOLERANCES, EquivalenceCheck, Errors
from accelmark.spec.errors import EXIT_FAILED, EXIT_OK, RequestError
from accelmark.spec.layers import flatten
from accelmark.spec.plugins.catalog import frameworks_of, load_case, load_framework
from accelmark.spec.runfile import CaseRequest, RunSpec
from accelmark.spec.settings.training import TrainSettings

REFERENCE: Final = "pytorch"
"""The framework whose weights and batches all jobs start from."""
_NUM_BATCHES: Final = 2
"""Batches of an optimizer step, so that one rank accumulates over what two ranks divide."""


class _Progress(RunObserver):
    """Prints each job when it starts."""

    def __init__(self, console: Console, status: Status, precision: str, num_jobs: int) -> None:
        self._console, self._status, self._precision, self._num_jobs = console, status, precision, num_jobs
        self._started = 0

    def state(self, job: PlannedJob, status: JobStatus) -> None:
        self._started += 1
        self._status.update(f"{self._precision}: job {self._started} of {self._num_jobs} …")
        self.note(f"{self._precision}: {job.job.key}: {status.state}")

    def note(self, text: str) -> None:
        print_hanging(self._console, Text(text))


def compare_frameworks(
    name: str,
    frameworks: str,
    data: Path | None,
    vendor: str | None,
    settings: Sequence[str],
    num_steps: int,
    out: Path | None,
    *,
    synthetic: bool,
    as_json: bool,
) -> Output:
    """Check that each of ``frameworks`` computes as the reference; weights and outputs of all steps stay in ``out``."""
    train = load_case(name).train
    if train is None:
        raise RequestError(f"case {name!r} does not support training: nothing can be compared")
    names = list(dict.fromkeys(filter(None, map(str.strip, frameworks.split(",")))))
    own = frameworks_of(load_case(name))
    if unknown := [framework for framework in names if framework not in own]:
        hint = f"it has: {', '.join(own) or 'none'}"
        raise RequestError(f"--frameworks: the case {name!r} has no framework {unknown[0]!r} ({hint})")
    if not names or REFERENCE not in own:
        raise RequestError(f"--frameworks: name frameworks of a case that has {REFERENCE}")
    if any(setting.startswith("gradient_accumulation_steps=") for setting in settings):
        raise RequestError(f"--set gradient_accumulation_steps: a step has {_NUM_BATCHES} batches here; leave it out")
    given = setting_values(settings, synthetic=synthetic)
    values = flatten(TrainSettings.model_validate(train.settings).model_dump(mode="json")) | given
    chosen = str(values["precision"])
    if chosen not in TOLERANCES:
        raise RequestError(f"precision {chosen}: no tolerance was measured for it ({', '.join(TOLERANCES)} have one)")
    precisions = [chosen] if "precision" in given else list(dict.fromkeys(["fp32", chosen]))
    request = _request(name, names, data, detect_devices(vendor))
    changed = [f"batch_size={max(1, values['batch_size'] // _NUM_BATCHES)}", f"end.max_steps={num_steps}"]
    checks: list[EquivalenceCheck] = []
    with tempfile.TemporaryDirectory(prefix="accelmark-check-") as temporary:
        for precision in precisions:
            plan = plan_request(request, [*settings, *changed, f"precision={precision}"], synthetic=synthetic)
            path = (out or Path(temporary)) / precision
            console = Console(highlight=False, quiet=as_json)
            with console.status(f"{precision}: checking this machine …") as status:
                progress = _Progress(console, status, precision, len(plan.jobs))
                checks += check_equivalence(plan, path, DataFetcher(), run_preflight, progress, num_steps, _NUM_BATCHES)
    if not checks:
        raise RequestError(f"{frameworks}: no job computed in {', '.join(precisions)}: there is nothing to compare")
    results = [check.model_dump(mode="json") | {"equivalent": check.equivalent} for check in checks]
    exit_code = EXIT_OK if all(check.equivalent for check in checks) else EXIT_FAILED
    return Output(results, lambda: _show(checks), exit_code)


def _request(case: str, frameworks: Sequence[str], data: Path | None, here: Detected) -> RunSpec:
    """Return the request of the reference on one rank, then of each framework on one rank and on two."""
    most = here.num_devices if here.num_devices is not None else 2
    cases = []
    for framework in dict.fromkeys([REFERENCE, *frameworks]):
        for nproc in (1, 2):
            if nproc > most or (framework == REFERENCE and nproc == 2 and REFERENCE not in frameworks):
                continue
            num_ranks = load_framework(framework).ranks_per_host(nproc)
            key = f"{case}:{framework}:{here.hardware}:1:{nproc}"
            accumulated = {"gradient_accumulation_steps": _NUM_BATCHES // num_ranks}
            cases.append(CaseRequest(key=key, data=data, settings=accumulated))
    if len(cases) == 1:
        what = f"this machine has one device: {REFERENCE} on two ranks cannot be compared with one"
        raise RequestError(f"{what}; name another framework with --frameworks")
    return RunSpec(name="check", vendor=here.vendor, open=True, cases=tuple(cases))


def _show(checks: Sequence[EquivalenceCheck]) -> None:
    lines: list[tuple[str, ...]] = []
    for check in checks:
        lines.append(("tolerance", "", check.precision, *(f"{limit:.0e}" for _, limit in check.tolerance), ""))
        for job in check.jobs:
            errors = [f"{getattr(job.errors, kind):.0e}" for kind, _ in check.tolerance]
            verdict = "equivalent" if job.first_difference is None else "differs"
            version = f"{job.framework} {job.framework_version}"
            lines.append((version, str(job.num_ranks), check.precision, *errors, verdict))
    first = checks[0]
    data = "synthetic data" if first.synthetic else "the case's data"
    reference = f"{first.reference} {first.reference_version} on one rank"
    options.echo_wrapped(f"{first.case}: {first.num_steps} steps on {data}, compared with {reference}")
    typer.echo("Largest relative error of all steps:")
    headings = ("framework", "ranks", "precision", *Errors.model_fields, "verdict")
    options.print_table(headings, lines, fixed=len(headings))
    for check in checks:
        options.echo_wrapped(f"{check.framework}, {check.precision}: {check_text(check)}")

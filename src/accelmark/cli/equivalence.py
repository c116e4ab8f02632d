"""``accelmark check case NAME --frameworks ...``: compare the first steps of frameworks, and of one rank with two."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import typer

from accelmark.cli import options
from accelmark.cli.runs import detect_devices, plan_request, setting_values
from accelmark.plan.plan import Plan
from accelmark.results.equivalence import describe
from accelmark.run.controller.data import DataFetcher
from accelmark.run.controller.equivalence import check_equivalence, remember
from accelmark.run.display.displays import RunObserver
from accelmark.run.preflight.report import run_preflight
from accelmark.spec.equivalence import TOLERANCES, EquivalenceCheck
from accelmark.spec.errors import RequestError, nearest
from accelmark.spec.plugins.catalog import folders, load_case, load_framework
from accelmark.spec.runfile import CaseRequest, RunSpec

REFERENCE: Final = "pytorch"
"""The framework whose weights and batches all jobs start from."""
_NUM_BATCHES: Final = 2
"""Batches of an optimizer step, so that one rank accumulates over what two ranks divide."""


class _Notes(RunObserver):
    def __init__(self, *, silent: bool) -> None:
        self._silent = silent

    def note(self, text: str) -> None:
        """Print a note."""
        if not self._silent:
            typer.echo(text)


def compare_frameworks(
    name: str,
    frameworks: str,
    *,
    data: Path | None,
    settings: Sequence[str],
    synthetic: bool,
    num_steps: int,
    out: Path | None,
    as_json: bool,
) -> bool:
    """Check that each framework computes the same as the reference; returns whether all do."""
    names = _frameworks(frameworks)
    train = load_case(name).train
    if train is None:
        raise RequestError(f"case {name!r} is not trained: there are no steps to compare")
    given = setting_values(settings, synthetic=synthetic)
    own = str(given.get("precision", train.settings.get("precision", "fp32")))
    precisions = [own] if "precision" in given else list(dict.fromkeys(["fp32", own]))
    unknown = [precision for precision in precisions if precision not in TOLERANCES]
    if unknown:
        raise RequestError(
            f"precision {unknown[0]}: no tolerance was measured for it ({', '.join(TOLERANCES)} have one)"
        )
    batch_size = max(1, int(str(given.get("batch_size", train.settings["batch_size"]))) // _NUM_BATCHES)
    checks: list[EquivalenceCheck] = []
    with tempfile.TemporaryDirectory(prefix="accelmark-check-") as temporary:
        for precision in precisions:
            changed = {"precision": precision, "batch_size": batch_size, "end.max_steps": num_steps}
            plan = _plan(name, names, data, [f"{key}={value}" for key, value in changed.items()], settings, synthetic)
            checks += check_equivalence(
                plan,
                (out or Path(temporary)) / precision,
                DataFetcher(),
                run_preflight,
                _Notes(silent=as_json),
                num_steps,
                _NUM_BATCHES,
            )
    for check in checks:
        remember(check)
    _show(checks, as_json=as_json)
    return all(check.equivalent for check in checks)


def _frameworks(given: str) -> list[str]:
    names = list(dict.fromkeys(part.strip() for part in given.split(",") if part.strip()))
    for name in names:
        if name not in folders("frameworks"):
            raise RequestError(f"--frameworks: unknown framework {name!r} ({nearest(name, folders('frameworks'))})")
    if not names:
        raise RequestError("--frameworks: name at least one framework")
    return names


def _plan(
    name: str,
    frameworks: Sequence[str],
    data: Path | None,
    changed: list[str],
    settings: Sequence[str],
    synthetic: bool,
) -> Plan:
    """Plan the reference on one rank, then each framework on one rank and on two."""
    here = detect_devices(None)
    most = here.num_devices if here.num_devices is not None else 2
    cases = []
    for framework in dict.fromkeys([REFERENCE, *frameworks]):
        for nproc in (1, 2):
            if nproc > most or (framework == REFERENCE and nproc == 2 and REFERENCE not in frameworks):
                continue
            num_ranks = load_framework(framework).ranks_per_host(nproc)
            key = f"{name}:{framework}:{here.hardware}:1:{nproc}"
            accumulated = {"gradient_accumulation_steps": _NUM_BATCHES // num_ranks}
            cases.append(CaseRequest(key=key, data=data and data.expanduser(), settings=accumulated))
    request = RunSpec(name="check", vendor=here.vendor, open=True, cases=tuple(cases))
    plan = plan_request(request, [*settings, *changed], synthetic=synthetic)
    if len(plan.jobs) == 1:
        what = f"this machine has one device: {REFERENCE} on two ranks cannot be compared with one"
        raise RequestError(f"{what}; name another framework with --frameworks")
    return plan


def _show(checks: Sequence[EquivalenceCheck], *, as_json: bool) -> None:
    if as_json:
        values = [check.model_dump(mode="json") | {"equivalent": check.equivalent} for check in checks]
        typer.echo(json.dumps(values, indent=2))
        return
    from rich.console import Console

    table = options.plain_table("framework", "ranks", "precision", "outputs", "loss", "weights", "verdict")
    rows: list[tuple[Any, ...]] = []
    for check in checks:
        for job in check.jobs:
            errors = [f"{getattr(job.errors, kind):.1e} / {limit:.0e}" for kind, limit in check.tolerance]
            verdict = "equivalent" if job.first_difference is None else f"differs at {job.first_difference}"
            version = f"{job.framework} {job.framework_version}"
            rows.append((version, str(job.num_ranks), check.precision, *errors, verdict))
    for row in rows:
        table.add_row(*row)
    console = Console(highlight=False)
    first = checks[0]
    data = "synthetic data" if first.synthetic else "the case's data"
    reference = f"{first.reference} {first.reference_version} on one rank"
    console.print(f"{first.case}: the first {first.num_steps} steps on {data}, compared with {reference}")
    console.print("Largest relative errors over all steps / tolerance:")
    console.print(table)
    for check in checks:
        console.print(f"{check.framework}, {check.precision}: {describe(check)}", soft_wrap=True)

"""From what was asked on the command line to a plan: detection, data, the cluster file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, final

from accelmark.plan import Detected, Plan, build_plan
from accelmark.plan.layering import host_capabilities
from accelmark.run.controller.data import data_dirs
from accelmark.run.controller.probe import remembered
from accelmark.spec.catalog import find, load_vendor
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import Problem, SpecError
from accelmark.spec.launcher import launcher_problems, parse_cluster
from accelmark.spec.model import parse
from accelmark.spec.runfile import RunSpec
from accelmark.spec.yaml_file import read_value, read_yaml

COMMAND_LINE: Final = "command line"


@final
@dataclass(frozen=True, slots=True)
class Overrides:
    """What options change of a request, whichever way it was made."""

    vendor: str | None = None
    settings: Sequence[str] = ()
    """Each ``dotted.key=value``."""
    synthetic: bool = False
    is_open: bool = False
    strict: bool = False
    fail_fast: bool = False
    timeout_s: float | None = None

    def on(self, request: RunSpec) -> RunSpec:
        """Return ``request`` with what was given here instead."""
        given: dict[str, Any] = {"vendor": self.vendor, "timeout_s": self.timeout_s}
        flags = {"open": self.is_open, "strict": self.strict, "fail_fast": self.fail_fast}
        changed = {name: value for name, value in given.items() if value is not None}
        changed |= {name: True for name, is_set in flags.items() if is_set}
        return parse(RunSpec, request.model_dump() | changed, COMMAND_LINE)

    def layer(self) -> dict[str, Any]:
        """Return the settings as dotted keys.

        Raises:
            SpecError: one is not ``key=value``; all such are named.
        """
        values: dict[str, Any] = {"loader.synthetic": True} if self.synthetic else {}
        problems = []
        for text in self.settings:
            key, equals, value = text.partition("=")
            if not equals or not key.strip():
                problems.append(Problem(COMMAND_LINE, f"--set {text}", "is not of the form key=value"))
                continue
            values[key.strip()] = read_value(value, f"{COMMAND_LINE}: --set {key}")
        if problems:
            raise SpecError(problems)
        return values


def plan_for(request: RunSpec, overrides: Overrides, *, where: str, beside: Path) -> Plan:
    """Return the plan of a request.

    Args:
        request: what is asked for.
        overrides: what options change of it.
        where: the run file or ``command line``, for errors.
        beside: the directory that a relative cluster file is looked for in.

    Raises:
        AccelmarkError: with everything that is wrong with it.
    """
    request = overrides.on(request)
    cluster = _cluster(request.cluster, beside)
    plan = build_plan(
        request,
        cluster=cluster,
        detected=detected(request.vendor or cluster.vendor),
        data_dirs=data_dirs,
        created_at=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        where=where,
        command_line=overrides.layer(),
    )
    return plan.model_copy(update={"warnings": (*plan.warnings, *_unreadable(plan.vendor))})


def _unreadable(vendor: str) -> Iterator[str]:
    """Tell of a vendor's folder by which no device can be read; ranks run all the same."""
    from accelmark.telemetry.declaration import telemetry_of

    try:
        telemetry_of(load_vendor(vendor), str(find("vendors", vendor).path / "vendor.yaml"))
    except SpecError as error:
        for problem in error.problems:
            yield f"no device is going to be read for telemetry: {problem}"


def detected(vendor: str | None) -> Detected:
    """Return what is on this machine: of ``vendor``, or of the accelerator found first, else of the CPU."""
    from accelmark.telemetry.detect import default_vendor, detect

    name = vendor or default_vendor()
    found = next((entry for entry in detect([name]) if entry.vendor == name), None)
    if found is None:
        return Detected(vendor=name, hardware=name.upper(), chip=None, num_devices=None)
    chips = set(found.chips)
    return Detected(
        vendor=name,
        hardware=found.hardware or name.upper(),
        chip=chips.pop() if len(chips) == 1 else None,
        num_devices=None if found.fallback else len(found.devices),
        ceilings=remembered(name, found.hardware or name.upper()),
        capabilities=host_capabilities(load_vendor(name)),
    )


def read_run_file(path: Path) -> RunSpec:
    """Read a run file; data directories in it are relative to it.

    Raises:
        SpecError: with everything that is wrong with it.
    """
    values = read_yaml(path)
    for case in values.get("cases") or []:
        if isinstance(case, dict) and isinstance(case.get("data"), str):
            case["data"] = str(path.parent / Path(case["data"]).expanduser())
    cluster = values.get("cluster")
    problems = launcher_problems(cluster, str(path), "cluster.") if isinstance(cluster, dict) else []
    try:
        request = parse(RunSpec, {"name": path.stem} | values, str(path))
    except SpecError as error:
        raise SpecError([*error.problems, *problems]) from error
    if problems:
        raise SpecError(problems)
    return request


def _cluster(given: ClusterSpec | Path, beside: Path) -> ClusterSpec:
    if isinstance(given, ClusterSpec):
        return given
    path = beside / given.expanduser()
    return parse_cluster({"name": path.stem} | dict(read_yaml(path)), str(path))

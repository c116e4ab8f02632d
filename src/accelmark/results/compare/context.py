"""The context of a compared case: hardware, software, settings, source and findings, and how two cases differ in it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Final, Literal, get_args

from accelmark.results.read.round_dir import planned_jobs
from accelmark.results.schema import RoundResult
from accelmark.results.store.loaded_run import LoadedCase
from accelmark.spec.model import Spec
from accelmark.spec.plugins.catalog import folders, load_framework

Area = Literal["hardware", "software", "settings", "source", "audit"]
ABSENT: Final = "–"

_HOST: Final[dict[Area, tuple[str, ...]]] = {
    "hardware": ("cpu", "memory", "devices", "architecture", "cgroup", "memory_total_mib"),
    "software": ("os", "kernel", "python", "drivers", "environment", "virtualisation", "container", "accelmark"),
}
"""Parts of ``sys_info.json`` by area."""
_IGNORED: Final = frozenset({
    "uuid", "bus_id", "serial", "pid", "schema_version", "ACCELMARK_NODE_DIR", "ACCELMARK_RUN", "ACCELMARK_CACHE",
})  # fmt: skip
"""Parts of a host's description that differ between any two runs, or between two cards of the same model."""
_NAMES: Final[dict[str, tuple[Area, str]]] = {
    "device_name": ("hardware", "device"),
    "world_size": ("hardware", "ranks"),
    "framework": ("software", "framework"),
    "framework_version": ("software", "framework version"),
    "model_class": ("source", "model class"),
    "optimizer_class": ("source", "optimizer class"),
    "parameter_hash": ("source", "structure of the model"),
}
_WEIGHTS: Final = "initial weights of seed "
"""Rounds of different seeds start from different weights: compared only where both sides have the seed."""

Context = dict[tuple[Area, str], tuple[str, ...]]
"""(area, name) -> value; several where it varies over rounds or hosts."""


class ContextDifference(Spec):
    """What differs between the sides: a value, several where it varies over rounds or hosts, or none."""

    area: Area
    name: str
    baseline: tuple[str, ...]
    other: tuple[str, ...]


def context_differences(baseline: Context, other: Context) -> tuple[ContextDifference, ...]:
    """Return the values that differ, by area and name; weights only of seeds that both sides have."""
    areas = get_args(Area)
    names = sorted(baseline.keys() | other.keys(), key=lambda item: (areas.index(item[0]), item[1]))
    return tuple(
        ContextDifference(area=area, name=name, baseline=before, other=after)
        for area, name in names
        if (before := baseline.get((area, name), ())) != (after := other.get((area, name), ()))
        and ((before and after) or not name.startswith(_WEIGHTS))
    )


def context_of(case: LoadedCase) -> Context:
    """Return the context of a case."""
    found: dict[tuple[Area, str], dict[str, None]] = {}
    for area, name, value in (*_of_run(case), *(entry for result in case.rounds for entry in _of_round(result))):
        found.setdefault((area, name), {})[value] = None
    return {key: tuple(values) for key, values in found.items()}


def _of_run(case: LoadedCase) -> Iterable[tuple[Area, str, str]]:
    key, plan = case.result.key, case.run.files.json("plan.json")
    yield "software", "AccelMark", case.run.summary.accelmark_version
    yield "hardware", "scale", f"{key.nnodes}x{key.nproc}"
    for name, title in (("source_sha256", "AccelMark's files"), ("vendor_sha256", "files of the vendor")):
        if isinstance(plan.get(name), str):
            yield "source", title, _short(plan[name])
    jobs = [job for directory, job in planned_jobs(plan).items() if directory in case.result.rounds]
    for job in jobs:
        for name, title in (("case", "files of the case"), ("extern", "files of the vendor for the case")):
            folder = job.get(name)
            if isinstance(folder, dict) and isinstance(folder.get("sha256"), str):
                yield "source", title, _short(folder["sha256"])


def _of_round(result: RoundResult) -> Iterable[tuple[Area, str, str]]:
    started = result.environment.started
    yield "hardware", "vendor", result.vendor
    yield "hardware", "chip", result.chip.title if result.chip else ABSENT
    yield "software", "framework in the key", result.key.framework
    yield "source", "version of the case", str(result.case_version)
    yield "settings", "precision", result.precision
    for name, (area, title) in _NAMES.items():
        if started.get(name) is not None:
            yield area, title, value_text(started[name])
    if started.get("checkpoint_hash") is not None:
        seed = result.settings.get("seed")  # of round 1; each round adds one
        number = result.round - 1 + (seed.value if seed is not None and isinstance(seed.value, int) else 1)
        yield "source", f"{_WEIGHTS}{number}", value_text(started["checkpoint_hash"])
    for library, version in sorted((started.get("library_versions") or {}).items()):
        yield "software", f"library {library}", str(version)
    for hook, where in sorted((started.get("hooks") or {}).items()):
        yield "source", f"hook {hook}", str(where)
    ignored = _IGNORED | _reserved(result.key.framework)
    for host, (area, names) in itertools.product(result.environment.hosts, _HOST.items()):
        yield from ((area, path, value) for name in names for path, value in _flat(name, host.get(name), ignored))
    for name, setting in result.settings.items():
        if setting.value is not None:
            yield "settings", name, value_text(setting.value) + (" (changed with --open)" if setting.forced else "")
    for finding in result.findings:
        if finding.severity != "info":
            yield "audit", finding.rule, f"{finding.severity}: {finding.actual}"


def _reserved(framework: str) -> frozenset[str]:
    """Return the variables that the launch of a framework sets, such as addresses; none where it is not known here."""
    known = framework in folders("frameworks")
    return frozenset(load_framework(framework).reserved_variables if known else ())


def _flat(name: str, value: Any, ignored: Collection[str]) -> Iterable[tuple[str, str]]:
    if name in ignored or value is None:
        return
    if isinstance(value, dict):
        for part, below in value.items():
            for path, text in _flat(str(part), below, ignored):
                yield f"{name} {path}".replace("_", " ") if not path.isupper() else path, text
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        yield from (found for item in value for found in _flat(name, item, ignored))
    else:
        yield name, value_text(value)


def value_text(value: Any) -> str:
    """Return a value as JSON has it, with six digits at most; null is a dash, a SHA-256 is shortened."""
    if value is None:
        return ABSENT
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return _short(value)
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, dict | list | bool) else str(value)


def _short(text: str) -> str:
    """Shorten a SHA-256; return other text unchanged."""
    return f"{text[:12]}…" if len(text) == 64 and set(text) <= set("0123456789abcdef") else text


def context_lines(found: Sequence[ContextDifference]) -> list[str]:
    """Return each difference as a line for a terminal; of a rule, a finding that differs and how many more."""
    return [
        f"{each.area}: {each.name}: {_joined(each, each.baseline, each.other)} -> "
        f"{_joined(each, each.other, each.baseline)}"
        for each in found
    ]


def _joined(found: ContextDifference, values: Sequence[str], others: Sequence[str]) -> str:
    if found.area == "audit" and len(values) > 1:
        return f"{min(values, key=others.__contains__)} (and {len(values) - 1} more)"
    return " · ".join(values) or ABSENT

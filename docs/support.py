"""Which cases can run in which framework on which vendor's devices, and for which of them results are measured."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from accelmark.spec.plugins.catalog import (
    folders,
    frameworks_of,
    inference_frameworks_of,
    load_case,
    load_framework,
    load_vendor,
)

Support = Literal["measured", "runs", "not possible"]
_RESULTS: Final = re.compile(r"<!-- results -->(.*?)<!-- /results -->", re.DOTALL)
_ROW: Final = re.compile(r"^\| (?P<machine>[^|]+) \| (?P<framework>[a-z]+) [^|]*\|(?P<rest>.*)$", re.MULTILINE)
_HEADING: Final = re.compile(r"^\| Machine \|.*$", re.MULTILINE)
_HOST: Final = "CPU"
"""Hardware in the keys of runs on the host's own processor."""


@dataclass(frozen=True, slots=True)
class CaseSupport:
    """A case's task in one framework."""

    case: str
    task: Literal["train", "infer"]
    framework: str
    vendors: Mapping[str, Support]
    """``measured``: its README has a result; ``runs``: it is declared, and not measured; by vendor."""


def case_support() -> Sequence[CaseSupport]:
    """Return each task of AccelMark's own cases in each framework that it has a file for, on all vendors' devices."""
    found = []
    for name, folder in sorted(folders("cases").items()):
        if folder.origin == "accelmark":
            case = load_case(name)
            measured = set(_measured(folder.path / "README.md"))
            trained, inferred = frameworks_of(case), inference_frameworks_of(case)
            for framework in sorted(folders("frameworks")):
                if framework in trained:
                    found.append(_support(name, "train", framework, measured))
                if framework in inferred:
                    found.append(_support(name, "infer", framework, measured))
    return found


def _support(
    case: str, task: Literal["train", "infer"], framework: str, measured: set[tuple[str, str, str]]
) -> CaseSupport:
    vendors: dict[str, Support] = {}
    for name in sorted(folders("vendors")):
        vendor = load_vendor(name)
        has_device = framework in vendor.frameworks or name in load_framework(framework).devices
        can_run = has_device and vendor.cannot_run is None
        hardware = {_HOST} if vendor.uses_host_cpu else {chip.title for chip in vendor.chips}
        is_measured = any((task, framework, each) in measured for each in hardware)
        vendors[name] = "measured" if is_measured else "runs" if can_run else "not possible"
    return CaseSupport(case, task, framework, vendors)


def _measured(readme: Path) -> Iterator[tuple[str, str, str]]:
    """Yield task, framework and hardware of each row of results; those of inference have an engine."""
    for block in _RESULTS.findall(readme.read_text(encoding="utf-8")):
        headings = list(_HEADING.finditer(block))
        ends = [heading.start() for heading in headings[1:]] + [len(block)] * bool(headings)
        for heading, end in zip(headings, ends, strict=True):
            task = "infer" if "| Engine" in heading[0] else "train"
            for row in _ROW.finditer(block, heading.end(), end):
                yield task, row["framework"], row["machine"].partition(" (")[0].strip()

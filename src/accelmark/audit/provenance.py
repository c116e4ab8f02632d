"""Rules about whose code ran: AccelMark's own files, the case's folder, and what the vendor replaced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Final

import accelmark
from accelmark.audit import source_hash
from accelmark.audit.evidence import Evidence, finding
from accelmark.audit.inference import engine_details
from accelmark.results.schema import AdaptationCost, ChangedKey, Finding, ReplacedHook, Severity
from accelmark.spec.evidence import SourceRecord
from accelmark.spec.job import JobSpec

_SHOWN: Final = 10
_LOADS_CODE: Final = frozenset({
    "PYTHONPATH", "PYTHONSTARTUP", "PYTHONHOME", "PYTHONUSERBASE", "PYTHONPLATLIBDIR", "PYTHONINSPECT",
    "PYTHONBREAKPOINT", "PYTHONEXECUTABLE", "PYTHONPYCACHEPREFIX", "LD_PRELOAD", "LD_AUDIT",
})  # fmt: skip
"""Variables by which a process loads other code than its own before it begins."""


def source_tree(evidence: Evidence) -> Iterator[Finding]:
    """Check that AccelMark ran as released or committed."""
    source = evidence.source
    if source is None:
        if evidence.rounds:
            actual = "the run did not write it down"
            yield finding("error", "source-tree", "a record of the source (source.json)", actual)
        return
    if source.modified:
        shown = ", ".join(source.modified[:_SHOWN])
        more = f" and {len(source.modified) - _SHOWN} more" if len(source.modified) > _SHOWN else ""
        origin = f"commit {source.commit[:12]}" if source.commit else f"release {source.version}"
        # A release is nobody's to edit; a checkout is where people work, and a reader sees what they changed.
        severity: Severity = "open" if source.kind == "wheel" else "warning"
        yield finding(severity, "source-tree", f"the files of {origin}", f"modified: {shown}{more}")
    elif source.reason is not None:
        yield finding("warning", "source-tree", "a wheel or a git checkout", source.reason)
    if not source.modified:
        yield from _against_own(source)


def _against_own(source: SourceRecord) -> Iterator[Finding]:
    """Hold a source that calls itself unchanged against the one that verifies, where the two can be compared."""
    if source.sha256 == source_hash.own_hash():
        return
    ran = f"{source.kind} {source.version}" + (f" at commit {source.commit[:12]}" if source.commit else "")
    told = f"{ran} with files of hash {source.sha256[:12]}"
    if source.version != accelmark.__version__:
        actual = f"{told}; this is {accelmark.__version__}: not compared"
        yield finding("info", "source-tree", "a version that is known here", actual)
    elif source.kind == "wheel" and source_hash.has_history():
        # A wheel may leave out files that a checkout has.
        yield finding("info", "source-tree", "a wheel to compare with", f"{told}; this is a checkout: not compared")
    elif source.kind == "checkout" and source.commit is not None and source_hash.has_history():
        known = source_hash.hash_at(source.commit)
        if known is None:
            actual = f"{told}; this checkout knows no such commit"
            yield finding("open", "source-tree", "a commit that is known here", actual)
        elif known != source.sha256:
            yield finding("open", "source-tree", f"files of hash {known[:12]}, as that commit has them", told)
    elif source.kind == "checkout":
        actual = f"{told}; there is no git history here: not compared"
        yield finding("info", "source-tree", "a checkout to compare with", actual)
    else:
        yield finding("open", "source-tree", f"the files of {source.version}, hash {source_hash.own_hash()[:12]}", told)


def case_folder(evidence: Evidence) -> Iterator[Finding]:
    """Check that the case's files are those known here, and the same in all rounds."""
    jobs = [entry.job for entry in evidence.rounds if entry.job is not None]
    if len({job.case.sha256 for job in jobs}) > 1:
        yield finding("error", "case-folder", "one version of the case's files", "rounds ran with different ones")
    standard = evidence.standard
    if standard is None or not jobs:
        return
    if not standard.is_ours:
        actual = f"the case {standard.spec.name} comes from elsewhere: hash {standard.sha256[:12]}"
        yield finding("info", "case-folder", "a case that AccelMark ships", actual)
    if jobs[0].case.sha256 != standard.sha256:
        actual = f"it ran with files of hash {jobs[0].case.sha256[:12]}"
        yield finding("open", "case-folder", f"the files known here, hash {standard.sha256[:12]}", actual)
    if len({job.adaptation.sha256 for job in jobs if job.adaptation is not None}) > 1:
        actual = "the vendor's files changed between rounds"
        yield finding("error", "case-folder", "one version of the vendor's files", actual)


def hooks(evidence: Evidence) -> Iterator[Finding]:
    """Tell each hook that the vendor replaced, with where it stands and how long it is."""
    for hook in _hooks(evidence):
        lines = "an unknown number of" if hook.num_lines is None else str(hook.num_lines)
        yield finding("info", "hook-replaced", "the default", f"{hook.name} at {hook.place}, {lines} lines")


def loaded_before(evidence: Evidence) -> Iterator[Finding]:
    """Check that no variable of the vendor's has code loaded into the ranks before AccelMark's own."""
    for entry in evidence.rounds:
        by_script = {name for record in entry.adaptations for name in record.environment}
        by_vendor = _beyond_shipped(evidence, entry.job.vendor_environment) if entry.job is not None else set()
        for origin, names in (("environment_variables.sh", by_script), ("vendor.yaml", by_vendor)):
            found = sorted(names & _LOADS_CODE)
            if found:
                actual = f"{origin} sets {', '.join(found)}: what that loads cannot be seen"
                yield finding("open", "loaded-before", "nothing loaded before AccelMark's own code", actual, entry)


def adaptation_cost(evidence: Evidence) -> AdaptationCost | None:
    """Return what the vendor changed; None where no round left a record."""
    entry = next((entry for entry in evidence.rounds if entry.job is not None), None)
    if entry is None or entry.job is None:
        return None
    files = entry.job.adaptation
    vendor_layer = f"vendors/{entry.result.vendor}/"
    keys = [
        ChangedKey(
            key=name, standard=setting.replaced[-1][1] if setting.replaced else None, value=setting.value,
            layer=setting.layer,
        )
        for name, setting in sorted(entry.result.settings.items())
        if setting.layer.startswith(vendor_layer)
    ]  # fmt: skip
    names = {name for entry in evidence.rounds for record in entry.adaptations for name in record.environment}
    return AdaptationCost(
        keys=tuple(keys),
        hooks=tuple(_hooks(evidence)),
        extern=files.extern if files else {},
        kernels=files.kernels if files else {},
        engines=dict(_engines(evidence)),
        requirements=files.requirements if files else (),
        environment=tuple(sorted(names)),
        vendor_environment=tuple(sorted(_beyond_shipped(evidence, entry.job.vendor_environment))),
        framework_module=_own_module(evidence, entry.job),
    )


def _beyond_shipped(evidence: Evidence, environment: Mapping[str, str]) -> set[str]:
    shipped = evidence.shipped_vendor.environment if evidence.shipped_vendor is not None else {}
    return {name for name, value in environment.items() if shipped.get(name) != value}


def _own_module(evidence: Evidence, job: JobSpec) -> str | None:
    return None if evidence.shipped_module(job.framework) == job.framework_module else job.framework_module


def _engines(evidence: Evidence) -> Iterator[tuple[str, int]]:
    for entry in evidence.rounds:
        if entry.result.inference is not None:
            told = engine_details(entry.result.inference)
            if "engine_code" in told:
                yield str(told["engine_code"]), int(str(told.get("engine_code_lines", 0)))


def _hooks(evidence: Evidence) -> Iterator[ReplacedHook]:
    started = next((entry.started for entry in evidence.rounds if entry.started is not None), None)
    if started is None:
        return
    for name, place in started.hooks.items():
        file, _, line = place.rpartition(":")
        short = "/".join(PurePath(file).parts[-3:])
        yield ReplacedHook(name=name, place=f"{short}:{line}", num_lines=started.hook_lines.get(name))

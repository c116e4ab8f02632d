"""Rules about provenance: AccelMark's own files, the case's folder, and the code that the vendor replaced."""

from __future__ import annotations

import hashlib
import io
import re
import subprocess
import tarfile
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path, PurePath, PurePosixPath
from typing import Final

import accelmark
from accelmark.audit.evidence import Evidence, Findings, RoundEvidence, deviation
from accelmark.audit.inference import engine_details
from accelmark.results.schema import AdaptationCost, ChangedKey, ReplacedHook, Severity, finding
from accelmark.spec.log.records import LOADER_VARIABLES, SOURCE_FILE, VENDOR_CODE_DIR, SourceRecord
from accelmark.spec.plugins.catalog import SKIPPED, files_hash, is_hashed, task_files, tree_files, tree_hash
from accelmark.spec.secret import LEFT_OUT

_MAX_LISTED: Final = 10


def source_tree(evidence: Evidence) -> Findings:
    """Check that AccelMark ran as released or committed, and as the verifying AccelMark where that can be compared."""
    source = SourceRecord.stored(evidence.run_dir / SOURCE_FILE)
    if source is None:
        if evidence.rounds:
            yield finding("error", "source-tree", "", "source.json is missing: the run did not record its source")
        return
    if source.modified:
        origin = f"commit {source.commit[:12]}" if source.commit else f"release {source.version}"
        # Releases should not be edited. Edited checkouts are usual in development, and the finding lists the files.
        severity: Severity = "open" if source.kind == "wheel" else "warning"
        yield finding(severity, "source-tree", f"the files of {origin}", f"modified files: {_listed(source.modified)}")
        return
    if source.reason is not None:
        yield finding("warning", "source-tree", "a wheel or a git checkout", source.reason)
    if source.sha256 == own_hash():
        return
    ran = f"{source.kind} {source.version}" + (f" at commit {source.commit[:12]}" if source.commit else "")
    recorded = f"{ran}, files with hash {source.sha256[:12]}"
    if source.version != accelmark.__version__:
        yield finding("info", "source-tree", "", f"{recorded}: not compared, this is {accelmark.__version__}")
    elif source.kind == "wheel" and source.files and has_history():
        # A wheel may omit files that a checkout has, but has no others.
        if differing := _differing_files(source) & source.files.keys():
            actual = f"{recorded}, which differ in {_listed(differing)}"
            yield finding("open", "source-tree", "the files of this checkout", actual)
    elif source.kind == "wheel" and has_history():
        yield finding("info", "source-tree", "", f"{recorded}: not compared, this is a checkout and not a wheel")
    elif source.kind == "checkout" and source.commit is not None and has_history():
        known = hash_at(source.commit)
        if known is None:
            yield finding("open", "source-tree", "", f"{recorded}: the commit is not in this checkout")
        elif known != source.sha256:
            yield finding("open", "source-tree", f"hash {known[:12]}, as in that commit", recorded)
    elif source.kind == "checkout":
        yield finding("info", "source-tree", "", f"{recorded}: not compared, there is no git history here")
    else:
        differing = _differing_files(source) if source.files else set()
        where = f", which differ in {_listed(differing)}" if differing else ""
        builds = f"two builds have the version {source.version}, verify with the one that ran"
        expected = f"the files of this AccelMark, hash {own_hash()[:12]}: {builds}"
        yield finding("open", "source-tree", expected, f"{recorded}{where}")


def _differing_files(source: SourceRecord) -> set[str]:
    """Return the files that differ between a source and the verifying AccelMark, or that only one of them has."""
    own = {name: hashlib.sha256(content).hexdigest()[:16] for name, content in tree_files(package())}
    return {name for name in own.keys() | source.files.keys() if own.get(name) != source.files.get(name)}


def _listed(names: Collection[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(sorted(names)[:_MAX_LISTED]) + more


def case_folder(evidence: Evidence) -> Findings:
    """Check that the case's files are those on this machine or in the run's commit, and the same in all rounds."""
    jobs = [entry.job for entry in evidence.rounds if entry.job is not None]
    if len({job.case.sha256 for job in jobs}) > 1:
        yield finding("error", "case-changed", "", "the case's files changed between rounds")
    files = [job.adaptation for job in jobs if job.adaptation is not None]
    if len({each.sha256 for each in files}) > 1:
        yield finding("error", "case-changed", "", "the vendor's files changed between rounds")
    for folder in dict.fromkeys(each.path for each in files if each.is_extension):
        yield finding("info", "vendor-code", "", f"{folder} extends the vendor that AccelMark ships")
    copies: dict[str, str] = {}
    for folder in evidence.run_dir.glob(f"{VENDOR_CODE_DIR}/cases/*"):
        contents = list(tree_files(folder, whole=True))
        if not any(LEFT_OUT.encode() in content for _, content in contents):  # bundling removes secrets
            copies[folder.name] = files_hash(contents)
    for name, sha256 in {each.path.name: each.sha256 for each in files}.items():
        copied = copies.get(name, sha256)
        if copied != sha256:
            actual = f"the copy of {name} in the run has hash {copied[:12]}"
            yield finding("error", "vendor-code", f"the folder that ran, hash {sha256[:12]}", actual)
    standard = evidence.rounds[0].standard if jobs else None
    if standard is None:
        return
    if not standard.is_shipped:
        actual = f"the case {standard.spec.name} is not shipped with AccelMark: hash {standard.sha256[:12]}"
        yield finding("info", "case-changed", "", actual)
    recorded = jobs[0].case.sha256
    source = SourceRecord.stored(evidence.run_dir / SOURCE_FILE)
    commit = source.commit if source is not None and standard.is_shipped else None
    task = evidence.rounds[0].result.task
    # An earlier AccelMark may have had other files of the case.
    committed = hash_at(commit, f"cases/{standard.spec.name}", task) if commit and recorded != standard.sha256 else None
    if recorded not in (standard.sha256, committed):
        actual = f"the case's files had hash {recorded[:12]}"
        yield finding("open", "case-changed", f"the files on this machine, hash {standard.sha256[:12]}", actual)


def hooks(evidence: Evidence) -> Findings:
    """List the hooks that the vendor replaced, with place and length."""
    for hook in _hooks(evidence):
        lines = "unknown length" if hook.num_lines is None else f"{hook.num_lines} lines"
        yield finding("info", "hook-replaced", "", f"hook {hook.name} is replaced at {hook.place}, {lines}")


def preloaded_code(entry: RoundEvidence) -> Findings:
    """Check that nothing loads code into the ranks before AccelMark's own."""
    by_script = {name for record in entry.adaptations for name in record.environment}
    loaders = {"environment_variables.sh": by_script & set(LOADER_VARIABLES)}
    loaders["vendor.yaml"] = _not_shipped(entry) & set(LOADER_VARIABLES)
    for record in entry.environments:
        for name, variable in record.loaders.items():
            if not any(name in names for names in loaders.values()):
                loaders.setdefault(f"the {variable.origin}", set()).add(name)
    for origin, names in loaders.items():
        if names:
            actual = f"{origin} sets {', '.join(sorted(names))}: code loaded that way cannot be audited"
            yield finding("open", "loaded-before", "", actual)
    if files := sorted({file for record in entry.environments for file in record.start_files}):
        actual = f"{', '.join(files)} runs code whenever Python starts, and belongs to no installed package"
        yield finding("open", "loaded-before", "", actual)


def numeric_switches(entry: RoundEvidence) -> Findings:
    """Check that no variable makes the framework compute in another precision than declared."""
    variables = [variable for record in entry.environments for variable in record.numeric_switches.items()]
    switches = {f"{name}={variable.value} (from the {variable.origin})" for name, variable in variables}
    if switches:
        yield deviation(entry, "numeric-switches", "the declared precision", f"set: {', '.join(sorted(switches))}")


def unchanged_files(entry: RoundEvidence) -> Findings:
    """Check that data and code on the hosts remained what was hashed before the round."""
    for node in entry.result.nodes:
        if node.changed_data:
            actual = f"{node.host}: data was changed after its hashes were checked: {', '.join(node.changed_data)}"
            yield finding("error", "data-changed", "the data that was checked", actual)
        if node.changed_code:
            actual = f"{node.host}: files were changed while the round ran: {', '.join(node.changed_code)}"
            yield finding("open", "code-changed", "the code that started", actual)
        if node.stale_bytecode:
            listed = ", ".join(node.stale_bytecode[:_MAX_LISTED])
            actual = f"{node.host}: bytecode that differs from its source may have run: {listed}"
            yield deviation(entry, "bytecode", "the code of the source files", actual)


def adaptation_cost(evidence: Evidence) -> AdaptationCost | None:
    """Return the vendor's changes; None where no round has a job.json."""
    entry = next((entry for entry in evidence.rounds if entry.job is not None), None)
    if entry is None or entry.job is None:
        return None
    files, module = entry.job.adaptation, entry.job.framework_module
    vendor = entry.shipped_vendor
    device = vendor.frameworks.get(entry.job.framework) if vendor is not None else None
    of_vendor, keys = f"vendors/{entry.result.vendor}/", list[ChangedKey]()
    for name, setting in sorted(entry.result.settings.items()):
        weaker = [value for layer, value in setting.replaced if not layer.startswith(of_vendor)]
        if setting.layer.startswith(of_vendor) and weaker[-1:] != [setting.value]:
            standard = weaker[-1] if weaker else None
            keys.append(ChangedKey(key=name, standard=standard, value=setting.value, layer=setting.layer))
    engines: dict[str, int] = {}
    for inference in (one.result.inference for one in evidence.rounds):
        details = engine_details(inference) if inference is not None else {}
        if "engine_code" in details:
            engines[str(details["engine_code"])] = int(str(details.get("engine_code_lines", 0)))
    names = {name for entry in evidence.rounds for record in entry.adaptations for name in record.environment}
    return AdaptationCost(
        keys=tuple(keys),
        hooks=tuple(_hooks(evidence)),
        extern=files.extern if files else {},
        kernels=files.kernels if files else {},
        engines=engines,
        requirements=files.requirements if files else (),
        environment=tuple(sorted(names)),
        vendor_environment=tuple(sorted(_not_shipped(entry))),
        framework_module=None if device is not None and device.module == module else module,
    )


def _not_shipped(entry: RoundEvidence) -> set[str]:
    """Return the variables of ``vendor.yaml`` that differ from the shipped vendor's."""
    shipped = entry.shipped_vendor.environment if entry.shipped_vendor is not None else {}
    given = entry.job.vendor_environment if entry.job is not None else {}
    return {name for name, value in given.items() if shipped.get(name) != value}


def _hooks(evidence: Evidence) -> Iterator[ReplacedHook]:
    started = next((entry.started for entry in evidence.rounds if entry.started is not None), None)
    if started is None:
        return
    for name, place in started.hooks.items():
        file, _, line = place.rpartition(":")
        short = "/".join(PurePath(file).parts[-3:])
        yield ReplacedHook(name=name, place=f"{short}:{line}", num_lines=started.hook_lines.get(name))


def package() -> Path:
    """Return the folder of the running AccelMark."""
    return Path(accelmark.__file__).parent


@cache
def own_hash() -> str:
    """SHA-256 over the package's files, as a run records it."""
    return tree_hash(package())


@cache
def has_history() -> bool:
    """Return whether the package is in a git checkout."""
    return _git("rev-parse", "HEAD") is not None and bool((_git("ls-files", "--", "__init__.py") or b"").strip())


@cache
def hash_at(commit: str, folder: str = ".", task: str = "") -> str | None:
    """SHA-256 over the files that ``commit`` has in a folder of the package; None where it is not here."""
    if not re.fullmatch(r"[0-9a-f]{40,64}", commit):
        return None
    archived = _git("archive", "--format=tar", commit, "--", folder)
    if archived is None:
        return None
    with tarfile.open(fileobj=io.BytesIO(archived)) as archive:
        contents = {
            PurePosixPath(entry.name).relative_to(folder): file.read()
            for entry in archive
            if entry.isfile() and (file := archive.extractfile(entry)) is not None
        }
    names = sorted(name for name in contents if is_hashed(name.name) and not SKIPPED & set(name.parts[:-1]))
    return files_hash(task_files(((str(name), contents[name]) for name in names), task))


def _git(*arguments: str) -> bytes | None:
    """Return git's output, or None where git, the checkout or the object is missing."""
    command = ["git", "-C", str(package()), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None

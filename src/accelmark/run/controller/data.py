"""Fetch and verify the data of jobs.

``python -m accelmark.run.controller.data JOB [--offline]`` does so on a host and prints the records as JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from accelmark.datasets.ensure import ensure, locate
from accelmark.datasets.spec import DatasetSpec, dataset_specs
from accelmark.datasets.verify import Progress, ProgressMeter, fingerprint
from accelmark.spec.errors import AccelmarkError, DataError
from accelmark.spec.job import InferJob, JobSpec
from accelmark.spec.log.records import DataRecord
from accelmark.spec.number_format import percent, quantity
from accelmark.spec.plugins.case import CaseSpec
from accelmark.spec.plugins.catalog import load_case


def data_dirs(case: CaseSpec, given: Path | None) -> dict[str, Path]:
    """Return the directory of each data set of a case, in the one that the user gave or to be fetched.

    Raises DataError: the user has to give a directory.
    """
    return {spec.name: locate(spec, given) for spec in dataset_specs(case.data, f"cases/{case.name}/case.yaml")}


def datasets_of(job: JobSpec) -> Iterator[tuple[DatasetSpec, Path]]:
    """Yield the data sets of a job with their directories; inference needs no part that only training reads.

    Weights, and data of accuracy benchmarks, are declared nowhere.
    """
    name = job.case.name
    for spec in dataset_specs(load_case(name).all_data, f"cases/{name}/case.yaml"):
        if (place := job.data_dirs.get(spec.name)) is not None:
            yield spec.for_inference() if isinstance(job.work, InferJob) else spec, place


@dataclass(frozen=True)
class DataFetcher:
    """Fetches missing data into the cache, and verifies every file once per run, and again where one was changed.

    A directory given by the user is verified and never written to.
    """

    offline: bool = False
    _checked: dict[tuple[Path, str], tuple[DataRecord, str]] = field(default_factory=dict)

    def __call__(self, job: JobSpec, report: Callable[[str], None]) -> dict[str, DataRecord]:
        """Fetch and verify the data of ``job`` that are declared; returns a record of each of its directories.

        Raises DataError: it is missing, corrupt or cannot be fetched; the message says what to do.
        """
        case = load_case(job.case.name)
        records: dict[str, DataRecord] = {}
        for spec, place in datasets_of(job):

            def progress(what: str, done: int, total: int | None) -> None:
                size = quantity((total or done) / 2**20, "MiB", 3)
                report(f"{what} {percent(done / total)} of {size}" if total else f"{what} {size}")

            checked = place, spec.fingerprint
            record, state = self._checked.get(checked, (None, ""))
            if record is not None and state == _state_of(spec, place, progress):
                records[spec.name] = record
                continue
            in_cache = bool(spec.sources) and locate(spec) == place
            ensure(
                spec,
                data_dir=None if in_cache else place,
                offline=self.offline,
                allow_subset=job.open or case.size == "mini",
                progress=progress,
            )
            try:
                digest = fingerprint(spec, place, progress)
            except OSError as error:
                raise DataError(f"{error.filename or place}: cannot be read: {error.strerror}") from error
            declared = spec.fingerprint if spec.files else None
            records[spec.name] = DataRecord(path=str(place), fingerprint=digest, declared=declared)
            self._checked[checked] = records[spec.name], _state_of(spec, place, progress)
        for name, place in job.data_dirs.items():
            if name not in records:  # names and sizes of the files, as of declared trees
                files = [place] if place.is_file() else [file for file in place.rglob("*") if file.is_file()]
                lines = sorted(f"{file.relative_to(place.parent)}\0{file.stat().st_size}" for file in files)
                digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
                records[name] = DataRecord(path=str(place), fingerprint=digest, declared=None)
        return records


def _state_of(spec: DatasetSpec, place: Path, progress: Progress) -> str:
    """Return a digest of each file's name, size, inode and time of the last change of contents or metadata.

    A program that restores contents and modification times still changes the last one.
    """
    meter = ProgressMeter(f"looking for changes in {spec.name}", None, progress)
    digest, folders = hashlib.sha256(), [str(place)]
    while folders:
        entries: list[os.DirEntry[str]] = []
        with contextlib.suppress(OSError), os.scandir(folders.pop()) as scanned:  # lost+found, which is not data
            entries = sorted(scanned, key=lambda entry: entry.name)
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                folders.append(entry.path)
            elif entry.is_file():
                state = entry.stat()
                digest.update(os.fsencode(f"{entry.path}\0{state.st_size} {state.st_ino} {state.st_ctime_ns}\0"))
                meter.add(state.st_size)
    return digest.hexdigest()


def main(arguments: list[str]) -> int:
    """Fetch and verify the data of the job in ``arguments``; returns the exit code."""
    job = JobSpec.model_validate_json(Path(arguments[0]).read_bytes())
    try:
        records = DataFetcher("--offline" in arguments)(job, lambda _: None)
    except AccelmarkError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    print(json.dumps({name: record.model_dump(mode="json") for name, record in records.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

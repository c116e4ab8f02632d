"""LibriSpeech from its archives at openslr.org, one for each subset."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from accelmark.datasets.prepare.preparation import (
    Archive,
    Preparation,
    copied,
    opened_tar,
    regular_files,
    whole_directory,
    write_whole,
)
from accelmark.datasets.verify import ProgressMeter
from accelmark.spec.errors import DataError

_SUFFIX: Final = ".tar.gz"
_FILE: Final = re.compile(r"LibriSpeech/([a-z0-9-]+)/(\d+/\d+)/([\d-]+\.(?:flac|trans\.txt))")


def _unpack(archives: Mapping[str, Path], to: Path, meter: ProgressMeter) -> None:
    """Write ``<subset>/<speaker>/<chapter>/*``; complete subsets are kept."""
    for name, path in archives.items():
        subset = name.removesuffix(_SUFFIX)
        if not (to / subset).exists():
            with whole_directory(to / subset) as part:
                _unpack_subset(path, subset, part)
        meter.add(path.stat().st_size)


def _unpack_subset(path: Path, subset: str, to: Path) -> None:
    recordings: set[str] = set()
    lines: set[str] = set()
    with opened_tar(path) as archive:
        for name, _, stream in regular_files(archive):
            found = _FILE.fullmatch(name)
            if found is None or found[1] != subset:
                continue  # texts about the whole corpus
            folder = to / found[2]
            folder.mkdir(parents=True, exist_ok=True)
            content = list(copied(stream))
            write_whole(folder / found[3], content)
            if found[3].endswith(".flac"):
                recordings.add(found[3].removesuffix(".flac"))
            else:
                lines |= {line.split(b" ", 1)[0].decode("ascii") for line in b"".join(content).splitlines() if line}
    if not recordings:
        raise DataError(f"{path}: has no LibriSpeech/{subset}/<speaker>/<chapter>/*.flac")
    if recordings != lines:
        odd = min(recordings ^ lines)
        raise DataError(f"{path}: {odd} has {'no transcript' if odd in recordings else 'no recording'}")


_MD5: Final = {
    "train-clean-100": "2a93770f6d5c6c964bc36631d331a522",
    "train-clean-360": "c0e676e450a7ff2f54aeade5171606fa",
    "train-other-500": "d1a0fd59409feb2c614ce4d30c387708",
    "dev-clean": "42e2234ba48799c1f50f24a7926300a1",
    "dev-other": "c8d0bcc9cca99d4f8b62fcc847357931",
    "test-clean": "32fa31d27d2e1cad72775fee3f4849a9",
    "test-other": "fb5a50374b501bb3bac4815ee91d3135",
}
_NEEDED: Final = ("train-clean-100", "test-clean")

PREPARATION: Final = Preparation(
    archives=tuple(Archive(f"{subset}{_SUFFIX}", md5, needed=subset in _NEEDED) for subset, md5 in _MD5.items()),
    unpack=_unpack,
    unpacked_ratio=1.05,
)

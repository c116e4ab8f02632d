"""LibriSpeech from its archives at openslr.org, one for each subset."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Final

from accelmark.datasets.prepare.preparation import Archive, Archives, Part, Preparation, copied, write_whole
from accelmark.spec.errors import DataError

_FILE: Final = re.compile(r"LibriSpeech/([a-z0-9-]+)/(\d+/\d+)/([\d-]+\.(?:flac|trans\.txt))")
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


def _write(subset: str, archives: Archives, folder: Path) -> None:
    """Write ``<speaker>/<chapter>/*`` of a subset, after its recordings are compared with its transcripts."""
    name = f"{subset}.tar.gz"
    recordings: set[str] = set()
    lines: set[str] = set()
    for member, stream in archives.members(name):
        match = _FILE.fullmatch(member)
        if match is None or match[1] != subset:
            continue  # texts about the whole corpus
        place = folder / match[2]
        place.mkdir(parents=True, exist_ok=True)
        content = list(copied(stream))
        write_whole(place / match[3], content)
        if match[3].endswith(".flac"):
            recordings.add(match[3].removesuffix(".flac"))
        else:
            lines |= {line.split(b" ", 1)[0].decode("ascii") for line in b"".join(content).splitlines() if line}
    if not recordings:
        raise DataError(f"{archives.paths[name]}: has no LibriSpeech/{subset}/<speaker>/<chapter>/*.flac")
    if recordings != lines:
        odd = min(recordings ^ lines)
        lacks = "no transcript" if odd in recordings else "no recording"
        raise DataError(f"{archives.paths[name]}: {odd} has {lacks}")


PREPARATION: Final = Preparation(
    archives=tuple(Archive(f"{subset}.tar.gz", md5, needed=subset in _NEEDED) for subset, md5 in _MD5.items()),
    parts={subset: Part((f"{subset}.tar.gz",), partial(_write, subset)) for subset in _MD5},
    unpacked_ratio=1.05,
)

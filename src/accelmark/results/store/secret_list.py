"""The secrets that a job was given, kept as salted hashes, so that a bundle of its logs can leave them out.

Only the hashes, lengths and one piece's place are kept. To find a secret, its longest run of letters and digits is
looked for where such a run of that length stands in a text, and what is around it is compared as a whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, final
from urllib.parse import quote

from pydantic import Field, ValidationError

from accelmark.results.store.files import write_atomic
from accelmark.spec.model import Spec
from accelmark.spec.secret import LEFT_OUT, is_secret, is_telling, passwords

SECRETS_FILE: Final = "secrets.json"
LEAST_LENGTH: Final = 6
"""Shorter values of a host's own variables are not looked for: common words would be."""
_RUN: Final = re.compile(rb"[A-Za-z0-9]+")


class HiddenSecret(Spec):
    """One secret that nobody can read out of this."""

    length: int = Field(ge=1)
    """Bytes of the whole."""
    lead: int = Field(ge=0)
    """Bytes before its longest run of letters and digits."""
    run_length: int = Field(ge=1)
    run_sha256: str
    sha256: str


class SecretList(Spec):
    """The secrets of one host's part of a job."""

    salt: str
    hidden: tuple[HiddenSecret, ...] = ()


def secrets_of(environment: Mapping[str, str]) -> set[str]:
    """Return the secrets among variables: values of secret names that are no places, and passwords in addresses."""
    found: set[str] = set()
    for name, value in environment.items():
        found.update(passwords(value))
        if is_secret(name) and not os.path.exists(value):  # noqa: PTH110  a Path refuses what is too long
            found.add(value)
    return found


def keep_hidden(path: Path, values: Iterable[str]) -> None:
    """Write the list of ``values`` to ``path``, for its owner alone; none of them can be read out of it.

    Raises:
        RunError: it cannot be written.
    """
    salt = secrets.token_hex(16)
    forms = sorted({form for value in values for form in _forms(value)})
    hidden = tuple(entry for form in forms if (entry := _hide(form.encode(), salt)) is not None)
    write_atomic(path, SecretList(salt=salt, hidden=hidden).model_dump_json(indent=2) + "\n", private=True)


def _forms(value: str) -> Iterator[str]:
    """Yield what a secret may look like in a text: line by line, as in JSON, and as in an address."""
    for line in value.splitlines():
        if len(line) >= LEAST_LENGTH and is_telling(line):
            yield from {line, json.dumps(line)[1:-1], json.dumps(line, ensure_ascii=False)[1:-1], quote(line, safe="")}


def _hide(form: bytes, salt: str) -> HiddenSecret | None:
    longest = max(_RUN.finditer(form), key=lambda run: len(run[0]), default=None)
    if longest is None:
        return None
    return HiddenSecret(
        length=len(form), lead=longest.start(), run_length=len(longest[0]),
        run_sha256=_hash(longest[0], salt), sha256=_hash(form, salt),
    )  # fmt: skip


def _hash(value: bytes, salt: str) -> str:
    return hashlib.sha256(salt.encode() + value).hexdigest()


@final
class HiddenSecrets:
    """Finds the secrets of a run's lists in its files.

    Args:
        lists: ``secrets.json`` of the run's hosts; one that cannot be read is passed over.
    """

    def __init__(self, lists: Iterable[Path]) -> None:
        self._by_run: dict[tuple[str, int], list[HiddenSecret]] = {}
        for path in lists:
            try:
                found = SecretList.model_validate_json(path.read_bytes())
            except (OSError, ValidationError):
                continue
            for entry in found.hidden:
                self._by_run.setdefault((found.salt, entry.run_length), []).append(entry)

    def without(self, content: bytes) -> bytes:
        """Return ``content`` with every secret of the lists left out."""
        for value in sorted(self._found(content), key=len, reverse=True):
            content = content.replace(value, LEFT_OUT.encode())
        return content

    def _found(self, content: bytes) -> set[bytes]:
        found: set[bytes] = set()
        for (salt, length), entries in self._by_run.items():
            # In JSON an end of line is "\n": the n is no part of the word after it.
            pattern = re.compile(rb"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))[A-Za-z0-9]{%d}(?![A-Za-z0-9])" % length)
            places: dict[bytes, list[int]] = {}
            for match in pattern.finditer(content):
                places.setdefault(match[0], []).append(match.start())
            for run, starts in places.items():
                hashed = _hash(run, salt)
                for entry in (entry for entry in entries if entry.run_sha256 == hashed):
                    for start in (start - entry.lead for start in starts):
                        whole = content[max(start, 0) : start + entry.length]
                        if start >= 0 and whole not in found and _hash(whole, salt) == entry.sha256:
                            found.add(whole)
        return found

"""Salted hashes of a job's secrets, to redact them from the logs in a bundle.

Only hashes, lengths and one offset are stored. A secret is found by its longest alphanumeric run: every run of that
length in a text is hashed, and where it matches, the whole secret around it is hashed and compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final
from urllib.parse import quote

from pydantic import Field

from accelmark.results.store.files import write_atomic
from accelmark.spec.model import Spec
from accelmark.spec.secret import LEFT_OUT, is_searchable, is_secret, passwords

SECRETS_FILE: Final = "secrets.json"
MIN_SECRET_LENGTH: Final = 6
"""Shorter values of a host's own variables are not redacted: they could be common words."""
_RUN: Final = re.compile(rb"[A-Za-z0-9]+")


class SecretHash(Spec):
    """One secret, which cannot be recovered from this."""

    length: int = Field(ge=1)
    """Bytes of the whole."""
    lead: int = Field(ge=0)
    """Bytes before its longest alphanumeric run."""
    run_length: int = Field(ge=1)
    run_sha256: str
    sha256: str


class SecretList(Spec):
    """The secrets of one host's part of a job."""

    salt: str
    hidden: tuple[SecretHash, ...] = ()


def secrets_of(environment: Mapping[str, str]) -> set[str]:
    """Return the secrets in variables: values of secret names that are not paths, and passwords in URLs."""
    secret_values: set[str] = set()
    for name, value in environment.items():
        secret_values.update(passwords(value))
        if is_secret(name) and not os.path.exists(value):  # noqa: PTH110  Path.exists raises on long names
            secret_values.add(value)
    return secret_values


def write_secret_hashes(path: Path, values: Iterable[str]) -> None:
    """Write the hashes of ``values`` to a file that only its owner can read. Raises RunError if that fails."""
    salt = secrets.token_hex(16)
    hidden: list[SecretHash] = []
    forms: set[str] = set()  # of a secret in text: each line, JSON-escaped, and URL-quoted
    for line in (line for value in values for line in value.splitlines()):
        if len(line) >= MIN_SECRET_LENGTH and is_searchable(line):
            escaped = (json.dumps(line)[1:-1], json.dumps(line, ensure_ascii=False)[1:-1])
            forms.update((line, *escaped, quote(line, safe="")))
    for form in sorted(forms):
        whole = form.encode()
        if (run := max(_RUN.finditer(whole), key=lambda found: len(found[0]), default=None)) is not None:
            entry = SecretHash(
                length=len(whole), lead=run.start(), run_length=len(run[0]), run_sha256=_hash(run[0], salt),
                sha256=_hash(whole, salt),
            )  # fmt: skip
            hidden.append(entry)
    write_atomic(path, SecretList(salt=salt, hidden=tuple(hidden)).model_dump_json(indent=2) + "\n", private=True)


def _hash(value: bytes, salt: str) -> str:
    return hashlib.sha256(salt.encode() + value).hexdigest()


class SecretFinder:
    """Finds and redacts the secrets of a run in its files, by the ``secrets.json`` of its hosts that are readable."""

    def __init__(self, lists: Iterable[Path]) -> None:
        self._by_run: dict[tuple[str, int], list[SecretHash]] = {}
        for listed in filter(None, map(SecretList.stored, lists)):
            for entry in listed.hidden:
                self._by_run.setdefault((listed.salt, entry.run_length), []).append(entry)

    def without(self, content: bytes) -> bytes:
        """Return ``content`` with all secrets redacted."""
        for value in sorted(self._found(content), key=len, reverse=True):
            content = content.replace(value, LEFT_OUT.encode())
        return content

    def _found(self, content: bytes) -> set[bytes]:
        found: set[bytes] = set()
        for (salt, length), entries in self._by_run.items():
            # In JSON a line ends with the characters \\n: the n is not part of the next word.
            pattern = rb"(?:(?<![A-Za-z0-9])|(?<=\\[nrt]))[A-Za-z0-9]{%d}(?![A-Za-z0-9])" % length
            places: dict[bytes, list[int]] = {}
            for match in re.finditer(pattern, content):
                places.setdefault(match[0], []).append(match.start())
            for run, starts in places.items():
                hashed = _hash(run, salt)
                for entry in (entry for entry in entries if entry.run_sha256 == hashed):
                    for start in (start - entry.lead for start in starts):
                        whole = content[max(start, 0) : start + entry.length]
                        if start >= 0 and whole not in found and _hash(whole, salt) == entry.sha256:
                            found.add(whole)
        return found

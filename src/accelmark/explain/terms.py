"""The words that AccelMark writes, such as audit rules and verdicts; ``terms.yaml`` explains them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter

from accelmark.results.schema import VERDICTS
from accelmark.spec.model import Spec, read_yaml


class Term(Spec):
    """A word that AccelMark writes, explained."""

    text: str
    """The meaning of the term, or the finding of an audit rule."""
    why: str = ""
    """Of an audit rule: why it matters."""
    remedy: str = ""
    """What to do; empty where nothing is to be done."""
    severity: tuple[Literal["error", "open", "warning", "info"], ...] = ()
    """Of an audit rule: severities that its findings may have."""


@cache
def all_terms() -> dict[str, dict[str, Term]]:
    """Return kind (``audit rule``, ``verdict``, ``end reason``, ``state``, ``mark`` ...) -> name -> explanation."""
    path = Path(__file__).with_name("terms.yaml")
    reasons = "The page and 'accelmark verify RUN' list each reason."
    verdicts: dict[str, Term] = {
        word: Term(text=text, remedy="" if word == "VALID" else reasons) for word, text in VERDICTS.items()
    }
    return {"verdict": verdicts} | TypeAdapter(dict[str, dict[str, Term]]).validate_python(read_yaml(path))

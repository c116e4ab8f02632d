"""The recorded outcomes of the attacks, and the page with their table.

``ADVERSARY_RECORD=1 make test-adversary`` records what it sees and writes the page; without it the tests compare.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import yaml

from tests.audit.adversary.attack import FOLDER, Attack, read_attacks
from tests.audit.adversary.bench import ROOT
from tests.audit.adversary.records import Edit

AREAS: Final = ("evaluation", "work", "replay", "numbers", "data", "clock", "inference", "code", "identity")
HONEST: Final = "honest"
RECORDS: Final = "records"
FILE: Final = Path(__file__).with_name("outcomes.json")
PAGE: Final = ROOT / "docs" / "adversary.md"
RECORDING: Final = os.environ.get("ADVERSARY_RECORD") == "1"

HEAD: Final = """# Attacks and honest variants

Written by the tests (`ADVERSARY_RECORD=1 make test-adversary`), which carry out each row with the real command and read
the verdict. The definitions are in `tests/audit/adversary/attacks/`. The case is a small convolutional network on
generated images, trained for a few seconds on CPU cores.

*Found* means that the run is refused, INVALID, OPEN because of one of the named rules, or does not verify. Rows with an
asterisk were VALID in the review that led to these checks. [Read a result](reader.md) describes what each kind of
attacker can do.
"""


def read_edits() -> Iterator[Edit]:
    """Yield the entries of ``attacks/records.yaml``."""
    for entry in yaml.safe_load((FOLDER / f"{RECORDS}.yaml").read_text()):
        yield Edit.model_validate(entry)


def recorded() -> dict[str, list[str]]:
    """Return the rules that found each attack when it was last recorded, by id; none where it was VALID."""
    outcomes: dict[str, list[str]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return outcomes


def record(name: str, found: Iterable[str]) -> None:
    """Record the outcome of an attack."""
    with FILE.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        known = {one.id for one in (*read_attacks(*AREAS, HONEST), *read_edits())}
        outcomes = recorded() | {name: sorted(found)}
        kept = {key: value for key, value in sorted(outcomes.items()) if key in known}
        FILE.write_text(json.dumps(kept, indent=1) + "\n")
        PAGE.write_text(page(kept))


def page(outcomes: dict[str, list[str]]) -> str:
    """Return the page of all attacks and honest variants."""
    sections: dict[str, Sequence[Attack | Edit]] = {area: list(read_attacks(area)) for area in AREAS}
    sections[RECORDS] = list(read_edits())
    attacks = [attack for section in sections.values() for attack in section]
    found = [attack for attack in attacks if outcomes.get(attack.id)]
    honest = list(read_attacks(HONEST))
    alarms = [variant for variant in honest if outcomes.get(variant.id)]
    lines = [HEAD, f"{len(found)} of {len(attacks)} attacks are found; {len(alarms)} of {len(honest)} honest variants "
             "cause a false alarm.", ""]  # fmt: skip
    for area, section in sections.items():
        lines += [f"## {area.capitalize()}", "", "| Attack | Does | Would gain | Outcome |", "|---|---|---|---|"]
        lines += [f"| {_name(one)} | {one.does} | {one.gains} | {_outcome(one, outcomes)} |" for one in section] + [""]
    lines += ["## Honest variants", "", "| Variant | Does | Verdict |", "|---|---|---|"]
    lines += [f"| `{one.id}` | {one.does} | {_verdict(one.id, outcomes)} |" for one in honest]
    return "\n".join(lines) + "\n"


def _name(attack: Attack | Edit) -> str:
    return f"`{attack.id}`{' *' if attack.issue else ''}"


def _outcome(attack: Attack | Edit, outcomes: dict[str, list[str]]) -> str:
    if attack.id not in outcomes:
        return "not recorded"
    if outcomes[attack.id]:
        return "found: " + ", ".join(f"`{rule}`" for rule in outcomes[attack.id])
    return f"**not found**{': ' * bool(attack.not_found)}{attack.not_found}"


def _verdict(name: str, outcomes: dict[str, list[str]]) -> str:
    if name not in outcomes:
        return "not recorded"
    return "VALID" if not outcomes[name] else "**false alarm**: " + ", ".join(outcomes[name])


if __name__ == "__main__":
    PAGE.write_text(page(recorded()))

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

from tests.audit.adversary.attack import FOLDER, Attack, Edit, read_attacks
from tests.audit.adversary.bench import ROOT

AREAS: Final = ("evaluation", "work", "replay", "numbers", "data", "clock", "inference", "code", "identity")
HONEST: Final = "honest"
RECORDS: Final = "records"
FILE: Final = Path(__file__).with_name("outcomes.json")
PAGE: Final = ROOT / "docs" / "adversary.md"
RECORDING: Final = os.environ.get("ADVERSARY_RECORD") == "1"

HEAD: Final = """# Attacks and their detection

Written by the tests (`ADVERSARY_RECORD=1 make test-adversary`), which carry out each row with the real command and read
the verdict. The definitions are in `tests/audit/adversary/attacks/`. The case is a small convolutional network on
generated images, trained for a few seconds on CPU cores. Nothing here was tried on an accelerator.

## Threat model

| Who | Controls | Is found by | Is not found |
|---|---|---|---|
| someone who makes a mistake | settings, data, a busy machine | rules over plan and records | |
| a hostile vendor folder | code in the processes of ranks and engines, scripts and tools, as the same user | \
evaluation and replay in a fresh process, checked answers, clocks and hashes of other processes | \
work that is left out where nobody replays it; what it does to other processes of the same user |
| a hostile operator | shell, cluster file, the installed AccelMark, the run directory | \
the recorded environment, records that disagree, and for readers the signature | \
records that are made up consistently and signed with the operator's own key |
| an operator with root | kernel, clocks, drivers, the memory of every process | nothing that runs on that machine | \
all of it: repeat the run on a machine of one's own |

*Found* means that the run is refused, INVALID, OPEN because of one of the named rules, or does not verify
(`signature`, `was changed`, `recompute`, `verify` stand for what `verify` and `report` say then, `refused` for a run
that does not start). Rows with an asterisk were VALID in the review that led to these checks.
"""


def read_edits() -> Iterator[Edit]:
    for entry in yaml.safe_load((FOLDER / f"{RECORDS}.yaml").read_text()):
        yield Edit.model_validate(entry)


def recorded() -> dict[str, list[str]]:
    """Return the rules that found each attack when it was last recorded, by id; none where it was VALID."""
    outcomes: dict[str, list[str]] = json.loads(FILE.read_text()) if FILE.exists() else {}
    return outcomes


def record(name: str, found: Iterable[str]) -> None:
    descriptor = os.open(FOLDER, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # several workers record at the same time
        known = {one.id for one in read_attacks(*AREAS, HONEST)} | {one.id for one in read_edits()}
        outcomes = recorded() | {name: sorted(found)}
        kept = {key: value for key, value in sorted(outcomes.items()) if key in known}
        FILE.write_text(json.dumps(kept, indent=1) + "\n")
        PAGE.write_text(page(kept))
    finally:
        os.close(descriptor)


def page(outcomes: dict[str, list[str]]) -> str:
    sections: dict[str, Sequence[Attack | Edit]] = {area: list(read_attacks(area)) for area in AREAS}
    sections[RECORDS] = list(read_edits())
    attacks = [attack for section in sections.values() for attack in section]
    found = [attack for attack in attacks if outcomes.get(attack.id)]
    honest = list(read_attacks(HONEST))
    alarms = [variant for variant in honest if outcomes.get(variant.id)]
    reviewed = [attack for attack in attacks if attack.issue]
    counts = (
        f"{len(found)} of {len(attacks)} attacks are found, of those with an asterisk "
        f"{sum(attack in found for attack in reviewed)} of {len(reviewed)}; "
        f"{sum(attack.id not in outcomes for attack in attacks)} attacks have no recorded outcome at this version. "
        f"{len(alarms)} of {len(honest)} honest variants cause a false alarm."
    )
    lines = [HEAD, counts, ""]
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

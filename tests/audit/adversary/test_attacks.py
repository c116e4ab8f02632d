"""Attacks that were found stay found, honest variants that were VALID stay so, and the page has what was recorded.

An attack that was recorded as not found may be found: record it again.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
from pathlib import Path

import pytest

from tests.audit.adversary.attack import Attack, Edit, read_attacks
from tests.audit.adversary.bench import Bench
from tests.audit.adversary.outcomes import AREAS, HONEST, PAGE, RECORDING, page, read_edits, record, recorded

pytestmark = pytest.mark.adversary

SAMPLE = ("extra-layer",)
"""What `make test` carries out; the others are heavy."""


def _parameters(attacks: list[Attack]) -> list[object]:
    return [
        pytest.param(attack, id=attack.id, marks=() if attack.id in SAMPLE else pytest.mark.heavy) for attack in attacks
    ]


def _before(bench: Bench, name: str, found: Collection[str]) -> list[str]:
    """Return what was recorded of an attack, whose files are removed; record what was found now where that is asked."""
    before = recorded().get(name, [])
    if RECORDING:
        record(name, found)
    shutil.rmtree(bench.root / "attacks" / name)
    return before


@pytest.mark.parametrize("attack", _parameters(list(read_attacks(*AREAS))))
def test_an_attack_is_found(bench: Bench, attack: Attack) -> None:
    outcome = attack.carry_out(bench)
    found = set(attack.found(outcome)) & set(attack.found_by)
    before = _before(bench, attack.id, found)
    assert found or not before, f"{outcome.verdict}, {outcome.findings}\n{outcome.output}"


@pytest.mark.parametrize("variant", _parameters(list(read_attacks(HONEST))))
def test_an_honest_variant_is_valid(bench: Bench, variant: Attack) -> None:
    outcome = variant.carry_out(bench)
    found = variant.found(outcome)
    before = _before(bench, variant.id, found)
    assert not found or before, f"{outcome.findings}\n{outcome.output}"


@pytest.mark.heavy
@pytest.mark.parametrize("edit", [pytest.param(edit, id=edit.id) for edit in read_edits()])
def test_an_edit_of_the_records_is_found(bench: Bench, honest: tuple[Path, Path], edit: Edit) -> None:
    seen = edit.carry_out(bench, *honest)
    found = [rule for rule in edit.found_by if any(rule in text for text in seen)]
    before = _before(bench, edit.id, found)
    assert found or not before, seen


def test_the_page_has_every_attack_with_its_recorded_outcome() -> None:
    assert PAGE.read_text() == page(recorded()), "write it with python -m tests.audit.adversary.outcomes"


def test_attacks_have_names_of_their_own() -> None:
    attacks: list[Attack | Edit] = [*read_attacks(*AREAS, HONEST), *read_edits()]
    assert len({one.id for one in attacks}) == len(attacks)

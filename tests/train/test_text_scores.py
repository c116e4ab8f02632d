"""Scores of text: their values, and that sums over parts give the score of the whole."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from accelmark.tasks.text.metrics import Bleu, CharacterErrors, Rouge1, TextScore, WordErrors, edit_distance


def slow_distance(given: Sequence[str], wanted: Sequence[str]) -> int:
    if not given or not wanted:
        return len(given) + len(wanted)
    replaced = slow_distance(given[1:], wanted[1:]) + (given[0] != wanted[0])
    return min(replaced, slow_distance(given[1:], wanted) + 1, slow_distance(given, wanted[1:]) + 1)


@settings(max_examples=50)
@given(st.lists(st.sampled_from("abc"), max_size=4), st.lists(st.sampled_from("abc"), max_size=4))
def test_the_edit_distance_is_that_of_its_definition(first: list[str], second: list[str]) -> None:
    assert edit_distance(first, second) == slow_distance(first, second)


def test_word_errors_are_over_the_words_of_the_references() -> None:
    score = WordErrors()
    found = score.sums(["the cat sat", "b"], ["the cat sat down", "a b c"])
    assert found == {"word_errors": 3.0, "words": 7.0}
    assert score.metrics(found) == {"wer": 3 / 7}
    assert WordErrors(plain=True).sums(["Don't, stop!"], ["DON'T STOP"])["word_errors"] == 0


def sum_of_parts(score: TextScore, pairs: Sequence[tuple[str, str]]) -> dict[str, float]:
    total: Counter[str] = Counter()
    for hypothesis, reference in pairs:
        total.update(score.sums([hypothesis], [reference]))
    return score.metrics(total)


PAIRS = [
    ("the cat sat on the mat today", "the cat sat on a mat today"),
    ("hello there world again", "hello world again"),
]


def test_bleu_of_parts_is_that_of_the_corpus() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    whole = sacrebleu.corpus_bleu([pair[0] for pair in PAIRS], [[pair[1] for pair in PAIRS]]).score
    assert sum_of_parts(Bleu(), PAIRS)["bleu"] == pytest.approx(whole)
    assert sum_of_parts(Bleu(lowercase=True), [(PAIRS[0][0].upper(), PAIRS[0][0])])["bleu"] == pytest.approx(100)


def test_rouge_is_the_mean_over_samples() -> None:
    pytest.importorskip("rouge_score")
    assert sum_of_parts(Rouge1(), [("cats running", "cat runs"), ("a", "b")]) == {"rouge1": pytest.approx(50)}


def test_the_character_error_rate_counts_edits_over_characters() -> None:
    score = CharacterErrors()
    sums = score.sums(["abcd", "xy"], ["abd", "xyz"])
    assert sums == {"character_errors": 2.0, "characters": 6.0}
    assert score.metrics(sums) == {"cer": pytest.approx(1 / 3)}
    assert score.metrics({"character_errors": 0.0, "characters": 0.0}) == {"cer": 0.0}

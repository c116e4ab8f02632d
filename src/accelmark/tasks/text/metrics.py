"""Scores of generated text, from sums over samples and ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import numpy as np

from accelmark.spec.backports import zip_strict


class TextScore(Protocol):
    """A score whose statistics add up over samples."""

    def sums(self, hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        """Return the statistics of some samples."""
        ...

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the score of all samples."""
        ...


@final
@dataclass(frozen=True)
class Bleu:
    """Corpus BLEU in per cent (Papineni et al. 2002), computed by sacrebleu with its defaults (tokens ``13a``)."""

    lowercase: bool = False

    def sums(self, hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        """Return matching and all n-grams for n of 1 to 4, and the lengths in words."""
        from sacrebleu.metrics.bleu import BLEU

        score: Any = BLEU(lowercase=self.lowercase).corpus_score(list(hypotheses), [list(references)])
        matching = {f"matching{n}": float(count) for n, count in enumerate(score.counts, 1)}
        total = {f"total{n}": float(count) for n, count in enumerate(score.totals, 1)}
        return matching | total | {"hypothesis_words": float(score.sys_len), "reference_words": float(score.ref_len)}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return ``bleu``."""
        from sacrebleu.metrics.bleu import BLEU

        matching, total = ([int(sums[f"{kind}{n}"]) for n in range(1, 5)] for kind in ("matching", "total"))
        lengths = int(sums["hypothesis_words"]), int(sums["reference_words"])
        return {"bleu": float(BLEU.compute_bleu(matching, total, *lengths).score)}


@final
class Rouge1:
    """Mean F-measure of ROUGE-1 in per cent (Lin 2004), with Porter's stemmer, as rouge-score computes it."""

    def sums(self, hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        """Return the sum over the samples, and their number."""
        from rouge_score.rouge_scorer import RougeScorer

        scorer = RougeScorer(["rouge1"], use_stemmer=True)
        pairs = zip_strict(hypotheses, references)
        total = sum(float(scorer.score(reference, text)["rouge1"].fmeasure) for text, reference in pairs)
        return {"rouge1": 100 * total, "samples": float(len(references))}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return ``rouge1``."""
        return {"rouge1": sums["rouge1"] / sums["samples"]}


@final
@dataclass(frozen=True)
class WordErrors:
    """Word error rate: substituted, deleted and inserted words over words of the references.

    With ``plain``, lower-case words without punctuation are compared.
    """

    plain: bool = False

    def sums(self, hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        """Return errors and words."""
        pairs = [tuple(map(self._words, pair)) for pair in zip_strict(hypotheses, references)]
        errors = sum(edit_distance(text, reference) for text, reference in pairs)
        return {"word_errors": float(errors), "words": float(sum(len(reference) for _, reference in pairs))}

    def _words(self, text: str) -> list[str]:
        return (re.sub(r"[^\w\s']", " ", text.lower()) if self.plain else text).split()

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return ``wer``, 0 where everything is right; it may exceed 1."""
        return {"wer": sums["word_errors"] / sums["words"] if sums["words"] else 0.0}


@final
class CharacterErrors:
    """Character error rate: substituted, deleted and inserted characters over characters of the references."""

    def sums(self, hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        """Return errors and characters."""
        errors = sum(edit_distance(text, reference) for text, reference in zip_strict(hypotheses, references))
        return {"character_errors": float(errors), "characters": float(sum(map(len, references)))}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return ``cer``, 0 where everything is right; it may exceed 1."""
        return {"cer": sums["character_errors"] / sums["characters"] if sums["characters"] else 0.0}


def edit_distance(hypothesis: Sequence[str], reference: Sequence[str]) -> int:
    """Return the least number of substitutions, deletions and insertions between two sequences (Levenshtein)."""
    positions = np.arange(len(reference) + 1)
    row = positions.copy()
    for number, word in enumerate(hypothesis, 1):
        differs = np.array([other != word for other in reference], dtype=np.int64)
        best = np.empty_like(row)
        best[0] = number
        best[1:] = np.minimum(row[:-1] + differs, row[1:] + 1)
        # An insertion adds one to the entry before it, so that the least of best[j] + (i - j) over j <= i is taken.
        row = np.minimum.accumulate(best - positions) + positions
    return int(row[-1])

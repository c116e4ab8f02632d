"""Metrics from sums and rows over batches and ranks, and the families of tasks that have them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from io import StringIO
from typing import Any, ClassVar, Literal, Union

import numpy as np
import numpy.typing as npt

from accelmark.spec.backports import zip_strict
from accelmark.train.case import IGNORED as IGNORED
from accelmark.train.case import ModelSettings

Rows = npt.NDArray[np.float64]


class Classified:
    """Classification with one label per sample."""

    accuracies: ClassVar[Mapping[str, int]] = {"top1": 1}
    """Metric -> number of best classes that must include the label."""

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return each accuracy (``sums`` has the number of correct samples under its name) and the mean loss."""
        count = sums["count"]
        return {**{name: sums[name] / count for name in self.accuracies}, "eval_loss": sums["loss"] / count}


class ImageSizes(ModelSettings):
    """Images as bytes; the size and number of classes are the settings of these names."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return 3, self.number("image_size"), self.number("image_size")

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return self.number("num_classes")


class PredictedTokens(ModelSettings):
    """Next-token prediction over samples of ``seq_length + 1`` tokens; the last one is only predicted."""

    tokens: ClassVar[str] = "tokens"
    """Name of the batch's only array or tensor, of shape (batch, seq_length + 1)."""
    reported: ClassVar[Mapping[str, str]] = {"eval_loss": "eval_loss", "perplexity": "perplexity"}
    """Metric of the case -> metric of the family."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.number("vocab_size")

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the reported metrics of a held-out token: its mean cross entropy in nats, that in bits, perplexity."""
        loss = sums["loss"] / sums["count"]
        perplexity = math.exp(loss) if loss < 700 else math.inf  # above it, ``exp`` overflows a double
        values = {"eval_loss": loss, "perplexity": perplexity, "bits_per_token": loss / math.log(2)}
        return {name: values[source] for name, source in self.reported.items()}


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


@dataclass(frozen=True)
class ErrorRate:
    """Substituted, deleted and inserted words or characters over those of the references.

    With ``plain``, lower-case text without punctuation is compared.
    """

    unit: Literal["word", "character"]
    plain: bool = False

    def sums(self, hypotheses: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        """Return errors and units of the references."""
        pairs = [tuple(map(self._units, pair)) for pair in zip_strict(hypotheses, references)]
        errors = sum(edit_distance(text, reference) for text, reference in pairs)
        return {f"{self.unit}_errors": float(errors), f"{self.unit}s": float(sum(len(each) for _, each in pairs))}

    def _units(self, text: str) -> Sequence[str]:
        text = re.sub(r"[^\w\s']", " ", text.lower()) if self.plain else text
        return text.split() if self.unit == "word" else text

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return ``wer`` or ``cer``, 0 where everything is right; it may exceed 1."""
        count = sums[f"{self.unit}s"]
        return {f"{self.unit[0]}er": sums[f"{self.unit}_errors"] / count if count else 0.0}


TextScore = Union[Bleu, Rouge1, ErrorRate]
"""A score of generated text whose statistics add up over samples."""


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


def box_precision(boxes: Rows, detections: Rows) -> dict[str, float]:
    """Return COCO's average precision of boxes, ``map`` (IoU of 0.50 to 0.95) and ``map50``, by pycocotools.

    Rows of ``boxes`` are image, left, top, width, height, class, and 1 for a crowd; rows of ``detections`` are image,
    left, top, width, height, score, class.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth: Any = COCO()
    images = sorted({int(number) for number in [*boxes[:, 0], *detections[:, 0]]})
    truth.dataset = {
        "images": [{"id": number} for number in images],
        "categories": [{"id": number} for number in sorted(set(boxes[:, 5].astype(int).tolist()))],
        "annotations": [
            {
                "id": number,
                "image_id": int(row[0]),
                "bbox": row[1:5].tolist(),
                "area": float(row[3] * row[4]),
                "category_id": int(row[5]),
                "iscrowd": int(row[6]),
            }
            for number, row in enumerate(boxes, 1)
        ],
        "info": {},
    }
    if not len(detections):
        return {"map": 0.0, "map50": 0.0}
    with redirect_stdout(StringIO()):  # which pycocotools fills with its progress
        truth.createIndex()
        evaluation: Any = COCOeval(truth, truth.loadRes(detections), "bbox")
        evaluation.params.maxDets = [100]
        evaluation.params.areaRng, evaluation.params.areaRngLbl = [[0, 1e10]], ["all"]
        evaluation.evaluate()
        evaluation.accumulate()
    means = {}
    for name, precision in (("map", evaluation.eval["precision"]), ("map50", evaluation.eval["precision"][0])):
        counted = precision[precision > -1]  # of classes without boxes it is -1
        means[name] = float(counted.mean()) if counted.size else 0.0
    return means


def mean_overlap(segments: Rows) -> dict[str, float]:
    """Return ``miou``, the mean over the classes of summed intersections over summed unions, and pixel accuracy.

    Rows are class, pixels of the class that were found, pixels of the class, and pixels that were taken for it.
    """
    classes = segments[:, 0].astype(np.int64)
    shared, truth, predicted = (np.bincount(classes, column) for column in segments[:, 1:].T)
    union = truth + predicted - shared
    present = union > 0
    return {
        "miou": float((shared[present] / union[present]).mean()),
        "pixel_accuracy": float(shared.sum() / truth.sum()),
    }

"""Masked-language-model pretraining of BERT-large in Paddle."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import paddle
import paddle.nn.functional as F  # noqa: N812
from paddle import Tensor, nn
from safetensors.numpy import load_file

from accelmark.frameworks.paddle.layers import Attention, Module
from accelmark.spec.errors import DataError
from accelmark.tasks.language.data import masked_tokens
from accelmark.tasks.metrics import IGNORED, classification_metrics
from accelmark.train.batches import Arrays, ArraySource
from accelmark.train.case import ArrayCase, Batch, attention_flops, dense_flops

CHECKPOINT: Final = "initial/model.safetensors"
_EPS: Final = 1e-12
_DROPOUT: Final = 0.1


def _linear(size_in: int, size_out: int) -> nn.Linear:
    return nn.Linear(size_in, size_out, weight_attr=nn.initializer.Normal(0.0, 0.02))


def _embedding(size: int, hidden: int) -> nn.Embedding:
    return nn.Embedding(size, hidden, weight_attr=nn.initializer.Normal(0.0, 0.02))


class BertLayer(Module):
    """Self-attention and a feed-forward part, each with dropout, a residual connection and a norm after it."""

    is_block = True

    def __init__(self, hidden: int, intermediate: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.output = (_linear(hidden, hidden) for _ in range(4))
        self.attention = Attention(causal=False, dropout=_DROPOUT)
        self.up, self.down = _linear(hidden, intermediate), _linear(intermediate, hidden)
        self.attention_norm, self.feed_norm = nn.LayerNorm(hidden, _EPS), nn.LayerNorm(hidden, _EPS)
        self.dropout = nn.Dropout(_DROPOUT)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        """Return the layer's output for ``x`` of shape (batch, length, hidden)."""
        shape = [*x.shape[:2], self.heads, -1]
        mixed = self.attention(*(project(x).reshape(shape) for project in (self.query, self.key, self.value)), mask)
        x = self.attention_norm(x + self.dropout(self.output(mixed.reshape(x.shape))))
        return self.feed_norm(x + self.dropout(self.down(F.gelu(self.up(x)))))


class MaskedLm(nn.Layer):
    """BERT (Devlin et al. 2018, arXiv:1810.04805), computing vocabulary logits at the masked positions only."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        hidden, vocabulary = sizes["hidden_size"], sizes["vocab_size"]
        self.words, self.segments = _embedding(vocabulary, hidden), _embedding(2, hidden)
        self.positions = _embedding(sizes["max_positions"], hidden)
        self.norm, self.dropout = nn.LayerNorm(hidden, _EPS), nn.Dropout(_DROPOUT)
        self.layers = nn.LayerList(
            [BertLayer(hidden, sizes["intermediate_size"], sizes["num_heads"]) for _ in range(sizes["num_layers"])]
        )
        self.transform, self.transform_norm = _linear(hidden, hidden), nn.LayerNorm(hidden, _EPS)
        self.head_bias = self.create_parameter([vocabulary], is_bias=True)

    def forward(
        self, tokens: Tensor, positions: Tensor, segments: Tensor | None = None, num_tokens: Tensor | None = None
    ) -> Tensor:
        """Return logits of shape (batch, positions, vocabulary); no token sees one after ``num_tokens``."""
        steps = paddle.arange(tokens.shape[1])
        mask = None if num_tokens is None else (steps < num_tokens.unsqueeze(-1)).unsqueeze([1, 2])
        of_segments = self.segments.weight[0] if segments is None else self.segments(segments)
        x = self.dropout(self.norm(self.words(tokens) + self.positions(steps) + of_segments))
        for layer in self.layers:
            x = layer(x, mask)
        picked = paddle.take_along_axis(x, positions.unsqueeze(-1), 1)
        picked = self.transform_norm(F.gelu(self.transform(picked)))
        return paddle.matmul(picked, self.words.weight, transpose_y=True) + self.head_bias

    def load(self, stored: dict[str, np.ndarray]) -> None:
        """Load the weights of a ``BertForMaskedLM`` of transformers.

        Raises:
            KeyError: a weight is missing.
            ValueError: it has another shape.
        """
        for name, parameter in self.named_parameters():
            array = stored[_stored_name(name)]
            is_product = name.endswith("weight") and array.ndim == 2 and "words" not in name
            transposes = is_product and name.partition(".")[0] not in ("segments", "positions")
            parameter.set_value(array.T if transposes else array)


_LAYER_NAMES: Final = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "output": "attention.output.dense",
    "attention_norm": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "feed_norm": "output.LayerNorm",
}
_NAMES: Final = {
    "words.weight": "bert.embeddings.word_embeddings.weight",
    "segments.weight": "bert.embeddings.token_type_embeddings.weight",
    "positions.weight": "bert.embeddings.position_embeddings.weight",
    "norm.weight": "bert.embeddings.LayerNorm.weight",
    "norm.bias": "bert.embeddings.LayerNorm.bias",
    "transform.weight": "cls.predictions.transform.dense.weight",
    "transform.bias": "cls.predictions.transform.dense.bias",
    "transform_norm.weight": "cls.predictions.transform.LayerNorm.weight",
    "transform_norm.bias": "cls.predictions.transform.LayerNorm.bias",
    "head_bias": "cls.predictions.bias",
}


def _stored_name(name: str) -> str:
    """Return the name in transformers of a parameter of :class:`MaskedLm`."""
    if not name.startswith("layers."):
        return _NAMES[name]
    _, number, part, kind = name.split(".")
    return f"bert.encoder.layer.{number}.{_LAYER_NAMES[part]}.{kind}"


class Case(ArrayCase):
    """Masked-token prediction at full sequence length, from the checkpoint in the data directory.

    Batches have ``tokens`` of shape (batch, length), and ``positions`` with ``labels`` of shape (batch, predictions).
    """

    def build_model(self) -> nn.Layer:
        """Build BERT-large, with the initial checkpoint's weights."""
        model = MaskedLm(self.sizes)
        if self.settings.model["from_checkpoint"] and not self.settings.loader.synthetic:
            path = self.data_dirs["bert_tokens"] / CHECKPOINT
            if not path.is_file():
                raise DataError(f"{path}: the initial checkpoint is missing; the case's README says where to get it")
            try:
                model.load(load_file(path))
            except (KeyError, ValueError) as error:
                raise DataError(f"{path}: {error}: is it a BertForMaskedLM?") from error
        return model

    def loss(self, model: nn.Layer, batch: Batch) -> Tensor:
        """Return the mean cross entropy of the masked tokens."""
        return self._loss(self._logits(model, batch), batch["labels"], "mean")

    def _logits(self, model: nn.Layer, batch: Batch) -> Tensor:
        return model(*(batch[name] for name in ("tokens", "positions", "segments", "num_tokens") if name in batch))

    def _loss(self, logits: Tensor, labels: Tensor, reduction: str) -> Tensor:
        flat = logits.flatten(0, 1).astype("float32")
        return F.cross_entropy(flat, labels.flatten(), ignore_index=IGNORED, reduction=reduction)

    def eval_sums(self, model: nn.Layer, batch: Batch) -> dict[str, Any]:
        """Count the masked tokens that were predicted, and add up their cross entropies."""
        logits, labels = self._logits(model, batch), batch["labels"]
        return {
            "mlm_accuracy": (logits.argmax(-1) == labels).sum(),  # an ignored label is no token
            "loss": self._loss(logits, labels, "sum"),
            "count": (labels != IGNORED).sum(),
        }

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return accuracy and mean loss over masked tokens."""
        return classification_metrics(sums, ["mlm_accuracy"])

    def synthetic_batch(self, size: int) -> Arrays:
        """Return random tokens, positions and labels."""
        random, vocabulary = self.random, self.number("vocab_size")
        length, predictions = self.number("seq_length"), self.number("max_predictions")
        return {
            "tokens": random.integers(0, vocabulary, (size, length)),
            "positions": random.integers(0, length, (size, predictions)),
            "labels": random.integers(0, vocabulary, (size, predictions)),
        }

    def dataset(self, *, train: bool) -> ArraySource:
        """Return windows of ``train``, masked anew in each epoch, or of ``val``, masked the same each time."""
        sizes = (self.number(name) for name in ("seq_length", "max_predictions", "vocab_size"))
        return masked_tokens(self.data_dirs["bert_tokens"], "train" if train else "val", *sizes)

    def flops_per_sample(self) -> float:
        """Return the FLOPs of encoder, head on masked tokens, and attention (PaLM, arXiv:2204.02311, appendix B)."""
        hidden, length, layers = (self.number(name) for name in ("hidden_size", "seq_length", "num_layers"))
        encoder = layers * (4 * hidden * hidden + 2 * hidden * self.number("intermediate_size"))
        head = hidden * hidden + hidden * self.number("vocab_size")
        dense = dense_flops(encoder, length) + dense_flops(head, self.number("max_predictions"))
        return dense + attention_flops(layers, hidden, length)

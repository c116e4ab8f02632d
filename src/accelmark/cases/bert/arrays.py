"""Masked-language-model pretraining of BERT-large in MindSpore, PaddlePaddle and TensorFlow."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final

from accelmark.spec.errors import DataError
from accelmark.spec.tensor_file import read_tensors
from accelmark.tasks.language.data import masked_tokens
from accelmark.tasks.metrics import Classified
from accelmark.train.batches import Arrays, ArraySource
from accelmark.train.case import ArrayCase, Batch, dense_flops, encoder_flops, nn

CHECKPOINT: Final = "initial/model.safetensors"
_EPS: Final = 1e-12
_DROPOUT: Final = 0.1
_STD: Final = 0.02


class BertLayer(nn.Module):
    """Self-attention and a feed-forward part, each with dropout, a residual connection and a norm after it."""

    is_block = True

    def __init__(self, hidden: int, intermediate: int, heads: int) -> None:
        super().__init__()
        linear = partial(nn.Linear, initial=nn.normal(_STD), bias=nn.zeros)
        self.heads = heads
        self.query, self.key, self.value, self.out = (linear(hidden, hidden) for _ in range(4))
        self.attention = nn.Attention(causal=False, dropout=_DROPOUT)
        self.up, self.down = linear(hidden, intermediate), linear(intermediate, hidden)
        self.attention_norm, self.feed_norm = nn.LayerNorm(hidden, _EPS), nn.LayerNorm(hidden, _EPS)
        self.attention_dropout, self.feed_dropout = nn.Dropout(_DROPOUT), nn.Dropout(_DROPOUT)

    def forward(self, x: Any, mask: Any) -> Any:
        """Return the layer's output for ``x`` of shape (batch, length, hidden)."""
        batch, length, hidden = x.shape
        shape = (batch, length, self.heads, hidden // self.heads)
        query, key, value = (nn.reshape(project(x), shape) for project in (self.query, self.key, self.value))
        mixed = nn.reshape(self.attention(query, key, value, mask), (batch, length, hidden))
        x = self.attention_norm(x + self.attention_dropout(self.out(mixed)))
        return self.feed_norm(x + self.feed_dropout(self.down(nn.gelu(self.up(x)))))


class MaskedLm(nn.Module):
    """BERT (Devlin et al. 2018, arXiv:1810.04805), computing vocabulary logits at the masked positions only."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        super().__init__()
        hidden, vocabulary, initial = sizes["hidden_size"], sizes["vocab_size"], nn.normal(_STD)
        self.words, self.segments = nn.Embedding(vocabulary, hidden, initial), nn.Embedding(2, hidden, initial)
        self.positions = nn.Embedding(sizes["max_positions"], hidden, initial)
        self.norm, self.dropout = nn.LayerNorm(hidden, _EPS), nn.Dropout(_DROPOUT)
        self.layers = nn.List(
            [BertLayer(hidden, sizes["intermediate_size"], sizes["num_heads"]) for _ in range(sizes["num_layers"])]
        )
        self.transform = nn.Linear(hidden, hidden, initial, bias=nn.zeros)
        self.transform_norm, self.head = nn.LayerNorm(hidden, _EPS), nn.TiedHead(vocabulary)

    def forward(self, tokens: Any, positions: Any, segments: Any = None, num_tokens: Any = None) -> Any:
        """Return logits of shape (batch, positions, vocabulary); no token sees one after ``num_tokens``."""
        length = tokens.shape[1]
        mask = None if num_tokens is None else nn.padding_mask(num_tokens, length)
        of_segments = self.segments(tokens * 0 if segments is None else segments)
        x = self.dropout(self.norm(self.words(tokens) + self.positions(nn.arange(length)) + of_segments))
        for layer in self.layers:
            x = layer(x, mask)
        picked = nn.at_positions(x, positions)
        return self.head(self.transform_norm(nn.gelu(self.transform(picked))), self.words)


class Case(Classified, ArrayCase):
    """Masked-token prediction at full sequence length, from the checkpoint in the data directory.

    Batches have ``tokens`` of shape (batch, length), and ``positions`` with ``labels`` of shape (batch, predictions).
    """

    accuracies: ClassVar = {"mlm_accuracy": 1}
    reference_names: ClassVar = {
        r"^words\.": "net.bert.embeddings.word_embeddings.",
        r"^segments\.": "net.bert.embeddings.token_type_embeddings.",
        r"^positions\.": "net.bert.embeddings.position_embeddings.",
        r"^norm\.": "net.bert.embeddings.LayerNorm.",
        r"^layers\.": "net.bert.encoder.layer.",
        r"\.(query|key|value)\.": r".attention.self.\1.",
        r"\.out\.": ".attention.output.dense.",
        r"\.attention_norm\.": ".attention.output.LayerNorm.",
        r"\.up\.": ".intermediate.dense.",
        r"\.down\.": ".output.dense.",
        r"\.feed_norm\.": ".output.LayerNorm.",
        r"^transform\.": "net.cls.predictions.transform.dense.",
        r"^transform_norm\.": "net.cls.predictions.transform.LayerNorm.",
        r"^head\.": "net.cls.predictions.",
    }

    def build_model(self) -> Any:
        return MaskedLm(self.sizes)

    def initial_weights(self) -> tuple[Path, dict[str, Any]] | None:
        """Return the weights of the ``BertForMaskedLM`` in the data directory."""
        if not self.settings.model["from_checkpoint"] or self.settings.loader.synthetic:
            return None
        path = self.data_dirs["bert_tokens"] / CHECKPOINT
        if not path.is_file():
            raise DataError(f"{path}: the initial checkpoint is missing; the case's README says where to get it")
        return path, {f"net.{name}": array for name, array in read_tensors(path).items()}

    def _logits(self, model: Any, batch: Batch) -> Any:
        return model(batch["tokens"], batch["positions"], batch.get("segments"), batch.get("num_tokens"))

    def loss(self, model: Any, batch: Batch) -> Any:
        return nn.cross_entropy(self._logits(model, batch), batch["labels"])

    def eval_sums(self, model: Any, batch: Batch) -> dict[str, Any]:
        """Count the masked tokens that were predicted, and add up their cross entropies."""
        logits, labels = self._logits(model, batch), batch["labels"]
        flat = nn.reshape(logits, (-1, logits.shape[-1])), nn.reshape(labels, (-1,))
        loss = nn.cross_entropy(logits, labels, "sum")
        return {**nn.num_correct(*flat, self.accuracies), "loss": loss, "count": nn.num_labels(labels)}

    def synthetic_batch(self, size: int) -> Arrays:
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
        head = self.number("hidden_size") * (self.number("hidden_size") + self.number("vocab_size"))
        return encoder_flops(self.sizes) + dense_flops(head, self.number("max_predictions"))

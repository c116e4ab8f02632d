"""Classification of text, and a BERT encoder (Devlin et al. 2018, arXiv:1810.04805) for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from accelmark.frameworks.pytorch.case import Batch
from accelmark.frameworks.pytorch.data.batches import generator_for
from accelmark.frameworks.pytorch.tasks.classification import Classification
from accelmark.spec.errors import DataError
from accelmark.train.tasks.text.files import Table


@final
@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """Dimensions of the encoder."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    max_positions: int
    dropout: float = 0.1
    num_segments: int = 2
    eps: float = 1e-12


class Output(nn.Module):
    """Projection, dropout, residual connection and layer norm."""

    def __init__(self, size: int, config: EncoderConfig) -> None:
        super().__init__()
        self.dense = nn.Linear(size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, config.eps)
        self.dropout = config.dropout

    def forward(self, inner: Tensor, x: Tensor) -> Tensor:
        """Return the normalised sum."""
        result: Tensor = self.LayerNorm(x + F.dropout(self.dense(inner), self.dropout, self.training))
        return result


class Attention(nn.Module):
    """Self-attention over non-padding tokens."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        hidden, self.heads, self.dropout = config.hidden_size, config.num_heads, config.dropout
        self.self = nn.ModuleDict({name: nn.Linear(hidden, hidden) for name in ("query", "key", "value")})
        self.output = Output(hidden, config)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the attended states."""
        batch, length, _ = x.shape
        query, key, value = (
            project(x).view(batch, length, self.heads, -1).transpose(1, 2) for project in self.self.values()
        )
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        attended: Tensor = self.output(mixed.transpose(1, 2).reshape(x.shape), x)
        return attended


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(config.hidden_size, config.intermediate_size)})
        self.output = Output(config.intermediate_size, config)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the layer's output; ``mask`` broadcasts to (batch, heads, length, length)."""
        x = self.attention(x, mask)
        fed: Tensor = self.output(F.gelu(self.intermediate["dense"](x)), x)
        return fed


class Embeddings(nn.Module):
    """Embeddings of tokens, positions and a single segment."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, hidden)
        self.position_embeddings = nn.Embedding(config.max_positions, hidden)
        self.token_type_embeddings = nn.Embedding(config.num_segments, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, config.eps)
        self.dropout = config.dropout

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the first hidden states."""
        positions = self.position_embeddings.weight[: tokens.shape[1]]
        summed = self.word_embeddings(tokens) + positions + self.token_type_embeddings.weight[0]
        return F.dropout(self.LayerNorm(summed), self.dropout, self.training)


class Encoder(nn.Module):
    """Tokens and a padding mask to hidden states; parameters have the names of published checkpoints."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        layers = (EncoderLayer(config) for _ in range(config.num_layers))
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(layers)})

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return hidden states of shape (batch, length, hidden); ``mask`` is false on padding."""
        x: Tensor = self.embeddings(tokens)
        for layer in self.encoder["layer"].children():
            x = layer(x, mask[:, None, None, :])
        return x

    def load(self, path: Path) -> None:
        """Load the weights of a published checkpoint except its pooler.

        Raises:
            DataError: the file is missing, damaged or has other shapes.
        """
        try:
            state = {name: weight for name, weight in load_file(path).items() if not name.startswith("pooler.")}
            state.pop("embeddings.position_ids", None)
            self.load_state_dict(state)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise DataError(f"{path}: are not this encoder's weights: {str(error).splitlines()[0]}") from error


def mean_state(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of hidden states over non-padding tokens, of shape (batch, hidden)."""
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1)


def read_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """Return a tokenizer of Hugging Face's ``tokenizer.json``.

    Raises:
        DataError: the file is missing or damaged, or has more tokens than the model.
    """
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        raise DataError(f"{path}: is no tokenizer: {error}") from error
    if (size := tokenizer.get_vocab_size()) > vocab_size:
        raise DataError(f"{path}: has {size:,} tokens, the model {vocab_size:,}: is it another model's tokenizer?")
    return tokenizer


def tokenize(tokenizer_file: Path, texts: Sequence[str], length: int) -> tuple[Tensor, Tensor]:
    """Return tokens and mask (0 on padding), int64 of shape (texts, length)."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    encoded: list[Any] = tokenizer.encode_batch(texts)
    return torch.tensor([one.ids for one in encoded]), torch.tensor([one.attention_mask for one in encoded])


class TextClassifier(nn.Module):
    """An encoder of transformers with its classifier."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return logits of shape (batch, classes)."""
        logits: Tensor = self.net(input_ids=tokens, attention_mask=mask).logits
        return logits


class TextClassification(Classification):
    """Classification of tokens of ``seq_length`` with a padding mask; the encoder's dimensions are settings."""

    inputs = ("tokens", "mask")
    block_class = "EncoderLayer"
    num_classes: int

    @property
    def config(self) -> EncoderConfig:
        """Dimensions of the encoder."""
        names = ("hidden_size", "intermediate_size", "num_layers", "num_heads", "vocab_size", "max_positions")
        return EncoderConfig(**{name: self.number(name) for name in names})

    def synthetic_batch(self, size: int) -> Batch:
        """Return random tokens without padding."""
        random, length = generator_for(self.place.seed), self.number("seq_length")
        return {
            "tokens": torch.randint(1, self.number("vocab_size"), (size, length), generator=random),
            "mask": torch.ones(size, length, dtype=torch.bool),
            "label": torch.randint(0, self.num_classes, (size,), generator=random),
        }


@final
class LabelledText:
    """Texts of a table with their classes, as tokens with a padding mask.

    Args:
        table: rows of a text and the number of its class.
        tokenizer: Hugging Face's ``tokenizer.json``, which adds the special tokens.
        length: tokens of a sample; longer texts are cut off.
    """

    def __init__(self, table: Table, tokenizer: Tokenizer, length: int, num_classes: int) -> None:
        self._table, self._tokenizer, self._num_classes = table, tokenizer, num_classes
        self._tokenizer.enable_truncation(length)
        self._tokenizer.enable_padding(length=length)

    def __len__(self) -> int:
        return len(self._table)

    def read(self, index: int, random: torch.Generator) -> Mapping[str, Tensor]:
        """Return ``tokens``, ``mask`` and ``label``; raises DataError with file and line for an unknown class."""
        text, label = self._table.row(index)
        if not label.isdecimal() or int(label) >= self._num_classes:
            expected = f"expected 0 to {self._num_classes - 1}"
            raise DataError(f"{self._table.where(index)}: {label!r} is no class; {expected}")
        found = self._tokenizer.encode(text)
        mask = torch.tensor(found.attention_mask, dtype=torch.bool)
        return {"tokens": torch.tensor(found.ids), "mask": mask, "label": torch.tensor(int(label))}

"""A BERT encoder (Devlin et al. 2018, arXiv:1810.04805) with the parameter names of published checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch.nn.functional as F  # noqa: N812
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from accelmark.spec.errors import DataError


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


class Projections(nn.Module):
    """Projections to queries, keys and values."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(hidden, hidden) for _ in range(3))

    def forward(self, x: Tensor, heads: int) -> tuple[Tensor, ...]:
        """Return queries, keys and values of shape (batch, heads, length, width)."""
        batch, length, _ = x.shape
        parts = (self.query, self.key, self.value)
        return tuple(part(x).view(batch, length, heads, -1).transpose(1, 2) for part in parts)


class Attention(nn.Module):
    """Self-attention over non-padding tokens."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.heads, self.dropout = config.num_heads, config.dropout
        self.self = Projections(config.hidden_size)
        self.output = Output(config.hidden_size, config)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the attended states."""
        query, key, value = self.self(x, self.heads)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout)
        attended: Tensor = self.output(mixed.transpose(1, 2).reshape(x.shape), x)
        return attended


class Dense(nn.Module):
    """A linear layer with the parameter name of checkpoints."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__()
        self.dense = nn.Linear(size_in, size_out)

    def forward(self, x: Tensor) -> Tensor:
        """Return the projection."""
        projected: Tensor = self.dense(x)
        return projected


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward network."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.attention = Attention(config)
        self.intermediate = Dense(config.hidden_size, config.intermediate_size)
        self.output = Output(config.intermediate_size, config)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the layer's output; ``mask`` broadcasts to (batch, heads, length, length)."""
        x = self.attention(x, mask)
        fed: Tensor = self.output(F.gelu(self.intermediate(x)), x)
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


class Layers(nn.Module):
    """The layers with the parameter names of checkpoints."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.layer = nn.ModuleList(EncoderLayer(config) for _ in range(config.num_layers))


class Encoder(nn.Module):
    """Embeddings and layers: tokens and a padding mask to hidden states."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.embeddings = Embeddings(config)
        self.encoder = Layers(config)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return hidden states of shape (batch, length, hidden); ``mask`` is false on padding."""
        x: Tensor = self.embeddings(tokens)
        for layer in self.encoder.layer:
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

"""A small Llama (Touvron et al. 2023, arXiv:2302.13971) on the bytes of Shakespeare's plays in PyTorch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from accelmark.frameworks.pytorch.case import PipelineParts
from accelmark.tasks.language.data import BYTE_VALUES, read_windows
from accelmark.tasks.language.pytorch import NextToken

if TYPE_CHECKING:
    from accelmark.frameworks.pytorch.context_parallel import SequencePart

_EPS: Final = 1e-5
_ROPE_BASE: Final = 10000.0
_INIT_STD: Final = 0.02


class RmsNorm(nn.Module):
    """Root-mean-square norm in the precision of its input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), _EPS)


class Layer(nn.Module):
    """Causal attention with rotary embeddings and a gated feed-forward network, each with a residual connection."""

    def __init__(self, hidden: int, intermediate: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.feed_norm = RmsNorm(hidden), RmsNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.gate_up = nn.Linear(hidden, 2 * intermediate, bias=False)
        self.down = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sequence: SequencePart | None = None) -> Tensor:
        """Return the layer's output for ``x`` of shape (batch, length, hidden)."""
        batch, length, hidden = x.shape
        width = hidden // self.heads
        query, key, value = (
            self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, width).permute(2, 0, 3, 1, 4)
        )
        query = query * cos + query.roll(width // 2, -1) * sin
        key = key * cos + key.roll(width // 2, -1) * sin
        if sequence is None:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = sequence.attend(query, key, value)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, hidden))
        gate, up = self.gate_up(self.feed_norm(x)).chunk(2, -1)
        fed: Tensor = self.down(F.silu(gate) * up)
        return x + fed


class LlamaMini(nn.Module):
    """Decoder with an untied output layer: tokens to logits."""

    cos: Tensor
    sin: Tensor

    def __init__(self, *, vocab: int, hidden: int, intermediate: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(Layer(hidden, intermediate, heads) for _ in range(layers))
        self.norm = RmsNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        width = hidden // heads
        rates = _ROPE_BASE ** (-torch.arange(0, width, 2).float() / width)
        angles = torch.outer(torch.arange(length).float(), rates)
        self.register_buffer("cos", torch.cat((angles.cos(), angles.cos()), -1), persistent=False)
        self.register_buffer("sin", torch.cat((-angles.sin(), angles.sin()), -1), persistent=False)
        self._initialise(_INIT_STD / math.sqrt(2 * layers))

    def _initialise(self, residual_std: float) -> None:
        """Initialise weights as in GPT-2; residual projections are divided by the square root of their number."""
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                is_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, 0.0, residual_std if is_residual else _INIT_STD)

    def forward(self, tokens: Tensor, sequence: SequencePart | None = None) -> Tensor:
        """Return logits of shape (batch, length, vocabulary), of a rank's part of each sequence if one is given."""
        cos, sin = self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]]
        if sequence is not None:
            tokens, cos, sin = sequence.of(tokens), sequence.of(cos, 0), sequence.of(sin, 0)
        x: Tensor = self.embedding(tokens)
        if x.device.type != "meta" and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, sequence)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Case(NextToken):
    """Next-byte prediction in consecutive windows; the byte after each window is only a label."""

    tokens = "bytes"
    dtype = torch.uint8
    reported: ClassVar = {"eval_loss": "eval_loss", "bits_per_byte": "bits_per_token"}
    vocab_size = BYTE_VALUES
    block_class = "Layer"

    def build_model(self) -> nn.Module:
        return LlamaMini(
            vocab=self.vocab_size,
            hidden=self.number("hidden_size"),
            intermediate=self.number("intermediate_size"),
            layers=self.number("num_layers"),
            heads=self.number("num_heads"),
            length=self.number("seq_length"),
        )

    def pipeline_parts(self) -> PipelineParts:
        return PipelineParts("embedding", "layers", ("norm", "head"))

    def splits_sequences(self) -> bool:
        """Return that the decoder and both losses take parts of sequences."""
        return True

    def dataset(self, *, train: bool) -> dict[str, Tensor]:
        """Return the training plays' windows, or ``eval_windows`` windows spread evenly over the held-out plays."""
        count = None if train else self.number("eval_windows")
        windows = read_windows(self.data_dirs["shakespeare"], self.number("seq_length"), count)
        return {"bytes": torch.from_numpy(windows)}

"""Attention for models of transformers: causal, by scaled dot-product attention, and of padded samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

if TYPE_CHECKING:
    from accelmark.frameworks.pytorch.context_parallel import SequencePart

CAUSAL: Final = "accelmark_causal"
"""Name of :func:`causal_attention` in a configuration's ``attn_implementation``."""
_GROUPS_HEADS: Final = "enable_gqa" in (F.scaled_dot_product_attention.__doc__ or "")
"""Whether the kernels take fewer heads of keys than of queries (since PyTorch 2.5)."""


def causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    documents: Tensor | None = None,
    sequence: SequencePart | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention without a mask tensor where possible, so that a flash kernel can be chosen.

    transformers' own ``sdpa`` tests the position ids with ``.all()``, which synchronizes on an accelerator and fails on
    the meta device, and passes a dense mask under ``torch.compile``. It builds no mask for a custom attention function.

    Args:
        query: shape (batch, heads, length, width); ``key`` and ``value`` have key-value heads.
        sliding_window: number of latest positions that a token attends to; None: all earlier ones.
        s_aux: one learned score per head that takes part in the softmax without a value, the "attention sink" of
            gpt-oss (OpenAI 2025, arXiv:2508.10925, section 2.2).
        documents: document number of each token, shape (batch, whole length); tokens attend within their document.
        sequence: this rank's part of each sequence, to which query, key and value belong; None: all of it.
    """
    if attention_mask is not None:
        raise ValueError("causal_attention takes no attention mask: samples are not padded")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return causal attention of queries at the last positions of ``key``."""
        length, width = query.shape[2], value.shape[3]
        mask = _mask(length, key.shape[2], sliding_window, documents, query.device)
        # No products of the model: on the meta device, where FLOPs are counted, sinks are left out.
        has_sink = s_aux is not None and not query.is_meta
        if s_aux is not None and has_sink:
            query, key, value = _with_sink(query, key, value, s_aux, scaling)
            mask = None if mask is None else F.pad(mask, (1, 0, 1, 0), value=True)
        if mask is None and query.shape[2] != key.shape[2]:
            mask = causal_lower_right(query.shape[2], key.shape[2])
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and not _GROUPS_HEADS:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        grouped = {"enable_gqa": True} if groups > 1 and _GROUPS_HEADS else {}
        output: Tensor = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling, **grouped
        )
        return output[:, :, 1:, :width] if has_sink else output

    output = attend(query, key, value) if sequence is None else sequence.attend(query, key, value, attend)
    return output.transpose(1, 2), None


AttentionInterface.register(CAUSAL, causal_attention)


def _mask(
    num_queries: int, length: int, window: int | None, documents: Tensor | None, device: torch.device
) -> Tensor | None:
    """Return True where a query, at one of the last positions, attends to a key; None: to all before it."""
    if documents is None and (window is None or window >= length):
        return None
    position = torch.arange(length, device=device)
    distance = position[-num_queries:, None] - position
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    if documents is None:
        return mask
    documents = documents[:, None, :length]
    return mask & (documents[:, :, -num_queries:, None] == documents[:, :, None])


def _with_sink(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor, scaling: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Put a key with the score ``sink`` and the value 0 before the others, and a query whose output is dropped.

    One more dimension holds the score: 1 in every query, ``sink / scaling`` in that key, 0 in the others.
    """
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    query = F.pad(F.pad(query, (0, 1), value=1.0), (0, 0, 1, 0))
    key = F.pad(key, (0, 1, 1, 0))
    first = torch.zeros_like(key[:, :, :1])
    first[..., -1] = (sink / scale).to(key.dtype).view(1, heads, 1)
    key = torch.cat((first, key[:, :, 1:]), 2)
    # Kernels want values as wide as keys.
    return query, key, F.pad(value, (0, key.shape[3] - value.shape[3], 1, 0))


_PADDED: Final = "accelmark_padded"
C = TypeVar("C", bound=PreTrainedConfig)


def padding_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return the dense mask of transformers' ``sdpa``, also where all is true, for which a test would synchronize."""
    dense = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor | None = sdpa_mask(*args, **dense)
    return mask


def with_padding(config: C) -> C:
    """Set the attention of a model's configuration to scaled dot-product attention with :func:`padding_mask`."""
    config._attn_implementation = _PADDED
    return config


AttentionInterface.register(_PADDED, sdpa_attention_forward)
AttentionMaskInterface.register(_PADDED, padding_mask)

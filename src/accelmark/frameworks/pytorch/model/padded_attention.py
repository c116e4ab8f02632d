"""Attention for models of transformers whose samples are padded."""

from __future__ import annotations

from typing import Any, Final, TypeVar

from torch import Tensor
from transformers import AttentionInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

_PADDED: Final = "accelmark_padded"
C = TypeVar("C", bound=PreTrainedConfig)


def padding_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return the dense mask of transformers' ``sdpa``, also where all of it is true.

    transformers leaves such a mask out after a test with ``.all()``, which synchronizes on an accelerator and fails on
    the meta device.
    """
    dense = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor | None = sdpa_mask(*args, **dense)
    return mask


def with_padding(config: C) -> C:
    """Set the attention of a model's configuration to scaled dot-product attention with :func:`padding_mask`."""
    config._attn_implementation = _PADDED
    return config


AttentionInterface.register(_PADDED, sdpa_attention_forward)
AttentionMaskInterface.register(_PADDED, padding_mask)

"""Losses that assign predictions to objects: in full precision, and not at all on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map


@final
class FullPrecision(nn.Module):
    """A function of tensors that computes in fp32 within autocast, too.

    Boxes in half precision are off by pixels, and SciPy, which assigns them, does not have all of its types.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *given: Any, **named: Any) -> Any:
        """Call the function with floating-point tensors in fp32."""
        device = next(each.device for each in tree_leaves((given, named)) if isinstance(each, Tensor))
        with torch.autocast(device.type, enabled=False):
            given, named = tree_map(_wide, (given, named))
            return self.function(*given, **named)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def sum_of_outputs(model: nn.Module, *given: Tensor) -> Tensor:
    """Return a sum for counting a model's operations on the meta device, where no values can be compared.

    The losses, which assign predictions to objects, have no counted operations. In training, encoder layers of
    transformers compare values; in evaluation they take the same operations.
    """
    leaves = [each for each in tree_leaves(model.eval()(*given)) if isinstance(each, Tensor) and each.requires_grad]
    return torch.stack([each.float().sum() for each in leaves]).sum()

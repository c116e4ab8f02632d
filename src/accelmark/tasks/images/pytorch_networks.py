"""Networks for images of bytes; parts with a learning rate of their own; losses in full precision."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedModel

from accelmark.frameworks.pytorch.batches import TaskFamily
from accelmark.frameworks.pytorch.model.pretrained import load_backbone
from accelmark.frameworks.pytorch.optimizers import build_optimizer, with_own_rate
from accelmark.tasks.images.data import MEAN, STD


class ByteImageNetwork(nn.Module):
    """A network of transformers behind images of uint8, which are normalised on the device.

    Args:
        net: the network.
        mean: of the channels, for values from 0 to 1; ImageNet's by default.
        std: likewise.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, net: PreTrainedModel, mean: Sequence[float] = MEAN, std: Sequence[float] = STD) -> None:
        super().__init__()
        self.net: Any = net
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1) * 255, persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1) * 255, persistent=False)

    def normalised(self, image: Tensor) -> Tensor:
        """Return images of shape (batch, 3, height, width) as floats with the mean 0 and the deviation 1."""
        return (image.float() - self.mean) / self.std


class DenseTask(TaskFamily):
    """A task whose network has a part, such as a pretrained backbone, with its own learning rate."""

    samples: ClassVar[str]
    """Name of the data set."""
    weights: ClassVar[str] = ""
    """Name of the data set with published weights."""
    backbone_name: ClassVar[str] = ""
    """Name of the part that starts from published weights; empty: all of the network."""
    own_rate: ClassVar[tuple[str, float]]
    """A part of the names of weights, between dots, and the factor of their learning rate."""

    @abstractmethod
    def network(self) -> PreTrainedModel:
        """Return the network with its initial weights."""

    def backbone(self, net: nn.Module) -> Any:
        """Return the part of the network that starts from published weights."""
        return net.get_submodule(self.backbone_name)

    def with_weights(self, net: nn.Module, *, new: Sequence[str] = ()) -> Any:
        """Return that part, with its weights where there is data; ``new`` is that of :func:`load_backbone`."""
        backbone = self.backbone(net)
        load_backbone(backbone, self.data_dirs.get(self.weights), new=new)
        return backbone

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer, with ``own_rate``."""
        optimizer = build_optimizer(model, self.settings.optimizer, self.place.device)
        return with_own_rate(optimizer, model, *self.own_rate)


@final
class FullPrecision(nn.Module):
    """A function of tensors that computes in fp32 within autocast, too.

    Boxes in half precision are off by pixels, and SciPy, which assigns them, does not have all of its types.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call the function with floating-point tensors in fp32."""
        device = next(leaf.device for leaf in tree_leaves((inputs, named)) if isinstance(leaf, Tensor))
        with torch.autocast(device.type, enabled=False):
            inputs, named = tree_map(_wide, (inputs, named))
            return self.function(*inputs, **named)


def _wide(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.is_floating_point() else value


def sum_of_outputs(model: nn.Module, *inputs: Tensor) -> Tensor:
    """Return a sum for counting a model's operations on the meta device, where no values can be compared.

    The losses, which assign predictions to objects, have no counted operations. In training, encoder layers of
    transformers compare values; in evaluation they take the same operations.
    """
    leaves = [each for each in tree_leaves(model.eval()(*inputs)) if isinstance(each, Tensor) and each.requires_grad]
    return torch.stack([leaf.float().sum() for leaf in leaves]).sum()

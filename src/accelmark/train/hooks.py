"""What a vendor may replace of the driver: methods with a default that works on any device PyTorch knows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from accelmark.train.case import TrainCase

ALLOWED_HOOKS: Final = (
    "convert_model",
    "create_optimizer",
    "model_to_fp16",
    "model_to_ddp",
    "create_grad_scaler",
    "backward",
    "train_step",
)


class Hooks:
    """The default hooks. A vendor subclasses this as ``Extern`` in ``extern/__init__.py`` of its case folder.

    A hook may change *how* the chip computes; the audit compares what it returns with the standard case: the same
    parameters, the same kind of optimizer.
    """

    def __init__(self, case: TrainCase) -> None:
        self.case = case
        self.settings = case.settings
        self.device = case.place.device

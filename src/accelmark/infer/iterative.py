"""The interface of models whose answers take steps that depend on each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import nn


class IterativeModel(nn.Module, ABC):
    """A model that makes an answer step by step, such as the tokens of a decoder or the steps of a denoiser.

    Rounding in one step changes all later ones, so whole answers of two precisions are not comparable. The model
    therefore returns what each step computed, and can compute the same steps again: its forward takes the case's
    inputs and, optionally, the outputs of an earlier call after them. With those it returns its outputs for the same
    steps, each computed from the inputs and from what the earlier call returned for the steps before it. So the
    framework, in fp32, checks every step of an engine: floating-point outputs by their error, and integers, which are
    the choices of the steps, by the share that it would have chosen too. The choice of a step after the end of an
    answer is ``IGNORED``.
    """

    @abstractmethod
    def parts(self) -> Sequence[nn.Module]:
        """Return the modules that steps compute with, each with few shapes, which an engine may compile in place."""

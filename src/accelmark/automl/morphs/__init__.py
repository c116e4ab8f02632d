"""Morphs of networks, with their weights carried over so that the function stays what it was."""

from accelmark.automl.morphs.choices import MorphChoices, MorphLimits, possible_morphs, random_morph
from accelmark.automl.morphs.morph import MORPH_KINDS, Morph, MorphError, MorphKind, WeightMode
from accelmark.automl.morphs.settings import fitted_weights, with_dropout, with_kernel
from accelmark.automl.morphs.structure import apply_morph
from accelmark.automl.morphs.weights import Array, Statistics, Weights, carry_weights

__all__ = [
    "MORPH_KINDS",
    "Array",
    "Morph",
    "MorphChoices",
    "MorphError",
    "MorphKind",
    "MorphLimits",
    "Statistics",
    "WeightMode",
    "Weights",
    "apply_morph",
    "carry_weights",
    "fitted_weights",
    "possible_morphs",
    "random_morph",
    "with_dropout",
    "with_kernel",
]

"""Pretraining of Llama 2 7B in TensorFlow."""

from accelmark.cases.llama2_7b.arrays import Case as Case

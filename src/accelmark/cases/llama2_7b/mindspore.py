"""Pretraining of Llama 2 7B in MindSpore."""

from accelmark.cases.llama2_7b.arrays import Case as Case

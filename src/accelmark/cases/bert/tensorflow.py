"""Masked-language-model pretraining of BERT-large in TensorFlow."""

from accelmark.cases.bert.arrays import Case as Case

"""Masked-language-model pretraining of BERT-large in MindSpore."""

from accelmark.cases.bert.arrays import Case as Case

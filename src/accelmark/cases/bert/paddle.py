"""Masked-language-model pretraining of BERT-large in PaddlePaddle."""

from accelmark.cases.bert.arrays import Case as Case

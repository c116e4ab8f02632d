"""Pretraining of BERT-large."""

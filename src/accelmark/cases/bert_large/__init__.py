"""BERT-large, masked language modelling."""

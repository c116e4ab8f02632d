"""DistilBERT fine-tuned on SST-2."""

"""A pretrained sentence encoder fine-tuned on labelled text."""

"""Text files and the scores of generated text."""

"""Classification of text, and text to text."""

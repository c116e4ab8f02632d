"""Task families in MindSpore."""

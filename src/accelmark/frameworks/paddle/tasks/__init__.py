"""Task families in Paddle."""

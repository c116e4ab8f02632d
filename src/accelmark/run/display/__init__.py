"""Show progress: live terminal, plain lines, JSON lines."""

"""What people write, as checked types. Imports nothing else of AccelMark's."""

"""The command line: one small file a verb; parses, calls one function, prints."""

from accelmark.cli.main import main

__all__ = ["main"]

"""The command line: each verb parses options, calls one function and prints."""

from accelmark.cli.main import main

__all__ = ["main"]

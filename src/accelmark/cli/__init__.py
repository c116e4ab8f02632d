"""The command line: one file for each verb, which parses options, calls one function and prints."""

from accelmark.cli.main import main

__all__ = ["main"]

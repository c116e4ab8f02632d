"""The command line: each verb parses options, calls one function and prints."""

import sys

if sys.version_info < (3, 11):
    sys.stderr.write(
        f"accelmark: error: the commands need Python 3.11 or newer, and this is {sys.version.split()[0]}; "
        "agents and ranks run on 3.9 or newer: name that Python in a cluster file (python, environments)\n"
    )
    sys.exit(2)

from accelmark.cli.main import main

__all__ = ["main"]

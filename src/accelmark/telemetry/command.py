"""Run a vendor's tool as an argument list, with a time limit, and kill its whole process group."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence


class CommandError(Exception):
    """The command gave no usable output; the message is the reason."""


def run_command(command: Sequence[str], timeout_s: float) -> str:
    """Run ``command`` and return its standard output as text.

    Raises:
        CommandError: it is not installed, ran longer than ``timeout_s`` (it and its children are killed), or exited
            with another status than 0.
    """
    name = command[0]
    try:
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True, env={**os.environ, "LC_ALL": "C", "LANG": "C"},
        )  # fmt: skip
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise CommandError(
            f"{name} {'is not installed' if missing else f'cannot be started: {error.strerror}'}"
        ) from None
    with process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise CommandError(f"{name} did not finish within {timeout_s:g} s") from None
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    if status := process.returncode:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        raise CommandError(f"{name} {how}")
    return output.decode("utf-8", errors="replace")

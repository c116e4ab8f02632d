"""Run a vendor's tool as an argument list, with a time limit and an output limit, and kill its whole process group."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Final

_LIMIT_BYTES: Final = 4 * 1024 * 1024


class CommandError(Exception):
    """The command gave no usable output; the message is the reason."""


def run_command(command: Sequence[str], timeout_s: float, limit_bytes: int = _LIMIT_BYTES) -> str:
    """Run ``command`` and return its standard output as text.

    Raises:
        CommandError: it is not installed, ran longer than ``timeout_s`` (it and its children are killed), wrote more
            than ``limit_bytes``, or exited with another status than 0.
    """
    name = command[0]
    try:
        process = subprocess.Popen(
            list(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, "LC_ALL": "C", "LANG": "C"},
        )
    except FileNotFoundError:
        raise CommandError(f"{name} is not installed") from None
    except OSError as error:
        raise CommandError(f"{name} cannot be started: {error.strerror}") from error
    try:
        output = _read(process, name, timeout_s, limit_bytes)
        status = process.wait(timeout=max(0.1, timeout_s))
    except (TimeoutError, subprocess.TimeoutExpired):
        raise CommandError(f"{name} did not finish within {timeout_s:g} s") from None
    finally:
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
    if status != 0:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        raise CommandError(f"{name} {how}")
    return output.decode("utf-8", errors="replace")


def _read(process: subprocess.Popen[bytes], name: str, timeout_s: float, limit_bytes: int) -> bytes:
    assert process.stdout is not None  # noqa: S101  it was started with a pipe
    deadline = time.monotonic() + timeout_s
    output = bytearray()
    while select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
        chunk = os.read(process.stdout.fileno(), 65536)
        if not chunk:
            return bytes(output)
        output += chunk
        if len(output) > limit_bytes:
            raise CommandError(f"{name} wrote more than {limit_bytes} bytes")
    raise TimeoutError

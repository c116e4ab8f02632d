"""Bringing files and AccelMark itself to a host."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from pathlib import PurePosixPath

from accelmark.run.launchers.ssh.connection import HostError, SshHost, UnreachableError, library
from accelmark.run.launchers.ssh.wheel import Wheel
from accelmark.run.onhost import command


def delivery(python: str, wheel: Wheel, code: PurePosixPath) -> list[str]:
    """Return the command that receives a wheel on a host."""
    return command(python, "receive", "wheel", str(code), wheel.sha256, str(len(wheel.content)))


async def deliver(host: SshHost, python: str, wheel: Wheel, code: PurePosixPath) -> bool:
    """Unpack the wheel at ``code`` on a host that has not got it; returns whether it had to be sent.

    Raises:
        HostError: it cannot be had there; the reason is named.
    """
    process = await host.open(delivery(python, wheel, code))
    try:
        answer = (await process.stdout.readline()).strip()
        if answer == b"send":
            process.stdin.write(wheel.content)
            process.stdin.write_eof()
            answer = (await process.stdout.readline()).strip()
            if answer == b"done":
                return True
        if answer == b"have":
            return False
        said = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
    except (OSError, library().Error, asyncio.IncompleteReadError) as error:
        raise UnreachableError(host.name, f"the connection was lost while AccelMark was delivered ({error})") from error
    finally:
        process.close()
    raise HostError(host.name, f"AccelMark could not be delivered: {said[-1] if said else 'no answer'}")


async def put_files(host: SshHost, python: str, files: Mapping[PurePosixPath, str]) -> None:
    """Write text files on a host, each complete or not at all.

    Raises:
        HostError: they cannot be written.
    """
    contents = [text.encode() for text in files.values()]
    header = [
        [str(path), hashlib.sha256(content).hexdigest(), len(content)]
        for path, content in zip(files, contents, strict=True)
    ]
    stdin = b"".join([json.dumps(header).encode(), b"\n", *contents])
    done = await host.run(command(python, "receive", "files"), stdin)
    if done.code != 0:
        raise HostError(host.name, f"files could not be written: {done.said}")

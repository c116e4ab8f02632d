"""Deliver files and AccelMark itself to a host.

A program on the host (:mod:`accelmark.run.onhost.receive`) writes them, since SFTP reports a full disk or a read-only
file system as "Failure" only, and some hosts have no SFTP server.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Mapping
from pathlib import PurePosixPath

from accelmark.run.launchers.host import HostError
from accelmark.run.launchers.ssh.connection import SshConnection, library
from accelmark.run.launchers.ssh.wheel import Wheel
from accelmark.run.onhost import command


def delivery_command(python: str, wheel: Wheel, code: PurePosixPath) -> list[str]:
    """Return the command on a host that receives a wheel."""
    return command(python, "receive", "wheel", str(code), wheel.sha256, str(len(wheel.content)))


async def deliver(host: SshConnection, python: str, wheel: Wheel, code: PurePosixPath) -> bool:
    """Unpack the wheel at ``code`` on a host where it is missing; returns whether it was sent.

    Raises:
        HostError: it could not be written; the cause is named.
    """
    process = await host.open(delivery_command(python, wheel, code))
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
        errors = (await process.stderr.read()).decode(errors="replace").strip().splitlines()
    except (OSError, library().Error, asyncio.IncompleteReadError) as error:
        raise host.lost(error) from error
    finally:
        process.close()
    raise HostError(host.name, f"AccelMark could not be delivered: {errors[-1] if errors else 'no answer'}")


async def put_files(host: SshConnection, python: str, files: Mapping[PurePosixPath, str]) -> None:
    """Write text files on a host; each appears complete or not at all.

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
        raise HostError(host.name, f"files could not be written: {done.message}")

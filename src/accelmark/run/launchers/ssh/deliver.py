"""Deliver files and AccelMark itself to a host.

A program on the host (:mod:`accelmark.run.onhost.receive`) writes them, since SFTP reports a full disk or a read-only
file system as "Failure" only, and some hosts have no SFTP server.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import PurePosixPath

from accelmark.run.host import Host, HostError
from accelmark.run.launchers.ssh.wheel import wheel
from accelmark.run.onhost import command


def delivery_command(python: str, code: PurePosixPath) -> list[str]:
    """Return the command on a host that receives the wheel and unpacks it at ``code``."""
    return command(python, "receive", "wheel", str(code), wheel().sha256, str(len(wheel().content)))


async def deliver(host: Host, python: str, code: PurePosixPath) -> None:
    """Unpack the wheel at ``code`` on a host where it is missing.

    Raises:
        HostError: it could not be written; the cause is named.
    """
    if (await host.run(["test", "-d", str(code)])).code == 0:
        return
    done = await host.run(delivery_command(python, code), wheel().content, timeout_s=None)
    if done.code != 0:
        raise HostError(host.name, f"AccelMark could not be delivered: {done.message}")


async def put_files(host: Host, python: str, files: Mapping[PurePosixPath, str]) -> None:
    """Write text files on a host; each appears complete or not at all.

    Raises:
        HostError: they cannot be written.
    """
    contents = {str(path): text.encode() for path, text in files.items()}
    header = [[path, hashlib.sha256(content).hexdigest(), len(content)] for path, content in contents.items()]
    stdin = b"".join([json.dumps(header).encode(), b"\n", *contents.values()])
    done = await host.run(command(python, "receive", "files"), stdin)
    if done.code != 0:
        raise HostError(host.name, f"files could not be written: {done.message}")

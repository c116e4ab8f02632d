"""Deliver files and the running AccelMark itself, as a wheel, to a host.

The wheel is reproducible, so its hash names it, and it is sent once to each host. Cases, vendors and frameworks from
plug-ins are in it below ``plugins/``. A program on the host (:mod:`accelmark.run.onhost.program`) writes files, since
SFTP reports a full disk or a read-only file system as "Failure" only, and some hosts have no SFTP server.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Final, NamedTuple

import accelmark
from accelmark.run.host import Host
from accelmark.run.onhost import command
from accelmark.spec.plugins.catalog import JOB_KINDS, FolderRef, extensions, folders

PLUGINS: Final = "plugins"
_SKIPPED: Final = {"__pycache__", ".git", ".mypy_cache", ".ruff_cache"}


class Wheel(NamedTuple):
    """A wheel's bytes, their hash, and the name of the directory for its content."""

    content: bytes
    sha256: str
    directory: str


@cache
def wheel() -> Wheel:
    """Build the wheel."""
    root = Path(accelmark.__file__).parent
    members = {f"accelmark/{name}": path for name, path in _tree(root)}
    for place, folder in _plugins(root):
        members |= {f"{place}/{name}": path for name, path in _tree(folder)}
    info = f"accelmark-{accelmark.__version__}.dist-info"
    texts = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: accelmark\nVersion: {accelmark.__version__}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: accelmark\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    contents = {name: path.read_bytes() for name, path in members.items()}
    contents |= {name: text.encode() for name, text in texts.items()}
    record = ""
    for name, content in sorted(contents.items()):
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(content)}\n"
    contents[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in sorted(contents.items()):
            entry = zipfile.ZipInfo(name)  # dated 1980
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, content, zipfile.ZIP_DEFLATED)
    sha256 = hashlib.sha256(buffer.getvalue()).hexdigest()
    return Wheel(buffer.getvalue(), sha256, f"accelmark-{accelmark.__version__}-{sha256[:16]}")


def on_host(ref: FolderRef, code: PurePosixPath) -> FolderRef:
    """Return a plug-in's folder, or one inside it, with its path in the wheel unpacked at ``code``."""
    is_ours = ref.path.is_relative_to(Path(accelmark.__file__).parent)
    changed = {"path": path_on_host(ref.path, code)} | ({} if is_ours else {"package": None})
    return ref.model_copy(update=changed)


def path_on_host(path: Path, code: PurePosixPath) -> Path:
    """Return the path of a plug-in's folder, or of a file inside it, in the wheel unpacked at ``code``."""
    root = Path(accelmark.__file__).parent
    if path.is_relative_to(root):
        return Path(code / "accelmark" / path.relative_to(root))
    for place, folder in _plugins(root):
        if path.is_relative_to(folder):
            return Path(code / place / path.relative_to(folder))
    return path


def _plugins(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the path in the wheel, and on this machine, of each plug-in that is not below ``root``."""
    for kind in JOB_KINDS:
        for folder in folders(kind).values():
            if not folder.path.is_relative_to(root):
                yield f"{PLUGINS}/{kind}/{folder.name}", folder.path
    for number, path in enumerate(path for vendor in folders("vendors") for path in extensions(vendor)):
        yield f"{PLUGINS}/extensions/{number}/{path.name}", path


def _tree(root: Path) -> Iterator[tuple[str, Path]]:
    for directory, names, files in os.walk(root):
        names[:] = sorted(name for name in names if name not in _SKIPPED)
        for file in sorted(files):
            if not file.endswith(".pyc"):
                path = Path(directory, file)
                yield path.relative_to(root).as_posix(), path


def delivery_command(python: str, code: PurePosixPath) -> list[str]:
    """Return the command on a host that receives the wheel and unpacks it at ``code``."""
    return command(python, "wheel", str(code), wheel().sha256, str(len(wheel().content)))


async def deliver(host: Host, python: str, code: PurePosixPath) -> None:
    """Unpack the wheel at ``code`` on a host where it is missing. Raises HostError: it could not be written."""
    if (await host.run(["test", "-d", str(code)])).code == 0:
        return
    argv = delivery_command(python, code)
    await host.require(argv, "AccelMark could not be delivered", wheel().content, timeout_s=None)


async def put_files(host: Host, python: str, files: Mapping[PurePosixPath, str]) -> None:
    """Write text files on a host, each complete or not at all; raises HostError if they cannot be written."""
    contents = {str(path): text.encode() for path, text in files.items()}
    header = [[path, hashlib.sha256(content).hexdigest(), len(content)] for path, content in contents.items()]
    stdin = b"".join([json.dumps(header).encode(), b"\n", *contents.values()])
    await host.require(command(python, "files"), "files could not be written", stdin)

"""Write files from standard input; each appears complete or not at all.

``receive wheel PATH SHA256 SIZE`` unpacks a wheel at PATH, unless it is there. ``receive files`` reads a line of JSON,
``[[path, sha256, size], ...]``, and then their contents.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys


class DamagedError(Exception):
    """The content of a file does not match its checksum."""


def content_of(digest: str, size: int) -> bytes:
    """Read the content of one file."""
    content = sys.stdin.buffer.read(size)
    if len(content) != size or hashlib.sha256(content).hexdigest() != digest:
        raise DamagedError("damaged in transfer: %d of %d bytes" % (len(content), size))
    return content


def write(path: str, content: bytes) -> None:
    """Write a file under another name, and rename it."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    partial = "%s.%d.part" % (path, os.getpid())
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        if os.path.exists(partial):
            os.unlink(partial)


def receive_wheel(path: str, digest: str, size: int) -> None:
    """Receive and unpack a wheel."""
    import shutil
    import zipfile  # imported here: slow, and seldom needed

    archive = "%s.%d.whl" % (path, os.getpid())
    directory = "%s.%d.tree" % (path, os.getpid())
    write(archive, content_of(digest, size))
    try:
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(directory)
        os.rename(directory, path)
    except OSError:
        if not os.path.isdir(path):
            raise
    finally:
        os.unlink(archive)
        shutil.rmtree(directory, ignore_errors=True)


def main(arguments: list[str]) -> int:
    """Run one of the two forms; returns the exit code."""
    try:
        if arguments[0] == "wheel":
            receive_wheel(arguments[1], arguments[2], int(arguments[3]))
        else:
            for path, digest, size in json.loads(sys.stdin.buffer.readline()):
                write(path, content_of(digest, size))
    except DamagedError as error:
        sys.stderr.write("%s\n" % error)
        return 5
    except OSError as error:
        sys.stderr.write("%s: %s\n" % (error.filename or "disk", error.strerror))
        return 6
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

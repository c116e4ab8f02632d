"""The token that guards the server beyond this machine; it stands in a file and is never printed."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path
from typing import Final

from accelmark.spec.errors import RequestError

_FORM: Final = re.compile(r"[A-Za-z0-9_-]{20,256}")


def read_or_make(path: Path) -> str:
    """Return the token in ``path``; a file that is not there is made with a new one, readable by its owner only.

    Raises:
        RequestError: the file cannot be read or written, others may read it, or it holds no token.
    """
    try:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            pass
        else:
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(32) + "\n")
        if path.stat().st_mode & 0o077:
            raise RequestError(f"{path}: others may read or write it: chmod 600 it first")
        token = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path}: cannot be used for the token: {error}") from error
    if not _FORM.fullmatch(token):
        raise RequestError(f"{path}: a token is 20 to 256 letters, digits, - and _ on one line")
    return token

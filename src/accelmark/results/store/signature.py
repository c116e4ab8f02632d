"""Sign a run's manifest with an SSH key, and check signatures, by ``ssh-keygen -Y``.

The signature covers the lines of the manifest except pages, which are written again from the results.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Final, Literal, NamedTuple

from accelmark.spec.errors import RequestError, RunError

SIGNATURE_FILE: Final = "MANIFEST.sha256.sig"
SIGNED_MANIFEST_FILE: Final = "MANIFEST.signed.sha256"
"""In a bundle: the manifest that was signed, where bundling removed secrets from files."""
KEY_VARIABLE: Final = "ACCELMARK_SIGNING_KEY"
"""Path of the SSH key with which runs are signed at their end."""
_NAMESPACE: Final = "accelmark"
_TIMEOUT_S: Final = 60.0
_NOT_SIGNED: Final = re.compile(rf"{SIGNATURE_FILE}|{SIGNED_MANIFEST_FILE}|[^/]*\.html|.*/mllog\.log")


class SignatureState(NamedTuple):
    """Whether a run is signed, and by whom."""

    status: Literal["unsigned", "signed", "trusted", "untrusted", "broken", "unchecked"]
    """``trusted``: by a key that the reader named; ``untrusted``: by another. ``unchecked``: without ssh-keygen."""
    text: str
    changed: tuple[str, ...] = ()
    """Files of a bundle that differ from the signed ones, because secrets were removed or they were edited."""


class Trust(NamedTuple):
    """The keys that a reader trusts; at most one is given."""

    key: Path | None = None
    """A public key."""
    allowed_signers: Path | None = None
    """A file in the format of ssh-keygen's ALLOWED SIGNERS."""


def signing_key() -> Path | None:
    """Return the key of ``ACCELMARK_SIGNING_KEY``; None where it is not set. Raises RequestError if it is no file."""
    value = os.environ.get(KEY_VARIABLE)
    if not value:
        return None
    key = Path(value).expanduser()
    if not key.is_file():
        raise RequestError(f"{KEY_VARIABLE}: {key}: is not a file: name a private SSH key, or unset the variable")
    return key


def require_key() -> None:
    """Check before a run that it can be signed at its end. Raises RequestError or RunError if it cannot."""
    key = signing_key()
    if key is not None:
        sign("", key)


def signed_content(manifest: str) -> bytes:
    """Return the lines of a manifest that a signature covers: all but pages and logs written on request."""
    lines = ((line, line.partition("  ")[2].strip()) for line in manifest.splitlines(keepends=True))
    return "".join(line for line, name in lines if not _NOT_SIGNED.fullmatch(name)).encode()


def sign(manifest: str, key: Path) -> bytes:
    """Return the signature of a manifest. Raises RunError: ssh-keygen cannot sign with the key."""
    with tempfile.TemporaryDirectory(prefix="accelmark-sign-") as directory:
        place = Path(directory, "manifest")
        place.write_bytes(signed_content(manifest))
        # A key with a passphrase needs an agent: there is no prompt at the end of a run.
        done = _ssh_keygen(["-Y", "sign", "-n", _NAMESPACE, "-f", str(key), str(place)], b"")
        signature = place.with_suffix(".sig")
        if done is None or done.returncode != 0 or not signature.is_file():
            why = "ssh-keygen is not on the PATH" if done is None else done.stderr.decode(errors="replace").strip()
            raise RunError(f"{key}: the run cannot be signed: {why}")
        return signature.read_bytes()


def check_signature(directory: Path, manifest_file: str, trust: Trust | None = None) -> SignatureState:
    """Check the signature of the run in ``directory``, whose manifest is ``manifest_file``."""
    try:
        signature = directory / SIGNATURE_FILE
        if not signature.is_file():
            return SignatureState("unsigned", "unsigned")
        manifest = (directory / manifest_file).read_text(encoding="utf-8")
        earlier = directory / SIGNED_MANIFEST_FILE
        signed = earlier.read_text(encoding="utf-8") if earlier.is_file() else manifest
    except (OSError, UnicodeDecodeError) as error:
        return SignatureState("broken", f"the signature cannot be checked: {error}")
    state = _checked(signature, signed_content(signed), trust or Trust())
    changed = _changed(signed, manifest) if signed != manifest else ()
    return state._replace(changed=changed)


def _checked(signature: Path, content: bytes, trust: Trust) -> SignatureState:
    arguments = ["-n", _NAMESPACE, "-s", str(signature)]
    done = _ssh_keygen(["-Y", "check-novalidate", *arguments], content)
    if done is None:
        return SignatureState("unchecked", "signed, but not checked: ssh-keygen is not on the PATH")
    if done.returncode != 0:
        return SignatureState("broken", "the signature is not of these files")
    who = done.stdout.decode(errors="replace").strip().rpartition(" with ")[2]
    if trust.key is None and trust.allowed_signers is None:
        return SignatureState("signed", f"signed with {who}; the key itself was not checked")
    with tempfile.TemporaryDirectory(prefix="accelmark-verify-") as directory:
        signers = trust.allowed_signers
        if trust.key is not None:
            signers = Path(directory, "signers")
            signers.write_text(f"* {_public(trust.key)}\n")
        assert signers is not None  # noqa: S101  one of the two is given
        named = _ssh_keygen(["-Y", "find-principals", "-s", str(signature), "-f", str(signers)], b"")
        names = named.stdout.decode(errors="replace").split() if named is not None and named.returncode == 0 else []
        for name in names:
            command = ["-Y", "verify", "-f", str(signers), "-I", "signer" if name == "*" else name, *arguments]
            done = _ssh_keygen(command, content)
            if done is not None and done.returncode == 0:
                return SignatureState("trusted", f"signed by {who if name == '*' else name}")
    return SignatureState("untrusted", f"signed with {who}, which is not a key that you named")


def _public(key: Path) -> str:
    """Return the public key in a file or next to a private one. Raises RequestError where there is none."""
    for path in (key, key.with_name(f"{key.name}.pub")):
        try:
            text = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            continue
        if text.startswith(("ssh-", "ecdsa-", "sk-")):
            return text
    raise RequestError(f"{key}: is not a public SSH key")


def _changed(signed: str, manifest: str) -> tuple[str, ...]:
    before, now = (set(signed_content(text).decode().splitlines()) for text in (signed, manifest))
    names = {line.partition("  ")[2] for line in before ^ now}
    return tuple(sorted(name for name in names if not name.endswith("/secrets.json")))


def _ssh_keygen(arguments: list[str], content: bytes) -> subprocess.CompletedProcess[bytes] | None:
    """Run ssh-keygen; None where it cannot be started."""
    environment = os.environ | {"SSH_ASKPASS_REQUIRE": "never"}
    try:
        return subprocess.run(
            ["ssh-keygen", *arguments], input=content, capture_output=True, timeout=_TIMEOUT_S, check=False,
            env=environment, start_new_session=True,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None

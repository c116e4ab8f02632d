"""``MANIFEST.sha256``, the SHA-256 of every file of a run as ``sha256sum`` writes it; its signature; runs in one file.

``ssh-keygen -Y`` signs the lines of the manifest except pages, which are written again from the results.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Literal, NamedTuple

from pydantic_core import from_json

from accelmark.results.read.round_dir import REEVALUATION_PREFIX
from accelmark.results.store.files import write_atomic, write_errors
from accelmark.results.store.loaded_run import MANIFEST_FILE, LoadedRun, RunFiles, loaded_from, require_ended
from accelmark.results.store.secret_list import SECRETS_FILE, SecretFinder
from accelmark.spec.errors import UNREADABLE, RequestError, RunError, raising
from accelmark.spec.log.records import COORDINATOR_LOG
from accelmark.spec.plugins.launcher import run_files
from accelmark.spec.secret import LEFT_OUT, secrets_in, without_userinfo

_EXCLUDED_DIRECTORIES: Final = {"checkpoints", "__pycache__"}
"""Directories that the manifest does not cover: checkpoints are large, and figures come from their evaluation."""
SUFFIX: Final = ".accelmark.tar"
_MAX_LISTED: Final = 5
_MAX_FILES: Final = 100_000
_MAX_BYTES: Final = 16 * 2**30
_MAX_READ_BYTES: Final = 2**30
SIGNATURE_FILE: Final = "MANIFEST.sha256.sig"
SIGNED_MANIFEST_FILE: Final = "MANIFEST.signed.sha256"
"""In a bundle: the manifest that was signed, where bundling removed secrets from files."""
KEY_VARIABLE: Final = "ACCELMARK_SIGNING_KEY"
"""Path of the SSH key with which runs are signed at their end."""
_NAMESPACE: Final = "accelmark"
_TIMEOUT_S: Final = 60.0
_NOT_SIGNED: Final = re.compile(rf"{SIGNATURE_FILE}|{SIGNED_MANIFEST_FILE}|[^/]*\.html|.*/mllog\.log")


def write_manifest(run_dir: Path) -> None:
    """Write the manifest of all files of a run, signed if ``ACCELMARK_SIGNING_KEY`` names a key."""
    lines = _lines({path.relative_to(run_dir).as_posix(): file_sha256(path) for path in covered_files(run_dir)})
    write_atomic(run_dir / MANIFEST_FILE, lines)
    signature, key = run_dir / SIGNATURE_FILE, signing_key()
    signature.unlink(missing_ok=True)  # it was of other results
    if key is not None:
        write_atomic(signature, sign(lines, key).decode())


def update_manifest(run_dir: Path, *names: str) -> None:
    """Update the lines of the files ``names`` (relative to the run); others are kept, so that edits stay visible."""
    manifest = run_dir / MANIFEST_FILE
    if not manifest.is_file():
        write_manifest(run_dir)
        return
    lines = manifest.read_text(encoding="utf-8").splitlines()
    hashes = {name: sha256 for sha256, _, name in (line.partition("  ") for line in lines)}
    write_atomic(manifest, _lines(hashes | {name: file_sha256(run_dir / name) for name in names}))


def _lines(hashes: Mapping[str, str]) -> str:
    return "".join(f"{sha256}  {name}\n" for name, sha256 in sorted(hashes.items()))


def check_manifest(run_dir: Path) -> list[str]:
    """Return a message for each file that is missing, was changed, or is not in the manifest."""
    path = run_dir / MANIFEST_FILE
    with raising(RunError, f"{path}: cannot be read", OSError, UnicodeDecodeError):
        lines = path.read_text(encoding="utf-8").splitlines()
    problems: list[str] = []
    named: set[str] = set()
    for number, line in enumerate(lines, start=1):
        expected, separator, name = line.partition("  ")
        named.add(name)
        if not separator or Path(name).is_absolute() or ".." in Path(name).parts:
            problems.append(f"{path}: line {number} is not a line of a manifest")
        elif not (run_dir / name).is_file():
            problems.append(f"{name}: is missing")
        elif file_sha256(run_dir / name) != expected:
            problems.append(f"{name}: was changed (expected SHA-256 {expected[:12]}…)")
    added = {file.relative_to(run_dir).as_posix() for file in covered_files(run_dir)} - named
    # The evaluation of a round may be repeated later.
    known = {_evaluation_of(name) for name in named}
    later = {name for name in added if _evaluation_of(name) is not None and _evaluation_of(name) not in known}
    return problems + [f"{name}: was added (not in the manifest)" for name in sorted(added - later)]


def _evaluation_of(name: str) -> Path | None:
    return next((parent for parent in Path(name).parents if parent.name.startswith(REEVALUATION_PREFIX)), None)


def edits(run_dir: Path) -> list[str]:
    """Return the changes since the end of a finished run that its manifest and its signature show."""
    if not (run_dir / MANIFEST_FILE).is_file():
        return [f"{MANIFEST_FILE} is missing"]
    state = check_signature(run_dir)
    return check_manifest(run_dir) + ([state.text] if state.status == "broken" else [])


def bundle_edits(bundle: Path) -> list[str]:
    """Return why a bundle's signature does not match its files; empty if it does. Raises RunError if it is damaged."""
    _, places = _index(bundle)
    with tempfile.TemporaryDirectory(prefix="accelmark-bundle-") as directory:
        for name in (MANIFEST_FILE, SIGNATURE_FILE, SIGNED_MANIFEST_FILE):
            if name in places:
                Path(directory, name).write_bytes(_slice(bundle, *places[name]))
        state = check_signature(Path(directory))
    return [state.text] if state.status == "broken" else []


def covered_files(run_dir: Path) -> list[Path]:
    """Return the files that the manifest of a run covers, by name."""
    # Files of the coordinator and its launcher, which change after the manifest is written.
    excluded = {COORDINATOR_LOG, SIGNATURE_FILE, SIGNED_MANIFEST_FILE} | run_files()
    covered: list[Path] = []
    for directory, names, files in os.walk(run_dir):
        names[:] = [name for name in names if name not in _EXCLUDED_DIRECTORIES]
        for path in (Path(directory, file) for file in files if not file.endswith((".pid", ".tmp", ".lock"))):
            is_excluded = path.name == MANIFEST_FILE or (path.parent == run_dir and path.name in excluded)
            if not is_excluded and path.is_file() and not path.is_symlink():
                covered.append(path)
    return sorted(covered)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file. Raises RunError: it cannot be read."""
    with raising(RunError, f"{path}: cannot be read", OSError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_bundle(run_dir: Path, output: Path) -> None:
    """Pack the run at ``run_dir`` into ``output``.

    Values of variables with secret names, in the plan and on the hosts, and user parts of URLs are replaced in all
    files; the bundle's manifest covers the files as packed. If the run has a manifest, every file has to match it.

    Raises RunError if the run has not ended, a file differs from the manifest, or ``output`` cannot be written.
    """
    require_ended(run_dir)
    place, root = output.resolve(), run_dir.resolve()
    # An earlier bundle in the run directory is not part of the run.
    own = f"{place.relative_to(root).as_posix()}: was added" if place.is_relative_to(root) else ()
    lines = check_manifest(run_dir) if (run_dir / MANIFEST_FILE).is_file() else []
    if changed := [line for line in lines if not line.startswith(own)]:
        more = f"; and {len(changed) - _MAX_LISTED} more" if len(changed) > _MAX_LISTED else ""
        listed = f"{'; '.join(changed[:_MAX_LISTED])}{more}. See 'accelmark verify {run_dir}' and restore the files"
        raise RunError(f"{run_dir}: is not bundled because files differ from its manifest: {listed}")
    secret_values: set[str] = set()
    for file in [run_dir / "plan.json", *run_dir.glob("*/round*/*_noderank*/*.json")]:
        with contextlib.suppress(OSError, ValueError):
            secret_values |= set(secrets_in(from_json(file.read_bytes())))
    secrets = sorted((value.encode() for value in secret_values), key=len, reverse=True)
    covered = [path for path in covered_files(run_dir) if path.resolve() != place]
    hidden = SecretFinder(path for path in covered if path.name == SECRETS_FILE)
    files: dict[str, bytes] = {}
    for path in (path for path in covered if path.name != SECRETS_FILE):
        content = path.read_bytes()
        if b"\0" not in content:  # text
            content = without_userinfo(content.decode("latin-1")).encode("latin-1")
        for secret in secrets:
            content = content.replace(secret, LEFT_OUT.encode())
        files[path.relative_to(run_dir).as_posix()] = hidden.without(content)
    key, signature = signing_key(), run_dir / SIGNATURE_FILE
    signed: dict[str, bytes] = {}
    if key is not None:
        signed = {SIGNATURE_FILE: sign(_manifest_of(files), key)}
    elif signature.is_file():  # of the files as they are in the run
        signed = {SIGNATURE_FILE: signature.read_bytes(), SIGNED_MANIFEST_FILE: (run_dir / MANIFEST_FILE).read_bytes()}
    with write_errors(output):
        output.write_bytes(pack(root.name, files | signed))


def _manifest_of(files: Mapping[str, bytes]) -> str:
    return _lines({path: hashlib.sha256(content).hexdigest() for path, content in files.items()})


def pack(name: str, files: Mapping[str, bytes]) -> bytes:
    """Return the bundle of ``files`` (path relative to the run -> content) with a manifest."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for path, content in sorted({**files, MANIFEST_FILE: _manifest_of(files).encode()}.items()):
            entry = tarfile.TarInfo(f"{name}/{path}")
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


def unpack(bundle: Path, into: Path) -> tuple[Path, list[str]]:
    """Unpack ``bundle`` below ``into``; return the run's directory, and problems of the archive itself."""
    try:
        raw, (run, places) = bundle.read_bytes(), _index(bundle)
    except (OSError, RunError) as error:
        raise RequestError(str(error)) from error
    files = {name: raw[offset : offset + size] for name, (offset, size) in places.items()}
    for name, content in files.items():
        target = into / run / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    files.pop(MANIFEST_FILE, None)
    edited = f"{bundle.name}: differs from what 'accelmark bundle' writes: it was edited"
    return into / run, [] if pack(run, files) == raw else [edited]


@dataclass(frozen=True, slots=True)
class BundleFiles(RunFiles):
    """The files of a run in a bundle, read without unpacking it."""

    places: dict[str, tuple[int, int]]
    """Name, relative to the run -> (offset, bytes)."""
    sha256: dict[str, str]

    def read(self, name: str) -> bytes:
        """Return the file ``name``. Raises RunError where it is missing or differs from the manifest."""
        if name not in self.places:
            raise RunError(f"{self.where(name)}: is not in the bundle")
        content = _slice(self.path, *self.places[name])
        if hashlib.sha256(content).hexdigest() != self.sha256.get(name):
            raise RunError(f"{self.where(name)}: was edited: its SHA-256 differs from the manifest's")
        return content

    def has(self, name: str) -> bool:
        """Return whether the bundle has a file ``name``."""
        return name in self.places

    def where(self, name: str) -> str:
        """Return the bundle's path and the file's name in it."""
        return f"{self.path}: {name}"


def is_bundle(path: Path) -> bool:
    """Return whether a file is a tar archive with the manifest of one run."""
    with contextlib.suppress(RunError):
        return MANIFEST_FILE in _index(path)[1]
    return False


def load_bundle(path: Path, *, curves: bool = True) -> LoadedRun:
    """Read a run from its bundle; ``curves`` as in :func:`accelmark.results.store.loaded_run.load_run`."""
    _, places = _index(path)
    if MANIFEST_FILE not in places:
        raise RunError(f"{path}: is not a bundle: it has no {MANIFEST_FILE}")
    with raising(RunError, f"{path}: {MANIFEST_FILE}: is not UTF-8, the bundle is damaged", UnicodeDecodeError):
        lines = _slice(path, *places[MANIFEST_FILE]).decode("utf-8").splitlines()
    sha256 = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    return loaded_from(path, BundleFiles(path, places, sha256), curves=curves)


def _index(bundle: Path) -> tuple[str, dict[str, tuple[int, int]]]:
    """Return the run's name, and (offset, size) of each file. Raises RunError for all but plain files of one run."""
    runs: set[str] = set()
    places: dict[str, tuple[int, int]] = {}
    num_bytes = 0
    damaged = raising(RunError, f"{bundle}: is not a bundle of a run, or is damaged", *UNREADABLE, tarfile.TarError)
    with damaged, tarfile.open(bundle, mode="r:") as archive:
        for entry in archive:
            path = PurePosixPath(entry.name)
            if not entry.isfile():
                raise RunError(f"{bundle}: {entry.name!r} is not a plain file: refused")
            if path.is_absolute() or ".." in path.parts or len(path.parts) < 2 or "\\" in entry.name:
                raise RunError(f"{bundle}: {entry.name!r} is a path outside of the run: refused")
            num_bytes += entry.size
            if len(places) >= _MAX_FILES or num_bytes > _MAX_BYTES:
                raise RunError(f"{bundle}: is larger than any run: refused")
            runs.add(path.parts[0])
            places["/".join(path.parts[1:])] = entry.offset_data, entry.size
    if len(runs) != 1:
        raise RunError(f"{bundle}: is not a bundle: it has {len(runs)} top-level directories instead of one")
    return runs.pop(), places


def _slice(path: Path, offset: int, size: int) -> bytes:
    if size > _MAX_READ_BYTES:
        raise RunError(f"{path}: a file in it has {size:,} bytes, more than any result")
    with raising(RunError, f"{path}: cannot be read", OSError), path.open("rb") as file:
        file.seek(offset)
        content = file.read(size)
    if len(content) != size:
        raise RunError(f"{path}: is truncated")
    return content


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


def check_signature(directory: Path, trust: Trust | None = None) -> SignatureState:
    """Check the signature of the run in ``directory``."""
    try:
        signature = directory / SIGNATURE_FILE
        if not signature.is_file():
            return SignatureState("unsigned", "unsigned")
        manifest = (directory / MANIFEST_FILE).read_text(encoding="utf-8")
        earlier = directory / SIGNED_MANIFEST_FILE
        signed = earlier.read_text(encoding="utf-8") if earlier.is_file() else manifest
    except (OSError, UnicodeDecodeError) as error:
        return SignatureState("broken", f"the signature cannot be checked: {error}")
    state = _checked(signature, signed_content(signed), trust or Trust())
    before, now = (set(signed_content(text).decode().splitlines()) for text in (signed, manifest))
    names = {line.partition("  ")[2] for line in before ^ now}
    return state._replace(changed=tuple(sorted(name for name in names if not name.endswith("/secrets.json"))))


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
            with raising(RequestError, f"{trust.key}: cannot be read", OSError):
                public = trust.key.read_text(encoding="utf-8", errors="replace").strip()
            if not public.startswith(("ssh-", "ecdsa-", "sk-")):
                raise RequestError(f"{trust.key}: is not a public SSH key")
            signers = Path(directory, "signers")
            signers.write_text(f"* {public}\n")
        assert signers is not None  # noqa: S101  one of the two is given
        named = _ssh_keygen(["-Y", "find-principals", "-s", str(signature), "-f", str(signers)], b"")
        names = named.stdout.decode(errors="replace").split() if named is not None and named.returncode == 0 else []
        for name in names:
            command = ["-Y", "verify", "-f", str(signers), "-I", "signer" if name == "*" else name, *arguments]
            done = _ssh_keygen(command, content)
            if done is not None and done.returncode == 0:
                return SignatureState("trusted", f"signed by {who if name == '*' else name}")
    return SignatureState("untrusted", f"signed with {who}, which is not a key that you named")


def _ssh_keygen(arguments: list[str], content: bytes) -> subprocess.CompletedProcess[bytes] | None:
    """Run ssh-keygen; None where it cannot be started."""
    try:
        return subprocess.run(
            ["ssh-keygen", *arguments], input=content, capture_output=True, timeout=_TIMEOUT_S, check=False,
            env=os.environ | {"SSH_ASKPASS_REQUIRE": "never"}, start_new_session=True,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None

"""Why a host was not reached over SSH, and what a person can do about it: often a file of this machine is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from accelmark.spec.cluster import ClusterSpec, HostSpec

CONNECT_TIMEOUT_S: Final = 20.0
_CONFIG: Final = Path("~/.ssh/config")
_KNOWN_HOSTS: Final = Path("~/.ssh/known_hosts")


def key_of(host: HostSpec, cluster: ClusterSpec) -> Path | None:
    """Return the key file that the cluster file names for a host."""
    key = host.key or cluster.key
    return key.expanduser() if key is not None else None


def why_not_reached(error: Exception, host: HostSpec, cluster: ClusterSpec) -> str:
    """Return what is wrong and what to do, where connecting to ``host`` ended with ``error`` of asyncssh or Python."""
    import asyncssh

    port = cluster.port_of(host)
    at = f"{host.address} port {port}"
    scan = f"ssh-keyscan -p {port} {host.address}"
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return (
            f"its host key is not the known one ({error.reason}): if it was set up anew, correct "
            f"{cluster.known_hosts or _KNOWN_HOSTS}; if it is new, compare its key and add it there ({scan})"
        )
    if isinstance(error, asyncssh.PermissionDenied):
        return f"SSH at {at} refuses the login ({error.reason}): check user and key in the cluster file"
    if isinstance(error, TimeoutError):
        return f"does not answer at {at} within {CONNECT_TIMEOUT_S:g} s"
    if isinstance(error, OSError) and error.filename is not None:
        return _unreadable(Path(str(error.filename)), error.strerror or str(error), host, cluster, scan)
    if isinstance(error, OSError):
        return f"cannot be reached at {at}: {error.strerror or error}"
    if isinstance(error, asyncssh.KeyImportError | asyncssh.KeyEncryptionError):
        return _bad_key(str(error), key_of(host, cluster))
    if isinstance(error, asyncssh.ConfigParseError):
        return f"SSH's configuration on this machine is wrong: {error}: correct that line"
    if isinstance(error, UnicodeDecodeError):
        known = cluster.known_hosts or _KNOWN_HOSTS
        file = next((file for file in (known, _CONFIG) if not _is_text(file)), None)
        what = f"{file} is no text file" if file is not None else "a file of SSH on this machine is no text file"
        make = f"write it anew ({scan})" if file == known else "correct it"
        return f"{what} ({error.reason}): {make}"
    if isinstance(error, ValueError):
        return f"SSH cannot be set up with {cluster.known_hosts or _KNOWN_HOSTS} and {_CONFIG}: {error}: correct that"
    return f"SSH at {at} failed: {error}"


def _unreadable(file: Path, why: str, host: HostSpec, cluster: ClusterSpec, scan: str) -> str:
    if file == key_of(host, cluster):
        return f"the key file {file} cannot be read ({why}): correct key in the cluster file"
    if cluster.known_hosts is not None and file == cluster.known_hosts.expanduser():
        what = f"the file of known hosts {file} cannot be read ({why})"
        return f"{what}: correct known_hosts in the cluster file, or write the file ({scan})"
    return f"{file} cannot be used ({why}): correct {_CONFIG}, which names it"


def _bad_key(what: str, key: Path | None) -> str:
    named = f"the key file {key}" if key is not None else f"a key file in ~/.ssh, or one that {_CONFIG} names,"
    if "passphrase" in what.lower():
        add = f"ssh-add {key}" if key is not None else "ssh-add"
        asked = "has a passphrase, and there is nobody to ask for it"
        return f"{named} {asked}: give it to ssh-agent ({add}) and name no key in the cluster file, or use another key"
    return f"{named} is no private key that can be read ({what}): name the private key, not the .pub beside it"


def _is_text(file: Path) -> bool:
    try:
        file.expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    except OSError:
        return True
    return True

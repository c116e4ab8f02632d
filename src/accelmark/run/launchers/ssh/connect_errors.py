"""Explain why an SSH connection failed, and what to do; often a file of this machine is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from accelmark.run.launchers.ssh.options import Options
from accelmark.spec.cluster import HostSpec

CONNECT_TIMEOUT_S: Final = 20.0
_CONFIG: Final = Path("~/.ssh/config")
_KNOWN_HOSTS: Final = Path("~/.ssh/known_hosts")


def explain(error: Exception, host: HostSpec, options: Options) -> str:
    """Return the cause of ``error``, raised by asyncssh or Python on connecting to ``host``, and what to do."""
    import asyncssh

    port = options.port_of(host)
    at = host.address if options.ssh_config is not None else f"{host.address} port {port}"
    scan = f"ssh-keyscan -p {port} {host.address}"
    if isinstance(error, asyncssh.HostKeyNotVerifiable):
        return (
            f"unknown host key ({error.reason}): if the host was reinstalled, correct "
            f"{options.known_hosts or _KNOWN_HOSTS}; if it is new, verify its key and add it there ({scan})"
        )
    if isinstance(error, asyncssh.PermissionDenied):
        return f"SSH login at {at} was refused ({error.reason}): check user and key in the cluster file"
    if isinstance(error, TimeoutError):
        return f"no answer at {at} within {CONNECT_TIMEOUT_S:g} s"
    if isinstance(error, OSError) and error.filename is not None:
        return _unreadable(Path(str(error.filename)), error.strerror or str(error), host, options, scan)
    if isinstance(error, OSError):
        return f"cannot be reached at {at}: {error.strerror or error}"
    if isinstance(error, asyncssh.KeyImportError | asyncssh.KeyEncryptionError):
        return _bad_key(str(error), options.key_of(host))
    if isinstance(error, asyncssh.ConfigParseError):
        return f"invalid SSH configuration on this machine: {error}: correct that line"
    if isinstance(error, UnicodeDecodeError):
        known = options.known_hosts or _KNOWN_HOSTS
        file = next((file for file in (known, _CONFIG) if not _is_text(file)), None)
        what = f"{file or 'a file of SSH on this machine'} is not a text file"
        make = f"create it again ({scan})" if file == known else "correct it"
        return f"{what} ({error.reason}): {make}"
    if isinstance(error, ValueError):
        return f"SSH cannot use {options.known_hosts or _KNOWN_HOSTS} and {_CONFIG}: {error}: correct the file"
    return f"SSH at {at} failed: {error}"


def _unreadable(file: Path, why: str, host: HostSpec, options: Options, scan: str) -> str:
    if file == options.key_of(host):
        return f"the key file {file} cannot be read ({why}): correct key in the cluster file"
    if options.known_hosts is not None and file == options.known_hosts.expanduser():
        what = f"the file of known hosts {file} cannot be read ({why})"
        return f"{what}: correct known_hosts in the cluster file, or create the file ({scan})"
    return f"{file}, which {_CONFIG} names, cannot be used ({why}): correct {_CONFIG}"


def _bad_key(what: str, key: Path | None) -> str:
    named = f"the key file {key}" if key is not None else f"a key file in ~/.ssh, or one that {_CONFIG} names,"
    if "passphrase" in what.lower():
        add = f"ssh-add {key}" if key is not None else "ssh-add"
        advice = f"add it to ssh-agent ({add}) and remove key from the cluster file, or use another key"
        return f"{named} has a passphrase, which cannot be asked for: {advice}"
    return f"{named} is not a readable private key ({what}): name the private key, not the .pub file"


def _is_text(file: Path) -> bool:
    try:
        file.expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return False
    except OSError:
        return True
    return True

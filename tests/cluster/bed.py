"""A test bed: hosts that are network namespaces of this machine, each with its own sshd, name and files.

Needs root. What it makes is named after the directory, so that two beds do not meet, and ``down`` removes it all.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

WORK: Final = Path("/var/tmp/accelmark")
"""Work directory of every host; each has its own there."""

_SSHD: Final = """\
Port 22
HostKey {home}/host_key
AuthorizedKeysFile {home}/authorized_keys
PidFile {home}/sshd.pid
UsePAM no
StrictModes no
UseDNS no
PasswordAuthentication no
PermitRootLogin yes
MaxStartups 500:30:1000
MaxSessions 200
PrintMotd no
Subsystem sftp internal-sftp
SetEnv {environment}
"""
_START: Final = """\
hostname "$1"
mount --make-rprivate /
mkdir -p /var/tmp/accelmark
mount --bind "$2/work" /var/tmp/accelmark
mount --bind "$2/../hosts" /etc/hosts
for name in "$HOME/.bashrc" "$HOME/.bash_profile" "$HOME/.profile"; do
    [ ! -f "$name" ] || mount --bind "$2/empty" "$name"
done
exec /usr/sbin/sshd -f "$2/sshd_config" -E "$2/sshd.log"
"""


def run(*argv: str, check: bool = True) -> str:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if check and done.returncode != 0:
        raise RuntimeError(f"{argv}: {done.stderr or done.stdout}")
    return done.stdout


def podman_environment(home: Path) -> dict[str, str]:
    """Write podman's configuration of one host, and return the variables that name it."""
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    pids = Path("/proc/sys/kernel/pid_max").read_text().strip()
    (home / "containers.conf").write_text(
        f'[containers]\ndefault_ulimits=["nofile={most_files}:{most_files}", "nproc={pids}:{pids}"]\n'
        '[engine]\nruntime="runc"\ncgroup_manager="cgroupfs"\nevents_logger="file"\n'
    )
    (home / "storage.conf").write_text(
        f'[storage]\ndriver="overlay"\ngraphroot="{home}/podman"\nrunroot="{home}/podman-run"\n'
    )
    return {
        "CONTAINERS_CONF": str(home / "containers.conf"),
        "CONTAINERS_STORAGE_CONF": str(home / "storage.conf"),
        "TMPDIR": "/var/tmp",
    }


@dataclass(frozen=True)
class Bed:
    """Hosts n1 ... nN at 10.77.X.1 ... and this machine at 10.77.X.254 (with more than 200 hosts: no)."""

    root: Path
    num_hosts: int

    @property
    def mark(self) -> str:
        return hashlib.sha256(str(self.root).encode()).hexdigest()[:5]

    @property
    def net(self) -> str:
        return f"10.77.{int(self.mark[:2], 16)}"

    def address(self, number: int) -> str:
        return f"{self.net}.{number}"

    def namespace(self, number: int) -> str:
        return f"am{self.mark}n{number}"

    def home(self, number: int) -> Path:
        return self.root / f"n{number}"

    def work(self, number: int) -> Path:
        """What the host sees as its work directory."""
        return self.home(number) / "work"

    @property
    def bridge(self) -> str:
        return f"am{self.mark}"

    def up(self) -> None:
        shutil.rmtree(self.root, ignore_errors=True)
        self.root.mkdir(parents=True)
        run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self.root / "key"))
        run("ip", "link", "add", self.bridge, "type", "bridge")
        run("ip", "addr", "add", f"{self.net}.254/24", "dev", self.bridge)
        run("ip", "link", "set", self.bridge, "up")
        names = [f"{self.address(number)} n{number}" for number in range(1, self.num_hosts + 1)]
        (self.root / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names]) + "\n")
        known = []
        for number in range(1, self.num_hosts + 1):
            home = self.home(number)
            (home / "work").mkdir(parents=True)
            run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(home / "host_key"))
            public = (home / "host_key.pub").read_text().split()
            known.append(f"{self.address(number)} {public[0]} {public[1]}")
            (home / "empty").touch()  # a login does not depend on what this machine's shells read
            (home / "authorized_keys").write_text((self.root / "key.pub").read_text())
            variables = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **self.environment(home)}
            environment = " ".join(f"{name}={value}" for name, value in variables.items())
            (home / "sshd_config").write_text(_SSHD.format(home=home, environment=environment))
            self._wire(number)
            self.sshd(number)
        (self.root / "known_hosts").write_text("\n".join(known) + "\n")
        deadline = time.monotonic() + 90
        while not all((self.home(number) / "sshd.pid").exists() for number in range(1, self.num_hosts + 1)):
            if time.monotonic() > deadline:
                raise RuntimeError("sshd does not start: " + (self.home(1) / "sshd.log").read_text())
            time.sleep(0.05)

    def environment(self, home: Path) -> dict[str, str]:
        """Variables of every login on a host: where its container engines are."""
        return {"DOCKER_HOST": f"unix://{home}/docker/docker.sock", **podman_environment(home)}

    def _wire(self, number: int) -> None:
        space, veth = self.namespace(number), f"am{self.mark}v{number}"
        run("ip", "netns", "add", space)
        run("ip", "link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", space)
        run("ip", "link", "set", veth, "master", self.bridge, "up")
        run("ip", "-n", space, "addr", "add", f"{self.address(number)}/24", "dev", "eth0")
        run("ip", "-n", space, "link", "set", "eth0", "up")
        run("ip", "-n", space, "link", "set", "lo", "up")

    def enter(self, number: int, *argv: str) -> list[str]:
        return ["nsenter", f"--net=/run/netns/{self.namespace(number)}", *argv]

    def sshd(self, number: int) -> None:
        home = self.home(number)
        Path("/run/sshd").mkdir(exist_ok=True)
        run(*self.enter(number, "unshare", "-u", "-m", "sh", "-c", _START, "sh", f"n{number}", str(home)))

    def inside(self, number: int, *argv: str) -> list[str]:
        """Return the arguments that run a command on a host as its sshd sees it, without SSH."""
        pid = (self.home(number) / "sshd.pid").read_text().strip()
        return ["nsenter", "--target", pid, "--net", "--mount", "--uts", *argv]

    def link(self, number: int, state: str) -> None:
        run("ip", "link", "set", f"am{self.mark}v{number}", state)

    def stop_sshd(self, number: int) -> None:
        pid_file = self.home(number) / "sshd.pid"
        with contextlib.suppress(ProcessLookupError, FileNotFoundError):
            os.kill(int(pid_file.read_text()), signal.SIGTERM)
        pid_file.unlink(missing_ok=True)

    def processes(self) -> dict[int, str]:
        """Return what runs in the hosts' namespaces but their sshd's."""
        found = {}
        for number in range(1, self.num_hosts + 1):
            for pid in run("ip", "netns", "pids", self.namespace(number), check=False).split():
                with contextlib.suppress(OSError):
                    text = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    if text and "sshd" not in text.split(" ")[0] and "dockerd" not in text and "containerd" not in text:
                        found[int(pid)] = f"n{number}: {text[:600]}"
        return found

    def down(self) -> None:
        for name in run("ip", "netns", "list").split():
            if name.startswith(f"am{self.mark}n"):
                for pid in run("ip", "netns", "pids", name, check=False).split():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(int(pid), signal.SIGKILL)
                run("ip", "link", "del", f"am{self.mark}v{name.removeprefix(f'am{self.mark}n')}", check=False)
                run("ip", "netns", "del", name, check=False)
        run("ip", "link", "del", self.bridge, check=False)
        shutil.rmtree(self.root, ignore_errors=True)

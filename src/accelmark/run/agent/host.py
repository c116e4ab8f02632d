"""The host of a job (its lock, caches, network, description and load), and the environment of the ranks on it."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import resource
import site
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, Final

import psutil

import accelmark
from accelmark.results.store.files import free_mib
from accelmark.run.agent.adaptation import SITE_DIRECTORY
from accelmark.run.agent.file_watch import FileWatch
from accelmark.run.agent.task import AgentTask
from accelmark.run.onhost.program import HOST_LOCK, holder
from accelmark.run.processes import NODE_MARKER, RUN_MARKER
from accelmark.run.record.states import utc_now
from accelmark.spec.errors import AccelmarkError
from accelmark.spec.job import JobSpec
from accelmark.spec.log.records import LOADER_VARIABLES, AdaptationRecord, EnvironmentRecord, Variable, VariableOrigin
from accelmark.spec.plugins.framework import FrameworkSpec
from accelmark.spec.secret import displayed_value, is_secret, without_userinfo
from accelmark.telemetry.host import busy_host, collect

DROP_CACHES: Final = "/proc/sys/vm/drop_caches"
DROP_CACHES_VARIABLE: Final = "ACCELMARK_DROP_CACHES"
"""Path of the host's drop_caches file inside a container."""
_REPORTED_PREFIXES: Final = ("OMP_", "MKL_", "KMP_", "ACCELMARK_", "LD_PRELOAD")
"""Prefixes of variables that change how any job runs; others may hold secrets and are not recorded."""
CODE_DIRECTORY: Final = "code"
"""Directory of the node directory with a link to the agent's AccelMark, where that is next to other packages."""
_PACKAGES: Final = ("site-packages", "dist-packages")
_PRELOAD_FILE: Final = Path("/etc/ld.so.preload")
_RUNS_CODE: Final = re.compile(r"^import[ \t]", re.MULTILINE)
_DISTUTILS: Final = (
    "import os; var = 'SETUPTOOLS_USE_DISTUTILS'; enabled = os.environ.get(var, '{}') == 'local'; "
    "enabled and __import__('_distutils_hack').add_shim();"
)
_UNRECORDED: Final[Mapping[str, tuple[frozenset[str], str, frozenset[str]]]] = {
    "_virtualenv.pth": (
        frozenset({"import _virtualenv"}),
        "_virtualenv.py",
        frozenset({"684b8c07932ba4a8", "ce57d5e0d9b5d735", "c9199315871b11b1", "0f20351ea7e90039", "6cf30c56faf2a552"}),
    ),
    "distutils-precedence.pth": (
        frozenset(_DISTUTILS.format(default) for default in ("local", "stdlib")),
        "_distutils_hack/__init__.py",
        frozenset({"c05b8045c9a51ed9", "4c2531daa12158dc", "4d27a48545b57dd1", "46849a60a7cc8518", "df81e6bcba34ee3e"}),
    ),
}
"""Start files that are in no RECORD: their texts, the module that they import, and first digits of its SHA-256.

By virtualenv 20.4 to 20.34 and uv 0.4 to 0.9; of setuptools 52.0, 59.6, 66.1.1, 68.1.2 and 78.1.1, which Debian 11 to
13 and Ubuntu 22.04 and 24.04 install without a RECORD.
"""


class HostInUseError(AccelmarkError):
    """Another run has locked this host."""


@contextmanager
def host_lock(run: str, wait: Callable[[], bool]) -> Iterator[None]:
    """Lock the host for one job; the lock ends with the agent. Raises HostInUseError: another run has locked it.

    Then ``wait`` waits a moment and returns whether to try again. The lock is an abstract address of the host's
    network, so that it is one for all users, directories and containers.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as lock, socket.socket(socket.AF_UNIX) as name:
        while True:
            try:
                lock.bind(f"\0{HOST_LOCK}")
                break
            except OSError as error:
                if not wait():
                    who = holder() or "another run"
                    raise HostInUseError(f"the host is in use by {who}: wait until it ends, or stop it") from error
        whole_letters = f"{HOST_LOCK}/{run}".encode()[:99].decode(errors="ignore")  # with NUL, 100 bytes
        name.bind(f"\0{whole_letters}")
        yield


def clear_caches() -> str | None:
    """Drop the page cache; returns a message where that failed."""
    os.sync()
    try:
        Path(os.environ.get(DROP_CACHES_VARIABLE, DROP_CACHES)).write_text("3", encoding="ascii")
    except OSError as error:
        return f"{DROP_CACHES}: {error.strerror} (it needs root)"
    return None


def route(task: AgentTask) -> AgentTask:
    """Return the task with this host's address for the other hosts, and the network interface of the address.

    The address is the source address of packets to host 0; on host 0 it is the master address.
    """
    address = task.local_address
    with suppress(OSError):
        address = address or source_address(task.master_address, task.master_port)
    entries = psutil.net_if_addrs().items()
    names = (name for name, addresses in entries if any(item.address == address for item in addresses))
    return task.model_copy(update={"local_address": address, "interface": task.interface or next(names, None)})


def source_address(address: str, port: int) -> str:
    """Return the address of this host from which it sends packets to another; raises OSError without a route."""
    family, _, _, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])


def _reported_prefixes(task: AgentTask, framework: FrameworkSpec) -> tuple[str, ...]:
    """Return the prefixes of the variables that are recorded with a job: the host's, the framework's, the vendor's."""
    visible = (task.visible_devices.variable,) if task.visible_devices is not None else ()
    return (*_REPORTED_PREFIXES, *framework.reported_variables, *task.reported_variables, *visible)


def system_information(
    task: AgentTask, node_dir: Path, environment: Mapping[str, str], framework: FrameworkSpec
) -> dict[str, Any]:
    """Return ``sys_info.json``: hardware, software and load of this host; an entry that cannot be read is null.

    The load is observed for half a second.
    """
    reported = _reported_prefixes(task, framework)
    return {
        "host": task.host,
        "taken_at": utc_now(),
        "accelmark": accelmark.__version__,
        "python_executable": sys.executable,
        "rank_python": task.python or sys.executable,
        **collect(),
        "memory_available_mib": psutil.virtual_memory().available / 2**20,
        "load1_at_start": os.getloadavg()[0],
        "busy_at_start": busy_host(),
        "disk_free_mib": free_mib(node_dir),
        "environment": {
            name: without_userinfo(value)
            for name, value in sorted(environment.items())
            if name.startswith(reported)
            and not is_secret(name)
            and not value.startswith(f"{node_dir}{os.sep}")  # names a directory of this round only, such as a cache
        },
    }


def others_cpu_s() -> float | None:
    """Return the CPU time since boot of processes outside this job, in seconds; None where the kernel has none.

    This process must reap all processes of the job.
    """
    try:
        times = psutil.cpu_times()._asdict()
    except (OSError, RuntimeError):
        return None
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    own_s = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    # Not of this machine's processes, or included in another counter (guests in user and nice).
    others = ("idle", "iowait", "steal", "guest", "guest_nice")
    return float(sum(spent for name, spent in times.items() if name not in others)) - own_s


def environment_record(
    task: AgentTask,
    node_dir: Path,
    environment: Mapping[str, str],
    ambient: Mapping[str, str],
    script: AdaptationRecord,
    framework: FrameworkSpec,
) -> EnvironmentRecord:
    """Return the record of the environment that the ranks of ``task`` are started with.

    Args:
        environment: the final environment.
        ambient: the environment of the agent, from the shell or the image.
        script: changes by the vendor's ``environment_variables.sh``.
    """

    def origin_of(name: str, value: str) -> VariableOrigin:
        if name in (RUN_MARKER, NODE_MARKER):
            return "AccelMark"
        if name in script.environment:
            return "environment_variables.sh"
        if task.environment.get(name) == value:
            return "cluster file or vendor.yaml"
        return "shell" if ambient.get(name) == value else "AccelMark"

    shown = (*_reported_prefixes(task, framework), *framework.numeric_variables, *LOADER_VARIABLES)
    variables = {}
    for name, value in sorted(environment.items()):
        origin = origin_of(name, value)
        is_shown = origin != "shell" or name.startswith(shown)
        variables[name] = Variable(origin=origin, value=displayed_value(name, value) if is_shown else None)
    loaders = {name: variables[name] for name in LOADER_VARIABLES if environment.get(name)}
    for name, foreign in {"PYTHONPATH": _foreign_entries, "LD_LIBRARY_PATH": _shadowing_entries}.items():
        if name in loaders and (entries := foreign(environment[name], node_dir)):
            loaders[name] = Variable(origin=loaders[name].origin, value=os.pathsep.join(entries))
        else:
            loaders.pop(name, None)
    switches = {
        name: variables[name]
        for name, harmless in framework.numeric_variables.items()
        if name in environment and environment[name].lower() not in {text.lower() for text in harmless}
    }
    return EnvironmentRecord(
        variables=variables,
        loaders=loaders,
        numeric_switches=switches,
        start_files=tuple(start_files(Path(task.python) if task.python else None)),
    )


def _foreign_entries(python_path: str, node_dir: Path) -> list[str]:
    """Return the entries of ``PYTHONPATH`` except this AccelMark and the packages installed for the ranks."""
    ours, packages = Path(accelmark.__file__).parents[1], Path(sysconfig.get_path("purelib"))
    own = {ours, packages, node_dir / SITE_DIRECTORY, node_dir / CODE_DIRECTORY}
    return [entry or "." for entry in python_path.split(os.pathsep) if Path(entry) not in own]


def _shadowing_entries(library_path: str, node_dir: Path) -> list[str]:
    """Return the entries of ``LD_LIBRARY_PATH`` that replace a library which every Python process loads."""
    mapped = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace")
    names = set(re.findall(r"/(lib[^/\s]+\.so)[.\d]*$", mapped, re.MULTILINE))  # versions of files and names differ
    own = [*map(Path, ("/lib", "/lib64", "/usr/lib", "/usr/lib64")), Path(sys.base_prefix, "lib")]
    entries = [node_dir / entry for entry in library_path.split(os.pathsep)]
    foreign = [entry for entry in entries if not any(entry.resolve().is_relative_to(place) for place in own)]
    return [str(entry) for entry in foreign if any(any(entry.glob(f"{name}*")) for name in names)]


def package_directories(python: Path | None = None) -> list[Path]:
    """Return the directories of installed packages of a virtual environment's Python; None: of this one."""
    if python is not None:
        return list(python.parents[1].glob("lib/python*/site-packages"))
    return [Path(place) for place in (*site.getsitepackages(), site.getusersitepackages())]


UNWATCHED: Final = ("__pycache__", "README.md")
"""Files and folders of code that may change while a job runs: no hash of a folder covers them."""


def watch_code(task: AgentTask, job: JobSpec) -> FileWatch:
    """Watch the folders of code that may not change while a job runs: the evaluation outside runs it too.

    Of AccelMark, the case and, beside a vendor's code, the tens of thousands of files of Python and its packages.
    """
    folders = [Path(accelmark.__file__).parent, job.case.path]
    if job.adaptation is not None:
        folders += [Path(sysconfig.get_path("stdlib"))]
        folders += package_directories(Path(task.python) if task.python else None)
        folders += [Path(entry) for entry in sys.path if entry.endswith("-packages")]
    return FileWatch(folders, UNWATCHED)


def start_files(python: Path | None = None) -> Iterator[str]:
    """Yield files that run code whenever Python starts, and that belong to no installed package.

    ``python`` is a virtual environment's; None: this Python.

    ``.pth`` files that only add directories run none. A package's own file is in its RECORD with its hash. Linux
    distributions put a ``sitecustomize`` into the standard library.
    """
    if _PRELOAD_FILE.is_file() and _PRELOAD_FILE.stat().st_size:
        yield str(_PRELOAD_FILE)
    places = [str(place) for place in package_directories(python)]
    for directory in dict.fromkeys(places):
        for path in sorted(Path(directory).glob("*.pth")):
            try:
                content = path.read_bytes()
            except OSError:
                continue
            if _RUNS_CODE.search(content.decode(errors="replace")) and not _is_packaged(path, content):
                yield str(path)
    stdlib = Path(sysconfig.get_path("stdlib"))
    for name in ("sitecustomize", "usercustomize"):
        found = PathFinder.find_spec(name, sys.path if python is None else places)
        if found is not None and found.origin is not None and Path(found.origin).parent != stdlib:
            yield found.origin


def _is_packaged(path: Path, content: bytes) -> bool:
    """Return whether a file is as a package's RECORD lists it, or one of ``_UNRECORDED`` with its module."""
    texts, name, hashes = _UNRECORDED.get(path.name, (frozenset(), "", frozenset()))
    module = path.parent / name
    if (
        content.decode(errors="replace").strip() in texts
        and module.is_file()
        and hashlib.sha256(module.read_bytes()).hexdigest()[:16] in hashes
    ):
        return True
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    line = f"{path.name},sha256={digest},"
    return any(line in record.read_text(errors="replace") for record in path.parent.glob("*.dist-info/RECORD"))


def environment_variables(python: Path, environment: Mapping[str, str], node_dir: Path) -> dict[str, str]:
    """Return the variables that let ``python`` import this AccelMark and find the commands of its environment.

    Of an AccelMark in site-packages only the package itself is added to ``PYTHONPATH``, not the packages next to it,
    which belong to the agent's Python.
    """
    ours = Path(accelmark.__file__).parent
    place = ours.parent
    if place.name in _PACKAGES:
        place = node_dir / CODE_DIRECTORY
        place.mkdir(exist_ok=True)
        if not (place / ours.name).is_symlink():
            (place / ours.name).symlink_to(ours)
    others = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    others = [entry for entry in others if Path(entry).name not in _PACKAGES and Path(entry) != place]
    path = os.pathsep.join(filter(None, [str(python.parent), environment.get("PATH", "")]))
    return {"PATH": path, "PYTHONPATH": os.pathsep.join([str(place), *others]), "VIRTUAL_ENV": str(python.parents[1])}

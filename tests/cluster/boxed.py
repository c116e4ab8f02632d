"""What containers of tests are made of: an image, Docker's daemon, a made-up vendor's folder with a package index.

The image is empty directories and the few files that a dynamic linker wants; ``/usr`` and Python are mounted: no
registry is needed, and what runs inside is this machine's own Python.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import os
import signal
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.cluster.bed import Bed
from tests.run.fakes import FAKE_RANK

_DIRECTORIES: Final = ("usr", "tmp", "var/tmp", "proc", "sys", "dev", "run", "root", "etc", "home")
_LINKS: Final = ("bin", "sbin", "lib", "lib64")
_COPIED: Final = ("etc/ld.so.cache", "etc/ld.so.conf", "etc/os-release", "etc/nsswitch.conf")
_TREES: Final = ("etc/ld.so.conf.d", "etc/alternatives", "etc/ssl")


def write_rootfs(path: Path) -> None:
    """Write the archive that ``FROM scratch`` and ``ADD rootfs.tar /`` make an image of."""
    with tarfile.open(path, "w") as archive:
        for name in _DIRECTORIES:
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if "tmp" in name else 0o755
            archive.addfile(entry)
        for name in _LINKS:
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, f"usr/{name}"
            archive.addfile(entry)
        _text(archive, "etc/passwd", "root:x:0:0:root:/tmp:/bin/sh\n")
        _text(archive, "etc/group", "root:x:0:\n")
        for name in _COPIED:
            if (Path("/") / name).exists():
                _text(archive, name, (Path("/") / name).read_bytes())
        for name in _TREES:
            if (Path("/") / name).is_dir():
                archive.add(Path("/") / name, name)


def _text(archive: tarfile.TarFile, name: str, content: str | bytes) -> None:
    content = content.encode() if isinstance(content, str) else content
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o644
    archive.addfile(entry, io.BytesIO(content))


def mounts() -> list[str]:
    """Return the mounts that make this machine's Python and fake ranks run inside, read-only."""
    prefixes = {"/usr", sys.prefix, sys.base_prefix, *(path for path in sys.path if path.endswith("site-packages"))}
    outer = {path for path in prefixes if not any(path != other and path.startswith(f"{other}/") for other in prefixes)}
    return [f"{path}:{path}:ro" for path in (*sorted(outer), FAKE_RANK.parent)]


def podman(bed: Bed, *arguments: str, number: int = 1) -> str:
    variables = [f"{name}={value}" for name, value in bed.environment(bed.home(number)).items()]
    command = bed.inside(number, "env", *variables, "podman", *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@contextlib.contextmanager
def dockerd(bed: Bed, number: int) -> Iterator[str]:
    """Run a dockerd on one host of the bed; gives the address that its client finds it at."""
    home = bed.home(number) / "docker"
    home.mkdir(exist_ok=True)  # of an earlier engine on this host
    address = f"unix://{home}/docker.sock"
    command = [
        "dockerd", "--data-root", str(home / "data"), "--exec-root", str(home / "exec"), "-H", address,
        "-p", str(home / "pid"), "--storage-driver", "overlay2", "--bridge=none", "--iptables=false",
        "--ip6tables=false", "--ip-forward=false",
    ]  # fmt: skip
    with (home / "log").open("wb") as log:
        process = subprocess.Popen(bed.inside(number, *command), stdout=log, stderr=log, start_new_session=True)
    try:
        deadline = time.monotonic() + 90
        while subprocess.run(["docker", "-H", address, "info"], capture_output=True, check=False).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("dockerd does not start: " + (home / "log").read_text()[-2000:])
            time.sleep(0.2)
        yield address
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


SETUP: Final = """\
from setuptools import Extension, setup

setup(name="acme-kernel", version="1.0", ext_modules=[Extension("acme_kernel", ["kernel.cpp"], language="c++")])
"""
KERNEL: Final = """\
#include <Python.h>
#include <numeric>
#include <vector>

static PyObject *triangle(PyObject *, PyObject *arguments) {
    int last;
    if (!PyArg_ParseTuple(arguments, "i", &last)) return nullptr;
    std::vector<int> numbers(last);
    std::iota(numbers.begin(), numbers.end(), 1);
    return PyLong_FromLong(std::accumulate(numbers.begin(), numbers.end(), 0L));
}

static PyMethodDef methods[] = {{"triangle", triangle, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "acme_kernel", nullptr, -1, methods};
PyMODINIT_FUNC PyInit_acme_kernel() { return PyModule_Create(&definition); }
"""
EXTERN: Final = """\
import os

import acme_kernel
import acme_notes
from accelmark.frameworks.pytorch.hooks import Hooks


class Extern(Hooks):
    def convert_model(self, model):
        print("ADAPTED", acme_kernel.triangle(8), acme_notes.NOTE, os.environ["ACME_MODE"])
        return super().convert_model(model)
"""
ADAPTED: Final = "ADAPTED 36 brought by pip fast mode"
"""Output of a rank with kernel, package and variable."""


def write_adaptation(plugins: Path, model: str = "tiny") -> Path:
    """Write the folder of vendor acme for a case, and requirements of the case for the evaluation outside."""
    folder = plugins / "vendors" / "acme" / "cases" / f"{model}-pytorch"
    (folder / "csrc").mkdir(parents=True)
    (folder / "extern").mkdir()
    (folder / "environment_variables.sh").write_text('export ACME_MODE="fast mode"\n')
    (folder / "requirements.txt").write_text("pydantic\nacme-notes==1.0\n")
    (folder / "csrc" / "setup.py").write_text(SETUP)
    (folder / "csrc" / "kernel.cpp").write_text(KERNEL)
    (folder / "extern" / "__init__.py").write_text(EXTERN)
    (plugins / "cases" / model / "requirements.txt").write_text("packaging\n")
    return folder


def write_index(directory: Path) -> Path:
    """Write a package index (PEP 503) with one wheel, whose name no other index has."""
    place = directory / "simple" / "acme-notes"
    place.mkdir(parents=True)
    info = "acme_notes-1.0.dist-info"
    contents = {
        "acme_notes.py": 'NOTE = "brought by pip"\n',
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: acme-notes\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={_digest(text)},{len(text)}\n" for name, text in contents.items())
    wheel = place / "acme_notes-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in (contents | {f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}).items():
            archive.writestr(name, text)
    (place / "index.html").write_text(f'<a href="{wheel.name}">{wheel.name}</a>\n')
    return directory


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()


@contextlib.contextmanager
def served(directory: Path, address: str) -> Iterator[str]:
    """Serve a directory over HTTP from this machine; gives the address of the index in it."""
    body = [sys.executable, "-u", "-m", "http.server", "0", "--bind", address, "--directory", str(directory)]
    with subprocess.Popen(body, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().partition("port ")[2].split(" ")[0]
            yield f"http://{address}:{port}/simple"
        finally:
            server.terminate()

"""A made-up vendor's folder for the tiny case with every part in it, and a package index that it installs from."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

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

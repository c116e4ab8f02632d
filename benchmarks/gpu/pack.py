"""``bash benchmarks/gpu.sh pack``: one archive with all that the campaign needs on a machine without a network."""

from __future__ import annotations

import argparse
import email
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from accelmark.datasets.catalogue import known_of
from accelmark.datasets.ensure import ensure

ROOT: Final = Path(__file__).parents[2]
IMAGE: Final = Path(__file__).with_name("image.txt")
DATA_SETS: Final = ("fashion_mnist", "shakespeare")
WANTED: Final = ("accelmark", "diffusers", "fastapi", "httptools", "openai", "pycocotools", "tokenizers", "uvicorn")
"""``accelmark`` stands for the requirements in pyproject.toml; the others are packages of items and cases."""
SOURCES: Final = ("src", "benchmarks", "pyproject.toml", "constraints.txt", "LICENSE")
MOST_BYTES: Final = 60 * 2**20
_PLATFORMS: Final = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux_2_17_x86_64", "manylinux2014_x86_64")
_ENVIRONMENT: Final[dict[str, str]] = {
    **{key: str(value) for key, value in default_environment().items()},
    "python_version": "3.12", "python_full_version": "3.12.3", "sys_platform": "linux",
    "platform_system": "Linux", "platform_machine": "x86_64", "implementation_name": "cpython", "extra": "",
}  # fmt: skip


class PackError(Exception):
    """The archive cannot be made; the message says why."""


def image_packages(text: str) -> dict[str, str | None]:
    """Return name -> version of the packages in image.txt; None where the version is not recorded."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version or None for name, _, version in (line.partition("==") for line in lines)}


def requirements_of(wheel: Path) -> Iterator[Requirement]:
    """Yield what a wheel requires on the image's Python and platform, without extras."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    for line in metadata.get_all("Requires-Dist", ()):
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate(_ENVIRONMENT):
            yield requirement


def resolve(wanted: list[Requirement], image: Mapping[str, str | None], pins: Mapping[str, str], into: Path) -> None:
    """Download a wheel for each requirement that the image lacks, and for what these require in turn.

    Raises:
        PackError: the image has a version that a requirement excludes, or no wheel fits the image.
    """
    queue, done = list(wanted), set[str]()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        if name in image:
            version = image[name]
            if version is not None and not requirement.specifier.contains(version, prereleases=True):
                raise PackError(f"the image has {name} {version}, but {requirement} is required")
            continue
        if name in done:
            continue
        done.add(name)
        before = set(into.glob("*.whl"))
        download(f"{name}=={pins[name]}" if name in pins else str(requirement).partition(";")[0], into)
        queue += [each for wheel in set(into.glob("*.whl")) - before for each in requirements_of(wheel)]


def download(requirement: str, into: Path) -> None:
    """Download one wheel for the image's Python.

    Raises PackError: there is none.
    """
    platforms = [argument for name in _PLATFORMS for argument in ("--platform", name)]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(into),
    ]
    command += ["--python-version", "3.12", "--implementation", "cp", *platforms, requirement]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        raise PackError(f"no wheel of {requirement} for Python 3.12 on x86_64: {ended.stderr.strip()[-400:]}")


def import_test(python: str, wheels: Path, image: Mapping[str, str | None]) -> str:
    """Import every wheel in an environment of the image's Python with the image's packages that the wheels require.

    Returns a line about it.

    Raises:
        PackError: an import failed.
    """
    files = sorted(wheels.glob("*.whl"))
    direct = {canonicalize_name(each.name) for wheel in files for each in requirements_of(wheel)} & set(image)
    needed = [f"{name}=={image[name]}" if image[name] else name for name in sorted(direct)]
    modules = [module for wheel in files for module in top_level(wheel)]
    with tempfile.TemporaryDirectory() as scratch:
        venv = Path(scratch) / "venv"
        subprocess.run([python, "-m", "venv", str(venv)], check=True)
        pip = [str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        if needed:
            subprocess.run([*pip, *needed], check=True)
        subprocess.run([*pip, "--no-index", "--no-deps", *map(str, files)], check=True)
        script = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
        ended = subprocess.run(
            [str(venv / "bin/python"), "-c", script, *modules], capture_output=True, text=True, check=False
        )
    if ended.returncode != 0:
        raise PackError(f"import test: {ended.stderr.strip().splitlines()[-1]}")
    return f"imported {len(modules)} modules of {len(files)} wheels"


def top_level(wheel: Path) -> list[str]:
    """Return the packages and modules at the top of a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        parts = [name.split("/") for name in archive.namelist()]
    folders = {part[0] for part in parts if len(part) == 2 and part[1] == "__init__.py"}
    files = {part[0].partition(".")[0] for part in parts if len(part) == 1 and part[0].endswith((".py", ".so"))}
    return sorted(name for name in folders | files if name.isidentifier() and not name.startswith("_"))


def write_archive(out: Path, wheels: Path) -> None:
    """Write sources, wheels and data sets to ``out``.

    Raises PackError: it is larger than ``MOST_BYTES``.
    """
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *SOURCES],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    with tarfile.open(out, "w:xz", preset=6) as archive:
        for name in listed.stdout.splitlines():
            if (ROOT / name).is_file():
                archive.add(ROOT / name, name)
        for wheel in sorted(wheels.glob("*.whl")):
            archive.add(wheel, f"wheels/{wheel.name}")
        for name in DATA_SETS:
            archive.add(ensure(known_of(name).spec), f"data/{name}")
    size = out.stat().st_size
    if size > MOST_BYTES:
        raise PackError(f"{out} has {size / 2**20:.0f} MiB; at most {MOST_BYTES / 2**20:.0f} are allowed")


def main() -> int:
    """Write the archive; return 0, or 1 with the reason on standard error."""
    parser = argparse.ArgumentParser(prog="benchmarks/gpu.sh pack", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "gpu-campaign.tar.xz")
    parser.add_argument("--python", default=shutil.which("python3.12"), help="Python 3.12 for the import test")
    options = parser.parse_args()
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    names = [*project["dependencies"], *(name for name in WANTED if name != "accelmark")]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    image = image_packages(IMAGE.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as scratch:
        wheels = Path(scratch)
        try:
            resolve(
                [Requirement(name) for name in names], image, {canonicalize_name(k): v for k, v in pins.items()}, wheels
            )
            for wheel in sorted(wheels.glob("*.whl")):
                print(f"wheel {parse_wheel_filename(wheel.name)[0]} {parse_wheel_filename(wheel.name)[1]}")
            if options.python is None:
                print("import test left out: there is no python3.12 here; name one with --python")
            else:
                print(import_test(options.python, wheels, image))
            write_archive(options.out, wheels)
        except (PackError, subprocess.CalledProcessError) as error:
            print(f"gpu.sh pack: {error}", file=sys.stderr)
            return 1
    print(f"{options.out}: {options.out.stat().st_size / 2**20:.1f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())

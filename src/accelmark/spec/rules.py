"""Rule sets: files by which searches and runs are judged, AccelMark's own in ``rules/`` and those of users."""

from __future__ import annotations

from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, TypeVar, Union

from pydantic import AfterValidator, BeforeValidator, Field, field_validator

from accelmark.spec.errors import SpecError, nearest
from accelmark.spec.model import FiniteSpec, parse, read_yaml
from accelmark.spec.plugins.case import Target, expanded_mutable


class RuleSet(FiniteSpec):
    """What all rule sets have."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,80}$")]
    """Name in results; that of AccelMark's own rule sets is theirs alone."""
    version: Annotated[int, Field(ge=1)] = 1
    """Version of the rules."""

    @property
    def sha256(self) -> str:
        """SHA-256 of the values that differ from the defaults, as compact JSON."""
        return sha256(self.model_dump_json(exclude_defaults=True).encode()).hexdigest()

    @property
    def title(self) -> str:
        """Name, version and the start of the hash."""
        return f"{self.name} (version {self.version}, SHA-256 {self.sha256[:12]})"


class SearchRules(RuleSet):
    """Rules of a search; a pretrained start is allowed by all and disclosed."""

    min_duration_s: Annotated[float, Field(ge=0)] = 0.0
    """Least duration."""
    min_precision_bits: Annotated[int, Field(ge=1)] = 16
    """Least number of bits of the matrix work."""
    min_accuracy: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Held-out accuracy that must be exceeded; 0: any."""
    datasets: tuple[str, ...] = ()
    """Allowed data sets; empty: any."""
    sample_s: Annotated[float, Field(gt=0)] = 30.0
    """Interval of the series of figures."""
    pinned: dict[str, Any] = Field(default_factory=dict)
    """Dotted key of the search file -> its value; another value makes a search OPEN."""


class RunRules(RuleSet):
    """Rules of a run that trains: VALID where the target is reached and only ``mutable`` settings differ."""

    target: Target | None = None
    """Target in place of those of the cases that are less strict, or have none; null: those of the cases."""
    mutable: tuple[str, ...]
    """Settings that may be changed, in place of the cases' own list; ``batch`` and ``execution`` stand for groups."""

    @field_validator("mutable")
    @classmethod
    def _names_settings(cls, listed: tuple[str, ...]) -> tuple[str, ...]:
        return expanded_mutable(listed, {})

    def target_of(self, own: Target | None) -> Target | None:
        """Return the target of a case whose own target is ``own``."""
        target = self.target
        if target is None or (own is not None and own.metric == target.metric and target.reached(own.value)):
            return own
        return target


R = TypeVar("R", bound=RuleSet)


@cache
def shipped_rules(model: type[R], folder: str) -> dict[str, R]:
    """Return AccelMark's own rule sets in a folder of ``rules/``, by name."""
    files = sorted((Path(__file__).parents[1] / "rules" / folder).glob("*.yaml"))
    return {file.stem: parse(model, read_yaml(file), str(file)) for file in files}


def _read(model: type[R], folder: str, given: Any) -> Any:
    """Return AccelMark's own rule set of that name, or the one in the file of that path."""
    if not isinstance(given, (str, Path)):
        return given
    shipped = shipped_rules(model, folder)
    if str(given) in shipped:
        return shipped[str(given)]
    if not Path(given).is_file():
        hint = nearest(str(given), shipped)
        raise ValueError(f"{str(given)!r} is neither a rule set of AccelMark's nor a file ({hint})")
    try:
        return parse(model, read_yaml(Path(given)), repr(str(given)))
    except SpecError as error:  # reported with the other problems of the file that names it
        raise ValueError("; ".join(map(str, error.problems))) from error


def resolve_rules(values: dict[str, Any], file: Path) -> None:
    """Make the path of a rule set in the values of a ``file`` relative to that file."""
    given = values.get("rules")
    if isinstance(given, str) and (file.parent / given).is_file():
        values["rules"] = str((file.parent / given).resolve())


def _check_name(rules: R, folder: str) -> R:
    own = shipped_rules(type(rules), folder).get(rules.name)
    if own is not None and own.version == rules.version and own != rules:
        raise ValueError(f"{rules.name} is a rule set of AccelMark's, with other values: give this one another name")
    return rules


RulesOfSearch = Annotated[
    SearchRules,
    BeforeValidator(partial(_read, SearchRules, "searches"), json_schema_input_type=Union[SearchRules, str]),
    AfterValidator(lambda rules: _check_name(rules, "searches")),
]
"""A rule set, its name, or the path of its file."""

RulesOfRun = Annotated[
    RunRules,
    BeforeValidator(partial(_read, RunRules, "runs"), json_schema_input_type=Union[RunRules, str]),
    AfterValidator(lambda rules: _check_name(rules, "runs")),
]
"""The same for a run."""

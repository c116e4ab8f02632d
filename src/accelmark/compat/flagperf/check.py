"""What a run would refuse of an imported key and its settings, by the planner's own checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from accelmark.plan.build import build_plan
from accelmark.plan.request import Detected
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import AccelmarkError, Problem, SpecError
from accelmark.spec.model import parse
from accelmark.spec.runfile import RunSpec

RUN_FILE: Final = "run.yaml"


class Checked(NamedTuple):
    """Result of :func:`checked`."""

    settings: Mapping[str, Any] | None
    """The settings that a run accepts; None where it refuses the key."""
    refused: Sequence[Problem]
    """Refused settings by their dotted keys; where the key is refused, the reasons last."""
    fixed: frozenset[str]
    """Those of the refused settings that only an open run may change."""


def checked(case: Mapping[str, Any], cluster: ClusterSpec, *, is_open: bool) -> Checked:
    """Plan an entry of ``cases`` in a run file, without data and devices, and take out the settings that are refused.

    Settings are dotted.
    """
    settings = dict(case.get("settings", {}))
    refused: list[Problem] = []
    fixed: set[str] = set()
    while problems := _problems(case, settings, cluster, is_open=is_open):
        named = [problem for problem in problems if problem.where == RUN_FILE]
        found = {problem.key: problem for problem in named if problem.key in settings} or {
            key: problem for problem in named for key in settings if problem.key and key.startswith(f"{problem.key}.")
        }
        if not found:
            return Checked(None, [*refused, *problems], frozenset(fixed))
        if not is_open:
            kept = {problem.key for problem in _problems(case, settings, cluster, is_open=True)}
            fixed |= found.keys() - kept
        refused += [Problem(problem.where, key, problem.what, problem.hint) for key, problem in found.items()]
        settings = {key: value for key, value in settings.items() if key not in found}
    return Checked(settings, refused, frozenset(fixed))


def _problems(
    case: Mapping[str, Any], settings: Mapping[str, Any], cluster: ClusterSpec, *, is_open: bool
) -> Sequence[Problem]:
    vendor = cluster.vendor or "cpu"
    unknown = Detected(vendor=vendor, hardware="any", chip=None, num_devices=None, is_present=False)
    try:
        build_plan(
            parse(RunSpec, {"cases": [{**case, "settings": settings}], "vendor": vendor, "open": is_open}, RUN_FILE),
            cluster=cluster,
            detected=unknown,
            data_dirs=lambda *_: {},
            created_at="",
            where=RUN_FILE,
            allow_missing_data=True,
        )
    except SpecError as error:
        return error.problems
    except AccelmarkError as error:
        return [Problem(RUN_FILE, "", str(error))]
    return ()

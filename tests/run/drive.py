"""Run a coordinator in its own process: ``drive.py start|resume|end RUN [PLAN] [--json] [--look]``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from accelmark.plan.plan import Plan
from accelmark.run.controller.coordinator import resume, start, stop
from accelmark.run.preflight.hosts import run_preflight
from accelmark.spec.errors import AccelmarkError
from accelmark.spec.job import JobSpec


def fetch(job: JobSpec, tell: Callable[[str], None]) -> None:
    """Bring nothing: the fake ranks need no data."""


async def no_preflight(*_: object) -> None:
    """Check nothing."""


def main(verb: str, run: str, plan: str | None) -> int:
    as_json = "--json" in sys.argv
    preflight = run_preflight if "--look" in sys.argv else no_preflight
    try:
        if verb == "start":
            assert plan is not None
            made = Plan.model_validate_json(Path(plan).read_bytes())
            return start(made, Path(run), fetch, preflight, as_json=as_json).exit_code
        if verb == "resume":
            redo, fresh = "--failed" in sys.argv, "--from-scratch" in sys.argv
            return resume(Path(run), fetch, preflight, redo_failed=redo, from_scratch=fresh, as_json=as_json).exit_code
        return 0 if stop(Path(run), at_once="--now" in sys.argv) else 1
    except AccelmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    positional = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    sys.exit(main(positional[0], positional[1], positional[2] if len(positional) > 2 else None))

"""``python -m accelmark.run.agent.fetch_data JOB [--offline]``: on a host, fetch and verify a job's data.

Prints what was found as one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from accelmark.run.controller.data import DataFetcher
from accelmark.spec.errors import AccelmarkError
from accelmark.spec.job import JobSpec


def main(arguments: list[str]) -> int:
    """Bring the data of the job in ``arguments``; says why it cannot be had, and returns the exit code."""
    job = JobSpec.model_validate_json(Path(arguments[0]).read_bytes())
    try:
        found = DataFetcher("--offline" in arguments)(job, lambda _: None)
    except AccelmarkError as error:
        print(" ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    print(json.dumps({name: record.model_dump(mode="json") for name, record in found.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""``python -m accelmark.serving.loadgen SETTINGS LOG_DIR``: LoadGen in a process that can be ended at any time.

SETTINGS is a JSON object with the fields of ``LoadGenSettings`` and ``scenario``. The process writes the id of each
query that it issues as a line, and reads ``first ID`` and ``done ID TOKENS`` as lines.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from accelmark.serving.loadgen.mlperf import LoadGenSettings, done, first, run_token_loadgen


def main(arguments: list[str]) -> int:
    """Run one scenario; return the exit code."""
    fields = json.loads(arguments[0])
    scenario = fields.pop("scenario")
    with os.fdopen(os.dup(1), "w") as output:
        os.dup2(2, 1)  # what libraries print is no query

        def issue(queries: Sequence[int]) -> None:
            output.write("".join(f"{query}\n" for query in queries))
            output.flush()

        threading.Thread(target=_report, daemon=True).start()
        run_token_loadgen(scenario, LoadGenSettings(**fields), issue, Path(arguments[1]))
    return 0


def _report() -> None:
    """Tell LoadGen what arrived; end the process where the parent ended."""
    for text in sys.stdin:
        word, query, *tokens = text.split()
        if word == "first":
            first(int(query))
        else:
            done(int(query), int(tokens[0]))
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

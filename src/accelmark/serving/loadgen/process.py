"""Start LoadGen in a process of its own, take its queries, and tell it what arrived."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Final, Self, cast, final

from accelmark.serving.cores import started_on
from accelmark.serving.loadgen.mlperf import DETAIL_FILE, LoadGenLog, LoadGenSettings, read_log
from accelmark.spec.errors import RunError
from accelmark.spec.settings.serving import TokenScenario

Submit = Callable[["LoadGenProcess", int], None]
"""Sends the query with an id for a process; called in a thread, one query after the other."""

_LAST_LINES: Final = 3
_ERRORS_FILE: Final = "loadgen.err.log"
MIN_TOKENS: Final = 2
"""Fewest tokens of an answer that LoadGen takes."""


@final
class LoadGenProcess:
    """LoadGen with one scenario; a context manager, which ends it."""

    def __init__(
        self,
        scenario: TokenScenario,
        expected: LoadGenSettings,
        log_dir: Path,
        submit: Submit,
        cores: Sequence[int] | None = None,
    ) -> None:
        """Start it, on ``cores`` only where they are given."""
        log_dir.mkdir(parents=True, exist_ok=True)
        self._log_dir = log_dir
        self._submit = submit
        self._failure: Exception | None = None
        request = json.dumps(asdict(expected) | {"scenario": scenario})
        command = [sys.executable, "-m", __package__, request, str(log_dir)]
        place = started_on(cores) if cores is not None else contextlib.nullcontext()
        with (log_dir / _ERRORS_FILE).open("wb") as errors, place:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, bufsize=1
            )
        self._input = cast(IO[str], self._process.stdin)
        self._reader = threading.Thread(target=self._read, name="loadgen", daemon=True)
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        with contextlib.suppress(OSError):
            self._input.close()

    @property
    def is_over(self) -> bool:
        """Whether it issues no more queries."""
        return not self._reader.is_alive()

    def first(self, query: int) -> None:
        """Report the first output of a query."""
        self._write(f"first {query}\n")

    def done(self, query: int, num_tokens: int) -> None:
        """Report the end of a query; LoadGen is told at least the fewest tokens that it takes."""
        self._write(f"done {query} {max(num_tokens, MIN_TOKENS)}\n")

    def log(self) -> LoadGenLog:
        """Return its log, after its end.

        Raises:
            RunError: it failed.
            AccelmarkError: a query could not be sent.
        """
        if self._failure is not None:
            raise self._failure
        if code := self._process.wait():
            text = (self._log_dir / _ERRORS_FILE).read_text(errors="replace")
            raise RunError(f"LoadGen ended with status {code}: {' / '.join(text.splitlines()[-_LAST_LINES:])}")
        return read_log(self._log_dir / DETAIL_FILE)

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError):  # it ended, which log() reports
            self._input.write(text)
            self._input.flush()

    def _read(self) -> None:
        """Submit the queries until the end of the process, or until one cannot be sent."""
        try:
            with cast(IO[str], self._process.stdout) as output:
                for text in output:
                    self._submit(self, int(text))
        except Exception as error:  # noqa: BLE001 - raised by log()
            self._failure = error

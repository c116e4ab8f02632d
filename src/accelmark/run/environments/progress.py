"""Progress of work on hosts whose length is unknown: what is done on each, and for how long."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Final, Self, final

from rich.console import Console
from rich.live import Live
from rich.text import Text

_INTERVAL_S: Final = 30.0
"""Between lines where the output is not a terminal."""


@final
class HostProgress:
    """Shows a line for each host: redrawn on a terminal, else printed at each change and every half minute."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._doing: dict[str, tuple[str, float]] = {}
        self._ended = threading.Event()
        self._live = Live(get_renderable=self._lines, console=console, refresh_per_second=4, transient=True)

    def report(self, host: str, what: str) -> None:
        """Show what is now done on a host."""
        self._doing[host] = (what, time.monotonic())
        if not self._console.is_terminal:
            self._console.print(f"{host}: {what}", markup=False)

    def _lines(self) -> Text:
        now = time.monotonic()
        lines = (f"{host}: {what}, {now - began:.0f} s" for host, (what, began) in dict(self._doing).items())
        return Text("\n".join(lines))

    def _repeat(self) -> None:
        while not self._ended.wait(_INTERVAL_S):
            self._console.print(self._lines())

    def __enter__(self) -> Self:
        """Begin to show it."""
        if self._console.is_terminal:
            self._live.start()
        else:
            threading.Thread(target=self._repeat, name="progress", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove it from a terminal."""
        self._ended.set()
        self._live.stop()

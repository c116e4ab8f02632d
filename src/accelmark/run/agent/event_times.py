"""Record when events appear in a rank's log, by the node agent's clocks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, final

from accelmark.run.agent.inotify import IN_MODIFY, Inotify
from accelmark.spec.log.perflog import event_names
from accelmark.spec.log.records import ClockReading

_MAX_READ_BYTES: Final = 2**20
_MAX_LATE_S: Final = 5.0


@final
class LogEvents:
    """Records when events appear in a rank's log; ``descriptor`` becomes readable when a file next to it grows."""

    def __init__(self, log: Path) -> None:
        self.seen: dict[str, tuple[ClockReading, ClockReading]] = {}
        self._inotify = Inotify()
        try:
            self._inotify.watch(str(log.parent), IN_MODIFY)
        except OSError:
            self._inotify.close()
        self._log = log
        self._read_bytes = 0

    @property
    def descriptor(self) -> int | None:
        """None where the kernel cannot report changes; events are not timed then."""
        return self._inotify.descriptor

    def look(self) -> None:
        """Read what was appended to the log since the last call; without a descriptor, nothing can be timed."""
        if not self._inotify.read():
            return
        try:
            with self._log.open("rb") as file:
                file.seek(self._read_bytes)
                added = file.read(_MAX_READ_BYTES)
                written_s = os.fstat(file.fileno()).st_ctime
        except OSError:
            return
        end = added.rfind(b"\n") + 1
        # A line longer than a read has no event that matters here.
        self._read_bytes += end or (len(added) if len(added) == _MAX_READ_BYTES else 0)
        names = event_names(added[:end])
        if not names:
            return
        now = ClockReading.now()
        # On a busy machine the agent may read late; the kernel records when the rank wrote.
        at = now.earlier(min(max(0.0, now.wall_s - written_s), _MAX_LATE_S))
        for name in names:
            first, _ = self.seen.get(name, (at, at))
            self.seen[name] = first, at

    def close(self) -> None:
        """Stop watching."""
        self._inotify.close()

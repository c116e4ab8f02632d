"""Trace single steps with JAX's profiler: the rest of a step without its collectives is the rank's own part.

XLA compiles the exchange of gradients into the step, so that no mark on the host separates it from computation.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, final

import jax

from accelmark.spec.log.events import Event, TracedStep
from accelmark.spec.log.perflog import EventLog
from accelmark.train.loop.window import covered

_COLLECTIVES: Final = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
"""Beginnings of the names of HLO instructions."""


@final
class StepTracer:
    """Traces steps; see :class:`accelmark.train.loop.contract.StepTracer`."""

    def __init__(self, step: Callable[[list[Any]], Any], wait: Callable[[], None], platform: str, log: EventLog):
        """``step`` takes a step without waiting, ``wait`` waits until it is computed."""
        self._step, self._wait, self._log = step, wait, log
        self._planes = "/host:CPU" if platform == "cpu" else "/device:"
        self.cost_s = 0.0
        self._trace(lambda: None)  # the first trace opens the profiler: part of the initialisation

    def take(self, batches: list[Any]) -> tuple[Any, TracedStep | None]:
        """Take a step and return its loss with its times; None, and never again, where its trace has no collective."""
        self._wait()
        loss, step_ms, exchange_ms = self._trace(lambda: self._step(batches))
        if not exchange_ms:
            self.cost_s = float("inf")
            problem = "waits for other ranks are not known: the trace of a step has no collective"
            self._log.event(Event.WARNING, {"message": problem})
            return loss, None
        return loss, TracedStep(step_ms=round(step_ms, 4), own_ms=round(max(0.0, step_ms - exchange_ms), 4))

    def _trace(self, run: Callable[[], Any]) -> tuple[Any, float, float]:
        """Return the result of ``run``, its duration and the duration of its collectives in milliseconds."""
        begin = time.monotonic()
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with tempfile.TemporaryDirectory(prefix="accelmark-trace-") as directory:
            jax.profiler.start_trace(directory, profiler_options=options)
            try:
                start = time.monotonic()
                result = run()
                self._wait()
                step_s = time.monotonic() - start
            finally:
                jax.profiler.stop_trace()
            exchange_ms = covered(self._collectives(Path(directory)))
        self.cost_s = max(self.cost_s, time.monotonic() - begin - step_s)
        return result, step_s * 1e3, exchange_ms

    def _collectives(self, directory: Path) -> Iterator[tuple[float, float]]:
        """Yield begin and end of the collectives of this rank's device in milliseconds."""
        for file in directory.rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
                if not plane.name.startswith(self._planes):
                    continue
                for line in plane.lines:
                    for event in line.events:
                        if self._name(event).startswith(_COLLECTIVES):
                            yield event.start_ns / 1e6, (event.start_ns + event.duration_ns) / 1e6

    def _name(self, event: Any) -> str:
        """Return the name of the instruction; kernels of devices have names of their own."""
        return event.name if self._planes == "/host:CPU" else str(dict(event.stats).get("hlo_op", event.name))

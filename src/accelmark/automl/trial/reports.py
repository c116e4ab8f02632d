"""Turn the driver's events into epoch reports, keep the best weights, and decide on the early stop."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, final

from accelmark.automl.model.weights import Array
from accelmark.automl.records import EpochReport
from accelmark.automl.search.schedule import EarlyStop
from accelmark.automl.trial.case import TrialCase
from accelmark.automl.trial.module import to_weights
from accelmark.automl.workers.messages import TrialListener, TrialOrder
from accelmark.spec.events import Evaluation, Event, Finished, Started, StepWindow
from accelmark.spec.model import Spec
from accelmark.train.loop.ends import End


@final
class TrialReports:
    """Receives the driver's events and decides on an early end. Everything except the losses is equal on all ranks.

    ``began``: monotonic time of the trial's start, before the model is built.
    """

    def __init__(self, order: TrialOrder, listener: TrialListener, *, began: float) -> None:
        self._listener: Final = listener
        self._began: Final = began
        self._stop: Final = EarlyStop.for_round(order.round) if order.early_stop else None
        self.started: Started | None = None
        self.finished: Finished | None = None
        self.best_weights: dict[str, Array] | None = None
        self.case: TrialCase | None = None
        self.mean: Callable[[list[float]], list[float]] | None = None
        """Mean over the ranks."""
        self._best_accuracy = -1.0
        self._epoch = 1
        self._since = self._evaluated_at = began
        self._images = self._steps = 0
        self._losses: list[float] = []

    def event(self, event: Event, value: Spec | Mapping[str, Any] | None = None, *, at_ns: int | None = None) -> None:
        """Receive an event of the driver."""
        now = time.monotonic()
        if event == Event.TRAIN_START:
            self._since = now
        elif isinstance(value, Started):
            self.started = value
        elif isinstance(value, StepWindow):
            self._losses += [math.nan if loss is None else loss for loss in value.losses]
        elif isinstance(value, Evaluation):
            self._evaluated_at = now
        elif isinstance(value, Finished):
            self.finished = value

    def evaluated(self, evaluation: Evaluation) -> End | None:
        """Report the epoch that this evaluation closes, keep its weights if they are the best, and decide on an end."""
        accuracy, loss = evaluation.metrics["accuracy"], evaluation.metrics["loss"]
        finite = loss is not None and math.isfinite(loss)
        self._report(
            evaluation,
            self._evaluated_at,
            training_s=max(0.0, self._evaluated_at - self._since - evaluation.duration_s),
            evaluating_s=evaluation.duration_s,
            evaluated_images=round(evaluation.metrics["count"] or 0),
            validation_loss=loss if finite else None,
            validation_accuracy=accuracy,
            complete=True,
        )
        if loss is None or not finite:
            return End("nonfinite_loss", f"the validation loss of epoch {self._epoch - 1} is {loss}")
        if self.case is not None and accuracy is not None and accuracy > self._best_accuracy:
            self._best_accuracy = accuracy
            self.best_weights = to_weights(self.case.graph)
        ends = self._stop is not None and self._stop.should_stop(loss)
        self._since = time.monotonic()
        return End("early_stop") if ends else None

    def close(self, *, in_step: bool) -> None:
        """Report the part of an epoch that was trained before the trial ended, if any."""
        if self.finished is None or self.finished.global_steps == self._steps:
            return
        if not in_step:
            self.mean = None
        now = time.monotonic()
        self._report(
            self.finished,
            now,
            training_s=now - self._since,
            evaluating_s=0.0,
            evaluated_images=0,
            validation_loss=None,
            validation_accuracy=None,
            complete=False,
        )

    def _report(self, event: Evaluation | Finished, ended: float, **values: Any) -> None:
        report = EpochReport(
            epoch=self._epoch,
            begun_s=self._since - self._began,
            ended_s=ended - self._began,
            trained_images=event.num_trained_samples - self._images,
            steps=event.global_steps - self._steps,
            train_loss=self._train_loss(),
            **values,
        )
        self._images, self._steps = event.num_trained_samples, event.global_steps
        self._epoch, self._losses, self._since = self._epoch + 1, [], ended
        self._listener.epoch(report)

    def _train_loss(self) -> float | None:
        """Return the mean over the epoch's steps and all ranks; None where it is not finite."""
        own = sum(self._losses) / len(self._losses) if self._losses else math.nan
        mean = self.mean([own])[0] if self.mean is not None else own
        return mean if math.isfinite(mean) else None

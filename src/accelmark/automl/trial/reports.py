"""What the driver's events come to: an epoch's report each, the best weights, and whether the trial may end early."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, final

from accelmark.automl.graph.module import Array, to_weights
from accelmark.automl.schedule import EarlyStop
from accelmark.automl.trial.case import TrialCase
from accelmark.automl.trial.order import EpochReport, Listener, TrialOrder
from accelmark.spec.events import Evaluation, Event, Finished, Started, StepWindow
from accelmark.spec.model import Spec
from accelmark.train.loop.ends import End

MeanOverRanks = Callable[[list[float]], list[float]]


@final
class TrialReports:
    """Hears a trial's events, and judges each evaluation. All of it but the losses is the same on every rank.

    ``began`` is the monotonic time at which the trial began, building included; reports count from it.
    """

    def __init__(self, order: TrialOrder, listener: Listener, *, began: float) -> None:
        self._listener: Final = listener
        self._began: Final = began
        self._stop: Final = EarlyStop.for_round(order.round) if order.early_stop else None
        self.started: Started | None = None
        self.finished: Finished | None = None
        self.best_weights: dict[str, Array] | None = None
        self.case: TrialCase | None = None
        self.mean: MeanOverRanks | None = None
        self._best_accuracy = -1.0
        self._epoch = 1
        self._since = began
        self._evaluated_at = began
        self._images = 0
        self._steps = 0
        self._losses: list[float] = []

    def event(self, event: Event, value: Spec | Mapping[str, Any] | None = None, *, at_ns: int | None = None) -> None:
        """Take in one event of the driver."""
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
        """Report the epoch that this evaluation closes, keep its weights where they are the best, and judge it."""
        accuracy, loss = evaluation.metrics["accuracy"], evaluation.metrics["loss"]
        finite = loss is not None and math.isfinite(loss)
        worked_s = self._evaluated_at - self._since
        self._report(
            evaluation.num_trained_samples,
            evaluation.global_steps,
            ended=self._evaluated_at,
            training_s=max(0.0, worked_s - evaluation.duration_s),
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
        """Report the part of an epoch that was trained when the trial ended, where there is one."""
        if self.finished is None or self.finished.global_steps == self._steps:
            return
        if not in_step:
            self.mean = None
        now = time.monotonic()
        self._report(
            self.finished.num_trained_samples,
            self.finished.global_steps,
            ended=now,
            training_s=now - self._since,
            evaluating_s=0.0,
            evaluated_images=0,
            validation_loss=None,
            validation_accuracy=None,
            complete=False,
        )

    def _report(
        self,
        images: int,
        steps: int,
        *,
        ended: float,
        training_s: float,
        evaluating_s: float,
        evaluated_images: int,
        validation_loss: float | None,
        validation_accuracy: float | None,
        complete: bool,
    ) -> None:
        report = EpochReport(
            epoch=self._epoch,
            begun_s=self._since - self._began,
            ended_s=ended - self._began,
            trained_images=images - self._images,
            evaluated_images=evaluated_images,
            steps=steps - self._steps,
            training_s=training_s,
            evaluating_s=evaluating_s,
            train_loss=self._train_loss(),
            validation_loss=validation_loss,
            validation_accuracy=validation_accuracy,
            complete=complete,
        )
        self._epoch, self._images, self._steps, self._losses = self._epoch + 1, images, steps, []
        self._since = ended
        self._listener.epoch(report)

    def _train_loss(self) -> float | None:
        """Return the mean over the epoch's steps and all ranks; None where it is not finite."""
        own = sum(self._losses) / len(self._losses) if self._losses else math.nan
        mean = self.mean([own])[0] if self.mean is not None else own
        return mean if math.isfinite(mean) else None

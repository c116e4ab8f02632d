"""The hyperparameters of trials: the configured ones, or what TPE asks for as far as the search's limits allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from accelmark.automl.config import AutomlConfig
from accelmark.automl.engine.rundir import RunDirectory
from accelmark.automl.graph import Network
from accelmark.automl.records import Hyperparameters
from accelmark.automl.schedule import Assignment
from accelmark.automl.trial.order import digest, executed_network
from accelmark.automl.tuning import Tuner, default_hyperparameters


@final
@dataclass(frozen=True, slots=True)
class Settled:
    """What a trial takes: its hyperparameters and the network with them written in.

    ``tuned`` tells whether TPE chose; ``note`` says where the limits did not allow what it asked for.
    """

    hyperparameters: Hyperparameters
    network: Network
    tuned: bool
    note: str = ""


class TrialHyperparameters:
    """Settles what each trial takes, and tells the study what it was worth."""

    def __init__(self, config: AutomlConfig, tuner: Tuner | None) -> None:
        self._config: Final = config
        self._tuner: Final = tuner

    def settle(self, assignment: Assignment, network: Network) -> Settled:
        """Return what a trial of ``network`` takes."""
        if self._tuner is None or not assignment.tuned:
            plain = default_hyperparameters(self._config.training)
            return Settled(plain, executed_network(network, plain), tuned=False)
        asked = self._tuner.ask(assignment.trial)
        taken, executed = self._within_limits(network, asked)
        if taken.kernel == asked.kernel:
            return Settled(taken, executed, tuned=True)
        self._tuner.took(assignment.trial, taken)
        instead = "its network keeps its own" if taken.kernel is None else f"it takes {taken.kernel}"
        note = f"trial {assignment.trial}: kernel {asked.kernel} would break the limits of the search; {instead}"
        return Settled(taken, executed, tuned=True, note=note)

    def _within_limits(self, network: Network, asked: Hyperparameters) -> tuple[Hyperparameters, Network]:
        """Return the asked form, or that of the largest smaller kernel that the limits allow, or the network's own."""
        limits = self._config.search.limits
        if asked.kernel is not None:
            smaller = {kernel for kernel in self._config.tuning.kernel if kernel <= asked.kernel}
            for kernel in sorted(smaller, reverse=True):
                taken = asked.model_copy(update={"kernel": kernel})
                executed = executed_network(network, taken)
                if limits.allow(executed):
                    return taken, executed
            asked = asked.model_copy(update={"kernel": None})
        return asked, executed_network(network, asked)

    def take_up(self) -> None:
        """Give up what the run left behind in the study when it was killed."""
        if self._tuner is not None:
            self._tuner.abandon_running()

    def tell(self, trial: int, worth: float | None, *, diverged: bool) -> None:
        """Tell the study a trial's worth; None when it gave no result."""
        if self._tuner is not None:
            self._tuner.tell(trial, worth, diverged=diverged)

    def close(self) -> None:
        """Let go of the study."""
        if self._tuner is not None:
            self._tuner.close()


def open_hyperparameters(
    config: AutomlConfig, run: RunDirectory, *, fingerprint: str, sessions: int
) -> TrialHyperparameters:
    """Open the run's study where hyperparameters are searched; raises StudyError when it cannot be, or is another's."""
    if config.schedule.tuning_round is None:
        return TrialHyperparameters(config, None)
    tuner = Tuner(
        config.tuning,
        config.training,
        run=run.name,
        experiment=f"data {fingerprint[:16]}, network {digest(run.network())[:16]}",
        directory=run.path,
        seed=config.seed + sessions,
    )
    return TrialHyperparameters(config, tuner)

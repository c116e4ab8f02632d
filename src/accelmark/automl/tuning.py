"""Hyperparameters by Optuna's TPE: one study, shared by all trials of a run and by all that are given its URL."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from accelmark.automl.config import TrainingConfig, TuningConfig
from accelmark.automl.records import Hyperparameters
from accelmark.spec.errors import RequestError

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial, Trial

JOURNAL_NAME: Final = "study.journal"
_EXPERIMENT: Final = "experiment"


class StudyError(RequestError):
    """A study that belongs to another experiment, or a storage that cannot be opened."""


class Tuner:
    """Asks a shared study for hyperparameters and tells it what they were worth.

    ``experiment`` names the run that the study belongs to: a study of another experiment is refused, since its values
    came from other data or another schedule.
    """

    def __init__(
        self, tuning: TuningConfig, training: TrainingConfig, *, experiment: str, directory: Path, seed: int
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._tuning: Final = tuning
        self._training: Final = training
        self._open: dict[int, Trial] = {}
        name = f"accelmark-{experiment}"
        try:
            self._study = optuna.create_study(
                storage=_storage(tuning.storage, directory),
                study_name=name,
                direction="maximize",
                load_if_exists=True,
                sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=5, constant_liar=True),
            )
        except Exception as error:
            raise StudyError(f"the study's storage {tuning.storage or directory} cannot be opened: {error}") from error
        owner = self._study.user_attrs.get(_EXPERIMENT)
        if owner is None:
            self._study.set_user_attr(_EXPERIMENT, experiment)
        elif owner != experiment:
            raise StudyError(f"study {name!r} belongs to experiment {owner!r}, not to {experiment!r}")
        self._check_space()

    @property
    def distributions(self) -> dict[str, BaseDistribution]:
        """The searched space."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution

        space: dict[str, BaseDistribution] = {}
        if self._tuning.kernel:
            space["kernel"] = CategoricalDistribution(self._tuning.kernel)
        if self._tuning.batch_size:
            space["batch_size"] = CategoricalDistribution(self._tuning.batch_size)
        if self._tuning.learning_rate:
            space["learning_rate"] = FloatDistribution(*self._tuning.learning_rate, log=True)
        if self._tuning.dropout:
            space["dropout"] = FloatDistribution(*self._tuning.dropout)
        return space

    @property
    def trials(self) -> list[FrozenTrial]:
        """All that the study knows."""
        return self._study.get_trials(deepcopy=False)

    def defaults(self) -> Hyperparameters:
        """Return the hyperparameters of a trial that is not tuned."""
        return default_hyperparameters(self._training)

    def ask(self, trial: int) -> Hyperparameters:
        """Return what TPE proposes for this trial number; what is not searched stays as configured."""
        asked = self._study.ask(self.distributions)
        self._open[trial] = asked
        return self.defaults().model_copy(update=dict(asked.params))

    def tell(self, trial: int, value: float | None, *, diverged: bool = False) -> None:
        """Report a trial's worth; None when it gave no result. A trial that was not tuned is passed over.

        One that diverged is told as pruned: TPE ranks it below all that have a value, and so keeps away from where it
        was. One that failed otherwise says nothing of its hyperparameters, and TPE leaves it out.
        """
        from optuna.trial import TrialState

        asked = self._open.pop(trial, None)
        if asked is None:
            return
        if value is None:
            self._study.tell(asked, state=TrialState.PRUNED if diverged else TrialState.FAIL)
        else:
            self._study.tell(asked, value)

    def abandon_running(self) -> int:
        """Mark trials that a killed run left behind as failed; return how many."""
        from optuna.trial import TrialState

        left = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        for trial in left:
            self._study.tell(trial.number, state=TrialState.FAIL)
        return len(left)

    def _check_space(self) -> None:
        known = self.distributions
        for trial in self.trials:
            if trial.params and set(trial.distributions) != set(known):
                raise StudyError(
                    f"study {self._study.study_name!r} searched {sorted(trial.distributions)}, this run searches"
                    f" {sorted(known)}: it is of another experiment"
                )


def default_hyperparameters(training: TrainingConfig) -> Hyperparameters:
    """Return the hyperparameters of a trial that is not tuned."""
    return Hyperparameters(batch_size=training.batch_size, learning_rate=training.learning_rate)


def _storage(url: str | None, directory: Path) -> str | BaseStorage:
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    return url or JournalStorage(JournalFileBackend(str(directory / JOURNAL_NAME)))

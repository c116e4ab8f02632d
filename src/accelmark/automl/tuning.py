"""Hyperparameters by Optuna's TPE: one study, shared by all trials of a run and by all that are given its URL."""

from __future__ import annotations

import re
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
_RUN: Final = "run"


class StudyError(RequestError):
    """A study that belongs to another experiment, or a storage that cannot be opened."""


class Tuner:
    """Asks a shared study for hyperparameters and tells it what they were worth.

    ``run`` names the run, and the study where ``tuning.study`` names none. ``experiment`` says what the study's values
    are of: a study of another experiment is refused, since they came from other data or another network.
    """

    def __init__(
        self, tuning: TuningConfig, training: TrainingConfig, *, run: str, experiment: str, directory: Path, seed: int
    ) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._tuning: Final = tuning
        self._training: Final = training
        self._run: Final = run
        self._open: dict[int, Trial] = {}
        self._taken: dict[int, Hyperparameters] = {}
        name = f"accelmark-{tuning.study or run}"
        try:
            self._storage: Final = _storage(tuning.storage, directory)
            self._study = optuna.create_study(
                storage=self._storage,
                study_name=name,
                direction="maximize",
                load_if_exists=True,
                sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=5, constant_liar=True),
            )
        except Exception as error:
            where = _without_password(tuning.storage) if tuning.storage else directory
            said = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise StudyError(f"the study's storage {where} cannot be opened: {said}") from error
        try:
            self._check_experiment(name, experiment)
            self._check_space()
        except StudyError:
            self.close()
            raise

    def _check_experiment(self, name: str, experiment: str) -> None:
        owner = self._study.user_attrs.get(_EXPERIMENT)
        if owner is None:
            self._study.set_user_attr(_EXPERIMENT, experiment)
        elif owner != experiment:
            raise StudyError(
                f"study {name!r} is of another experiment ({owner}; this is {experiment}): name another tuning.study"
            )

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
        try:
            asked = self._study.ask(self.distributions)
        except ValueError as error:  # a run that shares the study searched another space after we had looked
            raise StudyError(
                f"study {self._study.study_name!r} is searched by another run otherwise: {error}"
            ) from error
        asked.set_user_attr(_RUN, self._run)
        self._open[trial] = asked
        return self.defaults().model_copy(update=dict(asked.params))

    def took(self, trial: int, hyperparameters: Hyperparameters) -> None:
        """Take note that a trial did not take what was asked for, but these: their worth is what the study is told."""
        self._taken[trial] = hyperparameters

    def tell(self, trial: int, value: float | None, *, diverged: bool = False) -> None:
        """Report a trial's worth; None when it gave no result. A trial that was not tuned is passed over.

        One that diverged is told as pruned: TPE ranks it below all that have a value, and so keeps away from where it
        was. One that failed otherwise says nothing of its hyperparameters, and TPE leaves it out.
        """
        from optuna.trial import TrialState

        asked, taken = self._open.pop(trial, None), self._taken.pop(trial, None)
        if asked is None:
            return
        if taken is not None:
            self._study.tell(asked, state=TrialState.FAIL)
            self._tell_taken(asked, taken, value, diverged=diverged)
            return
        if value is None:
            self._study.tell(asked, state=TrialState.PRUNED if diverged else TrialState.FAIL)
        else:
            self._study.tell(asked, value)

    def _tell_taken(self, asked: Trial, taken: Hyperparameters, value: float | None, *, diverged: bool) -> None:
        """Put what was really executed into the study, where its space has it."""
        from optuna.trial import TrialState, create_trial

        params = {name: getattr(taken, name) for name in asked.params}
        if None in params.values() or (value is None and not diverged):
            return
        state = TrialState.PRUNED if value is None else TrialState.COMPLETE
        known = dict(asked.distributions)
        self._study.add_trial(
            create_trial(state=state, value=value, params=params, distributions=known, user_attrs={_RUN: self._run})
        )

    def abandon_running(self) -> int:
        """Mark trials that this run left behind when it was killed as failed; return how many."""
        from optuna.trial import TrialState

        running = self._study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        left = [trial for trial in running if trial.user_attrs.get(_RUN) == self._run]
        for trial in left:
            self._study.tell(trial.number, state=TrialState.FAIL)
        return len(left)

    def close(self) -> None:
        """Let go of the connections to a data base."""
        from optuna.storages import RDBStorage

        if isinstance(self._storage, RDBStorage):
            self._storage.remove_session()
            self._storage.engine.dispose()

    def _check_space(self) -> None:
        from optuna.distributions import check_distribution_compatibility

        known = self.distributions
        for trial in self.trials:
            if trial.params and set(trial.distributions) != set(known):
                raise StudyError(
                    f"study {self._study.study_name!r} searched {sorted(trial.distributions)}, this run searches"
                    f" {sorted(known)}: it is of another experiment"
                )
            for name, distribution in trial.distributions.items():
                try:
                    check_distribution_compatibility(distribution, known[name])
                except ValueError as error:
                    raise StudyError(
                        f"study {self._study.study_name!r} searched {name} in {distribution}, tuning.{name} says"
                        f" {known[name]}: it is of another experiment; name another tuning.study"
                    ) from error


def default_hyperparameters(training: TrainingConfig) -> Hyperparameters:
    """Return the hyperparameters of a trial that is not tuned."""
    return Hyperparameters(batch_size=training.batch_size, learning_rate=training.learning_rate)


def _storage(url: str | None, directory: Path) -> BaseStorage:
    from optuna.storages import JournalStorage, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    if url is None:
        # Whoever tunes holds the run: a lock that is here was left by a killed process; Optuna would wait 30 s for it.
        (directory / f"{JOURNAL_NAME}.lock").unlink(missing_ok=True)
        return JournalStorage(JournalFileBackend(str(directory / JOURNAL_NAME)))
    if url.startswith("postgresql://"):  # a URL of PostgreSQL's own form names no driver; ours is psycopg
        url = f"postgresql+psycopg://{url.removeprefix('postgresql://')}"
    return RDBStorage(url)


def _without_password(url: str) -> str:
    return re.sub(r"(//[^:/@]*):[^@]*@", r"\1:***@", url)

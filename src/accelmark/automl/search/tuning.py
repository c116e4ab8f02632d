"""Hyperparameters of trials: configured, or searched by Optuna's TPE in a study that runs can share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import optuna
from optuna import distributions
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from accelmark.automl.config import AutomlConfig
from accelmark.automl.model.graph import Network
from accelmark.automl.records import Hyperparameters
from accelmark.spec.errors import RequestError, raising

STUDY_FILE: Final = "study.journal"
_EXPERIMENT: Final = "experiment"
_RUN: Final = "run"


def within_limits(config: AutomlConfig, network: Network, proposed: Hyperparameters) -> tuple[Hyperparameters, Network]:
    """Return the proposal and its network; a kernel above a limit becomes the next smaller one, or the network's."""
    for kernel in sorted({one for one in config.tuning.kernel if one <= (proposed.kernel or 0)}, reverse=True):
        taken = proposed.model_copy(update={"kernel": kernel})
        executed = taken.applied_to(network)
        if config.search.allow(executed):
            return taken, executed
    taken = proposed.model_copy(update={"kernel": None})
    return taken, taken.applied_to(network)


class Tuner:
    """Asks a study for hyperparameters and reports the values of the trials that used them.

    ``run`` names the run, and the study without ``tuning.study``. A study of another ``experiment`` is refused.
    """

    def __init__(self, config: AutomlConfig, *, run: str, experiment: str, directory: Path, seed: int) -> None:
        tuning = config.tuning
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._defaults: Final = Hyperparameters.of(config.training)
        self._run: Final = run
        self._open: dict[int, Trial] = {}
        lists = {"kernel": tuning.kernel, "batch_size": tuning.batch_size}
        ranges = {"learning_rate": tuning.learning_rate, "dropout": tuning.dropout}
        self._space: Final[dict[str, distributions.BaseDistribution]] = {
            **{name: distributions.CategoricalDistribution(each) for name, each in lists.items() if each},
            **{
                key: distributions.FloatDistribution(*each, log=key == "learning_rate")
                for key, each in ranges.items()
                if each
            },
        }
        # Without the password.
        where = re.sub(r"(//[^:/@]*):[^@]*@", r"\1:***@", tuning.storage) if tuning.storage else directory
        with raising(RequestError, f"the study's storage {where} cannot be opened", Exception):
            self._storage: Final = _storage(tuning.storage, directory)
            self._study = optuna.create_study(
                storage=self._storage,
                study_name=f"accelmark-{tuning.study or run}",
                direction="maximize",
                load_if_exists=True,
                sampler=optuna.samplers.TPESampler(seed=seed, n_startup_trials=5, constant_liar=True),
            )
        try:
            self._check_study(experiment)
        except RequestError:
            self.close()
            raise

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials of the study."""
        return self._study.get_trials(deepcopy=False)

    def ask(self, trial: int) -> Hyperparameters:
        """Return TPE's proposal for a trial; parameters that are not searched keep their configured values."""
        # Another run may have used another space since this one opened the study.
        what = f"another run searches another space in study {self._study.study_name!r}"
        with raising(RequestError, what, ValueError):
            asked = self._study.ask(self._space)
        asked.set_user_attr(_RUN, self._run)
        self._open[trial] = asked
        return self._defaults.model_copy(update=dict(asked.params))

    def tell(
        self, trial: int, value: float | None, *, diverged: bool = False, taken: Hyperparameters | None = None
    ) -> None:
        """Report a trial's value, and what was executed where it differs from the proposal; untuned trials are ignored.

        A diverged trial is reported as pruned: TPE ranks it below all that have a value. TPE ignores other failures.
        """
        if (asked := self._open.pop(trial, None)) is None:
            return
        state = TrialState.COMPLETE if value is not None else TrialState.PRUNED if diverged else TrialState.FAIL
        params = asked.params if taken is None else {name: getattr(taken, name) for name in asked.params}
        if params == asked.params:
            self._study.tell(asked, value, state=state)
            return
        self._study.tell(asked, state=TrialState.FAIL)
        if None not in params.values() and state != TrialState.FAIL:
            facts: dict[str, Any] = {"distributions": asked.distributions, "user_attrs": {_RUN: self._run}}
            self._study.add_trial(create_trial(state=state, value=value, params=params, **facts))

    def abandon_running(self) -> int:
        """Mark trials that this run left open when it was killed as failed; return how many."""
        running = (trial for trial in self.trials if trial.state == TrialState.RUNNING)
        left = [trial for trial in running if trial.user_attrs.get(_RUN) == self._run]
        for trial in left:
            self._study.tell(trial.number, state=TrialState.FAIL)
        return len(left)

    def close(self) -> None:
        """Close connections to a database."""
        if isinstance(self._storage, RDBStorage):
            self._storage.remove_session()
            self._storage.engine.dispose()

    def _check_study(self, experiment: str) -> None:
        """Raise RequestError where the study is of another experiment or searches another space."""
        study = f"study {self._study.study_name!r}"
        owner = self._study.user_attrs.get(_EXPERIMENT)
        if owner is None:
            self._study.set_user_attr(_EXPERIMENT, experiment)
        elif owner != experiment:
            another = f"is of another experiment ({owner}; this is {experiment})"
            raise RequestError(f"{study} {another}: choose another tuning.study")
        for trial in self.trials:
            names, space = set(trial.distributions), set(self._space)
            # A run may have been killed before it had suggested all values of a trial that did not end.
            is_whole = trial.state in (TrialState.COMPLETE, TrialState.PRUNED)
            if names and (names != space if is_whole else names - space):
                searched = f"searched {sorted(trial.distributions)}, this run searches {sorted(self._space)}"
                raise RequestError(f"{study} {searched}: it is of another experiment")
            for key, distribution in trial.distributions.items():
                searched = f"searched {key} in {distribution}, tuning.{key} is {self._space[key]}"
                with raising(RequestError, f"{study} {searched}: choose another tuning.study", ValueError):
                    distributions.check_distribution_compatibility(distribution, self._space[key])


def _storage(url: str | None, directory: Path) -> BaseStorage:
    if url is None:
        # The caller has locked the run, so a lock file here is from a killed process; Optuna would wait 30 s for it.
        (directory / f"{STUDY_FILE}.lock").unlink(missing_ok=True)
        return JournalStorage(JournalFileBackend(str(directory / STUDY_FILE)))
    if url.startswith("postgresql://"):  # PostgreSQL's own form of URL names no driver; psycopg is installed
        url = f"postgresql+psycopg://{url.removeprefix('postgresql://')}"
    return RDBStorage(url)

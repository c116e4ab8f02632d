"""AIPerf's config.yml, read as it stands: its command is data that we take flags from, and is never run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from accelmark.automl.config.model import AutomlConfig, duration_s
from accelmark.spec.errors import Problem, SpecError, nearest
from accelmark.spec.model import parse

_KNOWN: Final = {
    "trialConcurrency",
    "maxExecDuration",
    "maxTrialNum",
    "experimentName",
    "tuner",
    "tuner.builtinTunerName",
    "tuner.classArgs",
    "tuner.classArgs.optimize_mode",
    "tuner.classArgs.task",
    "tuner.classArgs.input_width",
    "tuner.classArgs.input_channel",
    "tuner.classArgs.n_output_node",
    "trial",
    "trial.command",
}
_WITHOUT_EFFECT: Final = {
    "authorName",
    "trainingServicePlatform",
    "useAnnotation",
    "trial.codeDir",
    "trial.gpuNum",
}
_TUNERS: Final = {"NetworkMorphism": "bayesian", "Random": "random", "Evolution": "evolution"}
_OTHER_TUNERS: Final = ("TPE", "Anneal", "BatchTuner", "SMAC")
_FLAGS: Final = {
    "slave", "ip", "batch_size", "epoch", "epochs", "initial_lr", "final_lr", "train_data_dir", "val_data_dir",
    "warmup_1", "warmup_2", "warmup_3", "num_parallel_calls",
}  # fmt: skip
_FLAGS_WITHOUT_EFFECT: Final = {"ip", "num_parallel_calls"}
_ESCAPED_NEWLINE: Final = re.compile(r"\\\s+")
_REMARK: Final = re.compile(r"(^[ \t]*|[ \t]+)\\?#.*$", re.MULTILINE)


def is_aiperf(text: str) -> bool:
    """Tell whether a configuration is AIPerf's: it has ``trialConcurrency`` at its left edge."""
    return re.search(r"^trialConcurrency\s*:", text, re.MULTILINE) is not None


def read_aiperf(text: str, where: str) -> tuple[AutomlConfig, tuple[str, ...]]:
    """Return the configuration that AIPerf's text means, and what of it had no effect, each with the reason.

    Raises SpecError with every problem.
    """
    try:
        # AIPerf's manual writes remarks behind the lines of a folded command, which YAML would end there.
        loaded = yaml.safe_load(_REMARK.sub("", text))
    except yaml.YAMLError as error:
        raise SpecError([Problem(where, "", f"is not valid YAML: {error}")]) from error
    if not isinstance(loaded, dict):
        raise SpecError([Problem(where, "", "must be a mapping")])
    return _Reader(loaded, where).read()


class _Reader:
    """Reads one file, gathering problems and remarks on the way."""

    def __init__(self, loaded: Mapping[str, Any], where: str) -> None:
        self.where = where
        self.problems: list[Problem] = []
        self.unused: list[str] = []
        self.values = self._flattened(loaded, "")
        self.flags, self.environment = self._command()

    def _flattened(self, loaded: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for key, value in loaded.items():
            path = f"{prefix}{key}"
            if path in _WITHOUT_EFFECT:
                self.unused.append(f"{path}: has no effect here")
            elif path not in _KNOWN:
                self.unused.append(f"{path}: unknown key ({nearest(path, _KNOWN | _WITHOUT_EFFECT)})")
            elif isinstance(value, dict):
                flat |= self._flattened(value, f"{path}.")
            else:
                flat[path] = value
        return flat

    def _command(self) -> tuple[dict[str, str], dict[str, str]]:
        text = self.values.get("trial.command")
        if not isinstance(text, str):
            self.problems.append(Problem(self.where, "trial.command", "is missing"))
            return {}, {}
        try:
            words = shlex.split(_ESCAPED_NEWLINE.sub(" ", text))
        except ValueError as error:
            self.problems.append(Problem(self.where, "trial.command", f"cannot be read: {error}"))
            return {}, {}
        environment = dict(word.split("=", 1) for word in words if re.match(r"^[A-Za-z_]\w*=", word))
        script = next((index for index, word in enumerate(words) if word.endswith(".py")), -1)
        flags: dict[str, str] = {}
        rest = words[script + 1 :]
        while rest:
            word = rest.pop(0)
            name, given, value = word.removeprefix("--").partition("=")
            if not word.startswith("--") or name not in _FLAGS:
                if word not in environment and "=" not in word:
                    self.unused.append(f"trial.command: {word!r} is no known flag ({nearest(name, _FLAGS)})")
                if rest and not given and not rest[0].startswith("--"):
                    rest.pop(0)
                continue
            if not given:
                if not rest or rest[0].startswith("--"):
                    self.problems.append(Problem(self.where, "trial.command", f"--{name} has no value"))
                    continue
                value = rest.pop(0)
            if name in _FLAGS_WITHOUT_EFFECT:
                self.unused.append(f"trial.command: --{name} has no effect here")
            flags[name] = value
        return flags, environment

    def _number(self, place: str, value: Any, kind: type[int] | type[float]) -> Any:
        try:
            return kind(value)
        except (TypeError, ValueError):
            self.problems.append(Problem(self.where, place, f"must be a number, found {value!r}"))
            return None

    def _flag(self, name: str, kind: type[int] | type[float], default: float) -> Any:
        value = self.flags.get(name)
        return default if value is None else self._number(f"trial.command --{name}", value, kind)

    def _value(self, key: str, default: int) -> Any:
        value = self.values.get(key)
        return default if value is None else self._number(key, value, int)

    def read(self) -> tuple[AutomlConfig, tuple[str, ...]]:
        concurrency = self._value("trialConcurrency", 1)
        if "slave" in self.flags and self._flag("slave", int, 1) != concurrency:
            self.problems.append(
                Problem(self.where, "trial.command --slave", f"must be trialConcurrency, {concurrency}")
            )
        values = {
            "name": str(self.values.get("experimentName", "aiperf")),
            "network": self._network(),
            "dataset": self._dataset(),
            "search": {"method": self._method(), "morphs": ("deepen", "widen", "add-skip")},
            "schedule": self._schedule(concurrency),
            "training": {
                "batch_size": self._flag("batch_size", int, 448),
                "learning_rate": self._flag("initial_lr", float, 0.1),
                "final_learning_rate": self._flag("final_lr", float, 0.0),
                "devices_per_trial": max(
                    1, len([card for card in self.environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if card])
                ),
            },
            "counting": "aiperf-v1",
            "rules": "aiperf-v1",
        }
        if self.problems:
            raise SpecError(self.problems)
        return parse(AutomlConfig, values, self.where), tuple(self.unused)

    def _schedule(self, concurrency: Any) -> dict[str, Any]:
        epochs = self._flag("epochs", int, self._flag("epoch", int, 60))
        warm = [self._flag(f"warmup_{number}", int, 15 * number) for number in (1, 2, 3)]
        duration: Any = None
        try:
            duration = duration_s(self.values.get("maxExecDuration", "12h"))
        except ValueError as error:
            self.problems.append(Problem(self.where, "maxExecDuration", str(error)))
        if isinstance(duration, int | float) and not isinstance(self.values.get("maxExecDuration"), str | None):
            duration = duration * 3600  # AIPerf's bare numbers are hours
        return {
            "concurrency": concurrency,
            "max_trials": self._value("maxTrialNum", 30000),
            "max_duration": duration,
            "round_epochs": (*warm, epochs),
        }

    def _method(self) -> str:
        name = str(self.values.get("tuner.builtinTunerName", "NetworkMorphism"))
        key = "tuner.builtinTunerName"
        if name in _OTHER_TUNERS:
            what = f"{name} cannot search networks; TPE tunes hyperparameters of every search here anyway"
            self.problems.append(Problem(self.where, key, what, f"known: {', '.join(_TUNERS)}"))
        elif name not in _TUNERS:
            self.problems.append(Problem(self.where, key, f"no tuner is called {name!r}", nearest(name, _TUNERS)))
        for place, wanted in (("optimize_mode", "maximize"), ("task", "cv")):
            found = self.values.get(f"tuner.classArgs.{place}", wanted)
            if found != wanted:
                path = f"tuner.classArgs.{place}"
                self.problems.append(Problem(self.where, path, f"must be {wanted}, found {found!r}"))
        return _TUNERS.get(name, "bayesian")

    def _network(self) -> str:
        width = self._value("tuner.classArgs.input_width", 224)
        channels = self._value("tuner.classArgs.input_channel", 3)
        classes = self._value("tuner.classArgs.n_output_node", 1000)
        known = {(224, 3, 1000): "resnet50", (28, 1, 10): "small28", (32, 3, 10): "small32"}
        if (width, channels, classes) not in known:
            shapes = ", ".join(f"{w} x {w} x {c} -> {n}" for w, c, n in known)
            what = f"no seed network takes {width} x {width} x {channels} -> {classes}; known: {shapes}"
            self.problems.append(Problem(self.where, "tuner.classArgs", what))
        return known.get((width, channels, classes), "resnet50")

    def _dataset(self) -> dict[str, Any]:
        name = {"small28": "fashion-mnist", "small32": "cifar-10"}.get(self._network_quietly(), "imagenet")
        train, held_out = self.flags.get("train_data_dir"), self.flags.get("val_data_dir")
        if name != "imagenet":
            return {"name": name, "directory": Path(train) if train else None}
        for flag, value in (("train_data_dir", train), ("val_data_dir", held_out)):
            if value is None:
                self.problems.append(Problem(self.where, f"trial.command --{flag}", "is missing"))
        return {"name": name, "train_directory": train, "held_out_directory": held_out}

    def _network_quietly(self) -> str:
        kept = list(self.problems)
        name = self._network()
        self.problems = kept
        return name

"""AIPerf's config.yml, read as it stands: its command is data that we take flags from, and is never run."""

from __future__ import annotations

import math
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
_MAPPINGS: Final = ("tuner", "tuner.classArgs", "trial")
_NAME: Final = "aiperf"
_NAME_LENGTH: Final = 80
_KERNELS: Final = (3, 5, 7)
_BATCH_SHARES: Final = (12, 13, 14)
"""AIPerf searches the batch between 12 and 14 times a card's memory in GiB; its own 448 is 14 times 32."""
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
            elif path in _MAPPINGS and value is not None:
                self.problems.append(Problem(self.where, path, f"must be a mapping of keys, found {value!r}"))
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

    def _whole(self, place: str, value: Any) -> int | None:
        """Return a count of at least 1; None, the problem noted, for anything else: nothing is rounded."""
        try:
            number = None if isinstance(value, bool | float) else int(value)
        except (TypeError, ValueError):
            number = None
        if number is None or number < 1:
            self.problems.append(Problem(self.where, place, f"must be a whole number of at least 1, found {value!r}"))
            return None
        return number

    def _count(self, flag: str, default: int) -> int | None:
        value = self.flags.get(flag)
        return default if value is None else self._whole(f"trial.command --{flag}", value)

    def _rate(self, flag: str, default: float, *, above_zero: bool) -> float | None:
        value = self.flags.get(flag)
        if value is None:
            return default
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if math.isfinite(number) and (number > 0 or (number == 0 and not above_zero)):
            return number
        what = f"must be a number {'above' if above_zero else 'of at least'} 0, found {value!r}"
        self.problems.append(Problem(self.where, f"trial.command --{flag}", what))
        return None

    def _value(self, key: str, default: int) -> int | None:
        value = self.values.get(key)
        return default if value is None else self._whole(key, value)

    def read(self) -> tuple[AutomlConfig, tuple[str, ...]]:
        concurrency = self._value("trialConcurrency", 1)
        slaves = self._count("slave", 1)
        if "slave" in self.flags and None not in (slaves, concurrency) and slaves != concurrency:
            self.problems.append(
                Problem(self.where, "trial.command --slave", f"must be trialConcurrency, {concurrency}")
            )
        devices = max(1, len([card for card in self.environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if card]))
        batch = self._count("batch_size", 448)
        if batch is not None and batch % devices:
            what = f"must be a multiple of the {devices} cards in CUDA_VISIBLE_DEVICES, found {batch}"
            self.problems.append(Problem(self.where, "trial.command --batch_size", what))
        values = {
            "name": self._name(),
            "network": self._network(),
            "dataset": self._dataset(),
            "search": {"method": self._method(), "morphs": ("deepen", "widen", "add-skip")},
            "schedule": self._schedule(concurrency),
            "tuning": {"kernel": _KERNELS, "batch_size": _searched_batches(batch or 1, devices)},
            "training": {
                "batch_size": batch,
                "learning_rate": self._rate("initial_lr", 0.1, above_zero=True),
                "final_learning_rate": self._rate("final_lr", 0.0, above_zero=False),
                "devices_per_trial": devices,
            },
            "counting": "aiperf-v1",
            "rules": "aiperf-v1",
        }
        if self.problems:
            raise SpecError(self.problems)
        return parse(AutomlConfig, values, self.where), tuple(self.unused)

    def _name(self) -> str:
        """Return the experiment's name as a folder can bear it."""
        given = self.values.get("experimentName")
        if given is None:
            return _NAME
        words = re.findall(r"[A-Za-z0-9._-]+", str(given))
        name = "-".join(words).lstrip("._-")[:_NAME_LENGTH] or _NAME
        if name != str(given):
            self.unused.append(f"experimentName: the run is called {name!r}, which a folder can bear")
        return name

    def _schedule(self, concurrency: int | None) -> dict[str, Any]:
        epochs = self._count("epochs" if "epochs" in self.flags else "epoch", 60)
        warm = [self._count(f"warmup_{number}", 15 * number) for number in (1, 2, 3)]
        return {
            "concurrency": concurrency,
            "max_trials": self._value("maxTrialNum", 30000),
            "max_duration": self._duration(),
            "round_epochs": (*warm, epochs),
        }

    def _duration(self) -> float | None:
        given = self.values.get("maxExecDuration")
        try:
            seconds = duration_s("12h" if given is None else given)
        except ValueError as error:
            self.problems.append(Problem(self.where, "maxExecDuration", str(error)))
            return None
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            what = f"must be a time above 0, such as 12h, found {given!r}"
            self.problems.append(Problem(self.where, "maxExecDuration", what))
            return None
        return float(seconds) if isinstance(given, str | None) else seconds * 3600.0  # AIPerf's bare numbers are hours

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
        known: dict[Any, str] = {(224, 3, 1000): "resnet50", (28, 1, 10): "small28", (32, 3, 10): "small32"}
        if (width, channels, classes) not in known and None not in (width, channels, classes):
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


def _searched_batches(batch: int, devices: int) -> tuple[int, ...]:
    """Return the batches that AIPerf searches where ``batch`` is its largest, as the devices can share them evenly."""
    shares = (batch * share // _BATCH_SHARES[-1] // devices * devices for share in _BATCH_SHARES)
    return tuple(sorted({share for share in shares if share > 0})) or (batch,)

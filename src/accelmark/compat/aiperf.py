"""Read AIPerf's ``config.yml``: flags are parsed from its command, which is never executed."""

from __future__ import annotations

import math
import re
import shlex
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from accelmark.automl.config import AutomlConfig, LocalCluster, SshCluster
from accelmark.automl.controller import load_config
from accelmark.spec.errors import Problem, SpecError, nearest
from accelmark.spec.layers import flatten
from accelmark.spec.model import load_yaml, parse, read_text, read_value
from accelmark.spec.number_format import duration_s
from accelmark.spec.plugins.launcher import read_cluster

_MAPPINGS: Final = ("tuner", "tuner.classArgs", "trial")
_KNOWN: Final = {
    "trialConcurrency", "maxExecDuration", "maxTrialNum", "experimentName", "tuner.builtinTunerName", "trial.command",
    *(f"tuner.classArgs.{name}" for name in ("optimize_mode", "task", "input_width", "input_channel", "n_output_node")),
    *_MAPPINGS,
}  # fmt: skip
_WITHOUT_EFFECT: Final = {"authorName", "trainingServicePlatform", "useAnnotation", "trial.codeDir", "trial.gpuNum"}
_TUNERS: Final = {
    "NetworkMorphism": "bayesian", "Random": "random", "Evolution": "evolution", "TPE": "tpe", "Anneal": "anneal",
    "SMAC": "smac", "BatchTuner": "batch",
}  # fmt: skip
_FLAGS: Final = (
    "slave", "batch_size", "epoch", "epochs", "initial_lr", "final_lr", "train_data_dir", "val_data_dir",
    "warmup_1", "warmup_2", "warmup_3",
)  # fmt: skip
_SEEDS: Final = {
    (224, 3, 1000): ("resnet50", "imagenet"), (28, 1, 10): ("small28", "fashion-mnist"),
    (32, 3, 10): ("small32", "cifar-10"),
}  # fmt: skip
"""(width, channels, classes) -> seed network of the search, data set. Other colour images are in folders of classes."""

_DEVICES: Final = "CUDA_VISIBLE_DEVICES"
"""AIPerf's variable of device indices."""

_COMMENT: Final = re.compile(r"(^[ \t]*|[ \t]+)\\?#.*$", re.MULTILINE)
_TOP_LEVEL_KEY: Final = re.compile(r"^trialConcurrency\s*:", re.MULTILINE)
"""In every configuration of AIPerf's, and in none of ours."""


def load_search(path: Path, cluster: Path | None = None, num_devices: int = 1) -> tuple[AutomlConfig, tuple[str, ...]]:
    """Return a search's configuration, AIPerf's or ours, and the ignored parts of AIPerf's files, with the reasons.

    ``cluster`` is a cluster file or AIPerf's ``servers.json``; ``num_devices`` are those of this machine, which an
    AIPerf file without device indices uses. Raises SpecError with all problems.
    """
    servers, unused = _read_servers(cluster) if cluster is not None else (None, [])
    text = read_text(path)
    if _TOP_LEVEL_KEY.search(text) is None:
        config = load_config(path)
        return config if servers is None else config.model_copy(update={"cluster": servers}), tuple(unused)
    # AIPerf's manual has comments after the lines of a folded command, where YAML would end it.
    reader = _Reader(load_yaml(_COMMENT.sub("", text), path), str(path), servers, num_devices)
    values = reader.search()
    if reader.problems:
        raise SpecError(reader.problems)
    return parse(AutomlConfig, values, str(path)), (*reader.unused, *unused)


def _read_servers(path: Path) -> tuple[SshCluster, list[str]]:
    """Return the hosts of a cluster file or of AIPerf's ``servers.json``, and what of it has no effect."""
    loaded = read_value(read_text(path), str(path))  # JSON, too
    if not isinstance(loaded, list):
        hosts = [f"{host.user}@{host.address}" if host.user else host.address for host in read_cluster(path).hosts]
        known = {name: loaded[name] for name in ("python", "ssh_config", "work_directory") if name in loaded}
        keys = dict.fromkeys([*loaded, *(key for host in loaded.get("hosts", ()) for key in host)])
        left = [key for key in keys if key not in {"launcher", "hosts", "address", "user", "label", *known}]
        why = "has no effect on a search; OpenSSH's configuration can have it"
        cluster = SshCluster.model_validate({"kind": "ssh", "hosts": hosts, **known})
        return cluster, [f"{path.name}: {key}: {why}" for key in left]
    hosts = []
    unused: list[str] = []
    cards: dict[str, dict[str, str]] = {}
    for number, server in enumerate(loaded):
        if not isinstance(server, dict) or not isinstance(server.get("ip"), str):
            raise SpecError([Problem(str(path), f"[{number}]", "must be a mapping with an ip")])
        hosts.append(server["ip"])
        if server.get(_DEVICES):
            cards[server["ip"]] = {_DEVICES: str(server[_DEVICES])}
        unused += [f"{path.name}: {name}: has no effect here" for name in server if name not in ("ip", _DEVICES)]
    script = path.absolute().parent / "server_env_init.sh"
    values = {"kind": "ssh", "hosts": hosts, "environment": cards, "init_script": script if script.is_file() else None}
    return parse(SshCluster, values, str(path)), list(dict.fromkeys(unused))


def _num_indices(listed: str) -> int:
    return len([index for index in listed.split(",") if index.strip()])


def _count(value: Any) -> int:
    if not str(value).isdecimal() or int(value) < 1:
        raise ValueError(f"must be a whole number of at least 1, found {value!r}")
    return int(value)


def _rate(text: str, *, zero: bool = True) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number) or number < 0 or (number == 0 and not zero):
        raise ValueError(f"must be a number {'of at least' if zero else 'above'} 0, found {text!r}")
    return number


def _hours(value: Any) -> float:
    """Return a duration in seconds; a number without a unit is in hours."""
    seconds = duration_s(value)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ValueError(f"must be a time above 0, such as 12h, found {value!r}")
    return float(seconds) if isinstance(value, str) else seconds * 3600.0


class _Reader:
    """Reads one file and collects problems and remarks."""

    def __init__(self, loaded: Mapping[str, Any], where: str, servers: SshCluster | None, num_devices: int) -> None:
        self.where = where
        self.servers = servers
        self.num_devices = num_devices
        self.problems: list[Problem] = []
        self.unused: list[str] = []
        self.values: dict[str, Any] = {}
        for path, value in flatten(loaded).items():
            if path in _WITHOUT_EFFECT:
                self.unused.append(f"{path}: has no effect here")
            elif path in _MAPPINGS and value is not None:
                self._problem(path, f"must be a mapping of keys, found {value!r}")
            elif path in _KNOWN:
                self.values[path] = value
            else:
                self.unused.append(f"{path}: unknown key ({nearest(path, _KNOWN | _WITHOUT_EFFECT)})")
        self.flags, self.environment = self._command()

    def _problem(self, key: str, what: str, hint: str = "") -> None:
        self.problems.append(Problem(self.where, f"trial.command {key}" if key.startswith("--") else key, what, hint))

    def _command(self) -> tuple[dict[str, str], dict[str, str]]:
        """Return the flags and the environment variables of the trial's command."""
        text = self.values.get("trial.command")
        if not isinstance(text, str):
            self._problem("trial.command", "is missing")
            return {}, {}
        try:
            words = shlex.split(re.sub(r"\\\s+", " ", text))
        except ValueError as error:
            self._problem("trial.command", f"cannot be read: {error}")
            return {}, {}
        environment = dict(word.split("=", 1) for word in words if re.match(r"^[A-Za-z_]\w*=", word))
        script = next((index for index, word in enumerate(words) if word.endswith(".py")), -1)
        assigned = {f"{name}={value}" for name, value in environment.items()}
        if program := [word for word in words[: script + 1] if word not in assigned]:
            self.unused.append(f"trial.command: {shlex.join(program)!r} is not run; a trial is AccelMark's own")
        for name in environment.keys() - {_DEVICES}:
            self.unused.append(f"trial.command: {name} is not set; give the search's process this variable")
        parser = ArgumentParser(add_help=False, allow_abbrev=False)
        for name in _FLAGS:
            parser.add_argument(f"--{name}", nargs="?", default=SUPPRESS)
        known, unknown = parser.parse_known_args(words[script + 1 :])
        if unknown:
            what = f"{' '.join(unknown)!r} has no effect here; known flags: --{', --'.join(_FLAGS)}"
            self.unused.append(f"trial.command: {what}")
        for name in (name for name, value in vars(known).items() if value is None):
            self._problem("trial.command", f"--{name} has no value")
        return {name: value for name, value in vars(known).items() if value is not None}, environment

    def _get(self, key: str, default: Any, convert: Callable[[Any], Any]) -> Any:
        """Return a key or ``--flag`` as converted; None after recording a problem."""
        value = self.flags.get(key[2:]) if key.startswith("--") else self.values.get(key)
        try:
            return default if value is None else convert(value)
        except ValueError as error:
            self._problem(key, str(error))
            return None

    def search(self) -> dict[str, Any]:
        """Return the configuration's values; valid only if no problem was found."""
        concurrency, slaves = self._get("trialConcurrency", 1, _count), self._get("--slave", 1, _count)
        if "slave" in self.flags and None not in (slaves, concurrency) and slaves != concurrency:
            self._problem("--slave", f"must be trialConcurrency, {concurrency}")
        devices, cluster = self._cluster(concurrency or 1)
        batch = self._get("--batch_size", 448, _count)
        if batch is not None and batch % devices:
            what = f"must be a multiple of the {devices} cards in {_DEVICES}, found {batch}"
            self._problem("--batch_size", what)
        # AIPerf searches from 12 to 14 times a card's memory in GiB (its default of 448 is 14 times 32).
        shares = {(batch or 1) * share // 14 // devices * devices for share in (12, 13, 14)}
        network, dataset = self._network()
        train, held_out = self.flags.get("train_data_dir"), self.flags.get("val_data_dir")
        directories = {"directory": train or None}
        if dataset == "imagenet":
            directories = {"train_directory": train, "held_out_directory": held_out}
            for flag, value in (("--train_data_dir", train), ("--val_data_dir", held_out)):
                if value is None:
                    self._problem(flag, "is missing")
        warmups = (self._get(f"--warmup_{number}", 15 * number, _count) for number in (1, 2, 3))
        return {
            "name": self._name(),
            "network": network,
            "dataset": {"name": dataset, **directories},
            "search": {"method": self._method(), "morphs": ("deepen", "widen", "add-skip")},
            "schedule": {
                "concurrency": concurrency,
                "max_trials": self._get("maxTrialNum", 30000, _count),
                "max_duration": self._get("maxExecDuration", 12 * 3600.0, _hours),
                "round_epochs": (*warmups, self._get("--epochs" if "epochs" in self.flags else "--epoch", 60, _count)),
            },
            "tuning": {"kernel": (3, 5, 7), "batch_size": sorted(shares - {0}) or (batch,)},
            "training": {
                "batch_size": batch,
                "learning_rate": self._get("--initial_lr", 0.1, partial(_rate, zero=False)),
                "final_learning_rate": self._get("--final_lr", 0.0, _rate),
                "devices_per_trial": devices,
            },
            "cluster": cluster,
            "counting": "aiperf-v1",
            "rules": "aiperf-v1",
        }

    def _cluster(self, concurrency: int) -> tuple[int, LocalCluster | SshCluster]:
        """Return the devices of a trial and the cluster, from the servers, else from the command."""
        indices = self.environment.get(_DEVICES, "")
        servers = self.servers
        if servers is None:
            if not indices:
                self.unused.append(f"{_DEVICES} is not set: all devices of this machine, {self.num_devices}")
            given = {_DEVICES: indices} if indices else {}
            return _num_indices(indices) or self.num_devices, LocalCluster(environment=given)
        if len(servers.hosts) != concurrency:
            self._problem("trialConcurrency", f"must be the number of servers, {len(servers.hosts)}")
        own = {host: given[_DEVICES] for host, given in servers.environment.items() if _DEVICES in given}
        if own and indices and set(own.values()) != {indices}:
            self.unused.append(f"trial.command: {_DEVICES}={indices}: the servers' own indices count")
        if not own and indices:
            servers = servers.model_copy(update={"environment": {host: {_DEVICES: indices} for host in servers.hosts}})
        numbers = {_num_indices(listed) for listed in (own.values() or [indices])}
        if len(numbers) > 1 or (own and len(own) < len(servers.hosts)):
            self._problem(_DEVICES, f"the servers have different numbers of cards: {own}")
        return max(numbers) or self.num_devices, servers

    def _name(self) -> str:
        """Return the experiment's name, reduced to characters that are valid in a directory name."""
        given = str(self.values.get("experimentName", "aiperf"))
        name = "-".join(re.findall(r"[A-Za-z0-9._-]+", given)).lstrip("._-")[:80] or "aiperf"
        if name != given:
            self.unused.append(f"experimentName: the run is called {name!r}, a valid directory name")
        return name

    def _method(self) -> str:
        key = "tuner.builtinTunerName"
        name = str(self.values.get(key, "NetworkMorphism"))
        if name not in _TUNERS:
            self._problem(key, f"there is no tuner {name!r}", nearest(name, _TUNERS))
        for argument, wanted in (("optimize_mode", "maximize"), ("task", "cv")):
            key = f"tuner.classArgs.{argument}"
            if (given := self.values.get(key, wanted)) != wanted:
                self._problem(key, f"must be {wanted}, found {given!r}")
        return _TUNERS.get(name, "bayesian")

    def _network(self) -> tuple[str, str]:
        """Return the seed network and the data set for the shape and classes of the images."""
        sizes = {"input_width": 224, "input_channel": 3, "n_output_node": 1000}
        width, channels, classes = (self._get(f"tuner.classArgs.{name}", size, _count) for name, size in sizes.items())
        if None in (width, channels, classes):
            return "resnet50", "imagenet"
        if (width, channels, classes) in _SEEDS:
            return _SEEDS[width, channels, classes]
        if channels != 3:
            what = f"images are read with 3 channels, not {channels}; of grey ones, they are equal"
            self.unused.append(f"tuner.classArgs.input_channel: {what}")
        return f"{'resnet50' if width >= 64 else 'small'}-{width}-{classes}", "imagenet"

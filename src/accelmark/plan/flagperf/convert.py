"""FlagPerf's settings as a cluster file, a run file and settings of a case; what has no home is listed, not dropped."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, final

from accelmark.plan.flagperf.parse import Parsed, parse_file
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import Problem, SpecError
from accelmark.spec.model import parse

Values = dict[str, Any]
_CONFIG: Final = re.compile(r"config_(?P<hardware>[^/]+)x(?P<nnodes>\d+)x(?P<nproc>\d+)$")
_TRAIN_SETTINGS: Final = {
    "train_batch_size": "batch_size",
    "eval_batch_size": "eval_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "learning_rate": "optimizer.lr",
    "lr": "optimizer.lr",
    "weight_decay_rate": "optimizer.weight_decay",
    "weight_decay": "optimizer.weight_decay",
    "momentum": "optimizer.momentum",
    "opt_lamb_beta_1": "optimizer.beta1",
    "opt_lamb_beta_2": "optimizer.beta2",
    "seed": "seed",
    "max_steps": "end.max_steps",
    "max_epoch": "end.max_epochs",
    "max_epochs": "end.max_epochs",
    "max_samples_termination": "end.max_samples",
    "warmup_steps": "schedule.warmup_steps",
    "warmup_proportion": "schedule.warmup_ratio",
    "warmup": "schedule.warmup_ratio",
    "num_workers": "loader.num_workers",
    "dataloader_num_workers": "loader.num_workers",
    "max_grad_norm": "gradient_clip_norm",
    "eval_steps": "evaluate.every_steps",
    "log_freq": "log_every_steps",
}
_IGNORED: Final = {
    "FLAGPERF_PATH": "hosts need no clone: AccelMark brings itself along",
    "FLAGPERF_LOG_PATH": "runs go below runs/, or where --out says",
    "LOG_CALL_INFORMATION": "log lines of AccelMark always say where they come from",
    "vendor": "the folder that the file lies in names the vendor",
    "dist_backend": "vendor.yaml names the backend (distributed_backend)",
    "ddp_type": "settings.parallelism of the case says it",
}


@final
@dataclass(slots=True)
class Converted:
    """What FlagPerf's files come to."""

    cluster: Values = field(default_factory=dict)
    run: Values = field(default_factory=dict)
    configs: dict[str, Values] = field(default_factory=dict)
    """File name (``config_<HW>x<nnodes>x<nproc>.yaml``) -> settings."""
    left_over: list[Problem] = field(default_factory=list)
    """What could not be carried over, and why."""


def convert(paths: Iterable[Path]) -> Converted:
    """Convert FlagPerf's files, all into one cluster and one run.

    Raises:
        SpecError: a file cannot be read, or what it says is no valid cluster.
    """
    result = Converted()
    for path in paths:
        parsed = parse_file(path)
        result.left_over += [Problem(parsed.file, key, why) for key, why in parsed.skipped.items()]
        scale = _CONFIG.fullmatch(path.stem)
        if scale is not None:
            result.configs[f"{path.stem}.yaml"] = _settings(parsed, result.left_over)
        else:
            _take_all(parsed, result)
    if result.cluster:
        hosts = result.cluster.get("hosts")
        is_here = not hosts or [host["address"] for host in hosts] in (["127.0.0.1"], ["localhost"])
        result.cluster["launcher"] = "local" if is_here else "ssh"
        parse(ClusterSpec, result.cluster, "what the files say of the cluster")
    return result


def _take_all(parsed: Parsed, result: Converted) -> None:
    for key, value in parsed.values.items():
        taker = _TAKERS.get(key)
        if taker is None:
            why = _IGNORED.get(key, "AccelMark has no such setting")
            result.left_over.append(Problem(parsed.file, key, why))
            continue
        try:
            taker(result, value)
        except (ValueError, TypeError, AttributeError) as error:
            raise SpecError([Problem(parsed.file, key, f"{error}, found {value!r}")]) from error


def _settings(parsed: Parsed, left_over: list[Problem]) -> Values:
    settings: Values = {}
    for key, value in parsed.values.items():
        if key in ("fp16", "amp", "bf16"):
            if value is True:
                settings["precision"] = "bf16" if key == "bf16" else "fp16"
        elif key in _TRAIN_SETTINGS and isinstance(value, int | float) and not isinstance(value, bool):
            _put(settings, _TRAIN_SETTINGS[key], value)
        elif key in _TRAIN_SETTINGS:
            left_over.append(Problem(parsed.file, key, f"is no number: {value!r}"))
        else:
            why = _IGNORED.get(key, "AccelMark has no such setting; look whether the case's model settings mean it")
            left_over.append(Problem(parsed.file, key, why))
    return settings


def _put(settings: Values, dotted: str, value: Any) -> None:
    *path, name = dotted.split(".")
    for part in path:
        settings = settings.setdefault(part, {})
    settings[name] = value


def _hosts(result: Converted, value: Any) -> None:
    ports = [host.get("service_ports") for host in result.cluster.get("hosts", [])]
    hosts = [{"address": address} for address in _texts(value)]
    for host, service in zip(hosts, ports, strict=False):
        if service:
            host["service_ports"] = service
    result.cluster["hosts"] = hosts


def _hosts_ports(result: Converted, value: Any) -> None:
    ports = [int(port) for port in _texts(value)]
    hosts = result.cluster.get("hosts")
    if not hosts:
        raise ValueError("stands before or without HOSTS: name the file with HOSTS first")
    for index, host in enumerate(hosts):
        own = ports[index :: len(hosts)]
        if own:
            host["service_ports"] = own


def _container(result: Converted, **values: Any) -> None:
    container = result.cluster.setdefault("container", {"engine": "docker"})
    container.update(values)


def _container_options(result: Converted, value: Any) -> None:
    options: list[str] = []
    mounts: list[str] = []
    words = iter(shlex.split(str(value)))
    for word in words:
        if word == "--privileged":
            _container(result, privileged=True)
        elif word in ("-v", "--volume"):
            mounts.append(next(words, ""))
        elif word.startswith(("--volume=", "-v=")):
            mounts.append(word.partition("=")[2])
        elif word in ("--ipc=host", "--net=host", "--network=host", "--init", "--rm"):
            continue
        else:
            options.append(word)
    _container(result, **({"options": options} if options else {}), **({"mounts": mounts} if mounts else {}))


def _cases(result: Converted, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise TypeError("is not a table of keys and data directories")
    cases = [{"key": str(key), **({"data": str(data)} if data else {})} for key, data in value.items()]
    for case in cases:
        if case["key"].count(":") == 1:
            case["task"] = "infer"
    result.run.setdefault("cases", []).extend(cases)


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [part for part in re.split(r"[,\s]+", value) if part]
    if not isinstance(value, list | tuple):
        raise TypeError("is neither a list nor a text")
    return [str(item) for item in value]


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    raise TypeError("is neither True nor False")


def _to_cluster(name: str, kind: Callable[[Any], Any]) -> Callable[[Converted, Any], None]:
    def take(result: Converted, value: Any) -> None:
        result.cluster[name] = kind(value)

    return take


def _vendor(result: Converted, value: Any) -> None:
    result.cluster["vendor"] = str(value)


_TAKERS: Final[dict[str, Callable[[Converted, Any], None]]] = {
    "HOSTS": _hosts,
    "HOSTS_PORTS": _hosts_ports,
    "SSH_PORT": _to_cluster("ssh_port", int),
    "MASTER_PORT": _to_cluster("master_port", int),
    "VENDOR": _vendor,
    "CLEAR_CACHES": _to_cluster("clear_caches", _flag),
    "ACCE_VISIBLE_DEVICE_ENV_NAME": _to_cluster("visible_devices_env", str),
    "SHM_SIZE": lambda result, value: _container(result, shm_size=str(value)),
    "PIP_SOURCE": lambda result, value: _container(result, pip_source=str(value)),
    "ACCE_CONTAINER_OPT": _container_options,
    "FLAGPERF_LOG_LEVEL": lambda result, value: result.run.update(log_level=str(value).lower()),
    "CASES": _cases,
}

"""Convert FlagPerf's cluster_conf.py, test_conf.py and host.yaml to a cluster file and a run file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from accelmark.compat.flagperf.container import container_of
from accelmark.compat.flagperf.parse import IGNORED, Given, Parsed, Values, flag, text, texts, whole
from accelmark.spec.errors import Problem, SpecError
from accelmark.spec.key import CaseKey
from accelmark.spec.model import parse
from accelmark.spec.plugins.launcher import parse_cluster
from accelmark.spec.runfile import RunSpec

_PLAIN: Final[dict[str, tuple[str, Callable[[Any], Any]]]] = {
    "SSH_PORT": ("ssh_port", whole),
    "MASTER_PORT": ("master_port", whole),
    "VENDOR": ("vendor", text),
    "CLEAR_CACHES": ("clear_caches", flag),
    "ACCE_VISIBLE_DEVICE_ENV_NAME": ("visible_devices_env", text),
}
_KNOWN: Final = frozenset(_PLAIN) | {
    "HOSTS", "HOSTS_PORTS", "SHM_SIZE", "PIP_SOURCE", "ACCE_CONTAINER_OPT", "FLAGPERF_LOG_LEVEL", "CASES",
}  # fmt: skip


def take(parsed: Parsed, given: dict[str, Given], cases: list[Given], left_over: list[Problem]) -> None:
    """Add a file's settings to ``given``, replacing those of earlier files, and its cases to ``cases``."""
    for item in parsed.settings():
        before = given.get(item.key)
        if item.key not in _KNOWN:
            left_over.append(item.left(IGNORED.get(item.key, "AccelMark has no such setting")))
        elif not item.is_set:
            continue
        elif item.key == "CASES":
            cases.append(item)
        else:
            if before is not None and before.value != item.value:
                left_over.append(before.left(f"{item.file} has another value and is read later"))
            given[item.key] = item


def cluster_of(given: Mapping[str, Given], left_over: list[Problem]) -> Values:
    """Return the cluster file, empty without settings for it; raise SpecError if it is invalid."""
    cluster: Values = {}
    if "HOSTS" in given:
        cluster["hosts"] = [{"address": address} for address in given["HOSTS"].read(texts)]
    if "HOSTS_PORTS" in given:
        _deal_ports(given["HOSTS_PORTS"], cluster.get("hosts", []), left_over)
    for key, (name, kind) in _PLAIN.items():
        if key in given:
            cluster[name] = given[key].read(kind)
    container = container_of(given, left_over)
    if container:
        cluster["container"] = container
    if cluster:
        hosts = cluster.get("hosts")
        is_here = not hosts or [host["address"] for host in hosts] in (["127.0.0.1"], ["localhost"])
        cluster["launcher"] = "local" if is_here else "ssh"
        parse_cluster(cluster, "the cluster in these files")
    return cluster


def _deal_ports(item: Given, hosts: Sequence[Values], left_over: list[Problem]) -> None:
    """Assign ports to hosts: one port for all hosts, or one per host in their order."""
    ports = item.read(_ports)
    if not ports:
        return
    if len(ports) == 1:
        ports *= len(hosts)
    if not hosts:
        left_over.append(item.left("there is no HOSTS to give them to"))
    elif len(ports) != len(hosts):
        what = f"{len(ports)} ports for {len(hosts)} hosts are neither one for all nor one for each"
        left_over.append(item.left(f"{what}; set service_ports of the hosts by hand"))
    else:
        for host, port in zip(hosts, ports, strict=True):
            host["service_ports"] = [port]


def _ports(value: Any) -> list[int]:
    written = [str(value)] if isinstance(value, int) else texts(value)
    if not any(written):
        return []  # empty entries of the template
    ports = [whole(port) for port in written]
    if not all(1 <= port <= 65535 for port in ports):
        raise ValueError("contains something else than ports")
    return ports


def run_of(given: Mapping[str, Given], cases: Sequence[Given], left_over: list[Problem]) -> Values:
    """Return the run file, empty if the files name no case; raise SpecError if CASES is not a dictionary."""
    listed: dict[tuple[str, str], Values] = {}
    for item in cases:
        table = item.read(_table)
        for key, data in table.items():
            why = _take_case(key, data, listed)
            if why:
                left_over.append(item.left(f"{key}: {why}"))
        if not table:
            left_over.append(item.left("names no case"))
    level = given.get("FLAGPERF_LOG_LEVEL")
    if not listed:
        if level is not None:
            left_over.append(level.left("belongs into a run file, and none is written without a case"))
        return {}
    run: Values = {"cases": list(listed.values())}
    if level is not None:
        with_level = {"log_level": level.read(text).lower(), **run}
        try:
            parse(RunSpec, with_level, level.file)
        except SpecError as error:
            left_over += [level.left(problem.what) for problem in error.problems if problem.key == "log_level"]
        else:
            run = with_level
    parse(RunSpec, run, "the run of FlagPerf's files")
    return run


def _table(value: Any) -> dict[str, str | None]:
    if not isinstance(value, Mapping):
        raise TypeError("is not a table of keys and data directories")
    return {text(key): text(data) if data is not None else None for key, data in value.items()}


def _take_case(written: str, data: str | None, listed: dict[tuple[str, str], Values]) -> str:
    try:
        # An inference key names no chip; it is detected at run time.
        key = CaseKey.parse(written, hardware="any")
    except SpecError as error:
        return "; ".join(problem.what for problem in error.problems)
    case = {"key": written, **({"data": data} if data else {})}
    if written.count(":") == 1:
        case["task"] = "infer"
    before = listed.setdefault((case.get("task", "train"), key.slug), case)
    return "" if before == case else f"is given twice, also as {before['key']} with {before.get('data') or 'no data'}"

"""Convert the directory of a vendor in FlagPerf, ``training/<vendor>``, to a vendor's folder."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

from accelmark.compat.flagperf.convert import Conversion, Converted
from accelmark.compat.flagperf.coverage import equivalent
from accelmark.compat.flagperf.keys import converted_key
from accelmark.compat.flagperf.parse import TABLES
from accelmark.compat.flagperf.training import Config, case_of_folder
from accelmark.spec.cluster import ClusterSpec, HostSpec
from accelmark.spec.errors import Problem, SpecError
from accelmark.spec.model import read_text
from accelmark.spec.plugins.catalog import allowed_hooks, folders, hooks_file

_COPIED: Final = ("environment_variables.sh", "requirements.txt")
"""Files of ``config/`` that have the same meaning here."""
_MOST_HOSTS: Final = 64
"""Hosts of the largest configuration that is accepted: which ones it is for is not known here."""
_PORT: Final = "port"
"""Folder of files that a person has to port."""
_IMAGES: Final = "docker_image"


def is_tree(path: Path) -> bool:
    """Return whether a directory is that of a vendor in FlagPerf: it has ``<model>-<framework>/config/``."""
    return path.is_dir() and any(case_of_folder(folder) for folder in path.glob("*-*/config"))


def convert_tree(path: Path, vendor: str, *, is_open: bool = False) -> tuple[dict[str, str], Converted]:
    """Return the files of the folder of ``vendor``, and its configurations with what was not converted.

    A vendor that AccelMark does not ship also gets a ``vendor.yaml`` to complete. Raises SpecError if a file cannot be
    read or parsed.
    """
    result = Converted()
    vendor = TABLES["vendors"].get(vendor, vendor)
    hosts = tuple(HostSpec(address=f"host{number}") for number in range(_MOST_HOSTS))
    cluster = ClusterSpec(vendor=vendor if vendor in folders("vendors") else None, launcher="ssh", hosts=hosts)
    conversion = Conversion(result, cluster, is_open=is_open)
    texts: dict[str, str] = {}
    for folder in sorted(path.glob("*-*/")):
        if (case := case_of_folder(folder)) is None:
            result.left_over.append(Problem(str(folder), "", "FlagPerf has no model of that name"))
            continue
        key, _, notes = converted_key(":".join(case), "train", cluster)
        model, framework = key.split(":")
        if model not in folders("cases"):
            known = equivalent(case[0], "train")
            what = f"no case carries it: {known.note}" if known is not None else "AccelMark has no such case"
            result.left_over.append(Problem(str(folder), "", what))
            continue
        result.left_over += [Problem(str(folder), "", note) for note in notes if note]
        place = f"cases/{model}-{framework}"
        for file in sorted((folder / "config").glob("*.py")):
            if (config := Config.read(file)) is not None:
                result.left_over += config.unread(with_common=(folder / "config" / "config_common.py").is_file())
                if values := conversion.config_alone(config):
                    result.configs[f"{place}/config/{config.name}"] = values
        for name in _COPIED:
            texts |= _copied(folder / "config" / name, f"{place}/config/{name}", result)
        texts |= _copied(folder / "csrc", f"{place}/csrc", result)
        texts |= _copied(folder / "README.md", f"{place}/README.md", result)
        for name, text in _copied(folder / "extern", f"{place}/{_PORT}", result).items():
            texts[name] = text
            result.left_over.append(Problem(f"{folder.name}/extern", Path(name).name, _to_port(text, framework)))
    for folder in sorted((path / _IMAGES).glob("*/")):
        texts |= _copied(folder, f"images/{folder.name}", result)
    texts |= _copied(path / "README.md", "README.md", result)
    monitor = next(path.glob("*_monitor.py"), None)
    if monitor is not None:
        texts[monitor.name] = read_text(monitor)
    if cluster.vendor is None:
        texts["vendor.yaml"] = _vendor_yaml(vendor, monitor, result)
    elif monitor is not None:
        what = f"vendor {vendor} has telemetry of its own; this file is not read"
        result.left_over.append(Problem(str(monitor), "", what))
    return texts, result


def _vendor_yaml(name: str, monitor: Path | None, result: Converted) -> str:
    script = f"  script: {{file: {monitor.name}}}\n" if monitor is not None else ""
    what = "add its chips with peak rates and sources, the device type and collectives of each framework, and detection"
    result.left_over.append(Problem("vendor.yaml", "", what))
    return (
        f"name: {name}\ntitle: {name}\nframeworks:\n  pytorch: {{device_type: cpu, collective_backend: gloo}}\n"
        f"visible_devices_env: null\ntelemetry:\n  detect: {{always: true}}\n{script}chips: []\n"
    )


def _copied(source: Path, target: str, result: Converted) -> dict[str, str]:
    """Return the text files at or below ``source`` by their names below ``target``; list binary files."""
    texts: dict[str, str] = {}
    for file in [source] if source.is_file() else sorted(source.rglob("*")):
        if not file.is_file() or "__pycache__" in file.parts or file.name.startswith("."):
            continue
        name = target if file == source else f"{target}/{file.relative_to(source).as_posix()}"
        try:
            texts[name] = read_text(file)
        except SpecError as error:
            result.left_over += error.problems
    return texts


def _to_port(text: str, framework: str) -> str:
    """Return which hooks the functions of an ``extern`` file map to."""
    if hooks_file(framework) is None:
        return f"framework {framework} has no hooks to replace"
    try:
        names = [node.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)]
    except (SyntaxError, ValueError):
        return "is not valid Python 3"
    hooks = [name for name in names if name in allowed_hooks(framework)]
    if not hooks:
        return "has no function with the name of a hook; it is needed only where a hook uses it"
    methods = ", ".join(hooks)
    return f"port it by hand to methods of class Extern in extern/__init__.py: {methods}"

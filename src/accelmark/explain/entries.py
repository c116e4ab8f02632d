"""Find the explanation of a figure, setting, key of a file, audit rule, verdict, end reason or mark by its name."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, TypeAdapter

from accelmark.datasets.spec import DataEntry
from accelmark.explain.schemas import FILES, DocumentedField, as_yaml, documented_fields
from accelmark.results.figures import FigureName, title_of
from accelmark.results.schema import VERDICTS
from accelmark.spec.errors import RequestError, SpecError, closest
from accelmark.spec.model import Spec, read_yaml
from accelmark.spec.plugins.case import MUTABLE_GROUPS
from accelmark.spec.plugins.catalog import engine_specs, folders, load_server, readable
from accelmark.spec.plugins.launcher import launcher_options
from accelmark.spec.plugins.programs import ServerSpec
from accelmark.spec.settings.inference import InferSettings
from accelmark.spec.settings.serving import ServeSettings
from accelmark.spec.settings.training import TrainSettings


class Term(Spec):
    """A word that AccelMark writes, explained."""

    text: str
    """The meaning of the term, or the finding of an audit rule."""
    why: str = ""
    """Of an audit rule: why it matters."""
    remedy: str = ""
    """What to do; empty where nothing is to be done."""
    severity: tuple[Literal["error", "open", "warning", "info"], ...] = ()
    """Of an audit rule: severities that its findings may have."""


@cache
def all_terms() -> dict[str, dict[str, Term]]:
    """Return kind (``audit rule``, ``verdict``, ``end reason``, ``state``, ``mark`` ...) -> name -> explanation."""
    path = Path(__file__).with_name("terms.yaml")
    reasons = "The page and 'accelmark verify RUN' list each reason."
    verdicts: dict[str, Term] = {
        word: Term(text=text, remedy="" if word == "VALID" else reasons) for word, text in VERDICTS.items()
    }
    others = TypeAdapter(dict[str, dict[str, Term]]).validate_python(read_yaml(path))
    return {"verdict": verdicts, **others}


@dataclass(frozen=True, slots=True)
class Entry:
    """An explanation."""

    name: str
    kind: str
    """``figure``, ``setting of training``, ``end reason``, ..."""
    text: str
    why: str = ""
    """Of an audit rule: why it matters."""
    remedy: str = ""
    title: str = ""
    """The title of a figure on pages."""


def settings() -> dict[str, list[DocumentedField]]:
    """Return kind -> all settings, or all keys of a file; launchers, data sets, servers and engines have own kinds."""
    models: dict[str, type[BaseModel]] = {"setting of training": TrainSettings, "setting of inference": InferSettings}
    models["setting of serving"] = ServeSettings
    for model, title in FILES.values():
        models[f"key of {title}" if "." in title else f"key of a {title.lower()}"] = model
    models |= {f"key of a cluster file, launcher {name}": model for name, model in launcher_options().items()}
    fields = {kind: list(documented_fields(model)) for kind, model in models.items()}
    fields["key of case.yaml, data set"] = list(documented_fields(DataEntry, "data[]."))
    servers, _ = readable("servers", load_server)
    fields |= {f"setting of serving, server {name}": _options(server) for name, server in servers.items()}
    engines = engine_specs()
    for vendor in folders("vendors").values():
        with contextlib.suppress(SpecError):
            engines |= engine_specs(vendor.path)
    for name, engine in engines.items():
        options = []
        for key, option in engine.options.items():
            kind = " | ".join(map(as_yaml, option.values)) or "any"
            if option.least is not None:
                kind = f"integer of at least {option.least}"
            what = f"Option of {engine.title}: {option.what}."
            options.append(DocumentedField(f"engine_options.{key}", kind, "", what))
        if options:
            fields[f"setting of inference, engine {name}"] = options
    return fields


def entries() -> Iterator[Entry]:
    """Yield everything that can be explained; a name may occur once in each kind."""
    for figure in FigureName:
        info = figure.info
        unit = info.unit.format(unit="unit")
        measure = "a ratio" if unit == "ratio" else f"in {unit}" if unit else "a number"
        better = "" if info.better == "neither" else f" {info.better.capitalize()} is better."
        title = title_of(figure, "unit")
        text = f"{title}, {measure}: {info.explanation.format(unit='unit')}.{better}"
        yield Entry(figure.value, "figure", text, title=title)
    for kind, fields in settings().items():
        for field in fields:
            default = f" Default: {field.default}." if field.default not in ("", "-") else ""
            yield Entry(field.key, kind, f"{field.text} Type: {field.type}.{default}")
    for group, names in MUTABLE_GROUPS.items():
        yield Entry(group, "name in mutable", f"In ``mutable`` of case.yaml it is short for {', '.join(names)}.")
    for kind, terms in all_terms().items():
        for name, term in terms.items():
            severity = f" Severity: {', '.join(term.severity)}." if term.severity else ""
            yield Entry(name, kind, term.text + severity, term.why, term.remedy)


def explain(name: str) -> list[Entry]:
    """Return the explanations of a name, a figure's title or a setting's last part; raises RequestError."""
    known = list(entries())
    named = [entry for entry in known if entry.name == name]
    named = named or [entry for entry in known if name and _plain(name) in (_plain(entry.name), _plain(entry.title))]
    if not named and name:
        family = [entry for entry in known if _plain(entry.title).startswith(f"{_plain(name)},")]
        named = [*family, *(entry for entry in known if entry.name.rpartition(".")[2] == name)]
    if not named:
        plain = {_plain(title): title for title in sorted({entry.name for entry in known})}
        close = closest(_plain(name), list(plain))
        hint = f"did you mean {plain[close[0]]!r}?" if close else "accelmark explain lists all names"
        raise RequestError(f"nothing is called {name!r}; {hint}")
    return sorted(named, key=lambda entry: entry.kind != "word")  # what a newcomer means comes first


def _options(server: ServerSpec) -> list[DocumentedField]:
    options = []
    for name, default in server.options.items():
        flag = server.flags[f"server_options.{name}"]
        passed = [" ".join(flag.arguments)] if flag.arguments else []
        for value, given in flag.values.items():
            passed.append(f"{given if isinstance(given, str) else ' '.join(given) or 'no argument'} for {value}")
        kind = " | ".join(flag.values) or "any"
        text = f"Option of {server.title}, which gets it as: {'; '.join(passed)}."
        options.append(DocumentedField(f"server_options.{name}", kind, as_yaml(default), text))
    return options


def _plain(name: str) -> str:
    return name.lower().replace(" ", "_")

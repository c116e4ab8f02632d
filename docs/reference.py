"""Writes the reference pages from the code when mkdocs builds the site, and the front page from README.md."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from support import case_support

import accelmark
from accelmark import api
from accelmark.cli.main import app
from accelmark.compat.flagperf.parse import coverage
from accelmark.datasets.catalogue import known_datasets
from accelmark.explain.entries import all_terms, entries, settings
from accelmark.results.figures import FIGURE_GROUPS, title_of
from accelmark.spec.number_format import quantity
from accelmark.spec.plugins.catalog import folders, load_case, load_framework

_ROOT: Final = Path(__file__).parents[1]
_SOURCE: Final = "https://github.com/accelmark/accelmark/blob/main/"
_RULE: Final = "audit rule"
_SEVERITIES: Final = {
    "error": "Findings that make a result INVALID",
    "open": "Findings that make a result OPEN",
    "warning": "Warnings",
    "info": "Notes",
}
"""Severity of a finding -> the heading of its rules."""
_LINK: Final = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages."""
    pages = {
        "index.md": _front_page(),
        "reference/commands.md": _commands(),
        "reference/figures.md": _figures(),
        "reference/settings.md": _settings(),
        "reference/data.md": _datasets(),
        "reference/rules.md": _rules(),
        "reference/terms.md": _terms(),
        "reference/versions.md": _versions(),
        "reference/api.md": _api(),
        "reference/coverage.md": _coverage(),
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to files outside docs at the repository."""
    outside = "../" * (page.file.src_uri.count("/") + 1)
    to_source = functools.partial(_LINK.sub, lambda found: f"]({_site_link(found[1], outside)})")
    return markdown if page.file.generated_by else to_source(markdown)


def _site_link(target: str, outside: str) -> str:
    return _SOURCE + target.removeprefix(outside) if target.startswith(outside) else target


def _front_page() -> str:
    """Return README.md with links as the site has them."""

    def link(found: re.Match[str]) -> str:
        page = found[1].removeprefix("docs/")
        return f"]({page})" if page != found[1] else f"]({_SOURCE}{page})"

    # Without a table of contents, its widest commands fit a screen of 1,280 pixels.
    return "---\nhide: [toc]\n---\n" + _LINK.sub(link, (_ROOT / "README.md").read_text(encoding="utf-8"))


def _table(*heading: str, rows: Iterator[tuple[str, ...]]) -> str:
    lines = [heading, tuple("---" for _ in heading), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines) + "\n"


def _coverage() -> str:
    """Return which case carries which of FlagPerf's models, and where which case can run."""
    parts = ["# Coverage\n\nFlagPerf's models and the cases that carry them; a note says what differs.\n"]
    for task, title in (("train", "Training"), ("infer", "Inference")):
        rows = ((row.model, row.frameworks, _case_link(row.case), row.note) for row in coverage() if row.task == task)
        parts.append(f"## {title}\n\n" + _table("FlagPerf", "Frameworks there", "Case", "Note", rows=rows))
    return "\n".join([*parts, *_support()])


def _support() -> Iterator[str]:
    """Yield a table for each framework: its cases on the devices of all vendors."""
    yield "## Cases, frameworks and vendors\n"
    yield (
        "`measured`: the case's README has a result. `runs`: case, framework and vendor declare it, and no result is "
        "measured; the README says what was tried on CPUs, on accelerators nothing was. `-`: not possible, the "
        "vendor has no device in the framework. A case that is not in a framework's table is not written for it.\n"
    )
    rows = case_support()
    for framework in dict.fromkeys(row.framework for row in rows):
        chosen = [row for row in rows if row.framework == framework]
        cells = (
            (
                _case_link(row.case),
                row.task,
                *("-" if each == "not possible" else each for each in row.vendors.values()),
            )
            for row in chosen
        )
        yield f"### {framework}\n\n" + _table("Case", "Task", *chosen[0].vendors, rows=cells)


def _case_link(name: str | None) -> str:
    return f"[`{name}`]({_SOURCE}src/accelmark/cases/{name}/README.md)" if name else "not carried"


def _figures() -> str:
    parts = ["# Figures\n\nA figure that was not measured is null and has a reason.\n"]
    for group, names in FIGURE_GROUPS.items():
        rows = (
            (f"`{name}`", title_of(name, "unit"), name.info.unit.format(unit="unit"),
             name.info.explanation.format(unit="unit"))
            for name in names
        )  # fmt: skip
        parts.append(f"## {group}\n\n" + _table("Name", "Title", "Unit", "Definition", rows=rows))
    return "\n".join(parts)


def _settings() -> str:
    parts = ["# Settings and files\n\nJSON schemas of these files are in the package, in `accelmark/schemas`.\n"]
    for kind, fields in settings().items():
        # A run file may contain a whole cluster file, whose keys have a section of their own.
        shown = (field for field in fields if kind != "key of a run file" or not field.key.startswith("cluster."))
        rows = ((f"`{field.key}`", field.type, field.default, field.text) for field in shown)
        what, _, where = kind.partition(" ")
        parts.append(f"## {what.capitalize()}s {where}\n\n" + _table("Key", "Type", "Default", "Meaning", rows=rows))
    return "\n".join(parts).replace("``", "`")


def _datasets() -> str:
    """Return the data sets and weights of all cases, each the same whether or not this machine has it."""
    parts = [
        "# Data sets\n\nData sets and weights of the cases. `accelmark data list` shows what this machine has. "
        "[Settings and files](settings.md) has the keys with which `case.yaml` declares them.\n"
    ]
    for known in known_datasets():
        spec = known.spec
        obtained = "fetched when needed" if spec.sources else known.obtained
        sources = ", else ".join(source.describe() for source in spec.sources)
        listed = {
            "Licence": _escaped(spec.licence),
            "Obtained": f"{obtained}, from {sources}" if sources else obtained,
            "Size": quantity(spec.bytes / 2**20, "MiB", 3) if spec.bytes else "",
            "How to get it" + " by hand" * bool(sources): _escaped(spec.how_to_get),
            "Layout": "; ".join(f"`{part.describe()}`" for part in spec.tree),
            "Cases": ", ".join(map(_case_link, known.cases)),
        }
        rows = "\n".join(f"- {what}: {' '.join(text.split())}" for what, text in listed.items() if text)
        parts.append(f"## {spec.name}\n\n{_escaped(spec.title)}\n\n{rows}\n")
    return "\n".join(parts)


def _escaped(text: str) -> str:
    """Return plain text as Markdown; what is between backquotes stays as it is."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([*_<])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def _rules() -> str:
    """Return the rules of the audit, those that can make a result INVALID first."""
    parts = [
        "# Rules of the audit\n\nA finding names the rule that was violated. `accelmark explain RULE` prints the same "
        "texts. A rule in several sections says in its finding which case it is.\n"
    ]
    for severity, title in _SEVERITIES.items():
        rules = ((name, term) for name, term in all_terms()[_RULE].items() if severity in term.severity)
        rows = ((f"`{name}`", *map(_escaped, (term.text, term.why, term.remedy))) for name, term in rules)
        headings = ("Rule", "What it finds", "Why it matters", "What to do")
        parts.append(f"## {title}\n\n" + _table(*headings, rows=rows))
    return "\n".join(parts)


def _terms() -> str:
    kinds: dict[str, list[tuple[str, ...]]] = {}
    on_other_pages = {"figure", _RULE, *settings()}
    for entry in entries():
        if entry.kind not in on_other_pages:
            row = (f"`{entry.name}`", _escaped(entry.text), _escaped(entry.remedy))
            kinds.setdefault(entry.kind, []).append(row)
    parts = [
        f"## {kind.capitalize()}\n\n" + _table("Name", "Meaning", "What to do", rows=iter(rows))
        for kind, rows in kinds.items()
    ]
    return "# Terms\n\n`accelmark explain NAME` prints the same texts.\n\n" + "\n".join(parts)


def _versions() -> str:
    """Return the versions of cases, whose results compare only where they are equal, and of frameworks and servers."""
    shipped = {name: folder for name, folder in sorted(folders("cases").items()) if folder.origin == "accelmark"}
    cases = ((_case_link(name), str(load_case(name).version)) for name in shipped)
    pins = (
        (f"`{folder.name}`", ", ".join(_pinned(folder.path / "constraints.txt")))
        for folder in folders("frameworks").values()
        if (folder.path / "constraints.txt").is_file()
    )
    specs = map(load_framework, sorted(folders("frameworks")))
    needs = (
        (
            spec.title,
            ", ".join(f"`{key}={value}`" for key, value in rule.when.items()),
            ", ".join(rule.requires),
            rule.instead,
        )
        for spec in specs
        for rule in spec.setting_requires
    )
    parts = [
        f"# Versions\n\nThis is AccelMark {accelmark.__version__}.\n",
        "## Frameworks\n\nThe versions that were tried together. `accelmark env create NAME` installs them.\n",
        _table("Framework", "Versions", rows=pins),
        "## Settings that need more than their framework\n\nA run that has not what its settings need is refused "
        "before it starts.\n",
        _table("Framework", "Setting", "Needs", "Set instead", rows=needs),
        "## Cases\n\nResults compare only where the version of the case is the same.\n",
        _table("Case", "Version", rows=cases),
    ]
    return "\n".join(parts)


def _pinned(constraints: Path) -> list[str]:
    lines = constraints.read_text(encoding="utf-8").splitlines()
    return [line.replace("==", " ") for line in lines if "==" in line]


def _api() -> str:
    """Return the functions and classes of the Python API with their signatures and documentation."""
    parts = [f"# Python API\n\n```text\n{inspect.getdoc(api)}\n```\n"]
    for name in api.__all__:
        found = getattr(api, name)
        if inspect.isclass(found):
            parts.append(f"## {name}\n\n{inspect.getdoc(found)}\n")
            for member, value in vars(found).items():
                if not member.startswith("_") and (isinstance(value, property) or inspect.isfunction(value)):
                    parts.append(_documented(f"{name}.{member}", value, "###"))
        else:
            parts.append(_documented(name, found, "##"))
    return "\n".join(parts)


def _documented(name: str, found: Any, level: str) -> str:
    signature = "" if isinstance(found, property) else str(inspect.signature(found))
    return f"{level} {name}\n\n```python\n{name}{signature}\n```\n\n```text\n{inspect.getdoc(found)}\n```\n"


def _commands() -> str:
    root: Any = typer.main.get_command(app)
    parts = ["# Command line\n"]

    def describe(command: Any, name: str) -> None:
        if getattr(command, "commands", None) and name != "accelmark":
            parts.append(f"## {name}\n\n{command.help}\n")
        for sub_name, sub in sorted(getattr(command, "commands", {}).items()):
            if not sub.hidden:
                describe(sub, f"{name} {sub_name}")
        if not getattr(command, "commands", None):
            context = command.make_context(name, [], resilient_parsing=True)
            parts.append(f"## {name}\n\n```text\n{command.get_help(context).strip()}\n```\n")

    describe(root, "accelmark")
    return "\n".join(parts)

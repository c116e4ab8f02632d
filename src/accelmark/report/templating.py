"""Fill the HTML templates, and embed style sheets, scripts and data in a page."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

import accelmark
from accelmark.results.schema import mark_text
from accelmark.spec.number_format import NOTHING, counted, percent, quantity
from accelmark.spec.plugins.requirements import page_needs, require_all

if TYPE_CHECKING:
    from jinja2 import Environment


def text_of(name: str) -> str:
    """Return a file of ``report/templates``."""
    return (files("accelmark.report") / "templates" / name).read_text(encoding="utf-8")


def fill(template: str, **values: Any) -> str:
    """Return a template of ``report/templates`` filled with values, which are escaped."""
    return _environment().get_template(template).render(**values)


def page(template: str, *scripts: str, charts: bool = False, served: bool = False, **values: Any) -> str:
    """Return a whole page: self-contained, or ``served`` with the server's style sheet, scripts and navigation.

    A page with ``charts`` has Plotly. A self-contained page has it compressed (2 MB in place of 4.9), and draws its
    charts once it is loaded; ``scripts`` are further files of ``report/templates`` for it.
    """
    names = ("theme.js", *(("charts.js",) if charts else ()), *scripts)
    embedded: dict[str, Markup] = {}
    if not served:
        texts = {"style": text_of("page.css"), "script": "".join(map(text_of, names))}
        texts["plotly"] = _compressed(plotly()) if charts else ""
        embedded = {name: Markup(text) for name, text in texts.items()}  # noqa: S704 - no text of a run
    return fill(template, served=served, charts=charts, **({"version": accelmark.__version__} | embedded | values))


def plotly() -> str:
    """Return Plotly's script; raises RequestError if it is not installed."""
    require_all(page_needs())
    return (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


@cache
def _compressed(script: str) -> str:
    return b64encode(gzip.compress(script.encode(), mtime=0)).decode()


def _plain(value: Any) -> str:
    """Return a setting's value as YAML has it."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | list | tuple | dict | None) else str(value)


@cache
def _environment() -> Environment:
    require_all(page_needs())
    from jinja2 import Environment, PackageLoader, StrictUndefined

    templates = PackageLoader("accelmark.report", "templates")
    environment = Environment(loader=templates, autoescape=True, undefined=StrictUndefined)
    environment.trim_blocks = environment.lstrip_blocks = True
    environment.filters |= {"counted": counted, "quantity": quantity, "percent": percent}
    environment.filters |= {"plain": _plain, "mark_text": mark_text}
    environment.globals["NOTHING"] = NOTHING
    return environment

"""Fill the HTML templates, and embed style sheets, scripts and data in a page."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from accelmark.results.schema import mark_text
from accelmark.spec.number_format import NOTHING, counted, percent, quantity
from accelmark.spec.plugins.requirements import page_needs, require_all

if TYPE_CHECKING:
    from jinja2 import Environment


def text_of(name: str) -> str:
    """Return a file of ``report/templates``."""
    return (files("accelmark.report") / "templates" / name).read_text(encoding="utf-8")


def fill(template: str, **values: Any) -> str:
    """Return a template of ``report/templates`` filled with values, which are escaped.

    Raises RequestError if a package of pages is not installed.
    """
    return _environment().get_template(template).render(**values)


def inline(name: str) -> Markup:
    """Return a file of ``report/templates`` to embed in a page without escaping."""
    return Markup(text_of(name))  # noqa: S704 - our own file


def embed_json(value: Any) -> Markup:
    """Return JSON for a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return Markup(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))  # noqa: S704 - escaped


def plotly() -> Markup:
    """Return Plotly's script to embed in a page; raises RequestError if it is not installed."""
    require_all(page_needs())
    text = (files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    return Markup(text)  # noqa: S704 - the library as it is packaged


def plain(value: Any) -> str:
    """Return a setting's value as YAML has it."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, bool | list | tuple | dict | None) else str(value)


@cache
def _environment() -> Environment:
    require_all(page_needs())
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("accelmark.report", "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"counted": counted, "quantity": quantity, "percent": percent, "plain": plain}
    environment.filters["mark_text"] = mark_text
    environment.globals["NOTHING"] = NOTHING
    return environment

"""What every page has in common: the templates, the style sheet, and how they are filled."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from accelmark.spec.number_format import NOTHING, percent, quantity

if TYPE_CHECKING:
    from jinja2 import Environment


def text_of(name: str) -> str:
    """Return a file of ``report/page``."""
    return (files("accelmark.report") / "page" / name).read_text(encoding="utf-8")


def fill(template: str, **values: Any) -> str:
    """Return a template of ``report/page`` filled; every text that came from outside is escaped."""
    return _environment().get_template(template).render(**values)


def inline(name: str) -> Any:
    """Return one of our own files to stand inside a page as it is."""
    from markupsafe import Markup

    return Markup(text_of(name))  # noqa: S704 - our own file


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("accelmark.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["quantity"] = quantity
    environment.filters["percent"] = percent
    environment.globals["NOTHING"] = NOTHING
    return environment

"""What a verb returns: a model, printed as JSON or by the verb's own view of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import typer

from accelmark.spec.errors import EXIT_OK


@final
@dataclass(frozen=True, slots=True)
class Output:
    """The result of a verb. ``accelmark.cli.help.Verb`` emits what a verb returns."""

    content: Any
    """A pydantic model, or a JSON value that may contain models; printed with ``--json``."""
    show: Callable[[], None]
    """Prints the content for people."""
    exit_code: int = EXIT_OK

    def emit(self, *, as_json: bool) -> None:
        """Print the content. Raises typer.Exit where the exit code is not 0."""
        if as_json:
            from pydantic_core import to_json

            typer.echo(to_json(self.content).decode())
        else:
            self.show()
        if self.exit_code != EXIT_OK:
            raise typer.Exit(self.exit_code)

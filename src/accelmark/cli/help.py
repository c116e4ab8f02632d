"""What a verb prints: its output, as JSON or by its own view, and its help, in whole sentences and with examples."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, final

import typer
from typer.core import TyperCommand, TyperGroup

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


_EXAMPLES: Final = Path(__file__).with_name("examples.yaml")
_VALUES: Final = {"str": "TEXT", "int": "NUMBER", "float": "NUMBER", "path": "PATH", "Path": "PATH"}
_TYPE: Final = re.compile(r"<(?:list\[)?([^<>\]]*?)(?: range)?\]?>")


def examples() -> Mapping[str, Sequence[str]]:
    """Return, for each verb, the commands that its help shows."""
    import yaml

    commands: Mapping[str, Sequence[str]] = yaml.safe_load(_EXAMPLES.read_text(encoding="utf-8"))
    return commands


class Verb(TyperCommand):
    """A verb whose help shows its examples. An :class:`Output` that it returns is printed, as JSON with ``--json``."""

    def invoke(self, ctx: Any) -> Any:
        """Call the verb and print its output."""
        output = super().invoke(ctx)
        if isinstance(output, Output):
            output.emit(as_json=bool(ctx.params.get("as_json")))
        return None

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the usage line with required arguments as ``KEY``, not ``{KEY}``."""
        return [re.sub(r"\{(.+)\}", r"\1", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments and options; only options show the kind of their value."""
        sections: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                is_option = parameter.param_type_name == "option"
                shown = (lambda kind: _VALUES.get(kind[1], kind[1])) if is_option else ""
                name = _TYPE.sub(shown, record[0])
                sections[parameter.param_type_name].append((name.strip(), record[1].removesuffix("  [required]")))
        for title, rows in (("Arguments", sections["argument"]), ("Options", sections["option"])):
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        """Write the examples, one a line."""
        verb = ctx.command_path.partition("accelmark ")[2]
        with formatter.section("Examples"):
            for line in examples()[verb]:
                formatter.write(f"  {line}\n")


def group(name: str, text: str) -> typer.Typer:
    """Return an application for verbs below the verb ``name``."""
    return typer.Typer(name=name, cls=Verbs, help=text, no_args_is_help=True, rich_markup_mode=None)


class Verbs(TyperGroup):
    """A group of verbs, listed with their whole first sentence."""

    titles: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Title -> names of the verbs below it; by default one title for all."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the names of the verbs with their first sentence."""
        for title, names in (self.titles or {"Commands": tuple(self.list_commands(ctx))}).items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(200)) for name in names])

"""What a verb prints: its output, as JSON or by its own view, and its help, in whole sentences and with examples."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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


EXAMPLES: Final[Mapping[str, tuple[str, ...]]] = {
    "train": (
        "accelmark train resnet_mini",
        "accelmark train llama_mini --dry-run",
        "accelmark train llama_mini:pytorch:H100:1:8:3",
        "accelmark train resnet_mini --synthetic --open --set end.max_steps=4",
    ),
    "infer": (
        "accelmark infer resnet_mini --compiler openvino --precision bf16",
        "accelmark infer resnet_mini --scenario offline --scenario server",
        "accelmark infer resnet_mini --tune --budget 20m",
    ),
    "serve": (
        "accelmark serve llama_mini --rate 4 --ttft 200",
        "accelmark serve llama_mini --endpoint http://10.1.2.3:8000 --model NAME",
    ),
    "run": ("accelmark run quickstart", "accelmark run run.yaml --dry-run"),
    "reproduce": (
        "accelmark reproduce",
        "accelmark reproduce accelmark-llama-mini-loss",
        "accelmark reproduce llm-foundry-1.3b-h100 --check runs/RUN",
    ),
    "probe": ("accelmark probe --budget 20", "accelmark probe --cluster cluster.yaml --only collectives"),
    "cluster": ("accelmark cluster cluster.yaml --nproc 8 --dry-run",),
    "status": ("accelmark status runs/RUN",),
    "stop": ("accelmark stop runs/RUN",),
    "resume": ("accelmark resume runs/RUN",),
    "report": ("accelmark report runs/RUN --mllog",),
    "compare": ("accelmark compare runs/A runs/B -o compare.html",),
    "view": ("accelmark view runs", "accelmark view runs --host 0.0.0.0 --token-file ~/.accelmark-token"),
    "evaluate": ("accelmark evaluate runs/RUN",),
    "accept": (
        "accelmark accept cpu resnet_mini --scales 1x1,1x2 --run --dry-run",
        "accelmark accept cpu resnet_mini --scales 1x1,1x2 --readme README.md",
    ),
    "results": (
        "accelmark results runs --where chip=H100 --group-by case",
        'accelmark results --sql "SELECT model, verdict FROM results"',
    ),
    "verify": (
        "accelmark verify runs/RUN",
        "accelmark verify run.tar --key id_ed25519.pub",
        'accelmark verify runs/RUN --replay "any text"',
    ),
    "bundle": ("accelmark bundle runs/RUN -o run.tar",),
    "export": ("accelmark export runs/RUN --tensorboard DIR",),
    "cases": ("accelmark cases resnet50", "accelmark cases --family vision"),
    "vendors": ("accelmark vendors", "accelmark vendors NAME", "accelmark vendors --matrix"),
    "doctor": ("accelmark doctor",),
    "preflight": ("accelmark preflight cluster.yaml",),
    "explain": ("accelmark explain mfu", "accelmark explain optimizer.lr"),
    "init": ("accelmark init", "accelmark init 10.1.2.3 10.1.2.4 --vendor cpu"),
    "new": ("accelmark new vendor acme", "accelmark new case my_case"),
    "check": (
        "accelmark check vendor acme --no-run",
        "accelmark check vendor acme --kit",
        "accelmark check case resnet_mini --frameworks jax",
    ),
    "import": (
        "accelmark import flagperf cluster_conf.py test_conf.py --out site",
        "accelmark import claims result_0.txt --url https://github.com/mlcommons/training_results_v4.0",
    ),
    "monitor": ("accelmark monitor start --log-path logs",),
    "demo audit": ("accelmark demo audit",),
    "ledger add": ("accelmark ledger add run.accelmark.tar --by 'Acme Labs'",),
    "ledger check": ("accelmark ledger check", "accelmark ledger check --since origin/main"),
    "ledger site": ("accelmark ledger site site", "accelmark ledger site ledger.html --prices prices.yaml"),
    "ledger withdraw": ("accelmark ledger withdraw RECORD --by 'Acme Labs' --why 'a fan was broken'",),
    "automl run": ("accelmark automl run -c fashion",),
    "automl resume": ("accelmark automl resume runs/RUN",),
    "automl status": ("accelmark automl status runs/RUN",),
    "automl stop": ("accelmark automl stop runs/RUN",),
    "automl report": ("accelmark automl report runs/RUN",),
    "automl verify": ("accelmark automl verify runs/RUN",),
    "automl count": ("accelmark automl count resnet50 --mode aiperf-v1",),
    "env create": ("accelmark env create jax",),
    "env list": ("accelmark env list",),
    "env remove": ("accelmark env remove jax",),
    "data list": ("accelmark data list", "accelmark data list imagenet"),
    "data prepare": ("accelmark data prepare imagenet --from ARCHIVES --to /data/imagenet",),
    "data pack": ("accelmark data pack imagenet --from /data/imagenet --to /data/imagenet-shards",),
}
"""Verb -> commands that its help shows."""

_VALUES: Final = {"str": "TEXT", "int": "NUMBER", "float": "NUMBER", "path": "PATH", "Path": "PATH"}
_TYPE: Final = re.compile(r"<(?:list\[)?([^<>\]]*?)(?: range)?\]?>")


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
            for line in EXAMPLES[verb]:
                formatter.write(f"  {line}\n")


class Verbs(TyperGroup):
    """A group of verbs, listed with their whole first sentence."""

    titles: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Title -> names of the verbs below it; by default one title for all."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the names of the verbs with their first sentence."""
        for title, names in (self.titles or {"Commands": tuple(self.list_commands(ctx))}).items():
            with formatter.section(title):
                formatter.write_dl([(name, self.commands[name].get_short_help_str(200)) for name in names])

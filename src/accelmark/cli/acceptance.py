"""The verb accept: judges the runs of a vendor's case."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

from typer import Argument, Option

from accelmark.cli import completion, options
from accelmark.cli.output import Output
from accelmark.spec.errors import EXIT_FAILED, EXIT_OK, RequestError

if TYPE_CHECKING:
    from accelmark.audit.acceptance import Criterion

BEGIN: Final = "<!-- acceptance -->"
END: Final = "<!-- /acceptance -->"
_CHINESE: Final = {
    "Scale": "规模", "Rule": "规则", "Expected": "要求", "Measured": "实测", "Accepted": "通过", "Run": "运行",
    "run": "运行", "target": "收敛目标", "adaptation": "适配", "telemetry": "监控", "repeats": "重复",
    "speed-up": "加速比", "yes": "是", "no": "否",
}  # fmt: skip


def accept(
    vendor: Annotated[
        str, Argument(metavar="VENDOR", help="Name in 'accelmark vendors'.", autocompletion=completion.vendors)
    ],
    case: Annotated[str, Argument(metavar="CASE", help="model[:framework]", autocompletion=completion.cases)],
    scales: Annotated[str | None, Option(metavar="SCALES", help="1x1,1x8,2x8; default: those of the runs.")] = None,
    runs: Annotated[Path, Option(metavar="DIR", help="Directory of runs.")] = Path("runs"),
    efficiency: Annotated[float | None, Option(help="Expected speed-up over the ideal one, 0 to 1.")] = None,
    readme: Annotated[
        Path | None, Option(metavar="FILE", help="README that gets the table, English and Chinese.")
    ] = None,
    as_json: options.AsJson = False,
) -> Output:
    """Judge a vendor's case by FlagPerf's rules of acceptance, from its newest run at each scale."""
    from accelmark.audit.acceptance import judge, newest_cases
    from accelmark.results.sources import open_sources
    from accelmark.spec.plugins.catalog import find

    model, _, framework = case.partition(":")
    find("vendors", vendor)
    find("cases", model)
    opened, problems = open_sources([options.existing_run(runs)])
    for problem in problems:
        options.warn(problem)
    cases = newest_cases(opened, vendor, model, framework or "pytorch")
    wanted = [_scale(text) for text in scales.split(",")] if scales else list(cases)
    if not wanted:
        raise RequestError(f"{runs} has no training of {case} on {vendor}: name --scales to see what acceptance needs")
    criteria = judge(cases, wanted, efficiency)
    if readme is not None:
        _write(readme, criteria)
    rejected = any(criterion.passed is False for criterion in criteria)
    content = [criterion._asdict() for criterion in criteria]
    return Output(content, lambda: _show(criteria), EXIT_FAILED if rejected else EXIT_OK)


def _scale(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text.strip())
    if found is None:
        raise RequestError(f"--scales {text!r}: write HOSTSxDEVICES, e.g. 1x8")
    return int(found[1]), int(found[2])


def _rows(criteria: list[Criterion]) -> list[tuple[str, ...]]:
    states = {True: "yes", False: "no", None: "-"}
    return [
        (each.scale, each.rule, each.expected, each.actual, states[each.passed], each.run or "-") for each in criteria
    ]


def _show(criteria: list[Criterion]) -> None:
    from rich.console import Console

    table = options.plain_table("scale", "rule", "expected", "measured", "accepted", "run")
    for row in _rows(criteria):
        table.add_row(*row)
    Console(highlight=False).print(table)


def _write(readme: Path, criteria: list[Criterion]) -> None:
    """Replace the tables between the markers of a README, or append them."""
    from accelmark.report.tables import plain_markdown
    from accelmark.results.store.files import write_atomic

    titles, rows = ["Scale", "Rule", "Expected", "Measured", "Accepted", "Run"], _rows(criteria)
    chinese = [[_CHINESE.get(cell, cell) for cell in row] for row in ([*titles], *rows)]
    tables = f"{plain_markdown(titles, rows)}\n{plain_markdown(chinese[0], chinese[1:])}"
    text = readme.read_text(encoding="utf-8") if readme.is_file() else ""
    before, begin, rest = text.partition(BEGIN)
    if not begin:
        before = f"{text}\n## Acceptance\n\n" if text else ""
    after = rest.partition(END)[2] or "\n"
    write_atomic(readme, f"{before}{BEGIN}\n{tables}{END}{after}")

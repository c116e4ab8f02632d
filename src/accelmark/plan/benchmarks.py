"""Find the data of accuracy benchmarks, the tasks of lm-evaluation-harness that engines and servers answer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from accelmark.plan.request import KeyRequest
from accelmark.spec.errors import Problem
from accelmark.spec.settings.benchmarks import BENCHMARK_DATA, BenchmarkSettings

BENCHMARK_REQUIRES: Final = ("lm-eval>=0.4.9", "tenacity", "aiohttp")


def benchmark_dirs(request: KeyRequest, settings: BenchmarkSettings) -> dict[str, Path]:
    """Return the directories of the tasks' data below the given data directory, of those that are there."""
    given = request.request.data
    if given is None:
        return {}
    return {name: (given / name).absolute() for name in settings.benchmarks if (given / name).is_dir()}


def benchmark_problems(
    request: KeyRequest, settings: BenchmarkSettings, data_dirs: Mapping[str, Path]
) -> Iterator[Problem]:
    """Yield a problem for each task without data, with the way to prepare it."""
    given = request.request.data
    for name in settings.benchmarks:
        if name not in data_dirs:
            where = f"{given}/{name}/ is not a directory" if given is not None else f"{name}/ is needed below --data"
            clone = f"git clone https://huggingface.co/datasets/{BENCHMARK_DATA[name].repository} {name} (with Git LFS)"
            what = f"no data of {name}: {where}"
            remedy = f"in the directory given with --data: {clone}; or --set benchmarks=[], whose result is OPEN"
            yield Problem(request.run.where, "benchmarks", what, remedy)

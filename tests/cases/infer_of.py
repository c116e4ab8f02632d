"""A case's seven steps taken in this process, at the size and on the data that a test names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelmark.datasets.ensure import ensure
from accelmark.datasets.spec import dataset_specs
from accelmark.infer.case import InferCase
from accelmark.infer.run import build_case
from accelmark.spec.job import InferJob, JobSpec
from accelmark.spec.plugins.catalog import load_case
from accelmark.spec.settings.inference import InferSettings
from tests.cases.job_of import job_on_cpu
from tests.infer.conftest import Ran, steps_of


def packaged(name: str) -> dict[str, Path]:
    """Fetch what inference of a case needs, where the cache lacks it, and return the directories."""
    case = load_case(name)
    assert case.infer is not None
    wanted = set(case.infer.data)
    return {
        spec.name: ensure(spec, allow_subset=True)
        for spec in dataset_specs(case.data, f"cases/{name}/case.yaml")
        if spec.name in wanted
    }


def job_of(
    name: str, directory: Path, data_dirs: Mapping[str, Path], parameters: Mapping[str, int] | None = None, **over: Any
) -> JobSpec:
    """Return a job of the case ``name`` with ``over`` on its configurations."""
    side = load_case(name).infer
    assert side is not None
    short = {"threads": 1, "num_workers": 0, "repeat": 1, "inference_duration_s": 0, "warmup_batches": 1}
    settings = side.configurations | short | over
    return job_on_cpu(
        name,
        data_dirs,
        directory,
        work=InferJob(
            unit=side.unit,
            metric=side.metric,
            tolerance=side.tolerance,
            generates=side.generates,
            iterative=side.iterative,
            reference=side.reference,
            settings=InferSettings.model_validate(settings),
            parameters={**side.parameters, **(parameters or {})},
        ),
    )


def built(
    name: str, directory: Path, data_dirs: Mapping[str, Path], parameters: Mapping[str, int] | None = None, **over: Any
) -> InferCase:
    """Return the case ``name``, with ``over`` on its configurations."""
    job = job_of(name, directory, data_dirs, parameters, **over)
    assert isinstance(job.work, InferJob)
    return build_case(job, job.work, directory)


def infer(
    name: str,
    directory: Path,
    data_dirs: Mapping[str, Path],
    *,
    parameters: Mapping[str, int] | None = None,
    **over: Any,
) -> Ran:
    """Take the seven steps of the case ``name`` with ``over`` on its configurations."""
    return steps_of(job_of(name, directory, data_dirs, parameters, **over), directory)


def accuracies(ran: Ran) -> tuple[float, float]:
    """Return the metric of the framework and of the engine of a valid run."""
    finished = ran.finished
    assert finished.state == "completed", finished.message
    assert finished.valid, finished.invalid_reasons
    assert finished.val_average_acc is not None
    assert finished.infer_average_acc is not None
    return finished.val_average_acc, finished.infer_average_acc

"""``python -m accelmark.probe.evaluation JOB.json``: run a case's evaluation on one synthetic batch on the CPU.

Prints the names of the metrics as one line of JSON. Exceptions of the case's code are not caught.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from accelmark.frameworks.pytorch.case import Place
from accelmark.frameworks.pytorch.training.evaluation import metrics_of
from accelmark.spec.job import JobSpec, TrainingWork
from accelmark.spec.plugins.catalog import folder_module

_SAMPLES = 8


def metric_names(job: JobSpec) -> list[str]:
    """Return the names of the metrics of one synthetic batch.

    Raises:
        ValueError: the job is not a training job.
        TypeError: ``metrics`` does not return a dictionary of numbers.
    """
    if not isinstance(job.work, TrainingWork):
        raise ValueError("job.json is not a training job")
    settings = job.work.settings
    place = Place(0, 1, torch.device("cpu"), settings.seed, settings.seed)
    case = folder_module(job.case, "pytorch").Case(settings, job.data_dirs, place)
    model = case.build_model().eval()
    with torch.no_grad():
        sums = case.eval_sums(model, case.synthetic_batch(min(settings.batch_size, _SAMPLES)))
    found = metrics_of(case, sums)
    if not isinstance(found, dict) or not all(isinstance(value, int | float) for value in found.values()):
        raise TypeError(f"metrics() returns {found!r} instead of a dictionary of numbers")
    return list(found)


if __name__ == "__main__":
    print(json.dumps(metric_names(JobSpec.model_validate_json(Path(sys.argv[1]).read_bytes()))))

"""``python -m accelmark.probe.evaluation JOB.json | --infer CASE``: names of the metrics of a synthetic batch.

Prints them as one line of JSON. Exceptions of the case's code are not caught.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from accelmark.frameworks.pytorch.backend import metrics_of
from accelmark.frameworks.pytorch.case import Place, TrainCase
from accelmark.infer.case import InferCase
from accelmark.infer.run import inference_class
from accelmark.spec.job import JobSpec, TrainingWork
from accelmark.spec.layers import resolve_inference
from accelmark.spec.plugins.catalog import find, load_case
from accelmark.train.case import case_class

_SAMPLES = 8


def metric_names(path: Path) -> list[str]:
    """Return the names of the metrics of one synthetic batch of a training job; raises ValueError, TypeError."""
    job = JobSpec.model_validate_json(path.read_bytes())
    if not isinstance(job.work, TrainingWork):
        raise ValueError("job.json is not a training job")
    settings = job.work.settings
    place = Place(0, 1, settings.seed, torch.device("cpu"), settings.seed)
    make_case = case_class(job.case, "pytorch", TrainCase)  # type: ignore[type-abstract]
    case = make_case(settings, job.data_dirs, place)
    model = case.build_model().eval()
    with torch.no_grad():
        sums = case.eval_sums(model, case.synthetic_batch(min(settings.batch_size, _SAMPLES)))
    return _checked(metrics_of(case, sums))


def inference_metric_names(name: str) -> list[str]:
    """Compute one synthetic batch with the model of a case's inference; return the names of its metrics."""
    spec = load_case(name).infer
    if spec is None:
        raise ValueError(f"the case {name} has no inference")
    settings = resolve_inference(spec, "case.yaml").settings
    case = inference_class(find("cases", name).ref("infer"), "pytorch")(settings, spec.parameters, {})
    model = case.create_model().eval()
    with torch.no_grad():
        case.model_forward(model, case.synthetic_batch(min(settings.batch_size, _SAMPLES)).inputs)
    if type(case).row_metrics is not InferCase.row_metrics:
        return [spec.metric]  # which follows from rows of real data
    return _checked(case.metrics(defaultdict(lambda: 1.0)))  # synthetic batches have no labels, and so no sums


def _checked(metrics: Any) -> list[str]:
    if not isinstance(metrics, dict) or not all(isinstance(value, (int, float)) for value in metrics.values()):
        raise TypeError(f"metrics() returns {metrics!r} instead of a dictionary of numbers")
    return list(metrics)


if __name__ == "__main__":
    *option, argument = sys.argv[1:]
    print(json.dumps(inference_metric_names(argument) if option else metric_names(Path(argument))))

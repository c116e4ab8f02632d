"""``python -m accelmark.serving.harness REQUEST.json RESULT.json CONNECTION``: run a task of lm-evaluation-harness.

The task is the harness's own definition; only the place of its data set is another: the given directory, a clone of
the data set's repository, instead of the hub. A server is asked by URL, an engine through the connection (a descriptor)
to the process that started this one.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final

_METRICS: Final = {"mmlu": "acc,none", "gsm8k": "exact_match,strict-match"}
_FEWSHOT: Final = 5
"""Examples in a prompt, as in the published figures of both tasks."""


def main(arguments: list[str]) -> int:
    """Run the task; return the exit code."""
    request = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    import datasets

    hub = datasets.load_dataset

    def load_dataset(path: str, *others: Any, **named: Any) -> Any:
        return hub(request["data"] if "/" in path else path, *others, **named)

    datasets.load_dataset = load_dataset
    import lm_eval

    task = request["task"]
    report = lm_eval.simple_evaluate(
        **_model(request["model"], int(arguments[2])),
        tasks=[task],
        num_fewshot=_FEWSHOT,
        limit=request["limit"],
        log_samples=False,
    )
    metric = _METRICS[task]
    results, samples = report["results"][task], report["n-samples"]
    stderr = results.get(metric.replace(",", "_stderr,"))
    score = {
        "task": task,
        "metric": metric,
        "value": results[metric],
        "stderr": stderr if isinstance(stderr, float) else None,
        "num_questions": sum(sample["effective"] for sample in samples.values()),
        "limit": request["limit"],
        "num_fewshot": _FEWSHOT,
        "task_version": str(report["versions"].get(task)),
        "harness_version": importlib.metadata.version("lm_eval"),
    }
    Path(arguments[1]).write_text(json.dumps(score), encoding="utf-8")
    return 0


def _model(model: dict[str, Any], connection: int) -> dict[str, Any]:
    """Return the arguments of ``simple_evaluate`` that name the model."""
    if "model_dir" in model:
        from accelmark.serving.harness_model import EngineModel

        return {"model": EngineModel(Connection(connection), Path(model["model_dir"]), model["batch_size"])}
    server = {
        "base_url": model["url"],
        "model": model["model"],
        "tokenizer": model["tokenizer"],
        "tokenizer_backend": "huggingface",
        "tokenized_requests": False,
        "num_concurrent": model["num_concurrent"],
        "max_retries": 3,
    }
    return {"model": "local-completions", "model_args": server}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

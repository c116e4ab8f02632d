"""``python -m accelmark.serving.harness REQUEST.json RESULT.json``: run a task of the harness through a server.

The task is the harness's own definition; only the place of its data set is another: the given directory, a clone of the
data set's repository, instead of the hub.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
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
    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "base_url": request["url"],
            "model": request["model"],
            "tokenizer": request["tokenizer"],
            "tokenizer_backend": "huggingface",
            "tokenized_requests": False,
            "num_concurrent": request["num_concurrent"],
            "max_retries": 3,
        },
        tasks=[task],
        num_fewshot=_FEWSHOT,
        limit=request["limit"],
        log_samples=False,
    )
    metric = _METRICS[task]
    results, samples = found["results"][task], found["n-samples"]
    stderr = results.get(metric.replace(",", "_stderr,"))
    score = {
        "task": task,
        "metric": metric,
        "value": results[metric],
        "stderr": stderr if isinstance(stderr, float) else None,
        "num_questions": sum(each["effective"] for each in samples.values()),
        "limit": request["limit"],
        "num_fewshot": _FEWSHOT,
        "task_version": str(found["versions"].get(task)),
        "harness_version": importlib.metadata.version("lm_eval"),
    }
    Path(arguments[1]).write_text(json.dumps(score), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

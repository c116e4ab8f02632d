"""``python -m accelmark.serving.harness REQUEST.json RESULT.json CONNECTION``: run a task of lm-evaluation-harness.

The task is the harness's own definition; only the place of its data set is another: the given directory, a clone of
the data set's repository, instead of the hub. A server is asked by URL, an engine through the connection (a descriptor)
to the process that started this one.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeVar

import datasets
import lm_eval
from lm_eval.api.model import TemplateLM
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from accelmark.spec.backports import zip_strict

_METRICS: Final = {"mmlu": "acc,none", "gsm8k": "exact_match,strict-match"}
_FEWSHOT: Final = 5
"""Examples in a prompt, as in the published figures of both tasks."""
_MAX_TOKENS: Final = 256
"""Longest answer of a task that states none."""
_MAX_LENGTH: Final = 2048
"""Context of a model without a length in its configuration."""

K = TypeVar("K")


def main(arguments: list[str]) -> int:
    """Run the task; return the exit code."""
    request = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    hub = datasets.load_dataset

    def load_dataset(path: str, *others: Any, **named: Any) -> Any:
        return hub(request["data"] if "/" in path else path, *others, **named)

    datasets.load_dataset = load_dataset
    task, asked = request["task"], request["model"]
    model: Any = "local-completions"
    options: dict[str, Any] | None = None
    if "model_dir" in asked:
        model = EngineModel(Connection(int(arguments[2])), Path(asked["model_dir"]), asked["batch_size"])
    else:
        options = {
            "base_url": asked["url"],
            "model": asked["model"],
            "tokenizer": asked["tokenizer"],
            "tokenizer_backend": "huggingface",
            "tokenized_requests": False,
            "num_concurrent": asked["num_concurrent"],
            "max_retries": 3,
        }
    report = lm_eval.simple_evaluate(
        model=model, model_args=options, tasks=[task], num_fewshot=_FEWSHOT, limit=request["limit"], log_samples=False
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


class EngineModel(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """An engine's language model, with the tokens and truncation of the harness's ``hf``.

    It sends prompts of one length at a time to the process that holds the engine, longest first.
    """

    def __init__(self, connection: Connection[Any, Any], model_dir: Path, batch_size: int) -> None:
        """Read ``model_dir``; a ``Worker`` at the connection answers commands of up to ``batch_size`` prompts."""
        super().__init__()
        self._connection = connection
        self._batch_size = batch_size
        self.tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
        self._max_length: int = getattr(config, "max_position_embeddings", None) or _MAX_LENGTH
        ends = [self.tokenizer.eos_token_id, config.eos_token_id]
        if (model_dir / "generation_config.json").is_file():
            ends.append(GenerationConfig.from_pretrained(model_dir, local_files_only=True).eos_token_id)
        self._ends = {token for end in ends if end is not None for token in (end if isinstance(end, list) else [end])}

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without a context."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text, by default with its tokenizer's special tokens."""
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **special))

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Refuse: no task needs it."""
        raise NotImplementedError("rolling log-likelihoods")

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return (nats, whether greedy) of each continuation; those that differ in the last token share a prefill."""
        shared: dict[tuple[tuple[int, ...], int], list[int]] = defaultdict(list)
        for place, (_texts, context, continuation) in enumerate(requests):
            tokens = (context + continuation)[-(self._max_length + 1) :][:-1]
            shared[tuple(tokens), len(continuation)].append(place)
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        for batch in self._batches(shared, lambda key: (len(key[0]), key[1])):
            candidates = [[requests[place][2] for place in shared[key]] for key in batch]
            replies = self._request("score", tokens=[key[0] for key in batch], continuations=candidates)
            for key, scores in zip_strict(batch, replies):
                for place, (nats, is_greedy) in zip_strict(shared[key], scores):
                    results[place] = nats, is_greedy
        return results

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Return greedy answers, each up to its first stop. Raises ValueError: a task samples."""
        prompts: list[tuple[list[int], int, tuple[str, ...]]] = []
        for request in requests:
            context, arguments = request.args
            if arguments.get("do_sample") or arguments.get("temperature"):
                raise ValueError("answers are greedy, and the task samples")
            num_tokens = int(arguments.get("max_gen_toks", _MAX_TOKENS))
            tokens = self.tok_encode(context)[-(self._max_length - num_tokens) :]
            prompts.append((tokens, num_tokens, tuple(arguments.get("until", ()))))
        answers = [""] * len(prompts)
        for batch in self._batches(range(len(prompts)), lambda place: (len(prompts[place][0]), *prompts[place][1:])):
            _, num_tokens, until = prompts[batch[0]]
            stops = [[end] for end in self._ends]
            stops += [self.tokenizer.encode(text, add_special_tokens=False) for text in until]
            rows = self._request(
                "answer", tokens=[prompts[place][0] for place in batch], num_tokens=num_tokens, stops=stops
            )
            for place, row in zip_strict(batch, rows):
                end = next((index for index, token in enumerate(row) if token in self._ends), len(row))
                text = str(self.tokenizer.decode(row[:end], skip_special_tokens=True))
                for stop in until:
                    text = text.split(stop)[0]
                answers[place] = text
        return answers

    def _batches(self, keys: Iterable[K], alike: Callable[[K], tuple[Any, ...]]) -> Iterator[list[K]]:
        """Yield batches of keys for which ``alike`` returns the same, those with the greatest values first."""
        groups: dict[tuple[Any, ...], list[K]] = defaultdict(list)
        for key in keys:
            groups[alike(key)].append(key)
        for _, members in sorted(groups.items(), key=lambda group: group[0][0], reverse=True):
            starts = range(0, len(members), self._batch_size)
            yield from (members[start : start + self._batch_size] for start in starts)

    def _request(self, command: str, **values: Any) -> Any:
        self._connection.send_bytes(json.dumps([command, values]).encode())
        return json.loads(self._connection.recv_bytes())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

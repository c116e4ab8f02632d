"""An engine's language model for lm-evaluation-harness, with the tokens and truncation of the harness's ``hf``."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeVar, final

from lm_eval.api.model import TemplateLM
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from accelmark.spec.backports import zip_strict

_MAX_TOKENS: Final = 256
"""Longest answer of a task that states none."""
_MAX_LENGTH: Final = 2048
"""Context of a model without a length in its configuration."""

K = TypeVar("K")


@final
class EngineModel(TemplateLM):  # type: ignore[misc]  # the harness has no types
    """Sends prompts of one length at a time to the process that holds the engine, longest first."""

    def __init__(self, connection: Connection[Any, Any], model_dir: Path, batch_size: int) -> None:
        """Read tokenizer and configuration from a directory in Hugging Face's layout.

        Args:
            connection: takes commands of :class:`accelmark.infer.worker.Worker` and returns their replies.
            batch_size: prompts in a command at most.
        """
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
        token: int = self.tokenizer.eos_token_id
        return token

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without a context."""
        begin: int | None = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Return the tokens of a text, by default with its tokenizer's special tokens."""
        special = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        tokens: list[int] = self.tokenizer.encode(string, **special)
        return tokens

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        """Refuse: no task needs it."""
        raise NotImplementedError("rolling log-likelihoods")

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-likelihood in nats, whether it is the greedy one) of each continuation.

        Continuations of one context that differ in their last token only share a prefill.
        """
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
            num_tokens = _num_tokens(arguments)
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


def _num_tokens(arguments: Mapping[str, Any]) -> int:
    """Return the longest answer in tokens, after checking that the task wants the greedy one."""
    if arguments.get("do_sample") or arguments.get("temperature"):
        raise ValueError("answers are greedy, and the task samples")
    return int(arguments.get("max_gen_toks", _MAX_TOKENS))

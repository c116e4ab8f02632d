"""The load of a run: the served model, prompts, times at which requests are due, stages, and the search of rates."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count, islice
from pathlib import Path
from typing import Any, Final, NamedTuple, Optional

import numpy as np
from pydantic import NonNegativeFloat, PositiveInt, model_validator

from accelmark.results.rounds.load import Requests, measured_stage
from accelmark.serving.request import Load, Message, PlannedRequest
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import DataError, raising
from accelmark.spec.job import JobSpec
from accelmark.spec.log.inference import LoadStage
from accelmark.spec.model import Spec
from accelmark.spec.plugins.catalog import folder_module
from accelmark.spec.settings.inference import BENCHMARK_DATA
from accelmark.spec.settings.serving import Arrival, Lengths, PromptSettings, ServeSettings

Encode = Callable[[str], Sequence[int]]
Decode = Callable[[list[int]], str]

_TRIES: Final = 200
"""Windows that are drawn before the text is found too short for another prompt."""
_MOST_END: Final = 8
"""Most tokens at the end of a prompt that come from a second place in the text."""


class ServedModel:
    """The model that a case serves; ``directory`` is None where the case has no weights (an endpoint)."""

    def __init__(self, job: JobSpec, work_dir: Path) -> None:
        """Find the given weights, or let the case write its own. Raises DataError: the tokenizer cannot be read."""
        self._job = job
        self._module: Any = folder_module(job.case, "serve") if (job.case.path / "serve.py").is_file() else None
        self.directory = job.data_dirs.get("weights")
        if self.directory is None and self._module is not None:
            self.directory = work_dir / "model"
            self.directory.mkdir(exist_ok=True)
            self._module.write_model(self.directory)
        file = None if self.directory is None else self.directory / "tokenizer.json"
        self.tokens: Callable[[str], list[int]] | None = None
        """Function from a text to its tokens, without special ones; like the others None without a tokenizer."""
        self.input_tokens: Callable[[str], list[int]] | None = None
        """Function from a prompt to the tokens that the model computes, with the special ones of its tokenizer."""
        self.text: Callable[[list[int]], str] | None = None
        """Function from tokens to their text."""
        if file is not None and file.is_file():
            from tokenizers import Tokenizer

            with raising(DataError, f"{file}: not a tokenizer", Exception):
                tokenizer = Tokenizer.from_file(str(file))
            self.tokens = lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)
            self.input_tokens = lambda text: list(tokenizer.encode(text).ids)
            self.text = tokenizer.decode

    def prompt_text(self) -> str:
        """Return the text from which prompts are taken. Raises DataError: there is none."""
        dirs = {name: path for name, path in self._job.data_dirs.items() if name not in ("weights", *BENCHMARK_DATA)}
        if self._module is not None:
            return str(self._module.prompt_text(dirs))
        files = sorted(path for place in dirs.values() for path in place.rglob("*") if path.suffix in (".md", ".txt"))
        if not files:
            raise DataError(f"the case {self._job.case.name} has no text for prompts: set prompts.source and file")
        return "\n".join(file.read_text(encoding="utf-8") for file in files)

    def sha256(self, report: Callable[[], None]) -> str | None:
        """Hash the model's files with their names; call ``report`` every second, since large files take minutes."""
        if self.directory is None:
            return None
        whole, told_s = hashlib.sha256(), time.monotonic()
        for file in sorted(path for path in self.directory.rglob("*") if path.is_file()):
            whole.update(file.relative_to(self.directory).as_posix().encode() + b"\0")
            with file.open("rb") as stream:
                while block := stream.read(1 << 20):
                    whole.update(block)
                    if (now_s := time.monotonic()) - told_s > 1.0:
                        told_s = now_s
                        report()
        return whole.hexdigest()


def open_prompts(settings: PromptSettings, model: ServedModel, api: str, seed: int) -> TextPrompts | FilePrompts:
    """Return the source of prompts that the settings name. Raises DataError: a file, line or entry cannot be used."""
    rng = np.random.default_rng((seed, 1))
    if settings.source == "text":
        text = read_text(Path(settings.file)) if settings.file is not None else model.prompt_text()
        return TextPrompts(settings, model, text, rng)
    file = Path(str(settings.file))
    if settings.source == "jsonl":
        return FilePrompts(settings, _read_jsonl(file, api, model.tokens), rng)
    entries = _read_sharegpt(file, settings.input, model.tokens)
    rng.shuffle(entries)
    return FilePrompts(settings, entries, rng)


def draw_length(lengths: Lengths, rng: np.random.Generator, most: int | None = None) -> int:
    """Return a number of tokens, at least 1 and at most ``most``.

    ``lognormal`` has the mean and standard deviation of ``lengths`` before it is cut: mu = ln(mean) - sigma²/2 and
    sigma² = ln(1 + stdev²/mean²).
    """
    if lengths.distribution == "fixed":
        drawn = lengths.mean
    elif lengths.distribution == "uniform":
        drawn = int(rng.integers(lengths.min or 1, lengths.max or lengths.mean, endpoint=True))
    else:
        variance = math.log1p((lengths.stdev / lengths.mean) ** 2)
        drawn = round(rng.lognormal(math.log(lengths.mean) - variance / 2, math.sqrt(variance)))
    drawn = max(drawn, lengths.min or 1)
    return min(limit for limit in (drawn, lengths.max, most) if limit is not None)


class TextPrompts:
    """Windows of a text, at random places; with a tokenizer each has exactly the drawn number of tokens.

    The last tokens of a prompt come from another place: the answers to all windows of a text could have been stored.
    Where tokens at the cut merge, so that no window at a place has that number, another place is drawn. Without a
    tokenizer, words take the place of tokens.
    """

    num_left: Final = None

    def __init__(self, settings: PromptSettings, model: ServedModel, text: str, rng: np.random.Generator) -> None:
        self._settings = settings
        self._rng = rng
        self._counts = model.tokens is not None
        self._encode: Callable[[str], Sequence[Any]] = model.tokens or str.split
        self._decode: Callable[[list[Any]], str] = model.text or (lambda words: " " + " ".join(words))
        self._tokens = list(self._encode(text))
        self._used: set[int] = set()
        """Hashes of the prompts that were drawn: long prompts of many requests would fill the memory."""
        self._num_drawn = 0
        lengths = settings.input
        longest = lengths.mean if lengths.distribution == "fixed" else lengths.max
        needed = longest or lengths.min or 1
        if len(self._tokens) < max(needed, settings.shared_prefix_tokens) + 1:
            problem = f"the text has {len(self._tokens)} tokens, prompts.input needs more than {needed}"
            raise DataError(f"prompts: {problem}: set a shorter input, or prompts.file to a longer text")
        self._prefixes = [""]
        if settings.shared_prefix_tokens:
            self._prefixes = [self._window(settings.shared_prefix_tokens, "") for _ in range(settings.num_prefixes)]

    def draw(self, input_tokens: int | None = None, output_tokens: int | None = None) -> PlannedRequest:
        """Return a request with a prompt that was not drawn before; its place in a stage is left open."""
        most = len(self._tokens) - 1
        length = min(input_tokens or draw_length(self._settings.input, self._rng, most), most)
        content = self._window(length, self._prefixes[int(self._rng.integers(len(self._prefixes)))])
        if not self._counts:
            content = content.lstrip()  # words are joined by a space before each
        self._num_drawn += 1
        requested = output_tokens or draw_length(self._settings.output, self._rng)
        counted = length if self._counts else None
        return PlannedRequest(0, self._num_drawn - 1, content, requested, input_tokens=counted)

    def _window(self, length: int, prefix: str) -> str:
        """Return a text of ``length`` tokens that begins with ``prefix`` and was not used before."""
        repeated = ""
        num_prefix = self._settings.shared_prefix_tokens if prefix else 0
        num_new = length - num_prefix
        lengths = (length - min(_MOST_END, num_new // 4), length) if num_new >= 4 else (length,)
        for _ in range(_TRIES):
            text: str | None = prefix
            for num_before, num_tokens in zip_strict((num_prefix, *lengths[:-1]), lengths):
                begin = int(self._rng.integers(len(self._tokens) - length + 1))
                text = None if text is None else self._extended(text, num_before, num_tokens, begin)
            if text is None:
                continue
            if hash(text) not in self._used:
                self._used.add(hash(text))
                return text
            repeated = text
        if repeated and self._settings.repeat:
            return repeated
        why = "all windows that were drawn are in use already" if repeated else "no window has exactly that length"
        remedy = "set a longer text (prompts.file), another prompts.input, or prompts.repeat: true"
        raise DataError(f"prompts: no further prompt of {length} tokens in the text: {why}; {remedy}")

    def _extended(self, prefix: str, num_prefix: int, length: int, begin: int) -> str | None:
        """Return ``prefix`` and tokens from ``begin``, ``length`` in all; None where that is not possible."""
        num_taken = max(1, length - num_prefix)
        for _ in range(8):
            text = prefix + self._decode(self._tokens[begin : begin + num_taken])
            if "\N{REPLACEMENT CHARACTER}" in text:  # begins or ends within a character
                return None
            excess = len(self._encode(text)) - length
            if excess == 0:
                return text
            num_taken -= excess
            if num_taken < 1 or begin + num_taken > len(self._tokens):
                return None
        return None


class _Entry(NamedTuple):
    content: str | tuple[Message, ...]
    output_tokens: int | None
    input_tokens: int | None


class FilePrompts:
    """Prompts of a file, in their order."""

    def __init__(self, settings: PromptSettings, entries: Sequence[_Entry], rng: np.random.Generator) -> None:
        self._settings = settings
        self._entries = entries
        places: dict[str, int] = {}
        self._numbers = [places.setdefault(json.dumps(entry.content), place) for place, entry in enumerate(entries)]
        """Number of each entry's prompt: the number of the first entry with the same content."""
        self._rng = rng
        self._next = 0

    @property
    def num_left(self) -> int | None:
        """Prompts that were not used; None if they may be repeated."""
        return None if self._settings.repeat else len(self._entries) - self._next

    def draw(self, input_tokens: int | None = None, output_tokens: int | None = None) -> PlannedRequest:
        """Return a request with the next prompt, whose own length of the answer counts before the given one."""
        if self._next >= len(self._entries) and not self._settings.repeat:
            remedy = "give more, shorten the load (max_requests, duration_s), or set prompts.repeat: true"
            raise DataError(f"{self._settings.file}: all of its {len(self._entries)} prompts were used; {remedy}")
        place = self._next % len(self._entries)
        self._next += 1
        entry = self._entries[place]
        requested = entry.output_tokens or output_tokens or draw_length(self._settings.output, self._rng)
        return PlannedRequest(0, self._numbers[place], entry.content, requested, input_tokens=entry.input_tokens)


class _Message(Spec):
    role: str
    content: str


class _PromptLine(Spec):
    prompt: str | None = None
    messages: tuple[_Message, ...] = ()
    output_tokens: PositiveInt | None = None

    @model_validator(mode="after")
    def _one(self) -> _PromptLine:
        if bool(self.prompt) == bool(self.messages):
            raise ValueError("needs either prompt or messages")
        return self


def _read_jsonl(file: Path, api: str, encode: Encode | None) -> list[_Entry]:
    entries = []
    for number, text in numbered_lines(file):
        with raising(DataError, f"{file}:{number}", ValueError):
            line = _PromptLine.model_validate(json.loads(text))
        if line.messages and api != "chat":
            raise DataError(f"{file}:{number}: has messages, which need api: chat")
        content = line.prompt or tuple(message.model_dump() for message in line.messages)
        num_tokens = len(encode(line.prompt)) if encode and line.prompt else None
        entries.append(_Entry(content, line.output_tokens, num_tokens))
    if not entries:
        raise DataError(f"{file}: has no prompts")
    return entries


def _read_sharegpt(file: Path, lengths: Lengths, encode: Encode | None) -> list[_Entry]:
    """Return the first question of each conversation with the length of its answer.

    Left out, as in vLLM's benchmark: conversations that begin otherwise, and questions outside of ``lengths``.
    """
    with raising(DataError, f"{file}: not JSON", ValueError):
        conversations: Any = json.loads(read_text(file))
    if not isinstance(conversations, list):
        raise DataError(f"{file}: is not a list of conversations")
    entries = []
    for number, conversation in enumerate(conversations):
        with raising(DataError, f"{file}: entry {number}: not a conversation", LookupError, TypeError, AttributeError):
            turns = [(turn.get("from"), turn["value"] + "") for turn in conversation["conversations"][:2]]  # texts only
        if len(turns) < 2 or turns[0][0] not in ("human", "user"):
            continue
        (_, question), (_, answer) = turns
        if not question or not answer:
            continue
        num_question, num_answer = (len(encode(text)) if encode else None for text in (question, answer))
        if num_question is None or (lengths.min or 1) <= num_question <= (lengths.max or num_question):
            entries.append(_Entry(question, num_answer, num_question))
    if not entries:
        raise DataError(f"{file}: no conversation begins with a question within prompts.input.min and max")
    return entries


def numbered_lines(file: Path) -> list[tuple[int, str]]:
    """Return the lines that are not empty, with their numbers from 1. Raises DataError: they cannot be read."""
    return [(number, text) for number, text in enumerate(read_text(file).splitlines(), 1) if text.strip()]


def read_text(file: Path) -> str:
    """Return the content of a file. Raises DataError: it cannot be read as UTF-8."""
    with raising(DataError, f"{file}: cannot be read", OSError, UnicodeDecodeError):
        return file.expanduser().read_text(encoding="utf-8")


class _TraceLine(Spec):
    timestamp: NonNegativeFloat
    input_tokens: PositiveInt | None = None
    output_tokens: PositiveInt | None = None


class Due(NamedTuple):
    """When a request is due, and its entry in a trace; a tuple, since a stage may have millions."""

    timestamp: float
    """Seconds from the beginning of the stage."""
    input_tokens: int | None = None
    output_tokens: int | None = None


def due_times(
    arrival: Arrival, rate: float, duration_s: float, burstiness: float, rng: np.random.Generator
) -> list[Due]:
    """Return the times in ``duration_s`` at ``rate`` requests per second.

    ``constant``: one every 1/rate from 0 on. ``poisson``: gaps are exponential. ``gamma``: gaps have a gamma
    distribution with shape ``burstiness`` and mean 1/rate, so that their coefficient of variation is
    1/sqrt(burstiness); shape 1 is Poisson.
    """
    if arrival == "constant":
        return [Due(timestamp=number / rate) for number in range(int(np.ceil(duration_s * rate)))]
    shape = burstiness if arrival == "gamma" else 1.0
    times: list[float] = []
    last_s = 0.0
    while last_s < duration_s:
        drawn = last_s + np.cumsum(rng.gamma(shape, 1 / (rate * shape), 1024))
        times.extend(drawn.tolist())
        last_s = times[-1]
    return [Due(timestamp=at_s) for at_s in times if at_s < duration_s]


def read_trace(file: Path, duration_s: float) -> list[Due]:
    """Return the requests of a trace that are due within ``duration_s`` of its first.

    A line is a JSON object with ``timestamp`` (s), in ascending order, and optionally ``input_tokens`` and
    ``output_tokens``. Raises DataError: a line is not, or all requests but the first are due later.
    """
    lines: list[_TraceLine] = []
    for number, text in numbered_lines(file):
        with raising(DataError, f"{file}:{number}", ValueError):
            lines.append(_TraceLine.model_validate(json.loads(text)))
        if len(lines) > 1 and lines[-1].timestamp < lines[-2].timestamp:
            raise DataError(f"{file}:{number}: timestamp {lines[-1].timestamp:g} is before that of the line before")
    if not lines:
        raise DataError(f"{file}: has no requests")
    begin_s = lines[0].timestamp
    due = (Due(line.timestamp - begin_s, line.input_tokens, line.output_tokens) for line in lines)
    in_stage = [arrival for arrival in due if arrival.timestamp < duration_s]
    if len(in_stage) == 1 < len(lines):
        problem = f"only the first of {len(lines)} requests is due within {duration_s:g} s (load.duration_s)"
        raise DataError(f"{file}: {problem}; timestamp is in seconds")
    return in_stage


MAX_STEPS: Final = 14
EXPECTED_STEPS: Final = 6
"""Steps of a search whose first rate holds and second rate does not, or the other way round."""
PRECISION: Final = 0.05
"""Relative distance of the highest rate that holds from the lowest that does not, at which the search ends."""

FIRST_SHARE: Final = 0.5
"""First rate of a search as a share of the highest rate of answers in the stages before."""


def search_rate(
    holds: Callable[[float, int], bool],
    first: float,
    least: float = 0.0,
    max_steps: int = MAX_STEPS,
    held: float | None = None,
) -> float | None:
    """Search from ``first``: double (or halve) until the answer changes, then bisect in the logarithm.

    ``holds`` gets a rate, and how many further steps are likely. No rate is tried below ``least``. ``held`` is a rate
    that is known to hold: the search begins at twice it. Returns the highest rate that holds, None if none does.
    """
    rate = held
    failed: float | None = None
    tried = first if held is None else 2 * held
    for step in range(1, max_steps + 1):
        if holds(tried, max(min(EXPECTED_STEPS, max_steps) - step, 0)):
            rate = tried
        else:
            failed = tried
        if failed is None:
            tried = 2 * tried
        elif rate is None:
            tried = tried / 2
            if tried < least:
                break
        elif failed <= rate * (1 + PRECISION):
            break
        else:
            tried = math.sqrt(rate * failed)
    return rate


RunStage = Callable[[Load, Iterable[PlannedRequest]], tuple[LoadStage, Requests]]
"""Runs one stage; returns it with its requests."""

Pair = Optional[tuple[int, int]]
"""Lengths of the prompts and answers of a stage; None: as the settings of prompts state them."""

_WARMUP_CONCURRENCY: Final = 4
_MIN_REQUESTS: Final = 10
"""Requests that a step of the search has on average at least; fewer do not show whether an objective is met."""


class LoadPlan:
    """The load of a run, drawn from a seed that the server or engine, in another process, does not know."""

    def __init__(self, settings: ServeSettings, model: ServedModel) -> None:
        """Read the files that the settings name. Raises DataError: one cannot be used, or has too few prompts."""
        self._settings = settings
        self.seed = secrets.randbits(63) if settings.seed is None else settings.seed
        self._prompts = open_prompts(settings.prompts, model, settings.api, self.seed)
        self._lengths: Sequence[Pair] = settings.load.lengths or (None,)
        load = settings.load
        self._open: list[tuple[float | None, list[Due]]] = []
        if load.arrival == "trace":
            self._open = [(None, read_trace(Path(str(load.trace)), load.duration_s)[: load.max_requests])]
        elif load.arrival != "closed":
            self._open = [(rate, self._drawn(load.arrival, rate)) for rate in load.rates]
        self._num_stages = 0
        self.answered_rate = 0.0
        """Highest rate of answers in the stages so far, in requests per second."""
        self._held: float | None = None
        """Highest rate of the stages so far that held the objective, with the lengths of the search."""
        is_closed, num_lengths = load.arrival == "closed", len(self._lengths)
        num_stages = num_lengths * (len(load.concurrency) if is_closed else len(self._open))
        num_stages += EXPECTED_STEPS if load.search else 0
        num_scenarios = sum(EXPECTED_STEPS if name == "server" else 1 for name in settings.scenarios)
        self.left_s = load.duration_s * num_stages + settings.scenario_duration_s * num_scenarios
        """Planned duration of the stages and scenarios that have not begun, without warm-up."""
        needed = load.warmup_requests + num_lengths * sum(len(due) for _, due in self._open)
        if is_closed:
            needed += num_lengths * sum(min(slots, load.max_requests or slots) for slots in load.concurrency)
        if (left := self._prompts.num_left) is not None and left < needed:
            remedy = "give more, shorten the load (max_requests, duration_s), or set prompts.repeat: true"
            raise DataError(f"{settings.prompts.file}: has {left} prompts, the load needs {needed}; {remedy}")

    def run(self, run_stage: RunStage) -> None:
        """Run all stages."""
        load, timeout_s = self._settings.load, self._settings.request_timeout_s
        if load.warmup_requests:
            concurrency = min(_WARMUP_CONCURRENCY, load.warmup_requests)
            warmup = Load(stage=-1, until_s=timeout_s, timeout_s=timeout_s, concurrency=concurrency)
            run_stage(warmup, islice(self._requests(None, self._lengths[0]), load.warmup_requests))
        for pair in self._lengths:
            for concurrency in load.concurrency if load.arrival == "closed" else ():
                later_s = self.begin(load.duration_s)
                self._run(run_stage, None, pair, concurrency=concurrency, later_s=later_s)
            for rate, due in self._open:
                later_s = self.begin(load.duration_s)
                done = self._run(run_stage, due, pair, arrival=load.arrival, rate=rate, later_s=later_s)
                if load.search and rate is not None and pair == self._lengths[0] and self._holds(*done):
                    self._held = max(rate, self._held or 0.0)
        if load.search:
            self._search(run_stage)

    def _search(self, run_stage: RunStage) -> None:
        load = self._settings.load
        arrival: Arrival = load.arrival if load.arrival in ("constant", "gamma") else "poisson"
        later_s = self.begin(EXPECTED_STEPS * load.duration_s)

        def holds(rate: float, steps_left: int) -> bool:
            due = self._drawn(arrival, rate)
            left_s = later_s + steps_left * load.duration_s
            named = {"arrival": arrival, "rate": rate, "later_s": left_s, "is_search": True}
            return self._holds(*self._run(run_stage, due, self._lengths[0], **named))

        least = _MIN_REQUESTS / load.duration_s
        search_rate(holds, max(FIRST_SHARE * self.answered_rate, least), least, held=self._held)

    def _holds(self, stage: LoadStage, requests: Requests) -> bool:
        return measured_stage(requests, stage, self._settings, 1, None).holds_slo is True

    def _run(
        self, run_stage: RunStage, due: Sequence[Due] | None, pair: Pair, **kind: Any
    ) -> tuple[LoadStage, Requests]:
        load = self._settings.load
        input_tokens, output_tokens = pair or (None, None)
        stage = Load(
            stage=self.next_stage(),
            until_s=load.duration_s,
            timeout_s=self._settings.request_timeout_s,
            input_tokens=input_tokens,
            output_tokens=output_tokens,
            **kind,
        )
        done, requests = run_stage(stage, islice(self._requests(due, pair), load.max_requests))
        if not stage.is_search and done.duration_s > 0 and math.isfinite(done.duration_s):
            self.answered_rate = max(self.answered_rate, int(requests.is_ok.sum()) / done.duration_s)
        return done, requests

    def fresh_requests(self) -> Iterator[PlannedRequest]:
        """Yield requests without an end, with prompts that no other request has."""
        return self._requests(None, self._lengths[0])

    def begin(self, duration_s: float) -> float:
        """Take stages of this duration from those that have not begun; return the duration of the others."""
        self.left_s = max(0.0, self.left_s - duration_s)
        return self.left_s

    def next_stage(self) -> int:
        """Return the number of the next stage."""
        self._num_stages += 1
        return self._num_stages - 1

    def _requests(self, due: Sequence[Due] | None, pair: Pair) -> Iterator[PlannedRequest]:
        """Yield the requests at the given times, or requests of a closed loop without end."""
        input_tokens, output_tokens = pair or (None, None)
        for number in count() if due is None else range(len(due)):
            at = Due(timestamp=0.0) if due is None else due[number]
            drawn = self._prompts.draw(at.input_tokens or input_tokens, at.output_tokens or output_tokens)
            yield drawn._replace(number=number, due_s=None if due is None else at.timestamp)

    def _drawn(self, arrival: Arrival, rate: float) -> list[Due]:
        """Return the times of a stage; the same rate has the same times, so that stages can be compared."""
        load = self._settings.load
        rng = np.random.default_rng((self.seed, 2, round(rate * 1e6)))
        return due_times(arrival, rate, load.duration_s, load.burstiness, rng)[: load.max_requests]

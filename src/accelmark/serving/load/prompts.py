"""Prompts of a run: windows of a text, JSON lines, or conversations in ShareGPT's layout."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np
from pydantic import PositiveInt, model_validator

from accelmark.serving.model import ServedModel
from accelmark.serving.request import Message
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import DataError, raising
from accelmark.spec.model import Spec
from accelmark.spec.settings.serving import Lengths, PromptSettings

Encode = Callable[[str], Sequence[int]]
Decode = Callable[[list[int]], str]

_TRIES: Final = 200
"""Windows that are drawn before the text is found too short for another prompt."""
_MOST_END: Final = 8
"""Most tokens at the end of a prompt that come from a second place in the text."""


class Prompt(NamedTuple):
    """A prompt with its number, and the requested length of its answer."""

    prompt: int
    content: str | tuple[Message, ...]
    input_tokens: int | None
    """None without a tokenizer, and for messages, whose template is the server's."""
    requested_tokens: int


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


@final
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

    def draw(self, input_tokens: int | None = None, output_tokens: int | None = None) -> Prompt:
        """Return a prompt that was not drawn before."""
        most = len(self._tokens) - 1
        length = min(input_tokens or draw_length(self._settings.input, self._rng, most), most)
        content = self._window(length, self._prefixes[int(self._rng.integers(len(self._prefixes)))])
        if not self._counts:
            content = content.lstrip()  # words are joined by a space before each
        self._num_drawn += 1
        requested = output_tokens or draw_length(self._settings.output, self._rng)
        return Prompt(self._num_drawn - 1, content, length if self._counts else None, requested)

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


@final
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

    def draw(self, input_tokens: int | None = None, output_tokens: int | None = None) -> Prompt:
        """Return the next prompt; its own length of the answer counts before the given one."""
        if self._next >= len(self._entries) and not self._settings.repeat:
            remedy = "give more, shorten the load (max_requests, duration_s), or set prompts.repeat: true"
            raise DataError(f"{self._settings.file}: all of its {len(self._entries)} prompts were used; {remedy}")
        place = self._next % len(self._entries)
        self._next += 1
        entry = self._entries[place]
        requested = entry.output_tokens or output_tokens or draw_length(self._settings.output, self._rng)
        return Prompt(self._numbers[place], entry.content, entry.input_tokens, requested)


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
        entries.append(
            _Entry(content, line.output_tokens, len(encode(line.prompt)) if encode and line.prompt else None)
        )
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

"""SAMSum (Gliwa et al. 2019, arXiv:1911.12237): dialogues and their summaries as packed tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from accelmark.spec.errors import DataError, first_line

_PROMPT: Final = "Summarize this dialog:\n{dialogue}\n---\nSummary:\n{summary}</s>"


def packed_rows(file: Path, tokenizer_file: Path, length: int) -> Tensor:
    """Return all dialogues with their summaries, one after another, in rows of ``length`` tokens without padding.

    The tokens that fill no row are left out. Shape (rows, length), int32.

    Raises:
        DataError: a file is missing or has another layout, or there are too few tokens.
    """
    from tokenizers import Tokenizer

    try:
        dialogues = json.loads(file.read_text(encoding="utf-8"))
        texts = [_PROMPT.format(dialogue=entry["dialogue"], summary=entry["summary"]) for entry in dialogues]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: is no part of SAMSum, a list of dialogues with summaries: {error!r}") from error
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_file))
    except Exception as error:  # tokenizers raises this class itself
        raise DataError(f"{tokenizer_file}: is no tokenizer: {first_line(error)}") from error
    tokens = torch.tensor(
        [token for encoded in tokenizer.encode_batch(texts) for token in encoded.ids], dtype=torch.int32
    )
    if len(tokens) < length:
        raise DataError(f"{file}: has {len(tokens)} tokens, less than a row of {length}")
    return tokens[: len(tokens) // length * length].view(-1, length)

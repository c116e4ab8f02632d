"""FlagPerf's dialogues for CPM as tokens: lines of text in rows of 201 tokens, and the published weights."""

from __future__ import annotations

from array import array
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from accelmark.datasets.prepare.preparation import Archive, Archives, Part, Preparation
from accelmark.spec.errors import DataError

TOKENIZER: Final = "chinese_vocab.model"
CHECKPOINT: Final = "cpm_model_states_medium.pt"
TEXTS: Final = {
    "train": Archive("train.txt", "65bdbb2b3a8d3b61dbe63ea1a67eec62"),
    "val": Archive("valid.txt", "b7d8356e0d921b512f9b6860138f2174"),
}
"""With the MD5 sums that FlagPerf's loader compares (``training/benchmarks/cpm/pytorch/dataloaders/dataloader.py``)."""
_ROW: Final = 201
_PIECES: Final = str.maketrans(" \n", "\u2582\u2583")
"""Characters of the vocabulary for a space and the end of a line."""


def _write(split: str, archives: Archives, folder: Path) -> None:
    """Write ``tokens.npy``: each line's tokens and its end, cut into rows; the last row is padded."""
    import jieba
    from sentencepiece import SentencePieceProcessor

    tokenizer: Any = SentencePieceProcessor(model_file=str(archives.paths[TOKENIZER]))
    end, pad = (tokenizer.piece_to_id(piece) for piece in ("<eod>", "<pad>"))
    path, tokens = archives.paths[TEXTS[split].name], array("H")
    try:
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                words = " ".join(word.translate(_PIECES) for word in jieba.cut(line))
                tokens.extend([*tokenizer.encode(words), end])
                tokens.extend([pad] * (-len(tokens) % _ROW))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: is not UTF-8: {error}") from error
    np.save(folder / "tokens.npy", np.frombuffer(tokens, np.uint16))


PREPARATION: Final = Preparation(
    archives=(*TEXTS.values(), Archive(TOKENIZER, None), Archive(CHECKPOINT, None)),
    parts={
        **{split: Part((text.name, TOKENIZER), partial(_write, split)) for split, text in TEXTS.items()},
        "initial": Part((CHECKPOINT,), lambda archives, folder: archives.place(CHECKPOINT, folder)),
    },
    requires=("accelmark[chinese]",),
)

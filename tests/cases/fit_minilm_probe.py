"""Fit the linear probe on embeddings of passages that inference does not use, and save it to a file.

Run ``python -m tests.cases.fit_minilm_probe PLAYS_DIR MINILM_DIR``.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import save_file
from torch import Tensor

from accelmark.cases.minilm.infer_pytorch import PROBE
from accelmark.cases.minilm_finetune.pytorch import KINDS
from tests.cases.infer_of import built

RECORD: Final = PROBE.with_suffix(".json")
_NUM_PASSAGES: Final = 3000
_L2: Final = 1e-3


def fit(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a logistic regression with an L2 penalty, by L-BFGS in double precision."""
    inputs = embeddings.double()
    weight = torch.zeros(len(KINDS), inputs.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(len(KINDS), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=500, tolerance_grad=1e-9, line_search_fn="strong_wolfe")

    def loss() -> float:
        optimizer.zero_grad()
        value = F.cross_entropy(inputs @ weight.T + bias, labels) + _L2 * weight.square().sum() / 2
        value.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        return float(value.detach())

    optimizer.step(loss)  # type: ignore[no-untyped-call]
    return weight.detach().float(), bias.detach().float()


def main(arguments: list[str]) -> None:
    """Fit the probe and write it with its record."""
    plays, encoder = map(Path, arguments)
    case: Any = built("minilm", Path.cwd(), {"shakespeare": plays, "minilm": encoder})
    tokens, mask, labels = case._passages(held_out=False, limit=_NUM_PASSAGES)
    model = case.create_model().eval()
    with torch.inference_mode():
        batches = zip(torch.split(tokens, 100), torch.split(mask, 100), strict=True)
        parts = [model(*batch) for batch in batches]
    weight, bias = fit(torch.cat(parts).clone(), labels)
    save_file({"weight": weight, "bias": bias}, PROBE)
    right = ((torch.cat(parts) @ weight.T + bias).argmax(1) == labels).float().mean()
    record = {
        "what": "logistic regression on embeddings of all-MiniLM-L6-v2 (packaged weights), classes " + ", ".join(KINDS),
        "passages": len(labels),
        "chosen_by": "lowest SHA-256 of the text among all acts but IV",
        "l2": _L2,
        "training_accuracy": round(float(right), 4),
        "framework": f"pytorch {torch.__version__}",
        "sha256": hashlib.sha256(PROBE.read_bytes()).hexdigest(),
    }
    RECORD.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

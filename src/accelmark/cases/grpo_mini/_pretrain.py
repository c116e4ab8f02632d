"""Train the initial policy on written-out additions until it solves about half of the held-out ones.

``python -m accelmark.cases.grpo_mini._pretrain CASE_DIR`` writes ``weights.safetensors``.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812

from accelmark.cases.grpo_mini._additions import ANSWER_LENGTH, additions
from accelmark.cases.grpo_mini.pytorch import WEIGHTS, policy

_STEPS: Final = 450
_BATCH: Final = 128
_RATE: Final = 2e-3


def main() -> None:
    """Train for a fixed number of steps with the answers' cross entropy, on one thread."""
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, data = policy(), additions(held_out=False)
    texts = torch.cat((data["prompt"], data["answer"]), 1).long()
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE, weight_decay=0.1)
    for step in range(_STEPS):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / 50)
        tokens = texts[torch.randint(len(texts), (_BATCH,))]
        logits = model(tokens[:, :-1])[:, -ANSWER_LENGTH:]
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, -ANSWER_LENGTH:].flatten())
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        optimizer.step()
    save_file(model.state_dict(), Path(sys.argv[1]) / WEIGHTS.name)


if __name__ == "__main__":
    main()

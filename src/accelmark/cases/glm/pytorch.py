"""GLM-Large fine-tuned on ReCoRD in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model

from accelmark.cases.glm._choices import Choices
from accelmark.frameworks.pytorch.batches import FromArrays, TaskFamily, generator_for
from accelmark.frameworks.pytorch.case import Batch
from accelmark.frameworks.pytorch.model.pretrained import gpt2_config, load_megatron_gpt2
from accelmark.spec.errors import DataError
from accelmark.tasks.metrics import IGNORED

_BLOCKS: Final = {"transformer.block_position_embeddings.weight": "blocks.weight"}


class Glm(nn.Module):
    """GLM (Du et al. 2022, arXiv:2103.10360): GPT-2 with positions in two dimensions, and a prefix that sees itself."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.net = GPT2Model(config)
        self.blocks = nn.Embedding(config.n_positions, config.n_embd)
        nn.init.normal_(self.blocks.weight, std=config.initializer_range)

    def forward(self, tokens: Tensor, positions: Tensor, separators: Tensor, places: Tensor, targets: Tensor) -> Tensor:
        """Return the sum of the targets' log probabilities of each sequence.

        ``tokens`` of shape (sequences, length), ``positions`` (sequences, 2, length), ``separators`` (sequences,),
        ``places`` and ``targets`` (sequences, targets).
        """
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        sees = (steps <= steps[:, None]) | (steps < separators[:, None, None])
        embedded = self.net.wte(tokens) + self.blocks(positions[:, 1])
        found = self.net(
            inputs_embeds=embedded, position_ids=positions[:, 0], attention_mask=sees[:, None], use_cache=False
        )
        hidden: Tensor = found.last_hidden_state
        picked = hidden.gather(1, places[..., None].expand(-1, -1, hidden.shape[-1]))
        logits = F.linear(picked, self.net.wte.weight.to(picked.dtype)).float()
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
        return -losses.view(targets.shape).sum(1)


class Case(TaskFamily):
    """The choice whose tokens are the likeliest answers a query; in training the first choice is the answer."""

    block_class = "GPT2Block"

    def build_model(self) -> nn.Module:
        """Build GLM-Large with the published weights; synthetic data goes with random ones."""
        names = {"num_layers": "n_layer", "num_heads": "n_head", "hidden_size": "n_embd"}
        model = Glm(gpt2_config(**self.dimensions(**names), n_positions=self.number("seq_length") + 1))
        if "glm_record" in self.data_dirs and torch.get_default_device().type != "meta":
            load_megatron_gpt2(
                model, _only(self.data_dirs["glm_record"] / "blocklm-large-blank" / "200000", "*.pt"), _BLOCKS
            )
        return model

    def dataset(self, *, train: bool) -> FromArrays:
        """Return the queries of a split; those of training have at most ``num_choices`` choices."""
        split = "train" if train else "eval"
        folder = self.data_dirs["glm_record"] / "ReCoRD" / "glm_train_eval_hdf5_sparse" / f"{split}_hdf5"
        choices = self.number("num_choices") if train else None
        length, targets = self.number("seq_length"), self.number("target_length")
        return FromArrays(Choices(_only(folder, "*.hdf5"), length, targets, choices))

    def synthetic_batch(self, size: int) -> Batch:
        """Return random sequences."""
        length, vocabulary, random = (
            self.number("seq_length"),
            self.number("vocab_size"),
            generator_for(self.place.seed),
        )
        choices, targets = (size, self.number("num_choices")), self.number("target_length")
        return {
            "tokens": torch.randint(0, vocabulary, (*choices, length), generator=random),
            "positions": torch.arange(length).expand(*choices, 2, length).clone(),
            "separators": torch.full(choices, length // 2),
            "places": torch.randint(0, length, (*choices, targets), generator=random),
            "targets": torch.randint(0, vocabulary, (*choices, targets), generator=random),
            "is_choice": torch.ones(choices, dtype=torch.bool),
        }

    def _scores(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the score of each choice of each query."""
        names = ("tokens", "positions", "separators", "places", "targets")
        scores: Tensor = model(*(batch[name].flatten(0, 1) for name in names))
        return scores.view(batch["is_choice"].shape).masked_fill(~batch["is_choice"], -1e4)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy of the first choice among all."""
        scores = self._scores(model, batch)
        return F.cross_entropy(scores, torch.zeros_like(batch["separators"][:, 0]))

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Count the queries whose likeliest choice is an answer."""
        best = self._scores(model, batch).argmax(1)
        answers = batch["is_answer"] if "is_answer" in batch else torch.zeros_like(batch["is_choice"])
        return {"correct": answers.gather(1, best[:, None]).sum(), "count": torch.ones_like(best).sum()}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the share of right answers."""
        return {"accuracy": sums["correct"] / sums["count"]}


def _only(folder: Path, pattern: str) -> Path:
    paths = sorted(folder.glob(pattern))
    if len(paths) != 1:
        raise DataError(f"{folder}: expected one file {pattern}, found {len(paths)}")
    return paths[0]

"""CPM fine-tuned on dialogues in PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model

from accelmark.frameworks.pytorch.batches import FromArrays
from accelmark.frameworks.pytorch.case import Batch
from accelmark.frameworks.pytorch.model.causal_attention import CAUSAL
from accelmark.frameworks.pytorch.model.pretrained import gpt2_config, load_megatron_gpt2
from accelmark.tasks.language.data import TokenShards
from accelmark.tasks.language.pytorch import NextToken

CHECKPOINT: Final = Path("initial", "cpm_model_states_medium.pt")


class Cpm(nn.Module):
    """GPT-2 with a Chinese vocabulary (Zhang et al. 2020, arXiv:2012.00413)."""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.net = GPT2Model(config)

    def forward(self, tokens: Tensor, labels: Tensor, is_label: Tensor) -> Tensor:
        """Return, for each sequence, the sum of the labels' losses, their number, and how similar predictions are.

        That is the cosine between the sums of the embeddings of the predicted tokens and of the labels; in training 0.
        All inputs are of shape (batch, length); the result is of shape (batch, 3).
        """
        table = self.net.wte.weight
        hidden: Tensor = self.net(input_ids=tokens, use_cache=False).last_hidden_state
        logits = F.linear(hidden, table.to(hidden.dtype))
        losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="none").view(labels.shape)
        similarity = torch.zeros_like(losses[:, 0])
        if not self.training:
            chosen = (logits.argmax(-1), labels)
            predicted, right = ((F.embedding(each, table) * is_label[..., None]).sum(1) for each in chosen)
            similarity = F.cosine_similarity(predicted, right).float()
        return torch.stack(((losses * is_label).sum(1), is_label.sum(1).float(), similarity), 1)


class Case(NextToken):
    """Next-token prediction in dialogues, which are padded to one length, from the published weights."""

    block_class = "GPT2Block"

    def build_model(self) -> nn.Module:
        """Build CPM with the published weights; synthetic data goes with random ones."""
        names = {"num_layers": "n_layer", "num_heads": "n_head", "hidden_size": "n_embd"}
        dropout = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), self.real("dropout"))
        sizes: dict[str, Any] = {**self.dimensions(**names), **dropout, "n_positions": self.number("max_positions")}
        model = Cpm(gpt2_config(attention=CAUSAL, **sizes))
        if "cpm_dialogues" in self.data_dirs and torch.get_default_device().type != "meta":
            load_megatron_gpt2(model, self.data_dirs["cpm_dialogues"] / CHECKPOINT)
        return model

    def dataset(self, *, train: bool) -> FromArrays:
        """Return the dialogues of a split, in rows of one length."""
        row = self.number("seq_length") + 1
        return FromArrays(
            TokenShards(self.data_dirs["cpm_dialogues"], "train" if train else "val", row, row, self.vocab_size)
        )

    def _sums(self, model: nn.Module, batch: Batch) -> Tensor:
        labels = self._labels(batch)
        return model(self.model_input(batch), labels, labels != self.number("pad_token"))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy of a token that is no padding, in nats."""
        losses, counts, _ = self._sums(model, batch).unbind(1)
        return losses.sum() / counts.sum().clamp(min=1)

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Add up losses and similarities; a sequence without a label counts as nothing."""
        losses, counts, similarity = self._sums(model, batch).unbind(1)
        return {
            "loss": losses.sum(),
            "count": counts.sum(),
            "similarity": similarity.sum(),
            "sequences": (counts > 0).sum(),
        }

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the mean similarity, and the mean loss of a token."""
        return {"embedding_average": sums["similarity"] / sums["sequences"], "eval_loss": sums["loss"] / sums["count"]}

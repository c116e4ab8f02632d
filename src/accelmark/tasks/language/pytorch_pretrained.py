"""Language models that start from a published checkpoint: CPM on dialogues, BERT on masked tokens, GLM on choices."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from torch import Tensor, nn
from transformers import GPT2Config, GPT2Model

from accelmark.frameworks.pytorch.batches import FromArrays, TaskFamily, generator_for
from accelmark.frameworks.pytorch.case import Batch
from accelmark.frameworks.pytorch.model.hugging_face import CAUSAL, gpt2_config, load_megatron_gpt2, load_pretrained
from accelmark.spec.errors import UNREADABLE, DataError, raising
from accelmark.tasks.language.data import masked_tokens, only_file
from accelmark.tasks.language.pytorch import NextToken
from accelmark.tasks.metrics import IGNORED, Classified
from accelmark.train.batches import Arrays


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


class DialogueModelling(NextToken):
    """Next-token prediction in dialogues, which are padded to one length, from the published weights."""

    block_class = "GPT2Block"
    shared = 0

    def build_model(self) -> nn.Module:
        """Build CPM with the published weights in the data set's folder ``initial``; without data with random ones."""
        names = {"num_layers": "n_layer", "num_heads": "n_head", "hidden_size": "n_embd"}
        dropout = dict.fromkeys(("embd_pdrop", "resid_pdrop", "attn_pdrop"), self.real("dropout"))
        sizes: dict[str, Any] = {**self.dimensions(**names), **dropout, "n_positions": self.number("max_positions")}
        model = Cpm(gpt2_config(attention=CAUSAL, **sizes))
        if self.shards in self.data_dirs and torch.get_default_device().type != "meta":
            load_megatron_gpt2(model, self.data_dirs[self.shards] / "initial" / "cpm_model_states_medium.pt")
        return model

    def _sums(self, model: nn.Module, batch: Batch) -> Tensor:
        labels = self._labels(batch)
        sums: Tensor = model(self.model_input(batch), labels, labels != self.number("pad_token"))
        return sums

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


class MaskedLm(nn.Module):
    """BERT of transformers, computing vocabulary logits at the masked positions only."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(
        self, tokens: Tensor, positions: Tensor, segments: Tensor | None = None, num_tokens: Tensor | None = None
    ) -> Tensor:
        """Return logits of shape (batch, positions, vocabulary); no token sees one after ``num_tokens``."""
        mask = None
        if num_tokens is not None:
            mask = torch.arange(tokens.shape[1], device=tokens.device) < num_tokens[:, None]
        found = self.net.bert(input_ids=tokens, token_type_ids=segments, attention_mask=mask)
        hidden: Tensor = found.last_hidden_state
        picked = hidden.gather(1, positions[..., None].expand(-1, -1, hidden.shape[-1]))
        logits: Tensor = self.net.cls(picked)
        return logits


class MaskedTokens(Classified, TaskFamily):
    """Masked-token prediction at full sequence length, from the checkpoint in the data directory.

    A batch has ``tokens``, and ``positions`` with ``labels`` of shape (batch, predictions); of pairs of texts also
    ``segments`` and ``num_tokens``.
    """

    accuracies: ClassVar = {"mlm_accuracy": 1}
    shards: ClassVar[str]
    """Name of the data set, with the initial checkpoint in its folder ``initial``."""
    block_class = "BertLayer"

    def build_model(self) -> nn.Module:
        """Build BERT (Devlin et al. 2018, arXiv:1810.04805), with the initial checkpoint's weights."""
        config = transformers.BertConfig(**self.dimensions(), max_position_embeddings=self.number("max_positions"))
        if self.settings.model["from_checkpoint"] and not self.settings.loader.synthetic:
            return MaskedLm(
                load_pretrained(transformers.BertForMaskedLM, config, self.data_dirs[self.shards] / "initial")
            )
        return MaskedLm(transformers.BertForMaskedLM(config))

    def dataset(self, *, train: bool) -> FromArrays:
        """Return windows of ``train``, masked anew in each epoch, or of ``val``, masked the same each time."""
        sizes = (self.number(name) for name in ("seq_length", "max_predictions", "vocab_size"))
        return FromArrays(masked_tokens(self.data_dirs[self.shards], "train" if train else "val", *sizes))

    def synthetic_batch(self, size: int) -> Batch:
        random, vocabulary = generator_for(self.place.seed), self.number("vocab_size")
        length, predictions = self.number("seq_length"), self.number("max_predictions")
        return {
            "tokens": torch.randint(0, vocabulary, (size, length), generator=random),
            "positions": torch.randint(0, length, (size, predictions), generator=random),
            "labels": torch.randint(0, vocabulary, (size, predictions), generator=random),
        }

    def _logits(self, model: nn.Module, batch: Batch) -> Tensor:
        logits: Tensor = model(**{name: tensor for name, tensor in batch.items() if name != "labels"})
        return logits

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy of the masked tokens."""
        logits = self._logits(model, batch)
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Count the masked tokens that were predicted, and add up their cross entropies."""
        logits, labels = self._logits(model, batch), batch["labels"]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        correct = (logits.argmax(-1) == labels).sum()
        return {"mlm_accuracy": correct, "loss": loss, "count": (labels != IGNORED).sum()}


_MATRICES: Final = ("text", "position", "mask", "target", "logit_mask", "choice_start_end")
_ANSWERS: Final = ("answer_start_end", "answer_idx")


class Choices:
    """Queries, each with one sequence of ``length`` tokens for each choice.

    Row ``i`` of ``text``, ``target``, ``logit_mask`` and of ``mask`` is a choice; rows ``2 i`` and ``2 i + 1`` of
    ``position`` are its positions and block positions. ``target_length`` limits the tokens that are predicted.
    """

    def __init__(self, path: Path, length: int, target_length: int, num_choices: int | None) -> None:
        """``num_choices`` is the number of choices that each query is padded to; None: the largest in the file."""
        import h5py

        self._path, self._length, self._target_length = path, length, target_length
        with_answers = num_choices is None
        what = f"{path}: is not complete, or lacks a matrix of {', '.join(_MATRICES)}"
        with raising(DataError, what, *UNREADABLE):
            sys.audit("open", str(path), "r", 0)  # the library opens it itself
            with h5py.File(path) as file:
                names = (*_MATRICES, *(_ANSWERS if with_answers else ()))
                self._rows = {name: _matrix(file[name]) for name in names}
        self._places = self._rows["choice_start_end"].toarray()
        self._first_answers = self._rows["answer_start_end"].toarray() if with_answers else None
        if with_answers:
            self._answers = self._rows["answer_idx"].toarray().reshape(-1)
        self._separators = self._rows["mask"].toarray().reshape(-1)
        self._num_choices = num_choices or int((self._places[:, 1] - self._places[:, 0]).max())

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int, random: np.random.Generator) -> Arrays:
        """Return the arrays of a query; the first dimension of all is the number of choices, spare ones are zeros.

        ``tokens`` and ``positions`` (choices, 2, length), ``separators``: the tokens before them see each other;
        ``places`` and ``targets`` (choices, target length) of predicted tokens; ``is_choice``, ``is_answer``.
        """
        begin, end = self._places[index]
        count = min(int(end - begin), self._num_choices)
        rows = slice(begin, begin + count)
        masks, targets = (self._rows[name][rows].toarray() for name in ("logit_mask", "target"))
        if int(masks.sum(1).max()) > self._target_length:
            most = f"{int(masks.sum(1).max())} tokens to predict; expected {self._target_length} at most"
            raise DataError(f"{self._path}: query {index} has {most}")
        sample = {
            "tokens": np.zeros((self._num_choices, self._length), np.int64),
            "positions": np.zeros((self._num_choices, 2, self._length), np.int64),
            "separators": np.zeros(self._num_choices, np.int64),
            "places": np.zeros((self._num_choices, self._target_length), np.int64),
            "targets": np.full((self._num_choices, self._target_length), IGNORED, np.int64),
            "is_choice": np.arange(self._num_choices) < count,
        }
        sample["tokens"][:count] = self._rows["text"][rows].toarray()
        positions = self._rows["position"][2 * begin : 2 * (begin + count)].toarray()
        sample["positions"][:count] = positions.reshape(count, 2, -1)
        sample["separators"][:count] = self._separators[rows]
        for row, (mask, target) in enumerate(zip(masks, targets)):
            chosen = np.flatnonzero(mask)
            sample["places"][row, : len(chosen)], sample["targets"][row, : len(chosen)] = chosen, target[chosen]
        if self._first_answers is not None:
            answers = self._answers[slice(*self._first_answers[index])]
            sample["is_answer"] = np.isin(np.arange(self._num_choices), answers)
        return sample


def _matrix(stored: Any) -> Any:
    """Return a matrix of a group with ``data``, ``indices`` and ``indptr``; rows that are not sparse are a data set."""
    from scipy.sparse import csr_matrix

    if not hasattr(stored, "keys"):
        return csr_matrix(np.atleast_2d(stored[()]))
    return csr_matrix((stored["data"][()], stored["indices"][()], stored["indptr"][()]), stored.attrs["h5sparse_shape"])


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


class ChoiceTuning(TaskFamily):
    """The choice whose tokens are the likeliest answers a query; in training the first choice is the answer."""

    ratios: ClassVar = {"accuracy": ("correct", "count")}
    block_class = "GPT2Block"
    samples: ClassVar[str]
    """Name of the data set, with FlagPerf's folders ``blocklm-large-blank`` and ``ReCoRD``."""

    def build_model(self) -> nn.Module:
        """Build GLM-Large with the published weights; synthetic data goes with random ones."""
        names = {"num_layers": "n_layer", "num_heads": "n_head", "hidden_size": "n_embd"}
        model = Glm(gpt2_config(**self.dimensions(**names), n_positions=self.number("seq_length") + 1))
        if self.samples in self.data_dirs and torch.get_default_device().type != "meta":
            load_megatron_gpt2(
                model, only_file(self.data_dirs[self.samples] / "blocklm-large-blank" / "200000", "*.pt"), _BLOCKS
            )
        return model

    def dataset(self, *, train: bool) -> FromArrays:
        """Return the queries of a split; those of training have at most ``num_choices`` choices."""
        split = "train" if train else "eval"
        folder = self.data_dirs[self.samples] / "ReCoRD" / "glm_train_eval_hdf5_sparse" / f"{split}_hdf5"
        choices = self.number("num_choices") if train else None
        length, targets = self.number("seq_length"), self.number("target_length")
        return FromArrays(Choices(only_file(folder, "*.hdf5"), length, targets, choices))

    def synthetic_batch(self, size: int) -> Batch:
        length, vocabulary = self.number("seq_length"), self.number("vocab_size")
        random = generator_for(self.place.seed)
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

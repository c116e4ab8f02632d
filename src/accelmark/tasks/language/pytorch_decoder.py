"""Causal decoders of transformers: pretraining, LoRA, tuning on dialogues, last-word prediction."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from accelmark.frameworks.pytorch.batches import ReadSamples
from accelmark.frameworks.pytorch.case import Batch, Batches, PipelineParts, Split
from accelmark.frameworks.pytorch.model.hugging_face import (
    CAUSAL,
    EXPERTS,
    balancing_loss,
    compute_buffers,
    initialize_normal,
    load_pretrained,
)
from accelmark.frameworks.pytorch.model.linear import adapt, chunked_cross_entropy
from accelmark.spec.errors import UNREADABLE, DataError, raising
from accelmark.tasks.language.data import only_file, read_windows
from accelmark.tasks.language.pytorch import NextToken
from accelmark.tasks.text.pytorch import JsonLines, read_tokenizer

if TYPE_CHECKING:
    from accelmark.frameworks.pytorch.context_parallel import SequencePart

_NAMES: Final = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "num_experts": "num_local_experts",
    "num_active_experts": "num_experts_per_tok",
    "seq_length": "max_position_embeddings",
}
"""Setting under ``model`` -> argument of transformers' configurations; all others have the same name."""
_SPLITS: Final[Mapping[str, Mapping[str, Split]]] = {
    "llama": {
        "self_attn.q_proj": "columns",
        "self_attn.k_proj": "columns",
        "self_attn.v_proj": "columns",
        "self_attn.o_proj": "rows",
        "mlp.gate_proj": "columns",
        "mlp.up_proj": "columns",
        "mlp.down_proj": "rows",
    }
}
"""Family of configurations (``model_type``) -> layers of a block that tensor parallelism splits."""
_PARTS: Final = {
    "llama": PipelineParts("net.model.embed_tokens", "net.model.layers", ("net.model.norm", "net.lm_head"))
}
"""Family of configurations -> modules of a :class:`CausalLm` that the stages of a pipeline divide."""
_NOT_ARCHITECTURE: Final = frozenset(
    {"eval_samples", "end_of_document", "lora_rank", "lora_alpha", "lora_dropout", "eval_length"}
)


class CausalLm(nn.Module):
    """A decoder of transformers; returns logits, or the loss if labels are given."""

    def __init__(self, config: PreTrainedConfig, end_of_document: int | None = None) -> None:
        super().__init__()
        self.net: PreTrainedModel = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        self._end_of_document = end_of_document
        self._balancing = getattr(config, "router_aux_loss_coef", 0.0)
        """Factor of the loss that balances experts; 0: without it."""

    @classmethod
    def initialized(cls, config: PreTrainedConfig, seed: int, end_of_document: int | None = None) -> CausalLm:
        """Return the model with normal weights (standard deviation: ``initializer_range``), zero biases, norms of one.

        Several threads draw the weights, since one takes minutes for billions of them.
        """
        with torch.device("meta"):
            model = cls(config, end_of_document)
        if torch.get_default_device().type != "meta":
            initialize_normal(model, config.initializer_range, seed)
            compute_buffers(model.net)
        return model

    @classmethod
    def pretrained(cls, config: PreTrainedConfig, directory: Path, end_of_document: int | None = None) -> CausalLm:
        """Return the model with the weights of a checkpoint of transformers, in fp32; raises DataError for another."""
        with torch.device("meta"):
            model = cls(config, end_of_document)
        model.net = load_pretrained(type(model.net), config, directory)
        return model

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        in_chunks: bool = True,
        sequence: SequencePart | None = None,
    ) -> Tensor:
        """Return logits of shape (batch, length, vocabulary), or the mean cross entropy of ``labels``.

        ``tokens`` and ``labels`` are whole sequences; with ``sequence`` the result is of this rank's part.
        In training, the loss of a mixture of experts includes the balancing loss.
        """
        arguments: dict[str, Any] = {}
        positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
        if self._end_of_document is not None:
            arguments["documents"], positions = documents_of(tokens, self._end_of_document)
        if sequence is not None:
            tokens, positions, arguments["sequence"] = sequence.of(tokens), sequence.of(positions), sequence
            labels = None if labels is None else sequence.of(labels)
        balances = bool(self._balancing) and labels is not None and self.training
        if balances:
            arguments["output_router_logits"] = True
        output = self.net.base_model(input_ids=tokens, position_ids=positions, use_cache=False, **arguments)
        hidden: Tensor = output.last_hidden_state
        head: Any = self.net.get_output_embeddings()  # type: ignore[no-untyped-call]
        if labels is None:
            logits: Tensor = head(hidden)
            return logits
        if in_chunks:
            # A DTensor where tensor parallelism replicates the layer: every rank computes the same gradient.
            weight = head.weight.to_local() if hasattr(head.weight, "to_local") else head.weight
            loss = chunked_cross_entropy(hidden.flatten(0, 1), weight, labels.flatten())
        else:
            loss = F.cross_entropy(head(hidden).flatten(0, 1).float(), labels.flatten())
        if balances:
            config = self.net.config
            loss = loss + self._balancing * balancing_loss(output.router_logits, config.num_experts_per_tok)
        return loss


def documents_of(tokens: Tensor, end_of_document: int) -> tuple[Tensor, Tensor]:
    """Return each token's document number and its position in that document, both of the shape of ``tokens``.

    The token ``end_of_document`` belongs to the document that it ends.
    """
    ends = (tokens == end_of_document).long()
    documents = ends.cumsum(1) - ends
    index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    is_first = F.pad(ends[:, :-1], (1, 0), value=1)
    return documents, index - (index * is_first).cummax(1).values


class Pretraining(NextToken):
    """Pretraining of a decoder from random weights on token shards; a case states configuration class and data.

    The settings under ``model`` are the architecture, by their names here (``_NAMES``) or those of the configuration
    class. ``end_of_document`` limits attention to a document and counts positions from its start.
    """

    config_class: ClassVar[type[PreTrainedConfig]]
    """Of transformers; ``case.yaml`` states its name."""
    names: ClassVar[Mapping[str, str]] = {}
    """Names of settings in this configuration class, in addition to ``_NAMES``."""
    config_values: ClassVar[Mapping[str, Any]] = {}
    """Arguments of the configuration that are not settings."""
    weights: ClassVar[str | None] = None
    """Name of the data set with the initial weights: a checkpoint of transformers in its folder ``hf``."""

    def __init_subclass__(cls) -> None:
        """Find the configuration class that ``case.yaml`` names."""
        super().__init_subclass__()
        name: object = vars(cls).get("config_class")
        if isinstance(name, str):
            cls.config_class = getattr(transformers, name)

    def config(self) -> PreTrainedConfig:
        """Return the configuration that the settings describe."""
        names = {**_NAMES, **self.names}
        values: dict[str, Any] = {
            "attn_implementation": CAUSAL,
            "experts_implementation": EXPERTS,
            **self.config_values,
        }
        settings = self.settings.model.items()
        values |= {names.get(name, name): value for name, value in settings if name not in _NOT_ARCHITECTURE}
        return self.config_class(**values)

    def build_model(self) -> nn.Module:
        """Build the decoder; open runs may reduce its size by ``model``. Synthetic data goes with random weights."""
        end = self.number("end_of_document") if self.settings.model.get("end_of_document") is not None else None
        directory = self.data_dirs.get(self.weights or "")
        if directory is None or torch.get_default_device().type == "meta":
            return CausalLm.initialized(self.config(), self.place.shared_seed, end)
        return CausalLm.pretrained(self.config(), directory / "hf", end)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy of a token, in nats; fp16 uses whole logits, as chunks lack the loss scale."""
        tokens = batch[self.tokens].long()
        in_chunks = self.settings.precision != "fp16"
        loss: Tensor = model(tokens[:, :-1], tokens[:, 1:], in_chunks=in_chunks, **self.of_sequence)
        return loss

    def checkpointed_blocks(self, model: nn.Module) -> list[nn.Module]:
        return [block for module in model.modules() if isinstance(module, nn.ModuleList) for block in module]

    def split_layers(self) -> Mapping[str, Split]:
        return _SPLITS.get(self.config_class.model_type, {})

    def expert_layers(self, model: nn.Module) -> list[str]:
        """Return the layers that transformers' plan of expert parallelism names."""
        plan: Mapping[str, str] = getattr(self.config_class, "base_model_ep_plan", None) or {}
        patterns = [f"net.model.{name}" for name, style in plan.items() if style == "ep_dispatch_experts"]
        return [name for name, _ in model.named_modules() if any(fnmatch(name, pattern) for pattern in patterns)]

    def splits_sequences(self) -> bool:
        """Return whether only attention of the configuration's family computes across positions."""
        return self.config_class.model_type in _SPLITS

    def pipeline_parts(self) -> PipelineParts | None:
        return _PARTS.get(self.config_class.model_type)


class PlayPretraining(Pretraining):
    """Pretraining on the bytes of Shakespeare's plays in consecutive windows, evenly spread ones in evaluation."""

    tokens = "bytes"
    dtype = torch.uint8
    reported: ClassVar = {"eval_loss": "eval_loss", "bits_per_byte": "bits_per_token"}
    samples: ClassVar[str]
    """Name of the data set."""

    def dataset(self, *, train: bool) -> dict[str, Tensor]:
        """Return the training plays' windows, or ``eval_samples`` windows of the held-out plays."""
        count = None if train else self.number("eval_samples")
        windows = read_windows(self.data_dirs[self.samples], self.number("seq_length"), count)
        return {"bytes": torch.from_numpy(windows)}


class LowRankTuning(Pretraining):
    """Training of low-rank changes of a checkpoint's linear layers; all other weights are frozen.

    Samples are packed rows of ``seq_length + 1`` tokens, one after another. The settings ``lora_rank``, ``lora_alpha``
    and ``lora_dropout`` under ``model`` are those of :class:`accelmark.frameworks.pytorch.model.linear.LowRank`.
    """

    adapted: ClassVar[Sequence[Sequence[str]]]
    """Names of the layers, in groups that share their input; see :func:`adapt`."""
    shared = 0

    def build_model(self) -> nn.Module:
        """Build the decoder with the checkpoint's weights and unchanged outputs."""
        model = super().build_model()
        alpha, dropout = (float(self.settings.model[name] or 0) for name in ("lora_alpha", "lora_dropout"))
        adapt(model, self.adapted, self.number("lora_rank"), alpha, dropout)
        return model


def packed_rows(texts: Sequence[str], tokenizer: Tokenizer, length: int, file: Path) -> Tensor:
    """Return the tokens of all texts of ``file``, one after another, in rows of ``length`` tokens without padding.

    The tokens that fill no row are left out. Shape (rows, length), int32.
    """
    tokens = torch.tensor([token for row in tokenizer.encode_batch(texts) for token in row.ids], dtype=torch.int32)
    if len(tokens) < length:
        raise DataError(f"{file}: has {len(tokens)} tokens, less than a row of {length}")
    return tokens[: len(tokens) // length * length].view(-1, length)


_PROMPT: Final = "Summarize this dialog:\n{dialogue}\n---\nSummary:\n{summary}</s>"


def dialogues(file: Path) -> Sequence[str]:
    """Return the dialogues of SAMSum (Gliwa et al. 2019, arXiv:1911.12237) with their summaries.

    Raises DataError: the file is missing or has another layout.
    """
    with raising(DataError, f"{file}: is not a part of SAMSum, a list of dialogues with summaries", *UNREADABLE):
        entries = json.loads(file.read_text(encoding="utf-8"))
        return [_PROMPT.format(dialogue=entry["dialogue"], summary=entry["summary"]) for entry in entries]


class DialogueTuning(LowRankTuning):
    """Low-rank tuning on dialogues with their summaries, tokenized at the start."""

    samples: ClassVar[str]
    """Name of the data set, with the files of SAMSum in its folder ``corpus``."""

    def dataset(self, *, train: bool) -> dict[str, Tensor]:
        """Return rows of packed dialogues and summaries."""
        file = self.data_dirs[self.samples] / "corpus" / ("train.json" if train else "val.json")
        tokenizer = read_tokenizer(self.data_dirs[self.weights or ""] / "hf" / "tokenizer.json", self.vocab_size)
        return {"tokens": packed_rows(dialogues(file), tokenizer, self.number("seq_length") + 1, file)}


class LastWord(Pretraining):
    """Training on token shards, evaluation on the last words of passages; a word is right if all its tokens are.

    ``val/*.jsonl`` has a ``text`` in each line, ``tokenizer/tokenizer.json`` is the shards' tokenizer. ``eval_length``
    under ``model`` is the longest passage in tokens.
    """

    def eval_batches(self) -> Batches:
        directory, length = self.data_dirs[self.shards], self.number("eval_length")
        lines = JsonLines(only_file(directory / "val", "*.jsonl"), ["text"])
        tokenizer = read_tokenizer(directory / "tokenizer" / "tokenizer.json", self.vocab_size)

        def read(index: int, random: torch.Generator) -> Batch:
            """Return ``tokens``, padded with zeros, and ``is_word``, true in the last word; both of shape (length,)."""
            context, _, word = lines.row(index)[0].strip().rpartition(" ")
            first, last = (tokenizer.encode(text, add_special_tokens=False).ids for text in (context, f" {word}"))
            if not first or len(first) + len(last) > length:
                counts = f"{len(first)} tokens before the last word and {len(first) + len(last)} in total"
                raise DataError(f"{lines.where(index)}: has {counts}; expected at least 1 and at most {length}")
            spare = length - len(first) - len(last)
            is_word = torch.tensor([False] * len(first) + [True] * len(last) + [False] * spare)
            return {"tokens": torch.tensor(first + last + [0] * spare), "is_word": is_word}

        return self._batches(ReadSamples(len(lines), read), self.settings.eval_batch_size, train=False)

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Count words of which all tokens are the likeliest, and add up the cross entropies of their tokens."""
        tokens = batch[self.tokens].long()
        logits: Tensor = model(tokens[:, :-1])
        labels = tokens[:, 1:]
        # Synthetic samples have no words: their last token is taken for one.
        is_word = (
            batch["is_word"][:, 1:] if "is_word" in batch else torch.arange(labels.shape[1]) == labels.shape[1] - 1
        )
        is_word = is_word.to(labels.device).expand_as(labels)
        wrong = ((logits.argmax(-1) != labels) & is_word).any(1)
        loss = F.cross_entropy(logits[is_word].float(), labels[is_word], reduction="sum")
        return {"wrong": wrong.sum(), "words": torch.ones_like(wrong).sum(), "loss": loss, "count": is_word.sum()}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the share of right words, and the mean loss of their tokens."""
        return {"accuracy": 1 - sums["wrong"] / sums["words"], "eval_loss": sums["loss"] / sums["count"]}

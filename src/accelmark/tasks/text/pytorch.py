"""Text of public data sets, line by line; its classification, and text to text."""

from __future__ import annotations

import json
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, cast

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import BertConfig, GenerationMixin, MarianConfig, MarianMTModel, PreTrainedModel
from transformers.models.bert.modeling_bert import BertEncoder

from accelmark.frameworks.pytorch.batches import ReadSamples, TaskFamily, generator_for
from accelmark.frameworks.pytorch.case import Batch
from accelmark.frameworks.pytorch.model.hugging_face import initial_net, with_padding
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import DataError, nearest, raising
from accelmark.tasks.images.pytorch import Classification, Logits
from accelmark.tasks.metrics import IGNORED, Bleu, Rouge1, TextScore

_CHUNK: Final = 1 << 24
DROPOUT: Final = 0.1


class Records(Protocol):
    """Rows of some texts each."""

    def __len__(self) -> int: ...

    def row(self, index: int) -> tuple[str, ...]:
        """Return the texts of row ``index``."""


class Lines:
    """The lines of a UTF-8 file, which is indexed but not kept in memory; raises DataError where it is not readable."""

    _first = 1
    """Number of the first one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        starts, done = [np.zeros(1, np.int64)], 0
        with raising(DataError, f"{path}: cannot be read", OSError), path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                starts.append(np.flatnonzero(np.frombuffer(chunk, np.uint8) == ord("\n")) + done + 1)
                done += len(chunk)
        self._starts = np.concatenate(starts)
        if self._starts[-1] != done:
            self._starts = np.append(self._starts, done)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def where(self, index: int) -> str:
        """Return file and number of a line, for messages."""
        return f"{self._path}:{index + self._first}"

    def text(self, index: int) -> str:
        """Return a line without its end."""
        start, end = self._starts[index : index + 2].tolist()
        with self._path.open("rb") as file:
            file.seek(start)
            line = file.read(end - start)
        with raising(DataError, f"{self.where(index)}: is not UTF-8", UnicodeDecodeError):
            return line.decode("utf-8").rstrip("\r\n")


class Parallel:
    """Parallel text files: line N of one belongs to line N of the others. Raises DataError: one has fewer lines."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files = [Lines(path) for path in paths]
        counts = {str(path): len(file) for path, file in zip_strict(paths, self._files)}
        if len(set(counts.values())) != 1:
            found = ", ".join(f"{path}: {count:,}" for path, count in counts.items())
            raise DataError(f"parallel files have different numbers of lines: {found}")

    def __len__(self) -> int:
        return len(self._files[0])

    def row(self, index: int) -> tuple[str, ...]:
        """Return line ``index`` of each file."""
        return tuple(file.text(index) for file in self._files)


class JsonLines(Lines):
    """Some keys of a file with a JSON object in each line."""

    def __init__(self, path: Path, keys: Sequence[str]) -> None:
        super().__init__(path)
        self._keys = keys

    def row(self, index: int) -> tuple[str, ...]:
        """Return the values of the keys; raises DataError with file and line where there is no such text."""
        with raising(DataError, f"{self.where(index)}: is not a JSON object", json.JSONDecodeError):
            entry = json.loads(self.text(index))
        for key in self._keys:
            if not isinstance(entry, dict) or not isinstance(entry.get(key), str):
                has = ", ".join(map(repr, entry)) if isinstance(entry, dict) else type(entry).__name__
                raise DataError(f"{self.where(index)}: has no text {key!r}; it has {has}")
        return tuple(entry[key] for key in self._keys)


class Table(Lines):
    """Some columns of a file with tabs between columns, whose first line has their names (the layout of GLUE)."""

    def __init__(self, path: Path, columns: Sequence[str]) -> None:
        super().__init__(path)
        self._header = self.text(0).split("\t") if len(self) else []
        for column in columns:
            if column not in self._header:
                raise DataError(f"{path}:1: has no column {column!r} ({nearest(column, self._header)})")
        self._columns = [self._header.index(column) for column in columns]
        self._starts, self._first = self._starts[1:], 2

    def row(self, index: int) -> tuple[str, ...]:
        """Return the values of the columns."""
        cells = self.text(index).split("\t")
        if len(cells) != len(self._header):
            raise DataError(f"{self.where(index)}: has {len(cells)} columns; the first line has {len(self._header)}")
        return tuple(cells[column] for column in self._columns)


class Embeddings(nn.Module):
    """Embeddings of tokens, positions and a single segment."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.word_embeddings = nn.Embedding(config.vocab_size, hidden)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, hidden)
        self.token_type_embeddings = nn.Embedding(2, hidden)
        self.LayerNorm = nn.LayerNorm(hidden, config.layer_norm_eps)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = self.position_embeddings.weight[: tokens.shape[1]]
        summed = self.word_embeddings(tokens) + positions + self.token_type_embeddings.weight[0]
        return F.dropout(self.LayerNorm(summed), DROPOUT, self.training)


class Encoder(nn.Module):
    """Tokens and a padding mask to hidden states by transformers' layers of BERT; names are those of checkpoints."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        with_padding(config)
        self.embeddings = Embeddings(config)
        self.encoder = BertEncoder(config)  # type: ignore[no-untyped-call]

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return hidden states of shape (batch, length, hidden); ``mask`` is false on padding."""
        hidden: Tensor = self.encoder(self.embeddings(tokens), mask[:, None, None, :]).last_hidden_state
        return hidden

    def load(self, path: Path) -> None:
        """Load the weights of a published checkpoint except its pooler; raises DataError for another file."""
        sys.audit("open", str(path), "r", 0)  # the library opens it itself
        with raising(DataError, f"{path}: are not this encoder's weights", OSError, SafetensorError, RuntimeError):
            state = {name: weight for name, weight in load_file(path).items() if not name.startswith("pooler.")}
            state.pop("embeddings.position_ids", None)
            self.load_state_dict(state)


def mean_state(hidden: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of hidden states over non-padding tokens, of shape (batch, hidden)."""
    weight = mask.unsqueeze(-1).to(hidden.dtype)
    return (hidden * weight).sum(1) / weight.sum(1)


def read_tokenizer(path: Path, vocab_size: int) -> Tokenizer:
    """Return a tokenizer of ``tokenizer.json``; raises DataError where it is damaged or has too many tokens."""
    with raising(DataError, f"{path}: is not a tokenizer", Exception):
        tokenizer = Tokenizer.from_file(str(path))
    if (size := tokenizer.get_vocab_size()) > vocab_size:
        raise DataError(f"{path}: has {size:,} tokens, the model {vocab_size:,}: is it another model's tokenizer?")
    return tokenizer


def tokenize(tokenizer_file: Path, texts: Sequence[str], length: int) -> tuple[Tensor, Tensor]:
    """Return tokens and mask (0 on padding), int64 of shape (texts, length)."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    encoded: list[Any] = tokenizer.encode_batch(texts)
    return torch.tensor([row.ids for row in encoded]), torch.tensor([row.attention_mask for row in encoded])


class TextClassification(Classification):
    """Classification of tokens of ``seq_length`` with a padding mask; the encoder's dimensions are settings.

    A case states a published network and the tables of its data, or overrides ``build_model`` and ``dataset``.
    """

    inputs = ("tokens", "mask")
    block_class = "BertLayer"
    num_classes: ClassVar[int] = 2
    network_class: ClassVar[str]
    """Class of transformers."""
    names: ClassVar[Mapping[str, str]] = {}
    """Names of settings in its configuration."""
    new_layers: ClassVar[Sequence[str]] = ("classifier",)
    """Layers that the published weights lack."""
    weights: ClassVar[str]
    """Name of the data set with the weights and their tokenizer, in its folder ``hf``."""
    samples: ClassVar[str]
    """Name of the data set with the tables."""
    tables: ClassVar[Sequence[str]] = ("train.tsv", "dev.tsv")
    """Files of training and of evaluation."""

    def build_model(self) -> nn.Module:
        """Build the network with the published weights and a new classifier."""
        network_class: Any = getattr(transformers, self.network_class)
        config = with_padding(network_class.config_class(**self.dimensions(**self.names)))
        return Logits(initial_net(network_class, config, self.data_dirs.get(self.weights), new=self.new_layers))

    def dataset(self, *, train: bool) -> Mapping[str, Tensor] | ReadSamples:
        """Return the sentences of a table as ``seq_length`` tokens with a padding mask; longer ones are cut off."""
        table = Table(self.data_dirs[self.samples] / self.tables[0 if train else 1], ["sentence", "label"])
        tokenizer = read_tokenizer(self.data_dirs[self.weights] / "hf" / "tokenizer.json", self.number("vocab_size"))
        tokenizer.enable_truncation(self.number("seq_length"))
        tokenizer.enable_padding(length=self.number("seq_length"))

        def read(index: int, random: torch.Generator) -> Batch:
            """Return ``tokens``, ``mask`` and ``label``; raises DataError with file and line for an unknown class."""
            text, label = table.row(index)
            if not label.isdecimal() or int(label) >= self.num_classes:
                raise DataError(f"{table.where(index)}: {label!r} is not a class from 0 to {self.num_classes - 1}")
            encoding = tokenizer.encode(text)
            mask = torch.tensor(encoding.attention_mask, dtype=torch.bool)
            return {"tokens": torch.tensor(encoding.ids), "mask": mask, "label": torch.tensor(int(label))}

        return ReadSamples(len(table), read)

    def synthetic_batch(self, size: int) -> Batch:
        random, length = generator_for(self.place.seed), self.number("seq_length")
        return {
            "tokens": torch.randint(1, self.number("vocab_size"), (size, length), generator=random),
            "mask": torch.ones(size, length, dtype=torch.bool),
            "label": torch.randint(0, self.num_classes, (size,), generator=random),
        }


class EncoderDecoder(nn.Module):
    """An encoder and decoder of transformers, whose configuration has the numbers of the special tokens."""

    def __init__(self, net: PreTrainedModel) -> None:
        super().__init__()
        self.net = net

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits of shape (batch, length of ``target``, vocabulary)."""
        config: Any = self.net.config
        start = torch.full_like(target[:, :1], config.decoder_start_token_id)
        shifted = torch.cat([start, target[:, :-1]], 1)
        inputs = shifted.masked_fill(shifted == IGNORED, config.pad_token_id)
        # Padding is at the end, where causal attention does not see it.
        visible = torch.ones_like(inputs)
        output = self.net(
            **self._inputs(source), decoder_input_ids=inputs, decoder_attention_mask=visible, use_cache=False
        )
        logits: Tensor = output.logits
        return logits

    def generate(self, source: Tensor, length: int, prompt: Sequence[int], **options: Any) -> Tensor:
        """Return generated tokens after ``prompt``, of shape (batch, at most ``length``)."""
        net: Any = self.net
        generate: Any = GenerationMixin.generate
        start = torch.tensor([net.config.decoder_start_token_id, *prompt], device=source.device)
        inputs = {**self._inputs(source), "decoder_input_ids": start.expand(len(source), -1)}
        # Not the model's own method: Whisper's chooses language and task, which are in the prompt.
        tokens: Tensor = generate(net, **inputs, max_new_tokens=length, **options)
        return tokens[:, len(start) :]

    def _inputs(self, source: Tensor) -> dict[str, Tensor]:
        """Return the encoder's inputs: tokens with their mask, or the model's other input."""
        name = self.net.main_input_name
        if name != "input_ids":
            return {name: source}
        return {name: source, "attention_mask": (source != self.net.config.pad_token_id).long()}


class SequenceToSequence(TaskFamily):
    """Training on the target's tokens; in evaluation the model generates, and the text is scored.

    A batch has ``source``, and ``target`` of shape (batch, ``target_length``) that ends with labels that are not
    predicted; in evaluation also ``index``, the number of the sample.
    """

    block_class = "GradientCheckpointingLayer"
    score: ClassVar[TextScore]
    label_smoothing: ClassVar[float] = 0.0
    generation: ClassVar[Mapping[str, Any]] = {}
    """Arguments of transformers' ``generate``, for example ``num_beams``."""
    prompt: ClassVar[Sequence[int]] = ()
    """Tokens that follow the decoder's start token in generation."""
    _tokenizer: Tokenizer | None = None
    _references: Records | None = None
    """Texts of the evaluation, set with its data; the last one of a row is the reference."""

    @abstractmethod
    def network(self) -> PreTrainedModel:
        """Return the network with its initial weights."""

    @abstractmethod
    def synthetic_source(self, size: int, random: torch.Generator) -> Tensor:
        """Return the encoder's input for ``size`` synthetic samples."""

    def build_model(self) -> nn.Module:
        return EncoderDecoder(self.network())

    def synthetic_batch(self, size: int) -> Batch:
        random = generator_for(self.place.seed)
        shape = size, self.number("target_length")
        target = torch.randint(2, self.number("vocab_size"), shape, generator=random)
        return {"source": self.synthetic_source(size, random), "target": target}

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy of a token of the targets."""
        target = batch["target"]
        logits: Tensor = model(batch["source"], target)
        return F.cross_entropy(
            logits.flatten(0, 1),
            target.flatten(),
            ignore_index=IGNORED,
            label_smoothing=self.label_smoothing if model.training else 0.0,
        )

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Generate from the sources, and return the score's statistics and the summed cross entropy."""
        source, target = batch["source"], batch["target"]
        tokens = (target != IGNORED).sum()
        sums = {"loss": self.loss(model, batch) * tokens, "tokens": tokens}
        generate = cast("EncoderDecoder", model).generate
        generated = self._texts(generate(source, target.shape[1], self.prompt, **self.generation))
        if self._references is None or "index" not in batch:
            references = self._texts(target)
        else:
            references = [self._references.row(index)[-1] for index in batch["index"].tolist()]
        scored = self.score.sums(generated, references)
        return sums | {name: torch.tensor(value, dtype=torch.float64) for name, value in scored.items()}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the score, and the mean cross entropy of a token."""
        return self.score.metrics(sums) | {"eval_loss": sums["loss"] / sums["tokens"]}

    def _texts(self, tokens: Tensor) -> Sequence[str]:
        """Return texts without special tokens; where there is no tokenizer, words are the tokens' numbers."""
        rows = [[token for token in row if token != IGNORED] for row in tokens.tolist()]
        if self._tokenizer is None:
            return [" ".join(map(str, row)) for row in rows]
        return list(self._tokenizer.decode_batch(rows, skip_special_tokens=True))


class TextToText(SequenceToSequence):
    """From text to text; the lengths ``source_length`` and ``target_length`` in tokens are under ``model``."""

    prefix: ClassVar[str] = ""
    """Begins every source."""
    pad: ClassVar[int] = 0
    """The token that pads sources."""
    end: ClassVar[int] = 1
    """The token that ends a text."""

    @abstractmethod
    def pairs(self, *, train: bool) -> Records:
        """Return the pairs of source and target."""

    @abstractmethod
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer of both texts."""

    def dataset(self, *, train: bool) -> ReadSamples:
        """Return the pairs as tokens that end with ``end``; the evaluation's pairs are also its references."""
        pairs, tokenizer = self.pairs(train=train), self.tokenizer()
        if not train:
            self._references, self._tokenizer = pairs, tokenizer
        return ReadSamples(len(pairs), partial(self._pair, pairs, tokenizer))

    def _pair(self, pairs: Records, tokenizer: Tokenizer, index: int, random: torch.Generator) -> Batch:
        """Return ``source``, which starts with the prefix, ``target`` and ``index``; longer texts are cut off."""

        def tokens(text: str, length: int, pad: int) -> Tensor:
            ids = tokenizer.encode(text, add_special_tokens=False).ids[: length - 1]
            return torch.tensor([*ids, self.end] + [pad] * (length - 1 - len(ids)))

        source, target = pairs.row(index)
        return {
            "source": tokens(self.prefix + source, self.number("source_length"), self.pad),
            "target": tokens(target, self.number("target_length"), IGNORED),
            "index": torch.tensor(index),
        }

    def synthetic_source(self, size: int, random: torch.Generator) -> Tensor:
        shape = size, self.number("source_length")
        return torch.randint(self.pad + 1, self.number("vocab_size"), shape, generator=random)


def of_both(layers: int, heads: int, inner: int) -> dict[str, Any]:
    """Return arguments of a configuration whose encoder and decoder have the same sizes."""
    sizes = {"layers": layers, "attention_heads": heads, "ffn_dim": inner}
    return {f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in sizes.items()}


class Translation(TextToText):
    """Text to text by a Transformer whose size is in the settings under ``model``.

    The data are ``train/text.<language>`` and ``test/text.<language>``, with ``tokenizer/tokenizer.json``.
    """

    samples: ClassVar[str]
    """Name of the data set."""
    languages: ClassVar[Sequence[str]] = ("en", "de")
    score: ClassVar[TextScore] = Bleu(lowercase=True)
    dropout: ClassVar[float]
    label_smoothing = 0.1

    def network(self) -> PreTrainedModel:
        """Build the Transformer (Vaswani et al. 2017, arXiv:1706.03762) with one embedding for both languages."""
        config = MarianConfig(
            vocab_size=self.number("vocab_size"),
            d_model=self.number("hidden_size"),
            **of_both(self.number("num_layers"), self.number("num_heads"), self.number("intermediate_size")),
            activation_function="relu",
            dropout=self.dropout,
            scale_embedding=True,
            max_position_embeddings=max(self.number("source_length"), self.number("target_length")) + 1,
            init_std=self.number("hidden_size") ** -0.5,
            pad_token_id=self.pad,
            decoder_start_token_id=self.pad,
            eos_token_id=self.end,
            forced_eos_token_id=None,
        )
        with_padding(config)
        return MarianMTModel(config)

    def pairs(self, *, train: bool) -> Records:
        split = self.data_dirs[self.samples] / ("train" if train else "test")
        return Parallel([split / f"text.{language}" for language in self.languages])

    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self.data_dirs[self.samples] / "tokenizer" / "tokenizer.json", self.number("vocab_size"))


class Summarization(TextToText):
    """Articles to highlights by a T5 with published weights; greedy summaries are scored."""

    samples: ClassVar[str]
    """Name of the data set: ``train/train.jsonl`` and ``val/val.jsonl`` with ``article`` and ``highlights``."""
    weights: ClassVar[str]
    """Name of the data set with the weights and their tokenizer, in its folder ``hf``."""
    score: ClassVar[TextScore] = Rouge1()
    prefix = "summarize: "

    def network(self) -> PreTrainedModel:
        """Build T5 (Raffel et al. 2019, arXiv:1910.10683) with its weights."""
        names = {"hidden_size": "d_model", "intermediate_size": "d_ff", "num_layers": "num_layers"}
        sizes = self.dimensions(**names, num_heads="num_heads")
        config = transformers.T5Config(**sizes, d_kv=self.number("hidden_size") // self.number("num_heads"))
        config.decoder_start_token_id = self.pad
        directory = self.data_dirs.get(self.weights)
        return initial_net(transformers.T5ForConditionalGeneration, with_padding(config), directory)

    def pairs(self, *, train: bool) -> JsonLines:
        path = self.data_dirs[self.samples] / ("train/train.jsonl" if train else "val/val.jsonl")
        return JsonLines(path, ["article", "highlights"])

    def tokenizer(self) -> Tokenizer:
        return read_tokenizer(self.data_dirs[self.weights] / "hf" / "tokenizer.json", self.number("vocab_size"))

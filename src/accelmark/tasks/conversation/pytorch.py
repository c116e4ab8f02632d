"""Answers in conversations about images, by a language model that reads projected features of a vision model."""

from __future__ import annotations

import json
import re
from abc import abstractmethod
from array import array
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, ClassVar, Final, Optional

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812
from PIL import Image
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import (
    CLIPVisionConfig,
    CLIPVisionModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
)

from accelmark.datasets.images import opened_image
from accelmark.datasets.shards import bytes_at
from accelmark.frameworks.pytorch.batches import ReadSamples, TaskFamily, generator_for
from accelmark.frameworks.pytorch.case import Batch
from accelmark.frameworks.pytorch.model.hugging_face import CAUSAL, compute_buffers, initialize_normal, load_pretrained
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import UNREADABLE, DataError, raising
from accelmark.tasks.images.data import CLIP_MEAN, CLIP_STD
from accelmark.tasks.images.pytorch_imagenet import ByteImageNetwork
from accelmark.tasks.language.data import only_file
from accelmark.tasks.metrics import IGNORED
from accelmark.tasks.text.pytorch import read_tokenizer

PLACEHOLDER: Final = "<image>"
"""Where the image is in a sample's text."""
END: Final = "</s>"
"""End of an answer."""
_SYSTEM: Final = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions. "
)
_ROLES: Final = ("human", "gpt")
Span = tuple[int, int]
"""Begin and end of a part of a text, in characters."""


Conversation = tuple[str, list[Span], Optional[npt.NDArray[np.uint8]]]
"""Text with ``PLACEHOLDER`` where its image is, where the answers are, and the image (3, side, side), if it has one."""
_CHUNK: Final = 1 << 24
_FIRST, _NEXT, _LAST = (re.compile(rf"[ \t\r\n]*{sign}[ \t\r\n]*") for sign in (r"\[", ",", r"\]"))
"""What is before the first element of a list, before another one, and after the last."""


def element_places(path: Path) -> npt.NDArray[np.int64]:
    """Return first byte and end of each element of a JSON list, which is read in parts and not kept.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no list of JSON objects, or an empty one.
    """
    decoder, places, before = json.JSONDecoder(), array("q"), _FIRST
    text, first, done = "", 0, 0
    with path.open(encoding="latin-1", newline="") as file:  # which has one character for each byte
        while chunk := file.read(_CHUNK):
            text, first, done = text[done:] + chunk, first + done, 0
            while (found := before.match(text, done)) is not None:
                try:
                    _, end = decoder.raw_decode(text, found.end())
                except json.JSONDecodeError:  # it is continued in the next part
                    break
                places.extend((first + found.end(), first + end))
                done, before = end, _NEXT
    if not places or not _LAST.fullmatch(text, done):
        raise ValueError(f"is not a list of samples, or is cut off or damaged after {len(places) // 2:,} of them")
    return np.frombuffer(places, np.int64).reshape(-1, 2)


class Conversations:
    """The samples of the JSON file in ``conversations``; ``image`` is a path in ``images``, absent where there is none.

    A sample is read from the file when it is needed: all of them as objects would take gigabytes in each process.
    """

    def __init__(self, directory: Path) -> None:
        self._images, self._file = directory / "images", only_file(directory / "conversations", "*.json")
        with raising(DataError, str(self._file), OSError, ValueError):
            self._places = element_places(self._file)

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int, side: int) -> Conversation:
        """Return the text of a sample in Vicuna's format, where the answers are, and its image, if it has one.

        The image is filled up to a square. Raises DataError: it cannot be read, the sample has no questions with
        answers, or no place for its image.
        """
        where = f"{self._file}: sample {index}"
        begin, end = self._places[index].tolist()
        unreadable = raising(DataError, f"{where}: is not a conversation", OSError, ValueError, KeyError, TypeError)
        with unreadable, self._file.open("rb") as file:
            sample = json.loads(bytes_at(file, begin, end - begin))
            turns = [(str(turn["from"]), str(turn["value"])) for turn in sample["conversations"]]
            name = sample.get("image")
        roles = tuple(role for role, _ in turns)
        if not turns or roles != _ROLES * (len(turns) // 2):
            raise DataError(f"{where}: expected 'human' and 'gpt' in turn, found {', '.join(roles) or 'none'}")
        if (count := sum(value.count(PLACEHOLDER) for _, value in turns)) != (name is not None):
            raise DataError(f"{where}: has {count} times {PLACEHOLDER} and the image {name}")
        text, answers = _SYSTEM, []
        for (_, question), (_, answer) in zip_strict(turns[::2], turns[1::2]):
            if PLACEHOLDER in question:
                question = f"{PLACEHOLDER}\n{question.replace(PLACEHOLDER, '').strip()}"
            text += f"USER: {question} ASSISTANT: "
            answers.append((len(text), len(text) + len(answer) + len(END)))
            text += answer + END
        return text, answers, None if name is None else _squared(self._images / str(name), side)


def _squared(path: Path, side: int) -> npt.NDArray[np.uint8]:
    with opened_image(path) as file:
        image = file.convert("RGB")
    width, height = image.size
    longer = max(image.size)
    square = Image.new("RGB", (longer, longer), tuple(int(mean * 255) for mean in CLIP_MEAN))
    square.paste(image, ((longer - width) // 2, (longer - height) // 2))
    return np.array(square.resize((side, side), Image.Resampling.BICUBIC)).transpose(2, 0, 1).copy()


IMAGE: Final = 0
"""Token (``<unk>``, which no text has) at the places of an image's features."""


class ImageConversation(ByteImageNetwork):
    """LLaVA (Liu et al. 2023, arXiv:2304.08485); the vision model is not trained."""

    def __init__(self, net: LlavaForConditionalGeneration, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__(net, mean, std)
        self.net.model.vision_tower.requires_grad_(False)

    def forward(self, image: Tensor, tokens: Tensor) -> Tensor:
        """Return logits of shape (batch, length, vocabulary); features of the image take the places of ``IMAGE``."""
        model = self.net.model
        features = torch.stack(model.get_image_features(self.normalised(image), return_dict=True).pooler_output)
        words = model.language_model.embed_tokens(tokens)
        is_image = tokens == IMAGE
        places = (is_image.cumsum(1) - 1).clamp(0, features.shape[1] - 1)
        image_states = features.gather(1, places[..., None].expand_as(words)).to(words.dtype)
        embedded = torch.where(is_image[..., None], image_states, words)
        positions = torch.arange(tokens.shape[1], device=tokens.device)[None]
        hidden = model.language_model(inputs_embeds=embedded, position_ids=positions, use_cache=False).last_hidden_state
        logits: Tensor = self.net.lm_head(hidden)
        return logits


class ImageAnswers(TaskFamily):
    """Training of projector and language model on answers about images, from random weights.

    ``patch_size`` under ``model`` is the distance of an image's places in pixels.
    """

    mean: ClassVar[Sequence[float]] = CLIP_MEAN
    std: ClassVar[Sequence[float]] = CLIP_STD
    """Of the images' channels, for values from 0 to 1."""
    ratios: ClassVar = {"eval_loss": ("loss", "count"), "exact_match": ("exact", "samples")}
    block_class = "LlamaDecoderLayer"

    @abstractmethod
    def config(self) -> LlavaConfig:
        """Return the configuration that the settings describe."""

    def configured(self, vision: CLIPVisionConfig, text: Mapping[str, Any], **values: Any) -> LlavaConfig:
        """Return a configuration with a Llama of the settings' size; ``text`` has further arguments of it."""
        config: Any = LlavaConfig  # which does not declare attn_implementation
        checked: LlavaConfig = config(
            vision_config=vision,
            text_config=LlamaConfig(**self.dimensions(), **text),
            image_token_index=IMAGE,
            attn_implementation={"text_config": CAUSAL, "vision_config": "sdpa"},
            **values,
        )
        return checked

    def initialize(self, net: LlavaForConditionalGeneration) -> None:
        """Give a model of the meta device its initial weights on the CPU."""
        initialize_normal(net, 0.02, self.place.shared_seed)
        for part in (net.model.language_model, net.model.vision_tower):
            compute_buffers(part)

    def build_model(self) -> nn.Module:
        with torch.device("meta"):
            net = LlavaForConditionalGeneration(self.config())
        if torch.get_default_device().type != "meta":
            self.initialize(net)
        return ImageConversation(net, self.mean, self.std)

    @property
    def num_features(self) -> int:
        """Number of an image's features."""
        return int((self.number("image_size") // self.number("patch_size")) ** 2)

    def samples_of(self, count: int, read: Callable[[int, int], Conversation], tokenizer: Tokenizer) -> ReadSamples:
        """Return ``count`` conversations, which ``read`` returns by number and side of the image, as samples."""
        end = tokenizer.token_to_id(END)
        if end is None:
            raise DataError(f"the tokenizer has no token {END}: it is another model's than Vicuna's")
        return ReadSamples(count, partial(self._sample, read, tokenizer, end))

    def _sample(
        self, read: Callable[[int, int], Conversation], tokenizer: Tokenizer, end: int, index: int, _: torch.Generator
    ) -> Batch:
        """Return ``image`` in bytes, black where there is none, ``tokens``, and ``labels``, which only answers have.

        An image has the places of ``num_features`` tokens; texts are filled up or cut off at ``seq_length``.
        """
        side, length = self.number("image_size"), self.number("seq_length")
        text, answers, image = read(index, side)
        ids: list[int] = []
        labels: list[int] = []
        begin = 0
        for part in text.split(PLACEHOLDER):
            if begin:
                ids += [IMAGE] * self.num_features
                labels += [IGNORED] * self.num_features
            encoding = tokenizer.encode(part, add_special_tokens=not begin)
            for token, (first, last) in zip_strict(encoding.ids, encoding.offsets):
                is_answer = any(begin + first < stop and begin + last > start for start, stop in answers)
                ids.append(token)
                labels.append(token if is_answer else IGNORED)
            begin += len(part) + len(PLACEHOLDER)
        spare = length - len(ids)
        return {
            "image": torch.zeros(3, side, side, dtype=torch.uint8) if image is None else torch.from_numpy(image),
            "tokens": torch.tensor((ids + [end] * spare)[:length]),
            "labels": torch.tensor((labels + [IGNORED] * spare)[:length]),
        }

    def synthetic_batch(self, size: int) -> Batch:
        """Return random images and tokens, the image first; the second half of the text is the answer."""
        random, side, length = generator_for(self.place.seed), self.number("image_size"), self.number("seq_length")
        tokens = torch.randint(1, self.number("vocab_size"), (size, length), generator=random)
        tokens[:, 1 : self.num_features + 1] = IMAGE
        half = torch.arange(length) < (self.num_features + 1 + length) // 2
        image = torch.randint(0, 256, (size, 3, side, side), generator=random, dtype=torch.uint8)
        return {"image": image, "tokens": tokens, "labels": tokens.masked_fill(half, IGNORED)}

    def _summed(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return sum of the answers' cross entropies, number of their tokens, and logits and labels of these tokens."""
        logits: Tensor = model(batch["image"], batch["tokens"])[:, :-1]
        labels = batch["labels"][:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")
        return loss, (labels != IGNORED).sum(), logits, labels

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross entropy of a token of the answers, in nats."""
        loss, count, _, _ = self._summed(model, batch)
        return loss / count.clamp(min=1)

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        """Add up the cross entropies of the answers' tokens, and the samples in which each of them is the likeliest."""
        loss, count, logits, labels = self._summed(model, batch)
        learned = labels != IGNORED
        exact = ((logits.argmax(-1) == labels) | ~learned).all(1) & learned.any(1)
        return {"loss": loss, "count": count, "exact": exact.sum(), "samples": torch.tensor(len(labels))}


class InstructionTuning(ImageAnswers):
    """Training on conversations in LLaVA's layout from published weights of the parts, where there is data.

    ``eval_samples`` under ``model``: so many conversations are held out, at equal distances.
    """

    samples: ClassVar[str]
    """Name of the data set, in the layout of :class:`Conversations`."""
    weights: ClassVar[str]
    """Name of the data set with the folders ``vicuna``, ``clip`` and ``projector``."""

    def config(self) -> LlavaConfig:
        """Return the configuration of LLaVA-1.5 (Liu et al. 2023, arXiv:2310.03744) with Vicuna v1.5."""
        vision = CLIPVisionConfig(
            hidden_size=self.number("vision_width"),
            intermediate_size=self.number("vision_intermediate_size"),
            num_hidden_layers=self.number("vision_layers"),
            num_attention_heads=self.number("vision_heads"),
            image_size=self.number("image_size"),
            patch_size=self.number("patch_size"),
        )
        return self.configured(vision, {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096})

    def initialize(self, net: LlavaForConditionalGeneration) -> None:
        """Load the published weights, or draw random ones where there is no data."""
        if (directory := self.data_dirs.get(self.weights)) is not None:
            load_parts(net, directory)
        else:
            super().initialize(net)

    @cached_property
    def _conversations(self) -> Conversations:
        return Conversations(self.data_dirs[self.samples])

    def dataset(self, *, train: bool) -> ReadSamples:
        """Return the samples that are not held out, or those that are."""
        conversations = self._conversations
        distance = max(2, len(conversations) // self.number("eval_samples"))
        chosen = np.flatnonzero((np.arange(len(conversations)) % distance != 0) == train)
        vocabulary = self.data_dirs[self.weights] / "vicuna" / "tokenizer.json"
        tokenizer = read_tokenizer(vocabulary, self.number("vocab_size"))
        return self.samples_of(len(chosen), lambda at, side: conversations.read(int(chosen[at]), side), tokenizer)


def load_parts(net: LlavaForConditionalGeneration, directory: Path) -> None:
    """Give a model of the meta device the weights of Vicuna, CLIP and the projector that LLaVA was published with."""
    config: Any = net.config
    text: Any = load_pretrained(LlamaForCausalLM, config.text_config, directory / "vicuna")
    net.model.language_model, net.lm_head = text.model, text.lm_head
    net.model.vision_tower = load_pretrained(CLIPVisionModel, config.vision_config, directory / "clip")
    path = directory / "projector" / "mm_projector.bin"
    names = {"model.mm_projector.0": "linear_1", "model.mm_projector.2": "linear_2"}
    with raising(DataError, f"{path}: is not the projector's weights", *UNREADABLE, UnpicklingError):
        parts = torch.load(path, map_location="cpu", weights_only=True)
        state = {
            f"{names[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": part.float() for name, part in parts.items()
        }
        net.model.multi_modal_projector.load_state_dict(state, assign=True)

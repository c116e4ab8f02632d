"""Generation of images from captions: diffusion and flow matching on latents."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
import torch.nn.functional as F  # noqa: N812
from diffusers import AutoencoderKL, FluxTransformer2DModel, UNet2DConditionModel
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedModel

from accelmark.datasets.shards import bytes_at, tar_members
from accelmark.frameworks.pytorch.batches import ReadSamples, TaskFamily, generator_for
from accelmark.frameworks.pytorch.case import Batch
from accelmark.frameworks.pytorch.model.hugging_face import initial_net, with_padding
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import UNREADABLE, DataError, raising
from accelmark.tasks.images.pytorch_imagenet import ScaledRate
from accelmark.tasks.text.pytorch import read_tokenizer
from accelmark.train.batches import Arrays

_SUFFIXES: Final = ("npy", "txt")


class CaptionedLatents:
    """The moments of images' latents (means, then logarithms of variances) with captions, read by offset."""

    def __init__(self, directory: Path) -> None:
        self._shards = sorted(directory.glob("*.tar"))
        if not self._shards:
            raise DataError(f"{directory}: expected shards (*.tar) here, found none")
        self._places = np.concatenate([_places(path, number) for number, path in enumerate(self._shards)])

    def __len__(self) -> int:
        return len(self._places)

    def read(self, index: int, shape: tuple[int, ...]) -> tuple[npt.NDArray[np.float32], str]:
        """Return the moments of sample ``index``, of ``shape``, and its caption."""
        shard, *places = self._places[index].tolist()
        path = self._shards[shard]
        where = f"{path}: sample at byte {places[0]}"
        with raising(DataError, f"{where}: cannot be read", OSError, ValueError):
            with path.open("rb") as file:
                moments, text = (bytes_at(file, *places[start : start + 2]) for start in (0, 2))
            array = np.load(BytesIO(moments), allow_pickle=False)
            caption = text.decode("utf-8").strip()
        if array.shape != shape or array.dtype.kind != "f" or not np.isfinite(array).all():
            found = f"has shape {array.shape} of {array.dtype}"
            raise DataError(f"{where}: {found}; expected finite moments of shape {shape}")
        return array.astype(np.float32), caption


def _places(path: Path, number: int) -> npt.NDArray[np.int64]:
    """Return shard, offset and size of the moments, and offset and size of the caption of each sample."""
    members: dict[str, dict[str, tuple[int, int]]] = {}
    for member in tar_members(path):
        key, _, suffix = member.name.rpartition(".")
        if suffix in _SUFFIXES:
            members.setdefault(key, {})[suffix] = member.offset, member.size
    with raising(DataError, f"{path}: a sample lacks its .npy or .txt", KeyError):
        rows = [(number, *parts["npy"], *parts["txt"]) for parts in members.values()]
    return np.array(rows, np.int64).reshape(-1, 5)


class EncodedRows:
    """The rows of all ``*.arrow`` below a directory, memory-mapped; arrays are ``.npy`` files of bf16 as uint16."""

    def __init__(self, directory: Path, shapes: Mapping[str, tuple[int, ...]], numbers: tuple[str, ...] = ()) -> None:
        self._paths, self._shapes, self._numbers = sorted(directory.rglob("*.arrow")), shapes, numbers
        if not self._paths:
            raise DataError(f"{directory}: expected rows (*.arrow) here, found none")
        self._tables = [_opened(path) for path in self._paths]
        self._ends = np.cumsum([table.num_rows for table in self._tables])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int) -> Arrays:
        """Return the arrays of row ``index``, uint16, and its whole numbers."""
        part = int(np.searchsorted(self._ends, index, side="right"))
        table, row = self._tables[part], index - (int(self._ends[part - 1]) if part else 0)
        where = f"{self._paths[part]}: row {row}"
        with raising(DataError, f"{where} cannot be read", *UNREADABLE):
            found = {name: np.load(BytesIO(table[name][row].as_py()), allow_pickle=False) for name in self._shapes}
            numbers = {name: np.array(int(table[name][row].as_py())) for name in self._numbers}
        for name, array in found.items():
            if array.shape != self._shapes[name] or array.dtype != np.uint16:
                has = f"{name} has shape {array.shape} of {array.dtype}"
                raise DataError(f"{where}: {has}; expected {self._shapes[name]} of uint16")
        return {**found, **numbers}


def _opened(path: Path) -> Any:
    with raising(DataError, f"{path}: is not a readable stream of Arrow", OSError, pa.ArrowInvalid):
        sys.audit("open", str(path), "r", 0)  # the library opens it itself
        with pa.memory_map(str(path)) as file:  # whose pages stay mapped: thousands of files would stay open
            return pa.ipc.open_stream(file).read_all()


class VelocityPrediction(TaskFamily):
    """Prediction of velocities, of shape (samples, channels, height, width), by least squares."""

    ratios: ClassVar = {"eval_loss": ("loss", "count")}

    @abstractmethod
    def velocities(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return predicted and actual velocities."""

    def _squared_errors(self, model: nn.Module, batch: Batch) -> Tensor:
        predicted, target = self.velocities(model, batch)
        return F.mse_loss(predicted.float(), target.float(), reduction="none").mean((1, 2, 3))

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        return self._squared_errors(model, batch).mean()

    def eval_sums(self, model: nn.Module, batch: Batch) -> Mapping[str, Tensor]:
        errors = self._squared_errors(model, batch)
        return {"loss": errors.sum(), "count": torch.ones_like(errors).sum()}


CHANNELS: Final = 4
"""Of latents."""
SCALE: Final = 0.18215
"""Latents are multiplied with it, so that their variance is about 1."""
STEPS: Final = 1000
BETAS: Final = (0.00085, 0.012)
"""Of the noise's schedule: its steps, and the variances added in the first and the last."""
_LOG_VARIANCES: Final = (-30.0, 20.0)


class Denoiser(nn.Module):
    """A network that predicts the velocity of noised latents (Salimans & Ho 2022, arXiv:2202.00512), from captions."""

    kept: Tensor

    def __init__(self, net: Any, text_encoder: PreTrainedModel) -> None:
        super().__init__()
        self.net = net
        self.text_encoder: Any = text_encoder.requires_grad_(False)
        low, high = (each**0.5 for each in BETAS)
        # The device is named: after a from_pretrained() of transformers 5.23, linspace may ignore the default one.
        signal = (1 - torch.linspace(low, high, STEPS, device=torch.get_default_device()) ** 2).cumprod(0)
        self.register_buffer("kept", signal, persistent=False)

    def forward(self, latent: Tensor, noise: Tensor, step: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return predicted and actual velocity, of the shape of ``latent``; ``step`` is from 0 to 999."""
        kept = self.kept[step].view(-1, 1, 1, 1)
        signal, spread = kept.sqrt(), (1 - kept).sqrt()
        with torch.no_grad():
            context = self.text_encoder(input_ids=tokens).last_hidden_state
        velocity: Tensor = self.net(signal * latent + spread * noise, step, context).sample
        return velocity, signal * noise - spread * latent


def padded(tokenizer: Tokenizer, text: str, length: int) -> list[int]:
    """Return the tokens of a caption with its start and end; a longer one is cut off, a shorter one padded with 0."""
    ids = tokenizer.encode(text).ids
    ids = ids if len(ids) <= length else [*ids[: length - 1], ids[-1]]
    return [*ids, *[0] * (length - len(ids))]


def unet(number: Callable[[str], int]) -> nn.Module:
    """Build the UNet of Stable Diffusion 2 (Rombach et al. 2021, arXiv:2112.10752), with 64 channels a head."""
    widths = [number("width") * factor for factor in (1, 2, 4, 4)]
    network: Any = UNet2DConditionModel  # which is untyped
    net: nn.Module = network(
        sample_size=number("latent_size"),
        block_out_channels=widths,
        cross_attention_dim=number("text_width"),
        attention_head_dim=[width // 64 for width in widths],  # which is diffusers' name for the number of heads
        use_linear_projection=True,
    )
    return net


def text_config(number: Callable[[str], int]) -> CLIPTextConfig:
    """Return the configuration of the text encoder (Radford et al. 2021, arXiv:2103.00020) without its last layer."""
    width = number("text_width")
    config = CLIPTextConfig(
        vocab_size=number("vocab_size"),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=number("text_layers"),
        num_attention_heads=number("text_heads"),
        max_position_embeddings=number("text_length"),
        hidden_act="gelu",
    )
    return with_padding(config)


def autoencoder(number: Callable[[str], int]) -> nn.Module:
    """Build the autoencoder, which reduces the sides of an image to an eighth."""
    network: Any = AutoencoderKL
    net: nn.Module = network(
        sample_size=8 * number("latent_size"),
        block_out_channels=[number("autoencoder_width") * factor for factor in (1, 2, 4, 4)],
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
    )
    return net


class Diffusion(ScaledRate, VelocityPrediction):
    """Training of Stable Diffusion 2's UNet on shards of captioned latents; the text encoder is not trained."""

    samples: ClassVar[str]
    """Name of the data set of latents."""
    weights: ClassVar[str]
    """Name of the data set with the text encoder and its tokenizer, in its folder ``hf``."""

    def build_model(self) -> nn.Module:
        """Build the UNet with random weights, and the text encoder with its published ones."""
        net = unet(self.number)
        encoder = initial_net(CLIPTextModel, text_config(self.number), self.data_dirs.get(self.weights))
        return Denoiser(net, encoder)

    def dataset(self, *, train: bool) -> ReadSamples:
        """Return the latents of ``train`` or of ``val``, drawn from their moments, with noise and a step."""
        latents = CaptionedLatents(self.data_dirs[self.samples] / ("train" if train else "val"))
        tokenizer = read_tokenizer(self.data_dirs[self.weights] / "hf" / "tokenizer.json", self.number("vocab_size"))
        size, length = self.number("latent_size"), self.number("text_length")

        def read(index: int, random: torch.Generator) -> Batch:
            """Return ``latent`` and ``noise`` (4, size, size), ``step``, and ``tokens``, filled up with zeros."""
            moments, caption = latents.read(index, (2 * CHANNELS, size, size))
            mean, log_variance = torch.from_numpy(moments).chunk(2)
            drawn, noise = torch.randn(2, *mean.shape, generator=random)
            return {
                "latent": SCALE * (mean + (log_variance.clamp(*_LOG_VARIANCES) / 2).exp() * drawn),
                "noise": noise,
                "step": torch.randint(0, STEPS, (), generator=random),
                "tokens": torch.tensor(padded(tokenizer, caption, length)),
            }

        return ReadSamples(len(latents), read)

    def synthetic_batch(self, size: int) -> Batch:
        random, side = generator_for(self.place.seed), self.number("latent_size")
        latent, noise = torch.randn(2, size, CHANNELS, side, side, generator=random)
        shape = size, self.number("text_length")
        return {
            "latent": latent,
            "noise": noise,
            "step": torch.randint(0, STEPS, (size,), generator=random),
            "tokens": torch.randint(0, self.number("vocab_size"), shape, generator=random),
        }

    def velocities(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        predicted, target = model(batch["latent"], batch["noise"], batch["step"], batch["tokens"])
        return predicted, target


_FLUX_BLOCKS: Final = ("FluxTransformerBlock", "FluxSingleTransformerBlock")
FLOW_CHANNELS: Final = 16
"""Of latents."""
_FLOW_SHIFT, _FLOW_SCALE = 0.1159, 0.3611
"""Latents are shifted by it and multiplied with it, so that their mean is about 0 and their variance about 1."""
EMPTY_SHARE: Final = 0.1
"""Of training samples, whose captions are replaced by the empty one."""
EVAL_TIMES: Final = 8
"""Number of times in the evaluation: 0, 1/8, ..., 7/8."""


class FlowMatcher(nn.Module):
    """A transformer of diffusers that predicts the velocity from images to noise, on patches of 2 x 2."""

    def __init__(self, net: Any) -> None:
        super().__init__()
        self.net = net

    def forward(self, batch: Batch) -> Tensor:
        """Return the predicted velocity, of the shape of ``latent``; at ``time`` 0 there is no noise."""
        latent, time = batch["latent"], batch["time"]
        mixed = torch.lerp(latent, batch["noise"], time.view(-1, 1, 1, 1))
        side = latent.shape[2] // 2
        rows, columns = torch.meshgrid(*[torch.arange(side, device=latent.device)] * 2, indexing="ij")
        places = torch.stack([torch.zeros_like(rows), rows, columns], 2).flatten(0, 1)
        predicted = self.net(
            hidden_states=F.pixel_unshuffle(mixed, 2).flatten(2).transpose(1, 2),
            encoder_hidden_states=batch["words"].to(latent.dtype),
            pooled_projections=batch["caption"].to(latent.dtype),
            timestep=time,
            img_ids=places,
            txt_ids=places.new_zeros(batch["words"].shape[1], 3),
        ).sample
        return F.pixel_shuffle(predicted.transpose(1, 2).unflatten(2, (side, side)), 2)


def _initialize_flux(net: nn.Module) -> None:
    """Draw initial weights: Xavier's, 0.02 for time and caption, 0 for modulations and the last layer.

    The latter are those of DiT (Peebles & Xie 2022, arXiv:2212.09748, section 3.2).
    """
    for name, layer in net.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        if name == "proj_out" or name.endswith(
            ("norm.linear", "norm1.linear", "norm1_context.linear", "norm_out.linear")
        ):
            nn.init.zeros_(layer.weight)
        elif name.startswith("time_text_embed"):
            nn.init.normal_(layer.weight, std=0.02)
        else:
            nn.init.xavier_uniform_(layer.weight)
        nn.init.zeros_(layer.bias)


def flow_sample(rows: EncodedRows, empty: Batch | None, index: int, random: torch.Generator) -> Batch:
    """Return ``latent``, drawn from its moments, ``noise``, ``time``, and ``words`` and ``caption`` in bf16.

    In training, with the encodings of the ``empty`` caption, it replaces a tenth of the captions, and times are drawn
    evenly from 0 to 1.
    """
    tensors = {name: torch.from_numpy(array) for name, array in rows.read(index).items()}
    arrays = {name: part.view(torch.bfloat16) for name, part in tensors.items() if part.ndim}
    mean, log_variance = arrays["mean"].float(), arrays["logvar"].float()
    drawn, noise = torch.randn(2, *mean.shape, generator=random)
    texts: Batch = {"words": arrays["t5_encodings"], "caption": arrays["clip_encodings"]}
    if empty is not None:
        time = torch.rand((), generator=random)
        texts = empty if torch.rand((), generator=random) < EMPTY_SHARE else texts
    else:
        time = tensors["timestep"] / EVAL_TIMES
    latent = _FLOW_SCALE * (mean + (log_variance / 2).exp() * drawn - _FLOW_SHIFT)
    return {"latent": latent, "noise": noise, "time": time.float(), **texts}


class FlowMatching(VelocityPrediction):
    """Training of a FLUX.1 from random weights on encoded images and captions, as in MLPerf Training."""

    samples: ClassVar[str]
    """Name of the data set, with rows in ``train`` and ``val`` and the empty caption's encodings in ``empty``."""

    def build_model(self) -> nn.Module:
        """Build the transformer; rotations of a head are for 1/8 the text's and for 7/16 each rows and columns."""
        head = self.number("head_dim")
        place = head * 7 // 32 * 2
        transformer: Any = FluxTransformer2DModel  # which is untyped
        net: nn.Module = transformer(
            in_channels=4 * FLOW_CHANNELS,
            num_layers=self.number("double_layers"),
            num_single_layers=self.number("single_layers"),
            attention_head_dim=head,
            num_attention_heads=self.number("num_heads"),
            joint_attention_dim=self.number("text_width"),
            pooled_projection_dim=self.number("pooled_width"),
            axes_dims_rope=(head - 2 * place, place, place),
        )
        _initialize_flux(net)
        return FlowMatcher(net)

    def checkpointed_blocks(self, model: nn.Module) -> list[nn.Module]:
        return [module for module in model.modules() if type(module).__name__ in _FLUX_BLOCKS]

    @property
    def _text_shapes(self) -> dict[str, tuple[int, ...]]:
        words = self.number("text_length"), self.number("text_width")
        return {"t5_encodings": words, "clip_encodings": (self.number("pooled_width"),)}

    def dataset(self, *, train: bool) -> Mapping[str, Tensor] | ReadSamples:
        """Return the rows of ``train`` or of ``val``, which have their times."""
        latent = FLOW_CHANNELS, self.number("latent_size"), self.number("latent_size")
        shapes, directory = {"mean": latent, "logvar": latent, **self._text_shapes}, self.data_dirs[self.samples]
        if not train:
            rows = EncodedRows(directory / "val", shapes, ("timestep",))
            return ReadSamples(len(rows), partial(flow_sample, rows, None))
        empty = []
        for name, shape in self._text_shapes.items():
            path = directory / "empty" / f"{name.removesuffix('_encodings')}_empty.npy"
            with raising(DataError, f"{path}: expected numbers of shape {shape}", OSError, ValueError):
                array = np.load(path, allow_pickle=False).astype(np.float32).reshape(shape)
            empty.append(torch.from_numpy(array).bfloat16())
        rows, texts = EncodedRows(directory / "train", shapes), dict(zip_strict(("words", "caption"), empty))
        return ReadSamples(len(rows), partial(flow_sample, rows, texts))

    def synthetic_batch(self, size: int) -> Batch:
        random, side = generator_for(self.place.seed), self.number("latent_size")
        latent, noise = torch.randn(2, size, FLOW_CHANNELS, side, side, generator=random)
        words, caption = (
            torch.randn(size, *shape, generator=random).bfloat16() for shape in self._text_shapes.values()
        )
        time = torch.rand(size, generator=random)
        return {"latent": latent, "noise": noise, "time": time, "words": words, "caption": caption}

    def velocities(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return model(batch), batch["noise"] - batch["latent"]

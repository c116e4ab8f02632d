"""Initial weights of large models: random, from a checkpoint of transformers, or of the first Megatron-LM."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from transformers import GPT2Config, PreTrainedConfig, PreTrainedModel

from accelmark.frameworks.pytorch.batches import generator_for
from accelmark.frameworks.pytorch.model.identity import materialize
from accelmark.spec.errors import UNREADABLE, DataError, raising

C = TypeVar("C", bound=PreTrainedConfig)


def load_pretrained(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, directory: Path, *, new: Sequence[str] = ()
) -> PreTrainedModel:
    """Return the model with the weights of the checkpoint in ``directory``, in fp32.

    Weights whose names begin with a part in ``new`` may be missing, and are then random. Raises DataError: others are.
    """
    if not directory.is_dir():
        raise DataError(f"{directory}: is not a checkpoint of {model_class.__name__}: the directory does not exist")
    with raising(DataError, f"{directory}: is not a checkpoint of {model_class.__name__}", *UNREADABLE):
        loaded: Any = model_class.from_pretrained(
            directory, config=config, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    net: PreTrainedModel
    net, report = loaded
    needed = (name for name in report["missing_keys"] if not name.endswith("num_batches_tracked"))
    if missing := sorted(name for name in needed if not name.startswith(tuple(new))):
        raise DataError(f"{directory}: lacks {len(missing)} weights of {model_class.__name__}: {missing[0]}, ...")
    return net


def initial_net(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, directory: Path | None, *, new: Sequence[str] = ()
) -> PreTrainedModel:
    """Return the model with the weights in ``directory/hf``; with random ones without data, none on the meta device."""
    if directory is None or torch.get_default_device().type == "meta":
        # transformers creates some weights on the CPU, also under the meta device.
        net: Any = model_class(config)
        moved: PreTrainedModel = net.to(torch.get_default_device())
        return moved
    return load_pretrained(model_class, config, directory / "hf", new=new)


def backbone_config(config_class: Callable[..., C], **values: Any) -> C:
    """Return the configuration of a backbone; its class does not declare ``out_features`` and ``out_indices``."""
    return config_class(**values)


def load_backbone(backbone: PreTrainedModel, directory: Path | None, *, new: Sequence[str] = ()) -> None:
    """Give a part of a model the weights in ``directory/hf``, unless there is no data, or it is on the meta device."""
    if directory is None or torch.get_default_device().type == "meta":
        return
    loaded = load_pretrained(type(backbone), backbone.config, directory / "hf", new=new)
    state = loaded.state_dict()
    backbone.load_state_dict({name: state[name] for name in backbone.state_dict()})


_MEGATRON: Final = {
    r"^transformer\.layers\.": "h.",
    r"^word_embeddings\.": "wte.",
    r"^(transformer\.)?position_embeddings\.": "wpe.",
    r"^transformer\.final_layernorm\.": "ln_f.",
    r"\.input_layernorm\.": ".ln_1.",
    r"\.post_attention_layernorm\.": ".ln_2.",
    r"\.attention\.query_key_value\.": ".attn.c_attn.",
    r"\.attention\.dense\.": ".attn.c_proj.",
    r"\.mlp\.dense_h_to_4h\.": ".mlp.c_fc.",
    r"\.mlp\.dense_4h_to_h\.": ".mlp.c_proj.",
}
"""Parts of the names of GPT-2's weights in the first Megatron-LM -> those of transformers."""
_MATRIX: Final = re.compile(r"\.c_\w+\.weight$")
"""Names of matrices that transformers stores as (in, out)."""


def gpt2_config(*, attention: str = "sdpa", **sizes: Any) -> GPT2Config:
    """Return the configuration of GPT-2's layers in another model, without tokens of a meaning."""
    return GPT2Config(**sizes, bos_token_id=None, eos_token_id=None, attn_implementation=attention)  # type: ignore[call-arg]


def load_megatron_gpt2(net: nn.Module, path: Path, others: Mapping[str, str] | None = None) -> None:
    """Give ``net``, which has a ``GPT2Model`` as ``net.net``, the weights in a file of the first Megatron-LM.

    ``others`` has further names in the file, and those in ``net``. Raises DataError: the file has other weights.
    """
    damaged = raising(DataError, f"{path}: PyTorch cannot read it as weights alone", *UNREADABLE, UnpicklingError)
    with damaged, torch.serialization.safe_globals([argparse.Namespace, set]):
        found: Any = torch.load(path, weights_only=True, map_location="cpu")
    stored: Mapping[str, Tensor] = found.get("module", found.get("model", found))
    state = {}
    for name, weight in stored.items():
        ours = (others or {}).get(name)
        if ours is None:
            ours = f"net.{name}"
            for part, other in _MEGATRON.items():
                ours = "net." + re.sub(part, other, ours.removeprefix("net."))
        state[ours] = weight.T if _MATRIX.search(ours) else weight
    with raising(DataError, f"{path}: has other weights", RuntimeError):
        net.load_state_dict(state)


def initialize_normal(model: nn.Module, std: float, seed: int) -> None:
    """Materialize a model of the meta device on the CPU: matrices normal with mean 0, biases zero, other vectors one.

    Every parameter has its own random generator, so that the values do not depend on the number of threads.
    """
    materialize(model, torch.device("cpu"))

    def fill(item: tuple[int, tuple[str, Tensor]]) -> None:
        number, (name, parameter) = item
        with torch.no_grad():  # a setting of each thread
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim > 1 or name.endswith("sinks"):
                parameter.normal_(0.0, std, generator=generator_for(seed, number))
            else:
                parameter.fill_(1.0)

    with ThreadPoolExecutor(max_workers=torch.get_num_threads()) as pool:
        list(pool.map(fill, enumerate(model.named_parameters())))


def compute_buffers(model: Any) -> None:
    """Give the buffers of a model of transformers their initial values, by building each layer that has some again."""
    for module in model.modules():
        if dict(module.named_buffers(recurse=False)):
            fresh = type(module)(model.config)
            for name, buffer in fresh.named_buffers(recurse=False):
                setattr(module, name, buffer)

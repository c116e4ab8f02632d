"""Initial weights from a checkpoint of transformers, or of the first Megatron-LM."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from transformers import GPT2Config, PreTrainedConfig, PreTrainedModel

from accelmark.spec.errors import UNREADABLE, DataError, raising

C = TypeVar("C", bound=PreTrainedConfig)


def load_pretrained(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    directory: Path,
    *,
    new: Sequence[str] = (),
) -> PreTrainedModel:
    """Return the model with the weights of the checkpoint in ``directory``, in fp32.

    ``new`` has the first parts of the names of weights that may be missing and are then random, as a new output layer.

    Raises DataError: the checkpoint cannot be read, or lacks a weight of this architecture.
    """
    if not directory.is_dir():
        raise DataError(f"{directory}: is not a checkpoint of {model_class.__name__}: the directory does not exist")
    with raising(DataError, f"{directory}: is not a checkpoint of {model_class.__name__}", *UNREADABLE):
        loaded: Any = model_class.from_pretrained(
            directory,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
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
    """Return the model with the weights in ``directory/hf``, or with random ones where there is no data.

    On the meta device no weights are read.
    """
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
    """Give a part of a model, also one with frozen normalization, the weights in ``directory/hf``.

    Nothing is done where there is no data, or on the meta device.
    """
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

    ``others`` has further names in the file, and those in ``net``.

    Raises DataError: the file cannot be read as weights alone, or has other weights.
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

"""Models of transformers: their attention, mixtures of experts, and initial weights.

Attention is causal, by scaled dot-product attention, or of padded samples. Weights are random, from a checkpoint of
transformers, or of the first Megatron-LM.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
import transformers
from torch import Tensor, autograd, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, GPT2Config, PreTrainedConfig, PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, batched_mm_experts_forward, grouped_mm_experts_forward
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from accelmark.frameworks.pytorch.batches import generator_for
from accelmark.frameworks.pytorch.model.identity import materialize
from accelmark.spec.errors import UNREADABLE, DataError, RequestError, raising
from accelmark.spec.plugins.requirements import pip_install

if TYPE_CHECKING:
    from accelmark.frameworks.pytorch.context_parallel import SequencePart

C = TypeVar("C", bound=PreTrainedConfig)
CAUSAL: Final = "accelmark_causal"
"""Name of :func:`causal_attention` in a configuration's ``attn_implementation``."""
_GROUPS_HEADS: Final = "enable_gqa" in (F.scaled_dot_product_attention.__doc__ or "")
"""Whether the kernels take fewer heads of keys than of queries (since PyTorch 2.5)."""


def causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    documents: Tensor | None = None,
    sequence: SequencePart | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention without a mask tensor where possible, so that a flash kernel can be chosen.

    transformers' own ``sdpa`` tests the position ids with ``.all()``, which synchronizes on an accelerator and fails on
    the meta device, and passes a dense mask under ``torch.compile``. It builds no mask for a custom attention function.

    Args:
        query: shape (batch, heads, length, width); ``key`` and ``value`` have key-value heads.
        sliding_window: number of latest positions that a token attends to; None: all earlier ones.
        s_aux: one learned score per head that takes part in the softmax without a value, the "attention sink" of
            gpt-oss (OpenAI 2025, arXiv:2508.10925, section 2.2).
        documents: document number of each token, shape (batch, whole length); tokens attend within their document.
        sequence: this rank's part of each sequence, to which query, key and value belong; None: all of it.
    """
    if attention_mask is not None:
        raise ValueError("causal_attention takes no attention mask: samples are not padded")

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return causal attention of queries at the last positions of ``key``."""
        length, width = query.shape[2], value.shape[3]
        mask = _mask(length, key.shape[2], sliding_window, documents, query.device)
        # No products of the model: on the meta device, where FLOPs are counted, sinks are left out.
        has_sink = s_aux is not None and not query.is_meta
        if s_aux is not None and has_sink:
            query, key, value = _with_sink(query, key, value, s_aux, scaling)
            mask = None if mask is None else F.pad(mask, (1, 0, 1, 0), value=True)
        if mask is None and query.shape[2] != key.shape[2]:
            mask = causal_lower_right(query.shape[2], key.shape[2])
        groups = query.shape[1] // key.shape[1]
        if groups > 1 and not _GROUPS_HEADS:
            key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        grouped = {"enable_gqa": True} if groups > 1 and _GROUPS_HEADS else {}
        output: Tensor = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scaling, **grouped
        )
        return output[:, :, 1:, :width] if has_sink else output

    output = attend(query, key, value) if sequence is None else sequence.attend(query, key, value, attend)
    return output.transpose(1, 2), None


AttentionInterface.register(CAUSAL, causal_attention)


def _mask(
    num_queries: int, length: int, window: int | None, documents: Tensor | None, device: torch.device
) -> Tensor | None:
    """Return True where a query, at one of the last positions, attends to a key; None: to all before it."""
    if documents is None and (window is None or window >= length):
        return None
    position = torch.arange(length, device=device)
    distance = position[-num_queries:, None] - position
    mask = distance >= 0
    if window is not None:
        mask = mask & (distance < window)
    if documents is None:
        return mask
    documents = documents[:, None, :length]
    return mask & (documents[:, :, -num_queries:, None] == documents[:, :, None])


def _with_sink(
    query: Tensor, key: Tensor, value: Tensor, sink: Tensor, scaling: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Put a key with the score ``sink`` and the value 0 before the others, and a query whose output is dropped.

    One more dimension holds the score: 1 in every query, ``sink / scaling`` in that key, 0 in the others.
    """
    heads, groups = query.shape[1], query.shape[1] // key.shape[1]
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    query = F.pad(F.pad(query, (0, 1), value=1.0), (0, 0, 1, 0))
    key = F.pad(key, (0, 1, 1, 0))
    first = torch.zeros_like(key[:, :, :1])
    first[..., -1] = (sink / scale).to(key.dtype).view(1, heads, 1)
    key = torch.cat((first, key[:, :, 1:]), 2)
    # Kernels want values as wide as keys.
    return query, key, F.pad(value, (0, key.shape[3] - value.shape[3], 1, 0))


_PADDED: Final = "accelmark_padded"


def padding_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """Return the dense mask of transformers' ``sdpa``, also where all is true, for which a test would synchronize."""
    dense = {**kwargs, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask: Tensor | None = sdpa_mask(*args, **dense)
    return mask


def with_padding(config: C) -> C:
    """Set the attention of a model's configuration to scaled dot-product attention with :func:`padding_mask`."""
    config._attn_implementation = _PADDED
    return config


AttentionInterface.register(_PADDED, sdpa_attention_forward)
AttentionMaskInterface.register(_PADDED, padding_mask)


EXPERTS: Final = "accelmark_experts"
"""Name of :func:`experts_forward` in a configuration's ``experts_implementation``."""


def experts_forward(self: nn.Module, hidden: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted sum of the chosen experts' outputs of each token.

    Tokens are sorted by expert and multiplied group by group, without reading a tensor. On the meta device, where
    FLOPs are counted, group sizes have no values; the weights of each token's active experts are gathered there.
    ``hidden`` is of shape (tokens, width), ``experts`` and their ``weights`` of (tokens, active experts).
    """
    if hidden.is_meta:
        counted: Tensor = batched_mm_experts_forward(self, hidden, experts, weights)
        return counted
    layer: Any = self
    if torch.is_autocast_enabled(hidden.device.type):
        # Grouped products are not among the operators of autocast.
        layer = _Converted(self, torch.get_autocast_dtype(hidden.device.type))
    output: Tensor = grouped_mm_experts_forward(layer, hidden, experts, weights)
    return output


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, experts_forward)


class _Converted:
    """A layer seen with its parameters converted to a type."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype) -> None:
        self._layer = layer
        self.__dict__.update((name, parameter.to(dtype)) for name, parameter in layer.named_parameters())

    def __getattr__(self, name: str) -> object:
        return getattr(self._layer, name)


def balancing_loss(router_logits: Sequence[Tensor], num_active: int) -> Tensor:
    """Return the load-balancing loss of the Switch Transformer (Fedus et al. 2021, arXiv:2101.03961, equations 4-6).

    ``router_logits`` are of shape (tokens, experts); the loss is ``num_active`` where experts are used evenly.
    """
    logits = torch.cat([logit.flatten(0, -2) for logit in router_logits]).float()
    num_experts = logits.shape[-1]
    chosen = F.one_hot(logits.topk(num_active, -1).indices, num_experts).float().sum(1).mean(0)
    return num_experts * (chosen * logits.softmax(-1).mean(0)).sum()


def spread_experts(model: nn.Module, names: Sequence[str], data: DeviceMesh) -> set[nn.Parameter]:
    """Give each rank of ``fsdp`` an equal number of the experts of each named layer, and return their parameters.

    Each token is sent to the ranks of its experts by an all-to-all, and the results come back by another one (Lepikhin
    et al. 2020, arXiv:2006.16668). Every rank has the whole model, or its structure on the meta device; ``data`` is the
    axis fsdp, or the axes dp and fsdp.
    """
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # most of a second, for this alone

    try:
        from transformers.distributed.expert_parallel import AllToAllEP
    except ImportError as error:
        raise RequestError(
            f"parallelism: ep needs the exchange of tokens of transformers 5.23, found {transformers.__version__}; "
            f"run {pip_install(['transformers>=5.23'])}"
        ) from error
    if not names:
        raise RequestError(f"parallelism: {type(model).__name__} has no experts that ep could spread over ranks")
    ranks = data["fsdp"]
    placements = [Replicate()] * (data.ndim - 1) + [Shard(0)]
    for name in names:
        layer: Any = model.get_submodule(name)
        if layer.num_experts % ranks.size():
            raise RequestError(
                f"parallelism: ep={ranks.size()} does not divide the {layer.num_experts} experts of {name}"
            )
        for local_name, parameter in list(layer.named_parameters(recurse=False)):
            part = distribute_tensor(parameter.detach(), data, placements, src_data_rank=None)
            layer.register_parameter(local_name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        layer.num_experts //= ranks.size()
        exchange: Any = AllToAllEP.__new__(AllToAllEP)  # among ranks with different samples, which split no layers
        exchange.experts_forward, exchange.num_local_experts = layer.forward, layer.num_experts
        exchange.ep_mesh, exchange.tp_mesh = ranks, SimpleNamespace(size=lambda: 1)
        layer.forward = partial(_forward, layer, exchange, data)
    return {parameter for name in names for parameter in model.get_submodule(name).parameters()}


def _forward(layer: nn.Module, exchange: Any, data: DeviceMesh, hidden: Tensor, *choice: Tensor) -> Tensor:
    """Return the experts' outputs for this rank's tokens, computed with the local parts of the parameters."""
    whole: dict[str, Any] = dict(layer.named_parameters(recurse=False))
    averaged: Any = _Averaged
    layer._parameters.update({name: averaged.apply(each.to_local(), data) for name, each in whole.items()})
    try:
        output: Tensor = exchange(hidden, *choice)
    finally:
        layer._parameters.update(whole)
    return output.to(hidden.dtype)


class _Averaged(autograd.Function):
    """Averages the gradient, a sum over the tokens of ``fsdp`` neighbours, over all ranks, as FSDP2 does."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, data: DeviceMesh) -> Tensor:
        ctx.data = data
        return local.view_as(local)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        gradient = gradient / ctx.data.size()
        if ctx.data.ndim > 1:
            dist.all_reduce(gradient, group=ctx.data.get_group("dp"))
        return gradient, None


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

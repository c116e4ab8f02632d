"""The forward and backward FLOPs of one sample of each training case, by published formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from accelmark.train.formulas import attention_flops, conv_flops, dense_flops

Model = Mapping[str, Any]


def published_flops(name: str, model: Model) -> float:
    """Return the FLOPs of the case ``name`` with the settings ``model``."""
    return FORMULAS[name](model)


def _bert(model: Model) -> float:
    """Encoder, head on masked tokens, and attention (PaLM, arXiv:2204.02311, appendix B)."""
    hidden, length, layers = model["hidden_size"], model["seq_length"], model["num_layers"]
    encoder = layers * (4 * hidden * hidden + 2 * hidden * model["intermediate_size"])
    head = hidden * hidden + hidden * model["vocab_size"]
    dense = dense_flops(encoder, length) + dense_flops(head, model["max_predictions"])
    return dense + attention_flops(layers, hidden, length)


def _llama(model: Model) -> float:
    """Layers, output layer and attention (PaLM, appendix B)."""
    hidden, length, layers = model["hidden_size"], model["seq_length"], model["num_layers"]
    kv_width = hidden * model["num_kv_heads"] // model["num_heads"]
    layer = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * model["intermediate_size"]
    weights = layers * layer + hidden * model["vocab_size"]
    return dense_flops(weights, length) + attention_flops(layers, hidden, length)


def _gpt(model: Model) -> float:
    """As Llama, with as many key-value heads as heads and a feed-forward part of two matrices."""
    gate = model["num_layers"] * model["hidden_size"] * model["intermediate_size"]
    return _llama({**model, "num_kv_heads": model["num_heads"]}) - dense_flops(gate, model["seq_length"])


def _llama_mini(model: Model) -> float:
    """As Llama, with as many key-value heads as heads, over bytes."""
    return _llama({**model, "num_kv_heads": model["num_heads"], "vocab_size": 256})


def _minilm_finetune(model: Model) -> float:
    """Encoder, head of two classes, and attention over all tokens including padding (PaLM, appendix B)."""
    hidden, length, layers = model["hidden_size"], model["seq_length"], model["num_layers"]
    weights = layers * (4 * hidden * hidden + 2 * hidden * model["intermediate_size"])
    dense = dense_flops(weights, length) + dense_flops(hidden * 2, 1)
    return dense + attention_flops(layers, hidden, length)


def _resnet50(model: Model) -> float:
    """Convolutions and classifier (He et al. 2015, arXiv:1512.03385, table 1, with v1.5's strides)."""
    return sum(_resnet50_convs(model)) + dense_flops(2048 * model["num_classes"], 1)


def _resnet50_convs(model: Model) -> Iterator[float]:
    size = -(-model["image_size"] // 2)
    yield conv_flops(size, 7, 3, 64, is_first=True)
    size, before = -(-size // 2), 64
    for stage, width in enumerate((256, 512, 1024, 2048)):
        for block in range(model[f"stage{stage + 1}_blocks"]):
            after = -(-size // 2) if stage and not block else size
            yield conv_flops(size, 1, before, width // 4)
            yield conv_flops(after, 3, width // 4, width // 4)
            yield conv_flops(after, 1, width // 4, width)
            if not block:
                yield conv_flops(after, 1, before, width)
            size, before = after, width


def _resnet_mini(model: Model) -> float:
    """Convolutions and classifier, 2 K^2 C_in C_out HW each forward (He et al. 2015, arXiv:1512.03385)."""
    widths = [model["width"] * 2**stage for stage in range(model["num_stages"])]
    size, before = 14, widths[0]
    flops = conv_flops(size, 4, 1, before, is_first=True) + dense_flops(widths[-1] * 10, 1)
    for stage, width in enumerate(widths):
        for block in range(model["blocks_per_stage"]):
            size = -(-size // 2) if stage and not block else size
            flops += conv_flops(size, 3, before, width) + conv_flops(size, 3, width, width)
            flops += conv_flops(size, 1, before, width) if before != width else 0
            before = width
    return flops


FORMULAS: Mapping[str, Callable[[Model], float]] = {
    "bert": _bert, "gpt3_6_7b": _gpt, "llama2_7b": _llama, "llama_mini": _llama_mini,
    "minilm_finetune": _minilm_finetune, "resnet50": _resnet50, "resnet_mini": _resnet_mini,
}  # fmt: skip

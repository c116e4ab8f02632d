"""The forward and backward FLOPs of one sample of each training case, by published formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from accelmark.train.case import attention_flops, conv_flops, dense_flops

Model = Mapping[str, Any]


def published_flops(name: str, model: Model) -> float:
    """Return the FLOPs of the case ``name`` with the settings ``model``."""
    return FORMULAS[name](model)


def _bert(model: Model) -> float:
    """Encoder, head on masked tokens, and attention (PaLM, arXiv:2204.02311, appendix B)."""
    hidden = model["hidden_size"]
    head = hidden * hidden + hidden * model["vocab_size"]
    return _encoder(model) + dense_flops(head, model["max_predictions"])


def _encoder(model: Model) -> float:
    """Layers and attention over all tokens including padding; written apart from the formula of the array cases."""
    hidden, length, layers = model["hidden_size"], model["seq_length"], model["num_layers"]
    weights = layers * (4 * hidden * hidden + 2 * hidden * model["intermediate_size"])
    return dense_flops(weights, length) + attention_flops(layers, hidden, length)


def _llama(model: Model) -> float:
    """Layers, output layer and attention (PaLM, appendix B)."""
    return _decoder(model, 3 * model["hidden_size"] * model["intermediate_size"])


def _decoder(model: Model, feed: float) -> float:
    """As Llama, with ``feed`` weights in the active feed-forward part; apart from the formula of the array cases."""
    hidden, length, layers = model["hidden_size"], model["seq_length"], model["num_layers"]
    head = model.get("head_dim", hidden // model["num_heads"])
    width, keys = head * model["num_heads"], head * model.get("num_kv_heads", model["num_heads"])
    weights = layers * (2 * hidden * width + 2 * hidden * keys + feed) + hidden * model["vocab_size"]
    return dense_flops(weights, length) + attention_flops(layers, width, length)


def _experts(model: Model) -> float:
    """Router and active experts of a layer; the others are not multiplied (Mixtral, arXiv:2401.04088, section 2.1)."""
    width = model.get("moe_intermediate_size", model["intermediate_size"])
    active = model["num_active_experts"] + model.get("n_shared_experts", 0)
    return float(model["hidden_size"] * (model["num_experts"] + 3 * active * width))


def _qwen_moe(model: Model) -> float:
    """As Llama, with active experts, a shared expert with its gate, and the router of each layer."""
    inner = model["num_active_experts"] * model["moe_intermediate_size"] + model["shared_expert_intermediate_size"]
    return _decoder(model, model["hidden_size"] * (model["num_experts"] + 1 + 3 * inner))


def _mixture(model: Model) -> float:
    """As Llama, with experts."""
    return _decoder(model, _experts(model))


def _deepseek(model: Model) -> float:
    """Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), dense layers first, then experts."""
    hidden, length, layers, heads = (model[name] for name in ("hidden_size", "seq_length", "num_layers", "num_heads"))
    nope, rope, value = (model[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    query = model["q_lora_rank"] * (hidden + heads * (nope + rope))
    keys = hidden * (model["kv_lora_rank"] + rope) + model["kv_lora_rank"] * heads * (nope + value)
    dense = model["first_k_dense_replace"]
    feed = dense * 3 * hidden * model["intermediate_size"] + (layers - dense) * _experts(model)
    weights = layers * (query + keys + heads * value * hidden) + feed + hidden * model["vocab_size"]
    # The two products of attention have the widths of keys and of values.
    attention = attention_flops(layers, heads * (nope + rope + value), length) / 2
    return dense_flops(weights, length) + attention


def _lora(model: Model) -> float:
    """Changes of all layers of attention: queries, keys, values, outputs."""
    hidden = model["hidden_size"]
    keys = hidden * model["num_kv_heads"] // model["num_heads"]
    return _low_rank(model, [hidden, keys, keys, hidden])


def _samsum(model: Model) -> float:
    """Changes of queries and values: the first layer's keys need no gradient."""
    hidden, length = model["hidden_size"], model["seq_length"]
    return _low_rank(model, [hidden] * 2) - float(2 * hidden * length * length)


def _low_rank(model: Model, widths: Sequence[int]) -> float:
    """Changes of layers with these output widths (arXiv:2106.09685), the output layer of attention being a fourth.

    Frozen weights have two products instead of three, and the first layer's projections need no gradient of the input.
    """
    hidden, length, layers, rank = (model[name] for name in ("hidden_size", "seq_length", "num_layers", "lora_rank"))
    keys = hidden * model["num_kv_heads"] // model["num_heads"]
    attention = attention_flops(layers, hidden, length)
    frozen = (_llama(model) - attention) * 2 / 3
    trained = dense_flops(layers * rank * sum(hidden + width for width in widths), length)
    inputs = 2 * hidden * (hidden + 2 * keys + rank * len(widths[:3])) * length
    return frozen + trained + attention - float(inputs)


def _gpt(model: Model) -> float:
    """As Llama, with a feed-forward part of two matrices."""
    return _decoder(model, 2 * model["hidden_size"] * model["intermediate_size"])


def _llama_mini(model: Model) -> float:
    """As Llama, over bytes."""
    return _llama({**model, "vocab_size": 256})


def _lora_mini(model: Model) -> float:
    """Frozen weights have two products, changes of all linear layers three; the first layer's need no gradient of x."""
    hidden, feed, layers, length = (
        model[name] for name in ("hidden_size", "intermediate_size", "num_layers", "seq_length")
    )
    rank, attention = model["lora_rank"], attention_flops(layers, hidden, length)
    frozen = (_llama_mini(model) - attention) * 2 / 3
    trained = dense_flops(layers * rank * (8 * hidden + 3 * feed), length)
    return frozen + trained + attention - float(2 * hidden * (3 * hidden + rank) * length)


def _grpo_mini(model: Model) -> float:
    """Of one problem: rollouts without a cache, the reference's forward pass, and an update, for each of the group."""
    prompt, answer = 6, 4
    lengths = [prompt + position for position in range(answer)]
    sizes = {**model, "vocab_size": 13}
    trained = [_llama({**sizes, "seq_length": length}) for length in lengths]
    return float(model["group_size"] * (sum(trained) / 3 + trained[-1] * 4 / 3))


def _minilm_finetune(model: Model) -> float:
    """Encoder, head of two classes, and attention over all tokens including padding (PaLM, appendix B)."""
    return _encoder(model) + dense_flops(model["hidden_size"] * 2, 1)


def _distilbert(model: Model) -> float:
    """As MiniLM, with one more layer before the classifier."""
    hidden = model["hidden_size"]
    return _minilm_finetune(model) + dense_flops(hidden * hidden, 1)


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


def _llava(model: Model) -> float:
    """As Llama, the projector, whose input needs no gradient, and forward only, the vision model with its patches."""
    width: int = model["vision_width"]
    inner, layers = model["vision_intermediate_size"], model["vision_layers"]
    hidden: int = model["hidden_size"]
    patches: int = (model["image_size"] // model["patch_size"]) ** 2
    text = _llama(model)
    projector = dense_flops(hidden * (hidden + width), patches) - 2 * hidden * width * patches
    embedded = dense_flops(3 * model["patch_size"] ** 2 * width, patches)
    vision = dense_flops(layers * (4 * width**2 + 2 * width * inner), patches + 1)
    return text + projector + (embedded + vision + attention_flops(layers, width, patches + 1)) / 3


def _glm(model: Model) -> float:
    """Count GPT-2's layers and attention for each choice, and the logits of the targets over the vocabulary."""
    hidden, layers, length = model["hidden_size"], model["num_layers"], model["seq_length"]
    sequence = dense_flops(12 * layers * hidden**2, length) + attention_flops(layers, hidden, length)
    return float(model["num_choices"] * (sequence + dense_flops(hidden * model["vocab_size"], model["target_length"])))


def _cpm(model: Model) -> float:
    return _gpt({**model, "intermediate_size": 4 * model["hidden_size"]})


FORMULAS: Mapping[str, Callable[[Model], float]] = {
    "bert": _bert, "gpt3_6_7b": _gpt, "llama_mini": _llama_mini, "minilm_finetune": _minilm_finetune,
    "llama2_7b": _llama, "llama3_1_8b": _llama, "llama3_70b": _llama, "aquila2_7b": _llama,
    "aquila_7b": _llama, "glm": _glm, "cpm": _cpm,
    "mixtral_8x7b": _mixture, "gpt_oss_20b": _mixture, "qwen1_5_moe": _qwen_moe, "deepseek_v3": _deepseek,
    "grpo_mini": _grpo_mini, "llama2_70b_lora": _lora, "llama2_7b_finetune": _samsum,
    "lora_mini": _lora_mini, "moe_mini": _mixture,
    "resnet50": _resnet50, "resnet_mini": _resnet_mini, "gpt2": _gpt, "distilbert": _distilbert,
    "llava1_5_7b": _llava,
}  # fmt: skip

MULTIPLY_ADDS: Mapping[str, tuple[float, str]] = {
    "resnet50": (4.09e9, "torchvision's ResNet50_Weights.IMAGENET1K_V1"),
    "mobilenetv2": (300e6, "arXiv:1801.04381, table 4"),
    "efficientnet": (0.386e9, "torchvision's EfficientNet_B0_Weights.IMAGENET1K_V1; arXiv:1905.11946, table 2: 0.39 G"),
    "vit": (17.56e9, "torchvision's ViT_B_16_Weights.IMAGENET1K_V1"),
    "swin": (4.5e9, "arXiv:2103.14030, table 1"),
    "detr": (86e9, "arXiv:2005.12872, table 1, the mean over images of COCO"),
    "rt_detr": (136e9 / 2, "arXiv:2304.08069, table 2: 136 GFLOPs, a multiply-add as two"),
    "segformer": (8.4e9, "arXiv:2105.15203, table 1a"),
    "mask2former": (74e9, "arXiv:2112.01527, table 4"),
}
"""Case -> multiply-adds of an image forward, and where they are published."""
OUTSIDE: Mapping[str, float] = {"mask2former": 100 * 150 * 512**2}
"""Case -> multiply-adds that the published number has besides the model's: here, of the masks of 100 queries with their
probabilities of 150 classes at the size of the image (``semantic_inference`` of the authors' code)."""
TRAINED_SHARE: Mapping[str, float] = {"detr": 2.5, "rt_detr": 2.5, "mask2former": 2.5}
"""Least FLOPs of a training step over those forward, where not all layers are trained or reached by gradients."""

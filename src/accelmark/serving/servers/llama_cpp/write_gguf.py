"""Write a model in Hugging Face's layout as a GGUF file.

``python -m accelmark.serving.servers.llama_cpp.write_gguf MODEL_DIR FILE PRECISION``. A GGUF file in ``MODEL_DIR`` is
linked as it is. Otherwise Llama models are written whose tokenizer has one token for each byte; for other tokenizers
llama.cpp's own ``convert_hf_to_gguf.py`` knows how text is split, and its file is put into ``MODEL_DIR``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

_TYPES: Final = {"fp32": "F32", "fp16": "F16", "bf16": "BF16"}
_REMEDY: Final = "convert it with llama.cpp's convert_hf_to_gguf.py and put the .gguf file next to config.json"


def write_gguf(model_dir: Path, file: Path, precision: str) -> None:
    """Write ``file``, or link the one GGUF file of ``model_dir``. Raises ValueError: several, or an unknown model."""
    files = sorted(model_dir.glob("*.gguf"))
    if files:
        if len(files) > 1:
            raise ValueError(f"{model_dir}: has several GGUF files ({', '.join(each.name for each in files)})")
        file.symlink_to(files[0].resolve())
        return
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    if config.get("architectures") != ["LlamaForCausalLM"]:
        raise ValueError(f"{model_dir}/config.json: architectures is {config.get('architectures')}; {_REMEDY}")
    tokens = _byte_tokens(model_dir / "tokenizer.json")
    import gguf

    writer = gguf.GGUFWriter(str(file), "llama")
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(hidden // heads)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(getattr(gguf.LlamaFileType, {"F32": "ALL_F32", "F16": "MOSTLY_F16"}.get(
        _TYPES[precision], "MOSTLY_BF16"
    )))  # fmt: skip
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens))
    writer.add_token_merges([f"{tokens[0]} {tokens[0]}"])  # the file must have a merge; two bytes 0 are in no text
    for add in (writer.add_bos_token_id, writer.add_eos_token_id):
        add(0)  # the file must name a token; byte 0 is in no text
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    _add_weights(writer, model_dir, config, precision)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _byte_tokens(file: Path) -> list[str]:
    """Return the tokens by number, of a tokenizer with one token for each byte."""
    tokenizer = json.loads(file.read_text(encoding="utf-8"))
    model = tokenizer["model"]
    if model.get("type") != "BPE" or model.get("merges") or tokenizer.get("added_tokens"):
        raise ValueError(f"{file}: is not a tokenizer with one token for each byte; {_REMEDY}")
    return sorted(model["vocab"], key=model["vocab"].__getitem__)


def _add_weights(writer: Any, model_dir: Path, config: dict[str, Any], precision: str) -> None:
    import gguf
    from safetensors.torch import load_file

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for part in sorted(model_dir.glob("*.safetensors")):
        for name, tensor in load_file(part).items():
            heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
            weights = tensor.float().numpy() if heads is None else _interleaved(tensor.float().numpy(), config[heads])
            kind = getattr(gguf.GGMLQuantizationType, _TYPES[precision] if weights.ndim > 1 else "F32")
            target = names.get_name(name, (".weight",))
            if target is None:
                raise ValueError(f"{part}: GGUF has no name for {name}")
            writer.add_tensor(target, gguf.quants.quantize(weights, kind), raw_dtype=kind)


def _interleaved(rows: Any, heads: int) -> Any:
    """Return a projection whose rows are in the order of llama.cpp's rotary embedding: both halves interleaved."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def main(arguments: list[str]) -> int:
    """Write the file; return the exit code."""
    model_dir, file, precision = arguments
    try:
        write_gguf(Path(model_dir), Path(file), precision)
    except (ValueError, KeyError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

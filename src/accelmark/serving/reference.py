"""Greedy answers of the framework, one prompt at a time, with which answers under load are compared.

``python -m accelmark.serving.reference MODEL_DIR DEVICE DTYPE PROMPTS ANSWERS`` reads prompts (JSON lines with ``text``
and ``max_tokens``) and writes one JSON string with the answer to each, in the same order.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def main(arguments: list[str]) -> int:
    """Answer the prompts; return the exit code."""
    model_dir, device, dtype, prompts, answers = arguments
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True, dtype=getattr(torch, dtype))
    model = model.to(device).eval()
    with Path(answers).open("w", encoding="utf-8") as stream:
        for line in Path(prompts).read_text(encoding="utf-8").splitlines():
            prompt = json.loads(line)
            inputs = tokenizer(prompt["text"], return_tensors="pt").to(device)
            length = prompt["max_tokens"]
            least = length if prompt["pinned"] else None
            output = model.generate(**inputs, do_sample=False, max_new_tokens=length, min_new_tokens=least)
            text = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
            stream.write(json.dumps(text) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

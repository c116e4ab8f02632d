"""Prefill and decode of a Llama with random weights: tokens per second against the peak and the memory bandwidth.

Prints one line of JSON. Decoding one token reads all weights once, so its bound is bytes of weights over bandwidth.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

from accelmark.probe.device import probe_memory


def device_here() -> torch.device:
    """Return the accelerator, or the CPU where there is none."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def seconds(operation: Callable[[], object], device: torch.device, repetitions: int) -> float:
    """Return the mean time of an operation after three warm-up calls, synchronized at both ends."""

    def synchronize() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    for _ in range(3):
        operation()
    synchronize()
    start = time.perf_counter()
    for _ in range(repetitions):
        operation()
    synchronize()
    return (time.perf_counter() - start) / repetitions


@torch.inference_mode()
def measure(*, tiny: bool) -> dict[str, Any]:
    """Return the figures of prefill (compute-bound) and decode (bandwidth-bound), eager and compiled."""
    device = device_here()
    hidden, intermediate, layers, heads = (128, 256, 2, 2) if tiny else (4096, 11008, 32, 32)
    length, repetitions = (16, 2) if tiny else (2048, 20)
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        max_position_embeddings=2 * length,
        tie_word_embeddings=False,
    )
    torch.set_default_dtype(torch.bfloat16)
    with device:
        model = LlamaForCausalLM(config).eval()  # type: ignore[no-untyped-call]
    weights = sum(parameter.numel() for parameter in model.parameters())
    bandwidth = probe_memory(device, 2.0)["copy"].value
    bound_s = None if bandwidth is None else 2 * weights / bandwidth / 1e9
    found: dict[str, Any] = {"parameters": weights, "copy_bandwidth_gb_s": bandwidth, "prefill": [], "decode": []}
    for batch in (1, 8):
        prompt = torch.randint(0, 32000, (batch, length), device=device)
        prefill = partial(model, prompt, use_cache=False, logits_to_keep=1)
        took = seconds(prefill, device, max(2, repetitions // 4))
        flops = 2 * weights * batch * length
        found["prefill"].append({"batch": batch, "tokens_per_s": batch * length / took, "tflops": flops / took / 1e12})
        for mode in ("eager", "compiled"):
            found["decode"].append(_decode(model, config, batch, length, mode, device, repetitions, bound_s))
    return found


def _decode(
    model: Any,
    config: LlamaConfig,
    batch: int,
    length: int,
    mode: str,
    device: torch.device,
    repetitions: int,
    bound_s: float | None,
) -> dict[str, Any]:
    cache = StaticCache(config, max_cache_len=length + 8)
    token = torch.ones(batch, 1, dtype=torch.long, device=device)
    positions = torch.full((batch, 1), length, device=device)
    forward = model.forward
    if mode == "compiled":
        forward = torch.compile(model.forward, mode="default" if device.type == "cpu" else "reduce-overhead")

    def step() -> None:
        cache.reset()  # type: ignore[no-untyped-call]
        forward(token, position_ids=positions, past_key_values=cache, use_cache=True)

    try:
        took = seconds(step, device, repetitions)
    except Exception as error:  # noqa: BLE001 - a mode that fails is a result of its own
        return {"batch": batch, "mode": mode, "reason": f"{type(error).__name__}: {error}"[:300]}
    share = None if bound_s is None else bound_s / took
    return {
        "batch": batch,
        "mode": mode,
        "step_ms": took * 1000,
        "tokens_per_s": batch / took,
        "bandwidth_share": share,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    print(json.dumps(measure(tiny=parser.parse_args().tiny)))

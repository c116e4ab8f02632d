"""Random seeds: one shared by all ranks, and one for each rank."""

from __future__ import annotations

import hashlib
import random
from typing import Any

import numpy as np
import torch


def rank_seed(shared_seed: int, rank: int) -> int:
    """Return the seed of one rank: 63 bits of a hash, independent for neighbouring ranks and rounds."""
    digest = hashlib.sha256(f"{shared_seed}:{rank}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed Python, NumPy and PyTorch on all devices."""
    random.seed(seed)
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of all generators in types that ``torch.load(weights_only=True)`` reads."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {"python": [version, list(words), gauss], "torch": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state(device)
    name, keys, position, has_gauss, cached = np.random.get_state()
    state["numpy"] = [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)]
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore the state of all generators from :func:`random_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(state["torch"])
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(state["device"], device)
    if "numpy" in state:
        name, keys, position, has_gauss, cached = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))

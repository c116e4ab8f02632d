"""Trained weights of an inference case: load a safetensors file, or save one from a training round.

``python -m accelmark.infer.weights ROUND_DIR CASE_DIR [bfloat16]`` writes ``weights.safetensors`` from the newest
checkpoint of a training round, in fp32 or rounded to bf16, and ``weights.json``, the record of that training.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accelmark.infer.case import InferCase
from accelmark.infer.engine import shortened
from accelmark.spec.errors import AccelmarkError, DataError, raising
from accelmark.spec.job import JobSpec, TrainingWork
from accelmark.spec.plugins.requirements import pip_install
from accelmark.tasks.images.pytorch import Logits


def load_weights(model: Any, path: Path) -> None:
    """Load all parameters and buffers of ``model`` from ``path``.

    transformers loads its own models: it restores omitted tied weights and renamed weights, and leaves others out.
    Raises DataError: the file is missing, damaged, or of another model.
    """
    with raising(DataError, f"{path}: safetensors is not installed: run {pip_install(['safetensors'])}", ImportError):
        from safetensors import SafetensorError
        from safetensors.torch import load_file
    sys.audit("open", str(path), "r", 0)  # the library opens it itself
    try:
        if hasattr(model, "from_pretrained"):
            loaded, info = type(model).from_pretrained(
                path.parent, config=model.config, output_loading_info=True, local_files_only=True
            )
            missing = [str(name) for name in (*sorted(info["missing_keys"]), *info["mismatched_keys"])]
            unexpected = sorted(info["unexpected_keys"]) if missing else []
            if not missing:
                model.load_state_dict(loaded.state_dict())
        else:
            missing, unexpected = model.load_state_dict(load_file(path), strict=False)
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: not a readable safetensors file: {error}") from error
    except (RuntimeError, ValueError, KeyError) as error:
        raise DataError(f"{path}: weights of another model: {shortened(error, 300)}") from error
    if missing or unexpected:
        parts = [f"lacks {', '.join(missing[:3])}"] if missing else []
        parts += [f"has {', '.join(unexpected[:3])} besides"] if unexpected else []
        raise DataError(f"{path}: weights of another model: {'; '.join(parts)}")


def load_given_weights(case: InferCase, net: nn.Module) -> None:
    """Load the case's ``weights`` into ``net`` if they were given; without them the case is not trained."""
    case.trained = "weights" in case.data_dirs
    if case.trained:
        load_weights(net, case.data_dirs["weights"])


def pretrained(case: InferCase, net: nn.Module) -> nn.Module:
    """Return ``net``, a model of transformers, as a model that returns its logits, with the case's weights if any."""
    load_given_weights(case, net)
    return Logits(net)


def save_weights(round_dir: Path, case_dir: Path, dtype: torch.dtype) -> Path:
    """Write the newest checkpoint's weights to ``case_dir``; return the file. Raises DataError: none, or no result."""
    from safetensors.torch import save_file

    with raising(DataError, f"{round_dir}: not a finished training round", OSError, ValueError):
        job = JobSpec.model_validate_json((round_dir / "job.json").read_bytes())
        result = json.loads((round_dir / "result.json").read_text(encoding="utf-8"))
    if not isinstance(job.work, TrainingWork):
        raise DataError(f"{round_dir}: not a training round")
    checkpoints = sorted((round_dir / "checkpoints").glob("step*/weights.pt"))
    if not checkpoints:
        raise DataError(f"{round_dir}: no checkpoint; set checkpoint.every_steps so that the last step writes one")
    state = torch.load(checkpoints[-1], map_location="cpu", weights_only=True)["model"]
    case_dir.mkdir(exist_ok=True)
    path = case_dir / "weights.safetensors"
    save_file({name: tensor.to(dtype).contiguous() if tensor.is_floating_point() else tensor.contiguous()
               for name, tensor in state.items()}, path)  # fmt: skip
    path.chmod(0o644)  # safetensors creates it readable by the owner only
    started = result["environment"]["started"]
    record = {
        "key": str(job.key),
        "case_version": job.case_version,
        "started_at": result["started_at"],
        "settings": job.work.settings.model_dump(mode="json"),
        "framework": f"{started.get('framework')} {started.get('framework_version')}",
        "converged": result["converged"],
        **{name: result["figures"][name]["value"] for name in ("final_metric", "final_loss", "raw_train_time_s")},
        "target": result["target"],
        "checkpoint": checkpoints[-1].parent.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "bytes": path.stat().st_size,
    }
    (case_dir / "weights.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path


def main(arguments: list[str]) -> int:
    """Save the weights of a round to a case folder; return the exit code."""
    if len(arguments) not in (2, 3) or arguments[2:] not in ([], ["bfloat16"]):
        print("usage: python -m accelmark.infer.weights ROUND_DIR CASE_DIR [bfloat16]", file=sys.stderr)
        return 2
    try:
        dtype = torch.bfloat16 if len(arguments) == 3 else torch.float32
        print(save_weights(Path(arguments[0]), Path(arguments[1]), dtype))
    except AccelmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

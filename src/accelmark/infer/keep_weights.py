"""``python -m accelmark.infer.keep_weights ROUND_DIR CASE_DIR``: keep the weights that a training round ended with.

Writes ``weights.safetensors`` and beside it ``weights.json``, the record of the training that produced them.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from accelmark.spec.errors import AccelmarkError, DataError
from accelmark.spec.job import JobSpec
from accelmark.spec.work import TrainingWork

FILE = "weights.safetensors"
RECORD = "weights.json"


def keep(round_dir: Path, case_dir: Path) -> Path:
    """Write the newest checkpoint's weights of ``round_dir`` into ``case_dir``.

    Raises:
        DataError: the round has no checkpoint of a model, or no result.
    """
    from safetensors.torch import save_file

    checkpoints = sorted((round_dir / "checkpoints").glob("step*/weights.pt"))
    if not checkpoints:
        raise DataError(f"{round_dir}: holds no checkpoint; train with checkpoint.every_steps at the last step")
    state = torch.load(checkpoints[-1], map_location="cpu", weights_only=True)["model"]
    path = case_dir / FILE
    save_file({name: tensor.float().contiguous() if tensor.is_floating_point() else tensor.contiguous()
               for name, tensor in state.items()}, path)  # fmt: skip
    path.chmod(0o644)  # safetensors writes for the owner only
    record = _record(round_dir) | {
        "checkpoint": checkpoints[-1].parent.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "bytes": path.stat().st_size,
    }
    (case_dir / RECORD).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return path


def _record(round_dir: Path) -> dict[str, Any]:
    try:
        job = JobSpec.model_validate_json((round_dir / "job.json").read_bytes())
        result = json.loads((round_dir / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{round_dir}: is not a finished training round: {error}") from error
    if not isinstance(job.work, TrainingWork):
        raise DataError(f"{round_dir}: is not a training round")
    started = result["environment"]["started"]
    figures = {name: figure["value"] for name, figure in result["figures"].items()}
    return {
        "key": str(job.key),
        "case_version": job.case_version,
        "started_at": result["started_at"],
        "settings": job.work.settings.model_dump(mode="json"),
        "framework": f"{started.get('framework')} {started.get('framework_version')}",
        "converged": result["converged"],
        "final_metric": figures["final_metric"],
        "final_loss": figures["final_loss"],
        "raw_train_time_s": figures["raw_train_time_s"],
        "target": result["target"],
    }


def main(arguments: list[str]) -> int:
    """Keep the weights of the round named first in the case folder named second."""
    if len(arguments) != 2:
        print("usage: python -m accelmark.infer.keep_weights ROUND_DIR CASE_DIR", file=sys.stderr)
        return 2
    try:
        print(keep(Path(arguments[0]), Path(arguments[1])))
    except AccelmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

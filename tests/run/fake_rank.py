"""A rank without a framework: writes PerfLog lines as a training does, and misbehaves when asked to.

``fake_rank.py JOB MODE...``: each mode is ``name`` or ``name=value``; ``R:mode`` is for rank R only.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

RANK = int(os.environ["RANK"])
SAMPLES = 8 * int(os.environ.get("WORLD_SIZE", "1"))
"""Of a step over all ranks."""


def say(event: str, **value: Any) -> None:
    metadata = {
        "file": __file__, "lineno": 1, "time_ms": time.time() * 1e3, "mono_ms": time.monotonic() * 1e3, "rank": RANK,
    }  # fmt: skip
    print(f"[PerfLog] {json.dumps({'event': event, 'value': value, 'metadata': metadata})}", flush=True)


TRAINED: dict[str, float] = {}
"""``begin`` and length in ``s`` of the training."""


def finish(state: str, steps: int, **more: Any) -> None:
    reason = {"completed": "max_steps", "cancelled": "cancelled"}.get(state, "error")
    value: dict[str, Any] = {
        "state": state, "end_reason": reason, "message": None, "converged": None, "e2e_time": 1.0, "init_time": 0.1,
        "raw_train_time": TRAINED.get("s", 0.9), "train_no_eval_time": 0.9,
        "pure_training_computing_time": 0.8, "global_steps": steps, "num_trained_samples": SAMPLES * steps,
        "throughput_raw": None, "throughput_no_eval": None, "throughput_pure_compute": None, "final_loss": 1.0,
        "final_metrics": {}, "peak_device_memory_mib": None, "num_parameters": 1, "flops_per_sample": None,
        "flops_per_sample_formula": None,
    }  # fmt: skip
    say("FINISHED", **(value | more))


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    meant = [mode.removeprefix(f"{RANK}:") for mode in sys.argv[2:] if mode.startswith(f"{RANK}:") or ":" not in mode]
    modes = dict(mode.partition("=")[::2] for mode in meant)
    node_dir = Path(os.environ["ACCELMARK_NODE_DIR"])
    faulthandler.enable()
    log = os.open(node_dir / f"rank{RANK}.out.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGRTMIN + 7)
    asked = []

    def ask(_number: int, _frame: FrameType | None) -> None:
        asked.append(1)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in modes else ask)
    say("INIT_START")
    if "grandchild" in modes:  # a process that leaves the group, ignores SIGTERM and outlives its parent
        body = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        subprocess.Popen([sys.executable, "-c", body], start_new_session=True)
    if "niceness" in modes:
        print(f"niceness {os.nice(0)}", flush=True)
    if "place" in modes:
        print(f"cores {len(os.sched_getaffinity(0))} devices {os.environ.get('CUDA_VISIBLE_DEVICES')}", flush=True)
    if "compile" in modes:
        place = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        place.mkdir()  # an error where another rank's work is there
        (place / "kernel.so").write_text("made up for tests")
        print(f"compiled in {place}", flush=True)
    if "nested" in modes:
        trace = node_dir / "trace" / f"of rank {RANK}"
        trace.mkdir(parents=True)
        (trace / "profile.json").write_text("[1, 2]")
        (trace / "memory.bin").touch()
        os.truncate(trace / "memory.bin", 40 << 20)
    say("TRAIN_START")
    TRAINED["begin"] = time.monotonic()
    attempt = 2 if job["resume"] or (node_dir.parent / "attempt1").exists() else 1
    if "checkpoint" in modes:
        Path(job["checkpoint_dir"]).mkdir(parents=True, exist_ok=True)
        (Path(job["checkpoint_dir"]) / "step1").write_text("made up for tests")
    if modes.get("first") and attempt == 1:
        modes |= {modes["first"]: ""}
    steps = int(modes.get("steps", "5"))
    for step in range(1, steps + 1):
        time.sleep(float(modes.get("pace", "0.02")))
        misbehave(modes, step, node_dir)
        window = {
            "global_steps": step, "epoch": 0, "num_trained_samples": SAMPLES * step, "learning_rate": 0.1,
            "loss": 1.0 / step, "losses": [1.0 / step], "step_ms": [15.0], "data_wait_ms": [1.0], "wall_ms": 20.0,
        }  # fmt: skip
        say("STEP_END", **window)
        if asked:
            finish("cancelled", step, message="was asked to end")
            return 1
    say("TRAIN_END")
    TRAINED["s"] = time.monotonic() - TRAINED["begin"]
    finish("completed", steps)
    return 0


def misbehave(modes: dict[str, str], step: int, node_dir: Path) -> None:
    if step != 3:
        return
    if "noise" in modes:
        os.write(1, bytes(range(256)) * 40 + b"\n\xff\xfe\x1b[2J\x00 not text\n")
    if "raise" in modes:
        raise RuntimeError("the flux is not conserved")
    if "die" in modes:
        os.kill(os.getpid(), signal.SIGKILL)
    if "quit" in modes:
        os._exit(0)
    if "nan" in modes:
        finish("failed", step, end_reason="nonfinite_loss", message="the loss is not finite at step 3")
        sys.exit(1)
    if "hang" in modes:
        if "deaf" not in modes:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        while True:
            time.sleep(600)
    if "halt" in modes:
        os.kill(os.getpid(), signal.SIGSTOP)
    if "bus" in modes:
        with (node_dir / "mapped").open("w+b") as file:
            file.truncate(4096)
            mapped = mmap.mmap(file.fileno(), 4096)
            file.truncate(0)
            mapped[0] = 1
    if "eat" in modes:
        eaten = []
        while True:
            eaten.append(b"x" * 2**24)
    if "fill" in modes:
        with (node_dir / "ballast").open("wb") as file:
            while True:
                file.write(b"x" * 2**20)
                file.flush()


if __name__ == "__main__":
    sys.exit(main())

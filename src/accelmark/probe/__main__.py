"""``python -m accelmark.probe JOB.json``: one rank of a probe; rank 0 writes ``ceilings.json`` to its directory."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from accelmark.spec.job import JobSpec
from accelmark.spec.records import CEILINGS_FILE
from accelmark.train.loop.process import redirect_output


def main(arguments: list[str]) -> int:
    """Run the job file given on the command line; return the exit code."""
    if len(arguments) != 1:
        print("usage: python -m accelmark.probe JOB.json", file=sys.stderr)
        return 2
    rank = int(os.environ.get("RANK", "0"))
    node_dir = Path(os.environ.get("ACCELMARK_NODE_DIR") or ".")
    redirect_output(node_dir / f"rank{rank}.out.log")
    from accelmark.spec.events import Event
    from accelmark.spec.perflog import PerfLogWriter

    log = PerfLogWriter(rank)
    log.event(Event.INIT_START, {"pid": os.getpid()})
    try:
        job = JobSpec.model_validate_json(Path(arguments[0]).read_bytes())
        _probe(job, rank, node_dir)
    except Exception as error:  # noqa: BLE001 - every run ends with FINISHED
        traceback.print_exc()
        log.event(Event.ERROR, {"type": type(error).__name__, "message": str(error)})
        log.event(Event.FINISHED, {"state": "failed", "end_reason": "error", "message": str(error)})
        return 1
    log.event(Event.FINISHED, {"state": "completed", "end_reason": "max_steps", "message": None})
    return 0


def _probe(job: JobSpec, rank: int, node_dir: Path) -> None:
    import platform

    import torch
    import torch.distributed as dist

    from accelmark.frameworks.pytorch.training.platform import device_name, join_ranks, open_device
    from accelmark.probe.collectives import probe_collectives
    from accelmark.probe.device import PRECISIONS, probe_copies, probe_matmul, probe_memory
    from accelmark.spec.plugins.framework import RankPlace
    from accelmark.spec.records import Ceilings, Rate
    from accelmark.spec.work import ProbeJob

    ranks = RankPlace.from_environment()
    device = open_device(job, ranks)
    join_ranks(job, ranks, device, needed=False)
    request = job.work
    if not isinstance(request, ProbeJob):
        raise TypeError(f"job.json is a job of kind {request.kind!r}, not a probe")
    share = request.budget_s / 4
    measure: dict[str, Callable[[], dict[str, Rate]]] = {
        "matmul": lambda: {name: probe_matmul(name, device, share / len(PRECISIONS)) for name in PRECISIONS},
        "memory": lambda: probe_memory(device, share),
        "copies": lambda: probe_copies(device, share),
        "collectives": lambda: probe_collectives(device, share),
    }
    rates = {item: measure[item]() if item in request.items else {} for item in measure}
    if rank == 0:
        ceilings = Ceilings(
            device_type=device.type,
            device_name=device_name(device) or platform.processor() or platform.machine(),
            world_size=ranks.world_size,
            framework=f"pytorch {torch.__version__}",
            measured_at=datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
            **rates,
        )
        (node_dir / CEILINGS_FILE).write_text(ceilings.model_dump_json(indent=2), encoding="utf-8")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

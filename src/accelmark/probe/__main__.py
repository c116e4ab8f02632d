"""``python -m accelmark.probe JOB.json``: one rank of a probe; rank 0 writes ``ceilings.json`` to its directory."""

from __future__ import annotations

import os
import platform
import sys
import traceback
from datetime import datetime, timezone
from pathlib import Path

from accelmark.spec.job import JobSpec, ProbeJob
from accelmark.spec.log.events import Event
from accelmark.spec.log.perflog import EventLog
from accelmark.spec.log.records import CEILINGS_FILE, Ceilings
from accelmark.spec.plugins.framework import RankPlace
from accelmark.train.loop.process import StopRequest
from accelmark.train.loop.rank import end_process, main


def _run(job: JobSpec, log: EventLog, process_start: float, stop: StopRequest) -> int:
    try:
        _probe(job)
    except Exception as error:  # noqa: BLE001 - every run ends with FINISHED
        traceback.print_exc()
        log.event(Event.ERROR, {"type": type(error).__name__, "message": str(error)})
        log.event(Event.FINISHED, {"state": "failed", "end_reason": "error", "message": str(error)})
        return 1
    log.event(Event.FINISHED, {"state": "completed", "end_reason": "max_steps", "message": None})
    return 0


def _probe(job: JobSpec) -> None:
    import torch
    import torch.distributed as dist

    from accelmark.frameworks.pytorch.training.platform import device_name, join_ranks, open_device
    from accelmark.probe.device import best_rates, probe_copies, probe_memory, probe_products, sweep_collectives

    request = job.work
    if not isinstance(request, ProbeJob):
        raise TypeError(f"job.json is a job of kind {request.kind!r}, not a probe")
    ranks = RankPlace.from_environment()
    device = open_device(job, ranks)
    join_ranks(job.collective_backend, ranks, device, needed=False)
    measure = {"matmul": probe_products, "memory": probe_memory, "copies": probe_copies}
    share_s = request.budget_s / (len(measure) + 1)
    rates = {name: probe(device, share_s) if name in request.items else {} for name, probe in measure.items()}
    sweep = sweep_collectives(device, share_s) if "collectives" in request.items else ()
    if ranks.rank == 0:
        ceilings = Ceilings(
            device_type=device.type,
            device_name=device_name(device) or platform.processor() or platform.machine(),
            world_size=ranks.world_size,
            hosts=request.hosts,
            framework=f"pytorch {torch.__version__}",
            measured_at=datetime.now(timezone.utc).isoformat(timespec="seconds").replace("+00:00", "Z"),
            **rates,
            collectives=best_rates(sweep) if "collectives" in request.items else {},
            sweep=sweep,
        )
        node_dir = Path(os.environ.get("ACCELMARK_NODE_DIR") or ".")
        (node_dir / CEILINGS_FILE).write_text(ceilings.model_dump_json(indent=2), encoding="utf-8")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    end_process(main(sys.argv[1:], _run))

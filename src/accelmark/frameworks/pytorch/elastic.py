"""``python -m accelmark.frameworks.pytorch.elastic ... -- COMMAND``: start ranks by torchrun's elastic agent."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, Final

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from accelmark.spec.plugins.framework import LaunchRecord

_RENDEZVOUS_TIMEOUT_S: Final = 300
_SHUTDOWN_TIMEOUT_S: Final = 30
_LOOPBACK: Final = "127.0.0.1"


def _launch_config(options: argparse.Namespace, log_dir: str) -> LaunchConfig:
    alone = options.nnodes == 1
    configs: dict[str, int | str] = {"timeout": _RENDEZVOUS_TIMEOUT_S}
    if not alone:
        configs["rank"] = options.node_rank
    # torch 2.11 has a fixed timeout of 30 s.
    has_timeout = any(field.name == "shutdown_timeout" for field in fields(LaunchConfig))
    shutdown: dict[str, Any] = {"shutdown_timeout": _SHUTDOWN_TIMEOUT_S} if has_timeout else {}
    return LaunchConfig(
        min_nodes=options.nnodes,
        max_nodes=options.nnodes,
        nproc_per_node=options.nproc,
        run_id=f"accelmark-{os.getpid()}" if alone else "accelmark",
        rdzv_backend="c10d" if alone else "static",
        rdzv_endpoint=options.rdzv_endpoint or f"{_LOOPBACK}:0",
        rdzv_configs=configs,
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        local_addr=options.local_addr or (_LOOPBACK if alone else None),
        logs_specs=DefaultLogsSpecs(log_dir=log_dir),
        **shutdown,
    )


def main(arguments: Sequence[str]) -> int:
    """Start this host's ranks, wait for their end, and write ``ranks.json``; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m accelmark.frameworks.pytorch.elastic", description=__doc__)
    parser.add_argument("command", nargs="+", help="the command of each rank, after --")
    parser.add_argument("--nproc", type=int, required=True, help="ranks on this host")
    parser.add_argument("--nnodes", type=int, default=1, help="hosts of the job")
    parser.add_argument("--node-rank", type=int, default=0, help="this host's number, from 0")
    parser.add_argument("--rdzv-endpoint", help="HOST:PORT of host 0, needed with several hosts")
    parser.add_argument("--local-addr", help="address of this host that the others reach")
    options = parser.parse_args(arguments)
    if options.nnodes == 1 and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    stopped_by: str | None = None
    problem: str | None = None
    ranks = range(options.node_rank * options.nproc, (options.node_rank + 1) * options.nproc)
    codes: dict[int, int | None] = dict.fromkeys(ranks)
    with tempfile.TemporaryDirectory(prefix="accelmark-launch-") as log_dir:
        program, *rest = options.command
        start = elastic_launch(_launch_config(options, log_dir), program)
        try:
            start(*rest)
            codes = dict.fromkeys(ranks, 0)
        except ChildFailedError as error:
            codes.update({rank: failure.exitcode for rank, failure in error.failures.items()})
        except SignalException as error:
            stopped_by = signal.Signals(error.sigval).name
        except (RendezvousError, RuntimeError, OSError) as error:
            problem = f"the ranks of this host could not be started: {type(error).__name__}: {error}"
    record = LaunchRecord(exit_codes=codes, signal=stopped_by, problem=problem)
    record.write()
    return record.exit_code()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

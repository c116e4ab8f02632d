"""``python -m accelmark.frameworks.pytorch.elastic ... -- COMMAND``: start ranks by torchrun's elastic agent."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous.api import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from accelmark.spec.errors import EXIT_CANCELLED, EXIT_FAILED, EXIT_OK
from accelmark.spec.job import RankExit
from accelmark.train.exits import LastWords, rank_exit, read_last_words, write_exits

_RENDEZVOUS_TIMEOUT_S: Final = 300
_SHUTDOWN_TIMEOUT_S: Final = 30
_LOOPBACK: Final = "127.0.0.1"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m accelmark.frameworks.pytorch.elastic", description=__doc__)
    parser.add_argument("command", nargs="+", help="the command of each rank, after --")
    parser.add_argument("--nproc", type=int, required=True, help="ranks on this host")
    parser.add_argument("--nnodes", type=int, default=1, help="hosts of the job")
    parser.add_argument("--node-rank", type=int, default=0, help="number of this host, from 0")
    parser.add_argument("--rdzv-endpoint", help="HOST:PORT of host 0, needed with several hosts")
    parser.add_argument("--local-addr", help="address of this host that the others reach")
    parser.add_argument("--timeout-s", type=int, default=_RENDEZVOUS_TIMEOUT_S, help="longest wait for other hosts")
    given = parser.parse_args(arguments)
    if given.nnodes > 1 and not given.rdzv_endpoint:
        parser.error("--rdzv-endpoint is needed with --nnodes above 1")
    if not 0 <= given.node_rank < given.nnodes:
        parser.error(f"--node-rank {given.node_rank} is not below --nnodes {given.nnodes}")
    return given


def launch_config(given: argparse.Namespace, log_dir: str) -> LaunchConfig:
    """Return the elastic agent's configuration: no restarts, each rank's number fixed by its host's.

    One host meets itself on a free port. Several meet at the endpoint in the order of their numbers (``static``), so
    that a rank's number tells its host.
    """
    alone = given.nnodes == 1
    endpoint = given.rdzv_endpoint or f"{_LOOPBACK}:0"
    configs: dict[str, int | str] = {"timeout": given.timeout_s}
    if not alone:
        configs["rank"] = given.node_rank
    return LaunchConfig(
        min_nodes=given.nnodes,
        max_nodes=given.nnodes,
        nproc_per_node=given.nproc,
        run_id=f"accelmark-{os.getpid()}" if alone else "accelmark",
        rdzv_backend="c10d" if alone else "static",
        rdzv_endpoint=endpoint,
        rdzv_configs=configs,
        max_restarts=0,
        monitor_interval=0.1,
        start_method="spawn",
        local_addr=given.local_addr or (_LOOPBACK if alone else None),
        logs_specs=DefaultLogsSpecs(log_dir=log_dir),
        shutdown_timeout=_SHUTDOWN_TIMEOUT_S,
    )


def main(arguments: Sequence[str]) -> int:
    """Start this host's ranks, wait for their end, and write ``ranks.json``; returns the exit code."""
    given = parse_arguments(arguments)
    node_dir = Path(os.environ.get("ACCELMARK_NODE_DIR") or ".")
    if given.nnodes == 1 and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    stopped_by: str | None = None
    trouble: str | None = None
    codes: dict[int, int | None]
    ranks = range(given.node_rank * given.nproc, (given.node_rank + 1) * given.nproc)
    with tempfile.TemporaryDirectory(prefix="accelmark-launch-") as log_dir:
        program, *rest = given.command
        start = elastic_launch(launch_config(given, log_dir), program)
        try:
            start(*rest)
            codes = dict.fromkeys(ranks, 0)
        except ChildFailedError as error:
            codes = dict.fromkeys(ranks)
            codes.update({rank: failure.exitcode for rank, failure in error.failures.items()})
        except SignalException as error:
            stopped_by = signal.Signals(error.sigval).name
            codes = dict.fromkeys(ranks)
        except (RendezvousError, RuntimeError, OSError) as error:
            trouble = f"the ranks of this host could not be started: {type(error).__name__}: {error}"
            codes = dict.fromkeys(ranks)
    words = {rank: read_last_words(node_dir / f"rank{rank}.out.log") for rank in ranks}
    exits = judge(codes, words, first_rank=ranks.start, stopped_by=stopped_by, trouble=trouble)
    write_exits(node_dir / "ranks.json", exits)
    for item in exits:
        print(f"rank {item.rank}: {item.state}" + (f": {item.reason}" if item.reason else ""), flush=True)
    return exit_code_of(exits)


def judge(
    codes: Mapping[int, int | None],
    words: Mapping[int, LastWords],
    *,
    first_rank: int,
    stopped_by: str | None,
    trouble: str | None,
) -> list[RankExit]:
    """Return how each rank ended, telling those that failed from those that were ended because of them."""
    exits = [rank_exit(rank, rank - first_rank, code, words[rank]) for rank, code in codes.items()]
    if trouble is not None:
        return [item.model_copy(update={"state": "failed", "reason": trouble}) for item in exits]
    if stopped_by is not None:
        return [_stopped(item, stopped_by) for item in exits]
    culprits = [item for item in exits if item.state == "signaled" and item.signal != "SIGTERM"]
    culprits = culprits or [item for item in exits if item.state == "failed"]
    if not culprits:
        return exits
    culprit = culprits[0]
    reason = f"ended because rank {culprit.rank} did ({culprit.reason})"
    return [
        item.model_copy(update={"state": "cancelled", "reason": reason}) if _followed(item, culprits) else item
        for item in exits
    ]


def _followed(item: RankExit, culprits: Sequence[RankExit]) -> bool:
    """Tell whether a rank was ended, or lost its connection, because another one had gone."""
    if item in culprits or item.state == "succeeded":
        return False
    return item.state != "signaled" or item.signal == "SIGTERM" or item.signal == "SIGKILL"


def _stopped(item: RankExit, stopped_by: str) -> RankExit:
    if item.state in ("lost", "signaled"):
        reason = f"the launcher got {stopped_by}, and rank {item.rank} did not end in time to say so itself"
        return item.model_copy(update={"state": "cancelled", "reason": reason})
    return item


def exit_code_of(exits: Sequence[RankExit]) -> int:
    """0 when every rank succeeded, 130 when they were cancelled, else 1."""
    states = {item.state for item in exits}
    if states == {"succeeded"}:
        return EXIT_OK
    return EXIT_CANCELLED if states <= {"succeeded", "cancelled"} else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

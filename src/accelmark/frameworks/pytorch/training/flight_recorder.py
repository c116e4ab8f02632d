"""Let the node agent ask for the last collectives of a rank, from PyTorch's flight recorder."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from torch._C import _distributed_c10d as c10d

from accelmark.spec.job import LastCollective, LastCollectives
from accelmark.spec.plugins.framework import collectives_address

_BUFFER_VARIABLE: Final = "TORCH_FR_BUFFER_SIZE"
_NUM_ENTRIES: Final = "2000"
"""PyTorch's own number where its recorder is on."""


def switch_on() -> None:
    """Have collectives recorded; before the first process group is made. A value that is set already is kept."""
    os.environ.setdefault(_BUFFER_VARIABLE, _NUM_ENTRIES)


def answer_requests(node_dir: Path, rank: int) -> None:
    """Send the last collectives to the agent whenever it asks, also while the main thread waits for other ranks."""
    dump = getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:  # PyTorch without a recorder for all backends
        return
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(collectives_address(node_dir, rank))
        listener.listen()
    except OSError:  # no abstract addresses on this system: the cause of a stall is found without collectives
        listener.close()
        return

    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                answer = LastCollectives(collectives=tuple(last_collectives(json.loads(dump()))))
                connection.sendall(answer.model_dump_json().encode())

    threading.Thread(target=serve, name="flight-recorder", daemon=True).start()


def last_collectives(trace: Mapping[str, Any]) -> Iterable[LastCollective]:
    """Yield the last collective of each process group in a trace of the recorder."""
    last: dict[str, dict[str, Any]] = {}
    for entry in trace.get("entries") or ():
        name = " ".join(entry["process_group"])
        if not entry["is_p2p"] and (name not in last or entry["collective_seq_id"] >= last[name]["collective_seq_id"]):
            last[name] = entry
    for name, entry in last.items():
        yield LastCollective(
            group=name,
            operation=entry["profiling_name"],
            number=entry["collective_seq_id"],
            state=entry["state"],
            sizes=tuple(tuple(size) for size in entry["input_sizes"]),
        )

"""Start the ranks of one host as child processes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from accelmark.spec.plugins.framework import DeviceSupport, HostPlace, Launch, LaunchRecord, RankPlace


def launch(place: HostPlace) -> Launch:
    command = [place.python, __file__, str(place.num_ranks), *place.rank_command]
    return Launch(command, {"TOY_SOCKET": f"accelmark-toy-{os.getpid()}"})


def device_support(device_type: str, version: str) -> DeviceSupport:
    return DeviceSupport(device_type == "cpu", f"NumPy {version}")


def main(num_ranks: int, command: list[str]) -> int:
    ranks = [
        subprocess.Popen(command, env=os.environ | RankPlace(rank, rank, num_ranks, num_ranks).variables())
        for rank in range(num_ranks)
    ]

    def stop(*_: object) -> None:
        for rank in ranks:
            rank.terminate()

    signal.signal(signal.SIGTERM, stop)
    codes = {number: rank.wait() for number, rank in enumerate(ranks)}
    record = LaunchRecord(exit_codes=dict(codes))
    (Path(os.environ["ACCELMARK_NODE_DIR"]) / "ranks.json").write_text(record.model_dump_json())
    return max(map(abs, codes.values()))


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))

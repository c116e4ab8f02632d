"""FSDP2 takes the initial weights from rank 0: the other ranks never hold the whole model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.train.jobs import environment

PROGRAM = """
import json, os, sys
from pathlib import Path
from types import SimpleNamespace
import torch, torch.distributed as dist
from torch import nn
from accelmark.frameworks.pytorch.mesh import open_mesh, shard
from accelmark.spec.parallelism import Mesh

def hwm_mib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(32))
        self.scale = nn.Parameter(torch.randn(3))
        self.register_buffer("table", torch.arange(5.0), persistent=False)

WIDTH = int(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
nn.Linear(4, 4)
# What sharding imports is no part of what the model takes.
from torch.distributed.fsdp import fully_shard
cpu, mesh = torch.device("cpu"), Mesh(dp=1, fsdp=2)
devices, place = open_mesh(cpu, mesh), SimpleNamespace(device=cpu, mesh=mesh)
case = SimpleNamespace(place=place, checkpointed_blocks=lambda model: list(getattr(model, "blocks", ())))
shard(nn.Linear(4, 4), case, devices, None, scatter=True)
before = hwm_mib()
torch.manual_seed(7)
if rank == 0:
    model = Model()
else:
    with torch.device("meta"):
        model = Model()
model = shard(model, case, devices, None, scatter=True)
grown = hwm_mib() - before
sums = [float(each.full_tensor().double().sum()) for each in model.parameters()]
found = {"grown_mib": grown, "sums": sums, "table": model.table.tolist()}
Path(sys.argv[2], f"{rank}.json").write_text(json.dumps(found))
dist.barrier(); dist.destroy_process_group()
sys.stdout.flush(); os._exit(0)
"""


def test_rank_1_holds_its_shards_and_one_parameter_but_never_the_model(tmp_path: Path) -> None:
    width, program = 1536, tmp_path / "program.py"
    program.write_text(PROGRAM)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    ended = subprocess.run(
        [*launcher, str(program), str(width), str(tmp_path)],
        # Without it glibc keeps parts of the heap: gloo's threads release parameters late on a busy machine.
        env={**environment(tmp_path), "MALLOC_MMAP_THRESHOLD_": str(2**20)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1))
    model_mib = 32 * width * width * 4 / 2**20
    assert model_mib == 288
    assert first["grown_mib"] > 0.9 * model_mib, "rank 0 builds all of it"
    assert second["grown_mib"] < 0.65 * model_mib, "half of the model and one parameter at a time"
    assert first["sums"] == second["sums"]
    assert all(first["sums"])
    assert first["table"] == second["table"] == [0, 1, 2, 3, 4]

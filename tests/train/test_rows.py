"""Rows of evaluation results from several ranks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, torch, torch.distributed as dist
from accelmark.frameworks.pytorch.training.evaluation import _rows_of_ranks
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=3)
rows = {} if rank == 2 else {"boxes": torch.arange(4 * (rank + 1)).double().view(-1, 4) + 100 * rank}
if rank == 1:
    rows["more"] = torch.ones(1, 2).double()
found = _rows_of_ranks(rows, dist.group.WORLD, 1)
assert sorted(found) == ["boxes", "more"], found
assert found["boxes"][:, 0].tolist() == [0, 100, 104], found
assert found["more"].tolist() == [[1, 1]], found
dist.barrier()
dist.destroy_process_group()  # gloo's threads end before the interpreter does
"""


@pytest.mark.heavy
def test_every_rank_has_the_rows_of_all_in_order(tmp_path: Path) -> None:
    """One rank has none: it had no evaluation batches."""
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store")], stderr=subprocess.PIPE)
        for rank in range(3)
    ]
    errors = [rank.communicate(timeout=400)[1].decode() for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0, 0], errors

"""A rank that computes longer than the others is named in every framework, in the environments that users make."""

from __future__ import annotations

from pathlib import Path

import pytest

from accelmark.results.read.round_dir import NodeDir
from accelmark.results.rounds.timeline import read_timeline
from accelmark.results.rounds.training import times_of_ranks
from accelmark.spec.plugins.catalog import FolderRef
from tests.frameworks.rank_jobs import SMALL_LLAMA, rank_job, run_job, values, write_plays

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

CASE = """
from accelmark.cases.llama_mini.arrays import Case as Standard

class Case(Standard):
    def loss(self, model, batch):
        loss = super().loss(model, batch)
"""
SLOW = {
    "jax": """
        import jax, jax.numpy as jnp
        try:
            rounds = jnp.where(jax.lax.axis_index("data") == 1, 12, 0)
        except NameError:  # not in a step of several ranks
            return loss
        begin = jnp.eye(512) * jax.lax.stop_gradient(loss)
        return loss + 0.0 * jax.lax.fori_loop(0, rounds, lambda _, x: jnp.tanh(x @ x), begin).sum()
""",
    "mindspore": """
        if self.place.rank == 1:
            x = ops.eye(512, 512, ms.float32) * ops.stop_gradient(loss)
            for _ in range(240):
                x = ops.tanh(ops.matmul(x, x))
            loss = loss + 0.0 * x.sum()
        return loss

import mindspore as ms
from mindspore import ops
""",
    "tensorflow": """
        import tensorflow as tf
        x = tf.eye(512) * tf.stop_gradient(loss)
        for _ in range(12 if self.place.rank == 1 else 0):
            x = tf.tanh(x @ x)
        return loss + 0.0 * tf.reduce_sum(x)
""",
    "paddle": """
        import paddle
        x = paddle.eye(512) * loss.detach()
        for _ in range(12 if self.place.rank == 1 else 0):
            x = paddle.tanh(x @ x)
        return loss + 0.0 * x.sum()
""",
}
"""Cases whose rank 1 multiplies matrices besides."""


@pytest.mark.parametrize("framework", list(SLOW))
def test_a_rank_that_computes_longer_is_named(framework: str, tmp_path: Path) -> None:
    folder = tmp_path / "slow"
    folder.mkdir()
    (folder / f"{framework}.py").write_text(CASE + SLOW[framework])
    case = FolderRef(name="slow", path=folder, sha256="0" * 64)
    num_steps = 30 if framework == "mindspore" else 100
    settings = {**SMALL_LLAMA, "batch_size": 4, "end.max_steps": num_steps, "log_every_steps": 10}
    (tmp_path / "plays").mkdir()
    data = {"shakespeare": write_plays(tmp_path / "plays")}
    job = rank_job(framework, tmp_path / "two", "llama_mini", data, settings, case=case)
    events = run_job(job, num_ranks=2)
    assert values(events, "FINISHED")[0]["state"] == "completed", values(events, "FINISHED")
    node = NodeDir(job.parent, "n1", 0, None, None)
    timeline = read_timeline(node.rank_logs())
    assert timeline is not None
    found, why = times_of_ranks(timeline, [node])
    assert found is not None, why
    fast, slow = found.ranks
    assert slow.own_ms > 2 * fast.own_ms, found
    assert fast.wait_ms > (slow.own_ms - fast.own_ms) / 2, found
    assert found.straggler is not None
    assert (found.straggler.rank, found.straggler.cause) == (1, "computation")


def test_a_run_of_jax_too_short_for_a_traced_step_says_so(tmp_path: Path) -> None:
    settings = {**SMALL_LLAMA, "batch_size": 4, "end.max_steps": 3}
    data = {"shakespeare": write_plays(tmp_path)}
    job = rank_job("jax", tmp_path / "two", "llama_mini", data, settings)
    run_job(job, num_ranks=2)
    timeline = read_timeline(NodeDir(job.parent, "n1", 0, None, None).rank_logs())
    assert timeline is not None
    assert "no step was traced" in (times_of_ranks(timeline, [])[1] or "")

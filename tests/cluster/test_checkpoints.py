"""Training on hosts over SSH that share no directory: each keeps checkpoints, from which its weights are evaluated."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from accelmark.audit.verify import verify_run
from accelmark.datasets.ensure import ensure
from accelmark.datasets.spec import dataset_specs
from accelmark.results.read.round_dir import read_reevaluation, reevaluation_dir
from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.plugins.catalog import load_case
from tests.cluster.bed import Bed
from tests.cluster.conftest import statuses
from tests.cluster.test_containers import CASE, accelmark, run_file, write_tiny
from tests.frameworks.environments import framework_environment
from tests.frameworks.rank_jobs import SMALL_LLAMA

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
MakeCluster = Callable[..., ClusterSpec]


def heavy(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.heavy)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("framework", "parallelism", "nproc"),
    [
        ("pytorch", "ddp", 2),
        heavy("pytorch", "ddp", 4),
        *(heavy("pytorch", parallelism, nproc) for parallelism in ("fsdp2", "hsdp") for nproc in (2, 4)),
        *(heavy(name, "ddp", nproc) for name in ("jax", "mindspore", "paddle", "tensorflow") for nproc in (2, 4)),
    ],
)
def test_weights_are_evaluated_and_steps_replayed_on_hosts_that_share_nothing(
    cluster: MakeCluster, bed: Bed, plugins: Path, tmp_path: Path, framework: str, parallelism: str, nproc: int
) -> None:
    run = tmp_path / "run"
    if framework == "pytorch":
        write_tiny(plugins, CASE.replace("[precision, loader]", "[precision, loader, parallelism]"))
        file = run_file(tmp_path, cluster(2), f"tiny:pytorch:X1:2:{nproc}:1")
        settings = {"parallelism": parallelism, "threads": 1}
    else:
        for spec in dataset_specs(load_case("llama_mini").data, "llama_mini"):
            ensure(spec, allow_subset=True)  # the bed's hosts have no way out, but see this machine's cache
        place = cluster(2, environments={framework: str(framework_environment(framework))})
        file = run_file(tmp_path, place, f"llama_mini:{framework}:CPU:2:{nproc}:1", vendor="cpu")
        settings = SMALL_LLAMA | {"model.num_layers": 1}  # compiling takes most of the time
    given = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    ended = accelmark("run", str(file), "--open", *given, "--out", str(run), "--json")
    said = ended.stdout + ended.stderr + "".join(log.read_text() for log in run.rglob("rank*.out.log"))
    assert statuses(run)[0].state == "succeeded", said
    (round_dir,) = run.glob("*/round1")
    found = read_reevaluation(round_dir)
    assert found is not None, said
    assert (found.problem, found.warnings) == (None, ()), said
    assert found.metrics == found.reported != {}
    assert {step.rank for replay in found.replays for step in replay.steps} == set(range(2 * nproc))
    for number in (1, 2):
        found_there = bed.work(number).glob(f"runs/run-*/{round_dir.parent.name}/round1/checkpoints")
        kept = max(found_there, key=lambda path: path.stat().st_mtime)  # hosts keep those of earlier tests
        expected = {"progress.json", "state.npz"}
        if framework == "pytorch":
            random = {f"random{rank}.pt" for rank in range(nproc * (number - 1), nproc * number)}
            expected = {"progress.json", "weights.pt"} | random | (set() if parallelism == "ddp" else {"shards"})
        assert {path.name for path in sorted(kept.iterdir())[-1].iterdir()} == expected
    job = json.loads((reevaluation_dir(round_dir) / "job.json").read_text())
    assert list(job["work"]["sha256_on_hosts"]) == [str(nproc)]
    verified = verify_run(run)
    assert (verified.changed, verified.differences) == ((), ())
    (summary,) = json.loads((run / "summary.json").read_text())["cases"]
    rules = {finding["rule"] for finding in summary["findings"] if finding["severity"] in ("error", "open")}
    assert not {rule for rule in rules if rule.startswith(("reevaluat", "replay"))}, summary["findings"]

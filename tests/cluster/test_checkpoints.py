"""Training on hosts over SSH that share no directory: each keeps checkpoints, from which its weights are evaluated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from accelmark.audit.verify import verify_run
from accelmark.results.read.reevaluation import read_reevaluation, reevaluation_dir
from accelmark.spec.cluster import ClusterSpec
from tests.cluster.bed import Bed
from tests.cluster.conftest import status_of
from tests.cluster.test_containers import CASE, TINY, accelmark, run_file

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]
MakeCluster = Callable[..., ClusterSpec]


@pytest.mark.parametrize("parallelism", ["ddp", "fsdp2", "hsdp"])
def test_weights_are_evaluated_and_steps_replayed_on_hosts_that_share_nothing(
    cluster: MakeCluster, bed: Bed, plugins: Path, tmp_path: Path, parallelism: str
) -> None:
    case = plugins / "cases" / "tiny"
    case.mkdir()
    (case / "case.yaml").write_text(CASE.replace("[precision, loader]", "[precision, loader, parallelism]"))
    shutil.copy(TINY, case / "pytorch.py")
    run, file = tmp_path / "run", run_file(tmp_path, cluster(2), "tiny:pytorch:X1:2:2:1")
    ended = accelmark("run", str(file), "--set", f"parallelism={parallelism}", "--out", str(run), "--json")
    said = ended.stdout + ended.stderr + "".join(log.read_text() for log in run.rglob("rank*.out.log"))
    assert status_of(run)[0].state == "succeeded", said
    (round_dir,) = run.glob("*/round1")
    found = read_reevaluation(round_dir)
    assert found is not None, said
    assert (found.problem, found.warnings) == (None, ()), said
    assert found.metrics == found.reported != {}
    assert {step.rank for replay in found.replays for step in replay.steps} == {0, 1, 2, 3}
    for number in (1, 2):
        found_there = bed.work(number).glob(f"runs/run-*/{round_dir.parent.name}/round1/checkpoints")
        kept = max(found_there, key=lambda path: path.stat().st_mtime)  # hosts keep those of earlier tests
        shards = set() if parallelism == "ddp" else {"shards"}
        random = {f"random{rank}.pt" for rank in (2 * number - 2, 2 * number - 1)}
        files = {path.name for path in sorted(kept.iterdir())[-1].iterdir()}
        assert files == {"progress.json", "weights.pt"} | random | shards
    job = json.loads((reevaluation_dir(round_dir) / "job.json").read_text())
    assert list(job["work"]["sha256_on_hosts"]) == ["2"]
    verified = verify_run(run)
    assert (verified.changed, verified.differences) == ((), ())
    (summary,) = json.loads((run / "summary.json").read_text())["cases"]
    rules = {finding["rule"] for finding in summary["findings"] if finding["severity"] in ("error", "open")}
    assert not {rule for rule in rules if rule.startswith(("reevaluat", "replay"))}, summary["findings"]

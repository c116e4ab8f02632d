from __future__ import annotations

from pathlib import Path

import pytest

from accelmark.results.export import to_mlflow, to_tensorboard
from accelmark.results.sources import load_source
from accelmark.results.store.bundle import write_bundle
from accelmark.spec.errors import RequestError
from tests.results.compared_runs import loaded
from tests.results.test_sources import RECORDED

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def test_tensorboard_reads_the_curves_figures_and_settings_back(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = loaded(tmp_path / "run", rounds=1)
    [place] = to_tensorboard(run, tmp_path / "tb")
    read = EventAccumulator(str(place))
    read.Reload()
    [result] = run.rounds.values()
    losses = [(point.step, point.value) for point in result.curves["loss"] if point.value is not None]
    assert [event.step for event in read.Scalars("loss")] == [step for step, _ in losses]
    assert [event.value for event in read.Scalars("loss")] == pytest.approx([value for _, value in losses], rel=1e-6)
    mfu = result.figures["mfu"].value  # type: ignore[index]
    assert read.Scalars("figures/mfu")[0].value == pytest.approx(mfu, rel=1e-6)
    assert b"batch_size" in read.Tensors("settings/text_summary")[0].tensor_proto.string_val[0]
    with pytest.raises(RequestError, match="already exists"):
        to_tensorboard(run, tmp_path / "tb")


def test_mlflow_holds_parameters_metrics_and_artefacts(tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    run = loaded(tmp_path / "run", rounds=1)
    uri = (tmp_path / "ml").as_uri()
    (run.path / "plan.json").write_bytes(b"{\xff}")
    [run_id] = to_mlflow(run, uri)
    client = tracking.MlflowClient(tracking_uri=uri)
    found = client.get_run(run_id)
    [result] = run.rounds.values()
    assert found.data.params["batch_size"] == "8"
    assert found.data.metrics["figures/mfu"] == pytest.approx(result.figures["mfu"].value)  # type: ignore[index]
    assert found.data.tags["accelmark.verdict"] == "VALID"
    assert len(client.get_metric_history(run_id, "loss")) == len(result.curves["loss"])
    assert {"result.json", "summary.json", "plan.json"} <= {entry.path for entry in client.list_artifacts(run_id)}


def test_a_bundle_and_a_search_are_exported_like_runs(tmp_path: Path) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    run = loaded(tmp_path / "run", rounds=1)
    bundle = tmp_path / "run.tar"
    write_bundle(run.path, bundle)
    uri = (tmp_path / "ml").as_uri()
    [packed] = to_mlflow(load_source(bundle), uri)
    client = tracking.MlflowClient(tracking_uri=uri)
    assert {"result.json", "summary.json"} <= {entry.path for entry in client.list_artifacts(packed)}
    [searched] = to_mlflow(load_source(RECORDED), uri)
    assert client.get_run(searched).data.params["network"] == "small28"
    assert "figures/search_score" in client.get_run(searched).data.metrics

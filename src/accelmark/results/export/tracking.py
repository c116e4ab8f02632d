"""Export rounds to experiment trackers: TensorBoard event files and MLflow runs."""

from __future__ import annotations

import http.client
import os
import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import urlsplit, urlunsplit

from accelmark.results.schema import RoundResult
from accelmark.results.store.ended import SUMMARY_FILE
from accelmark.results.store.files import write_errors
from accelmark.results.store.loaded_run import RESULT_FILE, LoadedRun
from accelmark.spec.errors import RequestError, RunError
from accelmark.spec.plugins.requirements import require
from accelmark.spec.secret import secrets_in, without


class RoundContents(NamedTuple):
    """One round as flat parameters, figures, curves and tags."""

    name: str
    """Directory of the round, relative to the run."""
    parameters: dict[str, str]
    figures: dict[str, float]
    """Without those that were not measured."""
    curves: dict[str, tuple[tuple[int, float, float], ...]]
    """Name -> (step, Unix time in seconds, value)."""
    tags: dict[str, str]


def contents_of(run: LoadedRun) -> Iterator[RoundContents]:
    """Yield every readable round of a run."""
    for case in run.summary.cases:
        yield from (_contents(run, name, run.rounds[name], case.verdict) for name in case.rounds if name in run.rounds)


def _contents(run: LoadedRun, name: str, result: RoundResult, verdict: str) -> RoundContents:
    begin = _unix(result.started_at)
    return RoundContents(
        name=name,
        parameters={setting: str(found.value) for setting, found in sorted(result.settings.items())},
        figures={figure.value: found.value for figure, found in result.figures.items() if found.value is not None},
        curves={
            curve: tuple((point.step, begin + point.time_s, point.value) for point in points if point.value is not None)
            for curve, points in result.curves.items()
        },
        tags={
            "accelmark.run": run.summary.run, "accelmark.key": str(result.key), "accelmark.round": str(result.round),
            "accelmark.verdict": verdict, "accelmark.state": result.state, "accelmark.vendor": result.vendor,
            "accelmark.case_version": str(result.case_version), "accelmark.marks": ", ".join(result.marks),
            "accelmark.version": run.summary.accelmark_version,
        },
    )  # fmt: skip


def _unix(text: str) -> float:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return 0.0


def to_tensorboard(run: LoadedRun, directory: Path) -> list[Path]:
    """Write the rounds of a run below ``directory``; return the directory of each.

    Raises RequestError if TensorBoard is not installed, or the directory already has the round; RunError if a file
    cannot be written.
    """
    require("the TensorBoard export", "accelmark[tensorboard]")
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    written: list[Path] = []
    for contents in contents_of(run):
        place = directory / run.summary.run / contents.name
        if place.is_dir() and any(place.iterdir()):
            raise RequestError(f"{place}: already exists, and its points would be duplicated: choose another directory")
        with write_errors(place):
            writer = EventFileWriter(str(place))
            for event in _events(contents):
                writer.add_event(event)
            writer.close()
        written.append(place)
    return written


def _events(contents: RoundContents) -> list[object]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    def event(step: int, at: float, tag: str, **value: Any) -> object:
        return Event(step=step, wall_time=at, summary=Summary(value=[Summary.Value(tag=tag, **value)]))

    begin = min((points[0][1] for points in contents.curves.values() if points), default=0.0)
    rows = "\n".join(f"| {name} | {value} |" for name, value in (contents.tags | contents.parameters).items())
    text = TensorProto(
        dtype="DT_STRING",
        string_val=[f"| setting | value |\n| --- | --- |\n{rows}".encode()],
        tensor_shape=TensorShapeProto(dim=[]),
    )
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    return [
        *(
            event(step, at, name, simple_value=value)
            for name, points in contents.curves.items()
            for step, at, value in points
        ),
        *(event(0, begin, f"figures/{name}", simple_value=value) for name, value in contents.figures.items()),
        event(0, begin, "settings/text_summary", metadata=metadata, tensor=text),
    ]


_MAX_METRICS: Final = 1000
_MAX_PARAMETERS: Final = 100
"""Limits of one request to an MLflow server."""
_MAX_PARAMETER_LENGTH: Final = 6000
_TIMEOUT_S: Final = 10.0
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_\-. /]")
_ARTEFACTS: Final = (SUMMARY_FILE, "report.html", "plan.json", "report.json", "automl.json")


def to_mlflow(run: LoadedRun, tracking_uri: str, experiment: str = "accelmark") -> list[str]:
    """Log every round of a run as an MLflow run at a server or store (``http://…``, ``file:…``); return their ids.

    Raises RequestError if MLflow is not installed; RunError if the server or store fails.
    """
    if tracking_uri.startswith("file:"):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # MLflow 3 refuses directories otherwise
    require("the MLflow export", "accelmark[mlflow]")
    from mlflow.exceptions import MlflowException
    from mlflow.tracking import MlflowClient

    _check_server(tracking_uri)
    try:
        client = MlflowClient(tracking_uri=tracking_uri)
        found = client.get_experiment_by_name(experiment)
        experiment_id = found.experiment_id if found else client.create_experiment(experiment)
        return [_log(client, experiment_id, run, contents) for contents in contents_of(run)]
    except (MlflowException, OSError) as error:
        raise RunError(f"MLflow at {tracking_uri}: {error}") from error


def _check_server(tracking_uri: str) -> None:
    """Check that a server answers, since MLflow itself retries silently for minutes.

    Raises RunError if the server does not answer; RequestError if the URI is invalid.
    """
    try:
        split = urlsplit(tracking_uri)
    except ValueError as error:
        raise RequestError(f"{tracking_uri!r} is not a valid URI: {error}") from error
    if split.scheme not in ("http", "https"):
        return
    bare = urlunsplit((split.scheme, split.netloc.rpartition("@")[2], split.path, "", ""))
    try:
        with urllib.request.urlopen(bare, timeout=_TIMEOUT_S):  # noqa: S310 - HTTP only
            return
    except urllib.error.HTTPError:  # it answers
        return
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLError):  # MLflow has its own settings for certificates
            return
        raise RunError(f"MLflow at {bare}: does not answer: {reason}") from error


def _log(client: Any, experiment_id: str, run: LoadedRun, contents: RoundContents) -> str:
    from mlflow.entities import Metric, Param

    name = f"{run.summary.run}/{contents.name}"
    made = client.create_run(experiment_id, run_name=name, tags=contents.tags)
    run_id = str(made.info.run_id)
    parameters = [Param(_name(key), value[:_MAX_PARAMETER_LENGTH]) for key, value in contents.parameters.items()]
    begin_ms = made.info.start_time
    metrics = [Metric(_name(f"figures/{key}"), value, begin_ms, 0) for key, value in contents.figures.items()]
    for curve, points in contents.curves.items():
        metrics += [Metric(_name(curve), value, int(at * 1000), step) for step, at, value in points]
    for begin in range(0, len(parameters), _MAX_PARAMETERS):
        client.log_batch(run_id, params=parameters[begin : begin + _MAX_PARAMETERS])
    for begin in range(0, len(metrics), _MAX_METRICS):
        client.log_batch(run_id, metrics=metrics[begin : begin + _MAX_METRICS])
    secrets = set(secrets_in(run.files.json("plan.json")))
    for name in (f"{contents.name}/{RESULT_FILE}", *_ARTEFACTS):
        if run.files.has(name):
            text = without(run.files.read(name).decode("utf-8", errors="replace"), secrets)
            client.log_text(run_id, text, name.rpartition("/")[2])
    client.set_terminated(run_id, status="FINISHED" if contents.tags["accelmark.state"] == "succeeded" else "FAILED")
    return run_id


def _name(text: str) -> str:
    return _UNSAFE.sub("_", text)


def tracking_uri_of(text: str) -> str:
    """Return a tracking URI; a path becomes a local store."""
    return text if "://" in text or text.startswith("file:") else Path(text).resolve().as_uri()

"""Curves and figures as TensorBoard event files, a directory for each round."""

from __future__ import annotations

from pathlib import Path

from accelmark.results.export.contents import RoundContents, contents_of
from accelmark.results.store.store import LoadedRun
from accelmark.spec.errors import RequestError, RunError


def to_tensorboard(run: LoadedRun, directory: Path) -> list[Path]:
    """Write the rounds of a run below ``directory``; return the directory of each.

    Raises:
        RequestError: TensorBoard is not installed, or a round was written there before.
        RunError: a file cannot be written.
    """
    try:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError as error:
        raise RequestError("TensorBoard's files need accelmark[export]") from error
    written: list[Path] = []
    for contents in contents_of(run):
        place = directory / run.summary.run / contents.name
        if place.is_dir() and any(place.iterdir()):
            raise RequestError(f"{place}: was written before, and points would stand twice: choose another directory")
        try:
            writer = EventFileWriter(str(place))
            for event in _events(contents):
                writer.add_event(event)
            writer.close()
        except OSError as error:
            raise RunError(f"{place}: cannot be written: {error.strerror}") from error
        written.append(place)
    return written


def _events(contents: RoundContents) -> list[object]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

    begin = min((points[0][1] for points in contents.curves.values() if points), default=0.0)
    events: list[object] = [
        Event(step=step, wall_time=at, summary=Summary(value=[Summary.Value(tag=name, simple_value=value)]))
        for name, points in contents.curves.items()
        for step, at, value in points
    ]
    events += [
        Event(
            step=0, wall_time=begin, summary=Summary(value=[Summary.Value(tag=f"figures/{name}", simple_value=value)])
        )
        for name, value in contents.figures.items()
    ]
    rows = "\n".join(f"| {name} | {value} |" for name, value in (contents.tags | contents.parameters).items())
    tensor = TensorProto(
        dtype="DT_STRING",
        string_val=[f"| setting | value |\n| --- | --- |\n{rows}".encode()],
        tensor_shape=TensorShapeProto(dim=[]),
    )
    metadata = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
    value = Summary.Value(tag="settings/text_summary", metadata=metadata, tensor=tensor)
    events.append(Event(step=0, wall_time=begin, summary=Summary(value=[value])))
    return events

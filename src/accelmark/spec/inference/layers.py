"""Configuration layers of inference, weakest first: the case, the vendor, the run file, the command line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, final

from accelmark.spec.cluster import ClusterSpec
from accelmark.spec.errors import Problem, nearest
from accelmark.spec.inference.settings import RUN_TIME_KEYS, InferCaseSpec, InferSettings, Note
from accelmark.spec.layers import Layer, LayerMerger, Resolved
from accelmark.spec.plugins.launcher import option_names

_OPTIONS: Final = "engine_options."
_FP16: Final = {True: "fp16", False: "fp32"}
_FIELDS: Final = InferSettings.model_fields


@final
class InferenceMerger(LayerMerger[InferSettings]):
    """Merges inference settings; a vendor's unknown keys become options of the engine."""

    def __init__(self, case: InferCaseSpec, where: str) -> None:
        super().__init__(InferSettings, where)
        self._parameters: Final = case.parameters
        self._reserved: Final = RUN_TIME_KEYS | ClusterSpec.model_fields.keys() | option_names()
        for key in sorted(case.parameters.keys() & (_FIELDS.keys() | self._reserved)):
            what = "is a name of the configurations or of the framework's own"
            self.problems.append(Problem(where, f"parameters.{key}", what, "rename the parameter"))
        for key, value in self._read(Layer.of(where, case.configurations), "configurations."):
            if _is_known(key):
                self.put(where, key, value)
            else:
                self.problems.append(Problem(where, f"configurations.{key}", "unknown key", nearest(key, _FIELDS)))

    def add(self, layer: Layer) -> None:
        """Merge a layer of the run file or the command line; it may repeat values, and unknown keys are errors."""
        for key, value in self._read(layer):
            if _is_known(key):
                self.put(layer.name, key, value)
            else:
                self.problems.append(Problem(layer.name, key, "unknown setting", nearest(key, _FIELDS)))

    def add_vendor(self, layer: Layer) -> None:
        """Merge a vendor's layer: changes are noted, repeated values are errors, unknown keys become engine options."""
        for key, value in self._read(layer):
            if not _is_known(key):
                what = f"is none of the configurations ({nearest(key, _FIELDS)}); it goes to the engine as an option"
                self.notes.append(Note(severity="warning", where=layer.name, key=key, what=what))
                self.put(layer.name, f"{_OPTIONS}{key}", value)
                continue
            old = self.current(key)
            if type(old) is type(value) and old == value:
                what = f"overrides nothing: it is {value!r} already"
                self.problems.append(Problem(layer.name, key, what, "take it out"))
                continue
            what = f"changed from {old!r} to {value!r}"
            self.notes.append(Note(severity="info", where=layer.name, key=key, what=what))
            self.put(layer.name, key, value)

    def _read(self, layer: Layer, prefix: str = "") -> Iterator[tuple[str, Any]]:
        """Yield (setting, value) for the values that a layer may set, converted to the type of the field."""
        values = dict(layer.values)
        if "fp16" in values:
            fp16 = values.pop("fp16")
            if not isinstance(fp16, bool):
                self.problems.append(Problem(layer.name, f"{prefix}fp16", f"must be true or false, found {fp16!r}"))
            elif "precision" in values:
                what = "is given beside precision, which has the same meaning"
                self.problems.append(Problem(layer.name, f"{prefix}fp16", what, "keep one of them"))
            else:
                values["precision"] = _FP16[fp16]
        for key, value in values.items():
            name = key.removeprefix(_OPTIONS).removeprefix("parameters.")
            if name in self._parameters and not prefix:
                what = "is a parameter of the case, which nothing may override"
                self.problems.append(Problem(layer.name, key, what, "take it out"))
            elif name in self._reserved and not prefix:
                what = "is a name that the framework sets itself"
                self.problems.append(Problem(layer.name, key, what, "rename or remove it"))
            else:
                yield key, self.typed(layer.name, key, value, f"{prefix}{key}")

    def _dumped(self, settings: InferSettings) -> Iterator[tuple[str, Any]]:
        for key, value in settings.model_dump(mode="json").items():
            if key == "engine_options":
                yield from ((f"{_OPTIONS}{name}", option) for name, option in value.items())
            else:
                yield key, value


def resolve_inference(
    case: InferCaseSpec, where: str, *, vendor: Sequence[Layer] = (), over: Sequence[Layer] = ()
) -> Resolved[InferSettings]:
    """Merge a vendor's layers and then ``over`` (both weakest first) into a case's configurations.

    Args:
        case: the inference side of ``case.yaml``.
        where: the name of that file, for errors and provenance.
        vendor: the vendor's layers for this case.
        over: the layers of the run file and the command line.

    Raises:
        SpecError: with all problems of all layers.
    """
    merger = InferenceMerger(case, where)
    for layer in vendor:
        merger.add_vendor(layer)
    for layer in over:
        merger.add(layer)
    merger.problems.extend(_contradictions(over))
    return merger.resolved()


def _is_known(key: str) -> bool:
    return key in _FIELDS or key.startswith(_OPTIONS)


def _contradictions(over: Sequence[Layer]) -> Iterator[Problem]:
    """Yield a problem if layers of the same name give two precisions, one as an option and one as a setting."""
    given: dict[str, dict[str, Any]] = {}
    for layer in over:
        if not {"fp16", "precision"} <= layer.values.keys():  # both in one layer is a problem already
            here = {key: value for key, value in layer.values.items() if key in ("fp16", "precision")}
            given.setdefault(layer.name, {}).update(here)
    for name, both in given.items():
        if isinstance(both.get("fp16"), bool) and "precision" in both and both["precision"] != _FP16[both["fp16"]]:
            what = f"is {str(both['fp16']).lower()}, beside precision {both['precision']}"
            yield Problem(name, "fp16", what, "keep one of them")

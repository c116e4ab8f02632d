"""The parts of cases and task families that are the same for tensors and for NumPy arrays: settings and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from accelmark.spec.errors import RequestError
from accelmark.spec.settings.training import Scalar, TrainSettings
from accelmark.train.tasks.metrics import classification_metrics, language_model_metrics

_DIMENSIONS: Final = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
}
"""Size of a Transformer under ``model`` -> argument of most of transformers' configurations."""


class ModelSettings:
    """The case's own settings (``settings.model``)."""

    settings: TrainSettings

    def number(self, name: str) -> int:
        """Return one of the case's own integer settings."""
        value: Scalar = self.settings.model[name]
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"model.{name} is {value!r}, not a whole number")
        return value

    def real(self, name: str) -> float:
        """Return one of the case's own numbers."""
        value: Scalar = self.settings.model[name]
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise TypeError(f"model.{name} is {value!r}, not a number")
        return float(value)

    def dimensions(self, **names: str) -> dict[str, Any]:
        """Return those sizes of a Transformer that are settings, as arguments of a configuration of transformers.

        ``names`` has the configuration's own names of sizes, such as ``hidden_size="d_model"``.
        """
        return {
            names.get(name, usual): self.number(name)
            for name, usual in _DIMENSIONS.items()
            if name in self.settings.model
        }

    def numbers(self, name: str) -> list[int]:
        """Return one of the case's own settings that lists whole numbers.

        Raises:
            RequestError: it is no such list.
        """
        text = str(self.settings.model[name])
        try:
            return [int(part) for part in text.split(",")]
        except ValueError:
            raise RequestError(f"model.{name} is {text!r}, not whole numbers with commas between them") from None


class Classified:
    """Classification with one label per sample."""

    accuracies: ClassVar[Mapping[str, int]] = {"top1": 1}
    """Metric -> number of best classes among which the label has to be."""

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the accuracies and the mean loss."""
        return classification_metrics(sums, self.accuracies)


class ImageSizes(ModelSettings):
    """Images as bytes; the size and number of classes are the settings of these names."""

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height and width."""
        return 3, self.number("image_size"), self.number("image_size")

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return self.number("num_classes")


class PredictedTokens(ModelSettings):
    """Next-token prediction over samples of ``seq_length + 1`` tokens; the last one is only predicted."""

    tokens: ClassVar[str] = "tokens"
    """Name of the batch's only array or tensor, of shape (batch, seq_length + 1)."""
    reported: ClassVar[Mapping[str, str]] = {"eval_loss": "eval_loss", "perplexity": "perplexity"}
    """Metric of the case -> metric of the family."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self.number("vocab_size")

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the reported metrics of a held-out token."""
        found = language_model_metrics(sums)
        return {name: found[source] for name, source in self.reported.items()}

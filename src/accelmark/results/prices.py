"""The reader's own prices, and what results cost at them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from pydantic import Field, model_validator

from accelmark.results.figures import RATES, FigureName
from accelmark.results.schema import RoundResult, Task
from accelmark.spec.model import FiniteSpec, parse, read_yaml
from accelmark.spec.number_format import digits

_HOURS_PER_YEAR: Final = 8766
_BULK: Final = {"token": (1e6, "million tokens"), "image": (1e3, "thousand images")}


class DevicePrice(FiniteSpec):
    """What a device costs: rented by the hour, power included, or bought."""

    per_hour: float | None = Field(default=None, ge=0)
    price: float | None = Field(default=None, ge=0)
    """Of a device with its share of the host."""
    years: float | None = Field(default=None, gt=0)
    """Over which the price is spread."""

    @model_validator(mode="after")
    def _complete(self) -> DevicePrice:
        is_bought = self.price is not None and self.years is not None
        if (self.per_hour is not None) == is_bought or (self.price is None) != (self.years is None):
            raise ValueError("give either per_hour, or price and years")
        return self


class Prices(FiniteSpec):
    """``prices.yaml``."""

    currency: str = Field(min_length=1)
    power_per_kwh: float | None = Field(default=None, ge=0)
    """Needed for devices that are bought."""
    pue: float = Field(default=1.0, ge=1)
    """Energy of the site over the energy of its devices."""
    devices: dict[str, DevicePrice] = Field(min_length=1)
    """Hardware, as in keys -> price."""

    def device_hour(self, hardware: str, power_w: float | None) -> float | None:
        """Return the cost of an hour of a device that draws ``power_w``; None where price or power is unknown."""
        price = self.devices.get(hardware)
        if price is None:
            return None
        if price.per_hour is not None:
            return price.per_hour
        if power_w is None or self.power_per_kwh is None:
            return None
        return (price.price or 0) / (price.years or 1) / _HOURS_PER_YEAR + power_w / 1e3 * self.pue * self.power_per_kwh


class Cost(NamedTuple):
    """What something costs at the reader's prices."""

    title: str
    value: float
    currency: str

    @property
    def text(self) -> str:
        """The cost with its currency."""
        return f"{digits(self.value)}\u202f{self.currency}"


def read_prices(path: Path | None) -> Prices | None:
    """Read ``prices.yaml``; None without a file. Raises SpecError with all its problems."""
    return None if path is None else parse(Prices, read_yaml(path), str(path))


def costs_of(
    prices: Prices | None,
    task: Task,
    unit: str,
    hardware: str,
    num_devices: int,
    value_of: Callable[[FigureName], float | None],
    units_per_epoch: float | None = None,
) -> list[Cost]:
    """Return the costs of a result: per epoch, per target reached, per million tokens or thousand images."""
    if prices is None:
        return []
    power_w = value_of(FigureName.MEAN_POWER)
    hour = prices.device_hour(hardware, None if power_w is None else power_w / num_devices)
    if hour is None:
        return []
    second = hour * num_devices / 3600
    rate = value_of(RATES[task])
    seconds: dict[str, float | None] = {}
    if task != "automl" and rate:
        count, name = _BULK.get("token" if task == "serve" else unit, (1e3, f"thousand {unit}s"))
        seconds[f"Cost per {name}"] = count / rate
        seconds["Cost per epoch"] = units_per_epoch and units_per_epoch / rate
    seconds["Cost to the target"] = value_of(FigureName.TIME_TO_TARGET)
    return [Cost(title, time_s * second, prices.currency) for title, time_s in seconds.items() if time_s]


def units_per_epoch(result: RoundResult) -> float | None:
    """Return the units of one pass over the training data; None where the round does not state its samples."""
    samples, rate = result.environment.started.get("train_samples"), result.value_of(FigureName.THROUGHPUT_TRAIN)
    seconds = result.value_of(FigureName.TRAIN_NO_EVAL_TIME)
    if "synthetic" in result.marks or not isinstance(samples, int) or not rate or not seconds or not result.num_samples:
        return None
    return samples * rate * seconds / result.num_samples

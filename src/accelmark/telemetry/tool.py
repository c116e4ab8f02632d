"""A device source that asks the vendor's own tool, by a rule that stands in ``vendor.yaml``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal, final

from accelmark.telemetry.command import CommandError, run_command
from accelmark.telemetry.forms import UnreadableError, Values, read_output
from accelmark.telemetry.rule import Form, ToolRule
from accelmark.telemetry.sample import DeviceInfo, DeviceSample
from accelmark.telemetry.source import SourceError

_SAMPLE_FIELDS: Final = (
    "utilisation", "memory_used_mib", "memory_total_mib", "power_w", "temperature_c", "sm_clock_mhz",
    "memory_clock_mhz", "ecc_errors",
)  # fmt: skip


@final
class ToolSource:
    """Runs the tool once for every sample and reads its output by the first form that fits."""

    def __init__(self, rule: ToolRule) -> None:
        self._rule = rule
        self._num_devices = 0

    def open(self) -> tuple[DeviceInfo, ...]:
        """Run the tool once and say what devices it shows."""
        devices, form = self._read(self._rule.command, self._rule.forms)
        self._num_devices = len(devices)
        devices = self._identify(devices)
        infos = [self._info(at, values) for at, values in enumerate(devices)]
        return tuple(_share_power(infos, devices, form.power_shared) if form.power_shared else infos)

    def sample(self) -> tuple[DeviceSample, ...]:
        """Run the tool and read every device."""
        devices, _ = self._read(self._rule.command, self._rule.forms)
        if len(devices) != self._num_devices:
            raise SourceError(f"{self._tool} shows {len(devices)} devices, there were {self._num_devices}")
        return tuple(_sample(at, values) for at, values in enumerate(devices))

    def close(self) -> None:
        """Nothing is held between samples."""

    @property
    def _tool(self) -> str:
        return self._rule.command[0]

    def _identify(self, devices: tuple[Values, ...]) -> tuple[Values, ...]:
        if self._rule.identify is None:
            return devices
        try:
            known, _ = self._read(self._rule.identify.command, self._rule.identify.forms)
        except SourceError:
            # What the devices are called is worth less than what they do.
            return devices
        by_index = {_index(at, values): values for at, values in enumerate(known)}
        return tuple(by_index.get(_index(at, values), {}) | values for at, values in enumerate(devices))

    def _read(self, command: Sequence[str], forms: Sequence[Form]) -> tuple[tuple[Values, ...], Form]:
        try:
            text = run_command(command, self._rule.timeout_s)
        except CommandError as error:
            raise SourceError(str(error)) from error
        problems: list[str] = []
        for form in forms:
            try:
                return read_output(text, form), form
            except UnreadableError as error:
                problems.append(str(error))
        reasons = "; ".join(dict.fromkeys(problems))
        raise SourceError(f"the output of {self._tool} is not readable: {reasons}")

    def _info(self, at: int, values: Values) -> DeviceInfo:
        reasons = {
            name: self._rule.reasons.get(name, f"{self._tool} does not give it")
            for name in _SAMPLE_FIELDS
            if values.get(name) is None
        }
        for name in ("throttle", "energy_j", "pids"):
            reasons[name] = f"not read from {self._tool}"
        return DeviceInfo(
            index=_index(at, values),
            name=_text(values, "name") or "unknown",
            uuid=_text(values, "uuid"),
            bus_id=_text(values, "bus_id"),
            driver=_text(values, "driver"),
            memory_total_mib=_number(values, "memory_total_mib"),
            power_limit_w=_number(values, "power_limit_w"),
            reasons=reasons,
        )


def _share_power(
    infos: list[DeviceInfo], devices: tuple[Values, ...], with_which: Literal["previous", "next"]
) -> list[DeviceInfo]:
    pairs = list(zip(infos, devices, strict=True))
    if with_which == "next":
        pairs.reverse()
    shared: list[DeviceInfo] = []
    leader: int | None = None
    for info, values in pairs:
        if values.get("power_w") is not None:
            leader = info.index
            shared.append(info)
        elif leader is None:
            shared.append(info)
        else:
            reasons = info.reasons | {"power_w": f"counted with device {leader}"}
            shared.append(replace(info, power_in=leader, reasons=reasons))
    return shared if with_which == "previous" else shared[::-1]


def _index(at: int, values: Values) -> int:
    index = _number(values, "index")
    return at if index is None else int(index)


def _sample(at: int, values: Values) -> DeviceSample:
    errors = _number(values, "ecc_errors")
    return DeviceSample(
        index=_index(at, values),
        utilisation=_number(values, "utilisation"),
        memory_used_mib=_number(values, "memory_used_mib"),
        memory_total_mib=_number(values, "memory_total_mib"),
        power_w=_number(values, "power_w"),
        temperature_c=_number(values, "temperature_c"),
        sm_clock_mhz=_number(values, "sm_clock_mhz"),
        memory_clock_mhz=_number(values, "memory_clock_mhz"),
        ecc_errors=None if errors is None else int(errors),
    )


def _number(values: Values, name: str) -> float | None:
    value = values.get(name)
    return value if isinstance(value, float) else None


def _text(values: Values, name: str) -> str | None:
    value = values.get(name)
    return value if isinstance(value, str) else None

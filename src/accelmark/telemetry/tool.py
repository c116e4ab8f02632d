"""A device source that asks the vendor's own tool, by a rule that stands in ``vendor.yaml``."""

from __future__ import annotations

from dataclasses import replace
from typing import Final, final

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
        devices, form = self._read()
        self._num_devices = len(devices)
        infos = [self._info(at, values) for at, values in enumerate(devices)]
        return tuple(_share_power(infos, devices) if form.power_shared else infos)

    def sample(self) -> tuple[DeviceSample, ...]:
        """Run the tool and read every device."""
        devices, _ = self._read()
        if len(devices) != self._num_devices:
            raise SourceError(f"{self._tool} shows {len(devices)} devices, there were {self._num_devices}")
        return tuple(_sample(at, values) for at, values in enumerate(devices))

    def close(self) -> None:
        """Nothing is held between samples."""

    @property
    def _tool(self) -> str:
        return self._rule.command[0]

    def _read(self) -> tuple[tuple[Values, ...], Form]:
        try:
            text = run_command(self._rule.command, self._rule.timeout_s)
        except CommandError as error:
            raise SourceError(str(error)) from error
        problems: list[str] = []
        for form in self._rule.forms:
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


def _share_power(infos: list[DeviceInfo], devices: tuple[Values, ...]) -> list[DeviceInfo]:
    shared: list[DeviceInfo] = []
    leader: int | None = None
    for info, values in zip(infos, devices, strict=True):
        if values.get("power_w") is not None:
            leader = info.index
            shared.append(info)
        elif leader is None:
            shared.append(info)
        else:
            reasons = info.reasons | {"power_w": f"counted with device {leader}"}
            shared.append(replace(info, power_in=leader, reasons=reasons))
    return shared


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

"""A device source that runs the vendor's command-line tool and parses its output as ``vendor.yaml`` declares."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Final, Literal, final

from accelmark.spec.backports import zip_strict
from accelmark.telemetry import forms
from accelmark.telemetry.declaration import ToolRule
from accelmark.telemetry.device import DeviceInfo, DeviceSample, SourceError
from accelmark.telemetry.forms import FIELD_NAMES, Form, Values

_SAMPLED: Final = tuple(name.name for name in fields(DeviceSample) if name.name not in ("index", "age_s"))
_PROPERTIES: Final = ("name", "uuid", "bus_id", "driver", "memory_total_mib", "power_limit_w")


@final
class ToolSource:
    """Runs the tool once for every sample and parses its output by the first form that matches."""

    def __init__(self, rule: ToolRule) -> None:
        self._rule = rule
        self._tool = rule.command[0]
        self._num_devices = 0

    def open(self) -> tuple[DeviceInfo, ...]:
        """Run the tool once and return the devices that it lists."""
        devices, form = self._run(self._rule.command, self._rule.forms)
        self._num_devices = len(devices)
        devices = self._identify(devices)
        infos = [self._info(at, values) for at, values in enumerate(devices)]
        return tuple(_share_power(infos, devices, form.power_shared) if form.power_shared else infos)

    def sample(self) -> tuple[DeviceSample, ...]:
        """Run the tool and read every device."""
        devices, _ = self._run(self._rule.command, self._rule.forms)
        if len(devices) != self._num_devices:
            raise SourceError(f"{self._tool} lists {len(devices)} devices; it listed {self._num_devices} when opened")
        return tuple(forms.device_sample(at, values) for at, values in enumerate(devices))

    def close(self) -> None:
        """Do nothing: no resources are held."""

    def _identify(self, devices: tuple[Values, ...]) -> tuple[Values, ...]:
        if self._rule.identify is None:
            return devices
        try:
            known, _ = self._run(self._rule.identify.command, self._rule.identify.forms)
        except SourceError:
            return devices  # samples without names are still worth recording
        by_index = {forms.device_index(at, values): values for at, values in enumerate(known)}
        return tuple(by_index.get(forms.device_index(at, values), {}) | values for at, values in enumerate(devices))

    def _run(self, command: Sequence[str], known: Sequence[Form]) -> tuple[tuple[Values, ...], Form]:
        try:
            text = run_command(command, self._rule.timeout_s)
        except CommandError as error:
            raise SourceError(str(error)) from error
        problems: list[str] = []
        for form in known:
            try:
                return forms.parse_output(text, form), form
            except forms.UnreadableError as error:
                problems.append(str(error))
        raise SourceError(f"the output of {self._tool} is not readable: {'; '.join(dict.fromkeys(problems))}")

    def _info(self, at: int, values: Values) -> DeviceInfo:
        reasons = {
            name: self._rule.reasons.get(name, f"{self._tool} does not report it")  # type: ignore[call-overload]
            if name in FIELD_NAMES
            else f"not read from {self._tool}"
            for name in _SAMPLED
            if values.get(name) is None
        }
        known: dict[str, Any] = {name: values[name] for name in _PROPERTIES if values.get(name) is not None}
        return DeviceInfo(forms.device_index(at, values), known.pop("name", "unknown"), reasons=reasons, **known)


def _share_power(
    infos: list[DeviceInfo], devices: tuple[Values, ...], with_which: Literal["previous", "next"]
) -> list[DeviceInfo]:
    step = 1 if with_which == "previous" else -1
    shared: list[DeviceInfo] = []
    leader: int | None = None
    for info, values in list(zip_strict(infos, devices))[::step]:
        if values.get("power_w") is not None:
            leader = info.index
        elif leader is not None:
            reasons = info.reasons | {"power_w": f"included in the power of device {leader}"}
            info = replace(info, power_in=leader, reasons=reasons)
        shared.append(info)
    return shared[::step]


class CommandError(Exception):
    """The command gave no usable output; the message is the reason."""


def run_command(command: Sequence[str], timeout_s: float) -> str:
    """Run ``command`` and return its standard output as text.

    Raises CommandError: it is not installed, ran longer than ``timeout_s`` (it and its children are killed), or exited
    with another status than 0.
    """
    name = command[0]
    try:
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            start_new_session=True, env={**os.environ, "LC_ALL": "C", "LANG": "C"},
        )  # fmt: skip
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise CommandError(
            f"{name} {'is not installed' if missing else f'cannot be started: {error.strerror}'}"
        ) from None
    with process:
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise CommandError(f"{name} did not finish within {timeout_s:g} s") from None
        finally:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    if status := process.returncode:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"
        raise CommandError(f"{name} {how}")
    return output.decode("utf-8", errors="replace")

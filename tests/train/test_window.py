"""Windows on a device that works behind the host's back. The device here is made up: no accelerator is at hand."""

from __future__ import annotations

import gc
import math

import torch

from accelmark.frameworks.pytorch.training.platform import DeviceLosses
from accelmark.train.loop.backend import DeviceClock, HostClock, HostLosses
from accelmark.train.loop.window import GarbagePauses, Window, WindowPosition, covered, first_nonfinite

POSITION = WindowPosition(global_steps=2, epoch=0, num_trained_samples=8, learning_rate=0.1)


class FakeDevice:
    """Hands out events whose time comes only when somebody waits."""

    def __init__(self) -> None:
        self.time_ms = 0.0
        self.waits = 0
        self.made = 0

    def event(self) -> FakeEvent:
        self.made += 1
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device = device
        self.at_ms = math.nan

    def record(self) -> None:
        self.device.time_ms += 1.5
        self.at_ms = self.device.time_ms

    def synchronize(self) -> None:
        self.device.waits += 1

    def elapsed_time(self, end: FakeEvent) -> float:
        return end.at_ms - self.at_ms


def test_collecting_and_closing_never_wait_for_the_device() -> None:
    device = FakeDevice()
    clock = DeviceClock(device.event)
    window = Window(clock, DeviceLosses(clock, pinned=False))
    for loss in (0.5, 0.25):
        window.add(clock.mark(), None, clock.mark(), 2_000_000, torch.tensor(loss))
    closed = window.close(POSITION, 0, 10.0, 10.0)
    assert device.waits == 0
    assert len(window) == 0
    read = window.read(closed)
    assert device.waits > 0
    assert read.losses == (0.5, 0.25)
    assert read.step_ms == (1.5, 1.5)
    assert read.data_wait_ms == (2.0, 2.0)


def test_losses_that_each_step_writes_to_the_same_memory_are_read_as_they_were() -> None:
    clock, memory = DeviceClock(FakeDevice().event), torch.zeros(())
    window = Window(clock, DeviceLosses(clock, pinned=False, overwritten=True))
    for loss in (0.5, 0.25):
        memory.fill_(loss)  # as a replayed CUDA graph does
        window.add(clock.mark(), None, clock.mark(), 0, memory.detach())
    assert window.read(window.close(POSITION, 0, 10.0, 10.0)).losses == (0.5, 0.25)


def test_events_are_used_again_once_read() -> None:
    device = FakeDevice()
    clock = DeviceClock(device.event)
    window = Window(clock, DeviceLosses(clock, pinned=False))
    for _ in range(5):
        for _ in range(2):
            window.add(clock.mark(), None, clock.mark(), 0, torch.tensor(1.0))
        window.read(window.close(POSITION, 0, 1.0, 1.0))
    assert device.made == 5


def test_losses_on_the_host_are_available_in_their_own_step() -> None:
    window = Window(HostClock(), HostLosses())
    assert window.add(0, None, 1_000_000, 0, torch.tensor(float("nan"))) != 0
    assert window.last_is_nonfinite()
    read = window.read(window.close(POSITION, 0, 1.0, 1.0))
    assert read.step_ms == (1.0,)
    assert first_nonfinite(read) == 2


def test_the_own_part_of_a_step_is_what_no_exchange_covers() -> None:
    assert covered([(1.0, 3.0), (2.0, 4.0), (6.0, 7.0), (6.2, 6.5)]) == 4.0
    window = Window(HostClock(), HostLosses())
    ms = 1_000_000
    window.add(0, [(2 * ms, 4 * ms), (3 * ms, 5 * ms)], 10 * ms, 0, torch.tensor(1.0))
    assert window.read(window.close(POSITION, 0, 10.0, 10.0)).own_ms == (7.0,)


def test_garbage_collections_are_measured_and_scan_nothing_that_training_found() -> None:
    pauses = GarbagePauses()
    pauses.start()
    try:
        assert gc.get_freeze_count() > 0
        pauses.collect()
        cycle: list[object] = []
        cycle.append(cycle)
        gc.collect()
        assert pauses.collect() > 0
    finally:
        pauses.stop()
    assert gc.get_freeze_count() == 0

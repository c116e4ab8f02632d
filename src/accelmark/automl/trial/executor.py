"""Carry out a trial order in this process: build, carry weights over, train, evaluate on the held-out split."""

from __future__ import annotations

import platform
import time
import traceback
from typing import Final

import numpy as np
import torch

from accelmark.automl.data import Dataset
from accelmark.automl.graph.module import Array, GraphModule, channel_statistics, load_weights
from accelmark.automl.morphs import WeightMode, apply_morph, carry_weights, fitted_weights
from accelmark.automl.trial.loop import DivergedError, Replica, TrialLoop, load_best
from accelmark.automl.trial.order import Listener, TrialOrder, TrialResult, digest

_CALIBRATION_IMAGES: Final = 256


def pick_device(index: int = 0) -> torch.device:
    """Return this machine's accelerator with that number, or its processor where there is none."""
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        if found is not None:
            return torch.device(found.type, index)
    return torch.device("cpu")


def warm_up() -> None:
    """Make this process load what a first training step would, so that no trial's time is spent on it."""
    device = pick_device()
    model = torch.nn.Conv2d(1, 1, 3).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss = model(torch.zeros(1, 1, 8, 8, device=device)).float().sum()
    loss.backward()
    optimizer.step()


class TorchExecutor:
    """Trains trials with PyTorch on the device of this process, or as one replica of several."""

    def __init__(self, dataset: Dataset, replica: Replica) -> None:
        self._data: Final = dataset
        self._replica: Final = replica

    def run(
        self, order: TrialOrder, weights: dict[str, Array] | None, listener: Listener
    ) -> tuple[TrialResult, dict[str, Array] | None]:
        """Carry out an order; a trial that fails says so in its result."""
        began = time.monotonic()
        try:
            return self._carried_out(order, weights, listener, began)
        except (torch.OutOfMemoryError, MemoryError) as error:
            return self._failure("out-of-memory", str(error) or type(error).__name__, began), None
        except DivergedError as error:
            return self._failure("crashed", str(error), began), None
        except Exception as error:  # noqa: BLE001 - whatever a trial dies of is recorded; the worker lives on
            if "out of memory" in str(error).lower() or "can't allocate memory" in str(error).lower():
                return self._failure("out-of-memory", str(error), began), None
            last = traceback.format_exception(error)[-3:]
            return self._failure("crashed", "".join(last).strip(), began), None

    def _carried_out(
        self, order: TrialOrder, weights: dict[str, Array] | None, listener: Listener, began: float
    ) -> tuple[TrialResult, dict[str, Array] | None]:
        torch.manual_seed(order.seed)
        module = GraphModule(order.network)
        mode: WeightMode = "from-scratch"
        if weights is not None and order.parent_network is not None:
            load_weights(module, self._morphed(order, weights))
            mode = "carried"
        module.to(self._replica.device)
        loop = TrialLoop(order, module, self._data, self._replica, listener, began=began)
        whole = loop.run()
        held_out: float | None = None
        held_out_s = 0.0
        if loop.best_weights is not None:
            evaluated = time.monotonic()
            load_best(loop)
            held_out = loop.evaluate(self._data.held_out)[1]
            held_out_s = time.monotonic() - evaluated
        result = TrialResult(
            status="finished" if whole else "cut",
            executed=digest(module.network),
            weights=mode,
            held_out_accuracy=held_out,
            held_out_s=held_out_s,
            seconds=time.monotonic() - began,
            precision=loop.precision,
            device=_device_name(self._replica.device),
            host=platform.node(),
        )
        return result, loop.best_weights

    def _morphed(self, order: TrialOrder, weights: dict[str, Array]) -> dict[str, Array]:
        """Carry the parent's weights through the morphs; statistics of real images keep deepening exact."""
        network = order.parent_network
        if network is None:
            raise ValueError("an order with weights names the network that they are of")
        carried = weights
        for morph in order.morphs:
            statistics = None
            if morph.kind == "deepen":
                parent = GraphModule(network)
                load_weights(parent, carried)
                statistics = channel_statistics(parent, self._calibration(), [morph.at])
            child = apply_morph(network, morph)
            carried = carry_weights(network, child, morph, carried, statistics)
            network = child
        return fitted_weights(order.network, carried)

    def _calibration(self) -> torch.Tensor:
        count = min(_CALIBRATION_IMAGES, len(self._data.training))
        images = self._data.training.batch(np.arange(count), None).astype(np.float32) / 255
        shape = (1, -1, 1, 1)
        mean, deviation = np.array(self._data.mean, np.float32), np.array(self._data.deviation, np.float32)
        return torch.from_numpy((images - mean.reshape(shape)) / deviation.reshape(shape))

    def _failure(self, status: str, reason: str, began: float) -> TrialResult:
        return TrialResult.model_validate(
            {
                "status": status,
                "reason": reason,
                "seconds": time.monotonic() - began,
                "device": _device_name(self._replica.device),
                "host": platform.node(),
            }
        )


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or device.type if device.type == "cpu" else device.type

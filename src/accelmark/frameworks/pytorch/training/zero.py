"""Training with DeepSpeed's ZeRO: its engine, and whole tensors of a model that ranks share."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from typing_extensions import Self

from accelmark.frameworks.pytorch.state import AUTOCAST_DTYPES, Training
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import RequestError, raising
from accelmark.spec.settings.training import TrainSettings

if TYPE_CHECKING:
    from accelmark.frameworks.pytorch.case import Batch, TrainCase

OWN_PART_UNKNOWN: Final = "DeepSpeed exchanges gradients in its own hooks, where waits are not marked"


@dataclass
class ZeroTraining(Training):
    """Training whose model is a ``DeepSpeedEngine``; ``optimizer`` is the engine's.

    Its state is exchanged in the form of an optimizer over whole parameters, one parameter at a time.
    """

    groups: Sequence[Sequence[nn.Parameter]] = ()
    """The optimizer's parameters, before the engine replaced them by flat parts."""

    @classmethod
    def open(cls, training: Training, settings: TrainSettings, device: torch.device, num_ranks: int) -> Self:
        """Return ``training`` with an engine around its model. Raises RequestError: DeepSpeed lacks the device."""
        groups = [list(group["params"]) for group in training.optimizer.param_groups if group["params"]]
        # Read when the package is first imported; without it, DeepSpeed looks for devices by itself.
        os.environ.setdefault("DS_ACCELERATOR", device.type)
        os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
        with raising(RequestError, f"parallelism deepspeed: DeepSpeed does not support {device.type}", ValueError):
            import deepspeed
        if device.type == "cpu":
            # Else DeepSpeed compiles an exchange through shared memory when it is initialised; ranks have gloo.
            deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        engine, *_ = deepspeed.initialize(
            model=training.model,
            optimizer=training.optimizer,
            config=configuration(settings, num_ranks, is_pinned=device.type != "cpu"),
            dist_init_required=False,
        )
        return cls(engine, training.optimizer, None, None, training.autocast, groups)

    def take_step(self, case: TrainCase, batches: Sequence[Batch]) -> Tensor:
        """Take one optimizer step over ``batches``, and return their mean loss as ``Hooks.train_step`` does."""
        engine: Any = self.model
        losses = []
        for batch in batches:
            with self.autocast():
                loss = case.loss(engine, batch)
            losses.append(loss.detach())
            engine.backward(loss)
            engine.step()
        self.schedule.step()
        return torch.stack(losses).mean() if len(losses) > 1 else losses[0]

    def model_state(self, *, keep: bool = True) -> dict[str, Tensor]:
        """Return the model's state, whole, in host memory; empty unless ``keep``. All ranks call it together."""
        state: dict[str, Tensor] = {}
        known: dict[int, Tensor] = {}
        for name, tensor in self.original.state_dict(keep_vars=True).items():
            if id(tensor) not in known:
                value = _whole(tensor) if isinstance(tensor, nn.Parameter) else tensor.detach()
                known[id(tensor)] = value.cpu().clone() if keep else torch.empty(0)
            state[name] = known[id(tensor)]
        return state if keep else {}

    @property
    def module(self) -> nn.Module:
        engine: Any = self.model
        inner: nn.Module = engine.module
        return inner

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each parameter by name, gathered by all ranks together; the fp32 originals of trained ones."""
        return ((name, _whole(parameter)) for name, parameter in self.original.named_parameters())

    def trained_parts(self) -> dict[str, Tensor]:
        """Return the trainable parameters, whole, in host memory. All ranks call it together."""
        named = self.original.named_parameters()
        return {name: _whole(tensor).cpu().clone() for name, tensor in named if tensor.requires_grad}

    def shape_of(self, tensor: Tensor) -> torch.Size:
        shape: torch.Size = getattr(tensor, "ds_shape", tensor.shape)
        return shape

    @torch.no_grad()
    def set_tensor(self, tensor: Tensor, value: Tensor) -> None:
        """Copy a whole tensor into a parameter and this rank's part of its fp32 original, or into a buffer."""
        from deepspeed import zero

        if hasattr(tensor, "ds_id"):
            with zero.GatheredParameters([tensor], modifier_rank=0):
                tensor.data.copy_(value)
        else:
            tensor.data.copy_(value)
        if tensor.requires_grad:
            _set_original(tensor, value, None)

    def optimizer_state(self, *, keep: bool = True) -> dict[str, Any]:
        """Return the state of an optimizer over whole parameters, in host memory; without tensors unless ``keep``."""
        from deepspeed.utils import safe_get_full_optimizer_state

        state: dict[int, dict[str, Any]] = {}
        param_groups: list[dict[str, Any]] = []
        for group, parameters in zip_strict(self.optimizer.param_groups, self.groups):
            numbers = range(len(state), len(state) + len(parameters))
            state |= {number: {} for number in numbers}
            options = {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
            param_groups.append({**options, "params": list(numbers)})
        if self.optimizer.state:
            self._link_state()
        for number, parameter in enumerate(self._parameters()):
            flat = self._flat(parameter)
            for name, value in self.optimizer.state.get(flat, {}).items():
                if isinstance(value, Tensor) and value.shape == flat.shape:
                    whole = safe_get_full_optimizer_state(parameter, name)
                    if keep:
                        state[number][name] = whole.cpu().clone()
                else:
                    state[number][name] = copy.deepcopy(value)
        return {"state": {number: values for number, values in state.items() if values}, "param_groups": param_groups}

    @torch.no_grad()
    def load_optimizer_state(self, saved: Mapping[str, Any]) -> None:
        """Load the result of :meth:`optimizer_state`. All ranks call it together."""
        for group, saved_group in zip_strict(self.optimizer.param_groups, saved["param_groups"]):
            group.update({name: value for name, value in saved_group.items() if name != "params"})
        self.optimizer.state.clear()
        parameters = list(self._parameters())
        counts_on_device = any(self.optimizer.defaults.get(name) for name in ("fused", "capturable"))
        for number, parameter in enumerate(parameters):
            flat = self._flat(parameter)
            for name, value in saved["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.ndim:
                    self.optimizer.state[flat].setdefault(name, torch.zeros_like(flat))
                elif isinstance(value, Tensor):
                    self.optimizer.state[flat][name] = value.to(flat.device if counts_on_device else "cpu").clone()
                else:
                    self.optimizer.state[flat][name] = copy.deepcopy(value)
        if not self.optimizer.state:
            return
        self._link_state()
        for number, parameter in enumerate(parameters):
            for name, value in saved["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.ndim:
                    _set_original(parameter, value, name)

    def _link_state(self) -> None:
        """Let DeepSpeed find the state of each parameter, which it does after the first group only (stages 1, 2)."""
        zero: Any = self.model.optimizer
        if hasattr(zero, "_lazy_init_hp_params_optimizer_state"):
            zero._hp_optimizer_states_linked = False
            zero._lazy_init_hp_params_optimizer_state()

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (parameter for group in self.groups for parameter in group)

    def _flat(self, parameter: nn.Parameter) -> Tensor:
        """Return this rank's flat part of the parameters that are updated together with ``parameter``."""
        zero: Any = self.model.optimizer
        if hasattr(parameter, "ds_id"):
            number = zero.grad_position[zero.get_param_id(parameter)][0]
            flat: Tensor = zero.fp32_partitioned_groups_flat[number]
            return flat
        (number,) = (n for n, group in enumerate(self.groups) if any(each is parameter for each in group))
        flat = zero.single_partition_of_fp32_groups[number]
        return flat


def configuration(settings: TrainSettings, num_ranks: int, *, is_pinned: bool) -> dict[str, Any]:
    """Return DeepSpeed's configuration for a job; offloaded tensors are page-locked if ``is_pinned``."""
    dtype, zero = AUTOCAST_DTYPES.get(settings.precision), settings.zero
    host = {"device": "cpu", "pin_memory": is_pinned}
    optimization = zero.model_dump(exclude={"offload"}, exclude_none=True)
    optimization |= {"offload_optimizer": host} if zero.offload != "none" else {}
    optimization |= {"offload_param": host} if zero.offload == "all" else {}
    return {
        "train_micro_batch_size_per_gpu": settings.batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
        "train_batch_size": settings.samples_per_step(num_ranks),
        "gradient_clipping": settings.gradient_clip_norm or 0.0,
        "zero_optimization": optimization,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        **({} if dtype is None else {"torch_autocast": {"enabled": True, "dtype": str(dtype).removeprefix("torch.")}}),
    }


def _whole(parameter: nn.Parameter) -> Tensor:
    """Return a parameter from all ranks: its fp32 original where it is trained."""
    from deepspeed import utils, zero

    if parameter.requires_grad:
        original: Tensor = utils.safe_get_full_fp32_param(parameter)
        return original.detach()
    if not hasattr(parameter, "ds_id"):
        return parameter.detach()
    with zero.GatheredParameters([parameter]):
        return parameter.detach().clone()


def _set_original(parameter: Tensor, value: Tensor, name: str | None) -> None:
    """Set this rank's part of the fp32 original of a parameter, or of its optimizer state ``name``."""
    from deepspeed import utils

    if not hasattr(parameter, "ds_id"):
        if name is None:
            utils.safe_set_full_fp32_param(parameter, value)
        else:
            utils.safe_set_full_optimizer_state(parameter, value, name)
        return
    partitioned: Any = parameter
    size = partitioned.ds_tensor.numel()
    flat = value.flatten()
    begin = size * torch.distributed.get_rank()
    # The last part is padded.
    part = F.pad(flat[begin : begin + size], (0, size - len(flat[begin : begin + size])))
    if name is None:
        utils.safe_set_local_fp32_param(parameter, part)
    else:
        utils.safe_set_local_optimizer_state(parameter, part, name)

"""Checkpoints of PyTorch's ranks."""

from __future__ import annotations

import copy
import json
import shutil
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils._pytree import tree_map_only

from accelmark.frameworks.pytorch.case import TrainCase
from accelmark.frameworks.pytorch.state import Training, local
from accelmark.frameworks.pytorch.training.platform import random_state, restore_random_state, seed_everything
from accelmark.spec.backports import zip_strict
from accelmark.spec.errors import RunError
from accelmark.spec.log.events import UpdateSquares
from accelmark.spec.plugins.framework import RankPlace
from accelmark.train.batches import seed_of
from accelmark.train.loop.checkpoint_writer import CheckpointDirectory, name_of, reading
from accelmark.train.loop.contract import ForeignStateError, Progress

_RECORD: Final = "progress.json"
_SHARDS: Final = "shards"
_WEIGHTS: Final = "weights.pt"
_BLOCK: Final = 1 << 24
"""Most numbers that are compared at once, unless a row has more."""


class Checkpoints:
    """The checkpoints of a job: a directory each, with the random states of every rank.

    With DDP, weights and optimizer state are one file, the same on every rank; with DeepSpeed too, gathered from all
    ranks, so that another stage or number of ranks can read it. With FSDP2 and meshes, each rank writes its shards,
    which ranks of another mesh can read where all hosts share the directory.
    """

    def __init__(self, directory: CheckpointDirectory, case: TrainCase, training: Training, ranks: RankPlace) -> None:
        self._directory, self.newest, self._training = directory, directory.newest, training
        self._settings, self._place, self._device = case.settings, case.place, case.place.device
        self._rank, self._world = ranks.rank, ranks.world_size
        self._planned = copy.deepcopy((training.optimizer_state()["param_groups"], training.schedule.state_dict()))
        """Hyperparameters and schedule as they were built, before the first step."""
        self._own_state: list[str] | None = None
        """Names of the state of the case's optimizer, before another one's was loaded; empty before the first step."""
        self._thread = ThreadPoolExecutor(1, "checkpoint") if case.settings.checkpoint.asynchronous else None
        self._writing: Future[float] | None = None
        """A write in the thread; a process that ends before leaves the checkpoint incomplete."""
        self._stager: Any = None
        self._group: dist.ProcessGroup | None = None
        """The ranks that share this rank's directory, from the first checkpoint on."""
        self.frozen: list[str] = []
        """Parameters that steps from the initial weights did not change; every loaded checkpoint must have them."""
        self._random: dict[str, Any] | None = None
        """Loaded states of the random generators, until they are restored."""

    def save(self, progress: Progress) -> str:
        """Write a checkpoint, or begin to in the background, and return its name. Raises RunError: the disk is full."""
        name = name_of(progress.global_steps)
        beside = self._directory.temporary(name)
        with _naming(beside):
            leader = self._directory.leader()
            if self._group is None and (self._world > 1 or self._settings.has_shards):
                self._group = self._open_group(leader)
            if leader == self._rank:
                shutil.rmtree(beside, ignore_errors=True)
                beside.mkdir(parents=True)
                scaler = self._training.scaler
                record = {
                    "world_size": self._world,
                    "writer": self._rank,
                    "parallelism": str(self._settings.parallelism),
                    "samples_per_step": self._settings.samples_per_step(self._world),
                    "progress": asdict(progress),
                    "schedule": self._training.schedule.state_dict(),
                    "scaler": scaler.state_dict() if scaler is not None else None,
                }
                (beside / _RECORD).write_text(json.dumps(record), encoding="utf-8")
            self._barrier()
            keep, training = leader == self._rank or self._settings.has_shards, self._training
            model = training.distinct_state() if self._settings.has_shards else training.model_state(keep=keep)
            optimizer = training.optimizer_state(keep=keep)
            state = {"model": model, "optimizer": optimizer} if keep else {}
            random = random_state(self._device)
            # Not in the thread: FSDP2 replaces the parameters of a model while it computes.
            names = training.optimizer_names() if self._settings.has_shards else []
            write = partial(self._write, name, names=names, random=random, leads=leader == self._rank)
            if self._thread is None:
                write(state)
            else:
                self._writing = self._thread.submit(write, self._staged(state))
        return name

    def finish_save(self) -> float:
        """Wait until the newest checkpoint is complete, and return how long it took a thread to write it."""
        writing, self._writing = self._writing, None
        return 0.0 if writing is None else writing.result()

    def _write(
        self, name: str, state: dict[str, Any], names: list[str], random: dict[str, Any], *, leads: bool
    ) -> float:
        """Write this rank's files, and complete the checkpoint; returns the duration in seconds.

        ``state`` is empty where another rank writes it; a rank that ``leads`` writes the common files of its directory.
        """
        start, beside, group = time.monotonic(), self._directory.temporary(name), self._group
        with _naming(beside):
            if self._settings.has_shards:
                from accelmark.frameworks.pytorch.training.shards import write_shards

                state = write_shards(beside / _SHARDS, state, names, group)
            if leads:
                # On the host: not every device's storages can be serialised.
                torch.save(tree_map_only(Tensor, lambda tensor: local(tensor).cpu(), state), beside / _WEIGHTS)
            torch.save(random, beside / f"random{self._rank}.pt")
            self._barrier(group)
            if leads:
                self._directory.complete(name)
            # Before any rank removes an older one.
            self._barrier(group)
        return time.monotonic() - start

    def _staged(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of ``state`` on the CPU, which is valid until the next call."""
        if self._stager is None:
            # Imported here: it takes most of a second, and few runs write in the background.
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            has_accelerator = torch.cuda.is_available()  # pinned memory is CUDA's
            options = StagingOptions(
                use_pinned_memory=has_accelerator,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=has_accelerator,
            )
            self._stager = DefaultStager(options)
        staged: dict[str, Any] = self._stager.stage(state)
        return staged

    def _open_group(self, leader: int) -> dist.ProcessGroup:
        """Return a gloo group of the ranks with this leader, for checkpoints only, which a thread may write."""
        leaders = [0] * self._world
        dist.all_gather_object(leaders, leader)
        groups = {
            first: dist.new_group([rank for rank, its in enumerate(leaders) if its == first], backend="gloo")
            for first in sorted(set(leaders))
        }
        group: dist.ProcessGroup = groups[leader]
        return group

    def load_for_replay(self, checkpoint: Path) -> Progress:
        """Load weights and optimizer state, but hyperparameters and learning rate as the case has them at that step."""
        training = self._training
        if self._own_state is None:
            self._own_state = _state_names(training.optimizer_state()["state"])
        names = self._own_state
        progress = self.load(checkpoint)
        groups, planned = copy.deepcopy(self._planned)
        state = training.optimizer_state()["state"]
        if names and (saved := _state_names(state)) != names:
            if len(names) != 1 or len(saved) != 1:
                raise ForeignStateError(f"its optimizer state has {', '.join(saved)}, the case's {', '.join(names)}")
            # The momentum of another implementation of SGD.
            state = {number: {names[0]: values[saved[0]]} for number, values in state.items()}
        training.load_optimizer_state({"state": state, "param_groups": groups})
        schedule = training.schedule
        schedule.load_state_dict(planned)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of", UserWarning)  # this optimizer took no step yet
            if isinstance(schedule, LambdaLR):
                schedule.last_epoch = max(progress.global_steps - 1, 0)
                schedule.step()
            else:
                for _ in range(progress.global_steps):
                    schedule.step()
        return progress

    def load(self, checkpoint: Path) -> Progress:
        """Load a checkpoint, but for the random generators (:meth:`restore_random`), and return the progress."""
        with reading(checkpoint):
            record = json.loads((checkpoint / _RECORD).read_text(encoding="utf-8"))
            self._check(checkpoint, record)
            self._read(checkpoint)
            self._training.schedule.load_state_dict(record["schedule"])
            if self._training.scaler is not None and record["scaler"] is not None:
                self._training.scaler.load_state_dict(record["scaler"])
            if (record["world_size"], record["parallelism"]) == (self._world, str(self._settings.parallelism)):
                self._random = torch.load(checkpoint / f"random{self._rank}.pt", weights_only=True)
            else:  # of another mesh
                seed_everything(seed_of(self._place.seed, record["progress"]["global_steps"]))
                self._random = random_state(self._device)
        return Progress(**record["progress"])

    @torch.no_grad()
    def compare(self, end: Path, before: list[Tensor]) -> UpdateSquares:
        """Compare the change of the trainable parameters since ``before`` with the change in the checkpoint ``end``."""
        squares = [0.0, 0.0, 0.0]
        with reading(end):
            if self._settings.has_shards:
                from accelmark.frameworks.pytorch.training.shards import read_model

                named = self._training.original.named_parameters()
                parts = {name: torch.empty_like(each) for name, each in named if each.requires_grad}
                read_model(end / _SHARDS, parts)
                saved = {name: local(part).cpu() for name, part in parts.items()}
            else:
                saved = _weights(end)["model"]
            for (name, part), old in zip_strict(self._training.trained_parts().items(), before):
                for start, replayed, trained in _blocks(old, part, saved[name]):
                    for index, change in enumerate((replayed - start, trained - start, replayed - trained)):
                        squares[index] += float(change.square().sum())
        return UpdateSquares(replayed=squares[0], saved=squares[1], difference=squares[2])

    @torch.no_grad()
    def frozen_sums(self) -> dict[str, float]:
        """Return the sum of each parameter that is not trained, which shows whether steps change it."""
        named = self._training.original.named_parameters()
        return {name: float(local(tensor).double().sum()) for name, tensor in named if not tensor.requires_grad}

    @torch.no_grad()
    def compare_state(self, end: Path) -> dict[str, UpdateSquares]:
        """Compare optimizer state, and on rank 0 buffers, with the checkpoint ``end``."""
        saved_names = self._training.original.state_dict().keys()
        own_buffers = {name: buffer for name, buffer in self._training.original.named_buffers() if name in saved_names}
        with reading(end):
            if self._settings.has_shards:
                buffers, states = {}, self._saved_optimizer(end)[0]
            else:
                saved = _weights(end)
                buffers, states = saved["model"], saved["optimizer"]["state"]
        pairs: list[tuple[str, Any, Any]] = []
        if self._rank == 0 and not self._settings.has_shards:
            pairs += [("buffers", each, buffers[name]) for name, each in own_buffers.items()]
        for number, values in self._training.optimizer_state()["state"].items():
            theirs = states.get(number, {})  # of one name in another implementation of SGD
            pairs += [
                (name, each, theirs.get(name, next(iter(theirs.values()), None))) for name, each in values.items()
            ]
        updates: dict[str, UpdateSquares] = {}
        for kind, replayed, trained in pairs:
            if isinstance(replayed, Tensor) and replayed.is_floating_point() and isinstance(trained, Tensor):
                for actual, expected in _blocks(local(replayed), local(trained)):
                    squares = [float(each.square().sum()) for each in (actual, expected, actual - expected)]
                    value = UpdateSquares(replayed=squares[0], saved=squares[1], difference=squares[2])
                    updates[kind] = updates[kind] + value if kind in updates else value
        return updates

    def restore_random(self) -> None:
        """Restore the random generators from the loaded checkpoint."""
        if self._random is not None:
            restore_random_state(self._random, self._device)
            self._random = None

    def _check(self, newest: Path, record: dict[str, Any]) -> None:
        """Raise RunError where this job cannot go on from a checkpoint: shards are read on any mesh, others not."""
        expected: dict[str, object] = {"samples_per_step": self._settings.samples_per_step(self._world)}
        requested = str(self._settings.parallelism)
        if "ddp" in (requested, record["parallelism"]):
            expected = {"parallelism": requested, "world_size": self._world}
        elif "deepspeed" in (requested, record["parallelism"]):
            expected = {"parallelism": requested, **expected}
        for name, mine in expected.items():
            if record[name] != mine:
                raise RunError(
                    f"the checkpoint {newest} has {name} {record[name]}, this job {mine}; use the same, or train again"
                )

    def _saved_optimizer(self, checkpoint: Path) -> tuple[dict[int, dict[str, Any]], list[dict[str, Any]]]:
        """Return the saved state of a sharded optimizer, sharded as its parameters are, and its saved groups."""
        from accelmark.frameworks.pytorch.training.shards import read_optimizer

        rest = torch.load(checkpoint / _WEIGHTS, weights_only=True, map_location="cpu")
        named = dict(self._training.original.named_parameters())
        parameters = {name: named[name] for name in self._training.optimizer_names()}
        return read_optimizer(checkpoint / _SHARDS, parameters, rest), rest["param_groups"]

    def _read(self, newest: Path) -> None:
        """Load the tensors, memory-mapped on the CPU: the device never holds two copies."""
        training = self._training
        if self._settings.has_shards:
            from accelmark.frameworks.pytorch.training.shards import read_model

            read_model(newest / _SHARDS, training.distinct_state())
            saved_state, saved_groups = self._saved_optimizer(newest)
            own_groups = training.optimizer.state_dict()["param_groups"]
            groups = [{**saved, "params": group["params"]} for saved, group in zip_strict(saved_groups, own_groups)]
            training.optimizer.load_state_dict({"state": saved_state, "param_groups": groups})
            return
        state = _weights(newest)
        parameters = dict(training.original.named_parameters()) if self.frozen else {}
        for name in self.frozen:
            parameter, saved = local(parameters[name]).cpu(), state["model"][name]
            if parameter.shape == saved.shape and not torch.equal(parameter, saved):
                raise RunError(f"{newest}: the frozen parameter {name} is not the case's")
        training.load_model_state(state["model"])
        training.load_optimizer_state(state["optimizer"])

    def _barrier(self, group: dist.ProcessGroup | None = None) -> None:
        if self._world > 1:
            dist.barrier(group)


def _weights(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(checkpoint / _WEIGHTS, weights_only=True, map_location="cpu", mmap=True)
    return state


@contextmanager
def _naming(beside: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:
        shutil.rmtree(beside, ignore_errors=True)
        raise RunError(f"the checkpoint {beside} could not be written: {error}") from error


def _blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield parts of tensors of one shape on the host, in double precision: whole ones may be larger than the host."""
    whole = [torch.atleast_1d(tensor) for tensor in tensors]  # type: ignore[no-untyped-call]
    num_rows = max(1, _BLOCK * len(whole[0]) // max(1, whole[0].numel()))
    for parts in zip_strict(*(tensor.split(num_rows) for tensor in whole)):
        yield tuple(part.cpu().double() for part in parts)


def _state_names(state: dict[int, dict[str, Any]]) -> list[str]:
    return sorted({name for values in state.values() for name in values})

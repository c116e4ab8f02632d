"""Checkpoints, written to a temporary directory and renamed: a killed process leaves complete ones only."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, final

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from accelmark.frameworks.pytorch.hooks import Training
from accelmark.frameworks.pytorch.training.seeds import random_state, restore_random_state
from accelmark.spec.errors import RunError
from accelmark.spec.settings import TrainSettings
from accelmark.train.loop.contract import Progress

_NAME: Final = re.compile(r"^step(\d{9})$")


@final
class Checkpoints:
    """The checkpoints of a job: a directory each, with the random states of every rank.

    With DDP, weights and optimizer state are one file, the same on every rank; with FSDP2 each rank writes its shards
    through ``torch.distributed.checkpoint``. With several hosts the directory has to be on a shared file system.
    """

    def __init__(
        self, directory: Path, settings: TrainSettings, training: Training, device: torch.device, rank: int, world: int
    ) -> None:
        self._directory = directory
        self._settings = settings
        self._training = training
        self._device = device
        self._rank = rank
        self._world = world

    @property
    def _sharded(self) -> bool:
        return self._settings.parallelism == "fsdp2"

    def save(self, progress: Progress, *, final: bool = False) -> str:
        """Write a checkpoint, remove the oldest beyond ``checkpoint.keep``, and return the name of the new one.

        Args:
            progress: the progress of training.
            final: whether it is written after the last step; it is then kept in addition to the others, from which
                steps can be replayed.

        Raises:
            RunError: it could not be written, for example because the disk is full.
        """
        name = f"step{progress.global_steps:09d}"
        beside = self._directory / f"{name}.tmp"
        try:
            if self._rank == 0:
                shutil.rmtree(beside, ignore_errors=True)
                beside.mkdir(parents=True)
            self._barrier()
            self._write(beside, progress)
            self._barrier()
            if self._rank == 0:
                shutil.rmtree(self._directory / name, ignore_errors=True)
                beside.rename(self._directory / name)
                for old in self._names()[: -(self._settings.checkpoint.keep + final)]:
                    shutil.rmtree(self._directory / old)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise RunError(f"the checkpoint {beside} could not be written: {error}") from error
        return name

    def _write(self, beside: Path, progress: Progress) -> None:
        if self._sharded:
            from torch.distributed.checkpoint.state_dict_saver import save

            save(self._sharded_state(), checkpoint_id=beside / "shards")
        elif self._rank == 0:
            state = {
                "model": plain(self._training.model).state_dict(),
                "optimizer": self._training.optimizer.state_dict(),
            }
            # On the host: not every device's storages can be serialised.
            torch.save(tree_map_only(torch.Tensor, torch.Tensor.cpu, state), beside / "weights.pt")
        torch.save(random_state(self._device), beside / f"random{self._rank}.pt")
        if self._rank == 0:
            scaler = self._training.scaler
            record = {
                "world_size": self._world,
                "parallelism": self._settings.parallelism,
                "progress": asdict(progress),
                "schedule": self._training.schedule.state_dict(),
                "scaler": scaler.state_dict() if scaler is not None else None,
            }
            (beside / "progress.json").write_text(json.dumps(record), encoding="utf-8")

    def newest(self) -> Path | None:
        """Return the newest checkpoint, or None."""
        names = self._names()
        return self._directory / names[-1] if names else None

    def load(self, checkpoint: Path) -> Progress:
        """Load a checkpoint, and return the progress of training.

        The random generators are restored by :meth:`restore_random`, after the batches of the epoch are opened.

        Raises:
            RunError: it is damaged, or was written by another number of ranks.
        """
        try:
            record = json.loads((checkpoint / "progress.json").read_text(encoding="utf-8"))
            self._check(checkpoint, record)
            self._read(checkpoint)
            self._training.schedule.load_state_dict(record["schedule"])
            if self._training.scaler is not None and record["scaler"] is not None:
                self._training.scaler.load_state_dict(record["scaler"])
            self._random = torch.load(checkpoint / f"random{self._rank}.pt", weights_only=True)
        except RunError:
            raise
        except Exception as error:
            raise RunError(
                f"the checkpoint {checkpoint} cannot be read ({type(error).__name__}: {error}); "
                "remove it to continue from the one before it, or from the beginning"
            ) from error
        progress = record["progress"]
        losses = {int(step): loss for step, loss in progress.pop("reference_losses").items()}
        return Progress(**progress, reference_losses=losses)

    def restore_random(self) -> None:
        """Restore the random generators from the loaded checkpoint."""
        state: dict[str, Any] | None = getattr(self, "_random", None)
        if state is not None:
            restore_random_state(state, self._device)
            self._random = None

    def _check(self, newest: Path, record: dict[str, Any]) -> None:
        for name, mine in (("world_size", self._world), ("parallelism", self._settings.parallelism)):
            if record[name] != mine:
                raise RunError(
                    f"the checkpoint {newest} has {name} {record[name]}, this job {mine}; use the same, or train again"
                )

    def _read(self, newest: Path) -> None:
        training = self._training
        if self._sharded:
            from torch.distributed.checkpoint.state_dict import set_state_dict
            from torch.distributed.checkpoint.state_dict_loader import load

            state = self._sharded_state()
            load(state, checkpoint_id=newest / "shards")
            set_state_dict(
                training.model,
                training.optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
            return
        # Memory-mapped on the CPU: the device never holds two copies, and step counters keep their device.
        state = torch.load(newest / "weights.pt", weights_only=True, map_location="cpu", mmap=True)
        plain(training.model).load_state_dict(state["model"])
        training.optimizer.load_state_dict(state["optimizer"])

    def _sharded_state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, optimizer = get_state_dict(self._training.model, self._training.optimizer)
        return {"model": model, "optimizer": optimizer}

    def _names(self) -> list[str]:
        """Return the names of complete checkpoints, oldest first."""
        if not self._directory.is_dir():
            return []
        return sorted(path.name for path in self._directory.iterdir() if _NAME.match(path.name))

    def _barrier(self) -> None:
        if self._world > 1:
            dist.barrier()


def plain(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside ``DistributedDataParallel``, or the model itself."""
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        inner: torch.nn.Module = model.module
        return inner
    return model

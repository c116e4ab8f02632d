"""Initial weights from a checkpoint of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from accelmark.spec.errors import DataError, first_line

C = TypeVar("C", bound=PreTrainedConfig)


def load_pretrained(
    model_class: type[PreTrainedModel],
    config: PreTrainedConfig,
    directory: Path,
    *,
    new: Sequence[str] = (),
) -> PreTrainedModel:
    """Return the model with the weights of the checkpoint in ``directory``, in fp32.

    ``new`` has the first parts of the names of weights that may be missing and are then random, as a new output layer.

    Raises:
        DataError: the checkpoint cannot be read, or lacks a weight of this architecture.
    """
    if not directory.is_dir():
        raise DataError(f"{directory}: is not a checkpoint of {model_class.__name__}: the directory does not exist")
    try:
        loaded: Any = model_class.from_pretrained(
            directory,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{directory}: is not a checkpoint of {model_class.__name__}: {first_line(error)}") from error
    net: PreTrainedModel
    net, report = loaded
    needed = (name for name in report["missing_keys"] if not name.endswith("num_batches_tracked"))
    if missing := sorted(name for name in needed if not name.startswith(tuple(new))):
        raise DataError(f"{directory}: lacks {len(missing)} weights of {model_class.__name__}: {missing[0]}, ...")
    return net


def initial_net(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, directory: Path | None, *, new: Sequence[str] = ()
) -> PreTrainedModel:
    """Return the model with the weights in ``directory/hf``, or with random ones where there is no data.

    On the meta device no weights are read.
    """
    if directory is None or torch.get_default_device().type == "meta":
        # transformers creates some weights on the CPU, also under the meta device.
        net: Any = model_class(config)
        moved: PreTrainedModel = net.to(torch.get_default_device())
        return moved
    return load_pretrained(model_class, config, directory / "hf", new=new)


def backbone_config(config_class: Callable[..., C], **values: Any) -> C:
    """Return the configuration of a backbone; its class does not declare ``out_features`` and ``out_indices``."""
    return config_class(**values)


def load_backbone(backbone: PreTrainedModel, directory: Path | None, *, new: Sequence[str] = ()) -> None:
    """Give a part of a model, also one with frozen normalization, the weights in ``directory/hf``.

    Nothing is done where there is no data, or on the meta device.
    """
    if directory is None or torch.get_default_device().type == "meta":
        return
    loaded = load_pretrained(type(backbone), backbone.config, directory / "hf", new=new)
    state = loaded.state_dict()
    backbone.load_state_dict({name: state[name] for name in backbone.state_dict()})

"""Initial weights from a checkpoint of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from accelmark.spec.errors import DataError, first_line


def load_pretrained(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, directory: Path, *, new: Sequence[str] = ()
) -> PreTrainedModel:
    """Return the model with the weights of the checkpoint in ``directory``, in fp32.

    ``new`` has the first parts of the names of weights that may be missing and are then random, as a new output layer.

    Raises:
        DataError: the checkpoint cannot be read, or lacks a weight of this architecture.
    """
    try:
        loaded: Any = model_class.from_pretrained(
            directory, config=config, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise DataError(f"{directory}: is no checkpoint of {model_class.__name__}: {first_line(error)}") from error
    net: PreTrainedModel
    net, found = loaded
    if missing := sorted(name for name in found["missing_keys"] if not name.startswith(tuple(new))):
        raise DataError(f"{directory}: lacks {len(missing)} weights of {model_class.__name__}: {missing[0]}, ...")
    return net


def initial_net(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, directory: Path | None, *, new: Sequence[str] = ()
) -> PreTrainedModel:
    """Return the model with the weights in ``directory/hf``, or with random ones where there is no data.

    On the meta device no weights are read.
    """
    if directory is None or torch.get_default_device().type == "meta":
        return model_class(config)
    return load_pretrained(model_class, config, directory / "hf", new=new)

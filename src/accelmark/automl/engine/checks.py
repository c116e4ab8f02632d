"""What is wrong with a request once network and data are known: found before anything is started."""

from __future__ import annotations

import os

from accelmark.automl.config import AutomlConfig, LocalCluster
from accelmark.automl.data import Dataset, open_dataset
from accelmark.automl.engine.weights import read_weights
from accelmark.automl.graph import Network
from accelmark.automl.records import Hyperparameters
from accelmark.automl.trial.order import digest, executed_network
from accelmark.spec.errors import DataError, RequestError


def check_hyperparameters(config: AutomlConfig, network: Network) -> None:
    """Raise RequestError when a hyperparameter is searched that changes nothing of the seed network."""
    if config.schedule.tuning_round is None:
        return
    tuning = config.tuning
    plain = Hyperparameters(batch_size=1, learning_rate=1.0)
    # One kernel alone may be the network's own: two others tell whether it could change anything at all.
    kernels = (
        {plain.model_copy(update={"kernel": value}) for value in (3, 5, *tuning.kernel)} if tuning.kernel else set()
    )
    rates = {plain.model_copy(update={"dropout": value}) for value in tuning.dropout or ()}
    for name, asked, why, instead in (
        ("kernel", kernels, "has no convolution over several pixels but those that read the picture", "[]"),
        ("dropout", rates, "has neither dropout nor a dense layer to put it before", "null"),
    ):
        if asked and len({digest(executed_network(network, one)) for one in asked}) == 1:
            raise RequestError(
                f"tuning.{name}: network {network.name!r} {why}, so no value changes what is executed:"
                f" write tuning.{name}: {instead}"
            )


def check_batches(config: AutomlConfig, pictures: int) -> None:
    """Raise RequestError when a batch is larger than the training split of ``pictures``: it could not be filled."""
    first = config.schedule.tuning_round
    searched = config.tuning.batch_size if first is not None else ()
    batches = [("tuning.batch_size", batch) for batch in searched]
    if first != 1 or not searched:  # else no trial takes it
        batches.append(("training.batch_size", config.training.batch_size))
    for key, batch in batches:
        if batch > pictures:
            raise RequestError(f"{key}: a batch of {batch} is larger than the training split of {pictures} pictures")


def check_places(config: AutomlConfig, *, cores: int, accelerators: int) -> None:
    """Raise RequestError when there is no room for all trials that are to run at a time."""
    size, devices = config.schedule.concurrency, config.training.devices_per_trial
    places = (accelerators or cores) // devices
    if size > places:
        what = f"{accelerators} accelerators" if accelerators else f"{cores} processor cores"
        raise RequestError(
            f"{size} trials at a time with {devices} devices each are asked for;"
            f" the cluster has {what}, enough for {places}"
        )


def check_weights(config: AutomlConfig, network: Network) -> None:
    """Raise DataError when the weights to start from cannot be read, or are of another network than the seed."""
    path = config.search.initial_weights
    if path is None:
        return
    weights = read_weights(path)
    from accelmark.automl.graph.module import GraphModule, load_weights

    try:
        load_weights(GraphModule(network), weights)
    except (KeyError, ValueError) as error:
        raise DataError(f"{path}: these are no weights of network {network.name!r}: {error.args[0]}") from error


def check_request(config: AutomlConfig, network: Network, *, seed_trained: bool = False) -> Dataset | None:
    """Check all that can be checked here with nothing started; weights to start from only while they are needed.

    Returns the data where trials run here; else None, since a cluster's hosts have their own, and check them.
    """
    check_hyperparameters(config, network)
    if not seed_trained:
        check_weights(config, network)
    if not isinstance(config.cluster, LocalCluster):
        return None
    dataset = open_dataset(config.dataset, network)
    check_batches(config, len(dataset.training))
    return dataset


def check_without_start(config: AutomlConfig, network: Network) -> tuple[Dataset | None, tuple[str, ...]]:
    """Check the request as a run would before it starts; return the data, and what only a start can tell."""
    dataset = check_request(config, network)
    import torch  # a run itself needs it in its workers alone

    unchecked: list[str] = []
    if dataset is None:
        unchecked.append("the cluster: whether it can be reached, has the data, and has room for all trials at a time")
    elif not torch.accelerator.is_available():
        check_places(config, cores=os.cpu_count() or 1, accelerators=0)
    else:
        unchecked.append("whether this machine has accelerators enough for all trials at a time")
    if config.tuning.storage is not None and config.schedule.tuning_round is not None:
        unchecked.append(
            "the study: whether its storage can be opened (that would write into it), and is of this search"
        )
    return dataset, tuple(unchecked)

"""What is wrong with a request once network and data are known: found before anything is started."""

from __future__ import annotations

from accelmark.automl.config import AutomlConfig
from accelmark.automl.graph import Network
from accelmark.automl.records import Hyperparameters
from accelmark.automl.trial.order import digest, executed_network
from accelmark.spec.errors import RequestError


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

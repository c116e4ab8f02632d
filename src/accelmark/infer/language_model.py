"""Language models of transformers: as engines compute them, and as inference cases that are scored by perplexity."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn

from accelmark.infer.case import InferBatch, InferCase, InMemoryBatches, swap_neighbours
from accelmark.serving.load import ServedModel
from accelmark.spec.errors import DataError
from accelmark.spec.settings.inference import InferSettings
from accelmark.spec.settings.training import Scalar


class CausalModel(nn.Module):
    """The model; ``forward`` scores texts, :meth:`generate` continues them with a KV cache."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model: Any = model
        self._frequencies: list[tuple[nn.Module, str, Tensor]] = [
            (module, name, buffer.clone())
            for module in model.modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name.endswith("inv_freq")
        ]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> CausalModel:
        """Convert or move the model; frequencies of rotary embeddings stay in fp32, as transformers loads them."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for module, name, frequencies in self._frequencies:
            module.register_buffer(name, frequencies.to(getattr(module, name).device), persistent=False)
        return self

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the negative log-likelihood of each token after the first, (batch, length - 1, 1) in nats."""
        logits = self.model(input_ids=tokens, use_cache=False).logits[:, :-1]
        nats = nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
        return nats.view(tokens.shape[0], -1, 1)

    def generate(self, tokens: Tensor, num_tokens: int) -> Iterator[Tensor]:
        """Yield the likeliest next token of each row of (batch, length) prompts, ``num_tokens`` times."""
        cache: Any = None
        for _ in range(num_tokens):
            output = self.model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache = output.past_key_values
            tokens = output.logits[:, -1:].argmax(-1)
            yield tokens[:, 0]

    def logits(self, tokens: Tensor, num_last: int) -> Tensor:
        """Return the logits after the last ``num_last`` of (batch, length) tokens: (batch, num_last, vocabulary)."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False, logits_to_keep=num_last).logits
        return logits

    def costs(self) -> dict[str, int]:
        """Return the sizes that the costs of generation follow from; see :mod:`accelmark.results.rounds.serving`."""
        config = self.model.config
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        kv_heads = getattr(config, "num_key_value_heads", None) or heads
        head, embedding = self.model.get_output_embeddings().weight, self.model.get_input_embeddings().weight
        matrices = sum(parameter.numel() for parameter in self.model.parameters() if parameter.ndim > 1)
        every = sum(each.numel() for each in self.model.parameters())
        is_tied = head is embedding
        return {
            # Of the matrix products of all layers.
            "body_parameters": matrices - embedding.numel() - (0 if is_tied else head.numel()),
            "head_parameters": head.numel(),
            # What a decode step reads: all but the embedding of the input, unless the output layer shares it.
            "step_parameters": every - (0 if is_tied else embedding.numel()),
            "attention_width": config.num_hidden_layers * heads * size,
            # Numbers in the KV cache for a token.
            "cache_width": 2 * config.num_hidden_layers * kv_heads * size,
        }


def load_model(directory: Path, dtype: torch.dtype = torch.float32, num_devices: int = 1) -> CausalModel:
    """Return the model of a directory in Hugging Face's layout, on the CPU.

    With several devices, return this rank's part of the default process group, on its device, split by the
    tensor-parallel plan of transformers. Raises ValueError: there is no plan for the model.
    """
    from transformers import AutoModelForCausalLM

    options: dict[str, Any] = {}
    if num_devices > 1:
        from transformers.distributed.configuration_utils import DistributedConfig

        options["distributed_config"] = DistributedConfig(tp_size=num_devices)
    return CausalModel(AutoModelForCausalLM.from_pretrained(directory, local_files_only=True, dtype=dtype, **options))


class LanguageModelCase(InferCase):
    """A language model: the case of every ``case.yaml`` that says ``generates``.

    An item is a window of the case's text, ``seq_length`` tokens long; ``windows`` of them are spread evenly over it.
    """

    input_names = ("tokens",)
    output_names = ("nats",)

    def __init__(
        self,
        settings: InferSettings,
        parameters: Mapping[str, Scalar],
        data_dirs: Mapping[str, Path],
        model: ServedModel,
    ) -> None:
        super().__init__(settings, parameters, data_dirs)
        self.served = model
        if settings.synthetic or model.directory is None or model.tokens is None:
            lack = "synthetic data is not possible" if settings.synthetic else "the model has no weights or tokenizer"
            raise DataError(f"{lack}: generation needs a directory of weights in Hugging Face's layout")
        self.directory = model.directory

    def build_dataloader(self) -> InMemoryBatches:
        encode = self.served.tokens
        assert encode is not None  # noqa: S101 - checked at the start
        tokens, length = encode(self.served.prompt_text()), self.number("seq_length")
        if len(tokens) < length:
            raise DataError(f"the text has {len(tokens)} tokens, parameters.seq_length is {length}")
        num_windows = min(self.number("windows"), len(tokens) // length)
        begins = np.linspace(0, len(tokens) - length, num_windows).astype(np.int64).tolist()
        windows = torch.tensor([tokens[begin : begin + length] for begin in begins])
        return InMemoryBatches((windows,), windows[:, 1:].clone(), self.settings.batch_size)

    def create_model(self) -> nn.Module:
        return load_model(self.directory)

    def evaluator(self, outputs: Sequence[Tensor], labels: Tensor) -> Mapping[str, float]:
        """Sum the negative log-likelihoods."""
        return {"nats": float(outputs[0].double().sum()), "count": float(labels.numel())}

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the perplexity: exp of the mean negative log-likelihood of a token."""
        return {"perplexity": math.exp(min(sums["nats"] / max(1.0, sums["count"]), 700.0))}

    def synthetic_batch(self, size: int) -> InferBatch:
        """Refuse: a text is needed."""
        raise DataError("generation has no synthetic data")

    def perturbed(self, batch: InferBatch, generator: Generator) -> tuple[Tensor, ...]:
        """Exchange two neighbouring tokens in each window."""
        tokens = batch.inputs[0]
        return (swap_neighbours(tokens, torch.ones_like(tokens, dtype=torch.bool), generator),)

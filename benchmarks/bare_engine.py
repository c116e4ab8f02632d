"""The networks of ``benchmarks.inference``, and a bare loop in the process of the engine.

``python -m benchmarks.bare_engine`` is started in place of ``accelmark.infer.worker``; it has one more command.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, from_numpy, nn

from accelmark.cases.efficientnet_lite0.infer_pytorch import EfficientNetLite0
from accelmark.cases.resnet_mini.pytorch import ResNetMini
from accelmark.infer.engine import as_list
from accelmark.infer.worker import Worker, main

LENGTH = 64
"""Tokens per sequence."""


class Mini(nn.Module):
    """The network of resnet_mini, with initial weights."""

    def __init__(self) -> None:
        super().__init__()
        self.network = ResNetMini(16, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        logits: Tensor = self.network.classifier(self.network.features(image).mean((2, 3)))
        return logits


class Bert(nn.Module):
    """transformers' BertModel in MiniLM's size, with plain tensors."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertModel

        config = BertConfig(hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12)
        self.net = BertModel(config)

    def forward(self, tokens: Tensor, mask: Tensor, kinds: Tensor) -> Tensor:
        states: Tensor = self.net(input_ids=tokens, attention_mask=mask, token_type_ids=kinds).last_hidden_state
        return states


@dataclass(frozen=True)
class Model:
    """A network, and synthetic inputs for it."""

    make: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    input_names: tuple[str, ...]
    output_names: tuple[str, ...]


def _images(*shape: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda size: (torch.randn(size, *shape),)


def _tokens(size: int) -> tuple[Tensor, ...]:
    tokens = torch.randint(1000, 30000, (size, LENGTH))
    return tokens, torch.ones_like(tokens), torch.zeros_like(tokens)


BERT_INPUTS = ("input_ids", "attention_mask", "token_type_ids")
MODELS = {
    "resnet_mini": Model(Mini, _images(1, 28, 28), ("image",), ("logits",)),
    "efficientnet_lite0": Model(EfficientNetLite0, _images(3, 224, 224), ("image",), ("logits",)),
    "minilm": Model(Bert, _tokens, BERT_INPUTS, ("last_hidden_state",)),
}


def bare_call(engine: Any) -> Callable[[list[Tensor]], object]:
    """Return a minimal call of this engine's runtime, from CPU tensors to CPU tensors."""
    if engine.name == "onnxruntime":
        session, names = engine.session, engine.inputs
        return lambda inputs: [
            from_numpy(each)
            for each in session.run(None, {name: each.numpy() for name, each in zip(names, inputs, strict=True)})
        ]
    if engine.name == "openvino":
        request = engine.compiled.create_infer_request()
        return lambda inputs: [
            from_numpy(each) for each in request.infer([each.numpy() for each in inputs], share_inputs=True).to_tuple()
        ]
    model = getattr(engine, {"eager": "model", "inductor": "compiled", "aotinductor": "run"}[engine.name])
    return lambda inputs: [each.cpu() for each in as_list(model(*inputs))]


class BareWorker(Worker):
    """A worker that also computes the prepared calls as a person would write it."""

    def bare(self) -> float:
        """Return the processor seconds of the calls that were prepared; outputs are thrown away."""
        call, calls = bare_call(self.engine), self.calls
        began = time.process_time()
        for inputs in calls:
            call(inputs)
        return time.process_time() - began

    def queue(self) -> float:
        """Return the seconds that OpenVINO's AsyncInferQueue takes for the calls that were prepared."""
        engine: Any = self.engine
        queue, outputs = engine.ov.AsyncInferQueue(engine.compiled), []
        queue.set_callback(lambda request, _: outputs.append([each.data.copy() for each in request.output_tensors]))
        began = time.perf_counter()
        for inputs in self.calls:
            queue.start_async([each.numpy() for each in inputs], share_inputs=True)
        queue.wait_all()
        took = time.perf_counter() - began
        assert len(outputs) == len(self.calls)
        return took

    def run(self) -> None:
        """Compute the window that was prepared, as in a run."""
        began = time.process_time()
        super().run()
        self.processor_s = time.process_time() - began

    def processor(self) -> float:
        """Return the processor seconds of the last window."""
        return self.processor_s


if __name__ == "__main__":
    from benchmarks import bare_engine  # by its own name, as in the pickled model

    main(sys.argv[1:], bare_engine.BareWorker)

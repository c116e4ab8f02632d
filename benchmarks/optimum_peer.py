"""Run optimum-benchmark on one model and batch size; the last line printed has its figures as JSON.

``python benchmarks/optimum_peer.py MODEL_DIR BACKEND BATCH LENGTH SECONDS``, started by ``inference.py``. It imports
nothing of AccelMark, since optimum-benchmark 0.6.0 needs its own virtual environment.
"""

import json
import os
import sys
from importlib.metadata import version

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
from optimum_benchmark import (
    Benchmark,
    BenchmarkConfig,
    InferenceConfig,
    InlineConfig,
    ORTConfig,
    PyTorchConfig,
)

LIBRARIES = ("optimum-benchmark", "optimum", "transformers", "torch", "onnxruntime")


def main(model: str, backend: str, batch: int, length: int, seconds: float) -> None:
    of_model = {"model": model, "task": "feature-extraction", "library": "transformers", "device": "cpu"}
    if backend == "eager":
        chosen = PyTorchConfig(**of_model, intra_op_num_threads=1, inter_op_num_threads=1)
    else:
        options = {"intra_op_num_threads": 1}
        chosen = ORTConfig(**of_model, export=False, use_io_binding=False, session_options=options)
    scenario = InferenceConfig(
        latency=True, memory=False, warmup_runs=10, duration=seconds,
        input_shapes={"batch_size": batch, "sequence_length": length},
    )  # fmt: skip
    report = Benchmark.launch(BenchmarkConfig(name="peer", launcher=InlineConfig(), scenario=scenario, backend=chosen))
    figures = {
        "times": [float(value) for value in report.forward.latency.values],
        "versions": {name: version(name) for name in LIBRARIES},
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]))

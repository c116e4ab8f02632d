"""Compute the figures of offline generation: prefill and decoding apart, KV cache, MBU and MFU.

- Prefill tokens/s of a stage of batches of B requests: B x (sum of the prompts' tokens) / (sum of first output - due),
  over its requests; decode tokens/s: B x (sum of tokens - 1) / (sum of end - first output). The requests of a batch
  have the same times, so both are tokens over the duration of their phase.
- FLOPs: two for each weight of a matrix product and token (Kaplan et al. 2020, arXiv:2001.08361, section 2.1), and four
  for each token, token it attends to, and number of the width of attention (Chowdhery et al. 2022, arXiv:2204.02311,
  appendix B); attention counts in full, a causal mask saves nothing. The prefill computes the output layer once for
  each prompt.
- MBU: bytes that a decode step has to read (all weights, and the keys and values of the batch at half of the answer)
  over the step's duration and the memory bandwidth ("LLM Inference Performance Engineering: Best Practices",
  databricks.com, 2023).
- With several devices (tensor parallelism), rates and the KV cache are those of all together, and MFU and MBU are
  relative to the sum of their peaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy as np

from accelmark.results.figures import FigureName as F
from accelmark.results.read.rank_log import InferLog
from accelmark.results.read.requests import Requests, read_requests
from accelmark.results.rounds.load import counted
from accelmark.results.rounds.serving import (
    Consumption,
    curves_of,
    scenario_figures,
    serving_round,
    stage_figures,
    stage_of,
)
from accelmark.results.schema import Figures, Point, ServingRound, ServingStage, value
from accelmark.spec.job import InferJob, JobSpec
from accelmark.spec.log.serving import REQUESTS_FILE
from accelmark.spec.settings.inference import InferStep
from accelmark.spec.settings.serving import generation_load
from accelmark.spec.settings.training import Scalar

_BYTES: Final = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "int8": 1}
"""Precision -> bytes of a weight, and of a number of the KV cache in an engine that does not quantise it."""
_NAMES: Final = ("body_parameters", "head_parameters", "step_parameters", "attention_width", "cache_width")


@final
@dataclass(frozen=True)
class ModelCosts:
    """Shapes of the model, as the step CREATE reports them, and the chip's peaks."""

    body_parameters: int
    head_parameters: int
    step_parameters: int
    attention_width: int
    cache_width: int
    bytes_per_number: int
    peak_tflops: float | None
    """Of the precision, dense; of all devices together."""
    bandwidth_gb_s: float | None
    """Of the memories of all devices."""

    @classmethod
    def of(
        cls,
        details: Mapping[str, Scalar],
        precision: str,
        peak_tflops: float | None,
        bandwidth_gb_s: float | None,
        num_devices: int = 1,
    ) -> ModelCosts | None:
        """Return the costs, None where the run did not report the shapes. The peaks are of one device."""
        reported = {name: details.get(name) for name in _NAMES}
        if not all(isinstance(number, int) for number in reported.values()):
            return None
        shapes: dict[str, Any] = reported
        return cls(
            **shapes,
            bytes_per_number=_BYTES[precision],
            peak_tflops=peak_tflops * num_devices if peak_tflops else None,
            bandwidth_gb_s=bandwidth_gb_s * num_devices if bandwidth_gb_s else None,
        )

    def prefill_flops(self, length: float) -> float:
        """Return the FLOPs of the prefill of one prompt."""
        return 2 * (self.body_parameters * length + self.head_parameters) + 4 * self.attention_width * length**2

    def decode_flops(self, context: float) -> float:
        """Return the FLOPs of one further token after ``context`` tokens."""
        return 2 * (self.body_parameters + self.head_parameters) + 4 * self.attention_width * context

    def cache_bytes(self, tokens: float) -> float:
        """Return the bytes of the keys and values of ``tokens`` tokens, over all requests."""
        return self.bytes_per_number * self.cache_width * tokens

    def step_bytes(self, batch: int, context: float) -> float:
        """Return the bytes that a decode step of ``batch`` requests reads."""
        return self.bytes_per_number * self.step_parameters + self.cache_bytes(batch * context)


def generation_stage(stage: ServingStage, requests: Requests, costs: ModelCosts | None) -> ServingStage:
    """Return ``stage`` with the figures of generation; ``requests`` are the stage's, in batches."""
    if stage.window_s is None or stage.concurrency is None:
        return stage
    begin_s, end_s = stage.window_s
    known = counted(requests)
    known = known.where((known.due_s >= begin_s) & (known.due_s < end_s) & np.isfinite(known.tokens_in))
    if not len(known):
        return stage
    batch = stage.concurrency
    prompt, answer = float(known.tokens_in.mean()), float(known.tokens.mean())
    prefill_s = float((known.first_s - known.due_s).mean())
    decode_s = float((known.end_s - known.first_s).mean())
    figures: dict[str, float | None] = {
        "prefill_token_rate": batch * prompt / prefill_s if prefill_s > 0 else None,
        "decode_token_rate": batch * (answer - 1) / decode_s if decode_s > 0 else None,
    }
    if costs is not None:
        context, steps = prompt + answer / 2, answer - 1
        peak = costs.peak_tflops * 1e12 if costs.peak_tflops else None
        bandwidth = costs.bandwidth_gb_s * 1e9 if costs.bandwidth_gb_s else None
        decodes = decode_s > 0 and steps > 0
        figures |= {
            "kv_cache_mib": costs.cache_bytes(batch * (prompt + answer)) / 2**20,
            "prefill_mfu": batch * costs.prefill_flops(prompt) / prefill_s / peak if peak and prefill_s > 0 else None,
            "decode_mfu": batch * steps * costs.decode_flops(context) / decode_s / peak if peak and decodes else None,
            "decode_mbu": steps * costs.step_bytes(batch, context) / decode_s / bandwidth
            if bandwidth and decodes
            else None,
        }
    return stage.model_copy(update=figures)


class Generated(NamedTuple):
    """What a round that generates text adds to the others."""

    serving: ServingRound
    figures: Figures
    curves: dict[str, tuple[Point, ...]]


def generation_round(
    job: JobSpec, infer: InferJob, log: InferLog, node_dir: Path | None, consumption: Consumption
) -> Generated:
    """Return the stages and figures; those that were not measured are null with a reason."""
    settings = generation_load(infer.settings)
    requests, lines = read_requests(node_dir / REQUESTS_FILE if node_dir else Path(REQUESTS_FILE))
    create, chip = log.stage(InferStep.CREATE), job.chip
    costs = ModelCosts.of(
        create.details if create is not None else {},
        infer.settings.precision,
        getattr(chip.peaks, infer.settings.precision, None) if chip is not None else None,
        chip.memory_bandwidth_gb_s if chip is not None else None,
        job.key.nproc,
    )
    stages = []
    for ended in log.loads:
        chosen = requests.where(requests.stage == ended.load.stage)
        measured = stage_of(job, settings, chosen, ended, job.key.nproc, consumption)
        stages.append(generation_stage(measured, chosen, costs))
    serving = serving_round(
        settings,
        (requests, lines.malformed),
        node_dir,
        stages,
        log.token_scenarios,
        has_slo=False,
        min_agreement=infer.min_agreement,
        num_devices=job.key.nproc,
        server=None,
        engine=infer.settings.compiler,
        endpoint=None,
        served_model=None,
        has_tokenizer=True,
    )
    return Generated(serving, _figures(serving, log, costs), curves_of(log.loads, requests))


def _figures(serving: ServingRound, log: InferLog, costs: ModelCosts | None) -> Figures:
    stage = serving.headline_stage
    failed = log.finished.message if log.finished is not None else None
    absent = failed or serving.headline_why
    unknown = absent if stage is None else "the step create did not report the model's shapes"
    no_peak = unknown if costs is None else "the chip's peak at this precision is unknown"
    no_bandwidth = unknown if costs is None else "the chip's memory bandwidth is unknown"
    not_compared = "generate_compared is 0" if not serving.answers.num_promised else "no answer was compared"
    return {
        **stage_figures(stage, absent),
        **scenario_figures(serving.scenarios),
        F.PREFILL_RATE: value(stage.prefill_token_rate if stage else None, absent),
        F.DECODE_RATE: value(stage.decode_token_rate if stage else None, absent),
        F.KV_CACHE: value(stage.kv_cache_mib if stage else None, unknown),
        F.PREFILL_MFU: value(stage.prefill_mfu if stage else None, no_peak),
        F.DECODE_MFU: value(stage.decode_mfu if stage else None, no_peak),
        F.DECODE_MBU: value(stage.decode_mbu if stage else None, no_bandwidth),
        F.ANSWER_AGREEMENT: value(serving.answers.agreement, not_compared),
    }

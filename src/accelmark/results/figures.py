"""The table of figures: each is declared once, in the order of pages and tables."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final, Literal, NamedTuple

from accelmark.spec.backports import StrEnum
from accelmark.spec.number_format import quantity

Measurement = Literal["train", "infer", "generate", "serve", "automl"]
"""What a round measures; an inference round that generates text measures both."""

TRAIN: Final[tuple[Measurement, ...]] = ("train",)
INFER: Final[tuple[Measurement, ...]] = ("infer",)
GENERATE: Final[tuple[Measurement, ...]] = ("generate",)
SERVE: Final[tuple[Measurement, ...]] = ("serve",)
AUTOML: Final[tuple[Measurement, ...]] = ("automl",)
LOADED: Final = (*GENERATE, *SERVE)
COMPUTED: Final = (*TRAIN, *INFER)
"""A server reports no FLOPs."""
ALL: Final = (*TRAIN, *INFER, *SERVE)
_FULL_BATCH: Final = "of a full batch in the engine, its wait there for a free stream included, nearest rank"


class FigureInfo(NamedTuple):
    """The declaration of a figure; its texts may contain ``{unit}`` and ``{metric}``, which the case states."""

    group: str
    title: str
    unit: str
    better: Literal["higher", "lower", "neither"]
    measured_by: tuple[Measurement, ...]
    explanation: str
    """Its definition or formula."""
    rank: int = 0
    """Order among the headlines, from 1; 0: it is none."""
    warns: bool = False
    """Whether a wide interval of it is a warning."""
    is_difference: bool = False
    """Whether its values may be on both sides of 0, so that a share of them means nothing."""


class FigureName(StrEnum):
    """The figures of a round. A round's function in ``results/rounds`` returns their values by name."""

    info: FigureInfo

    def __new__(cls, name: str, info: FigureInfo | None = None) -> FigureName:
        """Create a member from its declaration; ``FigureName(name)`` finds it."""
        assert info is not None  # noqa: S101 - each member has one
        member = str.__new__(cls, name)
        member._value_, member.info = name, info
        return member

    # fmt: off
    FINAL_METRIC = "final_metric", FigureInfo("Outcome", "Final {metric}", "", "neither", TRAIN,
        "the target's metric at the last evaluation", rank=30)
    FINAL_LOSS = "final_loss", FigureInfo("Outcome", "Final loss", "", "lower", TRAIN,
        "loss of the last step", rank=210)
    TIME_TO_TARGET = "time_to_target_s", FigureInfo("Outcome", "Time to target", "s", "lower", TRAIN,
        "raw training time, warm-up included, until the first evaluation that reached the target", rank=20, warns=True)
    SEARCH_SCORE = "search_score", FigureInfo("Search", "Score", "OP/s", "higher", AUTOML,
        "operations of all trials, by the search's counting rule, over its time", rank=240)
    SEARCH_REGULATED_SCORE = "search_regulated_score", FigureInfo("Search", "Regulated score", "OP/s", "higher", AUTOML,
        "-ln(held-out error) x score", rank=260)
    SEARCH_HELD_OUT_ERROR = "search_held_out_error", FigureInfo("Search", "Held-out error", "ratio", "lower", AUTOML,
        "best trial, on the held-out split", rank=250)
    SEARCH_VALIDATION_ERROR = "search_validation_error", FigureInfo(
        "Search", "Best validation error", "ratio", "lower", AUTOML,
        "lowest error of any trial on the validation split")
    SEARCH_IDLE_SHARE = "search_idle_share", FigureInfo("Search", "Idle", "ratio", "lower", AUTOML,
        "share of the workers' time without training or evaluation; waits for data count as idle", rank=270)
    SEARCH_TRIALS = "search_trials_finished", FigureInfo("Search", "Trials finished", "trials", "neither", AUTOML,
        "of the trials that were started")
    SEARCH_IMAGES = "search_trained_images", FigureInfo("Search", "Images trained", "images", "neither", AUTOML,
        "over all trials")
    SEARCH_OPERATIONS = "search_operations", FigureInfo("Search", "Operations", "OP", "neither", AUTOML,
        "counted operations of all trials")
    SEARCH_TIME = "search_time_s", FigureInfo("Search", "Search", "s", "neither", AUTOML,
        "from the start of the first trial to the end of the last")
    THROUGHPUT_WHOLE = "throughput_whole", FigureInfo("Throughput", "Throughput, whole", "{unit}s/s", "higher", TRAIN,
        "over raw training time, with data loading and evaluation")
    THROUGHPUT_TRAIN = "throughput_train", FigureInfo(
        "Throughput", "Throughput, training", "{unit}s/s", "higher", TRAIN, "over training time, warm-up included")
    THROUGHPUT_STEADY = "throughput_steady", FigureInfo(
        "Throughput", "Throughput, steady", "{unit}s/s", "higher", TRAIN,
        "over training time without warm-up: units of the steps after it", rank=10, warns=True)
    THROUGHPUT_CORE = "throughput_core", FigureInfo("Throughput", "Throughput, core", "{unit}s/s", "higher", TRAIN,
        "over computation only")
    THROUGHPUT_PER_DEVICE = "throughput_per_device", FigureInfo(
        "Throughput", "Throughput per device", "{unit}s/s", "higher", TRAIN, "steady throughput per device")
    INFERENCE_CORE = "inference_core", FigureInfo("Inference", "Inference, core", "{unit}s/s", "higher", INFER,
        "engine: computation and copies to and from the device", rank=40, warns=True)
    INFERENCE_WHOLE = "inference_whole", FigureInfo("Inference", "Inference, whole", "{unit}s/s", "higher", INFER,
        "engine: with data loading and evaluation")
    VALIDATION_CORE = "validation_core", FigureInfo("Inference", "Validation, core", "{unit}s/s", "higher", INFER,
        "framework: computation and copies to and from the device", rank=170)
    VALIDATION_WHOLE = "validation_whole", FigureInfo("Inference", "Validation, whole", "{unit}s/s", "higher", INFER,
        "framework: with data loading and evaluation")
    ENGINE_METRIC = "engine_metric", FigureInfo("Accuracy", "{metric}, engine", "", "neither", INFER,
        "on the data, changed slightly so that answers cannot be looked up", rank=50)
    FRAMEWORK_METRIC = "framework_metric", FigureInfo("Accuracy", "{metric}, framework", "", "neither", INFER,
        "on the same changed inputs as the engine")
    METRIC_DIFFERENCE = "metric_difference", FigureInfo(
        "Accuracy", "{metric}, engine minus framework", "", "neither", INFER,
        "on the same changed inputs; the case states a tolerance", is_difference=True)
    INFERENCE_METRIC = "inference_metric", FigureInfo("Accuracy", "{metric}, engine, all passes", "", "neither", INFER,
        "on all inputs of the measured passes, changed again in each")
    VALIDATION_METRIC = "validation_metric", FigureInfo(
        "Accuracy", "{metric}, framework, data as published", "", "neither", INFER,
        "on the unchanged data: the figure to compare with a published one")
    REPEAT_SPEEDUP = "repeat_speedup", FigureInfo("Accuracy", "Repeated over new items", "ratio", "neither", INFER,
        "speed of repeated items over new ones; more than 110 % in most batches suggests cached outputs")
    DECLARED_SHARE = "not_inference_share", FigureInfo("Accuracy", "Declared not inference", "ratio", "lower", INFER,
        "share of the measured calls' time that the engine declares as not inference; in no rate or latency")
    LATENCY_P50 = "latency_p50_ms", FigureInfo("Latency", "Latency, median", "ms", "lower", INFER, _FULL_BATCH, rank=60)
    LATENCY_P90 = "latency_p90_ms", FigureInfo("Latency", "Latency, p90", "ms", "lower", INFER, _FULL_BATCH)
    LATENCY_P99 = "latency_p99_ms", FigureInfo("Latency", "Latency, p99", "ms", "lower", INFER, _FULL_BATCH, rank=140)
    LATENCY_P999 = "latency_p999_ms", FigureInfo("Latency", "Latency, p99.9", "ms", "lower", INFER, _FULL_BATCH)
    FIRST_CALL = "first_call_ms", FigureInfo("Latency", "First call", "ms", "lower", INFER,
        "first call of the engine, before warm-up; in no other figure")
    OFFLINE_RATE = "offline_samples_per_second", FigureInfo(
        "Scenarios", "Offline scenario", "samples/s", "higher", INFER, "LoadGen: all samples in one query")
    SINGLE_STREAM_LATENCY = "single_stream_latency_p90_ms", FigureInfo(
        "Scenarios", "SingleStream scenario, p90", "ms", "lower", INFER, "LoadGen: one query at a time")
    MULTI_STREAM_LATENCY = "multi_stream_latency_p99_ms", FigureInfo(
        "Scenarios", "MultiStream scenario, p99", "ms", "lower", INFER, "LoadGen: queries of several samples")
    SERVER_RATE = "server_queries_per_second", FigureInfo("Scenarios", "Server scenario", "queries/s", "higher", INFER,
        "LoadGen: highest rate at which 99 % of queries meet the latency bound")
    PREFILL_RATE = "prefill_tokens_per_second", FigureInfo(
        "Offline generation", "Prefill", "tokens/s", "higher", GENERATE,
        "batch x mean tokens of a prompt / mean (first output - due), of the headline batch")
    DECODE_RATE = "decode_tokens_per_second", FigureInfo(
        "Offline generation", "Decoding", "tokens/s", "higher", GENERATE,
        "batch x mean (tokens - 1) / mean (end - first output), of the headline batch")
    PREFILL_MFU = "prefill_mfu", FigureInfo("Offline generation", "Prefill, MFU", "ratio", "higher", GENERATE,
        "FLOP/s over the chip's dense peak: 2 per weight of a matrix product and token (Kaplan et al. 2020), 4 "
        "per token, attended token and attention width (Chowdhery et al. 2022, appendix B), no saving by the "
        "causal mask")
    DECODE_MFU = "decode_mfu", FigureInfo("Offline generation", "Decoding, MFU", "ratio", "higher", GENERATE,
        "the same of the decode steps, attending to the prompt and half of the answer")
    DECODE_MBU = "decode_mbu", FigureInfo("Offline generation", "Decoding, MBU", "ratio", "higher", GENERATE,
        "bytes that a step reads (all weights, keys and values at half of the answer) over its duration and the "
        "chip's memory bandwidth (Databricks, LLM Inference Performance Engineering, 2023)")
    KV_CACHE = "kv_cache_mib", FigureInfo("Offline generation", "KV cache", "MiB", "lower", GENERATE,
        "keys and values of the batch at the end of its answers: 2 x layers x KV heads x head size x bytes x "
        "batch x tokens, in the run's precision")
    OUTPUT_RATE = "output_tokens_per_second", FigureInfo("Serving", "Output tokens", "tokens/s", "higher", LOADED,
        "tokens whose outputs arrived in the steady-state window of the headline stage, over its length",
        rank=70, warns=True)
    OUTPUT_RATE_PER_DEVICE = "output_tokens_per_second_per_device", FigureInfo(
        "Serving", "Output tokens per device", "tokens/s", "higher", LOADED,
        "output tokens/s over the server's devices")
    OUTPUT_RATE_PER_USER = "output_tokens_per_second_per_user", FigureInfo(
        "Serving", "Output tokens per user", "tokens/s", "higher", LOADED,
        "1 / median TPOT: the speed at which one request's answer is written")
    REQUEST_RATE = "requests_per_second", FigureInfo("Serving", "Requests", "requests/s", "higher", SERVE,
        "requests answered in the window over its length", rank=110)
    GOODPUT = "goodput_requests_per_second", FigureInfo("Serving", "Goodput", "requests/s", "higher", SERVE,
        "requests due in the window that held all limits of the SLO, over its length")
    SLO_SHARE = "slo_share", FigureInfo("Serving", "Within the SLO", "ratio", "higher", SERVE,
        "share of the requests due in the window that held all limits; failed ones did not")
    SLO_RATE = "slo_rate_requests_per_second", FigureInfo(
        "Serving", "Highest rate within the SLO", "requests/s", "higher", SERVE,
        "highest rate of an open load at which enough requests held the SLO and the server kept up", rank=100)
    LOADGEN_SERVER_TOKENS = "loadgen_server_tokens_per_second", FigureInfo(
        "Serving", "Server scenario", "tokens/s", "higher", LOADED,
        "LoadGen with token latencies: completed tokens/s at the highest rate of queries at which the share of "
        "the SLO holds the limits of TTFT and TPOT")
    LOADGEN_OFFLINE_TOKENS = "loadgen_offline_tokens_per_second", FigureInfo(
        "Serving", "Offline scenario", "tokens/s", "higher", LOADED,
        "LoadGen with token latencies: tokens/s where all queries are issued at once")
    TTFT_P50 = "ttft_p50_ms", FigureInfo("Latency under load", "TTFT, median", "ms", "lower", LOADED,
        "time to first token: first output - when the request was due; answered requests due in the window", rank=80)
    TTFT_P99 = "ttft_p99_ms", FigureInfo("Latency under load", "TTFT, p99", "ms", "lower", LOADED,
        "time to first token, nearest rank")
    TPOT_P50 = "tpot_p50_ms", FigureInfo("Latency under load", "TPOT, median", "ms", "lower", LOADED,
        "time per output token after the first: (end to end - TTFT) / (tokens - 1) of each request", rank=90)
    TPOT_P99 = "tpot_p99_ms", FigureInfo("Latency under load", "TPOT, p99", "ms", "lower", LOADED,
        "time per output token, nearest rank")
    ITL_P99 = "itl_p99_ms", FigureInfo("Latency under load", "ITL, p99", "ms", "lower", LOADED,
        "inter-token latency: gaps between outputs over all requests; an output may have several tokens")
    ANSWER_AGREEMENT = "answer_agreement", FigureInfo(
        "Served answers", "Agreement with the framework", "ratio", "higher", LOADED,
        "answers under load: mean share of tokens, from the start, equal to the framework's greedy answer", rank=120)
    FAILED_SHARE = "failed_request_share", FigureInfo("Served answers", "Failed requests", "ratio", "lower", SERVE,
        "of all requests of the stages, without steps of the search")
    SERVER_START_TIME = "server_start_time_s", FigureInfo("Time", "Start of the server", "s", "lower", SERVE,
        "from the start of its process to its first healthy answer")
    E2E_TIME = "e2e_time_s", FigureInfo("Time", "End to end", "s", "lower", ALL,
        "from the start of rank 0's process to its last event")
    VALIDATION_TIME = "validation_time_s", FigureInfo("Time", "Validation step", "s", "lower", INFER, "step 3")
    EXPORT_TIME = "export_time_s", FigureInfo("Time", "Export step", "s", "lower", INFER, "step 4: export to ONNX")
    COMPILE_TIME = "compile_time_s", FigureInfo("Time", "Compilation", "s", "lower", INFER,
        "step 5; in no throughput", rank=220)
    INFERENCE_TIME = "inference_time_s", FigureInfo("Time", "Inference step", "s", "lower", INFER,
        "step 6, with LoadGen scenarios")
    INIT_TIME = "init_time_s", FigureInfo("Time", "Initialisation", "s", "lower", TRAIN,
        "from the start of rank 0's process to TRAIN_START")
    WARMUP_TIME = "warmup_time_s", FigureInfo("Time", "Warm-up", "s", "lower", TRAIN,
        "first steps of each process, until five take on average at most 1.25 x the median step of its second half; "
        "at most a third of the steps", rank=235)
    RAW_TRAIN_TIME = "raw_train_time_s", FigureInfo("Time", "Raw training", "s", "lower", TRAIN,
        "TRAIN_START to TRAIN_END, evaluation included", rank=230, warns=True)
    TRAIN_NO_EVAL_TIME = "train_no_eval_time_s", FigureInfo("Time", "Training", "s", "lower", TRAIN,
        "raw training time minus evaluation")
    PURE_COMPUTE_TIME = "pure_compute_time_s", FigureInfo("Time", "Computation", "s", "lower", TRAIN,
        "sum of the computation of all steps")
    REEVALUATION_TIME = "reevaluation_time_s", FigureInfo("Time", "Evaluation outside", "s", "lower", TRAIN,
        "after the round: a fresh process evaluates the weights and replays steps; in no other figure")
    STEP_P50 = "step_p50_ms", FigureInfo("Time", "Step time, median", "ms", "lower", TRAIN,
        "computation of a step", rank=190)
    STEP_P90 = "step_p90_ms", FigureInfo("Time", "Step time, p90", "ms", "lower", TRAIN, "computation of a step")
    STEP_P99 = "step_p99_ms", FigureInfo("Time", "Step time, p99", "ms", "lower", TRAIN, "computation of a step")
    DATA_WAIT_SHARE = "data_wait_share", FigureInfo("Time", "Waiting for data", "ratio", "lower", TRAIN,
        "share of training time", rank=200)
    MFU = "mfu", FigureInfo("Computation", "MFU", "ratio", "higher", COMPUTED,
        "model FLOP/s per device over the chip's dense peak at the precision used; attention counts in full, a "
        "causal mask saves nothing", rank=150)
    MFU_MEASURED = "mfu_measured", FigureInfo("Computation", "MFU, measured ceiling", "ratio", "higher", COMPUTED,
        "model FLOP/s per device over the matmul rate that the probe measured")
    ACHIEVED_TFLOPS = "achieved_tflops_per_device", FigureInfo(
        "Computation", "Model FLOP/s per device", "TFLOP/s", "higher", COMPUTED, "throughput per device x model FLOPs")
    FLOPS_PER_SAMPLE = "flops_per_sample", FigureInfo("Computation", "Model FLOPs per sample", "FLOP", "neither", TRAIN,
        "forward and backward, counted; attention in full, not halved where it is causal")
    FLOPS_PER_ITEM = "flops_per_item", FigureInfo("Computation", "Model FLOPs per item", "FLOP", "neither", INFER,
        "forward pass, as the case states")
    PEAK_DEVICE_MEMORY = "peak_device_memory_mib", FigureInfo(
        "Memory and utilisation", "Peak device memory", "MiB", "lower", ALL,
        "largest allocation on any device, by the framework, or of the job's own processes by the driver; on a CPU, "
        "the resident memory of the processes that compute", rank=180)
    DEVICE_MEMORY_TOTAL = "device_memory_total_mib", FigureInfo(
        "Memory and utilisation", "Device memory", "MiB", "neither", INFER, "capacity of the device, from telemetry")
    PEAK_HOST_MEMORY = "peak_host_memory_mib", FigureInfo(
        "Memory and utilisation", "Peak host memory", "MiB", "neither", ALL,
        "largest use on any host, other processes included, from telemetry")
    DEVICE_UTILISATION = "device_utilisation", FigureInfo(
        "Memory and utilisation", "Device utilisation", "ratio", "higher", ALL,
        "time-weighted mean during the measurement")
    CPU_UTILISATION = "cpu_utilisation", FigureInfo(
        "Memory and utilisation", "CPU utilisation", "ratio", "neither", ALL,
        "time-weighted mean during the measurement")
    TELEMETRY_CPU_TIME = "telemetry_cpu_time_s", FigureInfo(
        "Memory and utilisation", "CPU time of telemetry", "s", "lower", ALL,
        "user and system time of the telemetry recorder")
    MEAN_POWER = "mean_power_w", FigureInfo("Power and energy", "Mean power", "W", "lower", ALL,
        "all devices (or CPU packages) during the measurement")
    ENERGY = "energy_j", FigureInfo("Power and energy", "Energy", "J", "lower", ALL,
        "device's energy counter while training, else integrated power", rank=280, warns=True)
    ENERGY_PER_UNIT = "energy_per_unit_j", FigureInfo("Power and energy", "Energy per {unit}", "J", "lower", ALL,
        "energy over the number of units", rank=160)
    UNITS_PER_JOULE = "performance_per_watt", FigureInfo(
        "Power and energy", "Performance per watt", "{unit}s/J", "higher", ALL, "units per joule", rank=130)
    # fmt: on


_GROUPS: Final = dict.fromkeys(name.info.group for name in FigureName)
FIGURE_GROUPS: Final = {group: tuple(name for name in FigureName if name.info.group == group) for group in _GROUPS}
HEADLINES: Final = tuple(sorted((name for name in FigureName if name.info.rank), key=lambda name: name.info.rank))
"""The figures that say most, in order of preference; those without a value are skipped."""
RATES: Final = {
    "train": FigureName.THROUGHPUT_TRAIN, "infer": FigureName.INFERENCE_CORE, "serve": FigureName.OUTPUT_RATE,
    "automl": FigureName.SEARCH_SCORE,
}  # fmt: skip
WARNED_FIGURES: Final = tuple(name for name in HEADLINES if name.info.warns)


def figures_of(*measurements: Measurement) -> tuple[FigureName, ...]:
    """Return the figures of a round."""
    return tuple(name for name in FigureName if any(kind in name.info.measured_by for kind in measurements))


def in_groups(names: Collection[FigureName]) -> dict[str, list[FigureName]]:
    """Return figures by title of their group, as a comparison shows them: first the three that say most."""
    first = [name for name in HEADLINES if name in names][:3]
    left = set(names) - set(first)
    rest = {title: [name for name in group if name in left] for title, group in FIGURE_GROUPS.items()}
    groups = {"Headline figures": first} | rest
    return {title: group for title, group in groups.items() if group}


def title_of(name: FigureName, unit: str, metric: str | None = None) -> str:
    """Return a figure's title for a case that counts ``unit`` and has the ``metric``."""
    title = name.info.title.format(unit=unit, metric=metric or "metric")
    return title[:1].upper() + title[1:]


def unit_of(name: FigureName, unit: str) -> str:
    """Return a figure's unit for a case that counts ``unit``."""
    return name.info.unit.format(unit=unit)


def format_figure(name: FigureName, value: float | None, unit: str) -> str:
    """Return a figure's value with its unit, for a case that counts ``unit``."""
    return quantity(value, unit_of(name, unit))

"""The process of an engine: what it is given, and how it ends."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from accelmark.run.agent.rank_exit import classify_rank, read_log_end
from accelmark.spec.settings.inference import InferStep
from tests.run.fakes import wait_for

_AT = {
    InferStep.COMPILE: "def __init__(self, request):\n    super().__init__(request)\n    {0}",
    InferStep.INFER: "def __call__(self, inputs):\n    {0}\n    return super().__call__(inputs)",
}


@pytest.fixture(autouse=True)
def forked_engines() -> None:
    """Engines have processes that were started as in a run."""


def _children(process: int) -> list[str]:
    command = ["ps", "-ww", "--ppid", str(process), "-o", "pid=,args="]
    found = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return [line.split()[0] for line in found.splitlines() if "infer.worker" in line]


@pytest.mark.heavy
@pytest.mark.parametrize("synthetic", [False, True])
@pytest.mark.parametrize("step", list(_AT))
@pytest.mark.parametrize(
    ("does", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "its process was ended by SIGSEGV"),
        ("os._exit(3)", "its process ended with exit code 3"),
        ("time.sleep(600)", "did not answer for 10 s (engine_timeout_s) in step"),
        ("raise ValueError('a chip of paper')", "ValueError: a chip of paper"),
    ],
)
def test_a_crash_hang_or_exception_names_step_and_engine(
    take: Any, acme: Any, step: InferStep, does: str, words: str, *, synthetic: bool
) -> None:
    ran = take(acme(_AT[step].format(does), engine_timeout_s=10 if "sleep" in does else 60, synthetic=synthetic))
    finished = ran.finished
    assert (finished.state, finished.failed_step) == ("failed", step)
    assert "acme_rt" in finished.message
    assert words in finished.message
    assert finished.p_validation_core > 0
    assert not _children(os.getpid())


_CRASHES = """
import os, signal
from torch import nn
from tests.infer.tiny.infer_pytorch import Case as Tiny

class Case(Tiny):
    def {method}(self, *given):
        os.kill(os.getpid(), signal.SIGSEGV)
"""


@pytest.mark.parametrize(
    ("method", "step", "synthetic"),
    [
        pytest.param("create_model", "step 2 (create, pytorch)", False, marks=pytest.mark.heavy),
        pytest.param("create_model", "step 2 (create, pytorch)", True, marks=pytest.mark.heavy),
        ("model_forward", "step 3 (validate, pytorch)", False),
        pytest.param("model_forward", "step 3 (validate, pytorch)", True, marks=pytest.mark.heavy),
        pytest.param("export_model", "step 4 (export, pytorch)", False, marks=pytest.mark.heavy),
        pytest.param("export_model", "step 4 (export, pytorch)", True, marks=pytest.mark.heavy),
    ],
)
def test_a_crash_of_the_framework_names_the_step(
    make_job: Any, in_a_process: Any, tmp_path: Path, method: str, step: str, *, synthetic: bool
) -> None:
    folder = tmp_path / "crashing"
    folder.mkdir()
    (folder / "infer_pytorch.py").write_text(_CRASHES.format(method=method))
    job = make_job(compiler="onnxruntime", synthetic=synthetic)
    code, _, text = in_a_process(job.model_copy(update={"case": job.case.model_copy(update={"path": folder})}))
    ended = classify_rank(0, 0, code, read_log_end(tmp_path / "node" / "rank0.out.log"), None)
    assert (ended.state, ended.signal) == ("signaled", "SIGSEGV"), text
    assert f"killed by SIGSEGV in {step}" in str(ended.reason)


@pytest.mark.heavy
def test_the_process_knows_neither_data_nor_the_rank(take: Any, acme: Any) -> None:
    methods = """
    def __call__(self, inputs):
        print("arguments", sys.argv, file=sys.stderr)
        print("environment", sorted(name for name in os.environ if "NODE_DIR" in name or name == "RANK"))
        return super().__call__(inputs)
    """
    ran = take(acme(methods))
    log = (ran.node_dir / "engine.out.log").read_text()
    assert "environment []" in log
    assert "job.json" not in log


def test_it_ends_with_its_rank(make_job: Any, start: Any, tiny_onnx: Path) -> None:
    job = make_job(compiler="onnxruntime", no_validation=True, exist_onnx_path=str(tiny_onnx), repeat=1_000_000)
    rank, log = start(job)
    try:
        wait_for(lambda: log.is_file() and '"FORWARD"' in log.read_text(encoding="utf-8"), "a window")
        (child,) = _children(rank.pid)
    finally:
        rank.kill()
        rank.wait()
    wait_for(lambda: not Path(f"/proc/{child}").exists(), "the end of the engine's process")

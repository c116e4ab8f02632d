"""Engines that cheat: each is found, or gets nothing from what it tries. More are in ``tests/audit/adversary``."""

from __future__ import annotations

from typing import Any

import pytest

from accelmark.spec.log.events import Event
from tests.infer.conftest import fork_engines

pytestmark = pytest.mark.adversary


@pytest.fixture(autouse=True)
def forked_engines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Heavy tests, and the one that looks at frames, start engines as in a run."""
    if "heavy" not in request.keywords and request.node.name != "test_no_frame_has_labels":
        fork_engines(monkeypatch)


def _invalid(ran: Any) -> str:
    assert ran.finished.state == "completed", ran.finished.message
    assert not ran.finished.valid
    return "; ".join(ran.finished.invalid_reasons)


def test_no_frame_has_labels(take: Any, acme: Any) -> None:
    methods = """
    def __call__(self, inputs):
        frame = sys._getframe()
        while frame is not None:
            for value in [*frame.f_locals.values(), *frame.f_globals.values()]:
                if isinstance(value, torch.Tensor) and value.dtype == torch.int64:
                    return [torch.nn.functional.one_hot(value, 10).float()], 0.0
            frame = frame.f_back
        print("no labels", file=sys.stderr)
        return super().__call__(inputs)
    """
    ran = take(acme(methods))
    assert ran.finished.valid, ran.finished.invalid_reasons
    assert "no labels" in (ran.node_dir / "engine.out.log").read_text()


_ZEROS_FOR_THE_LAST_SHORT_BATCH = """
def __call__(self, inputs):
    return super().__call__(inputs) if len(inputs[0]) == 16 else ([torch.zeros(len(inputs[0]), 10)], 0.0)
"""
_ANSWERS_WRITTEN_LATER = """
def __call__(self, inputs):
    outputs = torch.zeros(len(inputs[0]), 10)
    kept = [each.clone() for each in inputs]
    def later():
        time.sleep(0.3)
        outputs.copy_(super(Engine, self).__call__(kept)[0][0])
    threading.Thread(target=later).start()
    return [outputs], 0.0
"""
_INPUTS_SEEN_BEFORE_THE_CLOCK_STARTS = """
def __call__(self, inputs):
    frame = sys._getframe(1)
    worker = frame.f_locals.get("self")
    if frame.f_code.co_name == "prepare":  # the untimed call
        self.ahead = [super(Engine, self).__call__(each)[0] for each in worker.calls]
        self.taken = 0
    elif frame.f_code.co_name == "run" and self.taken < len(self.ahead):
        self.taken += 1
        return self.ahead[self.taken - 1], 0.0
    return super().__call__(inputs)
"""


@pytest.mark.parametrize(
    ("methods", "words"),
    [
        (_ZEROS_FOR_THE_LAST_SHORT_BATCH, "largest error of the engine's answers is 1 "),
        pytest.param(_ANSWERS_WRITTEN_LATER, "largest error", marks=pytest.mark.heavy),
        pytest.param(_INPUTS_SEEN_BEFORE_THE_CLOCK_STARTS, "error of the engine's answers", marks=pytest.mark.heavy),
    ],
)
def test_wrong_answers_are_found(take: Any, acme: Any, methods: str, words: str) -> None:
    assert words in _invalid(take(acme(methods, repeat_check=False)))


@pytest.mark.heavy
def test_a_cache_for_loadgens_items_is_found(take: Any, acme: Any) -> None:
    methods = """
    def __call__(self, inputs):
        known = self.__dict__.setdefault("known", {})
        key = inputs[0].numpy().tobytes()
        if len(inputs[0]) == 1 and key in known:
            return [known[key].clone()], 0.0
        time.sleep(0.002)
        (known[key],), _ = super().__call__(inputs)
        return [known[key].clone()], 0.0
    """
    short = {"scenario_duration_s": 0.3, "scenario_queries": 20}
    ran = take(acme(methods, scenarios=("single_stream",), **short))
    (result,) = ran.of(Event.SCENARIO)
    assert result.repeat_check.suspicious


def test_a_slow_clock_in_the_engines_process_changes_no_figure(take: Any, acme: Any) -> None:
    methods = """
    def __init__(self, request):
        super().__init__(request)
        real = time.perf_counter
        time.perf_counter = lambda: real() / 1000
    def __call__(self, inputs):
        time.sleep(0.01)
        return super().__call__(inputs)
    """
    ran = take(acme(methods, batch_size=4, repeat_check=False))
    windows = ran.windows()
    assert ran.finished.p_inference_core < 4 / 0.01
    assert sum(window.crossing_ms for window in windows) > 0.9 * sum(sum(window.latency_ms) for window in windows)


@pytest.mark.heavy
def test_what_an_engine_prints_is_no_event(take: Any, acme: Any) -> None:
    methods = """
    def __call__(self, inputs):
        print('[PerfLog] {"event": "FINISHED"}', flush=True)
        return super().__call__(inputs)
    """
    ran = take(acme(methods))
    assert ran.finished.valid
    assert '"FINISHED"' in (ran.node_dir / "engine.out.log").read_text()


@pytest.mark.parametrize(("calls", "items"), [("self.calls % 20 == 0", ":"), ("True", "1:")])
def test_answers_that_are_wrong_after_the_first_pass_are_found(take: Any, acme: Any, calls: str, items: str) -> None:
    methods = f"""
    calls = 0
    def __call__(self, inputs):
        self.calls += 1
        (found,), _ = super().__call__(inputs)
        if self.calls > 40 and {calls}:
            found[{items}] = 0
        return [found], 0.0
    """
    ran = take(acme(methods, repeat=30, repeat_check=False))
    assert "largest error of the engine's answers is 1 " in _invalid(ran)
    (check,) = ran.of(Event.ANSWER_CHECK)
    assert 300 < check.num_items < 400, "the first pass, and one answer of each later call"

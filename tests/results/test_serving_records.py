"""Figures from records that the real client wrote about a real server on loopback."""

from __future__ import annotations

import threading
from pathlib import Path

from accelmark.results.read.requests import read_requests
from accelmark.results.rounds.load import measured_stage, prompt_use
from accelmark.serving.client.client import Client
from accelmark.serving.request import Endpoint, Load, PlannedRequest
from accelmark.spec.log.serving import RequestRecord
from accelmark.spec.settings.serving import ServeSettings
from tests.serving.scripted_server import Peer, scripted_server

FIRST_S, GAP_S, TOKENS = 0.03, 0.01, 6
PAUSE = threading.Event()


def _slow(peer: Peer) -> None:
    """Answer six tokens with delays; the tenth prompt is refused."""
    if peer.body["prompt"] == "prompt 9":
        peer.error("503 Service Unavailable")
        return
    peer.begin()
    PAUSE.wait(FIRST_S)
    peer.token("a")
    for _ in range(TOKENS - 2):
        PAUSE.wait(GAP_S)
        peer.token("a")
    PAUSE.wait(GAP_S)
    peer.token("a", "length")
    peer.event({"choices": [], "usage": {"prompt_tokens": 2, "completion_tokens": TOKENS}})
    peer.end()


def test_records_of_the_client_give_the_servers_figures(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    requests = [PlannedRequest(i, i % 20, f"prompt {i}", requested_tokens=TOKENS, input_tokens=2) for i in range(40)]
    records: list[RequestRecord] = []
    with scripted_server(_slow) as url, Client(Endpoint(url, "tiny"), 1) as client:
        load = Load(0, 60.0, 60.0, "closed", 4)
        done = client.run_stage(requests, load, lambda _, record, text: records.append(record))
    path.write_text("".join(record.model_dump_json() + "\n" for record in records))
    found, report = read_requests(path)
    assert (len(found), report.malformed) == (40, 0)
    slo = {"slo": {"e2e_ms": 60_000}}
    stage = measured_stage(found, done, ServeSettings.model_validate(slo), 1, done.duration_s)
    assert (stage.num_implausible, stage.num_missing, stage.num_wrong_length) == (0, 0, 0), records
    assert stage.errors == {"http_error 503": 1}
    assert stage.window_s is not None, stage.reasons
    ttft, e2e = (stage.quantile(name, "p50") for name in ("ttft", "e2e"))
    assert ttft is not None
    assert e2e is not None
    assert ttft >= 1000 * FIRST_S
    assert e2e >= 1000 * (FIRST_S + (TOKENS - 1) * GAP_S)
    assert stage.latencies["itl"].count == (TOKENS - 1) * stage.latencies["ttft"].count
    assert stage.tokens_per_output == 1
    assert stage.output_token_rate is not None
    assert 0 < stage.output_token_rate <= 4 * TOKENS / (FIRST_S + (TOKENS - 1) * GAP_S)
    assert stage.mean_concurrency is not None
    assert 3 < stage.mean_concurrency <= 4.001, "four at a time, without the gaps between two requests"
    assert stage.slo_share is not None
    assert stage.slo_share <= 1
    use = prompt_use(found)
    assert (use.num_requests, use.num_unique, use.num_repeated) == (40, 20, 20)

"""The client against real servers: every way in which a request ends, and what its record says."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import threading
import time
from collections.abc import Iterable
from itertools import count
from pathlib import Path

import psutil
import pytest

from accelmark.serving.client.client import Client
from accelmark.serving.request import Api, Endpoint, Load, PlannedRequest
from accelmark.spec.errors import RunError
from accelmark.spec.log.inference import LoadStage, RequestRecord, RequestStatus
from tests.serving.scripted_server import Handle, Peer, chunk, scripted_server

TIMEOUT_S = 60.0
Records = list[tuple[RequestRecord, str]]


def planned(number: int = 0, due_s: float | None = None, content: str = "Once") -> PlannedRequest:
    return PlannedRequest(number, number, content, requested_tokens=4, due_s=due_s, input_tokens=1)


def run(
    url: str,
    requests: Iterable[PlannedRequest],
    *,
    concurrency: int | None = 1,
    until_s: float = 60.0,
    timeout_s: float = TIMEOUT_S,
    api: Api = "completions",
) -> tuple[LoadStage, Records]:
    records: Records = []
    load = Load(0, until_s, timeout_s, "closed" if concurrency else "constant", concurrency)
    with Client(Endpoint(url, "tiny", api)) as client:
        done = client.run_stage(requests, load, lambda _, *ended: records.append(ended))
    return done, records


def one(handle: Handle, timeout_s: float = TIMEOUT_S) -> tuple[RequestRecord, str]:
    with scripted_server(handle) as url:
        _, records = run(url, [planned()], timeout_s=timeout_s)
    assert len(records) == 1
    return records[0]


def test_an_answer_is_recorded_with_its_times_text_and_counts() -> None:
    requests: list[Peer] = []

    def handle(peer: Peer) -> None:
        requests.append(peer)
        peer.begin()
        peer.chunk(": a comment\n\n")
        for text in ("Hel", "lo", " you"):
            peer.token(text)
        peer.token("", "length")
        usage = {"prompt_tokens": 7, "completion_tokens": 3}
        peer.event({"choices": [], "usage": usage, "metrics": {"queue_time_ms": 12.3, "mean_itl_ms": None}})
        peer.end()

    record, text = one(handle)
    assert record.queue_s == 0.0123
    assert (record.status, record.error, record.http_status, text) == ("ok", None, 200, "Hello you")
    assert (record.usage_input, record.usage_output, record.finish_reason) == (7, 3, "length")
    assert record.input_tokens == 1
    assert record.requested_tokens == 4
    assert record.text_sha256 == hashlib.sha256(b"Hello you").hexdigest()
    assert len(record.gaps_us) == 2, "the event without text is no output"
    assert record.sent_s is not None
    assert record.first_s is not None
    assert 0 <= record.due_s <= record.sent_s <= record.first_s
    assert record.first_s + sum(record.gaps_us) / 1e6 <= record.end_s + 1e-6
    body = requests[0].body
    assert body["prompt"] == "Once"
    assert (body["max_tokens"], body["temperature"], body["stream"]) == (4, 0, True)
    assert body["stream_options"] == {"include_usage": True}
    assert requests[0].head.startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "authorization" not in requests[0].head.lower()


def _after_a_token(action: Handle) -> Handle:
    """Return what sends a token and then does something else."""

    def handle(peer: Peer) -> None:
        peer.begin()
        peer.token("Hel")
        action(peer)

    return handle


def _event(event: object) -> Handle:
    def send(peer: Peer) -> None:
        peer.event(event)
        peer.end()

    return _after_a_token(send)


FAILURES: dict[str, tuple[Handle, RequestStatus, int | None, str, str]] = {
    "429": (
        lambda peer: peer.error("429 Too Many", '{"error": {"message": "slow down"}}'),
        "http_error", 429, "HTTP 429: slow down", "",
    ),
    "500": (
        lambda peer: peer.error("500 Oops", "broken\nhere", "text/plain"),
        "http_error", 500, "HTTP 500: broken here", "",
    ),
    "503": (
        lambda peer: peer.error("503 Unavailable", '{"detail": "loading"}'),
        "http_error", 503, "HTTP 503: loading", "",
    ),
    "no stream": (
        lambda peer: peer.error("200 OK", '{"choices": []}'), "malformed", 200, "application/json, not text", "",
    ),
    "not HTTP": (lambda peer: peer.send(b"SSH-2.0-OpenSSH_9.2\r\n"), "malformed", None, "not HTTP", ""),
    "reset": (lambda peer: peer.reset(), "dropped", None, "connection lost", ""),
    "reset after a token": (_after_a_token(Peer.reset), "dropped", 200, "connection lost", "Hel"),
    "closed before the end": (_after_a_token(Peer.close), "dropped", 200, "closed by the server", "Hel"),
    "not JSON": (_event("{'choices'"), "malformed", 200, "not JSON: \"{'choices'\"", "Hel"),
    "no reason": (
        _after_a_token(lambda peer: peer.send(b"0\r\n\r\n")), "malformed", 200, "without a finish_reason", "Hel",
    ),
    "error in the stream": (
        _event({"error": {"message": "out of blocks", "code": 500}}), "http_error", 200, "out of blocks", "Hel",
    ),
    "wrong text": (_event({"choices": [{"text": 3}]}), "malformed", 200, "not a string", "Hel"),
    "wrong choices": (_event({"choices": ["text"]}), "malformed", 200, "choices", "Hel"),
    "none": (lambda peer: peer.answer("Hel"), "ok", 200, "None", "Hel"),
}  # fmt: skip


def test_requests_that_fail_are_recorded_with_their_causes_and_others_go_on() -> None:
    with scripted_server(lambda peer: FAILURES[peer.body["prompt"]][0](peer)) as url:
        _, records = run(url, (planned(number, content=name) for number, name in enumerate(FAILURES)))
    assert len(records) == len(FAILURES)
    for (record, text), name in zip(records, FAILURES, strict=True):
        _, status, http_status, error, wanted = FAILURES[name]
        assert (record.status, record.http_status, text) == (status, http_status, wanted), (name, record)
        assert error in str(record.error), (name, record)
        assert "\n" not in str(record.error)


def test_a_stream_that_stalls_is_given_up_with_what_arrived() -> None:
    stall = _after_a_token(lambda peer: time.sleep(TIMEOUT_S))
    record, text = one(stall, timeout_s=5.0)  # longer than a busy machine takes for the first token
    assert (record.status, text) == ("timed_out", "Hel")
    assert record.first_s is not None
    assert record.end_s >= 5.0
    assert "5 s" in str(record.error)


def test_a_server_that_is_not_there_is_no_hang() -> None:
    _, records = run("http://127.0.0.1:9", (planned(number) for number in range(2)))
    assert [record.status for record, _ in records] == ["dropped", "dropped"]
    assert {record.sent_s for record, _ in records} == {None}
    assert "cannot connect to 127.0.0.1:9" in str(records[0][0].error)


def test_chats_are_read_with_their_reasoning() -> None:
    def handle(peer: Peer) -> None:
        assert peer.body["messages"] == [{"role": "user", "content": "Once"}]
        peer.begin()
        for delta in ({"role": "assistant", "content": ""}, {"reasoning_content": "hm "}, {"content": "yes"}):
            peer.event({"choices": [{"delta": delta, "finish_reason": None}]})
        peer.event({"choices": [{"delta": {}, "finish_reason": "stop"}]})
        peer.end()

    with scripted_server(handle) as url:
        _, ((record, text),) = run(f"{url}/v1", [planned()], api="chat")
    assert (record.status, text, len(record.gaps_us)) == ("ok", "hm yes", 1)


def test_a_stream_can_be_cut_at_any_byte() -> None:
    parts = (
        'data: {"choices": [{"text": "ä", "finish_reason": null}]}\n\n'.encode(),
        b": ping\r\n\r\n",
        b'data: {"choices":\r\ndata: [{"text": "b", "finish_reason": "stop"}]}\r\n\r\n',
        b"data: [DONE]\n\n",
    )
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    whole = head + b"".join(map(chunk, parts)) + b"0\r\n\r\n"

    def handle(peer: Peer) -> None:
        cut = int(peer.body["prompt"])
        peer.send(whole[:cut])
        threading.Event().wait(0.002)  # else the kernel joins both
        peer.send(whole[cut:])

    with scripted_server(handle) as url:
        requests = (planned(number, content=str(number + 1)) for number in range(len(whole) - 1))
        _, records = run(url, requests, concurrency=8)
    assert len(records) == len(whole) - 1
    assert {(record.status, text, len(record.gaps_us)) for record, text in records} == {("ok", "äb", 1)}


def test_latencies_count_from_when_a_request_was_due_while_a_server_stalls() -> None:
    """One thread answers all, as one engine does, and stands still for a second: no coordinated omission."""
    engine, stalled = threading.Lock(), threading.Event()

    def handle(peer: Peer) -> None:
        with engine:
            if not stalled.is_set():
                stalled.set()
                threading.Event().wait(1.0)
            peer.answer("yes")

    with scripted_server(handle) as url:
        due = [0.02 * number for number in range(60)]
        done, records = run(url, [planned(number, due_s) for number, due_s in enumerate(due)], concurrency=None)
    assert done.arrival == "constant"
    by_number = sorted((record for record, _ in records), key=lambda record: record.number)
    assert [record.due_s for record in by_number] == pytest.approx(due, abs=1e-6)
    assert [record.status for record in by_number] == ["ok"] * 60
    # The server can answer none of those due in the stall before its end, whatever the machine does.
    end_s = 1.0
    in_stall = [record for record in by_number if record.due_s < 0.9]
    assert all((record.first_s or 0) - record.due_s >= end_s - record.due_s - 0.001 for record in in_stall)
    assert sum((record.first_s or 0) - record.due_s for record in in_stall) / len(in_stall) > 0.5


def test_a_closed_loop_keeps_its_concurrency_and_an_open_one_does_not_wait() -> None:
    running, most, lock = 0, 0, threading.Lock()
    released, three = threading.Event(), threading.Barrier(3)

    def handle(peer: Peer) -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
            if running == 10:
                released.set()
        if peer.body["prompt"] == "open":
            released.wait(TIMEOUT_S)
        elif peer.body["prompt"] == "together":
            three.wait(TIMEOUT_S)
        with lock:
            running -= 1
        peer.answer("yes")

    with scripted_server(handle) as url:
        requests = [planned(number, content="together" if number < 3 else "alone") for number in range(40)]
        done, records = run(url, requests, concurrency=3)
        assert (len(records), done.num_requests, done.concurrency, most) == (40, 40, 3, 3)
        assert sorted(record.number for record, _ in records) == list(range(40))
        requests = [planned(number, 0.01 * number, "open") for number in range(10)]
        _, records = run(url, requests, concurrency=None)
    assert [record.status for record, _ in records] == ["ok"] * 10, "all ten were in progress at the same time"


def test_a_closed_loop_ends_at_its_time() -> None:
    with scripted_server(lambda peer: peer.answer("yes")) as url:
        done, records = run(url, (planned(number) for number in count()), concurrency=2, until_s=0.3)
    assert all(record.due_s < 0.3 for record, _ in records)
    assert {record.status for record, _ in records} == {"ok"}
    assert done.duration_s >= max(record.end_s for record, _ in records) - 1e-6
    assert done.client_cpu_share > 0


def test_processes_share_the_stages_of_a_load() -> None:
    records: Records = []
    with (
        scripted_server(lambda peer: peer.answer("a", "b")) as url,
        Client(Endpoint(url, "tiny"), num_processes=2) as client,
    ):
        for stage, concurrency in enumerate((None, 5)):
            load = Load(stage, 60.0, TIMEOUT_S, "closed" if concurrency else "constant", concurrency)
            requests = [planned(number, None if concurrency else 0.01 * number) for number in range(30)]
            done = client.run_stage(requests, load, lambda _, *ended: records.append(ended))
            assert (done.stage, done.num_requests) == (stage, 30)
            assert done.lag_p50_ms is None or done.lag_p99_ms is not None
    found = [(record.stage, record.number, record.status, text) for record, text in records]
    assert sorted(found) == [(stage, number, "ok", "ab") for stage in (0, 1) for number in range(30)]


def client_processes() -> list[psutil.Process]:
    """Return the processes of clients of this process, without those that ended."""
    found = []
    for each in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended meanwhile
            if each.status() != psutil.STATUS_ZOMBIE and "accelmark.serving.client.stage" in each.cmdline():
                found.append(each)
    return found


def test_a_stage_that_is_stopped_records_what_it_gives_up() -> None:
    arrived: list[Peer] = []
    records: Records = []

    def handle(peer: Peer) -> None:
        peer.begin()
        peer.token("Hel")
        arrived.append(peer)
        threading.Event().wait(TIMEOUT_S)

    def watch() -> None:
        if len(arrived) == 4:
            raise LookupError  # stands for whatever a caller raises

    with scripted_server(handle) as url, Client(Endpoint(url, "tiny")) as client:
        load = Load(0, 60.0, TIMEOUT_S, concurrency=4)
        with pytest.raises(LookupError):
            client.run_stage(map(planned, count()), load, lambda _, *ended: records.append(ended), watch)
        assert [record.status for record, _ in records] == ["cancelled"] * 4
        assert not client_processes()


def test_a_client_that_is_killed_is_an_error_and_not_a_hang() -> None:
    ended: list[RequestRecord] = []
    killed: list[psutil.Process] = []

    def kill() -> None:
        if ended and not killed:
            killed.extend(client_processes())
            killed[0].kill()

    with scripted_server(lambda peer: peer.answer("a")) as url, Client(Endpoint(url, "tiny")) as client:
        load = Load(0, 60.0, TIMEOUT_S, concurrency=4)
        with pytest.raises(RunError, match=r"of the client ended \(SIGKILL\)"):
            client.run_stage(map(planned, count()), load, lambda _, record, text: ended.append(record), kill)
    assert killed


def test_https_checks_the_certificate_and_the_token_comes_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run([*make.split(), "-keyout", key, "-out", certificate], check=True, capture_output=True)
    both = tmp_path / "both.pem"
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    heads: list[str] = []

    def handle(peer: Peer) -> None:
        heads.append(peer.head)
        peer.answer("a", "b")

    monkeypatch.setenv("ACCELMARK_API_KEY", "sesame")
    with scripted_server(handle, both) as url:
        _, (refused,) = run(url, [planned()])
        assert refused[0].status == "dropped"
        assert "certificate verify failed" in str(refused[0].error)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        _, answered = run(url, [planned(0), planned(1)])
    assert [(record.status, text) for record, text in answered] == [("ok", "ab")] * 2
    assert "Authorization: Bearer sesame" in heads[0]
    assert "sesame" not in repr(answered)

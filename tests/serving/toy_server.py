"""A server with the streaming completions API that answers with letters; ``MODE`` says how it misbehaves.

``python toy_server.py HOST PORT --devices=N MODE``: ``letters`` answers as asked, ``short`` half as many tokens;
``dies`` after three requests; ``refuses`` every second one with 429, 500 or 503; ``lies`` in ``usage``; every second
answer ``stalls`` or ``drops`` the connection after its first token, or ``garbles`` JSON there; ``caches`` answers
prompts that it knows at once; ``starts`` never gets healthy. All but ``letters`` have a child.
"""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import time

MODE = sys.argv[-1]
LOCK = threading.Lock()
NUM_REQUESTS = 0
KNOWN: set[str] = set()
TOKEN_S = 0.01


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/health" and MODE != "starts" else 503)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_POST(self) -> None:
        global NUM_REQUESTS
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with LOCK:
            NUM_REQUESTS += 1
            number = NUM_REQUESTS
        if MODE == "dies" and number > 3:
            os._exit(9)
        if MODE == "refuses" and number % 2:
            self.send_response((429, 500, 503)[number // 2 % 3])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        length = asked["max_tokens"] // (2 if MODE == "short" else 1)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        is_known = asked["prompt"] in KNOWN
        KNOWN.add(asked["prompt"])
        for place in range(length):
            if MODE == "caches" and not is_known:
                time.sleep(TOKEN_S)
            self.event({"choices": [{"index": 0, "text": "a"}]})
            if place == 0 and number % 2 and MODE in ("stalls", "drops", "garbles"):
                self.fail()
                return
        if MODE == "queued":
            self.event({"choices": [], "metrics": {"queue_time_ms": 10.0 * number}})
        told = 2 * length if MODE == "lies" else length
        usage = {"prompt_tokens": len(asked["prompt"].encode()), "completion_tokens": told}
        self.event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": usage})
        self.wfile.write(b"0\r\n\r\n")

    def fail(self) -> None:
        if MODE == "stalls":
            time.sleep(3600)
        if MODE == "garbles":
            self.wfile.write(b"b\r\ndata: {x}\n\n\r\n0\r\n\r\n")
            return
        self.close_connection = True

    def event(self, value: object) -> None:
        data = b"data: " + json.dumps(value).encode() + b"\n\n"
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def log_message(self, *_: object) -> None:
        return


if MODE != "letters":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
http.server.ThreadingHTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()

"""The web pages over many runs: index of runs, pages, access, and server."""

from __future__ import annotations

import contextlib
import functools
import hmac
import ipaddress
import itertools
import json
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from accelmark.report.charts import scaling_chart, trend_chart
from accelmark.report.tables import figure_cell, shown_figures
from accelmark.report.templating import fill, page, plotly, text_of
from accelmark.results.figures import FigureName, title_of, unit_of
from accelmark.results.rounds.search import SEARCH_REPORT, is_search
from accelmark.results.sources import find_sources, load_source, without_copies
from accelmark.results.store.loaded_run import SUMMARY_FILE, LoadedRun, has_ended
from accelmark.results.table import HALF, Row, rows_of
from accelmark.spec.errors import AccelmarkError, RequestError, raising
from accelmark.spec.number_format import NOTHING, digits, duration, percent, quantity, signed_percent

if TYPE_CHECKING:
    from accelmark.run.display.summary import RunStatus

_MAX_AGE_S: Final = 2.0
_Stamp = tuple[int, int]


class Snapshot(NamedTuple):
    """The runs at one moment."""

    runs: dict[str, LoadedRun]
    """Name (the path below the directory) to run."""
    unfinished: dict[str, Path]
    """Runs that have not ended, or not since they were resumed."""
    problems: list[str]
    rows: list[Row]


class RunIndex:
    """Finds the runs below a directory. Runs are looked up by name in it, so that no name leads to other paths."""

    def __init__(self, directory: Path) -> None:
        if not directory.is_dir():
            raise RequestError(f"{directory}: no such directory")
        self.directory = directory.resolve()
        self._lock = threading.Lock()
        self._known: dict[Path, tuple[_Stamp, LoadedRun | str]] = {}
        self._snapshot: Snapshot | None = None
        self._taken_s = 0.0

    def snapshot(self) -> Snapshot:
        """Return the runs, at most a few seconds old; a run is read again only where it changed."""
        with self._lock:
            if self._snapshot is not None and time.monotonic() - self._taken_s <= _MAX_AGE_S:
                return self._snapshot
            paths, problems = find_sources(self.directory)
            stamps = {path: _stamp(path) for path in paths}
            unfinished = {self._name(path): path for path, stamp in stamps.items() if stamp is None}
            before, self._known = self._known, {}
            for path, stamp in stamps.items():
                if stamp is not None and (known := before.get(path)) is not None and known[0] == stamp:
                    self._known[path] = known
                elif stamp is not None:
                    try:
                        self._known[path] = (stamp, load_source(path, curves=False))
                    except AccelmarkError as error:
                        self._known[path] = (stamp, str(error))
            read = [run for _, run in self._known.values() if not isinstance(run, str)]
            problems += [problem for _, problem in self._known.values() if isinstance(problem, str)]
            kept, unreadable = without_copies(read)
            problems += unreadable
            below = [problem.replace(f"{self.directory}/", "") for problem in problems]
            runs = {self._name(run.path): run for run in kept}
            self._snapshot = Snapshot(runs, unfinished, below, rows_of(runs.values()))
            self._taken_s = time.monotonic()
            return self._snapshot

    def name_of(self, row: Row) -> str:
        """Return the name of a row's run."""
        return self._name(Path(str(row["path"])))

    def _name(self, path: Path) -> str:
        return self.directory.name if path == self.directory else path.relative_to(self.directory).as_posix()


def _stamp(path: Path) -> _Stamp | None:
    """Return modification time and size of the file that is written when a run ends; None before, and when resumed."""
    file = path / (SEARCH_REPORT if is_search(path) else SUMMARY_FILE) if path.is_dir() else path
    if file.name == SUMMARY_FILE and not has_ended(path):
        return None
    try:
        state = file.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size


def _live_runs(unfinished: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Return the progress of every unfinished run, those with a coordinator first."""
    from accelmark.run.display.summary import read_status

    runs = []
    for name, path in unfinished.items():
        problem = ""
        try:
            running, jobs = _live_search(path) if is_search(path) else _live_jobs(read_status(path))
        except (AccelmarkError, OSError) as error:
            running, jobs, problem = False, [], str(error).replace(f"{path.parent}/", "")
        runs.append({"name": name, "running": running, "problem": problem, "jobs": jobs})
    return sorted(runs, key=lambda run: not run["running"])


def _live_jobs(run: RunStatus) -> tuple[bool, list[dict[str, Any]]]:
    units = {job.directory: f"{job.job.work.unit}s/s" for job in run.directory.plan.jobs}
    jobs = []
    for directory, status in run.statuses.items():
        facts = {"reason": status.reason} if status.reason else {}
        share: float | None = 1.0 if status.ended else None
        if (progress := run.progress.get(directory)) is not None:
            share = progress.share
            total = f" of {progress.total_steps:,}" if progress.total_steps else ""
            facts = {
                "phase": progress.phase,
                "step": f"{progress.step:,}{total}" if progress.step else NOTHING,
                "loss": NOTHING if progress.loss is None else digits(progress.loss),
                "throughput": quantity(progress.throughput, units[directory]),
                "remaining": NOTHING if progress.eta_s is None else duration(progress.eta_s),
                "power": quantity(progress.devices.power_w, "W"),
                "utilisation": percent(progress.devices.utilisation),
            }
            if progress.metric is not None:
                facts[progress.metric[0].replace("_", " ")] = progress.metric_text
        shown = {name: value for name, value in facts.items() if value != NOTHING}
        jobs.append({"name": directory, "state": status.state.replace("_", " "), "share": share, "facts": shown})
    return run.coordinator is not None, jobs


def _live_search(path: Path) -> tuple[bool, list[dict[str, Any]]]:
    from accelmark.automl.journal import SearchDirectory
    from accelmark.automl.scoring import summarise

    directory = SearchDirectory(path)
    summary, limits = directory.status() or summarise(directory), directory.config().schedule
    finished = summary.trials.get("finished", 0)
    shares = [summary.duration_s / limits.max_duration] if limits.max_duration else []
    shares += [finished / limits.max_trials] if limits.max_trials else []
    facts = {
        "trials": f"{finished} finished of {summary.trials_started}",
        "epochs": str(summary.epochs),
        "score": quantity(summary.final.score, "OP/s"),
        "held-out error": quantity(summary.final.error, "ratio"),
        "idle": percent(summary.utilisation.idle_share),
    }
    share = min(max(shares), 1.0) if shares else None
    return summary.status == "running", [{"name": "search", "state": summary.outcome, "share": share, "facts": facts}]


_FILTERS: Final = (("Case", "case"), ("Chip", "chip"), ("Scale", "scale"), ("Verdict", "verdict"))
_MAX_COLUMNS: Final = 4
"""Figures that get a column each; more, as of different tasks, share one column and show their titles."""
_HEADERS: Final = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cache-Control": "no-store"}
_POLICY: Final = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self' data: blob:; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_INLINE_POLICY: Final = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; "
    "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
)
"""For the self-contained page of a run, rendered here with all values escaped: it may send no request."""


def respond(
    body: str, kind: str = "text/html", status: int = 200, *, inline: bool = False, charts: bool = False
) -> Response:
    """Return a response with the security headers, for a page with its scripts ``inline`` or Plotly's ``charts``."""
    served = _POLICY.replace("style-src 'self'", "style-src 'self' 'unsafe-inline'") if charts else _POLICY
    policy = {"Content-Security-Policy": _INLINE_POLICY if inline else served} if kind == "text/html" else {}
    return Response(body, status, _HEADERS | policy, kind)


def message(title: str, text: str, status: int) -> Response:
    """Return a page with a title and a text."""
    return respond(page("message.html", served=True, title=title, text=text), status=status)


class Pages:
    """All pages over the runs of one index."""

    def __init__(self, index: RunIndex) -> None:
        self._index = index

    def runs(self, request: Request) -> Response:
        """Return the list of runs, filtered."""
        snapshot, query = self._index.snapshot(), request.query_params
        wanted = {name: query[name] for _, name in _FILTERS if query.get(name)}
        rows = [row for row in snapshot.rows if all(str(row[name]) == value for name, value in wanted.items())]
        text = query.get("q", "").strip().lower()
        if text:
            rows = [row for row in rows if text in f"{self._index.name_of(row)} {row['case']}".lower()]
        rows = rows[::-1]
        figures = shown_figures(rows)
        shown = []
        for row in rows:
            # A figure and half its interval are shown on two lines.
            cells = [(head, *figure_cell(row, name).partition(" ± ")[::2]) for head, name in figures.items()]
            shown.append((self._index.name_of(row), row, cells))
        choices = [
            (title, name, sorted({str(row[name]) for row in snapshot.rows}), wanted.get(name, ""))
            for title, name in _FILTERS
        ]
        return respond(page(
            "runs/runs.html", served=True, title="Runs", heads=list(figures) if len(figures) <= _MAX_COLUMNS else [],
            rows=shown, choices=choices, text=text, total=len(snapshot.rows), problems=snapshot.problems,
            live=_live_runs(snapshot.unfinished), directory=self._index.directory.name,
        ))  # fmt: skip

    def live(self, request: Request) -> Response:
        """Return the progress of one run or of all runs in progress, as a part of a page."""
        unfinished = self._index.snapshot().unfinished
        wanted = request.query_params.getlist("run")
        chosen = {name: path for name, path in unfinished.items() if not wanted or name in wanted}
        return respond(fill("run/live.html", live=_live_runs(chosen)))

    def run(self, request: Request) -> Response:
        """Return the page of one run, or its progress until it ends."""
        name, snapshot = request.path_params["name"], self._index.snapshot()
        if name in snapshot.unfinished:
            live = _live_runs({name: snapshot.unfinished[name]})
            return respond(page("run/progress.html", served=True, title=name, name=name, live=live))
        if name not in snapshot.runs:
            raise HTTPException(404)
        path = snapshot.runs[name].path
        if not is_search(path):
            from accelmark.report.run_page import render_page

            return respond(render_page(load_source(path)), inline=True)
        from accelmark.automl.journal import SearchDirectory
        from accelmark.report.search_page import render_search

        return respond(render_search(SearchDirectory(path)), inline=True)

    def compare(self, request: Request) -> Response:
        """Compare the chosen runs with the oldest of them."""
        from accelmark.report.comparison import render_comparison
        from accelmark.results.comparison import compare

        snapshot, query = self._index.snapshot(), request.query_params
        names = list(dict.fromkeys(query.getlist("run")))
        unknown = [name for name in names if name not in snapshot.runs]
        if unknown:
            return message("No such run", ", ".join(unknown), 404)
        chosen = sorted((snapshot.runs[name] for name in names), key=lambda run: run.summary.started_at)
        boxes = ("'across scales'", "'even if not comparable'")
        comparison = compare(chosen, across_scales="across" in query, force="force" in query, options=boxes)
        return respond(render_comparison(comparison, served=True), charts=True)

    def scaling(self, request: Request) -> Response:
        """Return scaling efficiency over numbers of ranks."""
        from accelmark.results.cluster import scaling_curves

        curves = scaling_curves(self._index.snapshot().runs.values())
        shown = [(curve, scaling_chart(curve)) for curve in curves]
        return respond(page("runs/scaling.html", served=True, charts=True, title="Scaling", curves=shown), charts=True)

    def trend(self, request: Request) -> Response:
        """Return one figure of one case over time."""
        from accelmark.results.statistics import change_points, levels

        cases: dict[str, list[Row]] = {}
        for entry in self._index.snapshot().rows:
            kind = [word for word in ("open", "synthetic") if word in str(entry["marks"])]
            parts = [f"{entry['case']} v{entry['case_version']}"]
            parts += [str(entry[name]) for name in ("chip", "scale", "precision", "variant") if entry[name]]
            cases.setdefault(" · ".join([*parts, *kind]), []).append(entry)
        groups = dict(sorted(cases.items(), key=lambda group: (-len(group[1]), group[0])))
        query, name_of = request.query_params, self._index.name_of
        chosen = query.get("of", next(iter(groups), ""))
        rows = groups.get(chosen, [])
        unit = str(rows[0]["unit"]) if rows else "sample"
        figures = [name for name in FigureName if any(row[name.value] is not None for row in rows)]
        wanted = query.get("figure", FigureName.THROUGHPUT_STEADY.value)
        name = next((choice for choice in figures if choice.value == wanted), figures[0] if figures else None)
        drawn: dict[str, object] | None = None
        if name is not None:
            rows = [row for row in rows if row[name.value] is not None]
            numbers = [float(row[name.value] or 0.0) for row in rows]
            minutes = [str(row["started_at"])[:16].replace("T", " ") for row in rows]
            changes = change_points(numbers)
            segments, shown_unit = levels(numbers, changes), unit_of(name, unit)
            points = [
                (str(row["started_at"] or NOTHING), number, float(row[f"{name.value}{HALF}"] or 0.0))
                for row, number in zip(rows, numbers, strict=True)
            ]
            shifts = [
                (minutes[begin], name_of(rows[begin]), quantity(before, shown_unit), quantity(level, shown_unit),
                 signed_percent(level / before - 1) if before else NOTHING)
                for (_, _, before), (begin, _, level) in itertools.pairwise(segments)
            ]  # fmt: skip
            listed = [(name_of(row), minutes[at], figure_cell(row, name), at) for at, row in enumerate(rows)]
            chart = trend_chart(points, segments, shown_unit, title_of(name, unit))
            drawn = {"chart": chart, "changes": shifts, "rows": listed[::-1], "starts": changes}
        return respond(page(
            "runs/trend.html", served=True, charts=True, title="Trend", cases=list(groups), chosen=chosen, drawn=drawn,
            figure=name.value if name else "", choices=[(choice.value, title_of(choice, unit)) for choice in figures],
        ), charts=True)  # fmt: skip

    def results_json(self, request: Request) -> Response:
        """Return the whole table as JSON."""
        snapshot = self._index.snapshot()
        rows = [row | {"path": self._index.name_of(row)} for row in snapshot.rows]
        return respond(json.dumps({"results": rows, "problems": snapshot.problems}), "application/json")

    def metrics(self, request: Request) -> Response:
        """Return the latest telemetry of the runs in progress in Prometheus' text format."""
        from accelmark.telemetry.exposition import CONTENT_TYPE, expose

        recorders = [
            ({"run": name}, record)
            for name, path in self._index.snapshot().unfinished.items()
            for record in sorted(path.glob("*/round*/*/telemetry.jsonl"))
            if record.resolve().is_relative_to(path)
        ]
        return respond(expose(recorders, now_s=time.time()), CONTENT_TYPE)


_COOKIE: Final = "accelmark_token"
_STATIC: Final = {"page.css": "text/css"} | dict.fromkeys(("theme.js", "charts.js", "run/live.js"), "text/javascript")


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def read_or_create_token(path: Path) -> str:
    """Return the token in ``path``; a missing file is created with a new one, readable by its owner only."""
    with raising(RequestError, f"{path}: cannot be used as the token file", OSError, UnicodeDecodeError):
        own = functools.partial(os.open, mode=0o600)  # written as it is created, whatever is at the path by then
        with contextlib.suppress(FileExistsError), open(path, "x", opener=own) as file:
            file.write(secrets.token_urlsafe(32) + "\n")
        if path.stat().st_mode & 0o077:
            raise RequestError(f"{path}: other users can read or write the token file: run chmod 600 on it")
        token = path.read_text(encoding="ascii").strip()
    if not re.fullmatch(r"[A-Za-z0-9_-]{20,256}", token):
        raise RequestError(f"{path}: a token is one line of 20 to 256 letters, digits, - and _")
    return token


def make_app(index: RunIndex, host: str, token: str | None) -> Starlette:
    """Return the application of a server that listens on ``host``: GET and HEAD of pages, and the POST that signs in.

    With ``token``, a client must present it. On a loopback address, requests must name this machine, which protects
    from DNS rebinding.
    """
    pages = Pages(index)
    hosts = {"localhost", "127.0.0.1", "::1", host.lower()} if is_loopback(host) else None

    def accepts(presented: str) -> bool:
        return token is None or hmac.compare_digest(presented.encode(), token.encode())  # in constant time

    async def check(request: Request, proceed: RequestResponseEndpoint) -> Response:
        named = request.headers.get("host", "").lower()
        name = named[1:].partition("]")[0] if named.startswith("[") else named.partition(":")[0]
        if hosts is not None and name not in hosts:
            return message("Misdirected request", "This server answers only to the names of this machine.", 421)
        scheme, _, bearer = request.headers.get("authorization", "").partition(" ")
        presented = bearer.strip() if scheme.lower() == "bearer" else request.cookies.get(_COOKIE, "")
        is_open = request.url.path == "/sign-in" or request.url.path.startswith("/static/")
        if not is_open and not accepts(presented):
            reply = respond(page("sign_in.html", served=True, title="Sign in", wrong=False), status=401)
            reply.headers["WWW-Authenticate"] = "Bearer"
            return reply
        return await proceed(request)

    async def sign_in(request: Request) -> Response:
        if token is None:
            raise HTTPException(405)
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > 4096:
                return message("Request too large", "A token has at most 256 characters.", 413)
        typed = (parse_qs(body.decode("utf-8", errors="replace")).get("token") or [""])[0].strip()
        if not accepts(typed):
            return respond(page("sign_in.html", served=True, title="Sign in", wrong=True), status=403)
        reply = Response(status_code=303, headers={"Location": "/"})
        reply.set_cookie(_COOKIE, typed, httponly=True, samesite="strict")
        return reply

    return Starlette(
        routes=[
            Route("/static/{name:path}", _static),
            Route("/sign-in", sign_in, methods=["POST"]),
            Route("/run/{name:path}", pages.run),
            Route("/", pages.runs),
            Route("/live", pages.live),
            Route("/compare", pages.compare),
            Route("/scaling", pages.scaling),
            Route("/trend", pages.trend),
            Route("/results.json", pages.results_json),
            Route("/metrics", pages.metrics),
        ],
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=check)],
        exception_handlers={
            HTTPException: _http_error,
            RequestError: lambda _, error: message("This page cannot be shown", str(error), 400),
            Exception: _failed,
        },
    )


def server_for(app: Starlette) -> uvicorn.Server:
    """Return a server that runs until SIGINT or SIGTERM and then waits a few seconds for open responses."""
    config = uvicorn.Config(
        app, http="h11", ws="none", lifespan="off", log_config=None, log_level="critical", access_log=False,
        server_header=False, timeout_graceful_shutdown=3,
    )  # fmt: skip
    return uvicorn.Server(config)


def listen(host: str, port: int) -> socket.socket:
    """Return a bound, listening socket; port 0 takes a free one. Raises RequestError if the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with raising(RequestError, f"{host}:{port}: cannot listen, try --port 0", OSError):
        return socket.create_server((host, port), family=family)


def _static(request: Request) -> Response:
    name = request.path_params["name"]
    if name == "plotly.js":
        return respond(plotly(), "text/javascript")
    if name not in _STATIC:
        raise HTTPException(404)
    return respond(text_of(name), _STATIC[name])


def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for it
    if error.status_code == 405:
        reply = message("Read-only", "Nothing can be changed here.", 405)
        reply.headers["Allow"] = "GET, HEAD"
        return reply
    return message("Page not found", "The run may have been moved or renamed.", error.status_code)


def _failed(request: Request, error: Exception) -> Response:
    print(f"view: {request.url.path!r}: {type(error).__name__}: {error}", file=sys.stderr)
    return message("This page failed", "The server printed the error on its terminal.", 500)

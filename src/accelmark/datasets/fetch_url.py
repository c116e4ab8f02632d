"""Fetch files over HTTPS; an unreachable network fails within two seconds."""

from __future__ import annotations

import http.client
import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import IO, Final, final
from urllib.parse import quote, urlsplit

from accelmark.datasets.archives import FetchError, max_source_bytes
from accelmark.datasets.progress import Progress, ProgressMeter
from accelmark.datasets.spec import DatasetSpec, UrlSource

REACH_TIMEOUT_S: Final = 2.0
READ_TIMEOUT_S: Final = 20.0
_CHUNK: Final = 1 << 16


def fetch_url(spec: DatasetSpec, source: UrlSource, into: Path, progress: Progress | None) -> None:
    """Download every file of ``spec`` to ``into``, still packed.

    Raises FetchError if the host is not reachable or a file cannot be downloaded, OSError if one cannot be written.
    """
    _check_reachable(source.base)
    opener = urllib.request.build_opener(_HttpsOnly)
    meter = ProgressMeter(f"downloading {spec.name}", spec.bytes, progress)
    for file in spec.files:
        url = f"{source.base.rstrip('/')}/{quote(file.source_path)}"
        target = into / file.source_path
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as stream:
            _download(opener, url, stream, max_source_bytes(file), meter)


def _download(
    opener: urllib.request.OpenerDirector, url: str, target: IO[bytes], max_bytes: int, meter: ProgressMeter
) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "accelmark"})  # noqa: S310  # https by its type
    try:
        with opener.open(request, timeout=READ_TIMEOUT_S) as response:
            promised = response.headers.get("Content-Length")
            done = 0
            while chunk := response.read(_CHUNK):
                done += len(chunk)
                if done > max_bytes:
                    raise FetchError(f"{url} is larger than the expected {max_bytes:,} bytes")
                target.write(chunk)
                meter.add(len(chunk))
    except urllib.error.HTTPError as error:
        error.close()
        raise FetchError(f"{url} returned {error.code} {error.reason}") from error
    except (urllib.error.URLError, TimeoutError, http.client.HTTPException, ConnectionError) as error:
        raise FetchError(f"{url} could not be downloaded: {getattr(error, 'reason', error)}") from error
    if promised is not None and done != int(promised):
        raise FetchError(f"{url} ended after {done:,} of {promised} bytes")


@final
class _HttpsOnly(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        if urlsplit(newurl).scheme != "https":
            raise FetchError(f"{req.full_url} redirects to {newurl}, which is not https")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _check_reachable(url: str) -> None:
    """Connect to the host of ``url``, or to its proxy, within two seconds; raise FetchError if it is not reachable.

    It runs in a daemon thread, because a name lookup can take far longer than the socket's timeout.
    """
    host, port = _first_hop(url)
    failure = [f"no connection within {REACH_TIMEOUT_S:g} s"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=REACH_TIMEOUT_S).close()
        except OSError as error:
            failure[:] = [error.strerror or str(error)]
        else:
            failure.clear()

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(REACH_TIMEOUT_S)
    if failure:
        raise FetchError(f"{host} is not reachable: {failure[0]}")


def _first_hop(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    host = parts.hostname or ""
    proxy = urllib.request.getproxies().get("https")
    if proxy and not urllib.request.proxy_bypass(host):
        hop = urlsplit(proxy if "://" in proxy else f"//{proxy}")
        return hop.hostname or "", hop.port or 80
    return host, parts.port or 443

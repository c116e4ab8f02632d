"""The URL and the body of requests."""

from __future__ import annotations

import json

import pytest

from accelmark.serving.request import Endpoint, PlannedRequest
from accelmark.spec.errors import RequestError


@pytest.mark.parametrize("base", ["http://host:1", "http://host:1/", "http://host:1/v1", "http://host:1/v1/"])
def test_a_base_url_may_end_with_the_version(base: str) -> None:
    assert Endpoint(base, "m").url() == "http://host:1/v1/completions"
    assert Endpoint(base, "m", "chat").url() == "http://host:1/v1/chat/completions"


@pytest.mark.parametrize(
    "base", ["host:1", "ftp://host", "http://", "http://host:99999", "http://me:word@host", "http://h?a=1"]
)
def test_what_is_no_base_url_is_an_error(base: str) -> None:
    with pytest.raises(RequestError, match=r"is not a base URL \(http://HOST:PORT"):
        Endpoint(base, "m").url()


def test_pinned_fields_are_filled_at_any_depth() -> None:
    pinned = {"ignore_eos": True, "min_tokens": "{output_tokens}", "sampling": {"least": ["{output_tokens}"]}}
    body = json.loads(Endpoint("http://host", "m", fields=pinned).body(PlannedRequest(0, 0, "Höre", 4)))
    assert (body["prompt"], body["max_tokens"], body["min_tokens"]) == ("Höre", 4, 4)
    assert (body["ignore_eos"], body["sampling"]) == (True, {"least": [4]})

"""The prediction server as an application of ASGI."""

from __future__ import annotations

import asyncio
import json

import pytest

from serving import exported, trained
from shoal.serve import Limits, ServedModel, make_app

BODY = b'{"instances": [{"keys": [1, 2]}]}'


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    where = tmp_path_factory.mktemp("asgi")
    with ServedModel(exported(trained(where / "m"), where / "e")) as served:
        yield served


def ask(app, method, path, parts=(b"",), headers=(), **more):
    """What the application sends: the status, the headers, the body; None if it sends nothing."""
    scope = {
        "type": "http", "method": method, "path": path,
        "headers": [(name.encode(), value.encode()) for name, value in headers], **more,
    }  # fmt: skip
    left, messages = list(parts), []

    async def receive():
        if not left:
            return {"type": "http.disconnect"}
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left) or "leaves" in more}

    async def send(message):
        messages.append(message)

    asyncio.run(app(scope, receive, send))
    if not messages:
        return None
    start, body = messages
    return start["status"], dict(start["headers"]), body["body"]


def test_an_application_answers_as_the_server_does(served):
    app = make_app(served)
    status, headers, body = ask(app, "POST", "/predict", [BODY[:9], BODY[9:]])
    assert (status, headers[b"shoal-version"], headers[b"content-type"]) == (200, b"1", b"application/json")
    assert headers[b"content-length"] == b"%d" % len(body)
    many = json.dumps({"instances": [{"keys": [1, 2]}] * 1000}).encode()  # in a thread
    assert (
        json.loads(ask(app, "POST", "/predict", [many])[2])["probabilities"][7:8] == json.loads(body)["probabilities"]
    )
    assert json.loads(ask(app, "GET", "/healthz")[2]) == {"status": "ok", "version": 1}
    assert ask(app, "HEAD", "/healthz")[2] == b""
    assert ask(app, "GET", "/nowhere")[0] == 404
    assert ask(app, "POST", "/reload", headers=[("Host", "localhost")])[0] == 200
    assert ask(app, "POST", "/reload", headers=[("Host", "localhost"), ("origin", "http://elsewhere")])[0] == 403
    metrics = ask(app, "GET", "/metrics", headers=[("accept", "text/plain"), ("accept", "*/*")])[2].decode()
    assert 'shoal_serve_requests_total{code="200"} 2.0' in metrics
    assert "shoal_serve_seconds_count 2.0" in metrics
    assert "shoal_serve_held_bytes 0.0" in metrics


def test_an_application_is_mounted_below_a_path(served):
    app = make_app(served)
    assert ask(app, "GET", "/ctr/healthz", root_path="/ctr")[0] == 200
    assert ask(app, "POST", "/ctr/predict", [BODY], root_path="/ctr")[0] == 200
    assert ask(app, "GET", "/healthz", root_path="/ctr")[0] == 200


def test_an_application_bounds_bodies_and_counts_who_leaves(served):
    app = make_app(served, limits=Limits(body_bytes=100))
    status, headers, body = ask(app, "POST", "/predict", [BODY] * 4)
    assert (status, headers[b"connection"]) == (413, b"close")
    assert b"at most 100 are accepted" in body
    assert ask(app, "POST", "/predict", [BODY], [("content-length", "101")])[0] == 413
    assert ask(app, "POST", "/predict", [BODY], leaves=True) is None
    assert ask(app, "POST", "/reload", [BODY], leaves=True) is None
    metrics = ask(app, "GET", "/metrics")[2].decode()
    assert 'shoal_serve_requests_total{code="413"} 2.0' in metrics
    assert 'shoal_serve_requests_total{code="499"} 1.0' in metrics
    assert "shoal_serve_held_bytes 0.0" in metrics


def test_an_application_says_that_it_starts_and_ends(served):
    incoming = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]
    sent = []

    async def receive():
        return incoming.pop(0)

    async def send(message):
        sent.append(message["type"])

    asyncio.run(make_app(served)({"type": "lifespan"}, receive, send))
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    with pytest.raises(ValueError, match="only http and lifespan are answered"):
        asyncio.run(make_app(served)({"type": "websocket"}, receive, send))

"""The gate against requests that are forged, malformed, or too large."""

from __future__ import annotations

import re

import pytest

from manyhands.cluster.limits import HttpLimits, Rates
from manyhands.cluster.messages import Hello
from manyhands.cluster.routes import ROUTES, Role
from tests.cluster.conftest import each, hear, parse, problem

HELLO = Hello(version="1", host="h", agent="a", address="127.0.0.1", slots=(), pid=1)


def at(route):
    """A path of this route."""
    values = {"id": "1", "host": "h", "job": "1", "attempt": "0", "rank": "0"}
    path = re.sub(r"{(\w+)}", lambda found: values[found[1]], route.path)
    return path + {"wants": "?agent=a", "append_log": "?agent=a&offset=0"}.get(route.does, "")


# Tokens


@pytest.fixture
def unhurried(serve):
    return serve(limits=HttpLimits(failures_per_min=10_000))


@each("route", ROUTES)
def test_no_route_without_its_token(unhurried, route):
    served = unhurried
    own, other = served.user, served.agent
    if route.role is Role.AGENT:
        own, other = other, own
    before = served.desk.__dict__.copy()
    for token in ("", "x", own[:-1], own + "x", own.swapcase()):
        status, headers, body = served.request(route.method, at(route), token=token)
        assert (status, problem(body)) == (401, "token")
        assert headers["www-authenticate"] == "Bearer"
        assert own not in body.decode()
    status, _, body = served.request(route.method, at(route), token=other)
    if route.role is None:
        assert status == 200
    else:
        assert (status, problem(body)) == (403, "role")
    assert served.desk.__dict__ == before
    assert served.request(route.method, at(route), token=own)[0] not in (401, 403, 500)


@each(
    "header",
    [
        "Authorization: {t}",
        "Authorization: Basic {t}",
        "Authorization: Bearer",
        "Authorization: Bearer {t} {t}",
        "Authorization: Bearer {t}\r\nAuthorization: Bearer {t}",
        "Authorization: Bearer \xff\xfe",
        "X-Authorization: Bearer {t}",
    ],
)
def test_a_token_is_shown_in_one_way(served, header):
    line = header.format(t=served.user)
    status, _, body = served.request("GET", "/v1/info", headers=[line])
    assert (status, problem(body)) in ((401, "token"), (400, "header"))
    assert served.user not in body.decode()


def test_a_token_in_the_query_is_none(served):
    assert served.request("GET", f"/v1/info?token={served.user}")[0] == 401


def test_unknown_paths_need_a_token_too(served):
    assert served.request("GET", "/nowhere")[0] == 401
    assert served.request("GET", "/nowhere", token=served.user)[0] == 404


def test_guessers_are_slowed_down_and_users_are_not(serve):
    served = serve(limits=HttpLimits(failures_per_min=3))
    statuses = [served.request("GET", "/v1/info", token=f"guess-{n}")[0] for n in range(6)]
    assert statuses == [401] * 3 + [429] * 3
    _, headers, body = served.request("GET", "/v1/info", token="guess")
    assert problem(body) == "guesses"
    assert 1 <= int(headers["retry-after"]) <= 21
    assert served.request("GET", "/v1/info", token=served.user)[0] == 200


def test_buckets():
    now = [0.0]
    rates = Rates(2.0, 3.0, clock=lambda: now[0], num_keys=2)
    assert [rates.take("a") for _ in range(4)] == [0, 0, 0, 0.5]
    now[0] = 0.25
    assert rates.take("a") == 0.25
    now[0] = 0.5
    assert rates.take("a") == 0
    assert rates.take("b") == rates.take("c") == 0
    # The oldest key is forgotten: memory has a bound.
    assert [rates.take("a") for _ in range(3)] == [0, 0, 0]


# Host and Origin


@each(
    "host",
    ["evil.example", "evil.example:{p}", "127.0.0.1.evil.example", "10.0.0.1", "[fe80::1]:1",
     "localhost.evil.example:{p}", "127.0.0.1:{p}@evil.example", "127.0.0.1:x", "[::1", "::1", ""],
)  # fmt: skip
def test_another_host_is_refused(served, host):
    host = host.format(p=served.server.port)
    request = f"GET /v1/info HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {served.user}\r\n"
    status, _, body = parse(served.say(request.encode() + b"Connection: close\r\n\r\n"))
    assert status in (400, 421)
    assert problem(body) in ("host", "request")
    # Before it is asked for a token: a page that was rebound learns nothing of it.
    request = f"GET /openapi.json HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    assert parse(served.say(request.encode()))[0] in (400, 421)


@each("host", ["localhost", "LOCALHOST:99", "127.0.0.1", "127.8.8.8", "[::1]:1"])
def test_this_machine_by_any_name(served, host):
    assert served.request("GET", "/v1/info", token=served.user, host=host)[0] == 200


def test_a_name_that_was_given_is_taken(serve):
    served = serve(names=["boss.example"])
    user = served.user
    assert served.request("GET", "/v1/info", token=user, host="Boss.Example:1")[0] == 200
    status, _, body = served.request("GET", "/v1/info", token=user, host="other.example")
    assert status == 421
    assert b"--advertise" in body


def test_no_host_or_two(served):
    assert parse(served.say(b"GET /openapi.json HTTP/1.1\r\n\r\n"))[0] == 400
    assert parse(served.say(b"GET /openapi.json HTTP/1.0\r\n\r\n"))[0] == 421
    two = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n"
    assert parse(served.say(two))[0] == 400


@each("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD"])
@each("origin", ["null", "https://evil.example", "http://127.0.0.1:1", ""])
def test_no_web_page_gets_in_by_any_method(served, method, origin):
    status, headers, _ = served.request(
        method, "/v1/jobs", token=served.user, headers=[f"Origin: {origin}"]
    )
    assert status == 403
    assert not any(name.startswith("access-control") for name in headers)


def test_a_page_of_this_server_may_ask(served):
    origin = f"Origin: http://127.0.0.1:{served.server.port}"
    assert served.request("GET", "/v1/info", token=served.user, headers=[origin])[0] == 200


def test_every_answer_has_the_headers_that_browsers_obey(served):
    for path, token in (("/openapi.json", ""), ("/v1/info", ""), ("/v1/info", served.user)):
        _, headers, _ = served.request("GET", path, token=token)
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "server" not in headers
    _, headers, _ = parse(served.say(b"nonsense\r\n\r\n"))
    assert headers["x-content-type-options"] == "nosniff"


# Sizes


def test_a_body_is_refused_by_its_announcement(served):
    # Nothing of the body is ever sent: the answer comes first.
    status, headers, body = served.request(
        "POST", "/v1/jobs", token=served.user, headers=["Content-Type: application/json"],
        length=1 << 40,
    )  # fmt: skip
    assert (status, problem(body)) == (413, "size")
    assert headers["connection"] == "close"


def test_a_body_without_a_length_is_counted(serve):
    served = serve(limits=HttpLimits(json_bytes=1000))
    with served.dial() as sock:
        sock.sendall(
            f"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {served.user}\r\n"
            "Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        sock.sendall(b"3e8\r\n" + b" " * 1000 + b"\r\n" + b"1\r\n \r\n")
        assert parse(hear(sock))[0] == 413


def test_a_body_where_none_belongs(served):
    assert served.request("GET", "/v1/info", token=served.user, body=b"x")[0] == 413
    assert served.request("POST", "/v1/shutdown", token=served.user, body=b"{}")[0] == 413
    assert not served.desk.went_down.is_set()


def test_a_piece_of_a_log_has_a_most(serve):
    served = serve(limits=HttpLimits(log_bytes=100))
    served.cluster().submit(["x"])
    path = "/v1/agents/h/logs/1/0/0?agent=a&offset=0"
    assert served.request("PUT", path, token=served.agent, body=b"x" * 101)[0] == 413
    assert served.request("PUT", path, token=served.agent, body=b"x" * 100)[0] == 200
    assert served.logs.path((1, 0, 0)).stat().st_size == 100


@each("line", [b"X: " + b"x" * 40_000, b"\r\n".join(b"X%d: y" % n for n in range(5000))])
def test_headers_have_a_most(served, line):
    status, _, body = parse(
        served.say(b"GET / HTTP/1.1\r\nHost: localhost\r\n" + line + b"\r\n\r\n")
    )
    assert (status, problem(body)) == (431, "headers")


def test_a_path_has_a_most(served):
    status, _, body = parse(served.say(b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: h\r\n\r\n"))
    assert (status, problem(body)) == (431, "headers")


# Malformed


@each(
    "data",
    [
        b"\r\n\r\n\x00\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9" + b"9" * 50 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n folded: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 200 + b"\r\n\r\n",
        "GET /é HTTP/1.1\r\nHost: localhost\r\n\r\n".encode(),
    ],
)
def test_what_is_no_request_is_answered_as_json(served, data):
    status, headers, body = parse(served.say(data))
    assert status in (400, 421, 501)
    assert headers["content-type"] == "application/json"
    assert problem(body)
    assert served.cluster().info()


def test_a_broken_body_under_a_long_poll(served):
    """A pipelined request that is none, while an answer is held back: hung up, not a crash."""
    served.cluster().submit(["x"])
    with served.dial() as sock:
        sock.sendall(
            f"GET /v1/jobs/1/wait?timeout_s=60 HTTP/1.1\r\nHost: localhost\r\n"
            f"Authorization: Bearer {served.user}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
        )
        sock.sendall(b"0\r\n\r\nnonsense\r\n\r\n")
        served.desk.cancel(1)
        assert parse(hear(sock))[0] in (200, 400)
    assert served.cluster().info()


@each(
    "path",
    [
        "/v1/jobs/../jobs", "/v1/jobs/%2e%2e/%2e%2e/etc/passwd", "//v1/jobs", "/v1//jobs",
        "/v1/jobs/", "/v1/jobs/1/", "/v1/jobs%00", "/v1/jobs%0a", "/v1/jobs/1%0a", "/V1/jobs",
        "/v1/jobs/1/logs/../../../../etc/passwd", "http://localhost/v1/jobs", "*", "/v1/jobs/1;x",
        "/v1/jobs/%ff", "/v1/jobs/1%2flogs%00", "/v1/jobs\\1", "/v1/jobs/%E2%80%AE1",
    ],
)  # fmt: skip
def test_path_tricks(served, path):
    served.cluster().submit(["x"])
    status, _, body = served.request("GET", path, token=served.user)
    assert status in (400, 404)
    assert problem(body)


@each(
    "id",
    ["0", "-1", "1.5", "x", "9" * 30, "9" * 5000, "1e9", "%D9%A1", "0x1", "null", "true", "+1"],
)
def test_ids_out_of_range(served, id):
    for rest in ("", "/history", "/wait", "/logs"):
        status, _, body = served.request("GET", f"/v1/jobs/{id}{rest}", token=served.user)
        assert status in (400, 404, 431)
        assert problem(body)
    for part in (f"{id}/0/0", f"1/{id}x/0", f"1/0/{id}x"):
        path = f"/v1/agents/h/logs/{part}?agent=a&offset=0"
        assert served.request("PUT", path, token=served.agent, body=b"x")[0] in (400, 404, 431)
    assert list(served.logs.path((1, 0, 0)).parent.parent.parent.iterdir()) == []


@each(
    "body",
    [
        b"", b"null", b"[]", b'"x"', b"{}", b"{", b'{"spec":', b"[" * 100_000,
        b'{"spec":' * 50_000, b'{"spec":{"command":' + b"[" * 100_000,
        b'{"spec":{"command":["\xff"]}}', b'{"spec":{"command":["\\ud800"]}}',
        b'{"spec":{"command":["x"],"gpus":1e400}}', b'{"spec":{"command":["x"],"gpus":-1}}',
        b'{"spec":{"command":["x"],"gpus":' + b"9" * 5000 + b"}}",
        b'{"spec":{"command":["x"],"gpus":NaN}}', b'{"spec":{"command":["x"],"nope":1}}',
        b'{"spec":{"command":"x"}}', b'{"spec":{"command":["x"]},"key":"a b"}',
        b'{"spec":{"command":["x"]}}{}', b"\xef\xbb\xbf{}",
        b'{"spec":{"command":["x"],"env":{"A":1}}}',
    ],
)  # fmt: skip
def test_bodies_that_are_no_submission(served, body):
    kind = ["Content-Type: application/json"]
    status, _, text = served.request(
        "POST", "/v1/jobs", token=served.user, headers=kind, body=body, length=len(body)
    )
    assert status in (400, 422)
    assert problem(text)
    assert served.desk.jobs() == []


def test_a_deep_status_from_an_agent(served):
    """Unknown fields of an agent's message are skipped, however deep: not by recursion."""
    served.office().hello(HELLO)
    body = b'{"agent":"a","new":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    status, _, text = served.request(
        "POST", "/v1/agents/h/status", token=served.agent, body=body,
        headers=["Content-Type: application/json"],
    )  # fmt: skip
    assert (status, problem(text)) == (400, "body")


@each("kind", [None, "text/plain", "application/x-www-form-urlencoded", ""])
def test_json_has_to_say_that_it_is(served, kind):
    """What a page's form can send without asking first is not taken."""
    headers = [] if kind is None else [f"Content-Type: {kind}"]
    body = b'{"spec":{"command":["x"]}}'
    args = {"token": served.user, "headers": headers, "body": body}
    assert served.request("POST", "/v1/jobs", **args)[0] == 415


def test_odd_unicode_passes_unharmed(served):
    job = served.cluster().submit(["\U0001f600", "\u202e\u0000", "e\u0301"], env={"A": "\ufeff"})
    assert served.cluster().job(job.id).spec == job.spec
    assert job.spec.command == ("\U0001f600", "\u202e\u0000", "e\u0301")


@each(
    "query",
    ["limit=0", "limit=x", "limit=1&limit=2", "nope=1", "state=DEAD", "limit=%ff", "limit=1%00",
     "&".join(f"a{n}=1" for n in range(100)), "limit=" + "9" * 400, "state=PENDING%0a"],
)  # fmt: skip
def test_queries_out_of_range(served, query):
    status, _, body = served.request("GET", f"/v1/jobs?{query}", token=served.user)
    assert (status, problem(body)) == (400, "query")


@each("wait", ["nan", "inf", "-1", "61", "1e999", "x", ""])
def test_waits_out_of_range(served, wait):
    served.cluster().submit(["x"])
    for path in (f"/v1/jobs/1/wait?timeout_s={wait}", f"/v1/jobs/1/logs?wait_s={wait}"):
        assert served.request("GET", path, token=served.user)[0] == 400


@each("method", ["DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD", "FOO"])
def test_methods_that_a_path_has_not(served, method):
    status, headers, _ = served.request(method, "/v1/jobs", token=served.user)
    assert status == 405
    assert headers["allow"] == "GET, POST"

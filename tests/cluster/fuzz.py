"""Fuzzing the API: a real coordinator and server, and requests that its own document suggests.

    python -m tests.cluster.fuzz --examples 1000

For every operation schemathesis makes requests that fit the document and requests that do not. A
third of them come from an agent that there is, about an attempt that it was given, so that they get
as far as a request can. No answer may be a server error, every answer must be one that the document
has, and every operation must have been done. Prints how many of each status there were; exits with
1 and the request at the first that is wrong.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import checks, openapi
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from manyhands.cluster.coordinator import Coordinator
from manyhands.cluster.identity import open_identity
from manyhands.cluster.job import Spec, State
from manyhands.cluster.limits import HttpLimits
from manyhands.cluster.logs import LogName, Logs
from manyhands.cluster.messages import Hello, Holding, Kind, Slot, Status, Want
from manyhands.cluster.messages import Phase as How
from manyhands.cluster.routes import ROUTES, Role
from manyhands.cluster.server import Server
from manyhands.cluster.store import Store

CHECKS = [
    checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
AGENT = "a"
KNOWN = {"id": 1, "host": "h", "job": 1, "attempt": 0, "rank": 0}
"""Numbers and names that there are: drawn at random they would hardly be met."""
Now = Callable[[], dict[str, Any]]
"""The same, as they are at the moment, and where a log goes on."""
WAITS = ("wait_s", "timeout_s")


def fuzz(
    url: str, tokens: dict[str, str], now: Now, examples: int, start: int
) -> collections.Counter:
    """Asks every operation; raises what schemathesis does at a wrong answer, or AssertionError if
    one was never done.
    """
    of_user = {"Authorization": f"Bearer {tokens[Role.USER]}"}
    schema = openapi.from_url(f"{url}/openapi.json", headers=of_user)
    roles = {(route.path, route.method): route.role for route in ROUTES}
    statuses = collections.Counter()
    with requests.Session() as session:
        for found in schema.get_all_operations():
            operation = found.ok()
            role = roles[operation.path, operation.method.upper()]
            headers = of_user if role is None else {"Authorization": f"Bearer {tokens[role]}"}
            known = {
                part.name: KNOWN[part.name]
                for part in operation.path_parameters
                if part.name in KNOWN
            }
            strategies = [
                (operation.as_strategy(), None),
                (operation.as_strategy(path_parameters=known), now),
            ]
            with contextlib.suppress(schemathesis.errors.InvalidSchema):
                negative = operation.as_strategy(generation_mode=GenerationMode.NEGATIVE)
                strategies.append((negative, None))
            answers = collections.Counter()
            for strategy, at in strategies:
                _ask(strategy, at, url, session, headers, examples, start, answers)
            statuses += answers
            done = [status for status in answers if status < 300]
            assert done, f"{operation.method} {operation.path} was never done: {answers}"
    return statuses


def _pin(case, now):
    """Have it come from the agent that there is, about an attempt that it has."""
    case.path_parameters.update({name: now[name] for name in case.path_parameters})
    for name in ("agent", "offset"):
        if name in case.query and case.operation.method == "put":
            case.query[name] = now[name]
    if "agent" in case.query:
        case.query["agent"] = AGENT
    body = case.body
    if case.path.endswith("/status"):
        body |= {"agent": AGENT, "number": 0}
        if body.get("holdings"):
            body["holdings"][0] |= {"job": now["job"], "attempt": now["attempt"]}
    elif case.path.endswith("/agents"):
        body |= {"host": "other", "agent": "other", "address": "x", "folder": "", "slots": []}
    elif case.path.endswith("/jobs") and isinstance(body, dict):
        body["spec"] |= {"command": ["x"], "gpus": 1, "batch": None, "env": {}}


def _ask(strategy, now, url, session, headers, examples, start, statuses):
    @seed(start)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=strategy)
    def check(case):
        for part in case.operation.query:
            # What is waited for does not come: 10 ms are as good as a minute.
            wait = case.query.get(part.name, 60)
            if part.name in WAITS and isinstance(wait, int | float) and 0 < wait <= 60:
                case.query[part.name] = 0.01
        if now is not None:
            _pin(case, now())
        answer = case.call(base_url=url, session=session, headers=headers)
        statuses[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)

    # There may be nothing wrong that could be sent to it.
    with contextlib.suppress(Unsatisfiable):
        check()


@contextlib.contextmanager
def coordinator(folder: Path):
    """A whole coordinator behind a server, with a host on which jobs run: its URL, its tokens, and
    what the host has.
    """
    identity = open_identity(folder)
    logs = Logs(folder / "logs", reserve_bytes=0)
    generous = HttpLimits(requests_per_s=1e6, failures_per_min=1e6)
    with (
        Store.open(folder / "jobs.db") as store,
        Coordinator(store, lease_s=600.0) as desk,
        Server(desk, logs, identity, bind="127.0.0.1:0", plain=True, limits=generous,
               on_shutdown=lambda: None) as server,
    ):  # fmt: skip
        slots = tuple(Slot(n, Kind.CPU, str(n)) for n in range(8))
        desk.hello(Hello(version="1", host="h", agent=AGENT, address="x", slots=slots, pid=1))
        desk.status("h", Status(agent=AGENT))
        for _ in range(3):
            desk.submit(Spec(command=("x",), gpus=2, max_restarts=100, grace_s=0.0))
        for phase in (How.READY, How.RUNNING):
            wants = wanted(desk)
            held = (Holding(job=w.job, attempt=0, phase=phase, port=5000) for w in wants)
            desk.status("h", Status(agent=AGENT, holdings=tuple(held)))
        assert desk.job(1).state is State.RUNNING, desk.job(1)
        logs.append(LogName(1, 0, 0), 0, b"words\n" * 100)

        def now() -> dict[str, Any]:
            want = random.Random(len(desk.jobs())).choice(wanted(desk))
            length = logs.length(LogName(want.job, want.attempt, 0))
            one = {"job": want.job, "id": want.job, "attempt": want.attempt, "offset": length}
            return KNOWN | one | {"agent": AGENT}

        tokens = {role.value: identity.tokens[role] for role in Role}
        yield server.url, tokens, now


def wanted(desk: Coordinator) -> tuple[Want, ...]:
    """What the host is to hold: something, if need be of a new job."""
    wants = desk.wants("h", AGENT, -1, 0.0)
    if not wants.wants:
        desk.status("h", Status(agent=AGENT))  # whatever it held, it is rid of that
        desk.submit(Spec(command=("x",), gpus=2, max_restarts=100, grace_s=0.0))
        while not wants.wants:
            wants = desk.wants("h", AGENT, wants.version, 10.0)
    return wants.wants


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--examples", type=int, default=1000, help="of each kind an operation")
    parser.add_argument("--seed", type=int, default=1)
    given_ = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, coordinator(Path(folder)) as (url, tokens, now):
        statuses = fuzz(url, tokens, now, given_.examples, given_.seed)
    print(json.dumps({str(status): count for status, count in sorted(statuses.items())}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Fuzzing the API: a real coordinator and server, and requests that its own document suggests.

    python -m tests.cluster.fuzz --examples 1000

For every operation schemathesis makes requests that fit the document and requests that do not. No
answer may be a server error, and every answer must be one that the document has. Prints how many of
each status there were; exits with 1 and the request at the first that is wrong.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import sys
import tempfile
from pathlib import Path

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
from manyhands.cluster.job import Spec
from manyhands.cluster.limits import HttpLimits
from manyhands.cluster.logs import LogName, Logs
from manyhands.cluster.messages import Hello, Kind, Slot
from manyhands.cluster.routes import ROUTES, Role
from manyhands.cluster.server import Server
from manyhands.cluster.store import Store

CHECKS = [
    checks.not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]
KNOWN = {"id": 1, "host": "h", "job": 1, "attempt": 0, "rank": 0}
"""Numbers and names that there are: drawn at random they would hardly be met."""
WAITS = ("wait_s", "timeout_s")


def fuzz(url: str, tokens: dict[str, str], examples: int, start: int) -> collections.Counter:
    """Asks every operation; raises what schemathesis does at a wrong answer."""
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
            strategies = [operation.as_strategy(), operation.as_strategy(path_parameters=known)]
            with contextlib.suppress(schemathesis.errors.InvalidSchema):
                strategies.append(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE))
            for strategy in strategies:
                _ask(strategy, url, session, headers, examples, start, statuses)
    return statuses


def _ask(strategy, url, session, headers, examples, start, statuses):
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
        answer = case.call(base_url=url, session=session, headers=headers)
        statuses[answer.status_code] += 1
        case.validate_response(answer, checks=CHECKS)

    # There may be nothing wrong that could be sent to it.
    with contextlib.suppress(Unsatisfiable):
        check()


@contextlib.contextmanager
def coordinator(folder: Path):
    """A whole coordinator with a host and some jobs behind a server: its URL and tokens."""
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
        desk.hello(Hello(version="1", host="h", agent="a", address="x", slots=slots, pid=1))
        for _ in range(3):
            desk.submit(Spec(command=("x",), gpus=2))
        logs.append(LogName(1, 0, 0), 0, b"words\n" * 100)
        tokens = {role.value: identity.tokens[role] for role in Role}
        yield server.url, tokens


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--examples", type=int, default=1000, help="of each kind an operation")
    parser.add_argument("--seed", type=int, default=1)
    given_ = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, coordinator(Path(folder)) as (url, tokens):
        statuses = fuzz(url, tokens, given_.examples, given_.seed)
    print(json.dumps({str(status): count for status, count in sorted(statuses.items())}))
    return 0


if __name__ == "__main__":
    sys.exit(main())

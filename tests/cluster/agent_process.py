"""python -m tests.cluster.agent_process PORT OPTIONS: an agent that tests can kill."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

from manyhands.cluster import agent as agents
from manyhands.cluster import attempt
from manyhands.cluster.agent import Agent
from manyhands.cluster.devices import cpu_shares
from manyhands.cluster.messages import Origin
from manyhands.core.errors import ManyhandsError
from tests.cluster.offices import DistantOffice


def main(port: str, options: str) -> int:
    logging.basicConfig(level="INFO", format="%(asctime)s %(name)s: %(message)s")
    given = json.loads(options)
    attempt.KEEPER_PATIENCE_S = given.get("patience_s", attempt.KEEPER_PATIENCE_S)
    agents.LOGS_S = given.get("logs_s", agents.LOGS_S)
    try:
        agent = Agent(
            lambda: DistantOffice(int(port)),
            host=given["host"],
            slots=cpu_shares(given.get("slots", 4), [0]),
            state=Path(given["state"]),
            user=given.get("user"),
            origin=Origin(given.get("origin", "user")),
            secrets_=[os.environ.pop(name) for name in given.get("secrets", ())],
        )
        print(agent.run(), flush=True)
    except ManyhandsError as error:
        print(f"error: {error}", flush=True)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

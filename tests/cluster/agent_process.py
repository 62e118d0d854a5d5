"""python -m tests.cluster.agent_process PORT OPTIONS: an agent that tests can kill."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

from manyhands.cluster import agent as agents
from manyhands.cluster import attempt
from manyhands.cluster.agent import Agent
from manyhands.cluster.devices import cpu_shares
from manyhands.cluster.messages import Kind, Origin, Slot
from manyhands.core.errors import ManyhandsError
from tests.cluster.offices import DistantOffice

if TYPE_CHECKING:
    from collections.abc import Callable


STEPS = (
    *((os, name) for name in ("open", "mkdir", "fsync", "replace", "unlink", "rmdir", "close")),
    (subprocess, "_fork_exec"),
)
"""What changes the disk, or starts a process."""


def die_at(number: int) -> None:
    """kill -9 of oneself before the `number`th of the main thread's STEPS since it was welcomed."""
    count = 0

    def counted(step: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            nonlocal count
            if threading.current_thread() is threading.main_thread() and DistantOffice.welcomed:
                count += 1
                if count == number:
                    os.kill(os.getpid(), signal.SIGKILL)
            return step(*args, **kwargs)

        return run

    for module, name in STEPS:
        setattr(module, name, counted(getattr(module, name)))


def main(port: str, options: str) -> int:
    # Whoever runs the tests in the background may have them ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    logging.basicConfig(level="INFO", format="%(asctime)s %(name)s: %(message)s")
    given = json.loads(options)
    attempt.KEEPER_PATIENCE_S = given.get("patience_s", attempt.KEEPER_PATIENCE_S)
    agents.KEEPER_PATIENCE_S = attempt.KEEPER_PATIENCE_S
    agents.LOGS_S = given.get("logs_s", agents.LOGS_S)
    agents.FAREWELL_S = given.get("farewell_s", agents.FAREWELL_S)
    if given.get("unkillable"):
        agents.end_marked = lambda marks, patience_s: [1]
    if "dies_at" in given:
        die_at(given["dies_at"])
    slots = cpu_shares(given.get("slots", 4), [0])
    if "gpus" in given:
        slots = [Slot(n, Kind.GPU, uuid, "H200") for n, uuid in enumerate(given["gpus"])]
    try:
        agent = Agent(
            lambda: DistantOffice(int(port)),
            host=given["host"],
            slots=slots,
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

"""A crew of other software, for train.py: each peer is a process of NAME_trainer.py.

The first begins with a line that the others need to find it; each says how many parameters it has.
From there on the protocol is that of train.py, and an answer says how many `updates` all have made
together: a turn of which somebody has none does not count.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from harness import Worker

from manyhands.testing.processes import end_tree

TURN_S = 120.0  # hivemind may look for its group for good; a turn takes up to 40 s
CHANCES = 2  # turns that it may take for one that counts


class ForeignCrew:
    """Peers of one name, a job for each."""

    def __init__(self, name: str, jobs: list[str]) -> None:
        self._name, self._jobs = name, jobs
        self.parameters = 0
        """Of its model, once it has taken a turn."""

    def turns(
        self, count: int, save_to: str, heard: Callable[[int, list[dict]], None]
    ) -> list[list[dict]]:
        """The answers of so many turns, or of those it took before it was given up."""
        script = str(Path(__file__).with_name(f"{self._name}_trainer.py"))
        said: list[list[dict]] = []
        with ExitStack() as stack:
            crew = [stack.enter_context(Worker(script, job)) for job in self._jobs]
            try:
                first = crew[0].hear(crew, TURN_S)
                for worker in crew[1:]:
                    worker.say(**first)
                (self.parameters,) = {w.hear(crew, TURN_S)["parameters"] for w in crew}
                for _ in range(CHANCES * count):
                    if len(said) == count:
                        break
                    for worker in crew:
                        worker.say(save_to=save_to)
                    answers = [worker.hear(crew, TURN_S) for worker in crew]
                    if not all(answer["updates"] for answer in answers):
                        print(f"a turn of {self._name} without a common update", file=sys.stderr)
                        continue
                    answers[0]["meeting_cpu"] = answers[0]["meeting_peak"] = 0  # it has none
                    heard(len(said), answers)
                    said.append(answers)
            except (TimeoutError, RuntimeError) as error:
                print(f"{self._name} is given up for {len(crew)} peers: {error}", file=sys.stderr)
                for worker in crew:
                    end_tree(worker.process, patience_s=0.0)
        return said

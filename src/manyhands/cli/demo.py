"""`manyhands demo`: peers on this machine train one net on real digits; one dies, another joins.

They meet at a hub inside this process (or at the broker you name) and only dial out, so what is
shown is what happens between machines. At the end one process repeats it alone, in plain PyTorch.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from manyhands.cli.demo_peers import Peers
from manyhands.cli.demo_score import ACCURACY, TOLERANCE, Score
from manyhands.cli.demo_screen import Screen
from manyhands.core.errors import ManyhandsError, SettingsError
from manyhands.data.calendar import Calendar
from manyhands.links.base import open_link
from manyhands.links.hub import Hub

app = typer.Typer(add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})
_PEER, _ALONE = ("-m", "manyhands.cli.demo_peer"), ("-m", "manyhands.cli.demo_alone")
_KILL_AT = 0.3  # of all rounds

NEXT = """\
Your own script, with three lines of manyhands (a whole one: {script}):

    import manyhands as mh

    with mh.join() as run:
        model, optimizer, loader, scheduler = run.wrap(model, optimizer, loader, scheduler)
        ...                                your loop, as it is

    manyhands run -n 3 train.py            three peers on this machine
    manyhands hub                          on a machine that others can reach: it prints a code,
    manyhands run --hub CODE --run first train.py      with which each of the others joins"""


@app.command()
def demo(
    peers: Annotated[int, typer.Option(min=2, max=16, help="How many peers begin.")] = 3,
    amqp: Annotated[str | None, typer.Option(help="Meet at this broker instead.")] = None,
    epochs: Annotated[
        int, typer.Option(min=2, help="How often each digit is seen; few make bad readers.")
    ] = 24,
    json_output: Annotated[bool, typer.Option("--json", help="The summary as JSON.")] = False,
) -> None:
    """Train on real digits here, kill a peer, add one, and compare with one process.

    Exit code 1 if digits were read badly, a sample was lost, or the losses are others.
    """
    if importlib.util.find_spec("sklearn") is None:
        raise SettingsError(
            "the digits come with scikit-learn, which is not installed",
            hint="pip install '.[demo]' in the folder of manyhands",
        )
    start_s = time.monotonic()
    screen = Screen(Console(stderr=json_output))
    with ExitStack() as stack:
        run = f"demo-{secrets.token_hex(4)}"
        if amqp is None:
            hub = stack.enter_context(Hub("127.0.0.1:0"))
            url, place = replace(hub.near, run=run).code(), "a hub in this process (TLS, token)"
        else:
            url, place = amqp, "your broker"
            # One clear error now rather than one from each process.
            open_link(url, run=f"{run}-try").close()
        screen.say(f"{peers} peers and one for later import torch; they meet at {place}")
        crew = stack.enter_context(Peers())
        environment = setting(url, run, peers)
        score, train_s = Show(crew, screen, peers, epochs).play(environment)
        screen.say("once more in one process, in plain PyTorch, with nothing of manyhands")
        off = score.compare(train_alone(crew, environment, screen, epochs))
    score.judge(off)
    wall_s = time.monotonic() - start_s
    if json_output:
        print(json.dumps(summarise(score, off, train_s, wall_s)))
    screen.say(tell(score, off, train_s, wall_s))
    if score.problems:
        raise ManyhandsError("; ".join(score.problems))
    script = Path(__file__).with_name("demo_peer.py")
    screen.say("\n" + NEXT.format(script=os.path.relpath(script)))


def setting(url: str, run: str, number: int) -> dict[str, str]:
    """What a peer finds in its environment: it is not public, as a command line is."""
    cores = os.cpu_count() or 1
    return {
        # What the user's shell says of other runs is not for this one.
        **{k: v for k, v in os.environ.items() if not k.startswith("MANYHANDS_")},
        "MANYHANDS_URL": url,
        "MANYHANDS_RUN": run,
        "MANYHANDS_MIN_PEERS": str(number),
        "OMP_NUM_THREADS": str(max(1, cores // number)),
    }


class Show:
    """The plot: some begin, one is killed, another joins, and they come to the end."""

    def __init__(self, crew: Peers, screen: Screen, number: int, epochs: int) -> None:
        self._crew, self._screen, self._epochs = crew, screen, epochs
        *self._first, self._late = (f"peer-{i + 1}" for i in range(number + 1))
        self._victim = self._first[1]
        self._start_s = 0.0
        self._score: Score | None = None

    def play(self, environment: Mapping[str, str]) -> tuple[Score, float]:
        """Until all have ended. Returns the seconds that they trained, too."""
        states = self._screen.states
        for name in (*self._first, self._late):
            own = {**environment, "MANYHANDS_NAME": name}
            self._crew.start(name, *_PEER, str(self._epochs), environment=own)
            states[name] = "starts"
        with self._screen:
            for name, said in self._crew.news():
                match said:
                    case str():
                        self._screen.say(f"{name}: {said}")
                    case {"size": size, "batch": batch}:
                        states[name] = "waits"
                        if self._score is None:
                            self._score = Score(Calendar(size, batch), self._epochs, self._late)
                        if "starts" not in states.values():
                            self._begin()
                        self._screen.show(self.score)
                    case {"accuracy": accuracy}:
                        states[name] = "done"
                        self.score.accuracies.append(accuracy)
                        self._screen.show(self.score)
                    case _:
                        self._on_round(name, said)
        return self.score, time.monotonic() - self._start_s

    @property
    def score(self) -> Score:
        """Once a peer has said what there is to do."""
        assert self._score is not None
        return self._score

    def _begin(self) -> None:
        self._start_s = time.monotonic()
        for name in self._first:
            self._let_in(name)

    def _let_in(self, name: str) -> None:
        self._crew.begin(name)
        self._screen.states[name] = "trains"

    def _on_round(self, name: str, said: Mapping[str, Any]) -> None:
        score, now_s = self.score, time.monotonic()
        before_s = score.noticed_s
        score.take(name, said, now_s)
        # It has told of a round, and so is in the middle of the next one.
        is_time = name == self._victim and score.round >= _KILL_AT * score.num_rounds
        if is_time and score.killed is None:
            self._crew.kill(name)
            score.kill(name, now_s)
            self._screen.states[name] = "killed"
            self._screen.say(f"{name} is killed in round {score.round}")
        elif score.noticed_s != before_s:
            self._let_in(self._late)
            self._screen.say(
                f"after {score.noticed_s:.1f} s the others go on without it; {self._late} joins"
            )
        self._screen.show(score)


def train_alone(
    crew: Peers, environment: Mapping[str, str], screen: Screen, epochs: int
) -> list[float]:
    """The loss of each round in one process."""
    losses: list[float] = []
    crew.start("alone", *_ALONE, str(epochs), environment=environment)
    for name, said in crew.news():
        match said:
            case str():
                screen.say(f"{name}: {said}")
            case {"loss": loss}:
                losses.append(loss)
            case _:
                pass
    return losses


def summarise(score: Score, off: float, train_s: float, wall_s: float) -> dict[str, Any]:
    """For programs."""
    return {
        "ok": not score.problems,
        "problems": score.problems,
        "accuracy": min(score.accuracies, default=0.0),
        "off": off,
        "tolerance": TOLERANCE,
        "rounds": score.round,
        "epochs": score.epochs,
        "samples": score.computed.total(),
        "samples_expected": score.num_samples,
        "samples_of": dict(score.computed),
        "killed": score.killed,
        "killed_in": score.killed_in,
        "noticed_s": score.noticed_s,
        "took_part_from": score.took_part_from,
        "train_s": train_s,
        "wall_s": wall_s,
    }


def tell(score: Score, off: float, train_s: float, wall_s: float) -> str:
    """For people."""
    accuracy, size = min(score.accuracies, default=0.0), score.calendar.size
    return f"""
{100 * accuracy:.1f} % of unseen digits read right; {100 * ACCURACY:g} % were asked for
{off:.0e} is the largest difference from the loss curve of one process; {TOLERANCE:g} is allowed
{score.computed.total()} of {score.num_samples} samples counted: each of {size} once in each of \
{score.epochs} epochs
{score.killed} was killed in round {score.killed_in}; the others went on after \
{score.noticed_s or nan:.1f} s, and {score.late} took part from round {score.took_part_from}
{train_s:.0f} s of training, {wall_s:.0f} s in all"""

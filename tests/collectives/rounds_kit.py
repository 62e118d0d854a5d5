"""Rounds whose every value is known: what peers contribute, what must come out, and who checks it.

Sample i of round r adds `value(r, i)` times a fixed pattern to every tensor. The values are small
integers and a round has a power of two of samples, so the mean is exact in fp32 whatever the order
of additions: however often a round was cut, killed and tried again, its result has the bits that
one process would have computed. A sample that is lost or counted twice shows in all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from manyhands.collectives import instructions as i
from manyhands.collectives import messages as m
from manyhands.collectives.mail import Mail
from manyhands.collectives.outcomes import Committed, Stopped, Task
from manyhands.collectives.ranges import EMPTY, Ranges
from manyhands.collectives.rounds import Rounds
from manyhands.core.peers import PeerState
from manyhands.links.base import Link, LinkSettings, open_link
from manyhands.links.messages import Terms
from manyhands.wire.tensors import bytes_of

BATCH = 16
PATIENCE_S = 30.0

# Leases must not decide a test on a machine that is busy, unless leases are the matter.
STEADY = Terms(
    beat_s=0.1,
    lease_s=20.0,
    grace_s=0.3,
    window_bytes=256 << 10,
    part_bytes=64 << 10,
    watch_bytes=4 << 20,
)


def value(round_: int, sample: int) -> int:
    return (round_ * 31 + sample * 7) % 17


def total(round_: int, ranges: Sequence[int] | Ranges) -> int:
    return sum(value(round_, sample) for sample in ranges)


def tensors_like(sizes: Sequence[tuple[str, int]]) -> list[torch.Tensor]:
    """Each tensor: 1, 2, 3, 1, 2, 3, ..."""
    return [
        (torch.arange(numel) % 3 + 1).to(getattr(torch, dtype)) if numel else torch.empty(0)
        for dtype, numel in sizes
    ]


SIZES = (("float32", 40_000), ("float32", 5), ("float64", 9_000), ("float32", 30_000))


@dataclass
class History:
    """What one peer has said about itself, in plain values."""

    name: str
    incarnation: int = 0
    committed: list[dict] = field(default_factory=list)
    stopped: dict | None = None

    def take(self, said: dict) -> None:
        if "committed" in said:
            self.committed.append(said)
        if "stopped" in said:
            self.stopped = said

    @property
    def rounds(self) -> list[int]:
        return [one["committed"] for one in self.committed]


def check_histories(
    histories: Sequence[History],
    num_rounds: int | None,
    *,
    dead: Sequence[str] = (),
    lost: Sequence[int] = (),
    tolerance: float = 0.0,
) -> None:
    """The oracle: all that was committed anywhere is what one process would have computed.

    Rounds follow each other without a hole, equal rounds have equal chains, every sample of a
    round that was not refused was counted once. `lost`: samples that were refused on purpose.
    `dead` ones may have committed one round that the others had to do again. `tolerance`: how far
    values may be from the true mean, where they were rounded on their way.
    """
    chains: dict[int, dict[str, str]] = {}
    state: dict[int, float] = {}
    for history in histories:
        first = history.rounds[0] if history.rounds else 0
        expected = list(range(first, first + len(history.rounds)))
        assert history.rounds == expected, (history.name, history.rounds)
        for one in history.committed:
            round_ = one["committed"]
            if history.name not in dead or one is not history.committed[-1]:
                chains.setdefault(round_, {})[history.name] = one["chain"]
            assert state.setdefault(round_, one["state"]) == one["state"], (history.name, one)
            last = one is history.committed[-1]
            closing = round_ >= num_rounds if num_rounds else last and not one["weight"]
            counted = sorted(s for _, spans in one["contributions"] for s in numbers(spans))
            refused = set(numbers(one["quarantine"]))
            assert refused <= set(lost), (history.name, one)
            expected = [] if closing else [s for s in range(BATCH) if s not in refused]
            assert counted == expected, (history.name, one)
            assert one["weight"] == len(expected), (history.name, one)
            assert one["far"] <= tolerance, (history.name, one)
            if not tolerance:
                mean = total(round_, expected) / len(expected) if expected else 0.0
                assert one["mean"] == mean, (history.name, one, mean)
                assert one["uniform"], (history.name, one)
    differing = {r: c for r, c in chains.items() if len(set(c.values())) > 1}
    assert not differing, differing


def numbers(spans: Sequence[Sequence[int]]) -> list[int]:
    return [n for start, stop in spans for n in range(start, stop)]


class SmallState:
    """A training state that fits into one message: the sum of all means so far."""

    def __init__(self) -> None:
        self.value = 0.0
        self.send: Callable[..., None] = lambda *_: None
        self.loaded: Callable[..., None] = lambda *_: None
        self._lock = threading.Lock()
        self._due: list[tuple[m.Snapshot, object]] = []
        self._came: dict[int, float] = {}

    # -- what the engine calls, under its lock
    def give(self, head, to) -> None:
        self._due.append((head, to))

    def arrived(self, sender, head, buffers) -> None:
        self._came[head.applied] = torch.frombuffer(
            bytearray(buffers[0]), dtype=torch.float64
        ).item()
        self.loaded(sender, head)

    # -- the user's thread, once it has stepped
    def take(self, head) -> None:
        self.value = self._came.pop(head.applied)

    def drop(self, reason) -> None:
        self.value = 0.0

    def serve(self, applied: int) -> None:
        due = [(head, to) for head, to in self._due if head.applied <= applied]
        self._due = [(head, to) for head, to in self._due if head.applied > applied]
        for head, to in due:
            assert head.applied == applied, (head, applied)
            value = torch.tensor([self.value], dtype=torch.float64)
            if head.place:
                continue  # the first donor's piece is all of it
            self.send(head, to, [bytes_of(value)])


class Taker:
    """One peer's user: computes tasks, applies what is committed, and says all of it."""

    def __init__(
        self,
        link,
        mail: Mail,
        *,
        say: Callable[[dict], None],
        num_rounds: int | None,
        sizes: Sequence[tuple[str, int]] = SIZES,
        wire: str = "fp32",
        brings: bool = True,
        expect: int = 1,
        buckets: bool = False,
        spoil: tuple[int, int] | None = None,
        before_task: Callable[[Task], None] = lambda task: None,
        after_commit: Callable[[int], None] = lambda round_: None,
    ) -> None:
        """`expect`: in round 0 wait for that many peers, in round 1 until they are active.
        `brings`: starts from a state of its own. `spoil`: (round, sample) that gives NaN."""
        self.link, self.say, self.expect, self.buckets = link, say, expect, buckets
        self.pattern = tensors_like(sizes)
        self.state = SmallState()
        self.rounds = Rounds(
            link,
            self.pattern,
            num_samples=lambda r: BATCH,
            num_rounds=num_rounds,
            wire=wire,
            state=self.state,
            mail=mail,
        )
        self.state.send = self.rounds.send_snapshot
        self.state.loaded = self.rounds.snapshot_arrived
        self.num_rounds, self.brings, self.spoil = num_rounds, brings, spoil
        self.before_task, self.after_commit = before_task, after_commit
        self.grads = [tensor.clone() for tensor in self.pattern]
        self.spare = [tensor.clone() for tensor in self.pattern]
        self.taken_round = -1
        self.last: Stopped | None = None

    def run(self) -> Stopped:
        """Until the engine stops; what ends it is said and returned."""
        self.rounds.start()
        if self.brings:
            self.rounds.offer_state(0, b"")
        while True:
            outcome = self.rounds.next(4 * PATIENCE_S)
            match outcome:
                case Task():
                    self._compute(outcome)
                case Committed():
                    self._apply(outcome)
                case Stopped():
                    self.last = outcome
                    error = type(outcome.error).__name__ if outcome.error else None
                    reason = outcome.reason.value if outcome.reason else None
                    self.say({"stopped": reason, "error": error, "text": outcome.text})
                    return outcome
                case i.TakeState():
                    self.state.take(outcome.snapshot)
                case i.DropState():
                    self.state.drop(outcome.reason)
                case i.Retry():
                    self.say({"retry": outcome.round, "refused": outcome.refused.spans})
                case i.Settled():
                    self.say(
                        {
                            "settled": outcome.stands,
                            "target": outcome.target,
                            "filled": outcome.filled,
                        }
                    )
                case i.Generation():
                    self.say({"generation": outcome.applied})
                case i.Stable():
                    self.say({"stable": outcome.applied})

    def _compute(self, task: Task) -> None:
        self.say({"task": task.round, "ranges": task.ranges.spans})
        self._wait_for_the_others(task.round)
        self.before_task(task)
        first, self.taken_round = task.round != self.taken_round, task.round
        # Those of the first pass are lent until the round is committed.
        tensors = self.grads if first else self.spare
        scale = total(task.round, task.ranges)
        for tensor, pattern in zip(tensors, self.pattern, strict=True):
            torch.mul(pattern, scale, out=tensor)
        if self.spoil and self.spoil[0] == task.round and self.spoil[1] in task.ranges:
            tensors[0][123] = float("nan")
        if not self.buckets:
            self.rounds.contribute(task, tensors, weight=float(len(task.ranges)))
            return
        opened = self.rounds.open_pass(task, tensors, weight=float(len(task.ranges)))
        for index in reversed(range(len(tensors))):
            opened.ready(index)
        opened.done()

    def _wait_for_the_others(self, round_: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while round_ < 2:
            view = self.rounds.view
            states = (PeerState.ACTIVE,) if round_ else ()
            if view is not None and len(view.peers(*states)) >= self.expect:
                return
            assert time.monotonic() < deadline, f"{self.expect} peers should meet: {view}"
            time.sleep(0.002)  # a view is no outcome, so there is no event

    def _apply(self, committed: Committed) -> None:
        result = [torch.full_like(tensor, 77) for tensor in self.pattern]
        committed.result.read_into(result)
        committed.result.close()
        mean = float(result[0].view(-1)[0])
        uniform = all(
            torch.equal(tensor, pattern * mean)
            for tensor, pattern in zip(result, self.pattern, strict=True)
        )
        self.state.value += mean
        round_ = committed.round
        counted = [n for share in committed.sums[0].contributions for n in share.ranges]
        true = total(round_, counted) / committed.weight if committed.weight else 0.0
        far = max(
            float((tensor - pattern * true).abs().max())
            for tensor, pattern in zip(result, self.pattern, strict=True)
            if tensor.numel()
        )
        self.say(
            {
                "committed": round_,
                "chain": committed.chain.hex(),
                "mean": mean,
                "uniform": uniform,
                "far": far,
                "weight": committed.weight,
                "contributions": shares_of(committed),
                "quarantine": quarantine_of(committed).spans,
                "member": committed.member,
                "state": self.state.value,
                "members": len(self.rounds.members),
            }
        )
        same = {head.contributions for head in committed.sums}
        assert len(same) == 1, "all parts of a round list the same contributions"
        self.after_commit(round_)
        self.state.serve(round_ + 1)


def shares_of(committed: Committed) -> list:
    return [(share.peer, share.ranges.spans) for share in committed.sums[0].contributions]


def quarantine_of(committed: Committed) -> Ranges:
    return committed.record.quarantine if committed.record else EMPTY


class Each(tuple):
    """An option that is another one for each peer."""


class Crowd:
    """Peers as threads of this process, each with a link of its own."""

    def __init__(self, url: str, run: str, *, terms: Terms = STEADY) -> None:
        self.url, self.run, self.terms = url, run, terms
        self.takers: dict[str, Taker] = {}
        self.histories: dict[str, History] = {}
        self._threads: dict[str, threading.Thread] = {}
        self._failures: list[BaseException] = []
        self._said = threading.Condition()
        self.lines: list[tuple[str, dict]] = []

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *details) -> None:
        for taker in self.takers.values():
            taker.rounds.close()
        for taker in self.takers.values():
            taker.link.close()
        for thread in self._threads.values():
            thread.join(PATIENCE_S)

    def add(
        self,
        name: str,
        *,
        url: str | None = None,
        wrap: Callable[[Link], Link] = lambda link: link,
        **options,
    ) -> Taker:
        """Open a peer's link; `start` lets it take part."""
        mail = Mail()
        link = open_link(
            url or self.url,
            run=self.run,
            name=name,
            settings=LinkSettings(terms=self.terms, connect_s=PATIENCE_S),
            place=mail,
        )
        history = self.histories[name] = History(name, link.me.incarnation)

        def say(said: dict) -> None:
            with self._said:
                history.take(said)
                self.lines.append((name, said))
                self._said.notify_all()

        taker = self.takers[name] = Taker(wrap(link), mail, say=say, **options)
        return taker

    def start(self, *names: str) -> None:
        """These (all) begin, once their links are open: none misses what another fans out."""
        for name in names or tuple(self.takers):
            thread = threading.Thread(target=self._run, args=(name,), name=f"user {name}")
            self._threads[name] = thread
            thread.start()

    def _run(self, name: str) -> None:
        try:
            self.takers[name].run()
        except BaseException as error:  # noqa: BLE001 - the test raises it
            with self._said:
                self._failures.append(error)
                self._said.notify_all()

    def begin(self, num: int, **options) -> None:
        """That many peers, p0 the founder, all of them members from round 2 on."""
        for k in range(num):
            mine = {
                key: each[k] if isinstance(each, Each) else each for key, each in options.items()
            }
            self.add(f"p{k}", expect=num, **mine)
        self.start()

    def until(self, name: str, wanted: Callable[[dict], bool]) -> dict:
        """Wait until that peer has said something like this."""

        def find() -> dict | None:
            return next((s for n, s in self.lines if n == name and wanted(s)), None)

        with self._said:
            self._said.wait_for(lambda: find() or self._failures, PATIENCE_S)
            self._check()
            found = find()
        assert found is not None, f"{name} has not said so: {self.lines[-20:]}"
        return found

    def finish(self, *names: str) -> None:
        """Wait until these (all) have stopped."""
        for name in names or tuple(self._threads):
            self._threads[name].join(PATIENCE_S)
            self._check()
            assert not self._threads[name].is_alive(), f"{name} goes on: {self.lines[-20:]}"

    def _check(self) -> None:
        if self._failures:
            raise self._failures[0]

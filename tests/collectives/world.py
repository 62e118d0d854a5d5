"""A simulated run: real round machines, real messages, and an adversary with dice.

`World(seed).run()` drives one random schedule: delays, deaths with partial fan-outs, pauses,
exclusions, closed connections, joins, leaves, lost queues, hub restarts, poisoned samples. It
checks the invariants of docs/rounds.md at every step and raises Violation, naming the invariant.
A schedule is a pure function of its seed, so a failing one can be looked at with `trace=True`.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from manyhands.collectives import events as e
from manyhands.collectives import instructions as i
from manyhands.collectives import messages as m
from manyhands.collectives.machine import RoundMachine
from manyhands.collectives.ranges import EMPTY, Ranges
from manyhands.collectives.refusal import OnRefusal
from manyhands.collectives.shares import ONE_CLASS, Resyncs
from manyhands.collectives.standing import Course, Mode
from manyhands.core.peers import NO_VIEW, PeerId, PeerState, View, ViewNumber
from manyhands.links import arbiter
from manyhands.links.messages import Gone, Leaving, Ready, Resign
from tests.collectives.world_waits import check_waits

SAMPLES = 6  # of a round
HUB = 0  # its place in the channels; no peer has this number
SEED_CHAIN = b"the state that the run starts from"
SEED_STATE = e.StateOffered(0, SEED_CHAIN)
GAP = e.GapSeen()
DEAD = (None, i.StopReason.EXCLUDED)  # how peers have stopped that the others take for dead


class Violation(Exception):
    """An invariant does not hold; the text starts with its number.

    Without one it is the contract with the data plane that was broken (see `instructions`).
    """


class Round(NamedTuple):
    """A committed round, as one peer has it."""

    chain: bytes  # after it
    empty: bool  # it had no samples
    closing: bool  # what follows has none
    generation: ViewNumber


NO_ROUND = Round(b"", False, False, NO_VIEW)


@dataclass
class Peer:
    """A peer's machine, and what its runtime would hold."""

    id: PeerId
    machine: RoundMachine
    todo: list[Ranges] = field(default_factory=list)  # passes the user has still to make
    chores: list[e.Event] = field(default_factory=list)  # sums and beats under way
    parts: set[tuple] = field(default_factory=set)  # values filed: (round, attempt, k, sender)
    sums: dict[tuple, bytes] = field(default_factory=dict)  # (round, attempt, k) -> digest
    kept: dict[tuple, bytes] = field(default_factory=dict)
    pieces: dict[tuple, set[int]] = field(default_factory=dict)  # of states: places of donors
    bank: Ranges = EMPTY
    concluded: tuple | None = None  # (round, attempt) that it was alone in
    history: dict[int, Round] = field(default_factory=dict)
    offered: int = -1  # rounds of the state that it came with
    gaps_seen: int = 0
    lease_until: int = -1  # a closed connection does not end the lease at once
    commits_outside: int = 0
    takeovers_at_exit: int = -1
    stopped: i.StopReason | None = None

    @property
    def number(self) -> int:
        return self.id.incarnation


class World:
    """One schedule. Attributes may be changed before `run` to direct it."""

    seed_state = SEED_STATE  # of those who are there when nobody has a state of the run yet
    form = "tensors"  # of those who join
    hub = HUB
    lengths = (3, 4, 5)  # of a run, in rounds
    on_refusal = OnRefusal.SKIP
    look_every = 64  # steps, for what takes long to look for

    def __init__(self, seed, *, machine=RoundMachine, unordered=False, trace=False):
        self.rng = rng = random.Random(seed)
        self.make, self.unordered, self.trace = machine, unordered, trace
        self.count = Counter()
        rough = seed % 5 == 4  # every fifth schedule is a storm
        self.num_rounds = rng.choice(self.lengths)
        self.num_parts = rng.choice((2, 3))
        self.poison = {(r, s) for r in range(9) for s in range(SAMPLES) if rng.random() < 0.02}
        self.fenced = rng.random() < 0.5  # does the hub drop what excluded peers send?
        self.knows_gaps = rng.random() < 0.7  # does it ignore a Ready that has not seen a Gap?
        self.lazy = rng.random() < 0.3  # do sums take time?
        self.slowness = rng.choice((0, 0.7, 0.9))
        self.channels, self.ready, self.slow = {}, [], {}
        self.peers: dict[int, Peer] = {}
        self.dead, self.paused, self.offline, self.suspected = set(), set(), set(), []
        self.gaps = Counter()
        self.stable, self.verdicts, self.places, self.claims = {}, {}, {}, {}
        self.lost = {}  # cut -> samples that the run stops for
        self.closing = {}  # (round, attempt) -> whether its lead thinks that it has no samples
        self.donors = {}  # (applied, chain) -> who sends pieces of that state
        self.left, self.takeovers = [], set()
        self.steps = self.joined = 0
        self.view = arbiter.first_view(1)
        for _ in range(rng.choice((3, 4, 5) if rough else (1, 2, 2, 3, 3, 4))):
            self.join()
        kinds = ("kill", "kill", "pause", "suspect", "offline", "join", "join", "rejoin")
        kinds += ("leave", "leave", "restart", "lost queue")
        span = rng.choice((80, 200, 400))
        number = rng.choice((7, 9, 12) if rough else (0, 1, 2, 3, 4, 5, 6))
        self.faults = sorted((rng.randrange(span), rng.choice(kinds)) for _ in range(number))

    # -- the peers' side ---------------------------------------------------------------------

    def join(self, state=None):
        """A new incarnation, with or without a state of its own."""
        self.joined += 1
        number = self.joined * 7919 % 10007  # not in order of joining, as drawn at random
        peer = PeerId(f"peer{self.joined}", number)
        course = Course(
            num_parts=self.num_parts,
            num_samples=self.num_samples,
            num_rounds=self.num_rounds,
            form=self.form,
            on_refusal=self.on_refusal,
            resyncs=Resyncs(self.classes, every=2),
        )
        self.peers[number] = Peer(peer, self.make(number, course))
        self.show(arbiter.joined(self.view, peer))
        self.tell(number, e.SpeedMeasured(self.rng.randint(1, 5)))
        if self.view.cut == NO_VIEW:  # a new run: whoever is its founder starts from this
            state = self.seed_state
        if state is not None:
            self.peers[number].offered = state.applied
            self.tell(number, state)
            self.remember(self.peers[number], state)
        return number

    def num_samples(self, number):
        return SAMPLES

    def classes(self, reports):
        return ONE_CLASS

    def tell(self, number, event):
        """Hand an event to a peer's machine and carry out what it says."""
        peer = self.peers[number]
        queue = deque([event])
        while queue and peer.stopped is None:
            event = queue.popleft()
            if self.trace:
                print(f"{self.steps:5} {peer.id.name}: {event}")
            for instruction in peer.machine.handle(event, lease=self.lease(peer)):
                if self.trace:
                    print(f"      {peer.id.name}:   {instruction}")
                self.carry_out(peer, instruction, queue)
        self.check_memory(peer)

    def lease(self, peer):
        return self.view.member(peer.number) is not None or self.steps < peer.lease_until

    def carry_out(self, peer, instruction, queue):
        match instruction:
            case i.Send():
                self.send(peer, instruction.to, instruction.message, queue)
            case i.AddUp():
                self.add_up(peer, instruction.sum, queue)
            case i.Conclude():
                self.conclude(peer, instruction, queue)
            case i.Compute():
                self.compute(peer, instruction)
            case i.Begin():
                self.check_place(peer, instruction)
            case i.Commit():
                self.replay(peer)
                given = tuple(share.peer for share in instruction.sums[0].contributions)
                donors = tuple(p for p in given if p in instruction.record.anchors)
                self.donors[instruction.round + 1, instruction.chain] = donors or given
                self.commit(peer, instruction)
            case i.Stable():
                peer.kept.clear()
                self.check_stable(peer, instruction)
            case i.ConfirmLease():
                peer.chores.append(e.LeaseConfirmed(instruction.round, instruction.attempt))
            case i.Tell():
                self.push(peer.number, HUB, self.with_gaps(peer, instruction.word))
            case i.Discard():
                self.discard(peer, instruction.arrival)
            case i.DropParts(round_, attempt):
                peer.parts = {key for key in peer.parts if key[:2] != (round_, attempt)}
            case i.DropSums(round_, attempt):
                peer.sums = {k: v for k, v in peer.sums.items() if k[:2] != (round_, attempt)}
            case i.DropBank():
                peer.bank = EMPTY
                peer.todo.clear()
                self.count["banks dropped"] += 1
            case i.Settled():
                self.check_verdict(peer, instruction)
            case i.Generation():
                self.take_over(instruction)
            case i.Retry():
                self.count["retries"] += 1
            case i.Lost():
                self.check_lost(peer, instruction)
            case i.TakeState():
                self.count["snapshots"] += 1
                self.replay(peer)
                self.remember(peer, instruction.snapshot)
            case i.DropState():
                peer.parts.clear()
                peer.sums.clear()
                peer.kept.clear()
                peer.history.clear()
                self.count["started over"] += 1
            case i.Stop():
                self.stop(peer, instruction)

    def replay(self, peer):
        """A newcomer's user takes its time."""
        if peer.machine.behind:
            peer.chores.append(e.CaughtUp())

    def remember(self, peer, state):
        """What a peer knows of the run with a state that it did not compute itself."""
        if state.record is not None:
            record = state.record
            made = Round(state.chain, False, record.closing, record.generation)
            peer.history[state.applied - 1] = made

    def with_gaps(self, peer, word):
        return Ready(peer.gaps_seen) if isinstance(word, Ready) else word

    def send(self, peer, to, message, queue):
        """Every message goes through its bytes; what stands for its values goes beside them."""
        key, values = None, None
        match message:
            case m.Part():
                self.require(
                    message.ranges == peer.bank, "I3 a Part has other samples than it says"
                )
                # Only the owner of the last part can see that the values are poisoned.
                values = message.k == self.num_parts - 1 and self.poisoned(peer, message)
                message = msgspec.structs.replace(message, weight=float(len(message.ranges)))
            case m.Sum():
                key = (message.round, message.attempt, message.k)
            case m.Fill():
                key = (message.sum.round, message.sum.attempt, message.sum.k)
        if key is not None:
            values = peer.sums.get(key) or peer.kept.get(key)
            self.require(values is not None, f"values to send were dropped: {key}")
        data = m.encode(message)
        if to == peer.number:
            queue.append(self.arrival(peer, peer.number, data, values))
        elif peer.number not in self.offline and not self.is_mute(peer):
            others = [q.peer.incarnation for q in self.view.roster if q.peer != peer.id]
            for other in others if to is None else (to,):
                self.push(peer.number, other, (data, values))

    def is_mute(self, peer):
        return self.fenced and self.view.member(peer.number) is None

    def poisoned(self, peer, part):
        return any((part.round, sample) in self.poison for sample in part.ranges)

    def arrival(self, peer, sender, data, values):
        """The event that a delivery is to the runtime, with its values filed."""
        match m.decode(data):
            case m.Part() as part:
                self.check_part(peer, part)
                peer.parts.add((part.round, part.attempt, part.k, sender))
                return e.PartArrived(sender, part, values)
            case m.Sum() as result:
                self.check_cut(peer, result.attempt)
                self.file(peer, result, values)
                return e.SumArrived(sender, result, values)
            case m.Fill() as fill:
                self.file(peer, fill.sum, values)
                return e.FillArrived(sender, fill, values)
            case m.Status() as status:
                return e.StatusArrived(sender, status)
            case m.Ask(number):
                return e.AskArrived(sender, number)
            case m.Snapshot() as snapshot:
                key = (snapshot.number, snapshot.applied, snapshot.chain)
                pieces = peer.pieces.setdefault(key, set())
                pieces.add(snapshot.place)
                if len(pieces) < snapshot.num_donors:
                    return None
                del peer.pieces[key]
                return e.SnapshotArrived(sender, snapshot)
            case m.Want(round_):
                return e.WantArrived(sender, round_)
            case m.RoundGone(round_):
                return e.RoundGoneArrived(sender, round_)

    def file(self, peer, head, digest):
        key = (head.round, head.attempt, head.k)
        if peer.sums.setdefault(key, digest) != digest:
            raise Violation(f"I2 two results for {key}")

    def discard(self, peer, arrival):
        match arrival:
            case e.PartArrived(sender, part):
                key = (part.round, part.attempt, part.k, sender)
                if not peer.machine.book.contributions(key[:2], part.k).get(sender):
                    peer.parts.discard(key)
            case e.SumArrived(_, head) | e.Summed(head) | e.FillArrived(_, m.Fill(_, head)):
                key = (head.round, head.attempt, head.k)
                if head.k not in peer.machine.book.results(key[:2]):
                    peer.sums.pop(key, None)

    def add_up(self, peer, head, queue):
        for share in head.contributions:
            key = (head.round, head.attempt, head.k, share.peer)
            self.require(key in peer.parts, f"values to add up were dropped: {key}")
        head = msgspec.structs.replace(
            head, weight=float(sum(len(s.ranges) for s in head.contributions))
        )
        self.closing[head.round, head.attempt] = peer.machine.record.closing
        digest = hashlib.blake2b(m.encode(head), digest_size=16).digest()
        event = e.Summed(head, digest)
        self.file(peer, head, digest)
        (peer.chores if self.lazy else queue).append(event)

    def conclude(self, peer, alone, queue):
        """The values of such a round are nowhere but at this peer, and must never be asked for."""
        self.require(alone.part.ranges == peer.bank, "I3 a Part has other samples than it says")
        weight = float(len(alone.part.ranges))
        head = msgspec.structs.replace(alone.sum, weight=weight)
        self.closing[alone.part.round, alone.part.attempt] = peer.machine.record.closing
        digest = hashlib.blake2b(m.encode(head), digest_size=16).digest()
        peer.concluded = (alone.part.round, alone.part.attempt)
        self.count["alone"] += 1
        (peer.chores if self.lazy else queue).append(e.Concluded(head, digest))

    def compute(self, peer, instruction):
        self.require(bool(instruction.ranges), "an empty Compute")
        again = instruction.ranges & Ranges.union([peer.bank, *peer.todo])
        self.require(not again, f"samples {again} are computed twice")
        if self.rng.random() < 0.5:  # several passes
            cut = self.rng.randrange(len(instruction.ranges) + 1)
            pieces = instruction.ranges.pieces((cut, SAMPLES))
            peer.todo += [piece for piece in pieces if piece]
        else:
            peer.todo.append(instruction.ranges)

    def compute_pass(self, peer):
        ranges = peer.todo.pop(0)
        peer.bank |= ranges
        round_ = peer.machine.applied
        poisoned = any((round_, sample) in self.poison for sample in peer.bank)
        fit = not poisoned and (self.steps + round_) % 3 > 0  # nothing is drawn for it
        self.tell(peer.number, e.Computed(round_, ranges, fit))

    def stop(self, peer, instruction):
        peer.stopped = instruction.reason
        if instruction.reason is i.StopReason.SENT_BACK and self.view.member(peer.number):
            self.require(not peer.machine.member, f"I5 {peer.id} was sent back, a member")
        self.count[f"stopped: {instruction.reason.value}"] += 1
        if instruction.reason is i.StopReason.FINISHED:
            if self.view.member(peer.number) is not None:
                peer.takeovers_at_exit = len(self.takeovers)
        elif instruction.reason is i.StopReason.LEFT and peer.machine.based:
            machine = peer.machine
            self.left.append((machine.generation, machine.applied, machine.chain))

    # -- invariants --------------------------------------------------------------------------

    def require(self, condition, text):
        if not condition:
            raise Violation(text)

    def in_run(self):
        """The peers that the arbiter counts in and that are alive."""
        numbers = (line.peer.incarnation for line in self.view.roster)
        return [self.peers[n] for n in numbers if n not in self.dead]

    def commit(self, peer, done):
        round_, heads = done.round, done.sums
        closing = peer.history.get(round_ - 1, NO_ROUND).closing
        if done.alone:
            self.require(peer.concluded == (round_, done.attempt), "nothing was concluded")
            self.require(peer.bank == heads[0].contributions[0].ranges, "the bank was dropped")
        for k in range(0 if done.alone else self.num_parts):
            key = (round_, done.attempt, k)
            self.require(key in peer.sums, f"values to commit were dropped: {key}")
            peer.kept[key] = peer.sums[key]
        peer.kept = {k: v for k, v in peer.kept.items() if k[0] == round_}
        peer.sums = {k: v for k, v in peer.sums.items() if k[0] > round_}
        peer.parts = {key for key in peer.parts if key[0] > round_}
        peer.bank = EMPTY
        peer.todo.clear()
        outside = self.view.member(peer.number) is None
        peer.commits_outside += outside
        self.require(peer.commits_outside < 2, "I8 an excluded peer went on committing")
        whole = self.whole(peer, round_, done)
        made = Round(done.chain, not whole, done.record.closing, done.record.generation)
        if not outside:
            self.check_history(peer, round_, made)
        self.check_samples(round_, heads, done.record, whole)
        peer.history[round_] = made
        self.count["commits"] += 1
        self.count["refused samples"] += bool(done.record.quarantine)
        everybody_leaves = done.record.closing and not closing and round_ + 1 < self.num_rounds
        self.count["all leaving"] += everybody_leaves
        if self.rng.random() < 0.2:
            peer.machine.handle(e.SpeedMeasured(self.rng.randint(1, 5)), lease=True)

    def whole(self, peer, round_, done):
        """What a round has to cover: nothing, in one that follows a closing record.

        After the state that a peer came with, those who go on from it say whether it is one.
        """
        closing = peer.history.get(round_ - 1, NO_ROUND).closing
        if round_ == peer.offered:
            closing = self.closing[round_, done.attempt]
        return EMPTY if closing else Ranges.whole(SAMPLES)

    def check_history(self, peer, round_, made):
        for other in self.in_run():
            if not other.machine.trusted:
                continue  # it knows itself that its state may be a wrong one
            theirs = other.history.get(round_, made)
            if theirs.generation == made.generation and theirs.chain != made.chain:
                raise Violation(f"I1 {peer.id} and {other.id} differ after round {round_}")

    def check_apart(self, peer, round_):
        """Except leavers: a record may have left them out of rounds they do not know of yet."""
        for other in self.in_run():
            machine = other.machine
            if self.view.member(other.number).state is PeerState.LEAVING:
                continue
            if machine.member and machine.mode is Mode.RUNNING and other.stopped is None:
                apart = abs(machine.applied - round_)
                self.require(apart <= 1, f"I4 {peer.id}, {other.id} are {apart} rounds apart")

    def check_samples(self, round_, heads, record, whole):
        first = heads[0].contributions
        for head in heads:
            self.require(head.contributions == first, "I2 parts have different contributions")
            self.require(not head.refused, "I2 a refused contribution was committed")
        counted = Ranges.union(share.ranges for share in first)
        self.require(len(counted) == sum(len(s.ranges) for s in first), "I3 a sample counts twice")
        self.require(not counted & record.quarantine, "I3 a sample is counted and refused")
        self.require(counted | record.quarantine == whole, f"I3 round {round_} is not covered")
        for sample in counted:
            self.require((round_, sample) not in self.poison, "I3 a poisoned sample is counted")

    def check_verdict(self, peer, settled):
        first = self.verdicts.setdefault(settled.cut, settled)
        self.require(first == settled, f"I5 two verdicts for cut {settled.cut}")
        if first is settled:
            self.count["stood" if settled.stands else "retried"] += 1
            self.count["filled in"] += settled.filled
            self.count["sent back"] += len(settled.sent_back)

    def check_place(self, peer, begin):
        key = (begin.round, begin.attempt)
        if self.view.member(peer.number) is None or peer.number not in begin.members:
            return  # outside the run; or a follower, which need not have heard of the last cut
        self.require(begin.attempt.cut not in self.lost, "I14 a peer goes on where others stop")
        if self.places.setdefault(key, begin.members) != begin.members:
            raise Violation(f"I5 two sets of members for round {begin.round}, {begin.attempt}")
        self.check_apart(peer, begin.round)
        claims = self.claims.setdefault(key, {})
        for other, theirs in claims.items():
            both = theirs & begin.claims
            self.require(not both or other == peer.number, f"I6 samples {both} are claimed twice")
        claims[peer.number] = begin.claims

    def check_lost(self, peer, lost):
        cut, found = peer.machine.cut, (lost.round, lost.ranges)
        self.require(self.lost.setdefault(cut, found) == found, "I14 peers stop for other samples")
        here = {p.number for p in self.alive()}
        died = [p for n, p in self.peers.items() if n not in here and p.stopped in DEAD]
        self.require(len(died) >= m.MOST_DEATHS, "I14 a run stops for deaths that were none")
        begun = any(attempt.cut == cut for _, attempt in self.places)
        self.require(not begun, "I14 a peer stops where others go on")

    def check_stable(self, peer, stable):
        key = (peer.machine.generation, stable.applied)
        if self.stable.setdefault(key, stable.chain) != stable.chain:
            outside = self.view.member(peer.number) is None
            raise Violation(f"{'I8' if outside else 'I7'} two stable states after {key[1]} rounds")

    def check_cut(self, peer, attempt):
        machine = peer.machine
        if machine.active and not machine.stopped and attempt.cut > machine.cut:
            raise Violation("I11 data of a cut not yet seen")

    def check_part(self, peer, part):
        self.check_cut(peer, part.attempt)
        machine = peer.machine
        if part.attempt.cut < machine.cut:
            return  # of an attempt that is void
        if machine.member and machine.mode is Mode.RUNNING and not machine.stopped:
            ahead = part.round - machine.applied
            self.require(ahead <= 1, f"I11 a Part {ahead} rounds ahead")
            if part.attempt.cut == machine.tag.cut and ahead == 0:
                ahead = part.attempt.attempt - machine.tag.attempt
                self.require(ahead <= 1, f"I11 a Part {ahead} attempts ahead")

    def check_memory(self, peer):
        """I13. Not yet for what is being added up: the machine hears of that when it is done."""
        machine = peer.machine
        if not machine.member or machine.mode is not Mode.RUNNING or peer.stopped:
            return
        now, tag = (machine.applied, machine.tag), machine.tag
        for *key, k in peer.sums:
            void = tuple(key) != now and k in machine.book.results(tuple(key))
            self.require(not void, f"I13 a member holds a result of {key}")
        again, following = m.Tag(tag.cut, tag.attempt + 1), m.Tag(tag.cut, 0)
        needed = (now, (machine.applied, again), (machine.applied + 1, following))
        for *key, k, sender in peer.parts:
            void = tuple(key) not in needed and sender in machine.book.contributions(tuple(key), k)
            self.require(not void, f"I13 an owner holds a Part of {key}")

    def take_over(self, generation):
        """No member is left: those who followed go on, and what was stable after that is lost."""
        if generation.cut not in self.takeovers:
            self.takeovers.add(generation.cut)
            self.count["take-overs"] += 1

    def check_ends(self):
        """I9 whoever has finished or left since the last take-over is of one history."""
        ends = [p for p in self.peers.values() if p.takeovers_at_exit == len(self.takeovers)]
        for peer in ends:
            for other in ends:
                for round_, theirs in other.history.items():
                    same = peer.history.get(round_, theirs).chain == theirs.chain
                    self.require(
                        same or theirs.empty, f"I9 two final states, from round {round_} on"
                    )
            for generation, applied, chain in self.left:
                mine = peer.history.get(applied - 1)
                if mine is not None and mine.generation == generation and not mine.empty:
                    self.require(mine.chain == chain, "I9 a peer that left is of another history")
        self.count["finished" if ends else "lost"] += 1
        self.count["finished by newcomers"] += any(0 not in p.history for p in ends)

    # -- channels ----------------------------------------------------------------------------

    def push(self, source, target, item):
        channel = self.channels.get((source, target))
        if channel is None:
            channel = self.channels[source, target] = deque()
            self.slow[source, target] = self.rng.random() < 0.3
        if not channel:
            self.ready.append((source, target))
        channel.append(item)

    def words(self, source, target):
        """What is on its way from one peer to another, without values."""
        channel = self.channels.get((source, target), ())
        return [m.decode(item[0]) for item in channel if isinstance(item, tuple)]

    def lose(self, keys, *, tell=True):
        """Each of these channels keeps a random beginning of what is under way.

        A watching peer finds a Gap in that place, unless it was never sent.
        """
        for key in keys:
            channel = self.channels[key]
            kept = self.rng.randint(0, len(channel))
            hole = len(channel) > kept
            lost = [channel.pop() for _ in range(len(channel) - kept)]
            channel.extend([GAP] * lost.count(GAP))  # those are the hub's own words
            line = self.view.member(key[1])
            if tell and hole and HUB not in key and line and line.state is PeerState.WATCHING:
                self.gaps[key[1]] += 1
                channel.append(GAP)

    # -- the hub -----------------------------------------------------------------------------

    def show(self, view):
        """Publish a view to everybody in it and to those it removes."""
        if view is self.view:
            return
        self.count["cuts"] += view.cut == view.number
        removed = set(self.view.peers()) - set(view.peers())
        self.view = view
        for peer in (*view.peers(), *sorted(removed)):
            self.push(HUB, peer.incarnation, view)
        for peer in removed & {self.peers[n].id for n in self.offline}:
            # Its connection is closed: nothing that it says now, or is told, arrives any more.
            for key in [k for k in self.channels if peer.incarnation in k and HUB not in k]:
                gaps = self.channels[key].count(GAP)  # of which the hub tells, whoever goes
                self.channels[key].clear()
                self.channels[key].extend([GAP] * gaps)

    def hear(self, number, word):
        peer, view = self.peers[number].id, self.view
        if view.member(number) is None:
            return
        match word:
            case Ready(gaps):
                if gaps == self.gaps[number] or not self.knows_gaps:
                    self.show(arbiter.ready(view, peer))
            case Leaving():
                self.show(arbiter.leaving(view, peer))
            case Gone(cut):
                after = arbiter.gone(view, peer, cut)
                self.count["quiet leaves"] += after.cut == view.cut
                self.show(after)
            case Resign(finished):
                self.show(arbiter.resigned(view, peer, finished=finished))

    # -- faults ------------------------------------------------------------------------------

    def alive(self):
        return [p for p in self.in_run() if p.stopped is None]

    def fault(self, kind):
        self.count[kind] += 1
        if kind in ("join", "rejoin"):
            self.join(self.old_state() if kind == "rejoin" else None)
            return
        alive = self.alive()
        if not alive:
            return
        if kind == "restart":
            self.restart_hub()
            return
        peer = self.rng.choice(alive)
        number = peer.number
        match kind:
            case "kill":
                self.kill(number)
            case "pause":
                self.paused.add(number)
                if self.rng.random() < 0.6:
                    self.suspected.append(number)
            case "suspect":
                self.suspected.append(number)
            case "offline":
                self.offline.add(number)
                self.suspected.append(number)
                peer.lease_until = self.steps + self.rng.choice((100, 300))
            case "leave":
                self.tell(number, e.LeaveAsked())
            case "lost queue":
                # Views come again when a connection does; an active peer's are among the losses.
                self.lose([key for key in self.channels if key[1] == number and HUB not in key])
                self.show(arbiter.shaken(self.view, [peer.id]))

    def kill(self, number):
        self.dead.add(number)
        self.lose([key for key in self.channels if key[0] == number], tell=False)
        self.suspected.append(number)

    def old_state(self):
        """The state of some peer that had to go: it may be one that a member confirms."""
        states = [p.machine for p in self.peers.values() if p.stopped and p.machine.based]
        if not states:
            return None
        machine = self.rng.choice(states)
        return e.StateOffered(machine.applied, machine.chain, machine.record)

    def restart_hub(self):
        """Frames under way are gone, words to the hub too; whoever is there comes back."""
        self.lose(list(self.channels))
        back = [line for line in self.view.roster if self.comes_back(line.peer.incarnation)]
        self.show(arbiter.returned(self.view, self.view.number.era + 1, back))

    def comes_back(self, number):
        return number not in self.dead and self.peers[number].stopped is None

    # -- one schedule ------------------------------------------------------------------------

    def run(self, limit=8000):
        """Until the run is over. Raises Violation; returns what was counted."""
        while self.goes_on():
            self.steps += 1
            if self.steps > limit:
                raise Violation("I10 no end in sight")
            self.step()
        self.check_ends()
        return self.count

    def goes_on(self):
        """Somebody is active, or will be: one that has a state of the run's, or is the first."""
        if self.view.peers(PeerState.ACTIVE, PeerState.LEAVING) or self.view.founder:
            return True
        left = [] if self.view.over else [line.peer.incarnation for line in self.view.roster]
        machines = [self.peers[n].machine for n in left if self.comes_back(n)]
        first = self.peers[left[0]].machine if left and self.comes_back(left[0]) else None
        return any(m.trusted for m in machines) or (first is not None and first.based)

    def step(self):
        rng = self.rng
        while self.faults and self.faults[0][0] <= self.steps:
            self.fault(self.faults.pop(0)[1])
        if self.suspected and rng.random() < 0.04:
            self.exclude(self.suspected.pop(rng.randrange(len(self.suspected))))
        if self.paused and rng.random() < 0.03:
            self.paused.discard(rng.choice(sorted(self.paused)))
        if self.offline:
            self.reconnect()
        if self.steps % self.look_every == 0:
            check_waits(self)
        busy = [p for p in self.peers.values() if (p.todo or p.chores) and self.may_act(p)]
        pick = rng.randrange(len(self.ready) + len(busy)) if self.ready or busy else -1
        if pick >= len(self.ready):
            self.act(busy[pick - len(self.ready)])
        elif pick >= 0:
            self.deliver(pick)
        elif not self.suspected and not self.paused and not self.offline:
            if not self.faults:
                raise Violation(f"I10 a wait for nothing: {self.where()}")
            self.fault(self.faults.pop(0)[1])

    def where(self):
        return [
            f"{p.id.name} {p.machine.mode.value} {p.machine.applied} {p.machine.tag} "
            f"{[self.peers[n].id.name for n in p.machine.members]}"
            for p in self.alive()
        ]

    def exclude(self, number):
        if self.view.member(number) is not None:
            self.show(arbiter.removed(self.view, [self.peers[number].id]))

    def reconnect(self):
        """A closed connection is opened again once the lease is over: the peer is out."""
        for number in sorted(self.offline):
            peer = self.peers[number]
            if self.view.member(number) is None and self.steps >= peer.lease_until:
                self.offline.discard(number)

    def may_act(self, peer):
        number = peer.number
        return number not in self.dead and number not in self.paused and peer.stopped is None

    def act(self, peer):
        if peer.todo and (not peer.chores or self.rng.random() < 0.5):
            self.compute_pass(peer)
            return
        chore = peer.chores.pop(self.rng.randrange(len(peer.chores)))
        if isinstance(chore, e.LeaseConfirmed):
            if self.view.member(peer.number) is None:
                return  # no beat of its is answered any more
            if peer.number in self.offline:
                peer.chores.append(chore)
                return
        self.tell(peer.number, chore)

    def deliver(self, pick):
        source, target = key = self.ready[pick]
        channel = self.channels[key]
        if channel and (target in self.paused or target in self.offline or source in self.offline):
            return
        if self.slow[key] and self.rng.random() < self.slowness:
            return
        if self.unordered and len(channel) > 1 and HUB not in key:  # between peers, any order
            before = channel.index(GAP) if GAP in channel else len(channel)
            if before:  # but a Gap comes after what was sent before it
                chosen = self.rng.randrange(before)
                channel.appendleft(channel[chosen])
                del channel[chosen + 1]
        item = channel.popleft() if channel else None
        if not channel:
            self.ready[pick] = self.ready[-1]
            self.ready.pop()
        if item is None or target in self.dead:
            return
        if target == HUB:
            self.hear(source, item)
        elif self.peers[target].stopped is None:
            self.show_record(target, item)
            if self.peers[target].stopped is None:
                event = self.received(target, source, item)
                if event is not None:
                    self.tell(target, event)

    def show_record(self, target, item):
        record = m.record_of(m.decode(item[0])) if isinstance(item, tuple) else None
        if record is not None:
            self.tell(target, e.RecordSeen(record))

    def received(self, target, source, item):
        peer = self.peers[target]
        if isinstance(item, View):
            return e.ViewSeen(item)
        if item is GAP:
            peer.gaps_seen += 1
            return item
        return self.arrival(peer, source, *item)

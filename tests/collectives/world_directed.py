"""Schedules for what dice rarely bring about: worlds that wait for their moment, and strike."""

from __future__ import annotations

from collections import Counter

from manyhands.collectives import events as e
from manyhands.collectives import messages as m
from manyhands.collectives.instructions import StopReason
from manyhands.collectives.ranges import EMPTY, Ranges
from manyhands.collectives.refusal import OnRefusal
from manyhands.collectives.shares import ONE_CLASS, Classes
from manyhands.collectives.standing import Mode
from manyhands.core.peers import NO_VIEW, PeerState, ViewNumber
from manyhands.links import arbiter
from manyhands.links.messages import Gone
from tests.collectives.world import HUB, SAMPLES, SEED_CHAIN, World


class Directed(World):
    """Nothing but the faults named, at their steps."""

    script = ()

    def __init__(self, seed, **options):
        super().__init__(seed * 5, **options)  # no storms
        self.faults = sorted(self.script)
        self.fenced, self.poison = False, set()


class LostQueues(Directed):
    """Cut upon cut, with everybody alive."""

    script = tuple((step, "lost queue") for step in range(60, 300, 20))


class ComingAndGoing(Directed):
    """The lead hears late of those who leave."""

    script = ((1, "join"), (60, "leave"), (70, "join"), (90, "join"))


class Sniper(Directed):
    """The only member is excluded the moment that a follower could take over; it learns it late."""

    script = tuple((step, "snipe") for step in range(10, 400, 2))

    def fault(self, kind):
        members = [p for p in self.alive() if p.machine.member and p.machine.active]
        if len(members) == 1 and len(self.view.peers(PeerState.ACTIVE)) > 1:
            number = members[0].number
            self.exclude(number)
            self.slow[HUB, number], self.slowness = True, 0.98


class Liars(Directed):
    """Members fan out results of parts that are not theirs."""

    script = tuple((step, "lie") for step in range(20, 300, 10))

    def __init__(self, seed, **options):
        super().__init__(seed, **options)
        self.lazy = False  # or a result would lie beside the lie while it is being made

    def fault(self, kind):
        liars = [p for p in self.alive() if p.machine.member and len(p.machine.members) > 1]
        if not liars:
            return
        liar = self.rng.choice(liars)
        machine, k = liar.machine, self.rng.randrange(1, self.num_parts)
        if machine.members[k % len(machine.members)] == liar.number:
            return
        shares = tuple(m.Share(peer, EMPTY) for peer in machine.members)
        lie = m.Sum(machine.applied, machine.tag, k, shares)
        for other in self.alive():
            if other is not liar:
                self.push(liar.number, other.number, (m.encode(lie), b"a lie"))

    def file(self, peer, head, digest):
        peer.sums.setdefault((head.round, head.attempt, head.k), digest)  # the first one stays


class Hurriers(Directed):
    """Members send Parts of rounds that nobody can have come to."""

    script = tuple((step, "hurry") for step in range(20, 300, 10))

    def fault(self, kind):
        members = [p for p in self.alive() if p.machine.member]  # followers may be far behind
        if not members:
            return
        hurrier = self.rng.choice(members)
        machine, k = hurrier.machine, self.rng.randrange(1, self.num_parts)
        part = m.Part(machine.applied + self.rng.randrange(2, 5), machine.tag, k, EMPTY)
        for other in members:
            if other is not hurrier:
                self.push(hurrier.number, other.number, (m.encode(part), False))

    def check_part(self, peer, part):
        pass  # I11 is about peers that keep to the rules


class Strangers(Directed):
    """Peers with other tensors join. Nobody can read what they send."""

    script = ((1, "join"), *((step, "stranger") for step in (5, 30, 60)))

    def fault(self, kind):
        self.form = "other tensors" if kind == "stranger" else World.form
        self.join()

    def poisoned(self, peer, part):
        return peer.machine.course.form != World.form and bool(part.ranges)

    def check_samples(self, round_, heads, record, whole):
        super().check_samples(round_, heads, record, whole)
        self.require(not record.quarantine, "I12 samples were refused for another form")


class Resumed(World):
    """Everybody comes with the last state of an earlier run, in which there were many views."""

    seed_state = e.StateOffered(
        2,
        SEED_CHAIN,
        m.Record(b"", ViewNumber(1, 90_000), ViewNumber(1, 80_000), (), closing=True),
    )

    def stop(self, peer, instruction):
        super().stop(peer, instruction)
        if instruction.reason is StopReason.FINISHED:
            last = peer.history[peer.machine.applied - 1]
            self.require(last.empty, "I9 it went by the end of the run before")


class Deadly(World):
    """Some sample of some round kills whoever computes it."""

    lengths = (4, 5)

    def __init__(self, seed, **options):
        super().__init__(seed, **options)
        while len(self.peers) < 5:
            self.join()
        self.deadly = (1 + seed % 2, seed % SAMPLES)
        self.killed = Counter()  # by generation

    def compute_pass(self, peer):
        round_, sample = self.deadly
        if peer.machine.applied == round_ and sample in peer.todo[0] and self.is_in(peer):
            if not all(self.is_settled(other, peer.machine.cut) for other in self.alive()):
                return  # its last words would die with it, and nobody know what it was to compute
            self.killed[peer.machine.generation] += 1
            self.count["killed"] += 1
            most = self.killed[peer.machine.generation]
            self.require(most <= m.MOST_DEATHS, "I14 peer after peer dies of one sample")
            self.kill(peer.number)
        else:
            super().compute_pass(peer)

    def is_in(self, peer):
        return self.view.member(peer.number) is not None

    def is_settled(self, peer, cut):
        machine = peer.machine
        settled = machine.cut == cut and machine.mode is Mode.RUNNING
        return settled or not machine.active


class Divided(World):
    """Peers of two classes, and rounds of different sizes: between them there are re-syncs."""

    lengths = (3, 5, 7)

    def __init__(self, seed, **options):
        self.records = {}  # (rounds, chain after them) -> the record that governs the next
        super().__init__(seed, **options)

    def num_samples(self, number):
        return SAMPLES - number % 3

    def class_of(self, peer):
        return peer // 2000 % 2

    def classes(self, reports):
        classes = {}
        for peer in reports:
            classes.setdefault(self.class_of(peer), []).append(peer)
        if len(classes) == 1:
            return ONE_CLASS
        anchors = max(classes.values(), key=lambda peers: sum(reports[p].speed for p in peers))
        return Classes(b"both", tuple(anchors))

    def whole(self, peer, round_, done):
        if not super().whole(peer, round_, done):
            return EMPTY
        if done.sums[0].exact:
            return Ranges.whole(1)
        return Ranges.whole(self.num_samples(round_ - done.record.num_resyncs + done.record.resync))

    def commit(self, peer, done):
        super().commit(peer, done)
        self.records[done.round + 1, done.chain] = done.record
        before = self.records.get((done.round, done.record.prev))
        if before is None:
            return  # the state that it came with
        contributions, resync = done.sums[0].contributions, done.sums[0].exact
        self.require(resync == before.resync, "I16 a re-sync, or none, against the record")
        if resync:
            members = [share.peer for share in contributions]
            anchors = [peer for peer in before.anchors if peer in members]
            gave = [share.peer for share in contributions if share.ranges]
            able = anchors or members
            self.require(gave in (able[:1], []), f"I16 {gave} gave its state, and not {able}")
            self.count["re-syncs"] += 1
            self.count["re-syncs by another"] += gave != list(before.anchors[:1])
            self.count["re-syncs without anchors"] += bool(before.anchors) and not anchors

    def arrival(self, peer, sender, data, values):
        if isinstance(head := m.decode(data), m.Snapshot):
            classes = {self.class_of(p) for p in self.donors[head.applied, head.chain]}
            one = self.class_of(sender) in classes and len(classes) == 1
            self.require(one or not head.record.anchors, "I16 a state of two classes")
        return super().arrival(peer, sender, data, values)

    def stop(self, peer, instruction):
        super().stop(peer, instruction)
        if instruction.reason is StopReason.FINISHED:
            made = peer.machine.applied - peer.machine.record.num_resyncs - 1
            self.require(made <= self.num_rounds, "I16 re-syncs have made the run longer")


class Redoing(World):
    """Others compute once more what was refused; some peers spoil whatever they compute."""

    on_refusal = OnRefusal.REDO

    def __init__(self, seed, **options):
        super().__init__(seed, **options)
        self.spoilers = {number for number in self.peers if (seed + number) % 4 == 0}
        self.poison = {(r, s) for r in range(9) for s in range(SAMPLES) if (seed + r + s) % 16 == 0}

    def poisoned(self, peer, part):
        spoilt = peer.number in self.spoilers and bool(part.ranges)
        self.count["spoilt"] += spoilt
        return spoilt or super().poisoned(peer, part)


class Shaken(Redoing):
    """And cut upon cut, with everybody alive."""

    def __init__(self, seed, **options):
        super().__init__(seed, **options)
        while len(self.peers) < 4:
            self.join()
        self.spoilers = set(list(self.peers)[seed % 3 : seed % 3 + 1])
        self.faults = [(step, "lost queue") for step in range(60, 400, 15)]


class Stopping(Redoing):
    """The run stops where something is refused."""

    on_refusal = OnRefusal.STOP

    def commit(self, peer, done):
        super().commit(peer, done)
        self.require(not done.record.quarantine, "I15 a round without what was refused")


class Ambush(Directed):
    """Strikes once, as soon as `strike` finds what it waits for."""

    script = ((1, "join"), (2, "join"), *((step, "ambush") for step in range(5, 500)))
    lengths = (6, 7, 8)
    look_every = 8

    def last_and_heir(self):
        """The only member, and who is ready to take over; (None, None) unless there are both."""
        members = self.members()
        ready = [p for p in self.alive() if p.machine.ready_told and not p.machine.member]
        return (members[0], ready[0]) if len(members) == 1 and ready else (None, None)

    def fault(self, kind):
        if kind != "ambush":
            super().fault(kind)
        elif not self.count["struck"]:
            self.count["struck"] = self.strike()

    def strike(self):
        """Do it if this is the moment; returns whether it was."""
        raise NotImplementedError

    def members(self):
        """Those that take part in a round as far as they know, and have answered every cut."""
        found = [p for p in self.alive() if p.machine.member and p.machine.active]
        return [p for p in found if p.machine.mode is Mode.RUNNING]

    def shown(self, *states):
        """The living whom the hub shows in one of these states."""
        return [p for p in self.alive() if self.view.member(p.number).state in states]

    def sums(self, source, target):
        """The results that are on their way from one peer to another."""
        said = self.words(source.number, target.number)
        return [word for word in said if isinstance(word, m.Sum)]

    def owes(self, source, target):
        """Whether a result that the target needs for its attempt is on its way to it."""
        machine = target.machine
        here = (machine.applied, machine.tag)
        return any((head.round, head.attempt) == here for head in self.sums(source, target))

    def slow_down(self, *ways):
        """Words on these ways take very long, all others do not."""
        self.slow = dict.fromkeys(self.slow, False) | dict.fromkeys(ways, True)
        self.slowness = 0.98

    def hasten_views(self):
        """Everybody sees the newest view before anything else happens."""
        self.slow_down()
        self.paused.clear()
        for way in [(HUB, p.number) for p in self.alive()]:
            while self.channels[way]:
                self.deliver(self.ready.index(way))

    def silence(self, peer, unheard):
        """A peer dies, and what it was saying does not reach these others."""
        self.dead.add(peer.number)
        for other in unheard:
            self.channels.get((peer.number, other.number), []).clear()
        self.exclude(peer.number)


class LastWords(Ambush):
    """An owner dies with its result on the way to all others; one of them gets it, in the cut."""

    def strike(self):
        members = self.members()
        for owner in members:
            others = [p for p in members if p is not owner]
            if len(others) > 1 and all(self.owes(owner, p) for p in others):
                heir = self.rng.choice(others)
                self.silence(owner, [p for p in self.peers.values() if p is not heir])
                return True
        return False


class Widows(Ambush):
    """A leaver has committed its last round when an owner dies that the others needed for it."""

    script = (*Ambush.script[:2], *((step, "leave") for step in (40, 60)), *Ambush.script[2:])

    def strike(self):
        leavers = [p for p in self.peers.values() if p.machine.leave_asked and p.machine.based]
        members = [p for p in self.members() if not p.machine.leave_asked]
        for owner in members:
            others = [p for p in members if p is not owner]
            rounds = {p.machine.applied for p in others}
            ahead = [p for p in leavers if {p.machine.applied - 1} == rounds and self.is_out(p)]
            if ahead and all(self.owes(owner, p) for p in others):
                self.silence(owner, self.peers.values())
                return True
        return False

    def is_out(self, leaver):
        return not leaver.machine.member and leaver.number not in self.dead


class TwoLeavers(Ambush):
    """A cut finds two leavers, the one a round behind; the other hears its Status last."""

    script = Widows.script

    def strike(self):
        leavers = self.shown(PeerState.LEAVING)
        active = self.shown(PeerState.ACTIVE)
        for late in leavers:
            for leaver in leavers:
                top = late.machine.applied + 1
                level = leaver.machine.applied == top and leaver.machine.kept is not None
                if level and active and all(p.machine.applied == top for p in active):
                    for key in self.channels:
                        if key[1] == late.number and HUB not in key:
                            self.channels[key].clear()
                    self.slow_down((late.number, leaver.number))
                    self.show(arbiter.shaken(self.view, [late.id]))
                    return True
        return False


class Starved(Ambush):
    """A watching peer hears the lead late. It dies, and whoever is left had everything of it."""

    def strike(self):
        members = self.members()
        leads = [p for p in members if p.machine.members[0] == p.number]
        watchers = [p for p in self.shown(PeerState.WATCHING) if p.machine.based]
        if len(members) < 2 or not leads or not watchers:
            return False
        lead, watcher = leads[0], watchers[0]
        self.slow_down((lead.number, watcher.number))
        missed = {head.round for head in self.sums(lead, watcher) if head.k == 0}
        first = watcher.machine.applied
        others = {p.machine.applied for p in members if p is not lead}
        if missed >= {first, first + 1} and others == {first + 2}:
            self.silence(lead, [watcher])
            return True
        return False


class Orphaned(Ambush):
    """All whom the run goes on with die. Who is left has a state, and results of later rounds."""

    def strike(self):
        watchers = [p for p in self.shown(PeerState.WATCHING) if p.machine.based]
        later = any(p.machine.book.newest_round() > p.machine.applied for p in watchers)
        if not later or any(p.machine.ready_told for p in self.shown(PeerState.WATCHING)):
            return False
        for peer in self.shown(PeerState.ACTIVE, PeerState.LEAVING):
            self.kill(peer.number)
        return True


class Overtaken(Ambush):
    """The only member dies; who takes over is behind a watching peer, and nobody knows it."""

    def strike(self):
        last, heir = self.last_and_heir()
        if heir is None:
            return False
        ways = [(last.number, heir.number), (HUB, last.number)]
        watchers = [p for p in self.shown(PeerState.WATCHING) if p is not heir]
        self.slow_down(*ways, *((p.number, HUB) for p in watchers))
        ahead = [p for p in watchers if p.machine.applied > heir.machine.applied]
        if heir in self.shown(PeerState.ACTIVE) and any(p.machine.trusted for p in ahead):
            self.silence(last, [heir])
            self.slow_down()
            return True
        return False


class Haunted(Ambush):
    """Followers take over while a peer holds a later round's results, and not those before it.

    That peer follows them another way than the dead went. There is a cut, its first, when it has
    come to the round of which it holds the old results.
    """

    peer, round = None, None  # who holds the results of a later round, and that round

    def __init__(self, seed, *, unordered=False, **options):
        super().__init__(2 * seed + unordered, unordered=True, **options)

    def strike(self):
        return self.lose_the_member() if self.round is None else self.cut_at_that_round()

    def lose_the_member(self):
        last, heir = self.last_and_heir()
        if heir is None:
            return False
        watchers = [p for p in self.shown(PeerState.WATCHING) if p is not heir]
        known = [p for p in watchers if p.machine.ready_told]
        hub = [(HUB, last.number), *((p.number, HUB) for p in watchers)]
        self.slow_down(*((last.number, p.number) for p in (heir, *known)), *hub)
        if heir in self.shown(PeerState.ACTIVE):
            for peer in known:
                if peer.machine.applied == heir.machine.applied and self.skip_ahead(last, peer):
                    self.silence(last, [heir, *watchers])
                    self.peer, self.round = peer, peer.machine.applied + 1
                    break
        return False

    def skip_ahead(self, source, peer):
        """Deliver the results of the round after the peer's, if they are all under way."""
        channel = self.channels.get((source.number, peer.number), ())
        items = [item for item in channel if self.is_of(item, peer.machine.applied + 1)]
        if len(items) < self.num_parts:
            return False
        for item in items:
            self.tell(peer.number, self.arrival(peer, source.number, *item))
        return True

    def is_of(self, item, round_):
        head = m.decode(item[0]) if isinstance(item, tuple) else None
        return isinstance(head, m.Sum) and head.round == round_

    def cut_at_that_round(self):
        members = [p for p in self.members() if p.machine.generation != NO_VIEW]
        waiting = [p for p in members if p.machine.applied == self.round]
        # They hear late that there is a peer to take in, and, while they cannot help, its Want.
        late = [(self.peer.number, p.number) for p in self.alive() if p not in waiting]
        self.slow_down(*((HUB, p.number) for p in members), *late)
        self.paused = {p.number for p in waiting}
        machine = self.peer.machine
        if machine.applied == self.round and waiting and self.peer in self.shown(PeerState.ACTIVE):
            self.show(arbiter.shaken(self.view, [self.peer.id]))
            self.hasten_views()
            return True
        return False


class LetsAnybodyGoQuietly(World):
    """The hub makes a Gone quiet although a cut has come since."""

    def hear(self, number, word):
        super().hear(number, Gone(self.view.cut) if isinstance(word, Gone) else word)

"""A model world for the book: hosts with agents that obey the lease, a network that loses, delays
and repeats, a store that fails, a coordinator that is restarted with another lease, agents that
hang and talk on, machines that have the same name; and what must hold all the while.

Agents here do what messages.py says and no more. `World.check` compares what the coordinator has
stored with what is true: which processes run, which ranks were ever started, how they ended.
"""

from __future__ import annotations

import random
from collections import Counter

import msgspec

from manyhands.cluster.book import Book
from manyhands.cluster.errors import (
    BadJob,
    BadReport,
    HostTaken,
    KeyTaken,
    NoSuchJob,
    NotAHost,
    StoreFull,
)
from manyhands.cluster.hosts import FORGET_S
from manyhands.cluster.job import Failure, Job, Priority, Spec, Step
from manyhands.cluster.jobs import HostRow
from manyhands.cluster.messages import Holding, Phase, RankEnd, Status
from manyhands.cluster.schedule import Decisions
from tests.cluster.model import LEASE_S, MARGIN_S, Agent, Part, first_come, hello
from tests.cluster.rules import Rules, Violation


class World(Rules):
    """Everything there is. `rng` decides what happens; the same seed gives the same history."""

    def __init__(self, seed, num_hosts=3, schedule=first_come, faults=None):
        self.rng = random.Random(seed)
        self.schedule = schedule
        self.now_s = 1000.0
        self.is_calm = False
        # What is on the coordinator's disk.
        self.jobs: dict[int, Job] = {}
        self.steps: dict[int, list[Step]] = {}
        self.rows: dict[str, HostRow] = {}
        # What is true.
        self.running: dict[tuple[str, int], tuple[int, int, int]] = {}
        self.started: Counter[tuple[int, int, int]] = Counter()
        self.ended: dict[tuple[int, int, int], tuple[int, bool]] = {}
        self.disk: dict[str, set[tuple[int, int]]] = {}
        self.cut: set[str] = set()
        self.net: list[tuple[float, Agent, str, object]] = []
        self.version = 0
        self.seen = Counter()
        self.decisions: list[Decisions] = []
        # Each history has some kinds of faults and not others: with all of them at once nothing
        # gets far enough for any to matter.
        kinds = [what for what, _ in FAULTS]
        faults = [what for what in kinds if self.rng.random() < 0.4] if faults is None else faults
        self.events = [one for one in EVENTS if one[0] not in kinds or one[0] in faults]
        self.lease_s = LEASE_S
        self.restart()
        self.agents = {}
        for i in range(num_hosts):
            name = f"h{i}"
            self.disk[name] = set()
            self.agents[name] = Agent(name, f"{name}-agent-0", self.rng.randint(1, 3), name)
            self.greet(self.agents[name])

    # -- the coordinator -------------------------------------------------------------------------

    def restart(self):
        """A new coordinator, from what is on disk."""
        self.version += 1_000_000
        codec = msgspec.json
        live = [job for job in self.jobs.values() if not job.is_over]
        self.book = Book(
            self.decide,
            now_s=self.now_s,
            lease_s=self.lease_s,
            margin_s=MARGIN_S,
            jobs=[codec.decode(codec.encode(job), type=Job) for job in live],
            hosts=list(self.rows.values()),
            next_id=max(self.jobs, default=0) + 1,
            version=self.version,
        )
        self.book.refresh()
        self.decisions = []

    def decide(self, now_s, hosts, entries):
        decisions = self.schedule(now_s, hosts, entries)
        placed = [e.id for e in entries if e.places and not e.ending]
        if placed and decisions.waits and not self.is_calm and self.rng.random() < 0.3:
            victim = (self.rng.choice(placed), min(decisions.waits))
            return msgspec.structs.replace(decisions, preempt=(victim,))
        return decisions

    def change(self, what):
        """As Coordinator does it: stored, or as if it had never been."""
        value = what()
        changes = self.book.drain()
        if changes and not self.is_calm and self.rng.random() < 0.1:
            self.book.undo()
            raise StoreFull("the model's disk")
        for job in changes.jobs:
            old = self.jobs.get(job.id)
            if old is not None and old.is_over:
                raise Violation(f"{old} is over, and became {job}")
            self.jobs[job.id] = job
        for step in changes.steps:
            self.keep_step(step)
        self.rows.update({row.hello.host: row for row in changes.hosts})
        for name in changes.gone:
            self.rows.pop(name, None)
        self.book.keep()
        self.book.refresh()
        return value

    def try_change(self, what):
        try:
            return self.change(what)
        except (StoreFull, NoSuchJob, BadJob, BadReport, KeyTaken):
            return None

    # -- things that happen ----------------------------------------------------------------------

    def step(self):
        """One random event, then everything that must hold."""
        rng = self.rng
        agent = rng.choice(list(self.agents.values()))
        what, weight = zip(*self.events, strict=True)
        rng.choices(what, weight)[0](self, agent)
        self.check()

    def submit(self, _agent):
        rng = self.rng
        spec = Spec(
            command=("true",),
            gpus=rng.randint(1, 4),
            priority=rng.choice(list(Priority)),
            max_restarts=rng.randint(0, 3),
            time_s=rng.choice([None, None, 8.0, 30.0]),
            grace_s=2.0,
        )
        key = f"key-{rng.randint(0, 30)}" if rng.random() < 0.5 else ""
        known = next((job for job in self.jobs.values() if key and job.key == key), None)
        if len(self.book.live) < 8:
            self.try_change(lambda: self.book.submit(spec, key, self.now_s, known=known))
        keys = Counter(job.key for job in self.jobs.values() if job.key)
        if any(count > 1 for count in keys.values()):
            raise Violation(f"one key, two jobs: {keys}")

    def cancel(self, _agent):
        if self.jobs:
            id = self.rng.choice(list(self.jobs))
            self.try_change(lambda: self.book.cancel(id, self.now_s))

    def tick(self, _agent=None):
        """In two halves, as the coordinator does it: things happen while the schedule decides."""
        if self.try_change(lambda: self.book.watch(self.now_s) or True):
            self.decisions.append(self.decide(self.now_s, *self.book.ask(self.now_s)))

    def adopt(self, _agent=None):
        if self.decisions:
            decisions = self.decisions.pop(self.rng.randrange(len(self.decisions)))
            self.try_change(lambda: self.book.adopt(decisions, self.now_s))

    def advance(self, _agent=None, by_s=None):
        """Time passes; agents whose lease ends kill what they have, at the latest in the margin."""
        self.now_s += self.rng.choice([0.1, 1.0, 4.0]) if by_s is None else by_s
        for agent in self.agents.values():
            if agent.until_s is not None and self.now_s >= agent.until_s:
                if agent.kill_s is None:
                    agent.kill_s = agent.until_s + self.rng.random() * MARGIN_S * 0.9
                if self.now_s >= agent.kill_s:
                    for key, part in agent.parts.items():
                        self.kill_part(agent, key, part, "the lease ended")
                    agent.until_s = agent.kill_s = None

    def cut_line(self, agent):
        self.cut ^= {agent.machine}

    def kill_agent(self, agent):
        """kill -9; the next one ends what is left, then comes. Sometimes its disk is lost too."""
        left = {}
        for key, part in agent.parts.items():
            self.kill_part(agent, key, part, "the agent was killed")
            left[key] = part
        if self.rng.random() < 0.5:
            left, self.disk[agent.machine] = {}, set()
        if self.rng.random() < 0.7:
            self.book.broke(agent.host, agent.name)
        number = int(agent.name.rpartition("-")[2]) + 1
        name = f"{agent.machine}-agent-{number}"
        self.agents[agent.machine] = Agent(
            agent.host, name, agent.num_slots, agent.machine, left, lease_s=self.lease_s
        )

    def restart_coordinator(self, _agent):
        self.lease_s = self.rng.choice([LEASE_S, LEASE_S, LEASE_S / 5, 2 * LEASE_S])
        self.restart()

    def hang(self, agent):
        """Its main thread stops; or the one that asks what is wanted."""
        if self.rng.random() < 0.7:
            agent.is_hung, agent.frozen = True, agent.status()
        else:
            agent.is_deaf = True

    def namesake(self, agent):
        """Another machine that has the same name comes, with a disk of its own; or goes."""
        name = f"{agent.host}-too"
        if name not in self.agents:
            self.disk.setdefault(name, set())
            self.seen[name] += 1
            number = f"{name}-agent-{self.seen[name]}000"
            self.agents[name] = Agent(agent.host, number, agent.num_slots, name)
            self.greet(self.agents[name])
        else:
            self.turn_off(self.agents[name])

    def break_line(self, agent):
        """A connection of the agent's ends, which is well: the network did it."""
        self.book.broke(agent.host, agent.name)

    def turn_off(self, agent):
        for key, part in agent.parts.items():
            self.kill_part(agent, key, part, "the machine was turned off")
        del self.agents[agent.machine]

    def leave(self, _agent):
        """The cluster goes down; a new coordinator comes later."""
        self.try_change(lambda: self.book.leave(self.now_s))

    def long_time(self, _agent):
        """Long enough for hosts to be forgotten."""
        for _ in range(2):
            self.advance(by_s=FORGET_S)
            self.tick()

    # -- messages --------------------------------------------------------------------------------

    def greet(self, agent):
        folder = f"{agent.machine}-folder"
        said = hello(agent.host, agent=agent.name, slots=agent.num_slots, folder=folder)
        self.send(agent, "hello", said)

    def report(self, agent):
        if not agent.is_welcome:
            self.greet(agent)
        elif not agent.is_hung:
            self.send(agent, "status", agent.status())
        elif agent.frozen is not None:
            self.send(agent, "status", agent.frozen)

    def poll(self, agent):
        if agent.is_welcome:
            if agent.is_deaf:
                return
            self.send(agent, "wants", None)
        else:
            self.greet(agent)

    def send(self, agent, kind, value):
        self.net.append((self.now_s, agent, kind, value))

    def deliver(self, _agent=None):
        """One of the messages under way: the oldest or any; sometimes once more."""
        if not self.net:
            return
        at = 0 if self.is_calm or self.rng.random() < 0.5 else self.rng.randrange(len(self.net))
        sent_s, agent, kind, value = message = self.net[at]
        if self.is_calm or self.rng.random() < 0.9:
            del self.net[at]
        if agent.machine in self.cut or self.now_s - sent_s > LEASE_S * 0.9:
            self.net = [one for one in self.net if one is not message]
            return
        try:
            answer = self.change(lambda: self.hear(agent, kind, value))
        except NotAHost:
            agent.is_welcome = False
            agent.frozen = None  # only its main thread could say it to another connection
            return
        except (StoreFull, HostTaken):
            return
        if self.agents.get(agent.machine) is not agent:
            return  # it is dead: nobody hears the answer
        if kind == "wants" and answer is None:
            self.net.append((sent_s, agent, "held", None))
            return
        if not self.is_calm and self.rng.random() < 0.2:
            return  # the answer is lost
        if kind == "hello":
            agent.lease_s = answer
        agent.answered(sent_s, self.now_s)
        if kind == "hello":
            agent.is_welcome = True
            agent.wants = None
            self.report(agent)
        elif kind in ("wants", "held") and (
            agent.wants is None or answer.version > agent.wants.version
        ):
            agent.wants = answer

    def hear(self, agent, kind, value):
        if kind == "hello":
            self.book.hello(value, self.now_s)
            return self.lease_s
        if kind == "status":
            return self.book.status(agent.host, value, self.now_s)
        if kind == "wants":
            self.book.host(agent.host, agent.name, self.now_s)
            if self.rng.random() < 0.3:
                return None  # there is nothing new: the answer is held back
        self.book.wants(agent.host, agent.name)
        return self.book.tell(agent.host)

    def nonsense(self, agent):
        """What an agent of ours never says, about jobs that are, or were, or are another's."""
        rng = self.rng
        jobs = list(self.jobs.values())
        holdings = []
        for job in rng.sample(jobs, min(3, len(jobs))):
            mine = any(place.host == agent.host for place in job.places)
            holdings.append(
                Holding(
                    job=job.id if rng.random() < 0.8 else -7,
                    # The truth about its own attempt is not ours to make up here.
                    attempt=job.attempt + (rng.choice([-1, 1]) if mine else 0),
                    phase=rng.choice(list(Phase)),
                    port=rng.choice([0, 1, 70_000]),
                    ended=(RankEnd(rank=rng.randint(-1, 9), exit_code=0, at_s=0.0),),
                    lost="x" * rng.choice([0, 100_000]),
                )
            )
        for job in jobs:
            mine = any(place.host == agent.host for place in job.places)
            if mine and not job.is_over and rng.random() < 0.5:
                wrong = RankEnd(rank=99, exit_code=0, at_s=0.0)
                holdings.append(
                    Holding(
                        job=job.id, attempt=job.attempt, phase=Phase.ENDED, ended=(wrong, wrong)
                    )
                )
        if agent.is_welcome and agent.machine not in self.cut:
            status = Status(agent=rng.choice([agent.name, "who"]), holdings=tuple(holdings))
            try:
                self.try_change(lambda: self.book.status(agent.host, status, self.now_s))
            except NotAHost:
                return

    # -- what agents do --------------------------------------------------------------------------

    def act(self, agent):
        """Compare what is wanted with what is held, and do what is missing."""
        if agent.wants is None or not agent.is_welcome or agent.is_hung:
            return
        wanted = {(want.job, want.attempt): want for want in agent.wants.wants}
        for key, want in wanted.items():
            part = agent.parts.get(key)
            if part is None:
                if want.stop:
                    agent.parts[key] = Part({}, Phase.ENDED)
                elif agent.holds_lease(self.now_s):
                    self.begin(agent, key, want)
            elif want.stop:
                self.stop(part)
            elif part.phase is Phase.READY and want.task.master_port > 0:
                self.start(agent, key, part)
        for key in [key for key in agent.parts if key not in wanted]:
            if agent.parts[key].phase is Phase.ENDED:
                del agent.parts[key]
            else:
                self.stop(agent.parts[key])

    def begin(self, agent, key, want):
        if key in self.disk[agent.machine]:
            agent.parts[key] = Part({}, Phase.ENDED, lost="it was begun here before")
            return
        self.disk[agent.machine].add(key)
        ranks = dict(want.task.ranks)
        agent.parts[key] = Part(ranks, port=29500 if 0 in ranks else 0)

    def start(self, agent, key, part):
        if not agent.holds_lease(self.now_s):
            return
        part.phase = Phase.RUNNING
        for rank, slot in part.ranks.items():
            if (agent.machine, slot) in self.running:
                raise Violation(f"{key} on {agent.machine}, slot {slot}: it is in use")
            self.running[agent.machine, slot] = (*key, rank)
            self.started[(*key, rank)] += 1

    def stop(self, part):
        part.stopping = True
        if part.phase is Phase.READY:
            part.phase = Phase.ENDED

    def exit_rank(self, agent):
        """One rank ends: as it should, by a failure of its own, or because it was told to."""
        parts = [(k, p) for k, p in agent.parts.items() if p.phase is Phase.RUNNING]
        if not parts or agent.is_hung:
            return
        key, part = self.rng.choice(parts)
        rank = self.rng.choice([rank for rank in part.ranks if rank not in part.ends])
        if part.stopping:
            code = self.rng.choice([0, 143])
        else:
            code = 1 if not self.is_calm and self.rng.random() < 0.1 else 0
            if code:
                part.failure = Failure(rank=rank, host=agent.host, exit_code=code, words="oh")
                part.stopping = True
        self.end_rank(agent, key, part, rank, code)

    def end_rank(self, agent, key, part, rank, code):
        del self.running[agent.machine, part.ranks[rank]]
        part.ends[rank] = RankEnd(rank=rank, exit_code=code, at_s=self.now_s)
        self.ended[(*key, rank)] = (code, part.stopping)
        if len(part.ends) == len(part.ranks):
            part.phase = Phase.ENDED

    def kill_part(self, agent, key, part, why):
        if part.phase is Phase.ENDED:
            return
        for rank in [r for r in part.ranks if r not in part.ends and part.phase is Phase.RUNNING]:
            part.stopping = True
            self.end_rank(agent, key, part, rank, 137)
        part.phase = Phase.ENDED
        part.lost = "" if part.failure is not None else why

    # -- an end ----------------------------------------------------------------------------------

    def settle_down(self, rounds=400):
        """No more faults: every job must come to its end. One host may stay away, or hang, for
        ever, where the others have room for every job.
        """
        self.is_calm = True
        self.cut.clear()
        self.net.clear()
        if self.book.is_leaving:
            self.restart()
        for agent in list(self.agents.values()):
            if agent.machine != agent.host:
                self.turn_off(agent)
            elif agent.is_hung or agent.is_deaf:
                self.kill_agent(agent)
        away = self.agents[self.rng.choice(list(self.agents))]
        rest = sum(agent.num_slots for agent in self.agents.values() if agent is not away)
        if rest >= max((job.spec.gpus for job in self.book.live), default=0) and rest:
            # Ranks that run for ever look the same: that one which hangs is silent is its own rule.
            does_run = any(part.phase is Phase.RUNNING for part in away.parts.values())
            if does_run or self.rng.random() < 0.5:
                self.cut.add(away.host)
            else:
                self.hang(away)
        for _ in range(rounds):
            self.calm_round()
            if not self.book.live and not self.running:
                return
        raise Violation(f"stuck: {list(self.book.live)}")

    def calm_round(self):
        for agent in self.agents.values():
            self.act(agent)
            self.exit_rank(agent)
            self.report(agent)
            self.poll(agent)
        while self.net:
            self.deliver()
        self.advance(by_s=0.5)
        self.tick()
        self.decisions = self.decisions[-1:]
        self.adopt()
        self.check()


FAULTS = [
    (World.cut_line, 0.7),
    (World.kill_agent, 1.2),
    (World.restart_coordinator, 0.7),
    (World.hang, 0.4),
    (World.namesake, 1),
    (World.break_line, 1),
    (World.leave, 0.05),
    (World.long_time, 0.1),
]
EVENTS = [
    *FAULTS,
    (World.submit, 4),
    (World.cancel, 2),
    (World.tick, 8),
    (World.adopt, 8),
    (World.advance, 6),
    (World.report, 12),
    (World.poll, 12),
    (World.deliver, 45),
    (World.nonsense, 1),
    (World.act, 20),
    (World.exit_rank, 5),
]

"""A coordinator in memory: honest about states and hosts; it schedules nothing."""

from __future__ import annotations

import threading
import time

import msgspec

from manyhands.cluster import errors
from manyhands.cluster.hosts import Node
from manyhands.cluster.job import PLACED, Job, Place, State, Step, moved
from manyhands.cluster.messages import PROTOCOL, Wants, Welcome

SLOTS = 8


class FakeDesk:
    """Tests move its jobs by `move`; everything else is what the API asks."""

    def __init__(self):
        self._lock = threading.Lock()
        self._jobs: dict[int, Job] = {}
        self._steps: dict[int, list[Step]] = {}
        self._keys: dict[str, Job] = {}
        self._hosts = {}
        self._wants: dict[str, Wants] = {}
        self.statuses = {}
        self.num_jobs_asked = 0
        self._listeners = []
        self.losses: list[tuple[str, str]] = []
        self.lost_one = threading.Event()
        self.went_down = threading.Event()
        self.num_wants_asked = 0
        self.words: list[tuple[str, str, bool]] = []

    # What a test does to it.

    def move(self, id, to, reason="", **changes):
        with self._lock:
            job = self._jobs[id] = moved(self._jobs[id], to, reason, **changes)
            self._note(job)
        self._tell({id})
        return job

    def start(self, id, *, attempt=0):
        self.move(
            id,
            State.STARTING,
            attempt=attempt,
            started_s=time.time(),
            places=(Place("h", tuple(range(self._jobs[id].spec.gpus))),),
        )
        return self.move(id, State.RUNNING)

    def end(self, id, state=State.SUCCEEDED, **changes):
        return self.move(id, state, places=(), ended_s=time.time(), exit_code=0, **changes)

    def want(self, host, **changes):
        with self._lock:
            old = self._wants[host]
            self._wants[host] = msgspec.structs.replace(old, version=old.version + 1, **changes)
        self._tell({host})

    # What the API asks of it.

    def submit(self, spec, key=""):
        if not spec.command or spec.gpus < 1:
            raise errors.BadJob("a job needs a command and at least one slot")
        if spec.gpus > SLOTS:
            raise errors.Unplaceable(spec.gpus, SLOTS, "one host")
        with self._lock:
            if key and (known := self._keys.get(key)) is not None:
                if known.spec != spec:
                    raise errors.KeyTaken(key, known.id)
                return self._jobs[known.id], False
            job = Job(id=len(self._jobs) + 1, spec=spec, key=key, submitted_s=time.time())
            self._jobs[job.id] = job
            self._keys[key] = job
            self._note(job)
        self._tell({job.id})
        return job, True

    def job(self, id):
        with self._lock:
            self.num_jobs_asked += 1
            if id not in self._jobs:
                raise errors.NoSuchJob(id)
            return self._jobs[id]

    def jobs(self, *, states=(), limit=None):
        with self._lock:
            found = [j for j in reversed(self._jobs.values()) if not states or j.state in states]
        return found[:limit]

    def history(self, id):
        self.job(id)
        with self._lock:
            return list(self._steps[id])

    def cancel(self, id):
        job = self.job(id)
        if job.is_over:
            return job
        return self.move(id, State.CANCELLED, "cancelled", ended_s=time.time(), exit_code=143)

    def nodes(self):
        with self._lock:
            return [
                Node(
                    name=h.host,
                    address=h.address,
                    state="here",
                    slots=h.slots,
                    origin=h.origin,
                    heard_s=time.time(),
                    version=h.version,
                )
                for h in self._hosts.values()
            ]

    def hello(self, hello):
        if hello.protocol != PROTOCOL:
            raise errors.BadReport(f"protocol {hello.protocol}")
        with self._lock:
            old = self._hosts.get(hello.host)
            if old is not None and old.agent != hello.agent:
                raise errors.HostTaken(hello.host)
            self._hosts[hello.host] = hello
            self._wants.setdefault(hello.host, Wants(version=1))
        return Welcome(lease_s=10.0, cluster="fake")

    def status(self, host, status):
        self._held(host, status.agent)
        with self._lock:
            self.statuses[host] = status

    def wants(self, host, agent, seen, timeout_s, *, again=False):
        assert timeout_s == 0, "nobody waits in a thread"
        self.words.append((host, agent, again))
        self._held(host, agent)
        with self._lock:
            self.num_wants_asked += 1
            return self._wants[host]

    def check_sender(self, host, agent):
        if host in self._hosts:  # most tests of logs need no agent
            self._held(host, agent)

    def lost(self, host, agent):
        self.losses.append((host, agent))
        self.lost_one.set()

    def listen(self, heard):
        self._listeners.append(heard)
        return lambda: self._listeners.remove(heard)

    @property
    def num_listeners(self):
        return len(self._listeners)

    def _held(self, host, agent):
        with self._lock:
            if host not in self._hosts or self._hosts[host].agent != agent:
                raise errors.NotAHost(host)

    def _note(self, job):
        assert job.state in PLACED or not job.places
        steps = self._steps.setdefault(job.id, [])
        steps.append(
            Step(job=job.id, seq=job.seq, state=job.state, reason=job.reason, at_s=time.time())
        )

    def _tell(self, topics):
        for heard in list(self._listeners):
            heard(topics)

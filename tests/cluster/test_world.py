"""Random histories of a whole cluster keep every rule; and each rule, broken, is missed by them."""

from __future__ import annotations

from collections import Counter

import pytest

from manyhands.cluster import book, hosts, part
from manyhands.cluster.job import IllegalStep, State
from manyhands.cluster.messages import Phase
from manyhands.cluster.schedule import decide
from tests.cluster.world import Violation, World

NUM_STEPS = 400


@pytest.fixture(autouse=True)
def short_limits(monkeypatch):
    """So that agents that are merely slow are given up too, within a history."""
    monkeypatch.setattr(part, "START_S", 6.0)
    monkeypatch.setattr(part, "STOP_S", 6.0)


def live(seed, **arguments):
    world = World(seed, **arguments)
    for _ in range(NUM_STEPS):
        world.step()
    world.settle_down()
    return world


@pytest.mark.parametrize("first", [0, 40, 80, 120])
def test_every_rule_holds_in_random_histories(first):
    seen = Counter()
    for seed in range(first, first + 40):
        try:
            seen += live(seed).seen
        except Violation as violation:
            raise AssertionError(f"seed {seed}") from violation
    # A history in which nothing happens shows nothing.
    assert min(seen[state] for state in State) > 0, seen


def test_one_host_alone():
    for seed in range(40):
        live(1000 + seed, num_hosts=1)


def test_the_schedule_that_is_used():
    """Placing by priority, with preemption and backfill."""
    for seed in range(40):
        live(2000 + seed, schedule=decide)


# Each of these breaks one rule. What they do not break, the histories cannot have tested.


def impatient(patch):
    """Slots of a silent host are given away while its lease still runs."""
    made = book.Book.__init__

    def init(self, *arguments, lease_s, **others):
        made(self, *arguments, lease_s=lease_s * 0.4, **others)

    patch.setattr(book.Book, "__init__", init)


def no_margin_for_the_gang(patch):
    """A job begins again without waiting for what is left of it."""

    def all_gone(parts):
        is_lost = any(one.loss for one in parts)
        return all(one.is_gone for one in parts) or (is_lost and any(one.is_gone for one in parts))

    patch.setattr(part, "all_gone", all_gone)


def only_the_new_lease_counts(patch):
    """A coordinator that comes back believes that all agents count by its lease."""
    patch.setattr(
        book.Book, "_until_s", lambda self, host: host.heard_s + self.lease_s + self.margin_s
    )


def every_folder_is_the_same(patch):
    """Another machine of the same name is believed to have ended what it has never seen."""

    def is_left(self, host, hello, now_s):
        return host.is_broken or now_s >= self._until_s(host)

    patch.setattr(book.Book, "_is_left", is_left)


def whoever_talks_is_well(patch):
    """Nobody notices that an agent does not do what it is asked to."""
    patch.setattr(book.Book, "_overdue", lambda self: iter(()))


def who_is_given_up_is_gone_at_once(patch):
    """The lease of an agent that is not listened to any more is not waited for."""
    real = hosts.Host.evict

    def evict(self, why):
        real(self, why)
        self.fall_silent(self.heard_s)

    patch.setattr(hosts.Host, "evict", evict)


def who_is_given_up_may_try_again(patch):
    """An agent that never asks what is wanted gets the same job over and over."""
    real = hosts.Host.evict

    def evict(self, why):
        real(self, why)
        self.is_deaf = False

    patch.setattr(hosts.Host, "evict", evict)


def what_is_not_reported_is_gone(patch):
    """An attempt that an agent was told of, and has not spoken of, is taken for gone."""
    real = part.part_of

    def part_of(job, place, host):
        found = real(job, place, host)
        silent = found.holding is None and job.ending is not None
        return found._replace(is_gone=found.is_gone or silent)

    patch.setattr(part, "part_of", part_of)


def ready_is_gone(patch):
    """An attempt without a process is taken for one that will never have any."""
    real = part.part_of

    def part_of(job, place, host):
        found = real(job, place, host)
        ready = found.holding is not None and found.holding.phase is Phase.READY
        return found._replace(is_gone=found.is_gone or (ready and job.ending is not None))

    patch.setattr(part, "part_of", part_of)


def everybody_is_fresh(patch):
    """Agents that were told of an attempt are thought not to have been."""
    patch.setattr(hosts.Host, "tell", lambda self, leaving, seen=None: self.wants)


def every_agent_is_the_same(patch):
    """An agent that replaced another is thought to have been told of its attempts."""
    real = book.Book.hello

    def hello(self, said, now_s):
        real(self, said, now_s)
        self._hosts[said.host].inherited.clear()

    patch.setattr(book.Book, "hello", hello)


def every_end_is_a_success(patch):
    patch.setattr(part.Part, "is_clean", property(lambda self: self.has_ended))


def stopped_is_succeeded(patch):
    """A job that ended with 0 because it was told to end is taken for done."""
    real = part.part_of
    patch.setattr(
        part,
        "part_of",
        lambda job, place, host: real(job, place, host)._replace(is_untold=True),
    )


def attempts_are_not_counted(patch):
    real = book.moved

    def moved(job, to, reason, **changes):
        return real(job, to, reason, **{**changes, "attempt": 0})

    patch.setattr(book, "moved", moved)


def nothing_is_undone(patch):
    patch.setattr(book.Book, "undo", book.Book.keep)


def old_decisions_are_believed(patch):
    patch.setattr(
        book,
        "is_free",
        lambda job, places, hosts, busy: all(place.host in hosts for place in places),
    )


def places_are_forgotten(patch):
    """A slot is free while the job that has it is made to end."""
    real = book.Book._end

    def end(self, job, *rest, **others):
        real(self, job, *rest, **others)
        self._jobs._on.get(job.places[0].host, set()).discard(job.id)

    patch.setattr(book.Book, "_end", end)


def silence_is_for_ever(patch):
    """Nobody notices a host that has gone."""
    patch.setattr(hosts.Host, "fall_silent", lambda self, now_s: None)


def strangers_are_believed(patch):
    """A report is taken whatever attempt and ranks it is about."""
    patch.setattr(hosts, "sane", lambda holding, job, host: holding)


def a_port_is_not_told(patch):
    """Hosts do not hear of the port when it is known."""
    real = book.Book.status

    def status(self, name, said, now_s):
        stirred = set(self._stirred)
        real(self, name, said, now_s)
        self._stirred = stirred

    patch.setattr(book.Book, "status", status)


def no_reasons(patch):
    real = book.moved
    patch.setattr(book, "moved", lambda job, to, reason, **changes: real(job, to, "", **changes))


def keys_are_not_asked(patch):
    patch.setattr(book, "checked_key", lambda key: "")


MUTANTS = [
    impatient,
    no_margin_for_the_gang,
    only_the_new_lease_counts,
    every_folder_is_the_same,
    whoever_talks_is_well,
    who_is_given_up_is_gone_at_once,
    who_is_given_up_may_try_again,
    what_is_not_reported_is_gone,
    ready_is_gone,
    everybody_is_fresh,
    every_agent_is_the_same,
    every_end_is_a_success,
    stopped_is_succeeded,
    attempts_are_not_counted,
    nothing_is_undone,
    old_decisions_are_believed,
    places_are_forgotten,
    silence_is_for_ever,
    strangers_are_believed,
    a_port_is_not_told,
    no_reasons,
    keys_are_not_asked,
]


NEEDS = {
    only_the_new_lease_counts: [World.cut_line, World.restart_coordinator],
    every_folder_is_the_same: [World.namesake, World.break_line],
    who_is_given_up_is_gone_at_once: [World.cut_line],
}
"""Faults without which nobody notices; all others would only be in the way."""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_broken_rule_is_found(mutant, monkeypatch):
    mutant(monkeypatch)
    for seed in range(400):
        try:
            live(seed, faults=NEEDS.get(mutant))
        except (Violation, IllegalStep):
            return
    pytest.fail(f"{mutant.__name__}: no history shows that anything is wrong")


def test_the_model_is_the_same_for_the_same_seed():
    assert live(3).steps == live(3).steps

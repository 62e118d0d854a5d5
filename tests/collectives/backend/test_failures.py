"""A rank that dies, stops, leaves or errs is an error on every other rank, by name, in time.

Nobody hangs, nobody crashes: the survivors end as processes do, with no thread left (`Crew.close`).
"""

from __future__ import annotations

import re
import signal
import time
from importlib.util import find_spec

import pytest

from manyhands.links.base import LinkSettings, open_link
from manyhands.links.messages import Terms
from manyhands.testing.contract import Reader
from tests.collectives.backend.crew import Crew

# A kill closes the connection, and nobody waits for the lease. This one is so long that, on however
# busy a machine, half of it says so.
LEASE_S = 60.0
KNOWN_S = LEASE_S / 2

# How Python ends of a KeyboardInterrupt; torch 2.11's own hook for what nobody catches makes it 1.
INTERRUPTED = (-signal.SIGINT, 1)


def test_killed_with_everything_under_way_is_known_long_before_its_lease_ends(new_crew):
    with new_crew(3, lease_s=LEASE_S) as crew:
        crew.begin("failures", "wait_among", 2, ranks=[0, 1])
        crew.begin("failures", "die_among", ranks=[2])
        assert crew.ended(2) == -signal.SIGKILL, crew.report()
        start_s = time.monotonic()
        answers = crew.finish(ranks=[0, 1])
        assert time.monotonic() - start_s < KNOWN_S
        for answer in answers.values():
            assert answer.ok, answer.value
            errors = answer.value
            finished = {"all_reduce", "broadcast", "all_gather", "reduce_scatter"}
            for name, text in errors.items():
                if name in finished and not text:
                    continue  # that was before its death
                assert "rank 2" in text or "ranks 2" in text, (name, text)
                assert "rank-2" in text, (name, text)
            for name, form in (("huge", "all_reduce float32[25000000]"), ("barrier", "barrier")):
                assert f"`{form}" in errors[name], errors[name]
            assert "`send float32[300000]" in errors["send"]
            assert "recv" in errors["recv"]
            assert errors["store"].startswith("StoreGone"), errors["store"]
            assert errors["barrier"].startswith("DistBackendError"), errors["barrier"]


@pytest.mark.parametrize(
    ("victim", "how", "step"),
    [
        (0, {}, 3),
        (2, {}, 3),
        (2, {"late_s": 0.3}, 3),
        # An operation that has ended on one rank may owe sums to the others: they die with it.
        (2, {"late_s": 60.0, "agreed": False}, 2),
    ],
    ids=["first", "last", "sums late", "sums lost"],
)
def test_killed_in_a_backward_pass_is_known_long_before_its_lease_ends(new_crew, victim, how, step):
    with new_crew(3, lease_s=LEASE_S) as crew:
        crew.begin("failures", "train_until_error", victim, 3, **how)
        assert crew.ended(victim) == -signal.SIGKILL, crew.report()
        for answer in crew.finish().values():
            assert answer.ok, answer.value
            assert answer.value["step"] == step
            assert f"rank-{victim}" in answer.value["error"]
            assert "all_reduce" in answer.value["error"]
            assert answer.value["took_s"] < KNOWN_S


@pytest.mark.parametrize(
    "mode", ["as_bucket_view", "compressed", "find_unused", "power_sgd", "static_graph"]
)
def test_killed_in_a_backward_pass_in_every_mode(new_crew, mode):
    """The survivor has an error that names the dead, and then ends as processes do."""
    victim = 1
    with new_crew(2, lease_s=LEASE_S) as crew:
        crew.begin("failures", "train_until_error", victim, 3, mode=mode)
        assert crew.ended(victim) == -signal.SIGKILL, crew.report()
        (answer,) = crew.finish().values()
        assert answer.ok, answer.value
        assert answer.value["step"] == 3
        assert f"rank-{victim}" in answer.value["error"]
        assert "all_reduce" in answer.value["error"]
        assert answer.value["took_s"] < KNOWN_S


DEADLY = [  # (program, what it is given, what one of its ranks dies sending, how much of it)
    ("ddp.uneven_inputs", {}, "all_reduce", 6),
    ("sharding.fsdp", {}, "all_gather", 8),
    ("sharding.fsdp", {}, "reduce_scatter", 3),
    ("sharding.hsdp", {}, "all_reduce", 3),
    ("sharding.tensor_parallel", {}, "all_reduce", 1),
    ("sharding.functional_collectives", {}, "reduce_scatter", 1),
    ("pipelines.train", {"name": "gpipe"}, "send float32", 9),
    ("pipelines.train", {"name": "1f1b"}, "send float32", 9),
    ("pipelines.train", {"name": "interleaved"}, "send float32", 9),
    ("checkpoints.save", {"asynchronous": False}, "gather", 1),
    ("checkpoints.save", {"asynchronous": True}, "gather", 1),
    ("transfers.objects", {}, "all_gather", 2),
    ("frameworks.accelerate", {}, "all_reduce", 3),
    ("frameworks.fabric", {}, "all_reduce", 3),
]


@pytest.mark.parametrize(
    ("program", "given", "form", "num_pieces"),
    DEADLY,
    ids=[
        " ".join(map(str, (program, *given.values(), form))) for program, given, form, _ in DEADLY
    ],
)
def test_killed_within_any_program(new_crew, tmp_path, program, given, form, num_pieces):
    package = {"frameworks.fabric": "lightning_fabric"}.get(program, program.split(".")[1])
    if program.startswith("frameworks") and find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -r requirements-dev.lock")
    victim, world = 1, 4 if program == "sharding.hsdp" else 3
    if program == "checkpoints.save":
        given = given | {"folder": str(tmp_path / "checkpoint")}
    with new_crew(world, lease_s=LEASE_S) as crew:
        crew.begin("failures", "die_within", victim, program, given, form, num_pieces)
        assert crew.ended(victim) == -signal.SIGKILL, crew.report()
        for answer in crew.finish().values():
            assert answer.ok, answer.value
            assert f"rank {victim} (rank-{victim}" in answer.value["error"], answer.value
            # What a rank waits for by then may be another operation than the one that was cut off.
            assert re.search(r"`[a-z_]+ \w+\[\d+\]", answer.value["error"]), answer.value
            assert answer.value["took_s"] < KNOWN_S


def test_killed_before_a_hook_in_python(new_crew):
    with new_crew(2) as crew:
        crew.begin("failures", "train_with_a_hook_until_error", 1)
        assert crew.ended(1) == -signal.SIGKILL, crew.report()
        (answer,) = crew.finish().values()
        assert answer.ok, answer.value
        assert "rank-1" in answer.value["error"]
        assert "all_reduce" in answer.value["error"]


def test_stopped_is_known_when_its_lease_ends(zygote, new_url):
    """A process that stands still is out when its lease ends; it finds out when it goes on.

    The lease is so long that a busy machine has as much again for its turns.
    """
    url = new_url()
    terms = Terms(beat_s=0.3, lease_s=6.0)
    # Whoever opens the run sets its terms; this one only watches.
    with (
        open_link(url, name="watcher", settings=LinkSettings(terms=terms)) as link,
        Crew(zygote, 3) as crew,
    ):
        reader = Reader(link)
        crew.join(url)
        reader.settle(lambda view: "rank-1" in names(view))
        crew.begin("failures", "all_reduce_until_error")
        crew.signal(1, signal.SIGSTOP)
        stopped_s = time.monotonic()  # of all processes of a machine this is the same clock
        reader.settle(lambda view: "rank-1" not in names(view))
        out_s = time.monotonic()
        answers = crew.finish(ranks=[0, 2])
        crew.signal(1, signal.SIGCONT)
        answers |= crew.finish(ranks=[1])
        for rank, answer in answers.items():
            assert answer.ok, answer.value
            assert "all_reduce" in answer.value["error"]
            if rank != 1:
                assert "rank-1" in answer.value["error"]
                known_s = answer.value["at_s"]
                print(f"out after {out_s - stopped_s:.2f} s, known after {known_s - stopped_s:.2f}")
                assert known_s - stopped_s < 2 * terms.lease_s
                assert known_s - out_s < terms.lease_s / 2  # nothing else is waited for


def test_ranks_that_differ_and_start_anew(new_crew, new_url):
    """Everybody is told who does what; then the same processes meet again and go on."""
    with new_crew(2) as crew:
        for what, expected in {
            "operations": ("`all_reduce float32[5]", "`broadcast float32[5]"),
            "sizes": ("float32[5]", "float32[6]"),
            "large sizes": ("float32[500000]", "float32[500001]"),
            "dtypes": ("float32[5]", "int32[5]"),
            "splits": ("`all_to_all float32`", "expects 8 bytes"),
            "pair sizes": ("float32[5]", "float32[6]"),
            "roots": ("broadcast float32[5] from",),
            "large roots": ("broadcast float32[100000] from",),
        }.items():
            texts = crew.call("failures", "differ", what)
            for rank, text in texts.items():
                assert f"rank-{1 - rank}" in text or f"rank {1 - rank}" in text, (what, rank, text)
                assert all(word in text for word in expected), (what, rank, text)
            crew.call("life", "leave")
            crew.join(new_url())
        crew.call("sums", "coalesced")


def test_a_mistake_of_one_rank_is_its_own(crew):
    crew.call("failures", "mistake_of_one")


def test_left_behind(new_crew, new_url):
    """Leaving while others wait is an error for them; what was sent before is not lost."""
    with new_crew(3) as crew:
        crew.begin("failures", "all_reduce_until_error", ranks=[0, 1])
        crew.begin("failures", "leave_early", ranks=[2])
        answers = crew.finish()
        for rank in (0, 1):
            assert answers[rank].ok
            assert "rank 2" in answers[rank].value["error"]
            assert "all_reduce" in answers[rank].value["error"]
        crew.call("life", "leave")
        crew.join(new_url())
        crew.call("failures", "give_and_leave")
        crew.call("failures", "sum_without_one_that_left", ranks=[1, 2])
        crew.call("life", "leave")
        crew.join(new_url())
        crew.call("failures", "answer_to_one_that_left")


def test_not_called_in_time(new_crew):
    """The group's timeout names the operation and who has not called it."""
    with new_crew(2) as crew:
        texts = crew.call("failures", "late", 1.0)
        assert "`all_reduce float32[3]" in texts[0]
        assert "rank 1 (rank-1" in texts[0]
        assert "rank 0 (rank-0" in texts[1]  # which has given up


def test_whoever_waits_for_long_is_told_once_for_whom(new_crew):
    with new_crew(2) as crew:
        first, second = crew.call("failures", "stall", 0.5)[0]
        assert first.startswith("`all_reduce float32[3] sum` has waited ")
        assert second.startswith("`broadcast float32[4] from ")
        assert first.endswith(" s for rank 1")
        assert second.endswith(" s for rank 1")


def test_interrupted_in_an_operation(new_crew):
    """Ctrl-C ends a rank that waits for another one, as it ends any program."""
    with new_crew(2) as crew:
        crew.begin("failures", "wait_for_nobody", ranks=[0])
        crew.call("failures", "hear_that_it_waits", 0, ranks=[1])
        crew.signal(0, signal.SIGINT)
        assert crew.ended(0) in INTERRUPTED, crew.report()
        assert crew.log(0).read_text().rstrip().endswith("KeyboardInterrupt"), crew.report()
        ((_, answer),) = crew.call("failures", "all_reduce_until_error").items()
        assert "rank 0 (rank-0" in answer["error"]
        assert "all_reduce" in answer["error"]


def test_interrupted_while_it_waits_for_the_others_to_come(zygote, new_url):
    """Nothing of it stays at the meeting point."""
    url = new_url()
    with open_link(url, name="watcher") as link, Crew(zygote, 1) as crew:
        reader = Reader(link)
        crew.begin("failures", "enter_a_group_of_two", url)
        # Over a broker it may be gone before the word that it is ready has come to anybody.
        reader.settle(lambda view: "rank-0" in names(view))
        assert crew.ended(0) in INTERRUPTED, crew.report()
        assert crew.log(0).read_text().rstrip().endswith("KeyboardInterrupt"), crew.report()
        reader.settle(lambda view: "rank-0" not in names(view))


def names(view) -> set[str]:
    return {peer.name for peer in view.peers()}

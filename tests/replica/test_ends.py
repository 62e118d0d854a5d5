"""How a peer's part in a run ends: asked to leave, its loop over, too late, or alone."""

from __future__ import annotations

import math
import re
import signal
import sys
import threading
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import manyhands as mh
from manyhands.checkpoint.store import Store
from manyhands.core.errors import AddressError, UsageError
from manyhands.replica import session
from manyhands.replica.signals import how_to_go_on
from tests.replica.hands import Hands, held_at, until_members
from tests.replica.training import alone, shadow

pytestmark = pytest.mark.usefixtures("zygote", "hub")  # before the leak check looks


GATHERING_S = 2.0  # how long a run that opens waits for one that is dead
AGAIN_S = 2.0  # a broker waits for one lease before a run whose peers are all gone begins again


def reached(number):
    return lambda said: said.get("round", -1) >= number


def test_asked_to_end_it_finishes_its_round_and_leaves(zygote, url):
    with Hands(zygote, url, epochs=6, linger_s=0.2) as hands:
        first, second = hands.start(2)
        second.until(reached(3))
        second.tell("terminate")
        assert second.wait() == 0, second.report()
        hands.finish(second)
        assert [said["members"] for said in first.said if "members" in said][-1] == 1


def test_asked_to_end_while_it_waits_for_others_it_leaves_them_quietly(zygote, hub):
    """What comes after it is a run that nobody has begun."""
    with Hands(zygote, f"{hub.address}?insecure=1") as hands:
        first = hands.join(min_peers=2)
        first.until(lambda said: "dialed" in said)
        first.tell("terminate")
        assert first.wait() == 0, first.report()
        assert "Traceback" not in first.report()
        hands.start(2)
        hands.finish(first)


def test_ctrl_c_saves_and_ends(zygote, url, tmp_path):
    """Alone, it leaves a checkpoint of exactly where it was; the run goes on from there."""
    folder = tmp_path / "saved"
    options = {"checkpoints": str(folder), "save_every": 1000, "linger_s": 0.2}
    with Hands(zygote, url, epochs=6, **options) as hands:
        first = hands.join()
        first.until(reached(3))
        first.tell("interrupt")
        assert first.wait() == -signal.SIGINT, first.report()
        assert "KeyboardInterrupt" in first.report()
        assert "to go on from round" in first.report()
        (place,) = Store(folder).places()
        assert place.round == 1 + max(said["round"] for said in first.said if "round" in said)
        hands.join(resume=True)
        hands.finish(first)


def test_ctrl_c_of_both_and_resume_of_both(zygote, url, tmp_path):
    """As a terminal does it to all that a launcher has started: no round is lost or done anew."""
    folder = tmp_path / "saved"
    options = {"checkpoints": str(folder), "save_every": 1000, "lease_s": AGAIN_S}
    with Hands(zygote, url, epochs=6, **options) as hands:
        both = hands.start(2, linger_s=0.2)
        until_members(both[0], 2)
        both[1].until(reached(3))
        for hand in both:
            hand.tell("interrupt")
        for hand in both:
            assert hand.wait() == -signal.SIGINT, hand.report()
        said = [hand.report().count("to go on from round") for hand in both]
        assert any(said), hands.report()
        last = max(said["round"] for hand in both for said in hand.said if "round" in said)
        # Where both go after the same round, both save it.
        assert max(place.round for place in Store(folder).places()) == last + 1
        again = hands.start(2, resume=True, linger_s=0.2)
        until_members(again[0], 2)
        hands.finish(*both)
        first = min(said["round"] for hand in again for said in hand.said if "round" in said)
        assert first == last + 1


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({"__file__": "a b.py"}, "MANYHANDS_RESUME=1 python 'a b.py' --lr 1"),
        ({"__file__": "/x/y.py", "name": "x.y"}, "MANYHANDS_RESUME=1 python -m x.y --lr 1"),
        ({"__file__": "m.py", "name": "x.__main__"}, "MANYHANDS_RESUME=1 python -m x --lr 1"),
        ({"__file__": "m.py", "name": "__main__"}, "MANYHANDS_RESUME=1 python 'a b.py' --lr 1"),
        ({}, "wrap(..., resume=True)"),  # a notebook's
    ],
    ids=["script", "module", "package", "folder", "notebook"],
)
def test_what_is_said_to_go_on_begins_the_same_program(monkeypatch, facts, expected):
    main = ModuleType("__main__")
    if "__file__" in facts:
        main.__file__ = facts["__file__"]
    main.__spec__ = ModuleSpec(facts["name"], None) if "name" in facts else None
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", ["a b.py", "--lr", "1"])
    monkeypatch.delenv("MANYHANDS_AGAIN", raising=False)
    assert how_to_go_on() == expected
    monkeypatch.setenv("MANYHANDS_AGAIN", "as the launcher says")
    assert how_to_go_on() == "as the launcher says"


def test_what_a_loop_does_after_it_was_asked_to_end_is_not_saved(zygote, hub, tmp_path):
    """It steps its scheduler in the middle of an epoch; nobody else would have."""
    url, folder = f"{hub.address}?insecure=1", tmp_path / "saved"
    with Hands(zygote, url, epochs=6, checkpoints=str(folder), save_every=1000) as hands:
        first = hands.join(linger_s=0.2)
        first.until(reached(4))  # of four an epoch
        first.tell("terminate")
        assert first.wait() == 0, first.report()
        assert len(Store(folder).places()) == 1
        second = hands.join(resume=True)
        assert second.wait() == 0, second.report()
        end = second.until(lambda said: "done" in said)
        assert end["shadow"] == pytest.approx(shadow(alone(6)[1]), abs=1e-7)


def test_whose_loop_ends_early_leaves(zygote, url):
    """Without `epochs` the run has no end of its own, and one who has seen enough just goes."""
    with Hands(zygote, url) as hands:
        hands.start(2)
        third = hands.join(min_peers=1, stop_at=9)
        assert third.wait() == 0, third.report()
        hands.finish(third)


def test_who_comes_too_late_is_told(zygote, hub):
    """By a hub: a broker has no memory of a run whose peers are all gone."""
    url = f"{hub.address}?insecure=1"
    with Hands(zygote, url) as hands:
        hands.start(2)
        hands.finish()
        late = hands.join()
        assert late.wait() == 0, late.report()
        assert late.said[-2]["done"] == 0
        assert "is over: this peer came too late" in late.report()


def test_a_meeting_point_without_a_run_is_refused_when_joining(monkeypatch):
    monkeypatch.delenv("MANYHANDS_RUN", raising=False)
    with pytest.raises(AddressError, match="names no run") as caught:
        mh.join("hub://127.0.0.1:1?insecure=1")
    assert "MANYHANDS_RUN" in str(caught.value)


def small():
    model = torch.nn.Linear(2, 1)
    loader = DataLoader(TensorDataset(torch.zeros(4, 2)), batch_size=2)
    return model, torch.optim.SGD(model.parameters(), lr=0.1), loader


def test_an_option_that_is_misspelt_is_named_with_the_one_that_was_meant():
    with mh.join() as run, pytest.raises(UsageError, match="no option 'epoch'") as caught:
        run.wrap(*small(), epoch=1)
    assert "perhaps epochs" in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"min_peers": 0},
        {"min_peers": 1.5},
        {"min_peers": "2"},
        {"lease_s": 0},
        {"lease_s": "3"},
        {"lease_s": math.nan},
        {"lease_s": 1e9},
    ],
    ids=str,
)
def test_what_no_run_can_be_joined_with_is_named(wrong):
    ((name, value),) = wrong.items()
    with pytest.raises(UsageError, match=re.escape(f"{name}={value!r}")) as caught:
        mh.join(**wrong)
    assert caught.value.hint


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": 2.5},
        {"epochs": "2"},
        {"epochs": True},
        {"grain_size": 2.5},
        {"save_every": 1.5},
        {"resync_every": "8"},
        {"checkpoints": ""},
        {"checkpoints": 5},
    ],
    ids=str,
)
def test_an_option_that_is_none_is_named(wrong):
    ((name, value),) = wrong.items()
    with mh.join() as run, pytest.raises(UsageError, match=re.escape(f"{name}={value!r}")):
        run.wrap(*small(), **wrong)


def test_a_loop_over_the_old_loader_is_told_that_it_trained_nothing(caplog):
    model, optimizer, loader = small()
    with mh.join() as run:
        run.wrap(model, optimizer, loader, epochs=1)
        for (x,) in loader:
            model(x).mean().backward()
            optimizer.step()
    assert "iterate over the loader that wrap() returns" in caplog.text


def test_who_waits_for_others_to_begin_says_what_to_do(monkeypatch):
    said, reminders = threading.Event(), []

    def remind(text, *given):
        reminders.append(text % given)
        said.set()

    monkeypatch.setattr(session, "_TICK_S", 0.01)
    monkeypatch.setattr(session, "_REMIND_S", 0.0)
    monkeypatch.setattr(session.log, "warning", remind)

    first = threading.Thread(target=train_small, args=("first", "waited-for"), daemon=True)
    first.start()
    assert said.wait(30)
    train_small("second", "waited-for")
    first.join(30)
    assert not first.is_alive()
    assert reminders[0].startswith("1 of 2 peers are in run waited-for")
    assert "--min-peers" in reminders[0]


def train_small(name, run, **more):
    model, optimizer, data = small()
    with torch.no_grad():
        model.weight.fill_(more.pop("weight", 0.5))
        model.bias.zero_()
    with mh.join(f"local:///{run}", name=name, min_peers=2, **more) as hand:
        _, _, loader, _ = hand.wrap(model, optimizer, data, epochs=1)
        for (x,) in loader:
            model(x).mean().backward()
            optimizer.step()


@pytest.mark.parametrize("same", [True, False])
def test_nobody_waits_a_lease_for_those_that_come_with_other_weights(same, caplog):
    """They ask for the state, which only the round that waits for them can give."""
    run, lease = f"weights-{same}", {"lease_s": 600.0}
    first = threading.Thread(target=train_small, args=("a", run), kwargs=lease, daemon=True)
    first.start()
    second = {**lease, "weight": 0.5 if same else 0.25}
    other = threading.Thread(target=train_small, args=("b", run), kwargs=second, daemon=True)
    other.start()
    for thread in (first, other):
        thread.join(60)
        assert not thread.is_alive()
    assert "begins without" not in caplog.text


def test_killed_while_it_leaves(zygote, url):
    with Hands(zygote, url, epochs=6, linger_s=0.2) as hands:
        _, second = hands.start(2, {"what": "leaving", "then": "wait"})
        second.until(reached(3))
        second.tell("terminate")
        second.until(lambda said: said.get("at") == "leaving")
        second.kill()
        assert second.wait() == -signal.SIGKILL
        hands.finish(second)


def test_a_run_whose_state_is_lost_is_not_begun_anew_in_silence(zygote, hub):
    with Hands(zygote, f"{hub.address}?insecure=1") as hands:
        hands.join(held_at(3)).until(reached(3))
        hands.kill()
        another = hands.join()
        assert another.wait() == 1, another.report()
        assert "had a state, and nobody has it any more" in another.report()


def test_who_trains_something_else_is_told_what_and_disturbs_nobody(zygote, url):
    with Hands(zygote, url, epochs=10, linger_s=0.2) as hands:
        hands.join().until(reached(2))
        stranger = hands.join(grain=2, checkpoints=None)
        assert stranger.wait() == 1, stranger.report()
        assert "grain_size is 4 there and 2 here" in stranger.report()
        hands.finish(stranger)


def test_one_dies_while_the_run_opens(zygote, url):
    with Hands(zygote, url, min_peers=3, lease_s=GATHERING_S) as hands:
        # Wherever it is by then, it does not come to the end before it is killed.
        _, second, _ = (hands.join(*points) for points in ((), (held_at(1),), ()))
        second.until(lambda said: "joined" in said)
        second.kill()
        fourth = hands.join(min_peers=1)
        hands.finish(second, fourth)
        assert fourth.wait() == 0, fourth.report()  # it may have come too late


def test_one_after_the_other_dies_while_the_run_opens(zygote, url):
    """No sample was computed yet, and so none is to blame."""
    with Hands(zygote, url, min_peers=4, dies_opening=True, lease_s=GATHERING_S) as hands:
        some = [hands.join() for _ in range(4)]
        dead = [hand for hand in some if hand.wait() == -signal.SIGKILL]
        assert len(dead) == 3, hands.report()
        hands.finish(*dead)


@pytest.mark.parametrize("before", [True, False])
def test_the_only_one_with_a_state_dies_while_it_sends_that(zygote, hub, before):
    """Who waits for it came with a state, had to drop it, and must not wait for ever."""
    point = {"what": "Snapshot", "before": before}
    with Hands(zygote, f"{hub.address}?insecure=1", epochs=1000) as hands:
        first = hands.join(point, pace_s=0.01)
        first.until(reached(0))
        another = hands.join()
        assert first.wait() == -signal.SIGKILL, first.report()
        assert another.wait() == 1, another.report()
        assert "had a state, and nobody has it any more" in another.report()


@pytest.mark.parametrize("before", [True, False])
def test_the_founder_dies_while_the_run_opens_at_its_first_snapshot(zygote, hub, tmp_path, before):
    """The state is for one that has none; another one has brought its own, and goes on."""
    point = {"what": "Snapshot", "before": before}
    url = f"{hub.address}?insecure=1"
    with Hands(zygote, url, min_peers=3, lease_s=GATHERING_S) as hands:
        founder = hands.join(point)
        founder.until(lambda said: "dialed" in said)
        hands.join()
        late = hands.join(checkpoints=str(tmp_path), resume=True)
        assert founder.wait() == -signal.SIGKILL, founder.report()
        hands.finish(founder, late)
        assert late.wait() == 0, late.report()  # it may have come too late for the rest

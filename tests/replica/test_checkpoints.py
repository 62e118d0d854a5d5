"""A run that is saved, and goes on from what was saved as if nothing had been."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from manyhands.checkpoint.store import Store
from tests.replica.hands import Hands, saving, until_members, until_round, until_saved

pytestmark = pytest.mark.usefixtures("zygote", "hub")  # before the leak check looks

AGAIN_S = 2.0  # a broker waits for one lease before a run whose peers all died begins again
FULL_BYTES = 1 << 18  # a state has more than twice as many, and a log of this test far fewer


def test_resumed_five_times_at_other_numbers_of_peers(zygote, url, tmp_path):
    options = {"checkpoints": str(tmp_path / "saved"), "save_every": 1, "lease_s": AGAIN_S}
    with Hands(zygote, url, epochs=6, resume=True, **options) as hands:
        for number, until in ((1, 2), (3, 6), (2, 9), (1, 12), (2, 17)):
            hands.start(number, hands.brink, resume=until > 2, **saving(until))
            until_saved(hands, tmp_path / "saved", until)
            hands.kill()
        dead = list(hands.all)
        last = hands.start(3)
        hands.finish(*dead)
        first = min(said["round"] for said in last[0].said if "round" in said)
        assert first >= 17  # not from the beginning


def test_bit_identical_with_equal_shares(zygote, hub, tmp_path):
    """Through a hub: at a broker a peer may be a little late for the first round of a run."""
    url = f"{hub.address}?insecure=1"
    folder = str(tmp_path / "saved")
    states = []
    for stops in ((), (5,)):
        with Hands(
            zygote, url, shares="equal", checkpoints=folder, save_every=1, keep=100
        ) as hands:
            for stop in stops:
                hands.start(2, hands.brink, **saving(stop))
                until_saved(hands, Path(folder), stop)
                hands.kill()
                while hub.room(hands.run).view.roster:  # a run that is remembered, and nobody there
                    time.sleep(0.01)
            hands.start(2, resume=bool(stops))
            hands.finish(*hands.all[:-2])
            states.append({s["round"]: s["state"] for s in hands.all[-1].said if "round" in s})
        for file in Path(folder).iterdir():
            file.unlink()
    whole, resumed = states
    assert resumed
    assert all(whole[number] == state for number, state in resumed.items())


def test_a_broken_checkpoint_is_named_and_the_one_before_used(zygote, url, tmp_path):
    folder = tmp_path / "saved"
    options = {"checkpoints": str(folder), "save_every": 1, "keep": 100, "lease_s": AGAIN_S}
    with Hands(zygote, url, **options) as hands:
        hands.join(hands.brink, **saving(2))
        until_saved(hands, folder, 2, number=2)
        hands.kill()
        newest = folder / [place.tensors for place in Store(folder).places() if place.complete][-1]
        data = bytearray(newest.read_bytes())
        data[-5] ^= 1
        newest.write_bytes(data)
        second = hands.join(resume=True)
        hands.finish(hands.all[0])
        assert f"{newest.stem}" in second.report()
        assert "cannot be used" in second.report()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_cannot_be_written_does_not_stop_the_run(zygote, url, tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir(mode=0o500)
    with Hands(zygote, url, checkpoints=str(folder), save_every=1) as hands:
        hand = hands.join()
        hands.finish()
        assert "was not saved, and the run goes on" in hand.report()


def test_a_folder_that_is_a_file_does_not_stop_the_run(zygote, url, tmp_path):
    place = tmp_path / "saved"
    place.write_text("not a folder")
    with Hands(zygote, url, checkpoints=str(place), save_every=1) as hands:
        hand = hands.join()
        hands.finish()
        assert "was not saved, and the run goes on" in hand.report()


def test_a_disk_that_is_full_at_one_peer_does_not_stop_the_run(zygote, url, tmp_path):
    """As its kernel says when no file of this process may get larger than a part of the state."""
    folder = tmp_path / "saved"
    options = {"checkpoints": str(folder), "save_every": 1, "linger_s": 0.05}
    with Hands(zygote, url, epochs=10, **options) as hands:
        full = hands.join(file_bytes=FULL_BYTES)
        until_round(full, 2)
        other = hands.join()
        until_members(full, 2)
        hands.finish()
        assert "was not saved, and the run goes on" in full.report()
        assert "File too large" in full.report()
        ends = [next(s for s in hand.said if "done" in s) for hand in (full, other)]
        assert ends[0]["not saved"]
        assert not ends[1]["not saved"]


def test_the_first_of_the_roster_saves_and_the_newest_stay(zygote, url, tmp_path):
    folder = tmp_path / "saved"
    with Hands(zygote, url, checkpoints=str(folder), save_every=2, keep=2) as hands:
        hands.start(3)
        hands.finish()
        rounds = [place.round for place in Store(folder).places()]
        assert rounds[-1] == hands.num_rounds
        assert len(rounds) == 2


def test_it_goes_on_if_something_was_saved_and_else_begins(zygote, url, tmp_path):
    with Hands(
        zygote, url, checkpoints=str(tmp_path / "saved"), save_every=1, resume="auto"
    ) as hands:
        first = hands.join(hands.brink, **saving(3))
        until_saved(hands, tmp_path / "saved", 3)
        hands.kill()
        second = hands.join()
        hands.finish(first)
        assert min(said["round"] for said in first.said if "round" in said) == 0
        assert min(said["round"] for said in second.said if "round" in said) >= 3


def test_it_does_not_begin_where_there_are_only_broken_ones(zygote, url, tmp_path):
    folder = tmp_path / "saved"
    with Hands(zygote, url, checkpoints=str(folder), save_every=1, resume="auto") as hands:
        first = hands.join(hands.brink, **saving(2))
        until_saved(hands, folder, 2)
        hands.kill()
        for file in folder.glob("*.json"):
            file.write_text("nonsense")
        second = hands.join()
        assert second.wait() == 1
        assert "no checkpoint can be used" in second.report()
        assert "clear this one" in second.report()
        assert first.wait() != 0


def test_without_a_checkpoint_it_waits_for_who_has_one(zygote, url, tmp_path):
    """It must not begin the run anew in silence."""
    with Hands(zygote, url, save_every=1, lease_s=AGAIN_S) as hands:
        first = hands.join(hands.brink, checkpoints=str(tmp_path / "one"), **saving(3))
        until_saved(hands, tmp_path / "one", 3)
        hands.kill()
        second = hands.join(checkpoints=str(tmp_path / "none"), resume=True)
        third = hands.join(checkpoints=str(tmp_path / "one"), resume=True)
        hands.finish(first, second)
        assert second.wait() == 0, second.report()  # it may have come too late for the rest
        assert min(s["round"] for s in (*second.said, *third.said) if "round" in s) >= 3

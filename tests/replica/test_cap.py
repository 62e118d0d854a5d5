"""How many samples a pass may have where memory has an end: pure, and in a run whose peers die."""

from __future__ import annotations

from unittest.mock import Mock

import pytest
import torch

from manyhands.collectives.outcomes import Task
from manyhands.collectives.ranges import Ranges
from manyhands.replica.cap import Cap, Memory, memory_of
from manyhands.replica.conductor import Turn
from manyhands.replica.gates import Gate
from manyhands.replica.gradients import Gradients, parameters_of
from manyhands.replica.replica import Replica
from manyhands.replica.scalars import Scalars
from tests.replica.hands import Hands, until_members

pytestmark = pytest.mark.usefixtures("zygote", "hub")  # before the leak check looks


class Device:
    """A device on which the model takes `base`, a sample `each`, and everything `constant` more."""

    def __init__(self, *, limit, base=0, each=1, constant=0):
        self.limit, self.base, self.each, self.constant = limit, base, each, constant
        self.used = self.peak = base
        self.looks = 0

    def look(self, *, anew=False):
        self.looks += 1
        self.peak = self.used if anew else self.peak
        return Memory(self.used, self.peak, self.limit)

    def run(self, cap, num_samples):
        cap.begin(num_samples)
        self.peak = max(self.peak, self.used + self.constant + self.each * num_samples)
        assert self.peak <= self.limit, f"out of memory with {num_samples}"
        cap.survived(num_samples)


def test_the_first_pass_is_as_large_as_it_is_asked_to_be():
    assert Cap(Device(limit=10).look).most(1000) == 1000


def test_without_a_device_that_ends_every_pass_is():
    cap = Cap(None)
    cap.begin(8)
    cap.survived(8)
    assert cap.most(1000) == 1000


def test_what_was_survived_is_never_split_and_never_looked_at():
    device = Device(limit=100, base=20, each=1)
    cap = Cap(device.look)
    device.run(cap, 70)
    looks = device.looks
    for asked in (1, 69, 70):
        assert cap.most(asked) == asked
        device.run(cap, asked)
    assert device.looks == looks


def test_a_larger_share_is_split_where_it_would_not_fit():
    device = Device(limit=100, base=20, each=1)
    cap = Cap(device.look)
    device.run(cap, 40)
    assert cap.most(50) == 50  # within four fifths of the 80 that are left
    assert cap.most(80) == 64
    device.used = 70  # the optimizer has its own now
    assert cap.most(80) == 40  # what was survived is taken again, whatever the estimate


def test_what_was_used_before_the_first_pass_is_none_of_it():
    """Weights that were loaded twice for a while, an evaluation: the peak is near the limit."""
    device = Device(limit=31, base=15, each=0.1)
    device.peak = 28
    cap = Cap(device.look)
    device.run(cap, 2)
    assert cap.most(64) == 64


def test_what_was_used_between_two_passes_is_none_of_the_larger():
    device = Device(limit=100, base=20, each=1)
    cap = Cap(device.look)
    device.run(cap, 10)
    device.peak = 90
    device.run(cap, 20)
    assert cap.most(64) == 64


def test_nothing_taken_and_no_room_is_no_division():
    device = Device(limit=100, base=110, each=0)
    cap = Cap(device.look)
    cap.begin(10)
    cap.survived(10)
    assert cap.most(64) == 64


@pytest.mark.parametrize("constant", [0, 30])
def test_it_grows_to_what_fits_and_not_beyond(constant):
    """From a single sample, whose pass has all of the constant costs."""
    device = Device(limit=1000, base=100, each=1, constant=constant)
    cap = Cap(device.look)
    done = 1
    device.run(cap, done)
    for _ in range(20):
        most = cap.most(5000)
        assert most >= done
        device.run(cap, most)
        done = most
    assert done >= 0.7 * (1000 - 100 - constant)


def test_a_peak_that_somebody_has_reset_tells_nothing():
    device = Device(limit=100, base=20)
    cap = Cap(device.look)
    cap.begin(10)
    device.peak = 0
    cap.survived(10)
    assert cap.most(1000) == 1000


def test_an_allocator_that_counts_nothing_is_no_end_that_is_known(monkeypatch):
    """Those that a program plugs in have no statistics."""

    def refuse(*args, **kwargs):
        raise RuntimeError("CUDAPluggableAllocator does not yet support getDeviceStats")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 2 << 30))
    monkeypatch.setattr(torch.cuda, "memory_allocated", refuse)
    assert memory_of(torch.device("cuda", 0)) is None


@pytest.mark.parametrize(
    ("before", "there", "most"),
    [(3, None, 4), (3, 4, 4), (3, 3, 3), (3, 1, 3), (3, 0, 3), (0, 3, 3), (0, 0, 10)],
)
def test_a_pass_of_which_samples_were_missing_tells_of_those_that_were_there(before, there, most):
    """One of four, after one of three that were all there; or the first one, as all may be."""
    device = Device(limit=100)
    cap = Cap(device.look)
    if before:
        device.run(cap, before)
    conductor = Mock(cap=cap)
    conductor.close_turn.return_value = None
    model = torch.nn.Linear(3, 1)
    replica = Replica(
        conductor,
        Gradients(model, parameters_of(model, [])),
        Scalars(),
        Gate(),
        seed=0,
        batch=lambda _: 4,
        num_samples=lambda turn: len(turn.ranges),
        undone={},
        loss="mean",
        balance=False,
    )
    replica.watch(model, list(model.parameters()))
    units = Ranges.of((0, 4))
    replica.begin(Turn(0, 0, units, Task(0, units, 0)), there)
    device.peak = 4
    model(torch.ones(2, 3)).mean().backward()
    replica.close()
    device.limit = 1
    assert cap.most(10) == most


def test_a_survivor_computes_a_grown_share_in_passes_that_fit(zygote, url):
    """Two peers of which none could take the whole batch at once. One is killed; the other computes
    its share in passes as large as those before, and the run is the same.
    """
    options = {"grain": None, "memory": 14, "linger_s": 0.1, "shares": "equal"}
    with Hands(zygote, url, epochs=10, **options) as hands:
        first, second = hands.start(2)
        until_members(first, 2)
        first.until(lambda said: said.get("round", -1) >= 3)
        second.kill()
        left = until_members(first, 1)
        first.until(lambda said: said.get("round", -1) >= left + 4)
        hands.finish(second)
    sizes = [said["rows"] for said in first.said if "rows" in said]
    assert max(sizes) == 12  # half of a batch
    assert sizes[-8:-2] == [12, 12] * 3  # the last round of an epoch has 18 samples
    assert sizes[-2:] == [12, 6]

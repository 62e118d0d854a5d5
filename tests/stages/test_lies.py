"""A peer of a plan that says what no peer says: an error for the others, at once, and no memory."""

import msgspec
import pytest
import torch
from tests.stages.threads import Now
from torch import nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.core.errors import LinkBroken, ManyhandsError
from manyhands.stages.batch import Mode, Opening
from manyhands.stages.carrier import GroupCarrier
from manyhands.stages.terms import Terms
from manyhands.stages.values import Given, Kind, Rehearsed
from manyhands.stages.vote import Failure, sayable, words_of

PLAN = mh.Plan.even(2, 2, microbatches=2)
X = torch.ones(4, 3)


class Peer:
    """A carrier of one of two peers; the other one says what it was told to, and sends nothing."""

    size, words_on = 2, torch.device("cpu")

    def __init__(self, rank, said, ballot=()):
        self.rank, self._said, self._ballot = rank, list(said), dict(ballot)
        self.gave_up = None

    def send(self, tensor, to):
        return Now()

    def receive(self, tensor, sender):
        return Now()

    def prepare(self, peers, pairs):
        pass

    def sum(self, tensor, peers):
        for place, value in self._ballot.items():
            tensor[place] += value
        return Now()

    def spread(self, tensor, root, peers):
        return Now()

    def say(self, words, root):
        return words if root == self.rank else self._said.pop(0)

    def give_up(self, reason):
        self.gave_up = reason


def step(carrier):
    model = [nn.Linear(3, 3), nn.Linear(3, 3)]
    optimizer = torch.optim.SGD
    with mh.Pipeline(model, PLAN, loss_fn=F.mse_loss, optimizer=optimizer, group=carrier) as pipe:
        carrier.begun = True
        pipe.step(X, X)


def packed(word):
    return msgspec.msgpack.encode(word)


HUGE = (1 << 40, 1 << 40)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"\x00",
        b"\xff" * 100,
        b"\x91" * 100_000,
        packed({"carried": "nonsense"}),
        packed(Rehearsed(carried=(Kind((3,), "load"),), stashed={"a": (Kind((3,), "load"), "x")})),
        packed({"carried": [], "error": 5}),
    ],
)
def test_what_a_stage_would_give(said):
    with pytest.raises(ManyhandsError, match=r"gave up|no later layer pops"):
        step(Peer(0, [said]))


def terms():
    return msgspec.json.encode(
        Terms(
            plan=PLAN.to_json(),
            loss_fn=True,
            optimizer=True,
            targets="last",
            loss_is="mean",
            clip_norm=None,
            seed=None,
        )
    )


def opening(shape=(3,), dtype="float32", num_rows=4, **more):
    given = Given((Kind(shape, dtype),), True, ())
    return packed(Opening(Mode("step", True), num_rows, given, **more))


FIRST = packed(Rehearsed(carried=(Kind((3,), "float32"),)))


@pytest.mark.parametrize(
    "said",
    [
        [b"{}"],
        [b"["],
        [terms(), b""],
        [terms(), packed({"call": "nonsense"})],
        [terms(), opening(), packed(Rehearsed(carried=(Kind(HUGE, "float32"),)))],
        [terms(), opening(), packed(Rehearsed(carried=(Kind((-1,), "float32"),)))],
        [terms(), opening(), packed(Rehearsed(carried=(Kind((3,), "load"),)))],
        [terms(), opening(), packed(Rehearsed(carried=(Kind((3,), "_dynamo"),)))],
        [terms(), opening(), packed(Rehearsed(carried=()))],
        [terms(), opening(), packed(Rehearsed((Kind((3,), "float32"),) * 2, single=False))],
        [terms(), opening(num_rows=-4), FIRST],
        [terms(), opening(num_rows=1 << 60), FIRST],
        [terms(), opening(error="no", hint="x")],
    ],
)
def test_what_the_first_stage_would_give(said):
    with pytest.raises(ManyhandsError):
        step(Peer(1, said))


def test_a_peer_that_says_that_another_one_failed():
    """Who is said to have failed knows better."""
    peer = Peer(1, [terms()], {1: 1.0})
    with pytest.raises(mh.PlanBroken, match="gave up"):
        step(peer)
    assert peer.gave_up is not None


def test_a_failure_that_is_none():
    peer = Peer(1, [terms(), b"nonsense"], {0: 1.0})
    with pytest.raises(mh.PlanBroken, match="gave up"):
        step(peer)


def test_a_failure_with_an_odd_place():
    failure = {"message": "x", "traceback": "", "action": ["sideways", 1, 1]}
    peer = Peer(1, [terms(), packed(failure)], {0: 1.0})
    with pytest.raises(ManyhandsError):
        step(peer)


def test_what_has_no_end_is_not_waited_for():
    class Group:
        def broadcast(self, tensors, options):
            tensors[0][:8] = 255
            return Now()

    carrier = GroupCarrier.__new__(GroupCarrier)
    carrier._group, carrier.rank, carrier.size = Group(), 0, 2
    carrier.words_on = torch.device("cpu")
    with pytest.raises(LinkBroken, match="rank 1 speaks of 18446744073709551615 bytes"):
        carrier.say(None, 1)


def test_errors_are_told_with_an_end():
    class Long(nn.Module):
        def forward(self, x):
            raise RuntimeError("a" * 10_000_000)

    with pytest.raises(mh.ManyhandsError) as caught:
        mh.Pipeline([Long()], mh.Plan.even(1, 1)).predict(X)
    assert len(str(caught.value)) < 10_000
    assert isinstance(Failure("a", "b"), Failure)


def test_what_utf8_cannot_say_has_an_end_too():
    """Each of these becomes six characters."""
    assert len(sayable("\udcff" * 10_000)) <= 4000
    assert len(words_of(ValueError("\udcff" * 10_000))) <= 4000

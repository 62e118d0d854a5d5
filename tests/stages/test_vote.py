"""A death in the vote itself: some peers have heard that the step counts, some have not.

Those who have heard it have applied it. Nobody can go on, and what was saved last is what counts:
the run that is resumed from it is the one that was not interrupted.
"""

import itertools

import pytest
import torch
from tests.stages.cases import alone
from tests.stages.deaths import NUM_STEPS, SAVE_EVERY, batches, case, layers, pipeline
from tests.stages.test_deaths import ALONE, FEWER, NARROW, WIDE, check
from tests.stages.threads import Now, ThreadCarrier, run_threads

from manyhands.core.errors import LinkBroken
from manyhands.stages.errors import PlanBroken

PEERS = range(3)


class Died(BaseException):
    """The end of a process, as its thread has it: nothing of it runs any more."""


class Mortal(ThreadCarrier):
    """A carrier whose peer `victim` dies in one all-reduce of all peers, of which `deaf` hear
    nothing; from then on nothing is carried.
    """

    def __init__(self, switch, rank, victim, deaf):
        super().__init__(switch, rank)
        self.victim, self.deaf = victim, deaf
        self.armed = self.over = False

    def sum(self, tensor, peers):
        self._check()
        if not self.armed or len(peers) < self.size:
            return super().sum(tensor, peers)
        before = tensor.clone()
        super().sum(tensor, peers)
        self.over = True
        if self.rank == self.victim:
            raise Died
        if self.rank in self.deaf:
            tensor.copy_(before)
            self._check()
        return Now()

    def _check(self):
        if self.over:
            raise LinkBroken(f"rank {self.victim} (rank-{self.victim}) is gone")

    def send(self, tensor, to):
        self._check()
        return super().send(tensor, to)

    def receive(self, tensor, sender):
        self._check()
        return super().receive(tensor, sender)

    def say(self, words, root):
        self._check()
        return super().say(words, root)


@pytest.fixture(scope="module")
def uninterrupted():
    losses, modules = alone(case(ALONE))
    return losses, [module.state_dict() for module in modules]


def train(pipe, folder, dies_at=None):
    """Returns where it began, the losses by step, and whether it broke off."""
    pipe.load(folder)
    start, losses = pipe.num_steps, {}
    try:
        while (number := pipe.num_steps) < NUM_STEPS:
            if number == dies_at:
                pipe._carrier.armed = True
            x, y, _ = batches()[number]
            losses[number] = pipe.step(x, y)
            if pipe.num_steps % SAVE_EVERY == 0:
                pipe.save(folder)
    except PlanBroken as error:
        return {"start": start, "losses": losses, "error": str(error), "steps": pipe.num_steps}
    except Died:
        return None
    states = {layer.index: layer.module.state_dict() for layer in pipe.layers()}
    return {"start": start, "losses": losses, "states": states}


@pytest.mark.parametrize("stages", [NARROW, WIDE], ids=["narrow", "wide"])
@pytest.mark.parametrize("dies_at", [3, 4])  # with a save after it, and without
@pytest.mark.parametrize(
    ("victim", "deaf"),
    [
        (victim, deaf)
        for victim in PEERS
        for count in range(3)
        for deaf in itertools.combinations([peer for peer in PEERS if peer != victim], count)
    ],
)
def test_some_apply_the_step_and_all_go_on_from_what_is_saved(
    tmp_path, uninterrupted, stages, dies_at, victim, deaf
):
    folder = str(tmp_path / "saved")
    models = [layers() for _ in PEERS]

    def dying(carrier):
        mortal = Mortal(carrier.switch, carrier.rank, victim, deaf)
        pipe = pipeline(stages, lambda: models[carrier.rank], group=mortal)
        return train(pipe, folder, dies_at)

    found = run_threads(3, dying)
    assert found[victim] is None
    for peer in PEERS:
        if peer == victim:
            continue
        assert f"rank {victim} is peer" in found[peer]["error"]
        heard = peer not in deaf
        assert found[peer]["steps"] == dies_at + heard
        assert sorted(found[peer]["losses"]) == list(range(dies_at + heard))
    fewer = [layers() for _ in range(2)]
    resumed = run_threads(
        2, lambda c: train(pipeline(FEWER, lambda: fewer[c.rank], group=c), folder)
    )
    last = dies_at // SAVE_EVERY * SAVE_EVERY
    assert [answer["start"] for answer in resumed] == [last] * 2
    check(dict(enumerate(resumed)), uninterrupted)


def test_the_carrier_of_these_tests_says_the_same_until_somebody_dies():
    def act(carrier):
        mortal = Mortal(carrier.switch, carrier.rank, 0, ())
        total = torch.ones(2)
        mortal.sum(total, PEERS).wait()
        return total.tolist(), mortal.say(b"word" if carrier.rank == 1 else None, 1)

    assert run_threads(3, act) == [([3.0, 3.0], b"word")] * 3

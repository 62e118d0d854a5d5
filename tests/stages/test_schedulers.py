"""Learning rates: a run that is resumed on another plan goes on where its schedulers were."""

import pytest
import torch
from tests.stages.deaths import NUM_STEPS, batches, layers, pipeline
from tests.stages.threads import run_threads
from torch import nn
from torch.optim import lr_scheduler as rates

import manyhands as mh
from manyhands.core.errors import CheckpointError

PLANS = {
    "one": [(6, [0])],
    "two": [(3, [1]), (3, [0])],
    "wide": [(2, [0, 1, 2]), (2, [2, 1], [2, 1]), (2, [0])],
}
SCHEDULERS = {
    "one cycle": lambda o: rates.OneCycleLR(o, 0.1, total_steps=NUM_STEPS),
    "lambda": lambda o: rates.LambdaLR(o, lambda step: 0.5**step),
    "milestones": lambda o: rates.MultiStepLR(o, [2, 4], gamma=0.1),
    "cyclic": lambda o: rates.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "sequence": lambda o: rates.SequentialLR(
        o, [rates.LinearLR(o, 0.1, total_iters=2), rates.CosineAnnealingLR(o, 4)], [2]
    ),
    "plateau": lambda o: rates.ReduceLROnPlateau(o, factor=0.5, patience=0, threshold=10.0),
}


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def on_all(stages, act, build=layers):
    size = 1 + max(peer for stage in stages for peer in stage[1])
    models = [build() for _ in range(size)]

    def run(carrier):
        made = models[carrier.rank]
        return act(pipeline(stages, lambda: made, group=carrier, optimizer=sgd))

    return run_threads(size, run)


def train(pipe, scheduler, end):
    """Losses, and the rate after each of them."""
    found = {}
    while (number := pipe.num_steps) < end:
        x, y, _ = batches()[number]
        loss = pipe.step(x, y)
        if isinstance(scheduler, rates.ReduceLROnPlateau):
            scheduler.step(loss)
        else:
            scheduler.step()
        found[number] = loss, pipe.optimizer.param_groups[0]["lr"]
    return found


@pytest.mark.parametrize("after", PLANS)
@pytest.mark.parametrize("before", PLANS)
@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_resumed_run_has_the_rates_of_one_that_was_not_interrupted(tmp_path, kind, before, after):
    make, folder = SCHEDULERS[kind], str(tmp_path)

    def whole(pipe):
        return train(pipe, make(pipe.optimizer), NUM_STEPS)

    def first(pipe):
        scheduler = make(pipe.optimizer)
        train(pipe, scheduler, 3)
        pipe.save(folder, {"kind": kind}, scheduler=scheduler)

    def then(pipe):
        scheduler = make(pipe.optimizer)
        assert pipe.load(folder, scheduler=scheduler) == {"kind": kind}
        return train(pipe, scheduler, NUM_STEPS)

    wanted = on_all(PLANS["one"], whole)[0]
    assert len({rate for _, rate in wanted.values()}) > 1
    on_all(PLANS[before], first)
    for found in on_all(PLANS[after], then):
        assert sorted(found) == [3, 4, 5]
        for number, (loss, rate) in found.items():
            assert loss == pytest.approx(wanted[number][0], rel=1e-9)
            assert rate == pytest.approx(wanted[number][1], rel=1e-12)


def test_a_peer_without_parameters_has_no_scheduler(tmp_path):
    def build():
        torch.manual_seed(0)
        return [nn.Linear(6, 6).double(), *(nn.Tanh() for _ in range(3)), *layers()[3:4], nn.Tanh()]

    stages = [(1, [0]), (3, [1]), (2, [2])]

    def scheduler_of(pipe):
        return rates.ExponentialLR(pipe.optimizer, 0.5) if pipe.optimizer else None

    def save(pipe):
        scheduler = scheduler_of(pipe)
        pipe.step(*batches()[0][:2])
        if scheduler is not None:
            scheduler.step()
        pipe.save(str(tmp_path), scheduler=scheduler)

    def load(pipe):
        scheduler = scheduler_of(pipe)
        pipe.load(str(tmp_path), scheduler=scheduler)
        return None if scheduler is None else scheduler.get_last_lr()

    on_all(stages, save, build)
    assert on_all(stages, load, build) == [[0.025], None, [0.025]]
    assert on_all([(2, [0]), (4, [1])], load, build) == [[0.025], [0.025]]


def test_what_does_not_fit_is_refused_by_all_before_anything_is_changed(tmp_path):
    without, with_one = str(tmp_path / "without"), str(tmp_path / "with")

    def save(pipe):
        pipe.step(*batches()[0][:2])
        pipe.save(without)
        pipe.save(with_one, scheduler=rates.ExponentialLR(pipe.optimizer, 0.5))

    def load(pipe):
        before = [p.clone() for layer in pipe.layers() for p in layer.module.parameters()]
        said = []
        for folder, make in [(without, SCHEDULERS["lambda"]), (with_one, SCHEDULERS["milestones"])]:
            with pytest.raises(CheckpointError) as caught:
                pipe.load(folder, scheduler=make(pipe.optimizer))
            said.append(str(caught.value))
        after = [p for layer in pipe.layers() for p in layer.module.parameters()]
        assert all(map(torch.equal, before, after))
        assert pipe.load(with_one) == {}  # nobody has to go on with it
        return said

    on_all(PLANS["two"], save)
    (said,) = {tuple(said) for said in on_all(PLANS["two"], load)}
    assert "no scheduler was saved with these layers" in said[0]
    assert "save(url, scheduler=scheduler)" in said[0]
    assert "the scheduler is another one than was saved: one of the two has 'milestones'" in said[1]


def test_a_scheduler_that_cannot_be_saved_without_pickling_it(tmp_path):
    class Odd(rates.LRScheduler):
        def get_lr(self):
            return self.base_lrs

        def state_dict(self):
            return {"base_lrs": self.base_lrs, "odd": object()}

    def save(pipe):
        with pytest.raises(CheckpointError, match=r"scheduler\.odd is a object"):
            pipe.save(str(tmp_path), scheduler=Odd(pipe.optimizer))
        assert pipe.load(str(tmp_path)) is None

    on_all(PLANS["two"], save)


def test_the_program_of_the_documentation(tmp_path):
    """As a user has it: the same names for saving and loading, alone."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    pipe = mh.Pipeline(
        model, mh.Plan.even(2, 1), loss_fn=nn.functional.mse_loss, optimizer=torch.optim.Adam
    )
    scheduler = rates.StepLR(pipe.optimizer, 1)
    pipe.load(str(tmp_path), scheduler=scheduler)
    pipe.step(torch.ones(2, 2), torch.ones(2, 1))
    scheduler.step()
    pipe.save(str(tmp_path), {"epoch": 1}, scheduler=scheduler)
    assert pipe.load(str(tmp_path), scheduler=scheduler) == {"epoch": 1}
    assert scheduler.last_epoch == 1

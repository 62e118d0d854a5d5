"""Corners of the runtime: tensors that are written to, left out, of odd kinds, or kept too long."""

import copy
import weakref

import pytest
import torch
from tests.stages.threads import run_threads
from torch import nn
from torch.nn import functional as F

import manyhands as mh

X, Y = torch.randn(8, 4), torch.randn(8, 4)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def on_all(plan, act, build, **options):
    """act(pipeline) on each peer; each has a model of its own, all with the same values."""
    torch.manual_seed(0)
    made = build()
    models = [copy.deepcopy(made) for _ in plan.peers]
    given = {"loss_fn": F.mse_loss, "optimizer": sgd} | options

    def body(carrier):
        with mh.Pipeline(models[carrier.rank], plan, group=carrier, **given) as pipe:
            return act(pipe)

    return run_threads(len(plan.peers), body)


def losses(plan, build, batch=(X, Y), **options):
    def train(pipe):
        return [pipe.step(batch[0].clone(), batch[1]) for _ in range(3)]

    return on_all(plan, train, build, **options)[0]


class Writes(nn.Module):
    """Into what it is given."""

    def forward(self, x):
        return x.add_(1.0)


class GivesMask(nn.Module):
    def forward(self, x):
        mh.stash("mask", torch.ones(len(x), 4))
        return x


class TakesMask(nn.Module):
    def forward(self, x):
        return x * mh.pop("mask")


def test_a_layer_that_writes_into_inputs_without_gradients_is_computed_anew_rightly():
    def build():
        return [Writes(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]

    plan = mh.Plan.of_stages([(2, [0]), (2, [1])], microbatches=2)
    assert losses(plan.replace(recompute=True), build) == losses(plan, build)


class Filters(nn.Module):
    """Drops rows, which zeros do not show."""

    def forward(self, x):
        return x[x.sum(1) >= 0]


def test_rows_that_get_lost_are_an_error_on_every_peer():
    def act(pipe):
        with pytest.raises(mh.StepFailed, match="3 rows, and 2 came out"):
            pipe.step(torch.tensor([[1.0] * 4, [-1.0] * 4, [1.0] * 4]), Y[:3])

    plan = mh.Plan.even(2, 2)
    on_all(plan, act, lambda: [Filters(), nn.Linear(4, 4)])


def test_a_layer_that_is_unfrozen_too_late_is_an_error_not_a_gradient_that_is_lost():
    def act(pipe):
        pipe.step(X, Y)
        for layer in pipe.layers():
            layer.module.requires_grad_()
        with pytest.raises(mh.StepFailed, match="needs a gradient"):
            pipe.step(X, Y)

    def build():
        return [nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4)]

    on_all(mh.Plan.even(2, 2), act, build)


class Constant(nn.Module):
    """A mask that is -inf in places, and a table that thirds of it do not add up to."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), 0.0, 0.0]))
        self.register_buffer("table", torch.tensor([0.1, 0.7, 1.3, 1e-3]))
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return self.linear(x) * self.table * self.mask.exp()


@pytest.mark.parametrize("rows", [1, 7])
def test_buffers_that_nobody_writes_stay_as_they_are(rows):
    def act(pipe):
        for _ in range(5):
            pipe.step(X[:rows], Y[:rows])
        return [dict(layer.module.named_buffers()) for layer in pipe.layers()]

    plan = mh.Plan.of_stages([(1, [0, 1, 2])])
    for ((buffers,),) in [(found,) for found in on_all(plan, act, lambda: [Constant()])]:
        for name, buffer in Constant().named_buffers():
            assert torch.equal(buffers[name], buffer), name


class Counts(nn.Module):
    """Statistics that are assigned, not written."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(4))
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        if self.training:
            self.seen = 0.5 * self.seen + 0.5 * x.detach().mean(0)
        return self.linear(x)


def test_statistics_that_are_assigned_are_averaged_too():
    def act(pipe):
        pipe.step(X, Y)
        pipe.step(X, Y)
        return next(pipe.layers()).module.seen

    first, second = on_all(mh.Plan.of_stages([(1, [0, 1])]), act, lambda: [Counts()])
    assert torch.equal(first, second)
    torch.testing.assert_close(first, 0.75 * X.mean(0))


def test_variables_work_in_inference_mode():
    def build():
        return [GivesMask(), nn.Linear(4, 4), TakesMask()]

    def act(pipe):
        with torch.inference_mode():
            return pipe.predict(X)

    plan = mh.Plan.of_stages([(1, [0]), (2, [1])], microbatches=2)
    assert on_all(plan, act, build)[1].shape == X.shape


def test_targets_that_have_a_graph_are_taken_as_they_are():
    wish = nn.Linear(4, 4)(X)

    def act(pipe):
        return [pipe.step(X, wish) for _ in range(2)]

    plan = mh.Plan.even(2, 2, microbatches=2)
    build = lambda: [nn.Linear(4, 4), nn.Linear(4, 4)]  # noqa: E731
    last, first = (on_all(plan, act, build, targets=where) for where in ("last", "first"))
    assert last == first


class Roots(nn.Module):
    """Of zero, where the slope of a root is infinite."""

    def forward(self, x):
        return (x * 0).sqrt()


def test_a_norm_that_is_no_number_spoils_all_stages_alike():
    def act(pipe):
        pipe.step(X, Y)
        return [p.isnan().all() for layer in pipe.layers() for p in layer.module.parameters()]

    def build():
        return [nn.Linear(4, 4), Roots(), nn.Linear(4, 4)]

    for found in on_all(mh.Plan.of_stages([(2, [0]), (1, [1])]), act, build, clip_norm=1.0):
        assert found
        assert all(found)


@pytest.mark.parametrize("stages", [[(2, [0])], [(1, [0]), (1, [1])], [(2, [0, 1])]])
def test_sparse_gradients(stages):
    def build():
        return [nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4)]

    batch = torch.arange(8) % 3, Y
    got = losses(mh.Plan.of_stages(stages, microbatches=2), build, batch, clip_norm=0.5)
    dense = losses(mh.Plan.even(2, 1), lambda: [nn.Embedding(5, 4), nn.Linear(4, 4)], batch,
                   clip_norm=0.5)  # fmt: skip
    assert got == pytest.approx(dense, rel=1e-5)


class Turns(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x):
        return x * self.weight


class Length(nn.Module):
    def forward(self, x):
        return x.real + x.imag


@pytest.mark.parametrize("stages", [[(2, [0]), (1, [1])], [(1, [0]), (2, [1])], [(3, [0, 1])]])
def test_complex_parameters_and_activations(stages):
    def build():
        return [nn.Linear(4, 4), Turns(), Length()]

    got = losses(mh.Plan.of_stages(stages, microbatches=2), build, clip_norm=0.3)

    torch.manual_seed(0)
    model = nn.Sequential(*build())
    optimizer, wanted = sgd(model.parameters()), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(X), Y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        wanted.append(loss.item())
    assert got == pytest.approx(wanted, rel=1e-5)


def test_a_first_peer_without_rows_rehearses_with_those_of_another():
    def build():
        return [nn.BatchNorm1d(4), nn.Linear(4, 4)]

    plan = mh.Plan.of_stages([(1, [0, 1], [1, 9]), (1, [1])])
    got = losses(plan, build, (X[:4], Y[:4]))
    assert got == pytest.approx(losses(mh.Plan.even(2, 1), build, (X[:4], Y[:4])), rel=1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_what_has_arrived_is_not_kept(schedule):
    plan = mh.Plan.of_stages([(1, [0]), (1, [1])], microbatches=16, schedule=schedule)
    if schedule == "interleaved":
        plan = mh.Plan.even(4, 2, stages_per_peer=2, microbatches=16)
    models = [[nn.Linear(4, 4) for _ in plan.layers] for _ in plan.peers]

    def act(carrier):
        class Going:
            def wait(self):
                pass

        going, most, send = weakref.WeakSet(), [], carrier.send

        def watched(tensor, to):
            send(tensor, to)
            pending = Going()
            going.add(pending)
            most.append(len(going))
            return pending

        carrier.send = watched
        pipe = mh.Pipeline(models[carrier.rank], plan, loss_fn=F.mse_loss, optimizer=sgd,
                           group=carrier)  # fmt: skip
        pipe.step(torch.randn(16, 4), torch.randn(16, 4))
        return max(most)

    # As many as the schedule has under way, and a few in the last backwards; not one a microbatch.
    assert max(run_threads(2, act)) <= (4 if schedule == "1f1b" else 12)


@pytest.mark.parametrize("rehearsed", [True, False])
def test_an_error_that_utf8_cannot_say_is_heard(rehearsed):
    class Reads(nn.Module):
        def forward(self, x):
            if rehearsed or x.any():
                raise OSError("no file \udcff")
            return x

    def act(pipe):
        with pytest.raises(mh.ManyhandsError, match=r"OSError: no file \\udcff"):
            pipe.step(X, Y)

    on_all(mh.Plan.even(2, 2), act, lambda: [Reads(), nn.Linear(4, 4)])


@pytest.mark.parametrize("where", ["input", "extra", "target"])
@pytest.mark.parametrize(
    "change", [lambda t: t.double(), lambda t: t[:, :1]], ids=["dtype", "shape"]
)
def test_another_peer_of_a_wide_first_stage_is_given_something_of_another_kind(where, change):
    """What torch would broadcast or cast is not what one process would have computed."""

    def act(pipe):
        given = {"input": X, "extra": torch.ones(8, 4), "target": Y}
        if pipe.me == 1:
            given[where] = change(given[where])
        said = "extra input 'mask'" if where == "extra" else f"the {where}"
        with pytest.raises(mh.StepFailed, match=rf"peer 1: {said} is float\S+, \d\] here and fl"):
            pipe.step(given["input"], given["target"], {"mask": given["extra"]})
        return pipe.step(X, Y, {"mask": torch.ones(8, 4)})

    plan = mh.Plan.of_stages([(2, [0, 1])])
    build = lambda: [nn.Linear(4, 4), TakesMask()]  # noqa: E731
    found = on_all(plan, act, build, targets="first")
    alone = losses(mh.Plan.even(2, 1), lambda: [nn.Linear(4, 4), nn.Identity()])
    assert found == pytest.approx([alone[0]] * 2)

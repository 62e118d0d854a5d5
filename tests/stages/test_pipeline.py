"""What a user calls: steps, halves of steps, evaluation; inputs that cannot be used."""

import gc
import re
import threading
import weakref

import pytest
import torch
from tests.stages.threads import run_threads
from torch import nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.core.errors import UsageError
from manyhands.core.plan import PlanError
from manyhands.stages import part


def layers(seed=0):
    torch.manual_seed(seed)
    return [nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)]


def plan_of(size, **options):
    """Five layers over so many peers."""
    sizes = {1: [5], 2: [2, 3], 3: [2, 2, 1]}[size]
    return mh.Plan.of_stages([(n, [peer]) for peer, n in enumerate(sizes)], **options)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


X, Y = torch.randn(6, 4), torch.randn(6, 2)


def on_all(size, act, plan=None, **options):
    plan = plan or plan_of(size, microbatches=3)
    options = {"loss_fn": F.mse_loss, "optimizer": sgd, **options}
    models = [layers() for _ in range(size)]

    def body(carrier):
        with mh.Pipeline(models[carrier.rank], plan, group=carrier, **options) as pipe:
            return act(pipe)

    return run_threads(size, body)


def test_only_those_that_need_data_pass_it():
    def act(pipe):
        last = pipe.me == 2
        return [pipe.step(X if pipe.me == 0 else None, Y if last else None) for _ in range(3)]

    model = nn.Sequential(*layers())
    optimizer, wanted = sgd(model.parameters()), []
    for _ in range(3):
        loss = F.mse_loss(model(X), Y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        wanted.append(float(loss.detach()))
    for losses in on_all(3, act):
        assert losses == pytest.approx(wanted, rel=1e-5)


def test_targets_may_come_with_the_inputs():
    def act(pipe):
        return pipe.step(X, Y) if pipe.me == 0 else pipe.step()

    both = on_all(3, act, targets="first")
    wanted = on_all(3, lambda pipe: pipe.step(X, Y))
    assert both == wanted


def test_a_loss_that_is_a_sum():
    summed = on_all(2, lambda pipe: pipe.step(X, Y), loss_fn=nn.MSELoss(reduction="sum"),
                    loss_is="sum")  # fmt: skip
    with torch.no_grad():
        wanted = float(F.mse_loss(nn.Sequential(*layers())(X), Y, reduction="sum"))
    assert summed == pytest.approx([wanted] * 2, rel=1e-5)


@pytest.mark.parametrize(
    "plan",
    [
        None,
        mh.Plan.of_stages(
            [(1, [0]), (1, [1]), (2, [0]), (1, [1])], microbatches=4, schedule="interleaved"
        ),
        mh.Plan.of_stages([(1, [0]), (3, [1]), (1, [0])], microbatches=4),
    ],
    ids=["pipeline", "interleaved", "there and back"],
)
def test_the_halves_of_a_step_are_a_step(plan):
    def act(pipe):
        losses = []
        for _ in range(3):
            output = pipe.forward(X)
            gradient = None
            if output is not None:
                output.requires_grad_()
                loss = F.mse_loss(output, Y)
                loss.backward()
                gradient = output.grad
                losses.append(float(loss.detach()))
            pipe.backward(gradient)
            pipe.apply()
        return losses, [layer.module.state_dict() for layer in pipe.layers()]

    halves = on_all(2, act, plan)

    def step(pipe):
        losses = [pipe.step(X, Y) for _ in range(3)]
        return losses, [layer.module.state_dict() for layer in pipe.layers()]

    whole = on_all(2, step, plan)
    last = 1 if plan is None else plan.stages[-1].lead
    assert halves[1 - last][0] == []
    assert halves[last][0] == pytest.approx(whole[last][0], rel=1e-5)
    for (_, some), (_, others) in zip(halves, whole, strict=True):
        for state, other in zip(some, others, strict=True):
            torch.testing.assert_close(state, other)


def test_no_peer_of_the_first_stage_may_leave_the_targets_out():
    """The rows of that peer would be compared with nothing."""
    plan = mh.Plan.of_stages([(2, [0, 1]), (3, [2])], microbatches=2)

    def act(pipe):
        with pytest.raises(mh.StepFailed, match="other targets than the first"):
            pipe.step(X if pipe.me < 2 else None, Y if pipe.me == 0 else None)
        return True

    assert on_all(3, act, plan, targets="first") == [True] * 3


def test_halves_in_the_wrong_order():
    def act(pipe):
        with pytest.raises(UsageError, match=r"backward\(\) without a forward"):
            pipe.backward()
        output = pipe.forward(X)
        with pytest.raises(UsageError, match="waits for its backward"):
            pipe.forward(X)
        pipe.backward(None if output is None else torch.ones_like(output))
        kept = [p.grad.clone() for layer in pipe.layers() for p in layer.module.parameters()]
        with pytest.raises(UsageError, match=r"gradients wait for apply\(\)"):
            pipe.step(X, Y)  # which begins with none
        now = [p.grad for layer in pipe.layers() for p in layer.module.parameters()]
        assert all(map(torch.equal, kept, now))
        pipe.apply()
        pipe.step(X, Y)
        output = pipe.forward(X)
        pipe.backward(None if output is None else torch.ones_like(output))
        pipe.zero()
        return pipe.step(X, Y) > 0

    assert on_all(2, act) == [True, True]


def test_what_waits_for_apply_does_not_outlive_a_load(tmp_path):
    """It is of other parameters."""

    def act(pipe):
        pipe.save(str(tmp_path))
        output = pipe.forward(X)
        pipe.backward(None if output is None else torch.full_like(output, torch.nan))
        assert pipe.load(str(tmp_path)) == {}
        return pipe.step(X, Y), pipe.step(X, Y)

    def fresh(pipe):
        return pipe.step(X, Y), pipe.step(X, Y)

    assert on_all(2, act) == on_all(2, fresh)


def test_predictions_and_losses_without_gradients():
    def act(pipe):
        pipe.eval()
        output, loss = pipe.predict(X), pipe.evaluate(X, Y)
        pipe.train()
        held = [len(runner._held) for runner in pipe._part.runners.values()]
        return output, loss, held

    (none, loss, held), (output, other, _) = on_all(2, act)
    model = nn.Sequential(*layers())
    assert none is None
    torch.testing.assert_close(output, model(X))
    assert loss == other == pytest.approx(float(F.mse_loss(model(X), Y).detach()), rel=1e-5)
    assert held == [0]


def test_rows_of_a_wide_last_stage_are_where_they_were_computed():
    plan = mh.Plan.of_stages([(3, [0]), (2, [0, 1], [2, 1])], microbatches=2)
    mine, theirs = on_all(2, lambda pipe: pipe.predict(X), plan)
    whole = nn.Sequential(*layers())(X)
    torch.testing.assert_close(mine, whole[[0, 1, 3, 4]])
    torch.testing.assert_close(theirs, whole[[2, 5]])


def test_statistics_of_a_wide_stage_stay_the_same_on_its_peers():
    models = [[nn.BatchNorm1d(4), nn.Linear(4, 2)] for _ in range(3)]
    plan = mh.Plan.of_stages([(2, [0, 1, 2], [2, 2, 1])])
    x, y = torch.randn(10, 4), torch.randn(10, 2)

    def act(carrier):
        pipe = mh.Pipeline(models[carrier.rank], plan, group=carrier, loss_fn=F.mse_loss,
                           optimizer=sgd)  # fmt: skip
        pipe.step(x, y)
        return models[carrier.rank][0].running_mean.clone()

    means = run_threads(3, act)
    assert torch.equal(means[0], means[1])
    assert torch.equal(means[0], means[2])
    torch.testing.assert_close(means[0], 0.1 * x.mean(0))


def test_a_rehearsal_leaves_no_trace():
    model = [nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2)]
    pipe = mh.Pipeline(model, mh.Plan.of_stages([(3, [0])]))
    state = torch.get_rng_state()
    pipe.eval()
    pipe.predict(X)
    assert torch.equal(torch.get_rng_state(), state)
    assert float(model[0].running_mean.abs().max()) == 0
    assert int(model[0].num_batches_tracked) == 0


def test_recomputed_statistics_count_once():
    plan = mh.Plan.of_stages([(2, [0])], microbatches=2, recompute=True)
    model = [nn.BatchNorm1d(4), nn.Linear(4, 2)]
    mh.Pipeline(model, plan, loss_fn=F.mse_loss, optimizer=sgd).step(X, Y)
    assert int(model[0].num_batches_tracked) == 2


@pytest.mark.parametrize("recompute", [False, True])
def test_activations_are_freed_as_the_schedule_allows(recompute):
    """1F1B holds as many microbatches as there are stages behind; recomputing, only inputs."""
    alive, most = weakref.WeakSet(), []

    class Watching(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            y = self.linear(x)
            alive.add(y)
            gc.collect()
            most.append(len(alive))
            return y.sin()  # keeps y for its backward

    models = [[Watching(), nn.Linear(4, 2)], [nn.Identity(), nn.Linear(4, 2)]]
    plan = mh.Plan.of_stages([(1, [0]), (1, [1])], microbatches=8, recompute=recompute)
    x, y = torch.randn(8, 4), torch.randn(8, 2)

    def act(carrier):
        pipe = mh.Pipeline(
            models[carrier.rank], plan, group=carrier, loss_fn=F.mse_loss, optimizer=sgd
        )
        pipe.step(x, y)

    run_threads(2, act)
    assert max(most) == (1 if recompute else 2)
    gc.collect()
    assert not len(alive)


def test_inputs_that_cannot_be_used():
    def fails(*given, said, **options):
        def act(pipe):
            before = [p.clone() for layer in pipe.layers() for p in layer.module.parameters()]
            with pytest.raises((UsageError, mh.StepFailed), match=said) as caught:
                pipe.step(*given)
            after = [p for layer in pipe.layers() for p in layer.module.parameters()]
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
            pipe.step(X, Y)  # the next one works
            return str(caught.value)

        assert len(set(on_all(2, act, **options))) == 1

    fails(None, Y, said="the first peer of the first stage was given no inputs")
    fails([1, 2], Y, said="the input is a list")
    fails(torch.zeros(0, 4), Y, said="it has no rows")
    fails(torch.tensor(1.0), Y, said="it has no rows")
    fails((X, X[:3]), Y, said="the input has 3 rows, the input 6")
    fails(X, None, said="was given no targets")
    fails(torch.zeros(6, 5), Y, said=r"layer 0 \(0\) cannot take what it is given")
    fails(X, Y[:3], said="peer 1: ")
    fails(X, Y, said="peer 1: the loss is None", loss_fn=_first_time_wrong())


def _first_time_wrong():
    calls = []

    def loss_fn(output, target):
        calls.append(1)
        return None if len(calls) == 1 else F.mse_loss(output, target)

    return loss_fn


def test_a_step_without_a_loss():
    pipe = mh.Pipeline(layers(), plan_of(1))
    for call in (pipe.step, pipe.evaluate):
        with pytest.raises(UsageError, match="needs a loss"):
            call(X, Y)


def test_a_plan_for_others():
    with pytest.raises(PlanError, match="the plan is for 2 peers, the group has 1"):
        mh.Pipeline(layers(), plan_of(2))
    with pytest.raises(PlanError, match="the plan has 4 layers, the model 5"):
        mh.Pipeline(layers(), mh.Plan.of_stages([(4, [0])]))


def test_a_model_that_is_none():
    for model, said in [
        ([], "no layers"),
        ([nn.Linear(1, 1), "relu"], "layer 1 is 'relu'"),
        ([(nn.Linear, {"in_features": 1}, (1, 1))], "Linear cannot be built with"),
        ([(dict, {}, (1, 1))], "dict made a dict"),
        ([nn.ReLU(), nn.LazyLinear(1)], r"layer 1 \(LazyLinear\): its weight has no shape before"),
        ([(nn.LazyBatchNorm1d, {}, (1, 1))], "LazyBatchNorm1d: its weight has no shape"),
        *(
            ([(nn.ReLU, {}, shape)], f"layer 0 has the input shape {re.escape(repr(shape))}")
            for shape in (32, None, "32", (1.5, 2), [(1, 2), 3], [(1, 2), "ab"])
        ),
    ]:
        plan = mh.Plan.of_stages([(max(1, len(model)), [0])])
        with pytest.raises(UsageError, match=said):
            mh.Pipeline(model, plan)


def test_weights_that_are_tied_on_different_peers():
    model = layers()
    model[2].bias = model[0].bias
    with pytest.raises(PlanError, match=r"layer 2 \(2\) shares its bias with layer 0 \(0\)"):
        run_threads(2, lambda c: mh.Pipeline(model, plan_of(2), group=c))


def test_weights_that_are_tied_on_one_peer_train_as_in_one_process():
    def tied():
        model = layers()
        model[2].bias = model[0].bias
        return model

    plan = mh.Plan.of_stages([(2, [0]), (1, [0]), (2, [1])], microbatches=2, schedule="1f1b")
    models = [tied(), tied()]
    results = run_threads(
        2,
        lambda c: [
            mh.Pipeline(models[c.rank], plan, group=c, loss_fn=F.mse_loss, optimizer=sgd).step(X, Y)
        ],
    )
    model = nn.Sequential(*tied())
    optimizer = sgd(model.parameters())
    loss = F.mse_loss(model(X), Y)
    loss.backward()
    optimizer.step()
    assert results[0] == pytest.approx([float(loss.detach())], rel=1e-5)
    torch.testing.assert_close(models[0][0].bias, model[0].bias)


def test_layers_are_built_alike_wherever_they_are(monkeypatch):
    """From classes and arguments: the whole net is on no peer, and its values on no plan."""
    specs = [
        (nn.Linear, {"in_features": 4, "out_features": 8}, (32, 4)),
        (nn.ReLU, {}, (32, 8)),
        (nn.Linear, {"in_features": 8, "out_features": 2}, [(32, 8)]),
    ]

    one_by_one, usual = threading.Lock(), part.build

    def build(*args, **kwargs):
        with one_by_one:  # threads have one random generator
            return usual(*args, **kwargs)

    monkeypatch.setattr(part, "build", build)

    def states(plan, size):
        def act(carrier):
            pipe = mh.Pipeline(specs, plan, group=carrier, seed=7)
            return {layer.index: layer.module.state_dict() for layer in pipe.layers()}

        return [state for part in [run_threads(size, act)] for state in part]

    (whole,) = states(mh.Plan.of_stages([(3, [0])]), 1)
    first, second = states(mh.Plan.of_stages([(2, [0]), (1, [1])]), 2)
    assert set(first) == {0, 1}
    assert set(second) == {2}
    for index, state in {**first, **second}.items():
        for name, value in state.items():
            assert torch.equal(value, whole[index][name])


def test_a_layer_is_constructed_by_its_owners_and_by_nobody_else():
    """Not even for a moment: also not in the first step, which is rehearsed."""
    constructed, ranks = [], {}

    class Counted(nn.Linear):
        def __init__(self, place):
            super().__init__(4, 4)
            constructed.append((place, ranks[threading.get_ident()]))

    specs = [(Counted, {"place": place}, (8, 4)) for place in range(5)]
    plan = mh.Plan.of_stages([(1, [0]), (2, [1, 2]), (1, [2]), (1, [0])], microbatches=2)
    x = torch.randn(8, 4)

    def act(carrier):
        ranks[threading.get_ident()] = carrier.rank
        options = {"loss_fn": F.mse_loss, "optimizer": sgd, "group": carrier, "seed": 7}
        with mh.Pipeline(specs, plan, **options) as pipe:
            pipe.step(x, x)
            pipe.evaluate(x, x)

    run_threads(3, act)
    owned = [(0, 0), (1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (4, 0)]
    assert sorted(constructed) == owned

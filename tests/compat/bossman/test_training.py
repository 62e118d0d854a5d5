"""What workers make of a model is what one process makes of it."""

import asyncio
import time

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from manyhands.collectives.backend.group import ManyhandsGroup
from manyhands.compat.bossman import BossMan, wrapped_linear
from manyhands.core.errors import UsageError
from manyhands.core.plan import PlanError
from manyhands.stages.layers import Running, Spec, build
from manyhands.stages.moves import cut_batch
from manyhands.stages.values import carried_name
from manyhands.stages.variables import Scope, VariableError, scoped
from tests.stages.cases import Masked

WIDTH = 16
SQUARE = {"in_features": WIDTH, "out_features": WIDTH}
MODEL = [
    (nn.Linear, {"in_features": 3, "out_features": WIDTH}, (8, 3)),
    (wrapped_linear, SQUARE | {"out_variables": ["a"]}, (8, WIDTH)),
    (nn.Tanh, {}, (8, WIDTH)),
    (nn.Linear, SQUARE, (8, WIDTH)),
    (wrapped_linear, SQUARE | {"dependencies": ["a"]}, (8, WIDTH)),
    (nn.Linear, {"in_features": WIDTH, "out_features": 2}, (8, WIDTH)),
]
SEED = 5


class Alone:
    """One process: the layers that the workers would make, run one after another."""

    def __init__(self, model, seed=SEED):
        cpu = torch.device("cpu")
        specs = [Spec(kind, kwargs, ()) for kind, kwargs, _ in model]
        # In the plan, the boss's own layer comes before the first.
        made = [build(spec, index + 1, seed=seed, device=cpu) for index, spec in enumerate(specs)]
        self.model = nn.Sequential(*made)
        self.layers = [Running(module, index, str(index)) for index, module in enumerate(made)]
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def forward(self, x, extra=None):
        scope = Scope(extra)
        with scoped(scope):
            for layer in self.layers:
                x = layer.run(x, scope)
        return x

    def step(self, x, y, microbatches=1):
        self.optimizer.zero_grad()
        total = 0.0
        for span in filter(len, cut_batch(len(x), microbatches)):
            rows = slice(span.start, span.end)
            loss = F.mse_loss(self.forward(x[rows]), y[rows]) * (len(span) / len(x))
            loss.backward()
            total += float(loss.detach())
        self.optimizer.step()
        return total


def batches(count, rows=8):
    made = torch.Generator().manual_seed(1)
    return [
        (torch.randn(rows, 3, generator=made), torch.randn(rows, 2, generator=made))
        for _ in range(count)
    ]


def equal(state, model):
    wanted = model.state_dict()
    assert state.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(state[name], tensor), name


def sent_by(boss):
    """What goes from whom to whom, as all peers have worked it out."""
    courses = boss._pipeline._courses.values()
    lines = [line for course in courses for line in course.traffic.lines.values()]
    return {(m.value.name, m.source, m.target) for line in lines for m in line}


async def loop(boss, x, y):
    prediction = await boss.forward(x, {})
    assert prediction.is_leaf
    loss = F.mse_loss(prediction, y)
    loss.backward()
    await boss.backward(prediction.grad)
    await boss.optim_step()
    return prediction.detach(), float(loss.detach())


async def distributed(num_workers, model, **more):
    boss = BossMan(await BossMan.setup_host(num_workers, timeout_s=60), model, **more)
    await boss.distribute_model()
    await boss.send_optimizer(torch.optim.Adam, {"lr": 0.01, "betas": (0.9, 0.999)})
    return boss


def test_loop_and_train_step_give_the_run_of_one_process(hands):
    hands.start("a")
    hands.start("b")

    async def main():
        async with await distributed(2, MODEL, seed=SEED) as boss:
            stages = boss.plan.stages
            assert [stage.peers for stage in stages] == [(0,), (1,), (2,), (0,)]
            assert set(boss.plan.peers) == {"boss", "a", "b"}
            # The variable crosses: its giver is on one worker, its taker on the other.
            assert stages[1].first <= 2 < stages[1].end <= 5 < stages[2].end
            variables = boss.gather_dependencies()
            assert variables == {"a": (1, (4,))}
            alone = Alone(MODEL)
            equal(await boss.state_dict(), alone.model)
            for x, y in batches(3):
                wanted = alone.forward(x).detach()
                loss = alone.step(x, y)
                prediction, found = await loop(boss, x, y)
                assert torch.equal(prediction, wanted)
                assert found == loss
            equal(await boss.state_dict(), alone.model)
            assert ("a", 1, 2) in sent_by(boss)
            kinds = [("afab", 1), ("1f1b", 4), ("1f1b", 3), ("1f1b", 9)]
            for schedule, microbatches in kinds:
                for x, y in batches(2):
                    wanted = alone.step(x, y, microbatches)
                    loss = await boss.train_step(x, y, F.mse_loss, microbatches, schedule)
                    assert loss == pytest.approx(wanted, rel=1e-6)
                equal(await boss.state_dict(), alone.model)
            # And the loop again, after microbatches.
            x, y = batches(1)[0]
            wanted = alone.step(x, y)
            assert (await loop(boss, x, y))[1] == wanted
            equal(await boss.state_dict(), alone.model)

            with pytest.raises(UsageError, match="each worker has one stage") as no:
                await boss.train_step(x, y, F.mse_loss, 4, "interleaved")
            assert "stages_per_worker=2" in no.value.hint
            with pytest.raises(PlanError, match="6 layers cannot be dealt to 2 workers, 4 stages"):
                await boss.distribute_model(stages_per_worker=4)
            await boss.distribute_model(stages_per_worker=2)
            assert [s.peers[0] for s in boss.plan.stages] == [0, 1, 2, 1, 2, 0]
            alone = Alone(MODEL)
            equal(await boss.state_dict(), alone.model)
            await boss.send_optimizer(torch.optim.Adam, {"lr": 0.01})
            for microbatches in (4, 3):
                wanted = alone.step(x, y, microbatches)
                loss = await boss.train_step(x, y, F.mse_loss, microbatches, "interleaved")
                assert loss == pytest.approx(wanted, rel=1e-6)
                equal(await boss.state_dict(), alone.model)
            # Each of the four stages gives the next one its output: no worker's two are one.
            hops = {(a, b) for name, a, b in sent_by(boss) if name != "a"}
            assert hops == {(0, 1), (1, 2), (2, 1), (2, 0), (0, 2)}
            wanted = alone.step(x, y)
            assert (await loop(boss, x, y))[1] == wanted
            equal(await boss.state_dict(), alone.model)

    asyncio.run(main())
    hands.finish()


def test_the_boss_has_inputs_outputs_and_their_gradients_and_nothing_else(hands, monkeypatch):
    """What is between the workers goes from one to the other, and the boss's peer has no part."""
    seen = []
    watch(monkeypatch, seen)
    hands.start("a")
    hands.start("b")
    (x, y), *_ = batches(1)

    async def main():
        async with await distributed(2, MODEL, seed=SEED) as boss:
            await loop(boss, x, y)  # the first one is rehearsed
            await boss.train_step(x, y, F.mse_loss, 4)
            seen.clear()
            await loop(boss, x, y)
            assert tensors(seen) == [("recv", 2, (8, 2)), ("send", 1, (8, 3)), ("send", 2, (8, 2))]
            seen.clear()
            await boss.train_step(x, y, F.mse_loss, 4)
            wanted = [("recv", 2, (2, 2)), ("send", 1, (2, 3)), ("send", 2, (2, 2))]
            assert tensors(seen) == sorted(wanted * 4)
            # Beside these: openings and votes.
            assert max(tensor.nbytes for _, _, tensor in seen) <= 512
            first, between, last = (carried_name(stage, 0) for stage in range(3))
            assert sent_by(boss) == {
                *((first, 0, 1), (last, 2, 0), (last, 0, 2)),
                *((between, 1, 2), (between, 2, 1), ("a", 1, 2), ("a", 2, 1)),
            }

    asyncio.run(main())
    hands.finish()


def watch(monkeypatch, seen):
    """All that this process, which is the boss's, has a group of peers carry."""

    def record(name):
        usual = getattr(ManyhandsGroup, name)

        def recorded(group, tensors, *rest):
            seen.append((name, rest[0] if rest else None, tensors[0]))
            return usual(group, tensors, *rest)

        monkeypatch.setattr(ManyhandsGroup, name, recorded)

    for name in ("send", "recv", "allreduce", "broadcast"):
        record(name)


def tensors(seen):
    """What went to one peer or came from one: where, and of which shape. Sorted."""
    direct = [row for row in seen if row[0] in ("send", "recv")]
    return sorted((name, peer, tuple(tensor.shape)) for name, peer, tensor in direct)


def test_modes_extra_inputs_and_forwards_that_do_not_return(hands):
    hands.start("a", "--allow", "tests.stages")
    model = [
        (nn.Linear, {"in_features": 3, "out_features": 4}, (8, 3)),
        (nn.Dropout, {"p": 0.5}, (8, 4)),
        (Masked, {"name": "mask"}, (8, 4)),
        (nn.Linear, {"in_features": 4, "out_features": 2}, (8, 4)),
    ]
    x, y = batches(1)[0]
    mask = torch.tensor([1.0, 0.0] * 4)[:, None]

    async def main():
        async with await distributed(1, model, seed=SEED) as boss:
            alone = Alone(model)
            alone.model.eval()
            wanted = alone.forward(x, {"mask": mask}).detach()
            await boss.model_eval()
            assert torch.equal((await boss.forward(x, {"mask": mask})).detach(), wanted)
            await boss.model_train()
            first = await boss.forward(x, {"mask": mask})  # the one before it is forgotten
            assert not torch.equal(first.detach(), wanted)
            await boss.node_mem_clear()
            with pytest.raises(UsageError, match="without a forward"):
                await boss.backward(torch.ones_like(first))
            with torch.no_grad():
                assert not (await boss.forward(x, {"mask": mask})).requires_grad
            with pytest.raises(VariableError, match="'mask', which no layer before"):
                await boss.forward(x, {})
            with pytest.raises(VariableError, match="no layer takes the extra input 'other'"):
                await boss.forward(x, {"mask": mask, "other": mask})
            with pytest.raises(UsageError, match="other is a int"):
                await boss.forward(x, {"mask": mask, "other": 3})
            prediction = await boss.forward(x, {"mask": mask})
            with pytest.raises(UsageError, match=r"loss.backward"):
                await boss.backward(prediction.grad)
            F.mse_loss(prediction, y).backward()
            await boss.backward(prediction.grad)
            await boss.optim_step()
            loss = await boss.train_step(x, y, nn.MSELoss(), extra_inputs={"mask": mask})
            assert loss > 0
            with pytest.raises(UsageError, match="reduction='sum'"):
                await boss.train_step(x, y, nn.MSELoss(reduction="sum"))
            with pytest.raises(UsageError, match="no schedule 'best'"):
                await boss.train_step(x, y, nn.MSELoss(), schedule="best")
            with pytest.raises(UsageError, match="interleaved") as no:
                await boss.train_step(x, y, nn.MSELoss(), schedule="interleaved")
            assert no.value.hint == 'with a single worker take schedule="1f1b"'
            state = await boss.state_dict()
            changed = {name: tensor + 1 for name, tensor in state.items()}
            await boss.load_state_dict(changed)
            now = await boss.state_dict()
            assert all(torch.equal(now[name], changed[name]) for name in state)
            with pytest.raises(UsageError, match=r"another model: 0.bias"):
                await boss.load_state_dict({"0.weight": now["0.weight"]})

    asyncio.run(main())
    hands.finish()


def test_gradients_add_up_until_the_step(hands):
    hands.start("a")
    model = MODEL[:1]
    (x1, _), (x2, _) = batches(2)

    async def main():
        async with await distributed(1, model, seed=SEED) as boss:
            alone = Alone(model)
            for x in (x1, x2):
                alone.forward(x).square().sum().backward()
                prediction = await boss.forward(x, None)
                prediction.square().sum().backward()
                await boss.backward(prediction.grad)
                with pytest.raises(UsageError, match=r"wait for optim_step\(\)"):
                    await boss.train_step(x, x, F.mse_loss)  # and the gradients are still there
            alone.optimizer.step()
            await boss.optim_step()
            equal(await boss.state_dict(), alone.model)
            y = torch.zeros(8, WIDTH)
            alone.step(x, y)
            await boss.train_step(x, y, F.mse_loss, 1)
            equal(await boss.state_dict(), alone.model)

            async def load_the_same():
                await boss.load_state_dict(await boss.state_dict())

            for drop in (boss.node_mem_clear, load_the_same):
                prediction = await boss.forward(x1, None)
                prediction.square().sum().backward()
                await boss.backward(prediction.grad)
                await drop()
                alone.step(x, y)
                await boss.train_step(x, y, F.mse_loss, 1)
                equal(await boss.state_dict(), alone.model)

    asyncio.run(main())
    hands.finish()


def test_autocast_of_the_caller_is_that_of_the_workers(hands):
    """It belongs to a thread, and the boss's part runs in another one, the layers in processes."""
    hands.start("a")
    hands.start("b")

    async def main():
        async with await distributed(2, MODEL, seed=SEED) as boss:
            alone = Alone(MODEL)
            (x, y), *_ = batches(1)
            for way in (torch.bfloat16, None, torch.float16):

                def cast(way=way):  # each block keeps the weights that it has cast
                    return torch.autocast("cpu", dtype=way, enabled=way is not None)

                with cast():
                    wanted = alone.forward(x)
                    loss = F.mse_loss(wanted, y)
                loss.backward()
                with cast():
                    prediction = await boss.forward(x)
                    F.mse_loss(prediction, y).backward()
                assert prediction.dtype == (way or torch.float32)
                assert torch.equal(prediction, wanted)
                await boss.backward(prediction.grad)
                await boss.optim_step()
                alone.optimizer.step()
                alone.optimizer.zero_grad()
                equal(await boss.state_dict(), alone.model)
                with cast():
                    loss = F.mse_loss(alone.forward(x), y)
                    found = await boss.train_step(x, y, F.mse_loss, 1)
                loss.backward()
                alone.optimizer.step()
                assert found == float(loss.detach())
                equal(await boss.state_dict(), alone.model)
                alone.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
                assert (await boss.forward(x)).dtype == torch.float32

    asyncio.run(main())
    hands.finish()


def test_a_cancelled_wait_for_workers_leaves_nothing(hands):
    async def main():
        started = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(BossMan.setup_host(1, timeout_s=60), 0.3)
        assert time.monotonic() - started < 5

    asyncio.run(main())

"""What goes wrong on a worker or with one reaches the boss by name; those who are left go on."""

import asyncio
import io
import os
import signal
import sys
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from manyhands.compat.bossman import (
    BossMan,
    NoWorkers,
    WorkerFailed,
    WorkerRefused,
)
from manyhands.compat.bossman import boss as bosses
from manyhands.compat.bossman.crew import Crew
from manyhands.core.address import HubAddress
from manyhands.core.boss import lines_for
from manyhands.core.errors import LinkTimeout, UsageError
from manyhands.core.plan import Plan, PlanError
from manyhands.links.hub import Hub
from manyhands.planner.partition import DoesNotFit
from manyhands.stages.errors import PlanBroken, StepFailed
from tests.compat.bossman import odd
from tests.compat.bossman.test_training import MODEL, Alone, batches, distributed, equal, loop

ALLOW = ("--allow", "tests.compat.bossman")


def linear(features=3):
    return (nn.Linear, {"in_features": features, "out_features": features}, (8, features))


def test_what_a_worker_does_not_allow_is_refused_on_both_sides(hands):
    hands.start("a")
    hands.start("b")
    x, y = batches(1)[0]

    async def main():
        crew = await BossMan.setup_host(2, timeout_s=60)
        boss = BossMan(crew, [linear(), (odd.Touchy, {"features": 3}, (8, 3))])
        with pytest.raises(WorkerRefused, match=r"worker .: tests.compat.bossman.odd.Touchy") as no:
            await boss.distribute_model()
        assert "--allow tests" in str(no.value)
        with pytest.raises(UsageError, match="distribute_model"):
            await boss.forward(x, {})
        # The same workers go on.
        boss = BossMan(crew, MODEL, seed=5)
        await boss.distribute_model()
        with pytest.raises(WorkerRefused, match=r"odd.Lazy is not in a package"):
            await boss.send_optimizer(odd.Lazy, {"lr": 0.1})
        with pytest.raises(UsageError, match="no optimizer"):
            await boss.optim_step()
        with pytest.raises(UsageError, match="LBFGS needs a closure"):
            await boss.send_optimizer(torch.optim.LBFGS, {})
        await boss.send_optimizer(torch.optim.Adam, {"lr": 0.01})
        alone = Alone(MODEL)
        alone.step(x, y)
        await loop(boss, x, y)
        equal(await boss.state_dict(), alone.model)
        await boss.close()
        return no.value.worker

    refuser = asyncio.run(main())
    hands.finish()
    assert "refused: tests.compat.bossman.odd.Touchy" in hands.log(refuser)


def test_what_no_worker_can_make_is_refused_here():
    class Local(nn.Module):
        pass

    async def distribute(model):
        await BossMan([], model).distribute_model()  # no worker is asked

    for model, words in [
        ([(Local, {}, (8, 3))], "in a function"),
        ([(torch.relu, {}, (8, 3))], "expected a class"),
        ([(nn.ReLU, {"inplace": torch.ones(1)}, (8, 3))], "layer 0: inplace is a Tensor"),
    ]:
        with pytest.raises(UsageError, match=words):
            asyncio.run(distribute(model))
    with pytest.raises(UsageError, match="layer 1 is a ReLU that exists already"):
        BossMan([], [linear(), nn.ReLU()])


def test_an_exception_on_a_worker_reaches_the_boss_and_both_go_on(hands):
    hands.start("a", *ALLOW)
    hands.start("b", *ALLOW, ODD_WORKER="1")
    x, _ = batches(1)[0]
    model = [linear(), (odd.Touchy, {"features": 3}, (8, 3)), linear()]

    async def main():
        crew = await BossMan.setup_host(2, timeout_s=60)
        two = [(odd.Unbuildable, {}, (8, 3)), (odd.Unbuildable, {}, (8, 3))]
        with pytest.raises(WorkerFailed, match="worker b: RuntimeError: not on this machine") as no:
            await BossMan(crew, two).distribute_model()
        assert "in __init__" in no.value.traceback
        assert not no.value.ended

        boss = BossMan(crew, model, seed=5)
        await boss.distribute_model()
        with pytest.raises(WorkerFailed, match="ValueError: Invalid learning rate: -1") as no:
            await boss.send_optimizer(torch.optim.Adam, {"lr": -1})
        await boss.send_optimizer(torch.optim.Adam, {"lr": 0.01})
        alone = Alone(model)
        target = torch.zeros(8, 3)

        async def good():
            prediction = await boss.forward(x, {})
            F.mse_loss(prediction, target).backward()
            await boss.backward(prediction.grad)
            await boss.optim_step()
            alone.step(x, target)
            equal(await boss.state_dict(), alone.model)

        await good()
        with pytest.raises(StepFailed, match="too large for me") as no:
            await boss.forward(x * 1000, {})
        assert no.value.peer in ("a", "b")
        assert "in forward" in no.value.traceback
        assert "too large" in no.value.__notes__[0]
        await good()
        prediction = await boss.forward(x, {})
        with pytest.raises(StepFailed, match="too steep for me"):
            await boss.backward(torch.full_like(prediction, 1e6))
        await good()  # and the gradients of those who did not fail are gone
        with pytest.raises(StepFailed, match="too large for me"):
            await boss.train_step(x * 1000, target, F.mse_loss)
        with pytest.raises(StepFailed, match="peer boss: ZeroDivisionError"):
            await boss.train_step(x, target, lambda a, b: 1 / 0)
        await good()
        with pytest.raises(PlanError, match=r"model.0. Linear. cannot take what it is given"):
            await boss.forward(torch.ones(8, 7), {})
        await good()

        await boss.send_optimizer(odd.Lazy, {"lr": 0.1})
        prediction = await boss.forward(x, {})
        await boss.backward(torch.ones_like(prediction))
        with pytest.raises(WorkerFailed, match="RuntimeError: not today") as no:
            await boss.optim_step()
        assert no.value.ended
        with pytest.raises(UsageError, match="distribute_model"):
            await boss.forward(x, {})
        await boss.distribute_model()
        await boss.load_state_dict(alone.model.state_dict())
        equal(await boss.state_dict(), alone.model)
        await boss.close()

    asyncio.run(main())
    hands.finish()
    assert "too large for me" in hands.log("a") + hands.log("b")


@pytest.mark.parametrize("when", ["between", "within"])
def test_a_killed_worker_breaks_the_plan_and_the_other_goes_on(hands, when):
    hands.start("a")
    hands.start("b")
    x, y = batches(1)[0]

    async def main():
        async with await distributed(2, MODEL, seed=5) as boss:
            alone = Alone(MODEL)
            alone.step(x, y)
            await loop(boss, x, y)
            state = await boss.state_dict()
            victim = hands.workers["b"]
            if when == "between":
                os.kill(victim.pid, signal.SIGKILL)
            else:
                os.kill(victim.pid, signal.SIGSTOP)  # so that the others are waiting for it
                asyncio.get_running_loop().call_later(1.0, os.kill, victim.pid, signal.SIGKILL)
            started = time.monotonic()
            with pytest.raises(PlanBroken, match="worker b is gone"):
                await loop(boss, x, y)
            assert time.monotonic() - started < 10
            await boss.distribute_model()
            assert boss.plan.peers == ("boss", "a")
            await boss.send_optimizer(torch.optim.SGD, {"lr": 0.1})
            await boss.load_state_dict(state)
            optimizer = torch.optim.SGD(alone.model.parameters(), lr=0.1)
            alone.optimizer = optimizer
            alone.step(x, y)
            await loop(boss, x, y)
            equal(await boss.state_dict(), alone.model)

    asyncio.run(main())
    assert hands.code("b") == -signal.SIGKILL
    assert hands.code("a") == 0, hands.log("a")


def test_a_step_that_is_cancelled_ends_the_plan_and_nothing_hangs(hands):
    hands.start("a")
    x, _ = batches(1)[0]

    async def main():
        async with await distributed(1, MODEL, seed=5) as boss:
            await boss.forward(x, {})
            pid = hands.workers["a"].pid
            os.kill(pid, signal.SIGSTOP)
            started = time.monotonic()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(boss.forward(x, {}), 0.5)
            assert time.monotonic() - started < 5
            os.kill(pid, signal.SIGCONT)
            with pytest.raises(UsageError, match="distribute_model"):
                await boss.forward(x, {})
            await boss.distribute_model()
            assert torch.equal((await boss.forward(x, {})).detach(), Alone(MODEL).forward(x))

    asyncio.run(main())
    hands.finish()


def test_a_worker_that_is_told_to_stop_leaves_in_peace(hands):
    hands.start("a")

    async def main():
        async with await distributed(1, MODEL) as boss:
            os.kill(hands.workers["a"].pid, signal.SIGTERM)
            await asyncio.to_thread(hands.code, "a")
            with pytest.raises(PlanBroken, match="worker a is gone"):
                await boss.forward(batches(1)[0][0], {})
            with pytest.raises(PlanBroken, match="all workers are gone"):
                await boss.distribute_model()

    asyncio.run(main())
    assert hands.code("a") == 0
    assert "stopped" in hands.log("a")
    assert "Traceback" not in hands.log("a")


def test_a_worker_that_comes_twice_is_turned_away(hands):
    hands.start("first", label="a")

    async def main():
        waiting = asyncio.create_task(BossMan.setup_host(2, timeout_s=8))
        await asyncio.to_thread(has_offered, hands, "first")
        hands.start("second", label="a")
        assert await asyncio.to_thread(hands.code, "second") == 1
        with pytest.raises(NoWorkers, match=r"1 of 2 workers came \(a\) within 8 s") as no:
            await waiting
        assert "Turned away: a (there is a peer named a already" in no.value.hint

    asyncio.run(main())
    assert "the boss does not take this worker: there is a peer named a" in hands.log("second")
    assert hands.code("first") == 0


def has_offered(hands, name):
    deadline = time.monotonic() + 60
    while "offered" not in hands.log(name):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_worker_too_many_is_turned_away(hands):
    hands.start("a")

    async def main():
        async with await distributed(1, MODEL) as boss:
            hands.start("b")
            assert await asyncio.to_thread(hands.code, "b") == 1
            await boss.forward(batches(1)[0][0], {})

    asyncio.run(main())
    assert "all 1 workers are here" in hands.log("b")


def test_no_workers(hands):
    with pytest.raises(NoWorkers, match=r"no workers came, 2 were expected, within 0.2 s") as no:
        asyncio.run(BossMan.setup_host(2, timeout_s=0.2))
    assert f"MODEL_PORT={hands.port}" in no.value.hint
    assert isinstance(no.value, TimeoutError)
    with pytest.raises(UsageError, match="0 workers"):
        asyncio.run(BossMan.setup_host(0))


def test_workers_that_do_not_meet_are_said_with_one_remedy(monkeypatch):
    def wait(*_, **__):
        raise LinkTimeout("worker b", 60.0, hint="look at its log")

    monkeypatch.setattr(bosses, "open_group", wait)
    near = HubAddress(host="127.0.0.1", port=1, run="bossman", insecure=True)
    boss = BossMan(SimpleNamespace(near=near), MODEL)
    with pytest.raises(PlanBroken, match="the workers did not meet: no worker b within 60") as no:
        boss._enter("plan", Plan.even(1, 1))
    assert str(no.value).count("hint: ") == 1
    assert "distribute_model" in no.value.hint


def test_fewer_layers_than_workers_and_too_little_memory(hands):
    hands.start("a", "--memory", "0.25")
    hands.start("b", "--memory", "0.25")

    async def main():
        crew = await BossMan.setup_host(2, timeout_s=60)
        with pytest.raises(PlanError, match="1 layers cannot be dealt to 2 peers"):
            await BossMan(crew, [linear()]).distribute_model()
        with pytest.raises(DoesNotFit, match=r"peer . has 0.2 MiB free and needs \S+ MiB") as no:
            await BossMan(crew, [linear(), linear(512)]).distribute_model()
        assert no.value.layers == ("model[1] Linear",)
        assert no.value.missing_bytes > 3 << 20
        assert "--memory MIB" in no.value.hint
        assert "two tensors a parameter" in no.value.hint
        boss = BossMan(crew, [linear(), linear()])
        await boss.distribute_model()
        await boss.close()

    asyncio.run(main())
    hands.finish()


def test_a_worker_with_the_token_comes_in_by_tls_and_without_it_does_not(hands):
    with Crew(Hub("127.0.0.1:0"), 1) as crew:
        point = dict(line.split("=", 1) for line in lines_for(crew.address))
        assert set(point) == {"MODEL_HOST", "MODEL_PORT", "MODEL_TOKEN"}
        hands.start("plain", MODEL_PORT=point["MODEL_PORT"])
        assert hands.code("plain") == 1
        hands.start("a", **point)
        crew.gather(60)
        boss = BossMan(crew, MODEL)

        async def main():
            await boss.distribute_model()
            assert (await boss.forward(batches(1)[0][0], {})).shape == (8, 2)
            await boss.close()

        asyncio.run(main())
    assert hands.code("a") == 0
    assert "TLS" in hands.log("plain")


def test_beyond_loopback_both_sides_say_insecure(hands):
    """0.0.0.0 is this machine, and by its name no loopback."""
    anywhere = {"MODEL_HOST": "0.0.0.0"}
    hands.start("shy", **anywhere)
    assert hands.code("shy") == 2
    assert "MODEL_TOKEN is not set" in hands.log("shy")
    hands.start("a", "--insecure", **anywhere)

    async def main():
        crew = await BossMan.setup_host(1, host="0.0.0.0", insecure=True, timeout_s=60)
        assert crew.address.insecure
        async with BossMan(crew, MODEL, seed=5) as boss:
            await boss.distribute_model()
            x = batches(1)[0][0]
            assert torch.equal((await boss.forward(x, {})).detach(), Alone(MODEL).forward(x))

    asyncio.run(main())
    assert hands.code("a") == 0, hands.log("a")


def test_beyond_loopback_the_three_lines_that_the_boss_prints_are_enough(hands, monkeypatch):
    class Terminal(io.StringIO):
        """Whoever reads it starts a worker with what is there, and nothing else."""

        def write(self, text):
            if "MODEL_" in text:
                printed.update(line.strip().split("=", 1) for line in text.splitlines()[2:-1])
                hands.start("a", **printed)
            return super().write(text)

    printed = {}
    x, y = batches(1)[0]

    async def main():
        monkeypatch.setattr(sys, "stderr", Terminal())
        crew = await BossMan.setup_host(1, host="0.0.0.0", timeout_s=60)
        assert not crew.address.insecure
        async with BossMan(crew, MODEL, seed=5) as boss:
            await boss.distribute_model()
            await boss.send_optimizer(torch.optim.Adam, {"lr": 0.01})
            alone = Alone(MODEL)
            wanted = alone.step(x, y, 2)
            assert await boss.train_step(x, y, F.mse_loss, 2) == pytest.approx(wanted, rel=1e-6)
            equal(await boss.state_dict(), alone.model)

    asyncio.run(main())
    assert list(printed) == ["MODEL_HOST", "MODEL_PORT", "MODEL_TOKEN"]
    assert "(a secret)" in sys.stderr.getvalue()
    assert hands.code("a") == 0, hands.log("a")


def test_a_worker_that_alone_says_insecure_does_not_get_in(hands):
    with Crew(Hub("127.0.0.1:0"), 1) as crew:
        point = {"MODEL_HOST": "0.0.0.0", "MODEL_PORT": str(crew.address.port)}
        hands.start("a", "--insecure", **point)
        assert hands.code("a") == 1
        assert len(crew) == 0
    assert "TLS" in hands.log("a")


def test_without_a_boss_a_worker_says_so(hands):
    hands.start("a", "--wait", "0.3")
    assert hands.code("a") == 1
    assert f"no boss at 127.0.0.1:{hands.port} within 0.3 s" in hands.log("a")


def test_a_device_name_or_memory_that_cannot_be_is_said_at_once(hands):
    hands.start("a", "--device", "cuda:99")
    hands.start("b", label="\n")
    hands.start("c", "--memory", "inf")
    assert hands.code("a") == hands.code("b") == hands.code("c") == 2
    assert "Invalid value for '--memory'" in hands.log("c")
    assert "there is no device cuda:99 here" in hands.log("a")
    assert "cannot be named" in hands.log("b")

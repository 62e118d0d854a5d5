"""What the processes of a crew do in the tests of deaths and errors: train, save, and die on time.

A death is told by the name of a function of the runtime: the process is killed as it is called, or
as it returns, for the n-th time after it was armed.
"""

import importlib
import os
import re
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from tests.stages.cases import WIDTH, Case, Giving, Taking
from torch import nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.core.plan import Plan
from manyhands.stages.errors import PlanBroken, StepFailed
from manyhands.stages.pipeline import Pipeline

NUM_STEPS, SAVE_EVERY, NUM_ROWS = 6, 2, 10


class Death(NamedTuple):
    during: str  # build, step, save, load
    number: int  # of steps that were made by then
    function: str
    call: int = 0
    after: bool = False


def layers():
    """A variable skips the middle of it."""
    torch.manual_seed(7)
    made = [
        *(Giving(["skip"]), nn.Linear(WIDTH, WIDTH), nn.Tanh()),
        *(nn.Linear(WIDTH, WIDTH), Taking(["skip"]), nn.Linear(WIDTH, WIDTH)),
    ]
    return [layer.double() for layer in made]


def batches():
    made = torch.Generator().manual_seed(11)
    shape = (NUM_STEPS, 2, NUM_ROWS, WIDTH)
    return [(x, y, None) for x, y in torch.randn(shape, dtype=torch.float64, generator=made)]


def adam(parameters):
    return torch.optim.Adam(parameters, lr=0.01)


def case(stages, *, schedule="1f1b", recompute=False):
    num_peers = 1 + max(peer for stage in stages for peer in stage[1])
    names = ("ada", "bob", "cyd", "dan")[:num_peers]
    plan = Plan.of_stages(
        stages, peers=names, microbatches=4, schedule=schedule, recompute=recompute
    )
    return Case(layers, plan, batches(), False, None, None, adam, False)


def pipeline(stages, build=layers, schedule="1f1b", recompute=False, **options):
    made = case(stages, schedule=schedule, recompute=recompute)
    options = {"loss_fn": F.mse_loss, "optimizer": made.optimizer, **options}
    return Pipeline(build(), made.plan, **options)


def arm(death, mark):
    """Have this process killed; the time of its death is written to `mark` before."""
    module_name, _, path = death.function.partition(":")
    owner = importlib.import_module(f"manyhands.{module_name}")
    *inner, name = path.split(".")
    for part in inner:
        owner = getattr(owner, part)
    usual, calls = getattr(owner, name), []

    def deadly(*args, **kwargs):
        calls.append(name)
        if len(calls) - 1 != death.call:
            return usual(*args, **kwargs)
        if death.after:
            usual(*args, **kwargs)
        Path(mark).write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    setattr(owner, name, deadly)


def in_halves(pipe, x, y):
    """A step; its loss where it is computed."""
    output = pipe.forward(x)
    if output is None:
        pipe.backward()
        loss = {}
    else:
        output.requires_grad_()
        own = F.mse_loss(output, y)
        own.backward()
        pipe.backward(output.grad)
        loss = {pipe.num_steps: float(own.detach())}
    pipe.apply()
    return loss


def train(stages, folder, death=None, victim=None, mark=None, *, halves=False, **how):
    """All steps, from what is saved, saving now and then; what came of it.

    Where somebody is to die in loading, all load what they have just saved.
    """
    loads = death is not None and death.during == "load"
    death = death if victim == dist.get_rank() else None

    def now(during, number):
        if death is not None and (death.during, death.number) == (during, number):
            arm(death, mark)

    losses, pipe = {}, None
    try:
        now("build", 0)
        pipe = pipeline(stages, **how)
        pipe.load(folder)
        start = pipe.num_steps
        while (number := pipe.num_steps) < NUM_STEPS:
            x, y, _ = batches()[number]
            now("step", number)
            losses |= in_halves(pipe, x, y) if halves else {number: pipe.step(x, y)}
            if pipe.num_steps % SAVE_EVERY == 0:
                now("save", pipe.num_steps)
                pipe.save(folder, keep=2)
                if loads:
                    now("load", pipe.num_steps)
                    pipe.load(folder)
    except PlanBroken as error:
        ended_s = time.monotonic()
        if pipe is not None:
            for act in (lambda: pipe.step(x, y), lambda: pipe.save(folder)):
                with pytest.raises(PlanBroken, match=re.escape(str(error))):
                    act()
            pipe.close()
        return {"error": str(error), "hint": error.hint, "ended_s": ended_s, "losses": losses}
    states = {layer.index: layer.module.state_dict() for layer in pipe.layers()}
    return {"start": start, "losses": losses, "states": states}


def deal(function, victim, mark):
    """A plan for all peers, one of which dies on the way; what the others hear."""
    if dist.get_rank() == victim:
        arm(Death("deal", 0, function), mark)
    with pytest.raises(PlanBroken) as caught:
        mh.partition(layers(), torch.zeros(NUM_ROWS, WIDTH, dtype=torch.float64))
    return {"error": caught.value.message, "hint": caught.value.hint, "ended_s": time.monotonic()}


def train_and_end(stages, folder, death, victim, mark, out):
    """As `train` in a program that ends when the plan breaks."""
    answer = train(stages, folder, death, victim, mark)
    Path(out).write_text(f"{answer['ended_s']!r} {answer['error']}")
    os._exit(7)


_held = []


def begin(stages):
    """A step, before others."""
    _held.append(pipeline(stages))
    _held[0].step(*batches()[0][:2])


def train_until_broken():
    """Step after step; the error."""
    pipe = _held.pop()
    x, y, _ = batches()[0]
    while True:
        try:
            pipe.step(x, y)
        except PlanBroken as error:
            return str(error)


def give_up(stages, culprit, what):
    """One peer breaks off in the middle of its second step, and lives on; everybody's errors."""
    pipe = pipeline(stages)
    given = [batch[:2] for batch in batches()]
    pipe.step(*given[0])
    if dist.get_rank() == culprit:

        def broken_off(*_, **__):
            raise KeyboardInterrupt if what == "Ctrl-C" else RuntimeError("a mistake of Adam")

        if what == "Ctrl-C":
            next(pipe.layers()).module.register_forward_hook(broken_off)
        else:
            pipe.optimizer.step = broken_off
    errors = []
    while len(errors) < 2:
        try:
            pipe.step(*given[1])
        except (PlanBroken, KeyboardInterrupt) as error:
            errors.append(f"{type(error).__name__}: {error}")
    return errors, pipe.num_steps


# -- errors, not deaths ---------------------------------------------------------------------------


class Erring(nn.Module):
    """Raises in the forward or the backward of one step, on one peer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.wrong = None

    def forward(self, x):
        if not x.any():
            return self.linear(x)  # a rehearsal
        if self.wrong == "forward":
            raise RuntimeError("a mistake of a layer")
        out = self.linear(x)
        if self.wrong == "backward":
            out.register_hook(self._raise)
        return out

    def _raise(self, _):
        raise RuntimeError("a mistake of a layer")


class Unbuildable(nn.Module):
    def __init__(self):
        super().__init__()
        raise RuntimeError("no memory for this one")


class Asserting(nn.Module):
    def forward(self, x):
        assert x.shape[1] == 1, "one column is expected"
        return x


def erring_layers():
    torch.manual_seed(7)
    return [Erring() for _ in range(6)]


def err(stages, culprit, what):
    """A step that works, one that fails because of one peer, then two that work."""
    me = dist.get_rank()
    made = case(stages)._replace(build=erring_layers)
    marks = []

    def loss_fn(output, target):
        if marks and me == culprit and what == "loss":
            return output - target
        return F.mse_loss(output, target)

    pipe = Pipeline(made.build(), made.plan, loss_fn=loss_fn, optimizer=made.optimizer)
    given = batches()
    losses = [pipe.step(*given[0][:2])]
    before = [p.detach().clone() for layer in pipe.layers() for p in layer.module.parameters()]
    marks.append(True)
    own = [layer.module for layer in pipe.layers()]
    if me == culprit and what in ("forward", "backward"):
        own[0].wrong = what
    x, y, _ = given[1]
    if me == culprit and what == "targets":
        y = y[:3]
    if me == culprit and what == "no targets":
        y = None
    if me == culprit and what == "text":
        y = "targets"
    with pytest.raises(StepFailed) as caught:
        pipe.step(x, y)
    assert pipe.num_steps == 1
    marks.clear()
    own[0].wrong = None
    after = [p for layer in pipe.layers() for p in layer.module.parameters()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert all(p.grad is None for p in after)
    losses += [pipe.step(*batch[:2]) for batch in given[1:4]]
    states = {layer.index: layer.module.state_dict() for layer in pipe.layers()}
    failed = caught.value
    return {
        "peer": failed.peer,
        "text": str(failed),
        "traceback": failed.traceback,
        "losses": losses,
        "states": states,
    }

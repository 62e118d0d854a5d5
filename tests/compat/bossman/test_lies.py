"""A worker that turns bad: an error that names it, and nothing of its floods is kept."""

import asyncio
import threading
import time
from contextlib import contextmanager, suppress
from typing import get_args

import msgspec
import pytest
import torch
from torch import nn

from manyhands._version import __version__
from manyhands.compat.bossman import BossMan, NoWorkers, WorkerFailed
from manyhands.compat.bossman.crew import Crew
from manyhands.core.address import HubAddress
from manyhands.core.errors import LinkError, ManyhandsError
from manyhands.core.peers import View
from manyhands.links.base import Delivery, dial, new_peer
from manyhands.links.hub import Hub
from manyhands.links.messages import Ready, Terms
from manyhands.stages import commands as words
from manyhands.stages.errors import PlanBroken
from manyhands.wire.tensors import TensorSpec
from manyhands.worker.workshop import Workshop

MODEL = [(nn.Linear, {"in_features": 2, "out_features": 2}, (4, 2))] * 2
PATIENCE_S = 60.0


class Liar:
    """A worker in a thread that says what it likes; what it does not lie about, it does."""

    def __init__(self, port, name="liar", lies=None, offer=None):
        self.address = HubAddress(host="127.0.0.1", port=port, run=words.RUN, insecure=True)
        self.link = dial(self.address, new_peer(), words.SETTINGS)
        self.workshop = Workshop(self.address, torch.device("cpu"), ["torch.nn", "torch.optim"])
        self.link.tell(Ready())
        self.boss = self._find()
        self._lies = lies or {}
        self.refused = None
        if offer is None:
            self.offer(name)
        else:
            self.link.send(self.boss, b"bossman", [msgspec.msgpack.encode(offer)])
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _find(self):
        while True:
            event = self.link.receive(PATIENCE_S)
            if isinstance(event, View):
                for peer in event.peers():
                    if peer.name == words.BOSS:
                        return peer

    def offer(self, name, device="cpu"):
        """It comes before whatever is offered after this."""
        words.say(self.link, self.boss, words.Offer(name, device, 1 << 30, __version__))
        self.link.flush()

    def _serve(self):
        with suppress(LinkError):
            while True:
                event = self.link.receive()
                if not isinstance(event, Delivery):
                    continue
                word = words.heard_by_worker(event)
                if isinstance(word, words.Dismiss | words.Refuse):
                    self.refused = getattr(word, "reason", None)
                    break
                lie = self._lies.get(type(word))
                answer = self._honest(word) if lie is None else lie(self, word)
                if answer is not None:
                    words.say(self.link, self.boss, answer)
        self.workshop.close()
        self.link.close()

    def _honest(self, word):
        try:
            return self.workshop.do(word)
        except ManyhandsError as error:
            return words.Failed(word.id, "broken", error.message, ended=True)

    def leave(self, word=None):
        self.workshop.close()
        self.link.close()

    def join(self):
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


@contextmanager
def crew_of(number):
    with Crew(Hub("127.0.0.1:0", insecure=True), number) as crew:
        yield crew


@pytest.mark.parametrize("name", ["\x1b[2J", "a\nb", "boss", "é" * 60])
def test_a_name_that_cannot_be(name):
    with crew_of(1) as crew:
        liar = Liar(crew.address.port, name)
        liar.join()
        with pytest.raises(NoWorkers, match="no workers came") as no:
            crew.gather(0.0)
    assert "Turned away" in no.value.hint
    assert no.value.hint.isprintable()


@pytest.mark.parametrize(
    ("offer", "words"),
    [
        (["offer", "old", "cpu", None, "0.0.1"], "old (it is of release '0.0.1'; the boss is of "),
        (["offer", "new", "cpu", None, "99", "more"], "what it says is not understood; the boss"),
    ],
)
def test_a_worker_of_another_release(offer, words):
    """Commands that it cannot read would be waited for for half an hour."""
    with crew_of(1) as crew:
        other = Liar(crew.address.port, offer=offer)
        other.join()
        with pytest.raises(NoWorkers) as no:
            crew.gather(0.0)
    assert words in no.value.hint
    assert other.refused.endswith(f"the boss is of {__version__}, and both have to be of one")


def test_floods_are_not_kept(caplog):
    with crew_of(2) as crew:
        liar = Liar(crew.address.port)
        for number in range(3000):
            words.say(liar.link, liar.boss, words.Done(number))
            liar.link.send(liar.boss, b"bossman", [b"nonsense"])
            liar.offer(f"liar {number}")
        other = Liar(crew.address.port, "other")
        crew.gather(PATIENCE_S)
        assert [worker.name for worker in crew] == ["liar", "other"]
        outcome = crew.call(list(crew), lambda number, _: words.Describe(number))
        assert len(outcome.answers) == 2
        assert not crew._answers
        assert len(crew._turned_away) <= 8
    assert sum("not understood" in record.getMessage() for record in caplog.records) <= 2
    liar.join()
    other.join()


def bossed(lies):
    """A boss with an honest worker and one that lies."""

    def decorate(act):
        async def main():
            with crew_of(2) as crew:
                honest = Liar(crew.address.port, "honest")
                liar = Liar(crew.address.port, "liar", lies)
                await asyncio.to_thread(crew.gather, PATIENCE_S)
                boss = BossMan(crew, MODEL, seed=1)
                await act(boss)
                await boss.close()
                honest.join()
                liar.join()

        asyncio.run(main())

    return decorate


def test_an_error_that_only_it_has():
    @bossed({words.Build: lambda liar, word: words.Failed(word.id, "shared", "so they say")})
    async def _(boss):
        with pytest.raises(WorkerFailed, match="worker liar: so they say"):
            await boss.distribute_model()


def test_it_leaves_instead_of_an_answer():
    @bossed({words.Build: Liar.leave})
    async def _(boss):
        with pytest.raises(PlanBroken, match="worker liar is gone"):
            await boss.distribute_model()


async def train(boss):
    """All that a boss can ask for, once."""
    x = torch.ones(4, 2)
    await boss.distribute_model()
    await boss.send_optimizer(torch.optim.SGD, {"lr": 0.1})
    await boss.model_train()
    prediction = await boss.forward(x, {})
    await boss.backward(torch.ones_like(prediction))
    await boss.optim_step()
    await boss.train_step(x, x, nn.functional.mse_loss, 2)
    await boss.node_mem_clear()
    await boss.load_state_dict(await boss.state_dict())


@pytest.mark.parametrize("command", get_args(words.Command))
def test_it_leaves_in_the_middle_of_any_command(command):
    """The others do not wait for it, not even for as long as a lease; they go on without it."""

    @bossed({command: Liar.leave})
    async def _(boss):
        started_s = time.monotonic()
        with pytest.raises(PlanBroken, match="worker liar is gone"):
            await train(boss)
        assert time.monotonic() - started_s < Terms().lease_s
        await train(boss)
        assert boss.plan.peers == ("boss", "honest")


def test_it_does_not_come_to_the_meeting():
    """It says so instead: nobody waits for it."""
    refusal = "no such place"

    @bossed({words.Enter: lambda liar, word: words.Failed(word.id, "error", refusal)})
    async def _(boss):
        started_s = time.monotonic()
        with pytest.raises(WorkerFailed, match=f"worker liar: {refusal}"):
            await boss.distribute_model()
        assert time.monotonic() - started_s < Terms().lease_s


def test_it_leaves_when_its_state_is_asked_for():
    @bossed({words.Fetch: Liar.leave})
    async def _(boss):
        await boss.distribute_model()
        with pytest.raises(PlanBroken, match="liar"):
            await boss.state_dict()


def test_it_leaves_when_it_is_given_a_state():
    @bossed({words.Load: Liar.leave})
    async def _(boss):
        await boss.distribute_model()
        state = await boss.state_dict()
        with pytest.raises(PlanBroken, match="liar"):
            await boss.load_state_dict(state)


def described(*entries):
    return lambda liar, word: words.Done(word.id, tuple(entries))


@pytest.mark.parametrize(
    "entries",
    [
        [words.Entry(layer, "weight", TensorSpec("float32", (2, 2))) for layer in (0, 1, 2, 3, 99)],
        [words.Entry(2, "weight", TensorSpec("float32", (2, 2)))] * 2,
    ],
)
def test_state_of_layers_that_are_not_its_own(entries):
    @bossed({words.Describe: described(*entries)})
    async def _(boss):
        await boss.distribute_model()
        with pytest.raises(WorkerFailed, match="not its own"):
            await boss.state_dict()


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec("float32", (1 << 40,)),
        TensorSpec("nonsense", (2,)),
        TensorSpec("float32", (1 << 62, 1 << 62)),
        TensorSpec("float32", (3, 3)),
        TensorSpec("float64", (2, 2)),
    ],
)
def test_state_of_another_size_than_it_has(spec):
    lies = {
        words.Describe: lambda liar, word: words.Done(
            word.id,
            tuple(
                words.Entry(entry.layer, entry.name, spec)
                for entry in liar.workshop.do(word).entries
            ),
        )
    }

    @bossed(lies)
    async def _(boss):
        await boss.distribute_model()
        with pytest.raises(ManyhandsError):
            await boss.state_dict()


def test_it_says_that_it_is_done_and_leaves():
    def lie(liar, word):
        words.say(liar.link, liar.boss, words.Done(word.id))
        liar.link.flush()
        liar.leave()

    @bossed({words.Forward: lie})
    async def _(boss):
        await boss.distribute_model()
        with pytest.raises(PlanBroken, match="liar"):
            await boss.forward(torch.ones(4, 2), {})

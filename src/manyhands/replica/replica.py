"""Replica: a model that is trained in rounds, between two iterations of the user's own loop."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, SupportsFloat

import torch
from torch.nn import Module

from manyhands.collectives.outcomes import Committed
from manyhands.core.errors import UsageError
from manyhands.data.fetch import seed_all
from manyhands.replica.backward import Backward
from manyhands.replica.conductor import Conductor, Turn
from manyhands.replica.gates import Gate
from manyhands.replica.gradients import Gradients
from manyhands.replica.scalars import Scalars
from manyhands.replica.state import Stateful

log = logging.getLogger(__name__)

# A loop may evaluate in torch's inference mode; what is made of the state there is trained on.
_outside_inference = torch.inference_mode(mode=False)


def seed_of_pass(seed: int, round_: int, first: int | None) -> int:
    """Where the random numbers of a pass begin: that over units from `first` on, or with None of
    what follows the close of the round.
    """
    words = f"{seed}:{round_}:{first}".encode()
    digest = hashlib.blake2b(words, digest_size=8, person=b"manyhands-pass").digest()
    return int.from_bytes(digest, "little") >> 1  # torch and numpy take no negative ones


class Replica:
    """Runs the turns of a conductor on one model. Used by the user's thread.

    A turn that does not close its round is a transaction undone: its gradient goes to the bank and
    reads as zeros, optimizers and schedulers do nothing, and when the next turn begins, buffers and
    `undone` things are as they were when the round began.
    """

    def __init__(
        self,
        conductor: Conductor,
        gradients: Gradients,
        scalars: Scalars,
        gate: Gate,
        *,
        seed: int,
        batch: Callable[[int], int],
        num_samples: Callable[[Turn], int],
        undone: Mapping[str, Stateful],
        loss: str,
        balance: bool,
    ) -> None:
        """`batch`: samples of a round, `num_samples` those of a turn."""
        self._conductor, self._gradients = conductor, gradients
        self._scalars, self._gate, self._seed = scalars, gate, seed
        self._batch, self._num_samples = batch, num_samples
        self._undone, self._loss, self._balance = undone, loss, balance
        self._scaled = any(hasattr(thing, "unscale_") for thing in undone.values())
        self._backward: Backward | None = None
        self._turn: Turn | None = None
        self._dirty = False  # the last turn is to be undone
        self._round = -1  # whose beginning is remembered, as the engine counts them
        self._began: dict[str, Any] = {}  # state of the undone things then
        self._num_rows: int | None = None  # that are there of the turn's samples; None: all
        self._weight: float | None = None
        self._norm: float | None = None  # of the mean, if the round has one
        self._started_s = 0.0
        self._speed = 0.0
        self._warned = False
        self.on_commit: Callable[[int, Committed], None] = lambda round_, committed: None

    def watch(self, model: Module, parameters: list[Any]) -> None:
        """Meet the rounds from this model's backwards."""
        self._backward = Backward(model, parameters, self._on_begun, self._on_done)

    # -- between two bodies ---------------------------------------------------------------------

    @_outside_inference
    def next_turn(self) -> Turn | None:
        """End the last body, and see what comes next; `begin` it before its body."""
        self.settle()
        while True:
            self._conductor.between(self._conductor.base.applied)
            turn = self._conductor.next_turn()
            if turn is None or not turn.resyncs:
                return turn
            self._resync(turn)

    def _resync(self, turn: Turn) -> None:
        """All have the parameters that one of them gives. A peer that heals gives none."""
        committed = turn.committed
        if committed is None:
            gives = not self._conductor.healing
            tensors = self._gradients.values() if gives else self._conductor.nothing
            committed = self._conductor.close_turn(turn, tensors, float(gives))
        if committed is None:
            return  # it comes as another turn, unless the run goes on without this peer
        if committed.weight > 0 and not committed.result.alone:
            self._gradients.adopt_values(committed.result)
        committed.result.close()
        self._scalars.pass_by(committed.round, committed.sums[0].notes)
        self._conductor.advance(committed)

    @_outside_inference
    def begin(self, turn: Turn, num_rows: int | None = None) -> None:
        """Its body comes now, on so many of its samples; None: on all of them."""
        assert self._backward is not None
        self._backward.reset()
        self._backward.accumulated = False
        self._gate.open = self._gate.missed = False
        self._weight = self._norm = None
        self._turn, self._num_rows = turn, num_rows
        if turn.number != self._round:
            self._round = turn.number
            self._gradients.begin_round()
            self._began = {n: deepcopy(thing.state_dict()) for n, thing in self._undone.items()}
        self._scalars.begin_pass(turn.number)
        self._reseed(turn.round, turn.ranges.spans[0][0] if turn.ranges else 0)
        if not turn.evaluates:
            self._conductor.cap.begin(_num_units(turn))
        self._started_s = time.perf_counter()

    def abandon(self) -> Turn | None:
        """The loop has ended, perhaps within a body: that one's turn, which others are to redo."""
        turn, self._turn = self._turn, None
        if turn is not None and turn.ended:
            turn = None
        if turn is not None:
            self._gradients.undo()
            self._dirty = True
        if self._dirty:
            self._undo()
        return turn

    @_outside_inference
    def caught_up(self) -> None:
        """The loop is where the state was taken, at the end of an epoch: what it zeroes there now
        would have been zeroed without a pause too.
        """
        self._gradients.show_loaded()

    def replaced(self) -> None:
        """The state is another one: what was remembered of the old one is void."""
        self._dirty, self._round = False, -1
        self._gradients.forget()
        self._gate.open = False

    def _undo(self) -> None:
        self._dirty = False
        self._gradients.undo_buffers()
        for name, thing in self._undone.items():
            thing.load_state_dict(deepcopy(self._began[name]))

    @_outside_inference
    def settle(self) -> None:
        """The body is over, and undone if nothing is learnt from it.

        If its round is over too, steps act until the next one begins: an epoch may end with it.
        """
        turn, self._turn = self._turn, None
        if turn is not None and not turn.ended:
            self._end(turn)
        if self._dirty:
            self._undo()
        if turn is not None and turn.committed is not None:
            self._gate.open = True

    def _end(self, turn: Turn) -> None:
        """A body that ran no backward gives nothing; the round needs its word."""
        self._gradients.undo()
        self._dirty = True
        if turn.evaluates:
            self._end_evaluation(turn)
            return
        if turn.committed is not None and turn.committed.weight == 0.0:
            self._apply_nothing(turn, turn.committed)
            return
        if turn.committed is not None:
            turn.committed.result.close()
            raise UsageError(
                f"the loop body ran no backward for round {turn.round}",
                hint="run loss.backward() in every iteration; to leave a batch out, "
                "multiply its loss by 0 or call run.weight(0) before it",
            )
        self._warn_if_quiet(turn)
        committed = self._give_nothing(turn, 0.0)
        if committed is None:
            return
        if committed.weight == 0.0:
            self._apply_nothing(turn, committed)
        else:  # the body that follows it is to step like all others
            self._conductor.put_back(committed)

    def _warn_if_quiet(self, turn: Turn) -> None:
        """As loops for other libraries do to accumulate over iterations: here it loses samples."""
        if self._warned or self._backward is None or not self._backward.accumulated:
            return
        self._warned = True
        log.warning(
            "round %d: all backwards of an iteration were under no_sync(), so its samples count "
            "nothing. That is for all but the last of several in one iteration; to add up several "
            "rounds, run backward() without it, and step and zero_grad() when run.round is a "
            "multiple of their number",
            turn.round,
        )

    def stop(self) -> None:
        """No more turns for this peer: what its loop does after them is none of the run's."""
        self._gate.open = False

    @property
    def round_closed(self) -> bool:
        """Whether steps act: the last body has closed its round."""
        return self._gate.open

    def _end_evaluation(self, turn: Turn) -> None:
        """What was said of it counts."""
        committed = turn.committed
        if turn.task is not None:
            committed = self._give_nothing(turn, self._weight_of(turn))
        if committed is not None:
            self._apply_nothing(turn, committed)

    def _give_nothing(self, turn: Turn, weight: float) -> Committed | None:
        """No gradient; what was said counts so much."""
        assert turn.task is not None
        unused = [False] * self._gradients.num_tensors
        self._scalars.end_pass(turn.task.generation, weight, unused)
        return self._conductor.close_turn(turn, self._conductor.nothing, 0.0)

    # -- inside a body --------------------------------------------------------------------------

    def weight(self, value: float) -> None:
        """This pass counts so much, not as many as it has samples."""
        if self._turn is None or self._turn.ended:
            raise UsageError(
                "weight() came after the backward it was for", hint="call it before backward()"
            )
        if not (math.isfinite(value) and value >= 0):
            raise UsageError(f"a weight of {value} is none", hint="0 or more: samples, tokens")
        self._weight = float(value)

    def say(self, name: str, value: SupportsFloat) -> None:
        """A scalar of this pass."""
        turn = self._turn
        if turn is None or turn.task is None:
            return  # no samples: nothing to say of them
        if turn.ended:
            weight = self._weight_of(turn)
            self._scalars.say_after(name, float(value), weight, closed=turn.committed is not None)
        else:
            self._scalars.say(name, value)

    def _weight_of(self, turn: Turn) -> float:
        if turn.task is None or self._num_rows == 0:
            return 0.0
        if self._weight is not None:
            return self._weight
        return float(self._num_samples(turn) if self._num_rows is None else self._num_rows)

    def _on_begun(self) -> None:
        turn = self._turn
        if turn is None:
            return  # not in the loop: the user's own affair
        if turn.ended:
            raise UsageError(
                "a second backward in one iteration: the round was closed by the first",
                hint="run all but the last one under `with run.no_sync():`",
            )
        if turn.evaluates:
            raise UsageError(
                "a backward in an evaluation, from which nothing is learnt",
                hint="train in the loop over the loader; evaluate under torch.no_grad()",
            )
        self._gradients.begin_backward()

    def _on_done(self) -> None:
        turn = self._turn
        if turn is None:
            return
        if self._gate.missed:
            raise UsageError(
                "step() came before the backward that closes the round, and did nothing",
                hint="step after the last backward of an iteration; what has to step between two "
                "(of a GAN, say) can take turns: one net in even rounds, one in odd (run.round)",
            )
        weight = self._weight_of(turn)
        if turn.task is None:
            committed = self._conductor.close_turn(turn, (), 0.0)
            if committed is not None and committed.member and not self._speed:
                self._measure(turn)  # it had no share of the round, and will have none until then
        else:
            committed = self._close(turn, weight)
        if committed is None or committed.weight == 0.0:
            self._gradients.undo()
            self._dirty = True
            if committed is not None:
                self._apply_nothing(turn, committed)
            return
        self._apply(turn, committed)

    def _close(self, turn: Turn, weight: float) -> Committed | None:
        assert turn.task is not None
        if weight <= 0:
            self._measure(turn)
            return self._give_nothing(turn, 0.0)
        # Sums are of the order of one batch, whatever its size: w / B of a mean.
        whole = float(self._batch(turn.round))
        share = weight / whole
        factor = share if self._loss == "mean" else 1.0 / whole
        tensors, used = self._gradients.contribution(factor, share, first=0 in turn.ranges)
        self._measure(turn)  # a GPU is done only now
        self._scalars.end_pass(turn.task.generation, weight, used)
        return self._conductor.close_turn(turn, tensors, share)

    def _apply(self, turn: Turn, committed: Committed) -> None:
        num_tensors = self._gradients.num_tensors
        used = self._scalars.committed(turn.round, committed.sums[0].notes, num_tensors)
        self._gradients.adopt(committed.result, used)
        self._norm = None if committed.result.alone else committed.squared_norm**0.5
        committed.result.close()
        self._done(turn, committed)
        self._gate.open = True

    def _apply_nothing(self, turn: Turn, committed: Committed) -> None:
        """A round whose samples all counted nothing is over, and nothing is learnt from it."""
        self._scalars.committed(turn.round, committed.sums[0].notes, 0)
        committed.result.close()
        self._done(turn, committed)

    def _done(self, turn: Turn, committed: Committed) -> None:
        turn.committed = committed
        self._conductor.advance(committed)
        if not turn.evaluates:
            self.on_commit(turn.round, committed)
        self._reseed(turn.round, None)

    def clip_grad_norm_(self, max_norm: float) -> float:
        """Scale p.grad to this norm at most; returns what it was. The same bits everywhere."""
        if not self._gate.open:
            return 0.0  # a pass that does not close its round has nothing to clip
        norm = self._norm
        if norm is None:
            norm = self._gradients.norm()
        # The owners' norm is of the mean. A scaler changes that behind torch's back.
        elif self._scaled or not self._gradients.are_means():
            norm = self._gradients.norm(torch.float64)
        coefficient = max_norm / (norm + 1e-6)
        if coefficient < 1.0:
            self._gradients.scale(coefficient)
        return norm

    # -- small things ---------------------------------------------------------------------------

    def _measure(self, turn: Turn) -> None:
        """How many units a second this peer computes, as a running mean; and at once, at most."""
        units = _num_units(turn)
        if self._num_rows is not None:  # rows may be missing of every pass: the others count
            asked = max(1, self._num_samples(turn))
            units = units * min(self._num_rows, asked) // asked
        self._conductor.cap.survived(units)
        if not self._balance:
            return
        speed = _num_units(turn) / max(1e-6, time.perf_counter() - self._started_s)
        self._speed = speed if not self._speed else 0.7 * self._speed + 0.3 * speed
        self._conductor.measure_speed(max(1, round(self._speed * 1000)))

    def _reseed(self, round_: int, first: int | None) -> None:
        """What a body draws depends on what it computes, not on who does or what was before."""
        seed = seed_of_pass(self._seed, round_, first)
        seed_all(seed)
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed_all(seed)

    def no_sync(self) -> Any:  # noqa: ANN401
        """Backwards in here only accumulate."""
        assert self._backward is not None
        return self._backward.no_sync()

    def close(self) -> None:
        """Model and optimizers are the user's alone again. Idempotent."""
        if self._backward is not None:
            self._backward.close()
        self._gate.release()


def _num_units(turn: Turn) -> int:
    """That its body computes. One that counts nothing has some samples, too: less, perhaps."""
    return max(1, len(turn.ranges))

"""What a pipeline remembers of kinds of batches: not more than so many, and all peers the same."""

import pytest
import torch
from tests.stages.threads import run_threads
from torch import nn

import manyhands as mh
from manyhands.stages import pipeline
from manyhands.stages.recent import Recent


def test_what_was_not_asked_for_longest_is_forgotten():
    made = []

    def get(key):
        return recent.get(key, lambda: made.append(key) or f"<{key}>")

    recent = Recent(2)
    assert [get(key) for key in "abacab"] == ["<a>", "<b>", "<a>", "<c>", "<a>", "<b>"]
    assert made == ["a", "b", "c", "b"]
    assert recent.values() == ["<a>", "<b>"]
    assert len(recent) == 2


def test_what_cannot_be_made_takes_no_place():
    recent = Recent(1)
    recent.get("a", lambda: 1)
    with pytest.raises(ZeroDivisionError):
        recent.get("b", lambda: 1 // 0)
    assert recent.values() == [1]
    assert recent.get("a", lambda: 2) == 1


class Sums(nn.Module):
    """Takes rows of any length."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, x):
        return x * self.weight


def test_peers_forget_the_same_kinds_and_train_as_if_they_had_not(monkeypatch):
    lengths = [3, 4, 5, 3, 6, 3, 4, 5, 6, 3]

    def losses(size):
        plan = mh.Plan.even(2, size, microbatches=2)
        models = [[Sums(), Sums()] for _ in range(size)]

        def act(carrier):
            pipe = mh.Pipeline(
                models[carrier.rank],
                plan,
                group=carrier,
                loss_fn=nn.functional.mse_loss,
                optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
            )
            found = [
                pipe.step(
                    torch.full((4 + index % 2, length), 0.5), torch.ones(4 + index % 2, length)
                )
                for index, length in enumerate(lengths)
            ]
            return found, len(pipe._tables), len(pipe._courses)

        return run_threads(size, act)

    (remembered,) = losses(1)
    assert remembered[1:] == (4, 7)
    rehearsed, usual = [], pipeline.rehearse

    def counting(plan, runners, carrier, given, *args, **options):
        rehearsed.append((carrier.rank, given.carried[0].shape))
        return usual(plan, runners, carrier, given, *args, **options)

    monkeypatch.setattr(pipeline, "MAX_TABLES", 2)
    monkeypatch.setattr(pipeline, "MAX_COURSES", 3)
    monkeypatch.setattr(pipeline, "rehearse", counting)
    found = losses(2)
    assert [of[0] for of in found] == [remembered[0]] * 2
    assert [of[1:] for of in found] == [(2, 3)] * 2
    first, second = ([shape for rank, shape in rehearsed if rank == who] for who in (0, 1))
    assert first == second
    assert len(first) > len({*lengths})  # some had been forgotten

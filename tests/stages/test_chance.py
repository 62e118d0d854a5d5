"""What layers draw, in plans of several peers."""

import threading

import torch
from tests.stages.threads import run_threads
from torch import nn

import manyhands as mh
from manyhands.stages import runner
from manyhands.stages.chance import seed_of


def test_the_first_rows_draw_what_one_peer_draws_and_others_something_else():
    assert runner.Seeds(1, 2, 3).of(4) == runner.Seeds(1, 2, 3, 0).of(4) == seed_of(1, 2, 3, 4)
    assert len({runner.Seeds(1, 2, 3, row).of(4) for row in range(8)}) == 8


def test_peers_of_a_wide_stage_do_not_drop_the_same_places(monkeypatch):
    set_by = {}
    # Threads have one generator: whose turn it was is known only when a seed is set.
    monkeypatch.setattr(
        runner, "set_seed", lambda seed: set_by.setdefault(threading.get_ident(), []).append(seed)
    )
    plan = mh.Plan.of_stages([(1, [0, 1])], microbatches=2)

    def predict(carrier):
        mh.Pipeline([nn.Dropout()], plan, group=carrier, seed=5).predict(torch.zeros(8, 4))
        return set_by[threading.get_ident()]

    first, second = run_threads(2, predict)
    assert first == [seed_of(5, 0, microbatch, 0) for microbatch in range(2)]
    assert len(second) == 2
    assert not set(first) & set(second)

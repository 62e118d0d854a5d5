"""Plans made for the peers that are here."""

import msgspec
import pytest
import torch
from tests.stages.threads import run_threads
from torch import nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.core.plan import PlanError
from manyhands.stages import dealing


def layers():
    """The last two cost most of the time, the first most of the memory."""
    torch.manual_seed(0)
    return [nn.Embedding(20000, 64), nn.Linear(64, 64), nn.Linear(64, 2048), nn.Linear(2048, 64)]


def deal(size, **options):
    x = torch.randint(20000, (64,))
    models = [layers() for _ in range(size)]

    def act(carrier):
        return mh.partition(
            models[carrier.rank], x if carrier.rank == 0 else None, group=carrier, **options
        )

    return run_threads(size, act)


def test_all_peers_get_the_same_plan():
    plans = deal(2, by="time", microbatches=4)
    assert plans[0] == plans[1]
    assert len(plans[0].stages) == 2
    assert plans[0].microbatches == 4


def test_time_and_memory_cut_at_other_places(monkeypatch):
    power = dealing.PeerPower(name="host-1", memory_bytes=1 << 30, speed=1.0)
    monkeypatch.setattr(dealing, "_power", lambda device: power)
    measure = dealing.profile

    def profile(*args, **options):
        """Bytes as they are; times as on a machine that nobody else is using."""
        return [
            msgspec.structs.replace(cost, forward_s=time_s, backward_s=2 * time_s)
            for cost, time_s in zip(
                measure(*args, **options), [1e-6, 1e-6, 1e-4, 1e-4], strict=True
            )
        ]

    monkeypatch.setattr(dealing, "profile", profile)
    by_time, by_memory = (deal(2, by=by)[0].stages[0].end for by in ("time", "memory"))
    assert by_memory == 1  # the embedding alone
    assert by_time == 3


def test_a_model_that_does_not_fit_says_so_on_all_peers(monkeypatch):
    monkeypatch.setattr(dealing, "_power", lambda device: dealing.PeerPower(
        name="host-1", memory_bytes=1 << 20, speed=1.0))  # fmt: skip
    for by in ("auto", "memory"):
        with pytest.raises(PlanError, match=r"does not fit.*needs.*MiB"):
            deal(2, by=by)


def test_more_peers_than_layers():
    with pytest.raises(PlanError, match=r"4 layers.*5 peers|5 peers.*4 layers"):
        deal(5)


def test_without_inputs():
    def act(carrier):
        return mh.partition(layers(), None, group=carrier)

    with pytest.raises(PlanError, match="no inputs to measure"):
        run_threads(2, act)


def test_a_model_with_variables_is_measured_and_trains_on_its_plan():
    from tests.stages.cases import WIDTH, Giving, Taking

    torch.manual_seed(0)
    model = [Giving(["a", "b"]), nn.Linear(WIDTH, WIDTH), Taking(["a"]), Taking(["a", "b"])]
    x = torch.randn(8, WIDTH)
    plan = mh.partition(model, x, microbatches=2)
    assert [stage.peers for stage in plan.stages] == [(0,)]
    pipe = mh.Pipeline(model, plan, loss_fn=F.mse_loss, optimizer=torch.optim.Adam)
    first = pipe.step(x, torch.zeros(8, WIDTH))
    assert pipe.step(x, torch.zeros(8, WIDTH)) < first


class Asserting(nn.Module):
    def forward(self, x):
        assert x.dtype is torch.float32, "words are no numbers"
        return x


@pytest.mark.parametrize(
    ("model", "inputs", "said"),
    [
        ([Asserting(), nn.Linear(4, 4)], torch.ones(8, dtype=torch.long), "words are no numbers"),
        ([nn.Linear(4, 4), nn.Linear(4, 4)], "text", "AttributeError"),
    ],
)
def test_whatever_goes_wrong_in_measuring_is_heard_by_all(model, inputs, said):
    """Not only by the peer that measures, while the others wait for it."""

    def act(carrier):
        with pytest.raises(PlanError, match=said):
            mh.partition(model, inputs, group=carrier)
        return True

    assert run_threads(2, act) == [True, True]


def test_a_layer_is_measured_with_the_rows_of_the_largest_microbatch():
    seen = set()

    class Sees(nn.Module):
        def forward(self, x):
            seen.add(len(x))
            return x

    dealing.profile([Sees()], torch.randn(7, 4), 3)
    assert seen == {3}

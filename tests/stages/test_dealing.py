"""Plans made for the peers that are here."""

import msgspec
import pytest
import torch
from tests.stages.threads import run_threads
from torch import nn
from torch.nn import functional as F

import manyhands as mh
from manyhands.core.plan import PlanError
from manyhands.planner.partition import DoesNotFit
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
    x = torch.randint(20000, (64,))
    models = [layers() for _ in range(2)]

    def act(by):
        def of(carrier):
            with pytest.raises(DoesNotFit, match=r"does not fit.*needs.*MiB") as caught:
                mh.partition(models[carrier.rank], x, by=by, group=carrier)
            return caught.value

        return of

    for by in ("auto", "memory"):
        first, second = run_threads(2, act(by))
        # Half of the free memory; four times the embedding: values, gradients, two of Adam's.
        assert first.peer == "0-host"
        assert first.layers == ("0",)
        assert first.layer == 0
        assert first.free_bytes == 1 << 19
        assert first.missing_bytes >= 4 * 4 * 20000 * 64 - (1 << 19)
        for name in ("peer", "layers", "layer", "needed_bytes", "free_bytes", "missing_bytes"):
            assert getattr(first, name) == getattr(second, name)
        assert str(first) == str(second)
        assert first.hint


@pytest.mark.parametrize(
    ("memories", "shares"),
    [
        (["cpu of a", "cpu of a", "cpu of b"], [2, 2, 1]),
        (["GPU 1", "GPU 2", "GPU 3"], [1, 1, 1]),  # of one machine
        (["GPU 1", "GPU 2", "GPU 1"], [2, 1, 2]),
        (["GPU 1", "cpu of a", "cpu of a"], [1, 2, 2]),
    ],
)
def test_memory_is_divided_among_those_who_share_it(memories, shares):
    """Not among all peers of a machine: each may have a GPU of its own."""
    powers = [dealing.PeerPower(name=f"host-{pid}", memory_bytes=6000) for pid in range(3)]

    def act(carrier):
        own = dealing._Member(powers[carrier.rank], memories[carrier.rank])
        return dealing._gather(carrier, own)

    for found in run_threads(3, act):
        assert [power.memory_bytes for power in found] == [6000 // share for share in shares]
        assert [power.name for power in found] == ["0-host", "1-host", "2-host"]


def test_a_gpu_is_known_by_its_uuid(monkeypatch):
    """Its number says nothing: each process may see another one as its first."""

    class Properties:
        def __init__(self, device):
            self.uuid = {"cuda:0": "7f-1", "cuda:1": "7f-2"}[str(device)]

    monkeypatch.setattr(torch.cuda, "get_device_properties", Properties)
    monkeypatch.setattr(dealing.socket, "gethostname", lambda: "desk")
    names = [dealing._memory(torch.device(name)) for name in ("cuda:0", "cuda:1", "cpu")]
    assert names == ["GPU 7f-1", "GPU 7f-2", "cpu of desk"]


@pytest.mark.parametrize("culprit", range(2))
def test_a_peer_whose_device_does_not_work_is_heard_by_all(culprit):
    """Nobody waits for what it would have said."""

    def act(carrier):
        device = "cuda:99" if carrier.rank == culprit else "cpu"
        with pytest.raises(PlanError, match=f"peer {culprit} cannot say what it has: ") as caught:
            mh.partition(layers(), torch.randint(20000, (64,)), group=carrier, device=device)
        return str(caught.value)

    first, second = run_threads(2, act)
    assert first == second


def test_more_peers_than_layers():
    with pytest.raises(PlanError, match=r"4 layers.*5 peers|5 peers.*4 layers"):
        deal(5)


def test_without_inputs():
    def act(carrier):
        return mh.partition(layers(), None, group=carrier)

    with pytest.raises(PlanError, match=r"no inputs to measure(.|\n)*hint: pass a batch"):
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
    ("model", "inputs", "microbatches", "said"),
    [
        ([Asserting(), nn.ReLU()], torch.ones(8, dtype=torch.long), 1, "words are no numbers"),
        ([nn.Linear(4, 4), nn.Linear(4, 4)], "text", 1, "AttributeError"),
        ([nn.Linear(4, 4), nn.Linear(4, 4)], torch.ones(8, 4), 0, "^0 microbatches"),
        ([nn.Linear(4, 4), nn.LazyLinear(4)], torch.ones(8, 4), 1, "weight has no shape before"),
    ],
)
def test_whatever_goes_wrong_in_measuring_is_heard_by_all(model, inputs, microbatches, said):
    """Not only by the peer that measures, while the others wait for it."""

    def act(carrier):
        with pytest.raises(PlanError, match=said):
            mh.partition(model, inputs, microbatches=microbatches, group=carrier)
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

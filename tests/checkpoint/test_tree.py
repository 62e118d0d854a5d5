"""States as JSON and tensors: what comes back is what went in; what is no state is refused."""

import json
import math
import struct
from collections import Counter, OrderedDict

import msgspec
import pytest
import torch
from torch import nn

from manyhands.checkpoint.tree import flatten, unflatten
from manyhands.core.errors import Malformed, UsageError


def again(tree):
    flat = flatten(tree)
    text = json.dumps(flat.shape, allow_nan=False)
    shape = json.loads(text)
    assert msgspec.json.decode(text) == shape  # any reader of JSON gets the same
    return unflatten(shape, [tensor.clone() for tensor in flat.tensors])


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return type(one) is type(other) and one == other


@pytest.fixture(autouse=True, scope="module")
def _inductor_cache(tmp_path_factory):
    """torch makes this folder with the first optimizer: not in that test's TMPDIR."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield


def model_and_optimizer():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(5, 3)).sum().backward()
    return model, optimizer


SCHEDULERS = {
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda e: 0.9**e),
    "multistep": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 2, 5]),
    "onecycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=50),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "chained": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.ConstantLR(o),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        [2],
    ),
}


@pytest.mark.parametrize(
    "tree",
    [
        None,
        [1, 2.5, "x", True, None, b"\x00\xff"],
        {"a": (1, [2, {3: "c"}]), 7: math.inf, "nan": math.nan, "tiny": 5e-324},
        Counter({3: 2, 5: 1}),
        OrderedDict(a=torch.arange(3), b=[torch.zeros(0), torch.tensor(2.0)]),
    ],
    ids=str,
)
def test_what_comes_back_is_what_went_in(tree):
    assert same(tree if not isinstance(tree, OrderedDict) else dict(tree), again(tree))
    assert isinstance(again(tree), Counter) == isinstance(tree, Counter)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_what_torch_gives(scheduler):
    model, optimizer = model_and_optimizer()
    timer = SCHEDULERS[scheduler](optimizer)
    scaler = torch.amp.GradScaler("cpu")
    optimizer.step()
    timer.step(1.0) if scheduler == "plateau" else timer.step()
    for one in (model, optimizer, timer, scaler):
        tree = again(one.state_dict())
        assert same(dict(one.state_dict()), tree)
        one.load_state_dict(tree)
        assert same(dict(one.state_dict()), tree)


@pytest.mark.parametrize("bits", ["7ff8000000000000", "fff8000000000123", "7ff0000000000000"])
def test_floats_that_json_lacks_come_back_to_the_bit(bits):
    (given,) = struct.unpack(">d", bytes.fromhex(bits))
    assert struct.pack(">d", again([given])[0]).hex() == bits


def test_the_sign_of_zero_comes_back():
    assert math.copysign(1, again([-0.0])[0]) == -1


@pytest.mark.parametrize(
    "given",
    [2**53 + 1, 2**63 - 1, -(2**63), 2**63, -(2**200), 10**5000],
    ids=lambda given: f"{given.bit_length()} bits",
)
def test_long_integers_come_back(given):
    assert again({"state": given}) == {"state": given}


def test_a_tree_that_contains_itself_is_refused():
    tree = {}
    tree["again"] = [tree]
    with pytest.raises(UsageError, match="nested"):
        flatten(tree)


def test_the_deepest_tree_that_is_taken_comes_back():
    tree = 1
    for _ in range(64):
        tree = [tree]
    assert again(tree) == tree
    with pytest.raises(UsageError, match="nested"):
        flatten([tree])


def test_tensors_are_named_by_their_place():
    assert flatten({"a": [torch.ones(1)], "b": torch.ones(2)}, "run").names == ["run.a.0", "run.b"]


def test_tensors_are_not_copied():
    given = torch.ones(3, requires_grad=True)
    (flat,) = flatten([given]).tensors
    assert flat.data_ptr() == given.data_ptr()
    assert not flat.requires_grad


@pytest.mark.parametrize(
    ("tree", "place"),
    [
        ({"x": [object()]}, "state.x.0"),
        ({"f": lambda: 1}, "state.f"),
        ({(1, 2): 3}, "state"),
        ({"d": torch.float32}, "state.d"),
        ({"s": torch.eye(3).to_sparse()}, "state.s"),
        ({"z": 1j}, "state.z"),
    ],
)
def test_what_is_no_state_is_refused_by_its_place(tree, place):
    with pytest.raises(UsageError, match=place):
        flatten(tree)


@pytest.mark.parametrize(
    "shape",
    [
        [],
        {},
        ["what"],
        ["tensor"],
        ["tensor", 1],
        ["tensor", -1],
        ["tensor", True],
        ["tensor", 0.0],
        ["dict", ["a"]],
        ["dict", [["a"], 1]],
        ["bytes", "not base 64!"],
        ["bytes", 3],
        ["float", "7ff8"],
        ["float", 1.0],
        ["float"],
        ["int", "0.5"],
        ["int", 3],
        [["dict"]],
        ["list", ["tensor", 0], ["tensor", 0]],
        ["list"],
    ],
    ids=str,
)
def test_shapes_that_are_none(shape):
    with pytest.raises(Malformed):
        unflatten(shape, [torch.ones(1)])


def test_a_shape_without_an_end_is_refused():
    shape = 1
    for _ in range(500):
        shape = ["list", shape]
    with pytest.raises(Malformed):
        unflatten(shape, [])

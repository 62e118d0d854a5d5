"""A worker builds layers and optimizers from packages that it allows, and nothing else."""

import datetime
import enum

import msgspec
import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from manyhands.compat.bossman import wrapped_linear
from manyhands.core.errors import UsageError
from manyhands.stages.recipes import NotAllowed, Recipe, arguments, describe, resolve

ALLOWED = ("torch.nn", "torch.optim", "manyhands.compat")


@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv2d, nn.LSTM, wrapped_linear])
def test_layers_go_and_come(kind):
    assert resolve(describe(kind, {}, nn.Module, "layer 0"), nn.Module, ALLOWED) is kind


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
def test_optimizers_go_and_come(kind):
    assert resolve(describe(kind, {}, Optimizer, "it"), Optimizer, ALLOWED) is kind


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("torch", "load"),
        ("torch.nnx", "Linear"),
        ("torch.nn.functional", "relu"),  # a function
        ("torch.nn.modules.module", "torch"),  # a module that leads out
        ("torch.nn.modules.module", "torch.jit.ScriptModule"),
        ("torch.nn", "os"),
        ("torch.nn", "Linear"),  # another name of torch.nn.modules.linear.Linear
        ("torch.nn.modules.linear", "Linear.forward"),
        ("torch.nn.modules.linear", "Linear.__init__"),
        ("torch.nn.modules.linear", "Linear.__class__"),
        ("torch.nn.modules.linear", "math"),
        ("torch.nn.modules.linear", "F"),
        ("torch.nn.modules.linear", ""),
        ("torch.nn.modules.linear", "a b"),
        ("torch.nn.modules.module", "Module"),  # a base class itself
        ("torch.nn.parameter", "Parameter"),  # a class of another kind
        ("torch.optim.adam", "Adam"),  # where a layer is asked for
        ("torch.nn..modules", "Linear"),
        ("torch.nn/../os", "system"),
        (".torch.nn", "Linear"),
        ("manyhands.compat.bossman", "wrapped_linear"),  # defined in its module `layers`
        ("manyhands.compat.bossman.boss", "BossMan"),
        ("manyhands.__main__", "main"),
        ("manyhands.worker.__main__", "main"),
    ],
)
def test_all_else_is_refused(module, name):
    with pytest.raises(NotAllowed):
        resolve(Recipe(module, name, {}), nn.Module, ALLOWED)


def test_nothing_is_imported_before_it_is_allowed(tmp_path, monkeypatch):
    (tmp_path / "poison_module.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(NotAllowed, match="--allow poison_module"):
        resolve(Recipe("poison_module", "Layer", {}), nn.Module, ALLOWED)


def test_what_is_not_there_is_said():
    with pytest.raises(UsageError, match=r"no torch.nn.nonsense.Layer on this worker"):
        resolve(Recipe("torch.nn.nonsense", "Layer", {}), nn.Module, ALLOWED)
    with pytest.raises(NotAllowed, match="is not a class"):
        resolve(Recipe("torch.nn.modules.linear", "Nonsense", {}), nn.Module, ALLOWED)


PLAIN = {
    "a": [1, -(1 << 63), 2.5, float("inf"), "text", True, None, []],
    "b": ((1, 2), [3, (4,)], ()),
    "c": {"list": ["list", "tuple"], "": {}},
}


def test_arguments_come_back_as_they_were():
    recipe = describe(nn.Linear, PLAIN, nn.Module, "layer 0")
    came = msgspec.msgpack.decode(msgspec.msgpack.encode(recipe), type=Recipe)
    assert repr(arguments(came)) == repr(PLAIN)


class Number(enum.IntEnum):
    ONE = 1


@pytest.mark.parametrize(
    "value",
    [b"bytes", {1: 2}, {1}, object, len, torch.ones(1), torch.float32, Number.ONE, 1 << 64],
)
def test_other_arguments_are_not_sent(value):
    for given in (value, [value], {"key": (value,)}):
        with pytest.raises(UsageError, match="layer 3: x is a"):
            describe(nn.Linear, {"x": given}, nn.Module, "layer 3")


@pytest.mark.parametrize(
    "value",
    [b"bytes", {1: 2}, ["set", 1], [[]], [["list", b""]], datetime.datetime.now(datetime.UTC)],
)
def test_other_arguments_are_not_taken(value):
    raw = msgspec.msgpack.encode(["torch.nn.modules.linear", "Linear", {"x": value}])
    with pytest.raises(NotAllowed, match="no plain value"):
        arguments(msgspec.msgpack.decode(raw, type=Recipe))


def test_nests_without_end_are_neither_sent_nor_taken():
    deep = 0
    for _ in range(100):
        deep = ["list", deep]
    with pytest.raises(NotAllowed):
        arguments(Recipe("torch.nn.modules.linear", "Linear", {"x": deep}))
    with pytest.raises(UsageError):
        describe(nn.Linear, {"x": deep}, nn.Module, "layer 0")

"""A boss that turns bad gets an error for an answer, and its worker lives on."""

import socket

import msgspec
import pytest

from manyhands.core.plan import Plan
from manyhands.stages import commands as words
from manyhands.stages.recipes import Recipe
from tests.worker.tyrant import Tyrant, linear, said

ALLOW = ("--allow", "tests.worker.mean")
MEAN = "tests.worker.mean"


@pytest.fixture
def tyrant(hands):
    with Tyrant(hands.port) as made:
        hands.start("a", *ALLOW, "--memory", "64")
        made.meet()
        yield made
        assert made.is_served(), hands.log("a")
        made.dismiss()
        assert hands.code("a") == 0, hands.log("a")


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        (Recipe("os", "system", {}), "not in a package"),
        (Recipe("torch.nn.modules.module", "torch.os", {}), "not a class"),
        (Recipe("torch.nn.functional", "importlib", {}), "not a class"),
        (Recipe("x" * 1_000_000, "Linear", {}), "not in a package"),
        (Recipe("torch.nn", "a." * 100_000 + "b", {}), "not a class"),
        (linear(10**9), "MiB of parameters, and this worker offers 64.0"),
        (linear(10**6, device="cpu"), "MiB of parameters, and this worker offers 64.0"),
        (linear(10**10), "RuntimeError"),
        (linear(-1), "RuntimeError"),
        (linear(2.5), "cannot be built with"),
        (linear(2, device="cuda:77"), ""),
        (linear(2, dtype="float32"), "cannot be built with"),
        (linear(2, nonsense="x" * 1_000_000), "cannot be built with"),
        (Recipe("torch.nn.modules.linear", "Linear", {"in_features": float("nan")}), "cannot be"),
        (Recipe(MEAN, "Leaver", {}), "SystemExit: 3"),
        (Recipe(MEAN, "Garbled", {}), "unsayable"),
        (Recipe(MEAN, "Speechless", {}), "cannot be shown"),
        (Recipe(MEAN, "Talkative", {}), "aaaa"),
        (Recipe(f"{MEAN}.leaves", "Layer", {}), "SystemExit"),
        (Recipe(f"{MEAN}.fails", "Layer", {}), "ZeroDivisionError"),
    ],
)
def test_what_cannot_be_built(tyrant, recipe, text):
    answer = tyrant.build(linear(), recipe)
    assert isinstance(answer, words.Failed)
    assert text in answer.message
    assert len(answer.message) <= 4_000


def test_many_layers_that_are_too_large_together(tyrant):
    answer = tyrant.build(*[linear(2000)] * 5)  # 16 MB each
    assert answer.kind == "refused"
    assert "MiB" in answer.message


def test_words_that_no_boss_says(tyrant, hands):
    deep = b"\x91" * 100_000 + b"\xc0"
    for data in (
        b"",
        b"\x00",
        bytes(range(256)),
        deep,
        said(["build", 1, 2]),
        said(["build", -1, [], 0]),
        said(["offer", "a", "cpu", 1, "x"]),
        said(["done", 1]),
        said(["step", 1, 0, "afab"]),
        said(["step", 1, 1, "nonsense"]),
        said(["forward", 1 << 63, True, "more"]),
        said(["mode", 1, "yes"]),
        said(["build", 1, [[0, ["torch.nn", "Linear", {"x": datetime()}]]], "seed"]),
    ):
        tyrant.shout(data)
    tyrant.shout(said(words.Dismiss()), b"something else")
    assert tyrant.is_served()
    assert "not understood" in hands.log("a")


def datetime():
    return msgspec.msgpack.Ext(7, b"x")


def test_commands_out_of_order(tyrant):
    for kind, *details in (
        (words.Optimize, Recipe("torch.optim.sgd", "SGD", {"lr": 0.1})),
        (words.Forward, True, None),
        (words.Backward,),
        (words.Apply,),
        (words.Step, 4, "1f1b", None),
        (words.Mode, True),
        (words.Clear,),
        (words.Describe,),
        (words.Fetch,),
        (words.Load,),
    ):
        answer = tyrant.ask(kind, *details)
        assert isinstance(answer, words.Failed)
        assert "in no plan" in answer.message


def alone():
    """A plan of the worker alone, that it can enter without anybody."""
    return Plan.of_stages([(1, [0])]).to_json()


@pytest.mark.parametrize(
    ("run", "rank", "plan", "text"),
    [
        ("plan-1", 0, "nonsense", "this is no plan"),
        ("plan-1", 0, "[" * 100_000, "this is no plan"),
        ("plan-1", 0, alone().replace('hes":1', 'hes":1000000000000000'), "at most"),
        ("../..\n", 0, alone(), "run name"),
        ("plan-1", 7, alone(), "rank"),
    ],
)
def test_plans_that_are_none(tyrant, run, rank, plan, text):
    tyrant.build(linear())
    answer = tyrant.ask(words.Enter, run, rank, plan, 0)
    assert isinstance(answer, words.Failed)
    assert text in f"{answer.message} {answer.hint}"


def test_a_plan_entered_twice_leaves_nothing_of_the_first(tyrant, hands):
    tyrant.build(linear())
    for number in range(3):
        answer = tyrant.ask(words.Enter, f"plan-{number}", 0, alone(), 0)
        assert isinstance(answer, words.Done)
    assert [tyrant.num_in(f"plan-{number}") for number in range(3)] == [0, 0, 1]


def test_optimizers_that_are_none(tyrant):
    tyrant.build(linear())
    tyrant.ask(words.Enter, "plan-1", 0, alone(), 0)
    for recipe, text in (
        (Recipe("torch.optim.adam", "Adam", {"lr": float("nan")}), "Invalid learning rate: nan"),
        (Recipe("torch.optim.adam", "Adam", {"lr": "0.1"}), "TypeError"),
        (Recipe("torch.optim.adam", "Adam", {"params": 1}), "TypeError"),
        (Recipe("torch.nn.modules.linear", "Linear", {}), "not a kind of"),
        (Recipe("torch.optim.optimizer", "Optimizer", {}), "not a kind of"),
    ):
        answer = tyrant.ask(words.Optimize, recipe)
        assert isinstance(answer, words.Failed)
        assert text in answer.message


def test_more_words_than_a_worker_can_hear(tyrant):
    """The link holds the sender back."""
    for _ in range(5_000):
        tyrant.shout(b"\x00")
    assert tyrant.is_served()


def test_more_state_than_one_answer_has_room_for(tyrant):
    answer = tyrant.build(Recipe(MEAN, "Names", {"number": 300, "length": 10_000}))
    assert isinstance(answer, words.Done)
    tyrant.ask(words.Enter, "plan-1", 0, alone(), 0)
    answer = tyrant.ask(words.Describe)
    assert isinstance(answer, words.Failed)
    assert "bytes" in answer.message


def test_a_hub_without_a_boss(hands):
    with Tyrant(hands.port, name="somebody"):
        hands.start("a", "--wait", "0")
        assert hands.code("a") == 1
    assert "a hub without one" in hands.log("a")
    assert "MODEL_PORT" in hands.log("a")


def test_somebody_who_listens_and_says_nothing(hands):
    with socket.create_server(("127.0.0.1", hands.port)):
        hands.start("a", "--wait", "0")
        assert hands.code("a") == 1
    assert "error: " in hands.log("a")


def test_somebody_who_says_something_else(hands):
    with socket.create_server(("127.0.0.1", hands.port)) as server:
        hands.start("a", "--wait", "0")
        for _ in range(2):  # the first only looks whether anybody listens
            connection, _ = server.accept()
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()
        assert hands.code("a") == 1
    assert "error: " in hands.log("a")

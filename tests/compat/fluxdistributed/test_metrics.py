"""topkaccuracy against a count by hand; log_loss_and_acc; showpreds."""

import io

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from manyhands.compat.fluxdistributed import (
    log_loss_and_acc,
    showpreds,
    topkaccuracy,
    with_logger,
)
from manyhands.core.errors import UsageError
from manyhands.data.imagenet import Label
from tests.compat.fluxdistributed.models import data, mlp, normed


def by_hand(output, ids, k):
    """Sort each row, largest first, smaller ids first among equals, and look."""
    right = 0
    for row, label in zip(output.tolist(), ids.tolist(), strict=True):
        order = sorted(range(len(row)), key=lambda place: (-row[place], place))
        right += label in order[:k]
    return right / len(ids)


@pytest.mark.parametrize("wrong", [-1, -100, 3])
def test_a_class_that_no_output_is_for_is_named(wrong):
    """To the loss -100 may mean something; a rank it has none. A GPU would end the process."""
    output, ids = torch.zeros(2, 3), torch.tensor([0, wrong])
    model = nn.Linear(4, 3)
    for call in (
        lambda: topkaccuracy(output, ids),
        lambda: showpreds(output, ids),
        lambda: log_loss_and_acc(F.cross_entropy, model, (torch.zeros(2, 4), ids)),
    ):
        with pytest.raises(UsageError, match=f"class {wrong}, but the model has 3 outputs"):
            call()


@pytest.mark.parametrize("k", [1, 2, 5, 10, 50])
@pytest.mark.parametrize("ties", [False, True])
def test_top_k_is_what_one_counts_by_hand(k, ties):
    made = torch.Generator().manual_seed(k)
    output = torch.randn(200, 12, generator=made)
    if ties:
        output = output.round()
    ids = torch.randint(12, (200,), generator=made)
    expected = by_hand(output, ids, k)
    assert topkaccuracy(output, ids, k) == expected
    assert topkaccuracy(output, F.one_hot(ids, 12), k) == expected
    assert topkaccuracy(output.half(), ids.int(), k) == by_hand(output.half(), ids, k)
    if k >= 12:
        assert expected == 1


def test_one_is_the_first():
    output = torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.2, 0.3]])
    assert topkaccuracy(output, torch.tensor([1, 2])) == 0.5
    assert topkaccuracy(output, torch.tensor([2, 2]), 2) == 1.0


def test_a_nan_is_never_right():
    output = torch.tensor([[float("nan"), 1.0], [float("nan"), float("nan")]])
    assert topkaccuracy(output, torch.tensor([0, 0]), 2) == 0.0
    assert topkaccuracy(output, torch.tensor([1, 0]), 1) == 0.5


@pytest.mark.parametrize(
    ("output", "labels", "k"),
    [
        (torch.zeros(4), torch.zeros(4).long(), 1),
        (torch.zeros(4, 3), torch.zeros(5).long(), 1),
        (torch.zeros(4, 3), torch.zeros(4), 1),
        (torch.zeros(4, 3), torch.zeros(4, 2).long(), 1),
        (torch.zeros(4, 3), torch.zeros(4).long(), 0),
    ],
)
def test_what_does_not_fit_is_refused(output, labels, k):
    with pytest.raises(UsageError):
        topkaccuracy(output, labels, k)


def test_loss_and_top_k_are_logged_and_returned():
    rows = []
    model, (x, y) = mlp(), data(30)[:]
    with torch.no_grad():
        output = model(x)
    with with_logger(lambda row, step: rows.append((step, row))):
        found = log_loss_and_acc(F.cross_entropy, model, (x, y), "test", k=(1, 2, 9), step=3)
    assert rows == [(3, found)]
    assert found.keys() == {"test/loss", "test/top1", "test/top2", "test/top9"}
    assert found["test/loss"] == pytest.approx(float(F.cross_entropy(output, y)))
    assert found["test/top1"] == pytest.approx(by_hand(output, y, 1))
    assert found["test/top2"] == pytest.approx(by_hand(output, y, 2))
    assert found["test/top9"] == 1.0


def test_several_batches_count_by_their_rows_and_the_console_is_the_default(capsys):
    model, (x, y) = mlp(), data(30)[:]
    whole = log_loss_and_acc(F.cross_entropy, model, (x, y))
    parts = log_loss_and_acc(F.cross_entropy, model, [(x[:7], y[:7]), (x[7:], y[7:])])
    assert parts == pytest.approx(whole)
    assert whole.keys() == {"val/loss", "val/top1", "val/top5", "val/top10"}
    assert capsys.readouterr().out.count("val/top10 1\n") == 2


def test_it_is_in_eval_mode_with_one_forward_and_the_mode_stays():
    model, (x, y) = normed(), data(30, dtype=torch.float32)[:]
    count = []
    model.register_forward_hook(lambda module, given, output: count.append(module.training))
    model[2].eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    log_loss_and_acc(F.cross_entropy, model, (x, y), log=lambda row, step: None)
    assert count == [False]
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert model.training
    assert not model[2].training


def test_predictions_are_shown_with_the_right_one_marked():
    output = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 1.0, 2.0, 3.0]])
    names = [Label(n, f"n{n}", name) for n, name in enumerate(["cat", "dog", "emu", "fox"])]
    stream = io.StringIO()
    showpreds(output, torch.tensor([1, 0]), names, k=2, file=stream)
    chances = output.softmax(1)
    assert stream.getvalue().splitlines() == [
        "sample 0",
        f"  {float(chances[0, 0]):6.1%}  cat",
        f"  {float(chances[0, 1]):6.1%}  dog  ✅",
        "sample 1",
        f"  {float(chances[1, 3]):6.1%}  fox",
        f"  {float(chances[1, 2]):6.1%}  emu",
        f"  it is cat: {float(chances[1, 0]):.1%}",
    ]


def test_predictions_go_to_stdout_and_need_no_names(capsys):
    showpreds(nn.Linear(2, 3)(torch.ones(1, 2)), F.one_hot(torch.tensor([2]), 3))
    said = capsys.readouterr().out
    assert said.count("class") == 3
    marked = next(line for line in said.splitlines() if "✅" in line)
    assert marked.split()[1:3] == ["class", "2"]
    with pytest.raises(UsageError, match="2 names for 3 classes"):
        showpreds(torch.zeros(1, 3), torch.tensor([0]), ["a", "b"])

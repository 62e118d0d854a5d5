"""One step by hand: train_step, sync_buffer, ensure_synced, check_nans, update."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from manyhands.compat.fluxdistributed import (
    NotSynced,
    check_nans,
    ensure_synced,
    log_loss_and_acc,
    prepare_training,
    sync_buffer,
    train_step,
    update,
)
from manyhands.core.errors import UsageError
from tests.compat.fluxdistributed.models import SGD, data, mlp, normed, same


def gradients(model, x, y):
    """As torch has them."""
    model = copy.deepcopy(model)
    F.cross_entropy(model(x), y).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def prepared(model, num_devices=3):
    return prepare_training(model, data(), ["cpu"] * num_devices, SGD, 4)


def stepped(setup, buffer, x, y, counts):
    """Each device with its rows."""
    start = 0
    for slot, (model, count) in enumerate(zip(setup.models, counts, strict=True)):
        rows = slice(start, start + count)
        train_step(F.cross_entropy, buffer, slot, model, x[rows], y[rows])
        start += count


@pytest.mark.parametrize("counts", [(4, 4, 4), (7, 4, 1)])
def test_the_mean_of_the_devices_is_the_gradient_of_the_pooled_batch(counts):
    model, (x, y) = mlp(), data(12)[:]
    setup, buffer = prepared(model)
    stepped(setup, buffer, x, y, counts)
    final = sync_buffer(buffer)
    expected = gradients(model, x, y)
    assert final.keys() == expected.keys()
    for name in final:
        torch.testing.assert_close(final[name], expected[name])
    ensure_synced(buffer, final)


def make(kind):
    torch.manual_seed(3)
    if kind == "linear":
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 4))
    middle = {"conv": [], "pool": [nn.MaxPool2d(2)], "norm": [nn.BatchNorm2d(4)]}[kind]
    return nn.Sequential(nn.Conv2d(3, 4, 3), *middle, nn.Flatten(), nn.LazyLinear(4))


@pytest.mark.parametrize("kind", ["linear", "conv", "pool", "norm"])
def test_the_gradients_of_single_samples_sum_up_to_that_of_the_batch(kind):
    model = make(kind)
    x, y = torch.randn(3, 3, 8, 8), torch.tensor([0, 3, 1])
    model(x)  # lazy layers get their sizes
    model.eval()
    setup, buffer = prepared(model)
    stepped(setup, buffer, x, y, (1, 1, 1))
    final = sync_buffer(buffer, reduce="sum")
    for name, expected in gradients(model, x, y).items():
        torch.testing.assert_close(final[name] / 3, expected, rtol=1e-4, atol=1e-5)


def test_a_reduction_of_ones_own_gets_the_tensors_of_all_devices():
    model, (x, y) = mlp(), data(12)[:]
    setup, buffer = prepared(model)
    stepped(setup, buffer, x, y, (4, 4, 4))
    each = [{name: slot[name].clone() for name in slot.gradients()} for slot in buffer]
    final = sync_buffer(buffer, reduce=lambda tensors: torch.stack(tensors).median(0).values)
    for name, tensor in final.items():
        assert torch.equal(tensor, torch.stack([one[name] for one in each]).median(0).values)
    ensure_synced(buffer, final)


def test_what_no_device_used_has_no_gradient_and_what_one_did_counts_the_others_as_zero():
    class Forked(nn.Module):
        def __init__(self):
            super().__init__()
            self.always, self.large, self.never = (nn.Linear(6, 4).double() for _ in range(3))

        def forward(self, x):
            return self.always(x) + (self.large(x) if len(x) > 2 else 0)

    model, (x, y) = Forked(), data(6)[:]
    setup, buffer = prepared(model, 2)
    stepped(setup, buffer, x, y, (4, 2))
    final = sync_buffer(buffer)
    assert not any("never" in name for name in final)
    alone = gradients(model, x[:4], y[:4])
    torch.testing.assert_close(final["large.weight"], alone["large.weight"] * 4 / 6)
    before = model.never.weight.clone()
    decayed = torch.optim.SGD(setup.models[0].parameters(), lr=1.0, weight_decay=0.5)
    update(decayed, setup.models[0], final)
    assert torch.equal(setup.models[0].never.weight, before)  # not even its decay
    assert not torch.equal(setup.models[0].large.weight, model.large.weight)


def test_buffers_that_differ_from_the_result_are_named():
    model, (x, y) = mlp(), data(12)[:]
    setup, buffer = prepared(model)
    stepped(setup, buffer, x, y, (4, 4, 4))
    final = sync_buffer(buffer)
    buffer[2]["2.bias"][1] += 1e-12
    with pytest.raises(NotSynced, match=r"2\.bias in slot 2 \(cpu\)"):
        ensure_synced(buffer, final)
    with pytest.raises(NotSynced, match=r"slot 0 .* 0\.bias"):
        ensure_synced(buffer, {name: t for name, t in final.items() if name != "0.bias"})


def test_nothing_to_put_together_is_an_error():
    _, buffer = prepared(mlp())
    with pytest.raises(UsageError, match="no slot has gradients"):
        sync_buffer(buffer)
    setup, buffer = prepared(mlp(), 1)
    train_step(F.cross_entropy, buffer, 0, setup.models[0], *data(4)[:])
    with pytest.raises(UsageError, match="reduce='max'"):
        sync_buffer(buffer, reduce="max")


def test_updates_with_one_result_leave_replicas_equal():
    model, (x, y) = mlp(), data(12)[:]
    setup, buffer = prepared(model)
    for _ in range(3):
        stepped(setup, buffer, x, y, (5, 4, 3))
        final = sync_buffer(buffer)
        for optimizer, replica in zip(setup.optimizers, setup.models, strict=True):
            update(optimizer, replica, final)
            assert all(parameter.grad is None for parameter in replica.parameters())
    alone = copy.deepcopy(model)
    optimizer = SGD(alone.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        optimizer.step()
    for replica in setup.models:
        for ours, other in zip(replica.parameters(), setup.models[0].parameters(), strict=True):
            assert torch.equal(ours, other)
        for ours, theirs in zip(replica.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_gradients_of_another_model_are_refused():
    setup, _ = prepared(mlp(), 1)
    with pytest.raises(UsageError, match="odd"):
        update(setup.optimizers[0], setup.models[0], {"odd": torch.zeros(1)})


@pytest.mark.parametrize("pieces", [2, 3, 7, 100])
def test_a_batch_in_pieces_has_the_gradient_of_the_whole(pieces):
    model, (x, y) = mlp(), data(7)[:]
    setup, buffer = prepared(model, 1)
    loss = train_step(F.cross_entropy, buffer, 0, setup.models[0], x, y, pieces=pieces)
    assert loss == pytest.approx(float(F.cross_entropy(model(x), y).detach()))
    for name, expected in gradients(model, x, y).items():
        torch.testing.assert_close(buffer[0][name], expected)


def indices(output, labels):
    """A loss of one's own, whose labels are places in the row."""
    return -output.log_softmax(1).gather(1, labels.clamp(min=0)).mean()


@pytest.mark.parametrize("loss", [nn.MultiLabelMarginLoss(), indices])
def test_integers_of_the_shape_of_the_output_that_are_not_one_hot_stay_what_they_are(loss):
    """Each row lists its classes."""
    x = data(6)[:][0]
    labels = torch.tensor([[3, 0, -1, -1], [1, -1, -1, -1]]).repeat(3, 1)
    model = mlp()
    setup, buffer = prepared(model, 1)
    wanted = loss(model(x), labels).detach()
    found = train_step(loss, buffer, 0, setup.models[0], x, labels)
    assert found == pytest.approx(float(wanted))
    found = log_loss_and_acc(loss, model, (x, labels), log=lambda row, step: None)
    assert found["val/loss"] == pytest.approx(float(wanted))


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool])
def test_several_truths_in_a_row_are_floats_for_the_loss(dtype):
    x = data(6)[:][0]
    truths = torch.tensor([[1, 0, 1, 0], [0, 0, 0, 0]]).repeat(3, 1)
    model = mlp()
    loss = F.binary_cross_entropy_with_logits
    wanted = float(loss(model(x), truths.double()).detach())
    found = log_loss_and_acc(loss, model, (x, truths.to(dtype)), log=lambda row, step: None)
    assert found["val/loss"] == pytest.approx(wanted)


def test_a_step_that_raises_leaves_the_model_as_it_was():
    model = normed()
    setup, buffer = prepared(model, 1)
    replica, (x, y) = setup.models[0], data(8, dtype=torch.float32)[:]

    def fails(output, labels):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train_step(fails, buffer, 0, replica, x, y)
    for name, tensor in replica.state_dict().items():  # BatchNorm has counted nothing
        assert torch.equal(tensor, model.state_dict()[name]), name
    assert all(parameter.grad is None for parameter in replica.parameters())


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (nn.CrossEntropyLoss(reduction="none"), r"\(4,\), not one number"),
        (lambda output, labels: 3.0, "float, not one number"),
        (lambda output, labels: F.cross_entropy(output.detach(), labels), "does not depend"),
    ],
)
def test_a_loss_that_is_none_says_so(loss, said):
    setup, buffer = prepared(mlp(), 1)
    with pytest.raises(UsageError, match=said):
        train_step(loss, buffer, 0, setup.models[0], *data(4)[:])


def test_nans_are_found_wherever_they_are():
    good, bad = torch.ones(3), torch.tensor([1.0, float("nan")])
    assert not check_nans({"a": good, "b": [good, None, 1.0]})
    assert not check_nans(torch.tensor([float("inf")]))
    assert not check_nans(torch.tensor([1, 2]))
    assert check_nans({"a": good, "b": [good, (bad,)]})
    assert check_nans(float("nan"))
    setup, buffer = prepared(mlp(), 1)
    train_step(F.cross_entropy, buffer, 0, setup.models[0], *data(4)[:])
    assert not check_nans(buffer[0])
    buffer[0]["0.bias"][0] = float("nan")
    assert check_nans(buffer[0])
    assert check_nans(buffer)
    with pytest.raises(UsageError, match="object"):
        check_nans(object())


@pytest.mark.parametrize("reduce", ["mean", "sum", lambda tensors: torch.stack(tensors).sum(0)])
def test_statistics_are_averaged_whatever_is_done_with_gradients_and_updates_bring_them(reduce):
    model, (x, y) = normed(), data(12, dtype=torch.float32)[:]
    setup, buffer = prepared(model)
    for _ in range(2):
        stepped(setup, buffer, x, y, (6, 4, 2))
        each = [copy.deepcopy(replica.state_dict()) for replica in setup.models]
        final = sync_buffer(buffer, reduce=reduce)
        ensure_synced(buffer, final)
        for optimizer, replica in zip(setup.optimizers, setup.models, strict=True):
            update(optimizer, replica, final)
        assert all(same(replica, setup.models[0]) for replica in setup.models)
        for name in ("2.running_mean", "2.running_var"):
            parts = [state[name] * count for state, count in zip(each, (6, 4, 2), strict=True)]
            mean = torch.stack(parts).sum(0) / 12
            torch.testing.assert_close(setup.models[0].state_dict()[name], mean)
    assert setup.models[2].state_dict()["2.num_batches_tracked"] == 2
    assert not any(name.startswith("2.running") for name in final)  # which are no gradients


@pytest.mark.parametrize("reduce", ["mean", "sum", lambda tensors: torch.stack(tensors).sum(0)])
def test_a_device_without_rows_adds_nothing_of_the_step_before(reduce):
    model, (x, y) = mlp(), data(12)[:]
    setup, buffer = prepared(model, 2)
    train_step(F.cross_entropy, buffer, 0, setup.models[0], x, y)
    first = sync_buffer(buffer, reduce=reduce)
    train_step(F.cross_entropy, buffer, 0, setup.models[0], x, y)
    again = sync_buffer(buffer, reduce=reduce)
    for name, tensor in first.items():
        assert torch.equal(again[name], tensor)

"""The models have the sizes that were published, and learn from pictures of the sizes they take."""

import pytest
import torch
from torch.nn import functional as F

from manyhands.compat.deeppool import models
from manyhands.core.errors import UsageError

SMALL = models.Size(vocabulary=11, length=6, layers=2, heads=2, width=8)


@pytest.mark.parametrize(
    ("make", "published"),
    [
        (lambda: models.resnet18(1000), 11_689_512),
        (lambda: models.vgg16(1000), 138_357_544),
        (lambda: models.wide_resnet101_2(1000), 126_886_696),
        (lambda: models.wide_resnet(16, 2, 10), 691_674),
        (lambda: models.wide_resnet(28, 10, 10), 36_479_194),
        (lambda: models.gpt(models.GPT2), 124_439_808),
    ],
)
def test_numbers_of_parameters(make, published):
    with torch.device("meta"):
        model = make()
    assert sum(parameter.numel() for parameter in model.parameters()) == published


def test_parameters_have_the_names_that_others_give_them():
    with torch.device("meta"):
        resnet, vgg = models.resnet18(1000).state_dict(), models.vgg16(1000).state_dict()
    assert len(resnet) == 122
    assert tuple(resnet["layer2.0.downsample.0.weight"].shape) == (128, 64, 1, 1)
    assert tuple(resnet["layer4.1.bn2.running_var"].shape) == (512,)
    assert tuple(resnet["fc.weight"].shape) == (1000, 512)
    assert len(vgg) == 32
    assert tuple(vgg["features.28.weight"].shape) == (512, 512, 3, 3)
    assert tuple(vgg["classifier.0.weight"].shape) == (4096, 25088)
    assert tuple(vgg["classifier.6.bias"].shape) == (1000,)


@pytest.mark.parametrize(
    "make",
    [
        lambda: models.resnet18(3, width=4),
        lambda: models.wide_resnet101_2(3, width=2),
        lambda: models.wide_resnet(10, 1, 3),
        lambda: models.vgg16(3, width=4, hidden=16, pool=2),
    ],
)
@pytest.mark.parametrize("side", [32, 48])
def test_every_parameter_has_a_part_in_the_loss(make, side):
    model, labels = make(), torch.tensor([0, 1, 2, 0])
    scores = model(torch.randn(4, 3, side, side))
    assert scores.shape == (4, 3)
    F.cross_entropy(scores, labels).backward()
    still = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert still == []


def test_a_gpt_sees_what_comes_before_and_nothing_else():
    model = models.gpt(SMALL).eval()
    text = torch.tensor([[1, 2, 3, 4, 5, 6]])
    scores = model(text)
    assert scores.shape == (1, 6, 11)
    text[0, 4] = 9
    changed = model(text)
    torch.testing.assert_close(changed[:, :4], scores[:, :4])
    assert not torch.allclose(changed[:, 4:], scores[:, 4:])


@pytest.mark.parametrize(("depth", "factor"), [(15, 2), (4, 2), (16, 0)])
def test_depths_that_are_none(depth, factor):
    with pytest.raises(UsageError, match=r"6n \+ 4"):
        models.wide_resnet(depth, factor, 10)


def test_heads_divide_the_width():
    with pytest.raises(UsageError, match="3 heads"):
        models.Size(vocabulary=2, length=2, layers=1, heads=3, width=8)

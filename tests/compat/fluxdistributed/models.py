"""Small models, data and optimizers that the tests share."""

import functools

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from manyhands.compat.fluxdistributed import prepare_training, train

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAM = functools.partial(torch.optim.Adam, lr=0.1)
CLASSES, FEATURES = 4, 6


def mlp(seed=0):
    torch.manual_seed(seed)
    layers = nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES)
    return nn.Sequential(*layers).double()


def normed(seed=0):
    """BatchNorm over two values a row: a single row is enough for it."""
    torch.manual_seed(seed)
    norm = nn.Unflatten(1, (4, 2)), nn.BatchNorm1d(4), nn.Flatten()
    return nn.Sequential(nn.Linear(FEATURES, 8), *norm, nn.ReLU(), nn.Linear(8, CLASSES))


def data(size=50, seed=1, dtype=torch.float64):
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(size, FEATURES, generator=made, dtype=dtype)
    return TensorDataset(x, x[:, :CLASSES].argmax(1))


class Seen:
    """A table that remembers what was read."""

    def __init__(self, table):
        self.table, self.places = table, []

    def __len__(self):
        return len(self.table)

    def __getitem__(self, place):
        self.places.append(place)
        return self.table[place]


def quiet(metrics, step):
    pass


def trained(model, table, devices, batchsize, opt=SGD, *, options=None, **how):
    """setup and result of a whole training; `options` go to prepare_training."""
    setup, buffer = prepare_training(model, table, devices, opt, batchsize, **(options or {}))
    return setup, train(F.cross_entropy, setup, buffer, **{"logger": quiet, **how})


def same(one, other):
    """Equal to the bit, in everything."""
    ones, others = one.state_dict(), other.state_dict()
    return ones.keys() == others.keys() and all(torch.equal(ones[n], others[n]) for n in ones)


def close(one, other, **tolerance):
    ones, others = one.state_dict(), other.state_dict()
    assert ones.keys() == others.keys()
    for name in ones:
        torch.testing.assert_close(ones[name], others[name], **tolerance)

"""Layers and optimizers that fail, for workers that allow this module."""

import os

import torch
from torch import nn


class Unbuildable(nn.Module):
    """Cannot be made on a worker."""

    def __init__(self):
        super().__init__()
        if "ODD_WORKER" in os.environ:
            raise RuntimeError("not on this machine")

    def forward(self, x):
        return x


class Touchy(nn.Linear):
    """Does not take large values; nor large gradients."""

    def __init__(self, features):
        super().__init__(features, features)

    def forward(self, x):
        if x.abs().max() > 100:
            raise RuntimeError("too large for me")
        out = super().forward(x)
        if out.requires_grad:
            out.register_hook(check)
        return out


def check(gradient):
    if gradient.abs().max() > 100:
        raise RuntimeError("too steep for me")


class Lazy(torch.optim.SGD):
    def step(self, closure=None):
        raise RuntimeError("not today")

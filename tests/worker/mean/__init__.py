"""Layers that harm the worker that builds them."""

import sys

import torch
from torch import nn


class Leaver(nn.Module):
    """Ends the program."""

    def __init__(self):
        super().__init__()
        sys.exit(3)


class Garbled(nn.Module):
    """Its error has a text that UTF-8 cannot say."""

    def __init__(self):
        super().__init__()
        raise RuntimeError("unsayable \udcff")


class Silent(Exception):
    def __str__(self):
        raise ValueError("no text")


class Speechless(nn.Module):
    """Its error has no text at all."""

    def __init__(self):
        super().__init__()
        raise Silent


class Talkative(nn.Module):
    """Its error has much of it."""

    def __init__(self):
        super().__init__()
        raise RuntimeError("a" * 50_000_000)


class Names(nn.Module):
    """Small parameters with long names."""

    def __init__(self, number, length):
        super().__init__()
        for index in range(number):
            self.register_parameter(f"{index}".zfill(length), nn.Parameter(torch.zeros(1)))

    def forward(self, x):
        return x

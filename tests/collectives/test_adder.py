"""The owner's work: add in roster order, divide by the weight, encode once, refuse what is bad."""

from __future__ import annotations

import math

import pytest
import torch

from manyhands.collectives.adder import Adder
from manyhands.collectives.bank import Bank, pool_for
from manyhands.collectives.layout import Layout
from manyhands.collectives.messages import Part, Share, Sum, Tag
from manyhands.collectives.ranges import EMPTY, Ranges
from manyhands.collectives.shelf import Filed
from manyhands.core.peers import ViewNumber
from manyhands.wire.tensors import bytes_of

ME = 2
TAG = Tag(ViewNumber(1, 1), 0)


class Owner:
    """Member 2 of three; the others' contributions come as bytes."""

    def __init__(self, like, wire="fp32", *, refuse=True) -> None:
        self.layout = Layout.of([like], 1 << 20)
        self.pool = pool_for(self.layout, wire, 1 << 20)
        self.bank = Bank(self.layout, wire, self.pool)
        self.adder = Adder(self.layout, self.bank, self.pool, refuse=refuse)
        self.filed = {}

    def give(self, peer, values, weight=1.0) -> None:
        part = Part(0, TAG, 0, Ranges.of((10 * peer, 10 * peer + 5)), weight, report=None) if False else None
        part = _part(peer, weight)
        if values is None:
            self.filed[peer] = Filed(part, None)
        elif peer == ME:
            self.bank.lend(self.layout.check([values]), weight)
            self.filed[peer] = Filed(part, None)
        else:
            block = self.pool.take(self.adder.wire_bytes(0))
            codec = self.bank.codecs[0]
            codec.encode(values.view(-1), block.tensor)
            self.filed[peer] = Filed(part, block)

    def add(self, refused=EMPTY):
        shares = tuple(Share(peer, one.part.ranges) for peer, one in sorted(self.filed.items()))
        head, block = self.adder.add_up(Sum(0, TAG, 1, shares, refused), self.filed_as_part_0(), ME)
        return head, self.read(block)

    def filed_as_part_0(self):
        return self.filed

    def read(self, block):
        out = torch.empty(self.layout.parts[0].numel, dtype=self.layout.parts[0].dtype)
        self.bank.codecs[0].decode(block.tensor, out)
        return out


def _part(peer, weight) -> Part:
    return Part(0, TAG, 1, Ranges.of((10 * peer, 10 * peer + 5)), weight)

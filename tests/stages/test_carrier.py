"""What a process group is asked for, by the backend it has."""

import pytest
import torch

from manyhands.stages.carrier import GroupCarrier


class Work:
    def wait(self):
        pass


class Line:
    """A group of two, that remembers what it was asked for."""

    def __init__(self, ranks, seen):
        self.ranks, self.seen = ranks, seen

    def send(self, tensors, to, tag):
        self.seen.append(("send", self.ranks, to, tensors[0].device.type))
        return Work()

    def recv(self, tensors, sender, tag):
        self.seen.append(("receive", self.ranks, sender, tensors[0].device.type))
        return Work()


class Group(Line):
    """As torch's; this is rank 1 of 3."""

    def __init__(self, backend):
        super().__init__("all", [])
        self.backend = backend

    def rank(self):
        return 1

    def size(self):
        return 3

    def name(self):
        return self.backend

    def part_of(self, ranks):
        self.seen.append(("new group", tuple(ranks)))
        return Line(tuple(ranks), self.seen) if 1 in ranks else None


META = torch.device("meta")  # stands for a GPU: tensors there are on no CPU


def test_over_nccl_each_direction_has_a_group_that_is_opened_in_one_order():
    group = Group("nccl")
    carrier = GroupCarrier(group, META)
    assert carrier.words_on == META
    carrier.prepare([(0, 1, 2), (2, 1)], [(2, 1), (1, 2), (0, 2), (1, 0), (1, 2)])
    assert group.seen == [
        ("new group", (1, 2)),  # that sums
        ("new group", (0, 2)),  # all ranks make all groups
        ("new group", (0, 1)),
        ("send", (0, 1), 0, "meta"),
        ("new group", (1, 2)),
        ("send", (1, 2), 1, "meta"),
        ("new group", (1, 2)),
        ("receive", (1, 2), 1, "meta"),
    ]
    group.seen.clear()
    carrier.prepare([(1, 2)], [(1, 0), (2, 1)])  # they are there
    assert group.seen == []
    tensor = torch.zeros(4, device=META)
    carrier.send(tensor, 0).wait()
    carrier.send(tensor, 2).wait()
    carrier.receive(tensor, 2).wait()
    assert group.seen == [
        ("send", (0, 1), 0, "meta"),  # a peer by its place in the group of two
        ("send", (1, 2), 1, "meta"),
        ("receive", (1, 2), 1, "meta"),
    ]


class Moving(Group):
    """Two ranks in one: what was sent is received."""

    def send(self, tensors, to, tag):
        self.seen.append(tensors[0])
        return Work()

    def recv(self, tensors, sender, tag):
        sent = self.seen.pop()
        assert (sent.dtype, sent.shape) == (tensors[0].dtype, tensors[0].shape)
        tensors[0].copy_(sent)
        return Work()


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
@pytest.mark.parametrize(
    "sent",
    [
        torch.arange(6, dtype=torch.int16).reshape(3, 2),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.tensor(True),
        torch.ones(2, dtype=torch.complex128),
        torch.empty(0, 4),
    ],
    ids=["int16", "float32", "bool", "complex", "empty"],
)
def test_tensors_of_any_type_come_as_they_were(backend, sent):
    """NCCL, which moves neither int16 nor much else that is no number of its own, moves bytes."""
    group = Moving(backend)
    carrier = GroupCarrier(group, torch.device("cpu"))
    carrier.send(sent, 0).wait()
    assert group.seen[0].dtype == (torch.uint8 if backend == "nccl" else sent.dtype)
    found = torch.empty(sent.shape, dtype=sent.dtype)
    carrier.receive(found, 0).wait()
    assert torch.equal(found, sent)


@pytest.mark.parametrize("backend", ["gloo", "manyhands"])
def test_others_need_no_such_groups(backend):
    group = Group(backend)
    carrier = GroupCarrier(group, torch.device("cpu"))
    carrier.prepare([], [(1, 0), (0, 1)])
    assert group.seen == []
    carrier.send(torch.zeros(1), 2).wait()
    carrier.receive(torch.zeros(1), 0).wait()
    assert group.seen == [("send", "all", 2, "cpu"), ("receive", "all", 0, "cpu")]

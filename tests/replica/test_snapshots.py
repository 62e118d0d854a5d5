"""Pieces of states on their way to a newcomer, in whatever order they come."""

from __future__ import annotations

import torch

from manyhands.checkpoint.tree import flatten
from manyhands.collectives.messages import Record, Snapshot
from manyhands.core.peers import NO_VIEW, PeerId
from manyhands.replica.openings import Openings
from manyhands.replica.snapshots import Snapshots

NEWCOMER, DONORS = PeerId("newcomer", 9), [PeerId("a", 1), PeerId("b", 2)]


class Engine:
    """What it was told to send, and what has arrived."""

    def __init__(self) -> None:
        self.sent: list = []
        self.arrived: list[Snapshot] = []

    def send_snapshot(self, head, to, buffers) -> None:
        self.sent.append((head, [memoryview(bytes(buffer)) for buffer in buffers]))

    def snapshot_arrived(self, sender, head) -> None:
        self.arrived.append(head)

    def abort(self, error) -> None:
        raise error


def new_snapshots() -> tuple[Snapshots, Engine]:
    made, engine = Snapshots({}, lambda theirs: None, lambda openings: None, 1 << 20), Engine()
    made.attach(engine)
    return made, engine


def answers(number: int, applied: int, value: float) -> list[list]:
    """What each donor sends in answer to that Ask: a state of three tensors."""
    found = []
    for place in range(len(DONORS)):
        donor, engine = new_snapshots()
        record = Record(b"", NO_VIEW, NO_VIEW, ())
        head = Snapshot(number, applied, b"chain", record, place, len(DONORS))
        donor.give(head, NEWCOMER)
        flat = flatten({"weights": [torch.full((4,), value) for _ in range(3)]})
        donor.serve(applied, flat, Openings(), b"", 1 << 20)
        assert not donor.is_due(applied)
        found.append(engine.sent)
    return found


def deliver(newcomer: Snapshots, sender: PeerId, sent) -> None:
    for head, buffers in sent:
        newcomer.arrived(sender, head, buffers)


def test_an_earlier_answer_that_comes_late_spoils_nothing():
    """A donor was slow with its first answer; the newcomer has asked again meanwhile."""
    newcomer, engine = new_snapshots()
    (quick, slow), (quick_again, slow_again) = answers(0, 5, 1.0), answers(1, 8, 2.0)
    deliver(newcomer, DONORS[0], quick)
    deliver(newcomer, DONORS[0], quick_again)
    deliver(newcomer, DONORS[1], slow)
    deliver(newcomer, DONORS[1], slow_again)
    assert [(head.number, head.applied) for head in engine.arrived] == [(1, 8)]
    tree = newcomer.take(engine.arrived[0]).tree
    assert torch.equal(torch.stack(tree["weights"]), torch.full((3, 4), 2.0))


def test_of_two_answers_the_first_to_be_whole_counts():
    """After a death it asks again with the same number: both states would do, not a mixture."""
    newcomer, engine = new_snapshots()
    one, two = answers(0, 5, 1.0), answers(0, 8, 2.0)
    for sender, first, second in zip(DONORS, one, two, strict=True):
        deliver(newcomer, sender, first)
        deliver(newcomer, sender, second)
    assert [head.applied for head in engine.arrived] == [5]
    tree = newcomer.take(engine.arrived[0]).tree
    assert torch.equal(torch.stack(tree["weights"]), torch.full((3, 4), 1.0))


def test_a_donor_copies_its_piece_only():
    """Training goes on while it is sent; what others send is not copied."""
    most, size = 1 << 16, 1 << 20
    for place in range(len(DONORS)):
        donor, sending = new_snapshots()
        sending.send_snapshot = lambda head, to, buffers, kept=sending.sent: kept.append(buffers)
        record = Record(b"", NO_VIEW, NO_VIEW, ())
        donor.give(Snapshot(0, 7, b"chain", record, place, len(DONORS)), NEWCOMER)
        state = {"weights": torch.ones(size, dtype=torch.uint8)}
        donor.serve(7, flatten(state), Openings(), b"", most)
        state["weights"].zero_()
        chunks = [chunk for _, *rest in sending.sent for chunk in rest]
        values = chunks[1:] if place == 0 else chunks  # the first one has the table of contents
        assert all(set(chunk) == {1} for chunk in values)
        held = {id(chunk.obj): memoryview(chunk.obj).nbytes for chunk in chunks}
        assert sum(held.values()) <= size // len(DONORS) + most


def test_tensors_of_any_size_go_in_messages_that_a_link_takes():
    """What says which piece it is counts, too."""
    most, state = 1 << 16, {"weights": torch.arange(3 * (1 << 14) + 5, dtype=torch.int32)}
    donor, sending = new_snapshots()
    head = Snapshot(0, 7, b"chain", Record(b"", NO_VIEW, NO_VIEW, ()), 0, 1)
    donor.give(head, NEWCOMER)
    donor.serve(7, flatten(state), Openings(), b"", most)
    sizes = [sum(map(len, buffers)) for _, buffers in sending.sent]
    assert max(sizes) <= most
    newcomer, engine = new_snapshots()
    deliver(newcomer, DONORS[0], sending.sent)
    assert torch.equal(newcomer.take(engine.arrived[0]).tree["weights"], state["weights"])

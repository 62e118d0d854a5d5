"""Mail: what arrives lands in blocks of the pool, each message in its own."""

from __future__ import annotations

import pytest

from manyhands.collectives import messages as m
from manyhands.collectives.mail import Mail
from manyhands.collectives.pool import Pool
from manyhands.collectives.ranges import Ranges
from manyhands.core.errors import Malformed
from manyhands.core.peers import PeerId, ViewNumber
from manyhands.links.base import Delivery

SENDER = PeerId("a", 5)
TAG = m.Tag(ViewNumber(1, 3), 0)
PART = m.Part(3, TAG, 1, Ranges.whole(2), weight=2.0)
WORDS = m.encode(PART)


@pytest.fixture
def mail():
    made = Mail()
    made.pool = Pool(1000, 4)
    return made


def receive(mail, words, data, *, sender=SENDER):
    """As a link does: ask where, fill it, deliver."""
    sizes = tuple(map(len, data))
    placed = mail(sender, words, sizes)
    if placed is None:
        placed = [memoryview(bytearray(size)) for size in sizes]
    for view, piece in zip(placed, data, strict=True):
        view[:] = piece
    return Delivery(sender, words, tuple(placed), False)


def test_values_lie_where_they_were_received(mail):
    delivery = receive(mail, WORDS, [b"a" * 10, b"b" * 20])
    message, block = mail.open(delivery)
    assert message == PART
    assert bytes(block.view) == b"a" * 10 + b"b" * 20
    assert block.view.obj is delivery.buffers[0].obj  # not a copy
    assert not mail._placed


def test_a_link_that_does_not_ask(mail):
    delivery = Delivery(SENDER, WORDS, (memoryview(b"a" * 10), memoryview(b"b" * 20)), False)
    message, block = mail.open(delivery)
    assert (message, bytes(block.view)) == (PART, b"a" * 10 + b"b" * 20)


def test_before_there_is_a_pool():
    mail = Mail()
    delivery = receive(mail, WORDS, [b"abc"])
    mail.pool = Pool(1000, 4)
    assert bytes(mail.open(delivery)[1].view) == b"abc"


def test_two_messages_of_the_same_words_have_their_own_values(mail):
    """The second may still be on its way when the first is opened."""
    first = receive(mail, WORDS, [b"first"])
    placed = mail(SENDER, WORDS, (6,))
    assert bytes(mail.open(first)[1].view) == b"first"
    placed[0][:] = b"second"
    second = Delivery(SENDER, WORDS, tuple(placed), False)
    assert bytes(mail.open(second)[1].view) == b"second"
    assert not mail._placed


def test_the_same_words_without_values(mail):
    first = receive(mail, WORDS, [b"first"])
    assert mail.open(Delivery(SENDER, WORDS, (), False)) == (PART, None)
    assert bytes(mail.open(first)[1].view) == b"first"


def test_the_same_words_of_two_senders(mail):
    other = PeerId("b", 6)
    one, two = receive(mail, WORDS, [b"one"]), receive(mail, WORDS, [b"two"], sender=other)
    assert bytes(mail.open(two)[1].view) == b"two"
    assert bytes(mail.open(one)[1].view) == b"one"


def test_a_message_that_is_asked_for_again_after_a_reconnect(mail):
    mail(SENDER, WORDS, (5,))  # the connection broke within it
    assert bytes(mail.open(receive(mail, WORDS, [b"whole"]))[1].view) == b"whole"
    assert not mail._placed


def test_after_a_cut_nothing_older_is_waited_for(mail):
    """A message that never came would keep its block for good."""
    mail(SENDER, WORDS, (5,))
    newer = m.encode(m.Part(3, m.Tag(ViewNumber(1, 9), 0), 1, Ranges.whole(2), weight=2.0))
    late, new = (
        receive(mail, m.encode(m.Fill(None, SUM)), [b"late"]),
        receive(mail, newer, [b"new"]),
    )
    mail.forget(ViewNumber(1, 9))
    assert len(mail._placed) == 1
    assert bytes(mail.open(late)[1].view) == b"late"  # it is only copied
    assert bytes(mail.open(new)[1].view) == b"new"


SUM = m.Sum(3, TAG, 1, (m.Share(5, Ranges.whole(2)),))


def test_only_values_of_parts_have_a_place(mail):
    for words in (m.encode(m.Ask(1)), m.encode(m.Want(1)), b"garbage", b""):
        assert mail(SENDER, words, (10,)) is None
    assert mail(SENDER, WORDS, ()) is None
    message, block = mail.open(Delivery(SENDER, m.encode(m.Ask(1)), (memoryview(b"x"),), False))
    assert (message, block) == (m.Ask(1), None)
    with pytest.raises(Malformed):
        mail.open(Delivery(SENDER, b"garbage", (), False))

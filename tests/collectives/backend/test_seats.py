"""Who gets which rank: every case, without processes."""

from __future__ import annotations

import pytest

from manyhands.collectives.backend import messages as words
from manyhands.collectives.backend.failure import name_ranks
from manyhands.collectives.backend.messages import Hello
from manyhands.collectives.backend.seats import assign, name_of, rank_of, take_seat
from manyhands.core.errors import UsageError
from manyhands.links.base import open_link

A, B, C = 11, 22, 33


@pytest.mark.parametrize(
    ("hellos", "seated"),
    [
        ({A: Hello(0, 2), B: Hello(1, 2)}, (A, B)),
        ({A: Hello(1, 2), B: Hello(0, 2)}, (B, A)),
        ({A: Hello(None, None), B: Hello(None, 2)}, (A, B)),
        ({A: Hello(None, 3), B: Hello(0, None), C: Hello(None, None)}, (B, A, C)),
        ({A: Hello(None, 2), B: Hello(None, 2), C: Hello(None, 2)}, (A, B)),
        ({A: Hello(None, 2), B: Hello(None, 2), C: Hello(0, 2)}, (C, A)),
        ({A: Hello(None, 1)}, (A,)),
        ({A: Hello(0, 2)}, None),
        ({A: Hello(None, None), B: Hello(1, None)}, None),
        ({}, None),
    ],
)
def test_seats(hellos, seated):
    assert assign([A, B, C], hellos) == seated


@pytest.mark.parametrize(
    ("hellos", "words"),
    [
        ({A: Hello(0, 2), B: Hello(1, 3)}, "disagree on world_size: rank 0 says 2, rank 1 says 3"),
        ({A: Hello(None, 2), B: Hello(1, 3)}, "one without rank says 2, rank 1 says 3"),
        ({A: Hello(0, None), B: Hello(1, 3), C: Hello(2, 4)}, ": rank 1 says 3, rank 2 says 4"),
        ({A: Hello(0, 2), B: Hello(2, None)}, "rank 2 was given, but world_size is 2"),
        ({A: Hello(0, 2), B: Hello(0, None)}, "rank 0 was given to two peers"),
    ],
)
def test_refusals(hellos, words):
    assert words in assign([A, B, C], hellos)


def test_a_refusal_of_many_fits_a_message():
    hellos = {peer: Hello(peer, 100_000 + peer) for peer in range(1, 200)}
    reason = assign(list(hellos), hellos)
    assert words.decode(words.encode(words.Refusal(reason))).reason == reason


def test_peers_are_named_after_their_ranks():
    assert rank_of(name_of(12)) == 12
    assert name_of(None) is None
    for other in ("rank-", "rank-01", "rank-x", "12", "host-3-abc"):
        assert rank_of(other) is None


@pytest.mark.parametrize(
    ("rank", "world", "words"),
    [
        (-1, 2, "rank -1 of a world of 2\n"),
        (2, 2, "from 0 to 1;"),
        (-1, None, "rank -1 of a world of any size"),
        (4096, None, "from 0 to 4095;"),
        (0, 0, "a world_size of 0"),
        (0, 4097, "1 to 4096"),
    ],
)
def test_what_no_other_peer_would_understand_is_refused_here(rank, world, words):
    """Said to the others it would be no word to them: all would wait until their time is over."""
    with (
        open_link(f"local:///seats-{rank}-{world}", name="a") as link,
        pytest.raises(UsageError, match=words),
    ):
        take_seat(link, rank, world, 0.5, where="run 'seats'")


def test_of_many_ranks_the_first_are_named():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks(range(16)) == f"ranks {', '.join(map(str, range(16)))}"
    assert name_ranks(range(500)) == f"ranks {', '.join(map(str, range(16)))} and 484 more"

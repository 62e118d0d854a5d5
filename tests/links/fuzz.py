"""Malformed frames of the real protocol against the real schema.

python -m tests.links.fuzz --inputs 1000000
"""

from __future__ import annotations

import argparse

from manyhands.core.peers import Member, PeerId, PeerState, View, ViewNumber
from manyhands.links import messages as m
from tests.wire import fuzz

_PEER, _NUMBER = PeerId("peer-1", 123456789), ViewNumber(1, 7)
_ROSTER = (Member(_PEER, PeerState.ACTIVE, _NUMBER),)
_VIEW = View(_NUMBER, _ROSTER, _NUMBER, _ROSTER, None)
_BACK = m.Return(b"s" * 16, 5, _NUMBER, PeerState.ACTIVE)

# One of every kind: a kind that is missing here fails the test of it.
FRAMES: list[fuzz.Frame] = [
    (header, b"")
    for header in (
        m.Hello("run", _PEER, "token", m.Terms(), "0.1", _BACK),
        m.Hello("run", _PEER, "token", m.Terms(), "0.1"),
        m.Welcome(m.Terms(), b"s" * 16, "0.1", True, 3),
        m.Refusal("token", "the token is wrong", "use the code"),
        m.Dismissal("it left"),
        m.Bye(),
        m.Credit(1, 2, 3, 4),
        m.Gap(1),
        m.Lost(2),
        m.NewView(_VIEW, m.Terms()),
        m.Beat(1, 2, 3),
        m.Receipt(2, 3),
        m.BeatBack(1, 2),
        m.Ready(1),
        m.Leaving(),
        m.Gone(_NUMBER),
        m.Resign(False, "because"),
        m.Call(_PEER, 1, _NUMBER, PeerState.ACTIVE, PeerState.LEAVING, _NUMBER, b"word"),
        m.Missing(2),
        m.Fence(3),
        m.Marker(4),
    )
]
FRAMES.append((m.Data(1, None, 1, (3, 0, 2), b"message"), b"12345"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    print(fuzz.run(arguments.inputs, arguments.seed, m.SCHEMA, FRAMES))


if __name__ == "__main__":
    main()

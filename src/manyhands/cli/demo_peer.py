"""One peer of the demo: sends tensors to all others and checks every one it receives.

    python -m manyhands.cli.demo_peer NAME        the address comes from MANYHANDS_URL

It reports JSON lines on stdout and leaves when its stdin ends.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import warnings
from dataclasses import dataclass, field

import msgspec

# torch says so on import when NumPy is missing; nothing here needs it.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

import torch

from manyhands.core.errors import LinkError
from manyhands.core.peers import PeerState, View
from manyhands.links.base import Delivery, Link, open_link
from manyhands.links.messages import Ready
from manyhands.wire.tensors import TensorSpec, bytes_of, from_bytes, spec_of

PART_BYTES = 1 << 20  # of a tensor
REPORT_S = 0.2


class Parcel(msgspec.Struct, frozen=True, array_like=True):
    """What goes with a tensor: enough for the receiver to make the same one."""

    seed: int
    spec: TensorSpec


def make_tensor(seed: int) -> torch.Tensor:
    """The tensor of that seed, the same on every peer."""
    # bfloat16 has no counterpart in Python or NumPy: if it arrives, everything does.
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(PART_BYTES // 2, generator=generator).to(torch.bfloat16)


@dataclass
class Tally:
    """What a peer has seen so far."""

    sent: int = 0
    received: int = 0
    wrong: int = 0
    view: str = ""
    roster: list[str] = field(default_factory=list[str])


def receive_all(link: Link, tally: Tally) -> None:
    """Check what arrives until the link is closed."""
    decoder = msgspec.msgpack.Decoder(Parcel)
    roster: set[str] = set()
    try:
        while True:
            match link.receive(timeout_s=3600):
                case Delivery() as parcel:
                    said = decoder.decode(parcel.message)
                    arrived = from_bytes(said.spec, parcel.buffers[0])
                    tally.wrong += not torch.equal(arrived, make_tensor(said.seed))
                    tally.received += 1
                case View() as view:
                    tally.view = str(view.number)
                    tally.roster = [p.name for p in view.peers(PeerState.ACTIVE)]
                    now = {p.name for p in view.peers(PeerState.ACTIVE)}
                    for event, names in (("joined", now - roster), ("left", roster - now)):
                        for name in sorted(names):
                            report(event=event, peer=name)
                    roster = now
                case _:
                    report(event="gap")
    except LinkError:
        return  # closed by the main thread


_line = threading.Lock()  # two threads report, and a line must stay one


def report(**facts: object) -> None:
    """One line to whoever started this peer."""
    with _line:
        print(json.dumps({"time": time.time(), **facts}), flush=True)


def main(name: str) -> None:
    """Take part until stdin ends."""
    torch.set_num_threads(1)
    stop = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    tally = Tally()
    with open_link(name=name) as link:
        reader = threading.Thread(target=receive_all, args=(link, tally))
        reader.start()
        link.tell(Ready())
        seed, next_report_s = link.me.incarnation % 10**9, 0.0
        while not stop.is_set():
            tensor = make_tensor(seed)
            message = msgspec.msgpack.encode(Parcel(seed, spec_of(tensor)))
            link.send(None, message, [bytes_of(tensor)])
            seed, tally.sent = seed + 1, tally.sent + 1
            if time.monotonic() >= next_report_s:
                next_report_s = time.monotonic() + REPORT_S
                report(event="tally", **vars(tally))
        report(event="tally", **vars(tally))
    reader.join()


if __name__ == "__main__":
    assert os.environ.get("MANYHANDS_URL"), "MANYHANDS_URL names the meeting point"
    main(sys.argv[1])

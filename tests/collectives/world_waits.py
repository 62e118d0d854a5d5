"""I10, while a run goes on: whatever a peer waits for is under way, or a view will tell it.

A world that stands still shows by itself. These waits would end with the run at the latest, or at
its next cut, and so nobody would see that they were for nothing.
"""

from __future__ import annotations

from manyhands.collectives import messages as m
from manyhands.collectives.standing import Mode
from manyhands.core.peers import PeerState


def check_waits(world):
    """Whether anybody in the run waits for what nobody sends: that is a violation."""
    for peer in world.alive():
        if not peer.machine.based:
            check_state(world, peer)
        elif peer.machine.mode is Mode.FILLING:
            check_fills(world, peer)
        elif world.view.member(peer.number).state is PeerState.WATCHING:
            check_results(world, peer)


def check_state(world, peer):
    """A newcomer's Ask, or the answer, must be somewhere."""
    donor = world.peers.get(peer.machine.donor)
    if donor is None or donor.stopped or is_cut_off(world, donor):
        return
    ways = ((peer.number, donor.number), (donor.number, peer.number), (world.hub, peer.number))
    coming = peer.number in donor.machine.asks or any(map(world.channels.get, ways))
    coming = coming or any(is_coming(world, peer, key) for key in peer.pieces)
    coming = coming or will_be_served(world, peer, donor)
    world.require(coming, f"I10 {peer.id} waits for a state that nobody sends")


def check_fills(world, peer):
    """Whoever is to fill in, and has come to that, has sent it."""
    machine = peer.machine
    if world.view.cut > machine.cut:
        return
    held = machine.book.results((machine.applied, machine.fill_tag))
    for k, number in machine._verdict.fillers.items():
        filler = world.peers[number]
        acted = filler.machine.cut == machine.cut and filler.machine.mode is not Mode.TALKING
        if k in held or not acted or is_cut_off(world, filler):
            continue
        coming = any(isinstance(word, m.Fill) for word in world.words(number, peer.number))
        world.require(coming, f"I10 {peer.id} waits for a part that {filler.id} does not send")


def check_results(world, peer):
    """One that follows and has seen the run two rounds ahead, after a cut, misses something.

    Nobody is so far without having had all results of the rounds between; if none of them is on
    its way to this peer, it must have asked.
    """
    machine = peer.machine
    newest = machine.book.newest_round()
    if machine.wanting is not None or newest <= machine.applied + 1:
        return
    if all(tag.cut < world.view.cut for tag in machine.book.attempts(newest)):
        return
    others = [world.peers[number] for number in machine._following()]
    if any(is_cut_off(world, other) for other in others):
        return  # a view will tell
    coming = any(channel for key, channel in world.channels.items() if key[1] == peer.number)
    world.require(coming, f"I10 {peer.id} waits for results that nobody sends")


def is_coming(world, peer, key):
    """Whether the pieces of a state that this newcomer lacks are on their way, or will be."""
    number, applied, chain = key
    donors = world.donors[applied, chain]
    lacking = [donor for place, donor in enumerate(donors) if place not in peer.pieces[key]]
    return number == peer.machine.ask_number and all(
        will_send(world, world.peers[donor], peer, applied) for donor in lacking
    )


def will_be_served(world, peer, asked):
    """Whom it has asked may be of another class than those who send: they do, or will."""
    record, number = asked.machine.record, peer.machine.ask_number
    others = [other for other in world.alive() if other is not asked]
    if record is not None and m.Newcomer(peer.number, number) in record.snapshot_for:
        donors = (other for other in others if other.number in record.anchors)
        return any(will_send(world, donor, peer, asked.machine.applied) for donor in donors)
    words = (word for other in others for word in world.words(other.number, peer.number))
    return any(isinstance(word, m.Snapshot) and word.number == number for word in words)


def will_send(world, donor, peer, applied):
    if world.channels.get((donor.number, peer.number)) or is_cut_off(world, donor):
        return True  # or a view will tell
    return donor.stopped is None and donor.machine.applied < applied


def is_cut_off(world, peer):
    """Whether a view will tell the others that this peer is gone."""
    return peer.number in world.dead or peer.number in world.offline

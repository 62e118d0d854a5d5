"""The arbiter's decisions: each takes the view so far and returns the next one. Pure.

The view is all the arbiter knows, so whoever has the newest view can go on in its place.
A function returns its argument unchanged when the event changes nothing; then nothing is
published. docs/membership.md is the specification.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from manyhands.core.peers import NO_VIEW, Member, PeerId, PeerState, View, ViewNumber

_FOLLOWING = (PeerState.ACTIVE, PeerState.LEAVING)


def first_view(era: int) -> View:
    """The view of a run that nobody has joined yet."""
    return View(ViewNumber(era, 0), ())


def joined(view: View, peer: PeerId) -> View:
    """A newcomer watches. A predecessor of the same name is removed: it is paused or cut off."""
    if view.member(peer.incarnation):
        return view
    fenced = [m.peer for m in view.roster if m.peer.name == peer.name]
    kept = tuple(m for m in view.roster if m.peer not in fenced)
    number = _after(view)
    roster = (*kept, Member(peer, PeerState.WATCHING, number))
    return _next(view, roster, cut=_follow(view, fenced))


def ready(view: View, peer: PeerId) -> View:
    """A watching peer becomes active; the first active peer is a cut."""
    member = view.member(peer.incarnation)
    if member is None or member.state is not PeerState.WATCHING:
        return view
    if view.over:
        return removed(view, [peer])
    first = not view.peers(PeerState.ACTIVE)
    return _next(view, _with_state(view, peer, PeerState.ACTIVE), cut=first)


def leaving(view: View, peer: PeerId) -> View:
    """An active peer announces that it will go."""
    member = view.member(peer.incarnation)
    if member is None or member.state is not PeerState.ACTIVE:
        return view
    return _next(view, _with_state(view, peer, PeerState.LEAVING), cut=False)


def gone(view: View, peer: PeerId, cut: ViewNumber) -> View:
    """A leaving peer has gone; quiet only if no cut has come since it finished."""
    member = view.member(peer.incarnation)
    if member is None:
        return view
    quiet = member.state is PeerState.LEAVING and cut == view.cut
    return removed(view, [peer], quiet=quiet)


def resigned(view: View, peer: PeerId, *, finished: bool) -> View:
    """A peer leaves at once; `finished` says that the run is over for everybody."""
    after = removed(view, [peer])
    if after is view or not finished or view.over:
        return after
    return View(
        after.number, after.roster, after.cut, after.cut_roster, founder=after.founder, over=True
    )


def removed(view: View, peers: Collection[PeerId], *, quiet: bool = False) -> View:
    """These peers are out. A cut if one of them was followed, unless it went quietly."""
    kept = tuple(m for m in view.roster if m.peer not in peers)
    if len(kept) == len(view.roster):
        return view
    return _next(view, kept, cut=_follow(view, peers) and not quiet)


def shaken(view: View, peers: Iterable[PeerId]) -> View:
    """These peers may have lost messages: a cut with the same roster if one of them is followed."""
    return _next(view, view.roster, cut=True) if _follow(view, peers) else view


def returned(view: View, era: int, members: Iterable[Member]) -> View:
    """After a restart: the roster is whoever came back within the lease, in a new era, one cut.

    `view` is what the journal remembers, `members` are in order of joining. A run that had an
    active peer has none left if none came back; its cut number tells so, and no founder is named.
    """
    roster = tuple(members)
    was_new = view.cut == NO_VIEW and not any(m.state in _FOLLOWING for m in roster)
    base = View(
        ViewNumber(max(era, view.number.era), 0), roster, view.cut, view.cut_roster, over=view.over
    )
    return _next(base, roster, cut=not was_new)


def _next(view: View, roster: tuple[Member, ...], *, cut: bool) -> View:
    number = _after(view)
    last_cut, cut_roster = (number, roster) if cut else (view.cut, view.cut_roster)
    new = last_cut == NO_VIEW  # no peer of this run was ever active
    founder = roster[0].peer if new and roster else None
    return View(number, roster, last_cut, cut_roster, founder, view.over)


def _after(view: View) -> ViewNumber:
    return ViewNumber(view.number.era, view.number.n + 1)


def _with_state(view: View, peer: PeerId, state: PeerState) -> tuple[Member, ...]:
    number = _after(view)
    return tuple(Member(peer, state, number) if m.peer == peer else m for m in view.roster)


def _follow(view: View, peers: Iterable[PeerId]) -> bool:
    members = (view.member(peer.incarnation) for peer in peers)
    return any(m is not None and m.state in _FOLLOWING for m in members)

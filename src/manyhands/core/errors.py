"""Every error manyhands raises, in one tree.

    ManyhandsError
    ├── UsageError (ValueError)      something a user typed or passed
    │   ├── AddressError             a URL or join code
    │   ├── RegistryError            a Data.toml, or an entry of it: everything wrong at once
    │   └── SettingsError            a setting out of its range, an unknown key
    │       └── NoMeetingPoint       nothing says where the others are
    ├── TooSlow                      a newcomer that does not catch up with the run
    ├── CheckpointError              a place for checkpoints cannot be written or read
    ├── DataError                    a place of data cannot be read
    │   └── NotThere (KeyError)      a tree has no file or folder of this name
    ├── WireError                    bytes that are not what the protocol says
    │   ├── Truncated                they end too early
    │   ├── Oversized                they announce more than the receiver takes
    │   ├── WrongVersion             another version of the protocol
    │   └── Malformed                not a frame, or a header that breaks its schema
    └── LinkError                    a link to the other peers of a run
        ├── LinkClosed               you closed it
        ├── LinkBroken               they went away: the meeting point cannot be reached
        ├── LinkTimeout              a named wait ended without its event
        ├── Refused                  the meeting point turned this peer away, and why
        ├── Excluded                 the run goes on without this peer
        └── PeerGone                 the peer you address is not in the run, or not any more

Each carries its facts as fields, and an optional `hint`: what to do about it.
"""

from __future__ import annotations

from collections.abc import Sequence


class ManyhandsError(Exception):
    """The root. `str(error)` is the message, then a `hint:` line when there is a remedy."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class UsageError(ManyhandsError, ValueError):
    """Something a user typed or passed cannot be used."""


class AddressError(UsageError):
    """A URL or a join code cannot be understood or must not be used as it is."""


class SettingsError(UsageError):
    """A setting is unknown or out of its range."""


class RegistryError(UsageError):
    """What is wrong with a Data.toml or an entry of it: one line a problem, in `problems`."""

    def __init__(self, what: str, problems: Sequence[str] = (), *, hint: str | None = None) -> None:
        super().__init__("\n  ".join([what, *problems]), hint=hint)
        self.problems = tuple(problems)


class NoMeetingPoint(SettingsError):
    """Neither the caller, nor the environment, nor a file names a meeting point."""


class TooSlow(ManyhandsError):
    """The run makes its rounds faster than this newcomer can follow; rates are rounds a second."""

    def __init__(self, run_rate: float, own_rate: float, *, behind: int) -> None:
        super().__init__(
            f"this peer cannot catch up: the run makes {run_rate:.3g} rounds a second, this peer "
            f"managed to replay {own_rate:.3g}, and is {behind} rounds behind",
            hint="let it join on a faster machine, by a faster link, or with less beside it on "
            "this one; or give the run longer rounds: a larger batch",
        )
        self.run_rate = run_rate
        self.own_rate = own_rate


class CheckpointError(ManyhandsError):
    """A place for checkpoints cannot be written or read; the run itself can go on."""


class DataError(ManyhandsError):
    """A file, folder or bucket of data cannot be read; the message names it, without secrets."""


class NotThere(DataError, KeyError):
    """A tree has no file or folder of this name."""


class WireError(ManyhandsError):
    """Received bytes are not what the protocol says."""


class Truncated(WireError):
    """The bytes end before the frame does."""


class Oversized(WireError):
    """A frame announces more than the receiver takes; nothing was allocated for it."""


class WrongVersion(WireError):
    """The frame is of another version of the protocol."""

    def __init__(self, message: str, *, version: int, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.version = version


class Malformed(WireError):
    """Not a frame at all, or a header that does not follow its schema."""


class LinkError(ManyhandsError):
    """A link cannot do what was asked of it."""


class LinkClosed(LinkError):
    """The link was closed on this side."""


class LinkBroken(LinkError):
    """The meeting point cannot be reached any more, or broke the protocol."""


class LinkTimeout(LinkError, TimeoutError):
    """A wait ended without its event; `waited_for` names the event."""

    def __init__(self, waited_for: str, timeout_s: float, *, hint: str | None = None) -> None:
        super().__init__(f"no {waited_for} within {timeout_s:g} s", hint=hint)
        self.waited_for = waited_for
        self.timeout_s = timeout_s


class Refused(LinkError):
    """The meeting point turned this peer away; `code` says why in one word."""

    def __init__(self, code: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.code = code


class Excluded(LinkError):
    """The run goes on without this peer; to take part again, open a new link."""

    def __init__(self, reason: str) -> None:
        super().__init__(
            f"this peer is no longer part of the run: {reason}",
            hint="to take part again, join again: a new link, or a new process",
        )
        self.reason = reason


class PeerGone(LinkError):
    """The addressed peer is not in the run, or not any more."""

    def __init__(self, peer: object) -> None:
        super().__init__(f"peer {peer} is not among the others of this run")
        self.peer = peer

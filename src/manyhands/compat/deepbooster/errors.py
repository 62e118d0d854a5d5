"""What can go wrong with trainers, by name."""

from __future__ import annotations

from manyhands.core.errors import ManyhandsError, UsageError


class ChunkError(UsageError):
    """A file of samples cannot be used; the message names the file and the lines."""


class DeviceMissing(UsageError):
    """The device that a trainer was given is not on this machine."""


class QueueInUse(ManyhandsError):
    """Another trainer has this `my_queue` or `ignition_queue`."""


class TrainingBegun(ManyhandsError):
    """The others have begun without this trainer: it came too late, or died and came back."""


class TrainingBroken(ManyhandsError):
    """This trainer cannot go on; the others do, without it."""

"""What can go wrong in a training, beside what a user passed.

TrainingBroken        the devices cannot go on together
├── NotSynced         replicas or buffers that must be equal are not
├── BadGradient       the mean gradient has a NaN; no replica has taken it
├── Bystander         this device was all right, another one was not
└── WorkersFailed     processes of `start` ended with an error, or were killed
"""

from __future__ import annotations

from manyhands.core.errors import ManyhandsError


class TrainingBroken(ManyhandsError):
    """The devices cannot go on together."""


class NotSynced(TrainingBroken):
    """What must be the same on all devices is not; the message names device and tensor."""


class BadGradient(TrainingBroken):
    """The mean gradient has a NaN. No replica has taken it."""


class WorkersFailed(TrainingBroken):
    """Worker processes ended with an error or by a signal; the message names them."""


class Bystander(TrainingBroken):
    """This device was all right, another one was not: that one's error says more."""

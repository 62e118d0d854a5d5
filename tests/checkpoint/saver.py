"""A process that saves, and at a given moment stands still until it is killed or told to go on.

python -m tests.checkpoint.saver FOLDER ROUND MOMENT     says "here" then, and "saved" at the end
"""

import os
import sys

from manyhands.checkpoint import tensors
from manyhands.checkpoint.store import Store
from tests.checkpoint.kit import checkpoint_of


def stand_still_at(moment):
    """At the second tensor, before the data or the manifest is synced, or before the rename."""
    verb, at = {
        "values": ("bytes_of", 2),
        "data": ("fsync", 1),
        "manifest": ("fsync", 2),
        "rename": ("replace", 1),
        "folder": ("fsync", 3),
    }[moment]
    module = tensors if verb == "bytes_of" else os
    real, calls = getattr(module, verb), 0

    def stopped(*arguments):
        nonlocal calls
        calls += 1
        if calls == at:
            print("here", flush=True)
            sys.stdin.readline()
        return real(*arguments)

    setattr(module, verb, stopped)


if __name__ == "__main__":
    folder, round, moment = sys.argv[1:]
    if moment != "never":
        stand_still_at(moment)
    Store(folder, keep=2).save(checkpoint_of(int(round)))
    print("saved", flush=True)

"""The demo's training in one process, in plain PyTorch: what its peers together must come to.

    python -m manyhands.cli.demo_alone EPOCHS

Of manyhands it has the order of the samples alone, which is part of the promise.
"""

from __future__ import annotations

import sys

from manyhands.cli.demo_peer import BATCH, accuracy, criterion, load_digits, make, say
from manyhands.data.order import Order


def main(epochs: int) -> None:
    """Report the loss of each batch, and the accuracy at the end."""
    digits = load_digits()
    size = len(digits.y)
    model, optimizer = make()
    for epoch in range(epochs):
        order = Order(size, seed=0, epoch=epoch)
        for start in range(0, size, BATCH):
            samples = order.indices(start, min(start + BATCH, size))
            loss = criterion(model(digits.x[samples]), digits.y[samples])
            loss.backward()  # pyright: ignore[reportUnknownMemberType]
            optimizer.step()  # pyright: ignore[reportUnknownMemberType]
            optimizer.zero_grad()
            say(loss=float(loss.detach()))
    say(accuracy=accuracy(model, digits))


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""A U-Net in a pipeline: its skips leave one stage and enter another, some stages later.

    python examples/unet.py                                  one process
    manyhands run -n 2 examples/unet.py                      two peers, one stage each
    manyhands run -n 2 examples/unet.py --stages-per-peer 2  interleaved: four stages on two peers

It learns to take the noise off scikit-learn's handwritten digits. The losses do not depend on how
many peers there are, nor on the schedule.
"""

import argparse
import time

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F

import manyhands as mh

BATCH, NOISE = 64, 0.5


def convolutions(inside, outside):
    # GroupNorm looks at one image only; BatchNorm would see a microbatch instead of the batch.
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1),
        nn.GroupNorm(4, outside),
        nn.ReLU(),
        nn.Conv2d(outside, outside, 3, padding=1),
        nn.ReLU(),
    )


class Down(nn.Module):
    def __init__(self, skip, inside, outside):
        super().__init__()
        self.skip, self.block = skip, convolutions(inside, outside)

    def forward(self, x):
        x = self.block(x)
        mh.stash(self.skip, x)  # for the Up that has this size again, on whichever peer it is
        return F.max_pool2d(x, 2)


class Up(nn.Module):
    def __init__(self, skip, inside, outside):
        super().__init__()
        self.skip, self.block = skip, convolutions(inside + outside, outside)

    def forward(self, x):
        x = F.interpolate(x, scale_factor=2)
        return self.block(torch.cat([x, mh.pop(self.skip)], 1))


LAYERS = {
    "down 16": lambda: Down("skip 16", 1, 16),
    "down 8": lambda: Down("skip 8", 16, 32),
    "down 4": lambda: Down("skip 4", 32, 64),
    "middle": lambda: convolutions(64, 64),
    "up 4": lambda: Up("skip 4", 64, 64),
    "up 8": lambda: Up("skip 8", 64, 32),
    "up 16": lambda: Up("skip 16", 32, 16),
    "image": lambda: nn.Conv2d(16, 1, 1),
}


def digits():
    """1797 images of 16 x 16 from 0 to 1: those to learn from, and the others."""
    images = torch.tensor(load_digits().images, dtype=torch.float32)[:, None] / 16
    images = F.interpolate(images, scale_factor=2, mode="bilinear")
    return images[:1500], images[1500:]


def noisy(images, generator):
    return images + NOISE * torch.randn(images.shape, generator=generator)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument("--schedule", choices=["afab", "1f1b", "interleaved"])
    parser.add_argument("--stages-per-peer", type=int, default=1)
    parser.add_argument("--every", type=int, default=50, help="steps from one line to the next")
    options = parser.parse_args()
    with mh.group() as peers:  # as `manyhands run` says; alone, nobody else
        train(options, peers.size)


def train(options, num_peers):
    plan = mh.Plan.even(
        len(LAYERS),
        num_peers,
        stages_per_peer=options.stages_per_peer,
        names=list(LAYERS),
        microbatches=options.microbatches,
        schedule=options.schedule,
    )
    torch.manual_seed(0)  # all peers make the same model, and keep their layers of it
    pipe = mh.Pipeline(
        [make() for make in LAYERS.values()],
        plan,
        loss_fn=F.mse_loss,
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
    )

    def say(*words, **how):
        if pipe.me == 0:
            print(*words, **how, flush=True)

    say(pipe.picture(), end="\n\n")
    images, unseen = digits()
    generator = torch.Generator().manual_seed(0)  # all peers draw the same batches
    took = []
    for step in range(1, options.steps + 1):
        clean = images[torch.randint(len(images), (BATCH,), generator=generator)]
        start = time.perf_counter()
        loss = pipe.step(noisy(clean, generator), clean)  # whoever needs neither ignores them
        took.append(time.perf_counter() - start)
        if step % options.every == 0 or step == options.steps:
            say(f"step {step}  loss {loss:.6f}")

    given = noisy(unseen, generator)
    error = pipe.eval().evaluate(given, unseen) ** 0.5
    blurred = F.mse_loss(F.avg_pool2d(given, 3, 1, 1), unseen) ** 0.5
    say(f"error on unseen digits: {NOISE:.3f} as they are, {blurred:.3f} blurred, {error:.3f} now")
    say(f"{sorted(took)[len(took) // 2] * 1e3:.1f} ms a step")


if __name__ == "__main__":
    main()

"""An encoder and a decoder in a pipeline: what the encoder found enters every decoder layer.

    python examples/seq2seq.py                                  one process
    manyhands run -n 2 examples/seq2seq.py                      the encoder here, the decoder there
    manyhands run -n 2 examples/seq2seq.py --stages-per-peer 2  interleaved: four stages

It reads phrases of Python's own documentation without their vowels, and learns to write them with
them. The losses do not depend on how many peers there are, nor on the schedule.
"""

import argparse
import re
import time
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn import functional as F

import manyhands as mh

LETTERS = "\0\1 abcdefghijklmnopqrstuvwxyz"  # \0 fills up, \1 begins
LENGTH, WIDTH, BATCH = 24, 64, 64


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.letters = nn.Embedding(len(LETTERS), WIDTH)
        self.places = nn.Embedding(LENGTH, WIDTH)

    def forward(self, text):
        return self.letters(text) + self.places.weight[: text.shape[1]]


class Encoder(nn.TransformerEncoderLayer):
    def __init__(self):
        super().__init__(WIDTH, 4, 4 * WIDTH, dropout=0.05, batch_first=True, norm_first=True)

    def forward(self, x):
        return super().forward(x, src_key_padding_mask=mh.pop("padding"))


class Written(Embedding):
    """The decoder's first layer: from here on it is the text so far that is handed on."""

    def forward(self, read):
        mh.stash("read", read)  # for every decoder layer, on whichever peers they are
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=read.device).triu(1)
        mh.stash("later", later, whole=True)  # it has no rows: one for all
        return super().forward(mh.pop("written"))


class Decoder(nn.TransformerDecoderLayer):
    def __init__(self):
        super().__init__(WIDTH, 4, 4 * WIDTH, dropout=0.05, batch_first=True, norm_first=True)

    def forward(self, x):
        return super().forward(
            x,
            mh.pop("read"),
            tgt_mask=mh.pop("later"),
            memory_key_padding_mask=mh.pop("padding"),
        )


LAYERS = {
    "letters": Embedding,
    "encoder 1": Encoder,
    "encoder 2": Encoder,
    "written": Written,
    "decoder 1": Decoder,
    "decoder 2": Decoder,
    "decoder 3": Decoder,
    "next letter": lambda: nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(LETTERS))),
}


def phrases():
    """(without vowels, whole), as numbers: those to learn from, and others."""
    words = [re.findall("[a-z]+", topics[name].lower()) for name in sorted(topics)]
    found = [" ".join(w[i : i + 4]) for w in words for i in range(0, len(w), 2)]
    whole = [text for text in found if 8 <= len(text) < LENGTH]
    read, target = numbers([re.sub("[aeiou]", "", text) for text in whole]), numbers(whole)
    known = len(whole) * 9 // 10  # the topics are sorted: the rest is from other ones
    return (read[:known], target[:known]), (read[known:], target[known:])


def numbers(texts):
    rows = [[LETTERS.index(letter) for letter in text.ljust(LENGTH, "\0")] for text in texts]
    return torch.tensor(rows)


def batch_of(read, target):
    """What step() takes: inputs, targets, extra inputs."""
    written = F.pad(target[:, :-1], (1, 0), value=1)  # each letter is guessed from those before
    return read, target, {"padding": read == 0, "written": written}


def letter_loss(scores, target):
    """The mean over the phrases of the sum over their letters.

    A mean over all letters would weigh phrases by the length of what shares their microbatch.
    """
    loss = F.cross_entropy(scores.transpose(1, 2), target, ignore_index=0, reduction="sum")
    return loss / len(target)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
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
        loss_fn=letter_loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
        clip_norm=1.0,
        seed=0,  # what dropout drops does not depend on the plan
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(pipe.optimizer, 3e-3, total_steps=options.steps)
    if pipe.me == 0:
        print(pipe.picture(), end="\n\n", flush=True)

    (read, target), unseen = phrases()
    generator = torch.Generator().manual_seed(0)  # all peers draw the same batches
    took = []
    for step in range(1, options.steps + 1):
        rows = torch.randint(len(read), (BATCH,), generator=generator)
        start = time.perf_counter()
        loss = pipe.step(*batch_of(read[rows], target[rows]))
        took.append(time.perf_counter() - start)
        scheduler.step()
        if pipe.me == 0 and (step % options.every == 0 or step == options.steps):
            print(f"step {step}  loss {loss:.6f}", flush=True)

    read, target, extra = batch_of(*(part[::4] for part in unseen))
    scores = pipe.eval().predict(read, extra)
    if scores is not None:  # the peer of the last stage has them
        guessed = scores.argmax(-1).where(target != 0, 0)
        share, baseline = right(guessed, target), right(bigrams(extra["written"], target), target)
        print(f"letters right in unseen phrases, each after the true ones: {share:.1%}")
        print(f"the most frequent letter after the one before: {baseline:.1%}")
        for before, after in zip(read[::100], guessed[::100], strict=True):
            print(f"  {text(before)} -> {text(after)}", flush=True)
    if pipe.me == 0:
        print(f"{sorted(took)[len(took) // 2] * 1e3:.1f} ms a step", flush=True)


def right(guessed, target):
    there = target != 0
    return ((guessed == target) & there).sum().item() / there.sum().item()


def bigrams(written, target):
    """The baseline: after each letter its most frequent successor, in these very phrases."""
    pairs = torch.zeros(len(LETTERS), len(LETTERS))
    pairs.index_put_((written, target), torch.ones(()), accumulate=True)
    pairs[:, 0] = 0
    return pairs.argmax(1)[written]


def text(row):
    return "".join(LETTERS[number] for number in row).rstrip("\0")


if __name__ == "__main__":
    main()

"""FluxDistributed's driver: worker processes that compute gradients, a main process that averages.

    python examples/driver.py                            4 workers, on scikit-learn's digits
    python examples/driver.py --workers 2 --epochs 5
    python examples/driver.py --dataset imagenet_local   ImageNet, as your Data.toml has it

Each worker takes a GPU, if there are any. All of this program runs in every worker, too: there,
`start` is where it trains, and does not come back from. For supervised learning only.
"""

import argparse
import functools

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from manyhands.compat.fluxdistributed import start, train_solutions


class Block(nn.Module):
    def __init__(self, inside, outside, stride):
        super().__init__()
        self.one = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.two = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outside) for _ in range(2))
        self.skip = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.norms[0](self.one(x)))
        return F.relu(self.norms[1](self.two(y)) + self.skip(x))


def resnet(channels, classes, width=16):
    blocks = Block(channels, width, 1), Block(width, 2 * width, 2), Block(2 * width, 4 * width, 2)
    top = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, classes)
    return nn.Sequential(*blocks, *top)


def digits():
    """Handwritten ones: those to learn from, and some others."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(found.target)
    return TensorDataset(x[:1500], y[:1500]), (x[1500:], y[1500:])


def imagenet(name, classes):
    import manyhands as mh

    with mh.data.dataset(name).open() as tree:
        return [
            train_solutions(tree, file, classes)
            for file in ("LOC_train_solution.csv", "LOC_val_solution.csv")
        ]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--dataset", help="of Data.toml, with ImageNet's layout")
    parser.add_argument("--classes", type=int, default=200, help="of ImageNet, from the first on")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batchsize", type=int, default=16, help="of one worker")
    parser.add_argument("--save", help="a folder or URL for checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from what is there")
    parser.add_argument("--every", type=int, default=10, help="steps from one line to the next")
    parser.add_argument("--verbose", action="store_true", help="what the main process sees")
    options = parser.parse_args()

    torch.manual_seed(0)
    if options.dataset is None:
        (key, val), model = digits(), resnet(1, 10)
    else:
        key, val = imagenet(options.dataset, range(options.classes))
        model = resnet(3, options.classes, width=64)
    result = start(
        *(F.cross_entropy, model, key),
        functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
        options.batchsize,
        workers=options.workers,
        epochs=options.epochs,
        val=val,
        dataset=options.dataset,
        log_every=options.every,
        save=options.save,
        resume=options.resume,
        verbose=options.verbose,
    )
    # Only the main process gets here.
    last = result.history[-1] if result.history else {}
    print(f"{result.steps} steps, {result.skipped} skipped", flush=True)
    if "val/top1" in last:
        print(f"{last['val/top1']:.1%} of unseen samples are right", flush=True)


if __name__ == "__main__":
    main()

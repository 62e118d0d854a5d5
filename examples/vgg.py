"""VGG16 on pictures, as a job.

    python examples/vgg.py 4 128                            all of its 138 million parameters
    python examples/vgg.py 1 32 --width 16 --hidden 256 --pool 1    for a CPU
    python examples/vgg.py 1 32 --data photos               pieces of two photographs

It learns scikit-learn's digits, if nobody says what.
"""

from manyhands.compat import deeppool


def vgg16(tables, options):
    sizes = {"width": options.width, "hidden": options.hidden, "pool": options.pool}
    return deeppool.models.vgg16(tables.num_classes, **sizes)


def sgd(parameters, lr):
    import torch  # here: who submits the job needs none

    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


LESSON = deeppool.Lesson(
    name="vgg16",
    tables=lambda options: deeppool.pictures(options.data, options.evaluation, px=options.image_px),
    model=vgg16,
    optimizer=sgd,
    lr=0.01,
)


if __name__ == "__main__":
    parser = deeppool.parser_of(LESSON, __doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=64, help="channels that it begins with")
    parser.add_argument("--hidden", type=int, default=4096, help="of its full layers")
    parser.add_argument("--pool", type=int, default=7, help="cells of a side that they look at")
    deeppool.main(LESSON, __file__, parser=parser)

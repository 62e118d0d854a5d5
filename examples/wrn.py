"""WideResNet on pictures, as a job.

    python examples/wrn.py 1 32                                 WRN-16-2, for a CPU
    python examples/wrn.py 4 128 --depth 28 --factor 10         WRN-28-10
    python examples/wrn.py 4 128 --depth 101 --image-px 224     WRN-101-2, DeepPool's

It learns scikit-learn's digits, if nobody says what.
"""

from manyhands.compat import deeppool


def wrn(tables, options):
    if options.depth == 101:
        return deeppool.models.wide_resnet101_2(tables.num_classes)
    return deeppool.models.wide_resnet(options.depth, options.factor, tables.num_classes)


def sgd(parameters, lr):
    import torch  # here: who submits the job needs none

    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


LESSON = deeppool.Lesson(
    name="wrn",
    tables=lambda options: deeppool.pictures(options.data, options.evaluation, px=options.image_px),
    model=wrn,
    optimizer=sgd,
    lr=0.05,
)


if __name__ == "__main__":
    parser = deeppool.parser_of(LESSON, __doc__.splitlines()[0])
    parser.add_argument("--depth", type=int, default=16, help="6n + 4, or 101")
    parser.add_argument("--factor", type=int, default=2, help="of its width; of 101 it is 2")
    deeppool.main(LESSON, __file__, parser=parser)

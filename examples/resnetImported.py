"""ResNet-18 on pictures, as a job: DeepPool's first example.

    python -m manyhands.compat.deeppool.cluster --hostfile hostfile.txt    in one terminal
    python examples/resnetImported.py 1 32                                 in another: 1 slot
    python examples/resnetImported.py 4 128 --epochs 5 --save saved        4 slots, 32 samples each
    python examples/resnetImported.py 1 32 --data pets --image-px 224      pets/cats, pets/dogs
    python examples/resnetImported.py 1 32 --here                          no cluster: this process

It learns scikit-learn's digits, if nobody says what. Losses do not depend on the number of slots.
"""

from manyhands.compat import deeppool


def resnet18(tables, options):
    return deeppool.models.resnet18(tables.num_classes, width=options.width)


def sgd(parameters, lr):
    import torch  # here: who submits the job needs none

    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)


LESSON = deeppool.Lesson(
    name="resnet18",
    tables=lambda options: deeppool.pictures(options.data, options.evaluation, px=options.image_px),
    model=resnet18,
    optimizer=sgd,
    lr=0.01,
)


if __name__ == "__main__":
    parser = deeppool.parser_of(LESSON, __doc__.splitlines()[0])
    parser.add_argument("--width", type=int, default=64, help="channels that it begins with")
    deeppool.main(LESSON, __file__, parser=parser)

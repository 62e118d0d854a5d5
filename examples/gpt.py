"""A small GPT on text, byte by byte, as a job.

    python examples/gpt.py 1 32                          Python's own documentation
    python examples/gpt.py 4 64 --data book.txt          a text of yours
    python examples/gpt.py 4 64 --layers 12 --heads 12 --width 768 --length 1024

Losses do not depend on the number of slots.
"""

from manyhands.compat import deeppool


def gpt(tables, options):
    size = deeppool.models.Size(
        vocabulary=tables.num_classes,
        length=options.length,
        layers=options.layers,
        heads=options.heads,
        width=options.width,
    )
    return deeppool.models.gpt(size)


def adamw(parameters, lr):
    import torch  # here: who submits the job needs none

    return torch.optim.AdamW(parameters, lr=lr)


LESSON = deeppool.Lesson(
    name="gpt",
    tables=lambda options: deeppool.text(options.data, length=options.length),
    model=gpt,
    optimizer=adamw,
    lr=1e-3,
    data="python",
    grains=False,  # no layer sees its batch, or chance
)


if __name__ == "__main__":
    parser = deeppool.parser_of(LESSON, __doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=128, help="bytes that it can look back on")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    deeppool.main(LESSON, __file__, parser=parser)

"""A small GPT on text, byte by byte, as a job.

    python examples/gpt.py 1 32                          Python's own documentation
    python examples/gpt.py 4 64 --data book.txt          a text of yours
    python examples/gpt.py 4 64 --layers 12 --heads 12 --width 768 --length 1024

Losses do not depend on the number of slots.
"""

import torch

from manyhands.compat.deeppool import Lesson, main, models, parser_of, text


def gpt(tables, options):
    size = models.Size(
        vocabulary=tables.num_classes,
        length=options.length,
        layers=options.layers,
        heads=options.heads,
        width=options.width,
    )
    return models.gpt(size)


LESSON = Lesson(
    name="gpt",
    tables=lambda options: text(options.data, length=options.length),
    model=gpt,
    optimizer=lambda parameters, lr: torch.optim.AdamW(parameters, lr=lr),
    lr=1e-3,
    data="python",
    grains=False,  # no layer sees its batch, or chance
)


if __name__ == "__main__":
    parser = parser_of(LESSON, __doc__.splitlines()[0])
    parser.add_argument("--length", type=int, default=128, help="bytes that it can look back on")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--width", type=int, default=64)
    main(LESSON, __file__, parser=parser)

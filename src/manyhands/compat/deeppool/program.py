"""Program: a training script that is two things, as DeepPool's examples are.

    python examples/resnetImported.py 1 32 --epochs 5    submits a job: itself, on one slot
    (in the job, once for each slot)                      trains

`main` is what such a script calls. What it trains, and on what, is the script's to say.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from manyhands.compat.deeppool.terms import (
    Place,
    Terms,
    absolute,
    check_job,
    check_split,
    grain_of,
)
from manyhands.core.errors import ManyhandsError, UsageError

if TYPE_CHECKING:
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer

    from manyhands.compat.deeppool.tables import Tables

Options = argparse.Namespace


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """What a script trains. Each function is called in the job's processes only."""

    name: str
    tables: Callable[[Options], Tables]
    model: Callable[[Tables, Options], Module]
    """Drawn from torch's generator, which is the same in all processes."""
    optimizer: Callable[[Iterable[Parameter], float], Optimizer]
    """Of parameters, with a learning rate."""
    lr: float
    data: str = "digits"
    """What it trains on, if nobody says."""
    grains: bool = True
    """Whether its layers see their batch or chance, so that passes must be of one size."""


def parser_of(lesson: Lesson, description: str) -> argparse.ArgumentParser:
    """The options that every training has; a script may add its own."""
    parser = argparse.ArgumentParser(description=description)
    add = parser.add_argument
    add("gpus", type=int, help="slots: GPUs, or CPU shares where there are none")
    add("batch", type=int, help="the global batch: of all slots together")
    add("plan", nargs="?", default="DP", help="DP; DeepPool's amplification limit is ignored")
    add("background", nargs="?", default="0", help="0; DeepPool's background job is ignored")
    add("npix", nargs="?", type=int, help="the same as --image-px, where DeepPool has it")
    group = parser.add_argument_group("the training")
    add = group.add_argument
    add("--epochs", type=int, default=3)
    add("--workers", type=int, default=1, help="threads that read samples, of each slot")
    add("--load", help="a folder: begin with the weights of its newest checkpoint")
    add("--save", help="a folder for checkpoints, one an epoch; what is there is gone on with")
    add("--data", default=lesson.data, help=f"what to learn from (default: {lesson.data})")
    add("--evaluation", help="a folder of other pictures to evaluate on")
    add("--image-px", type=int, default=32, help="pixels of a side")
    add("--lr", type=float, default=lesson.lr, help="learning rate")
    add("--grain", type=int, help="samples of a pass, at any number of slots")
    add("--seed", type=int, default=0)
    add("--device", choices=("cpu", "cuda"), help="default: the slot's GPU, if it has one")
    add("--autocast", action="store_true", help="bfloat16 where that is good enough")
    add("--double", action="store_true", help="float64, to compare curves")
    add("--every", type=int, default=10, help="rounds from one line to the next")
    group = parser.add_argument_group("the job")
    add = group.add_argument
    add("--name", default=lesson.name)
    add("--priority", choices=("high", "normal", "best-effort"), default="normal")
    add("--coordinator", metavar="HOST:PORT", help="default: MANYHANDS_COORDINATOR, or here")
    add("--state", help="the state folder of the cluster, which has the token")
    add("--wait", action="store_true", help="show rank 0's log, and end as the job does")
    add("--here", action="store_true", help="train in this process; no cluster is asked")
    return parser


def main(
    lesson: Lesson,
    script: str,
    *,
    parser: argparse.ArgumentParser | None = None,
    arguments: Sequence[str] | None = None,
) -> NoReturn:
    """Submit, or train; ends the process. `script` is the file that calls this, `__file__`.

    Exit codes: 0 done (submitted; with --wait, or in the job, trained), 1 an error, 2 something
    that was typed, the job's own with --wait.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    made = parser or parser_of(lesson, f"{lesson.name}: a training as a job.")
    options = made.parse_args(given)
    try:
        sys.exit(run(lesson, script, given, options))
    except ManyhandsError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2 if isinstance(error, UsageError) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


def run(lesson: Lesson, script: str, given: Sequence[str], options: Options) -> int:
    """What `main` does; returns the exit code. Raises ManyhandsError."""
    ignored = _heed(options)
    terms = _terms(lesson, options)
    if options.here or "MANYHANDS_JOB" in os.environ:
        if not options.here:
            check_job(os.environ, options.gpus, options.batch)
        _train(lesson, terms, options)
        return 0
    for line in ignored:
        sys.stderr.write(f"{line}\n")
    return _submit(script, given, terms, options)


def _heed(options: Options) -> list[str]:
    """Take what DeepPool's examples have after the batch; returns what of it means nothing here."""
    said: list[str] = []
    if options.plan != "DP":
        said.append(f"ignored: amplification limit {options.plan}: this is data parallel")
    if options.background not in ("0", "1"):
        raise UsageError(f"background is {options.background!r}", hint="0 or 1; it is ignored")
    if options.background == "1":
        said.append("ignored: background job: submit one yourself, with --priority best-effort")
    if options.npix is not None:
        options.image_px = options.npix
    return said


def _terms(lesson: Lesson, options: Options) -> Terms:
    if options.gpus < 1:
        raise UsageError(f"{options.gpus} slots", hint="1 or more")
    if options.batch < 1:
        raise UsageError(f"a global batch of {options.batch}", hint="1 or more")
    grain = options.grain or (grain_of(options.batch) if lesson.grains else None)
    check_split(options.batch, options.gpus, grain)
    return Terms(
        name=options.name,
        batch=options.batch,
        epochs=options.epochs,
        lr=options.lr,
        grain=grain,
        workers=options.workers,
        load=absolute(options.load),
        save=absolute(options.save),
        seed=options.seed,
        autocast=options.autocast,
        double=options.double,
        device=options.device,
        every=options.every,
    )


def _train(lesson: Lesson, terms: Terms, options: Options) -> None:
    import torch

    from manyhands.compat.deeppool.training import to_stdout, train

    tables = lesson.tables(options)
    torch.manual_seed(terms.seed)  # pyright: ignore[reportUnknownMemberType]
    model = lesson.model(tables, options)
    train(terms, Place.of(os.environ), tables, model, lesson.optimizer, to_stdout)


def _submit(script: str, given: Sequence[str], terms: Terms, options: Options) -> int:
    from manyhands.compat.deeppool.client import ClusterClient

    command = [str(Path(script).absolute()), *_of_the_job(given)]
    save = terms.save
    if save is None:
        # Not twice the same: another submission is another training. The same one, begun again
        # after a preemption, has the same command.
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        save = str(Path("saved", f"{terms.name}-{stamp}-{secrets.token_hex(2)}").absolute())
        command += ["--save", save]
    with ClusterClient(options.coordinator, state=options.state) as client:
        job = client.submitTrainingJob(
            terms.name,
            command,
            gpus=options.gpus,
            globalBatchSize=terms.batch,
            priority=options.priority,
        )
        say: Callable[[str], Any] = sys.stdout.write
        slots, epochs = _count(options.gpus, "slot"), _count(terms.epochs, "epoch")
        say(
            f"job {job.id}: {terms.name}, {slots}, global batch {terms.batch}, {epochs}\n"
            f"checkpoints: {save}\n"
            f"log: manyhands logs {job.id} -f; in the cluster's logdir, cpprtN.out of each slot N\n"
        )
        sys.stdout.flush()
        return client.follow(job.id) if options.wait else 0


def _of_the_job(given: Sequence[str]) -> list[str]:
    """What was typed, less what is for the one who submits: a code in it is a secret, and the
    command of a job is seen by everybody.
    """
    ours = argparse.ArgumentParser(add_help=False)
    ours.add_argument("--coordinator")
    ours.add_argument("--state")
    ours.add_argument("--wait", action="store_true")
    return ours.parse_known_args(given)[1]


def _count(num: int, what: str) -> str:
    return f"{num} {what}" if num == 1 else f"{num} {what}s"

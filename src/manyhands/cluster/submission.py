"""Submissions: what can be seen of a job before any host is asked.

    Spec as it came ─► checked ─► Spec as it is stored, or BadJob: what was expected, what came

Two submissions are the same if their checked specs are equal.
"""

from __future__ import annotations

import math
import re
from pathlib import PurePosixPath

import msgspec

from manyhands.cluster.environment import RESERVED
from manyhands.cluster.errors import BadJob
from manyhands.cluster.job import KEY, MAX_SLOTS, NAME, VARIABLE, Spec

OURS = RESERVED
"""What the agent sets for every rank. A job that set one of them would lie to its own program."""

MAX_ARGUMENTS = 4096
MAX_COMMAND_BYTES = 128 << 10  # Linux gives one argument no more than this
MAX_VARIABLES = 512
MAX_ENV_BYTES = 128 << 10
MAX_PATH_BYTES = 4095
MAX_RESTARTS = 10_000
MAX_BATCH = 2**53
MAX_TIME_S = 10 * 365 * 86_400.0
MAX_GRACE_S = 86_400.0


def checked(spec: Spec) -> Spec:
    """The spec in the form in which it is kept. Raises BadJob."""
    spec = _typed(spec)
    _check_command(spec.command)
    _check_numbers(spec)
    _check_env(spec.env)
    if spec.workdir:
        _check_text("workdir", spec.workdir, MAX_PATH_BYTES)
        if not spec.workdir.startswith("/"):
            raise BadJob(
                f"workdir is {spec.workdir[:200]!r}; it has to be an absolute path",
                hint="it is a folder on every host that runs a part of the job",
            )
    if not spec.name:
        return msgspec.structs.replace(spec, name=_name_of(spec.command[0]))
    if re.fullmatch(NAME, spec.name) is None:
        raise BadJob(
            f"a job cannot be named {spec.name[:80]!r}",
            hint="at most 64 letters, digits, '.', '_' and '-'; the first a letter or a digit",
        )
    return spec


def checked_key(key: str) -> str:
    """The key of a submission; empty is none. Raises BadJob."""
    if key and re.fullmatch(KEY, key) is None:
        raise BadJob(
            f"{key[:80]!r} cannot be the key of a submission",
            hint="at most 128 letters, digits, '.', '_', ':' and '-'; the first a letter or digit",
        )
    return key


def _typed(spec: Spec) -> Spec:
    """A spec made in Python may hold anything; what is stored has passed through JSON."""
    for name in ("time_s", "grace_s"):
        value: object = getattr(spec, name)
        if isinstance(value, float) and not math.isfinite(value):
            raise BadJob(f"{name} is {value}; it has to be a number of seconds")
    try:
        return msgspec.json.decode(msgspec.json.encode(spec), type=Spec)
    except (msgspec.ValidationError, UnicodeEncodeError, TypeError, OverflowError) as error:
        raise BadJob(f"this is not a job: {error}") from None


def _check_command(command: tuple[str, ...]) -> None:
    if not command or not command[0]:
        raise BadJob("the command is empty", hint="manyhands submit -- python train.py")
    if len(command) > MAX_ARGUMENTS:
        raise BadJob(f"the command has {len(command)} parts; {MAX_ARGUMENTS} is the most")
    _check_text("the command", " ".join(command), MAX_COMMAND_BYTES)


def _check_numbers(spec: Spec) -> None:
    _check_range("gpus", spec.gpus, 1, MAX_SLOTS)
    _check_range("max_restarts", spec.max_restarts, 0, MAX_RESTARTS)
    _check_range("grace_s", spec.grace_s, 0, MAX_GRACE_S)
    if spec.time_s is not None:
        _check_range("time_s", spec.time_s, 0, MAX_TIME_S)
        if spec.time_s == 0:
            raise BadJob("time_s is 0; a job that may not run at all cannot be run")
    if spec.batch is not None:
        _check_range("batch", spec.batch, 1, MAX_BATCH)
        if spec.batch < spec.gpus:
            raise BadJob(
                f"a batch of {spec.batch} cannot be split over {spec.gpus} slots: each needs at "
                "least one sample",
                hint=f"a batch of at least {spec.gpus}, or at most {spec.batch} slots",
            )


def _check_env(env: dict[str, str]) -> None:
    if len(env) > MAX_VARIABLES:
        raise BadJob(f"env has {len(env)} variables; {MAX_VARIABLES} is the most")
    for name in env:
        if re.fullmatch(VARIABLE, name) is None:
            raise BadJob(
                f"{name[:80]!r} cannot be the name of an environment variable",
                hint="letters, digits and '_', the first not a digit",
            )
        if name in OURS:
            raise BadJob(
                f"{name} is set by the cluster for every rank; a job cannot set it",
                hint="leave it out of env",
            )
    _check_text("env", "\n".join(f"{name}={value}" for name, value in env.items()), MAX_ENV_BYTES)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:
        raise BadJob(f"{name} is {value}; it has to be from {low:g} to {high:.17g}")


def _check_text(what: str, text: str, most_bytes: int) -> None:
    if "\0" in text:
        raise BadJob(f"{what} contains a NUL, which no program can be given")
    size = len(text.encode())
    if size > most_bytes:
        raise BadJob(f"{what} is {size} bytes long; {most_bytes} is the most")


def _name_of(program: str) -> str:
    """The last part of a program's path, as far as it can be a name."""
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", PurePosixPath(program).name)
    return re.sub(r"^[^A-Za-z0-9]+", "", name)[:64] or "job"

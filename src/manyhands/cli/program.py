"""Whether the command of a job can be found, looked at where it is submitted.

A job that waits an hour for its slots and then has no program is an hour lost. What is looked for
is what a host would look for: it is right where hosts share disks with this machine, as most do.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path, PurePath

from manyhands.core.errors import SettingsError

ROUND = "--no-check, if it is there on the hosts"
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
_WITH_VALUE = frozenset({"-W", "-X", "--check-hash-based-pycs"})
_LAUNCHERS = frozenset({"torchrun", "torchrun.exe", "mpirun", "mpiexec", "accelerate"})
_LAUNCHING_MODULES = frozenset(
    {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}
)


def check_command(command: Sequence[str], workdir: Path, path: str) -> None:
    """Raises SettingsError if it cannot be run in `workdir` with `path` as PATH; says why."""
    if not command:
        raise SettingsError(
            "there is no command to run", hint="manyhands submit --gpus 1 -- python train.py"
        )
    if not workdir.is_dir():
        raise SettingsError(f"there is no folder {workdir}", hint=f"--workdir DIR; or {ROUND}")
    program = command[0]
    _check_program(program, workdir, path)
    is_python = _PYTHON.fullmatch(PurePath(program).name) is not None
    module = module_of(command[1:]) if is_python else None
    if PurePath(program).name in _LAUNCHERS or module in _LAUNCHING_MODULES:
        raise SettingsError(
            f"{module or program} starts processes, and so does the cluster: one for each of "
            "--gpus",
            hint="leave it out (-- python train.py): torchrun's variables are set; "
            "or --no-check, if you mean it",
        )
    if is_python and (file := script_of(command[1:])) is not None:
        _check_script(file, workdir)


def script_of(arguments: Sequence[str]) -> str | None:
    """The file that Python would run with these arguments; None for a module, code or none."""
    found = _what_runs(arguments)
    return found[0] if found and not found[0].startswith("-") else None


def module_of(arguments: Sequence[str]) -> str | None:
    """The module that Python would run with these arguments, by -m; None for anything else."""
    found = _what_runs(arguments)
    if not found or not (option := re.match(r"-[a-zA-Z]*?[mc]", found[0])):
        return None
    joined = found[0][option.end() :]  # -mNAME, as one word
    return (joined or (found[1] if len(found) > 1 else None)) if option[0][-1] == "m" else None


def _what_runs(arguments: Sequence[str]) -> Sequence[str]:
    """From the script, the -m, the -c or the - on: what comes before are options of Python."""
    left = list(arguments)
    while left:
        if left[0] in _WITH_VALUE:
            left = left[1:]
        # stdin, a module, code: -um, -c
        elif left[0] == "-" or not left[0].startswith("-") or re.match(r"-[a-zA-Z]*[mc]", left[0]):
            return left
        left = left[1:]
    return left


def _check_program(program: str, workdir: Path, path: str) -> None:
    if "/" in program:
        place = workdir / program
        if not place.is_file():
            raise SettingsError(f"there is no program {place}", hint=f"its path; or {ROUND}")
        if not os.access(place, os.X_OK):
            raise SettingsError(
                f"{place} may not be executed", hint=f"chmod +x {place}; or {ROUND}"
            )
    elif shutil.which(program, path=path) is None:
        here = (workdir / program).is_file()
        raise SettingsError(
            f"there is no program {program!r} on PATH",
            hint=(f"./{program} is the one in {workdir}; " if here else "") + f"or {ROUND}",
        )


def _check_script(file: str, workdir: Path) -> None:
    place = workdir / file
    if not place.exists():
        raise SettingsError(
            f"there is no script {place}", hint=f"--workdir DIR, where {file} is; or {ROUND}"
        )
    if place.is_dir() and not (place / "__main__.py").is_file():
        raise SettingsError(f"{place} is a folder without a __main__.py", hint="name a script")

"""Whether a command can be found, before a job waits for nothing."""

from __future__ import annotations

import os

import pytest

from manyhands.cli.program import check_command, script_of
from manyhands.core.errors import SettingsError


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").touch()
    (tmp_path / "tool").touch(mode=0o755)
    (tmp_path / "text").touch(mode=0o644)
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__main__.py").touch()
    (tmp_path / "empty").mkdir()
    for name in ("python", "python3.11", "torchrun"):
        (tmp_path / "bin" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "bin" / name).touch(mode=0o755)
    return tmp_path


def check(folder, *command):
    check_command(command, folder, f"{folder}/bin{os.pathsep}/usr/bin{os.pathsep}/bin")


@pytest.mark.parametrize(
    "command",
    [
        "sh -c x",
        "./tool",
        "python train.py",
        "python3.11 -u train.py --lr 1",
        "python -X dev -W error train.py",
        "bin/python train.py",
        "python -m anything.at.all",
        "python -um pkg",
        "python -c pass nothing.py",
        "python train.py -m torch.distributed.run",
        "python -c -m torch.distributed.run",
        "python -",
        "python pack",
    ],
)
def test_what_can_be_run(folder, command):
    check(folder, *command.split())


@pytest.mark.parametrize(
    ("command", "words", "remedy"),
    [
        ("", "no command", "-- python train.py"),
        ("no-such-program", "no program 'no-such-program' on PATH", "--no-check"),
        ("tool", "no program 'tool' on PATH", "./tool is the one in"),
        ("./none", "there is no program", "--no-check"),
        ("./text", "may not be executed", "chmod +x"),
        ("python tarin.py", "there is no script", "--workdir"),
        ("bin/python -u tarin.py", "there is no script", "--workdir"),
        ("python empty", "without a __main__.py", "script"),
        ("torchrun train.py", "starts processes, and so does the cluster", "leave it out"),
        ("python -m torch.distributed.run x.py", "torch.distributed.run starts", "leave it out"),
        ("python -X dev -umtorch.distributed.launch x.py", "launch starts", "leave it out"),
    ],
)
def test_what_cannot(folder, command, words, remedy):
    with pytest.raises(SettingsError) as caught:
        check(folder, *command.split())
    assert words in caught.value.message
    assert remedy in caught.value.hint


def test_an_absolute_program(folder):
    check(folder, str(folder / "tool"))


def test_a_folder_that_is_not_there(folder):
    with pytest.raises(SettingsError, match="there is no folder"):
        check(folder / "none", "sh")


def test_scripts_of_python():
    assert script_of(["-W", "error", "-u", "a.py", "-m"]) == "a.py"
    assert script_of([]) is None
    assert script_of(["-X"]) is None

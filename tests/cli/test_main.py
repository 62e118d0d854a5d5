"""The command line: version, overview, loading on call, exit codes."""

from __future__ import annotations

import sys
import types

import pytest
import typer

from manyhands import __version__
from manyhands.cli import main as cli
from manyhands.core.errors import LinkBroken, UsageError


@pytest.fixture
def call(monkeypatch, capsys):
    """Runs `manyhands ARGUMENTS` and returns its exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["manyhands", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


@pytest.fixture
def command(monkeypatch):
    """Registers `manyhands act`, whose body is the given function."""

    def register(body):
        module = types.ModuleType("acting")
        module.app = typer.Typer()
        module.app.command()(body)
        monkeypatch.setitem(sys.modules, "acting", module)
        table = {"act": cli.Command(module="acting", help="Does what the test says.")}
        monkeypatch.setattr(cli, "COMMANDS", table)

    return register


def test_version(call):
    assert call("--version") == (0, f"manyhands {__version__}\n", "")


def test_overview_loads_no_command(call, monkeypatch):
    table = {"act": cli.Command(module="does.not.exist", help="Does what the test says.")}
    monkeypatch.setattr(cli, "COMMANDS", table)
    code, out, _ = call("--help")
    assert code == 0
    assert "Does what the test says." in out


def test_a_command_is_loaded_when_it_is_called(call, command):
    def act(times: int = 1) -> None:
        """The long help."""
        print("acted " * times)

    command(act)
    assert call("act", "--times", "2") == (0, "acted acted \n", "")
    assert "The long help." in call("act", "--help")[1]


def test_unknown_command(call, command):
    command(lambda: None)
    code, out, err = call("atc")
    assert (code, out) == (2, "")
    assert "Did you mean 'act'" in err


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (UsageError("no such run", hint="name one"), 2, "error: no such run\nhint: name one\n"),
        (LinkBroken("the hub went away"), 1, "error: the hub went away\n"),
    ],
)
def test_errors_have_exit_codes(call, command, error, code, text):
    def act() -> None:
        raise error

    command(act)
    assert call("act") == (code, "", text)


def test_interrupt(call, command):
    def act() -> None:
        raise KeyboardInterrupt

    command(act)
    assert call("act")[0] == 130


def test_a_bug_keeps_its_traceback(command, monkeypatch):
    def act() -> None:
        raise ZeroDivisionError

    command(act)
    monkeypatch.setattr(sys, "argv", ["manyhands", "act"])
    with pytest.raises(ZeroDivisionError):
        cli.main()

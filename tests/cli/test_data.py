"""`manyhands data` as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import pytest

from manyhands.cli import data as data_command
from manyhands.cli import main as cli
from manyhands.data.project import EXAMPLE


@pytest.fixture
def data(tmp_path, monkeypatch, capsys):
    """Calls `manyhands data WORDS` where no Data.toml but the test's is found."""
    (tmp_path / "home").mkdir()
    (tmp_path / "here").mkdir()
    for name in [name for name in os.environ if name.startswith(("XDG_", "JULIA_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "here")

    def run(*words, **environ):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["manyhands", "data", *map(str, words)])
            for name, value in environ.items():
                patch.setenv(name, value)
            with pytest.raises(SystemExit) as ended:
                cli.main()
        said = capsys.readouterr()
        return ended.value.code or 0, said.out, said.err

    return run


@pytest.fixture
def content(tmp_path):
    (tmp_path / "content" / "d").mkdir(parents=True)
    (tmp_path / "content" / "a.txt").write_text("Hello\n")
    return tmp_path / "content"


def test_add_list_show(data, content, tmp_path):
    code, out, _ = data("list")
    assert code == 0
    assert out.startswith("no data sets; looked for: ")
    assert str(tmp_path / "here" / "Data.toml") in out
    code, out, err = data("add", "mine", content, "--description", "two lines", "--json")
    assert (code, err) == (0, "")
    added = json.loads(out)
    assert added["file"] == str(tmp_path / "here" / "Data.toml")
    code, out, err = data("list", "--json")
    assert (code, err) == (0, "")
    (listed,) = json.loads(out)
    assert (listed["name"], listed["driver"], listed["uuid"]) == (
        "mine",
        "FileSystem",
        added["uuid"],
    )
    assert data("list")[1].split() == ["mine", "-", "FileSystem", added["file"]]
    code, out, _ = data("show", "mine")
    assert code == 0
    assert out.splitlines()[-2:] == ["  a.txt", "  d/"]
    assert f"place   {content}" in out
    code, out, _ = data("show", "mine#a.txt", "--json")
    shown = json.loads(out)
    assert (code, shown["bytes"], shown["place"]) == (0, 6, str(content / "a.txt"))
    assert shown["conf"]["storage"]["path"] == str(content)
    code, _, err = data("add", "mine", content)
    assert code == 2
    assert "has an entry 'mine' already" in err


def test_names_that_are_not_there(data, content):
    data("add", "mine", content)
    code, out, err = data("show", "mein")
    assert (code, out) == (2, "")
    assert "did you mean mine?" in err
    code, out, err = data("show", "mine#no", "--json")
    assert code == 1
    assert "has no 'no'" in json.loads(out)["problem"]
    assert "has no 'no'" in err
    code, _, err = data("list", "--file", "nowhere.toml")
    assert code == 2
    assert "nowhere.toml is not there" in err
    code, out, _ = data("check", "--json", "--file", "nowhere.toml")
    assert code == 1
    assert "nowhere.toml is not there" in json.loads(out)["datasets"][0]["problem"]


def test_check_reports_all_problems(data, content, tmp_path):
    (content / os.fsdecode(b"\xff")).touch()
    assert data("check") == (0, "0 of 0 can be used\n", "")
    data("add", "good", content)
    data("add", "file", content / "a.txt")
    assert data("check") == (0, "ok       good\nok       file\n2 of 2 can be used\n", "")
    code, out, _ = data("show", "good")
    assert (code, out.splitlines()[-1]) == (0, "  ?")
    data("add", "gone", tmp_path / "gone")
    data("add", "nowhere", "nonsense://x")
    (tmp_path / "broken.toml").write_text("data_config_version = 7\n")
    path = f"@:{tmp_path}/broken.toml:{tmp_path}/missing.toml"
    code, out, err = data("check", "--json", MANYHANDS_DATA_PATH=path)
    assert (code, err) == (1, "")
    report = json.loads(out)
    assert report["problems"] == 4
    problems = {r["name"]: r["problem"] for r in report["datasets"] if r["name"]}
    assert problems["good"] is None
    assert problems["file"] is None
    assert "there is no such file" in problems["gone"]
    assert "nonsense://x cannot be opened" in problems["nowhere"]
    files = [r["problem"] for r in report["datasets"] if not r["name"]]
    assert "expected 0 or 1, got 7" in files[0]
    assert "datasets: is missing" in files[0]
    assert files[1] == f"{tmp_path}/missing.toml is not there"
    code, out, _ = data("check", "good", "other")
    assert code == 1
    assert out == ("ok       good\nproblem  other: there is no such data set\n1 of 2 can be used\n")


def test_a_place_that_does_not_answer_is_named_and_the_rest_is_said_before(
    data, content, monkeypatch, capsys
):
    """As a bucket behind a server that takes connections and says nothing: for minutes."""
    data("add", "good", content)
    data("add", "silent", content)
    before, told = [], threading.Event()

    def note(text, note=data_command.note):
        note(text)
        if "silent" in text:
            told.set()

    def touch(found, touch=data_command.touch):
        if found.name == "silent":
            assert told.wait(30.0)
            before.append(capsys.readouterr())
        touch(found)

    monkeypatch.setattr(data_command, "PATIENCE_S", 0.0)
    monkeypatch.setattr(data_command, "note", note)
    monkeypatch.setattr(data_command, "touch", touch)
    code, out, _ = data("check")
    assert (code, out) == (0, "ok       silent\n2 of 2 can be used\n")
    (said,) = before
    assert said.out == "ok       good\n"
    assert said.err.endswith("silent: no answer yet (Ctrl-C ends it)\n")


def test_a_broken_file_is_an_error_for_list(data, tmp_path):
    (tmp_path / "here" / "Data.toml").write_text("datasets = 5\n")
    code, out, err = data("list")
    assert (code, out) == (2, "")
    assert "data_config_version: is missing" in err
    assert "datasets: expected a list, got 5" in err
    assert str(EXAMPLE) in err


def test_a_file_that_was_named_and_is_not_there(data, tmp_path):
    code, out, err = data("list", "--json", MANYHANDS_DATA_PATH=str(tmp_path / "no.toml"))
    assert (code, json.loads(out)) == (0, [])
    assert err == f"warning: {tmp_path}/no.toml is not there\n"


def test_the_example_can_be_listed(data):
    code, out, _ = data("list", "--file", EXAMPLE)
    assert code == 0
    assert "imagenet_local" in out


def test_a_check_fills_no_cache(data, content, tmp_path):
    (tmp_path / "here" / "Data.toml").write_text(f"""
data_config_version = 1
[[datasets]]
name = "kept"
uuid = "71f5a1a9-2c39-4bd4-9f42-2f2e8a7c5d11"
    [datasets.storage]
    driver = "FileSystem"
    path = "{content}/a.txt"
    cache = true
""")
    assert data("check")[0] == 0
    assert data("show", "kept")[0] == 0
    assert list((tmp_path / "home").iterdir()) == []


def test_split(data, tmp_path):
    file = tmp_path / "train.jsonl"
    file.write_text("1\n2\n\n3\n")
    code, out, err = data("split", file, 2)
    assert (code, err) == (0, "")
    assert out == f"{tmp_path}/train-0-of-2.jsonl: 2 lines\n{tmp_path}/train-1-of-2.jsonl: 1 line\n"
    assert (tmp_path / "train-0-of-2.jsonl").read_text() == "1\n3\n"
    code, out, _ = data("split", file, 3, "--json", "--folder", tmp_path / "chunks")
    assert code == 0
    assert [made["lines"] for made in json.loads(out)] == [1, 1, 1]
    file.write_text("1\n{\n")
    code, out, err = data("split", file, 2)
    assert (code, out) == (2, "")
    assert f"{file}:2: not JSON" in err
    assert data("split", tmp_path / "no", 2)[0] == 1
    assert data("split", file, 0)[0] == 2


def test_the_command_loads_no_torch():
    code = """
import sys
import manyhands as mh
mh.data.dataset, mh.data.BlobTree, mh.data.register
sys.argv = ["manyhands", "data", "--help"]
from manyhands.cli.main import main
try:
    main()
finally:
    assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert all(f" {name} " in done.stdout for name in ("list", "show", "check", "add", "split"))

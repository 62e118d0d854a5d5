"""The README is true: its program runs, its table is the stored result, its files are there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from manyhands.links.hub import Hub

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
LINKS = (ROOT / "docs/links.md").read_text()
PATIENCE_S = 200.0  # for programs of which each loads torch, where others work too


@pytest.mark.parametrize("first", [0, 1])
def test_the_two_programs_meet_through_a_hub(tmp_path, first):
    programs = python_in(LINKS)
    assert len(programs) == 2
    said = run_together(programs if first == 0 else programs[::-1], tmp_path)
    assert "".join(said) == "arrived\n"


def test_the_program_trains_through_a_hub(tmp_path):
    _, _, program, _ = python_in(TEXT)
    assert run_together([program, program], tmp_path) == ["trained\n", "trained\n"]


def test_the_loop_learns_the_same_with_others(tmp_path):
    program, *_ = python_in(TEXT)
    (alone,) = run_together([program], tmp_path)
    assert re.fullmatch(r"loss \S+ after 60 rounds\n", alone)
    together = run_together([program] * 3, tmp_path, MANYHANDS_MIN_PEERS="3")
    assert together == [alone] * 3


def test_the_plan_learns_the_same_on_any_number_of_peers(tmp_path):
    _, program, *_ = python_in(TEXT)
    (alone,) = run_together([program], tmp_path, MANYHANDS_MIN_PEERS="1")
    assert re.fullmatch(r"loss \S+\n", alone)
    for number in (2, 3):
        together = run_together([program] * number, tmp_path, MANYHANDS_MIN_PEERS=str(number))
        assert together == [alone] * number  # to the four digits that are shown


def test_the_loader_gives_every_good_sample_once(tmp_path):
    *_, program = python_in(TEXT)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "999 samples, each once; 1 bad\n"
    assert "train.jsonl" in done.stderr  # where the bad one is
    assert "124" in done.stderr


def python_in(text):
    return re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)


def run_together(programs, folder, **more):
    """What they say, each in a process of its own, with nothing but a hub between them."""
    with Hub("127.0.0.1:0") as hub:
        point = {"MANYHANDS_URL": hub.address.code(), "MANYHANDS_RUN": "first"}
        point |= more
        point["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")  # torch makes it for DDP
        started = [
            subprocess.Popen(
                [sys.executable, "-c", program],
                env={**os.environ, **point},
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for program in programs
        ]
        try:
            said = [process.communicate(timeout=PATIENCE_S) for process in started]
        finally:
            for process in started:
                process.kill()
                process.wait()
    for process, (_, errors) in zip(started, said, strict=True):
        assert process.returncode == 0, errors
        assert errors == ""
    return [out for out, _ in said]


def test_the_table_is_that_of_the_stored_result():
    command = [sys.executable, str(ROOT / "scripts/readme_table.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "name", re.findall(r"^(src/\S+|tests|examples|benchmarks|scripts|docs) ", TEXT, re.M)
)
def test_every_folder_it_names_is_there(name):
    assert (ROOT / name).is_dir()


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\(([^)#:]+)\)", TEXT))))
def test_every_link_leads_somewhere(link):
    assert (ROOT / link).exists()

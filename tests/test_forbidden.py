"""scripts/forbidden.py finds what may not be in src, and only that."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "forbidden.py"


def check(folder):
    command = [sys.executable, str(SCRIPT), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "import pickle as safe",
        "from pickle import loads",
        "import cloudpickle.fast",
        "def f():\n    import dill",
        "import marshal",
        "import importlib\nimportlib.import_module('pickle')",
        "__import__('pickle')",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x')",
        "from torch import load as read\nread('x')",
        "import torch\nloader = torch.load",
        "eval('1')",
        "exec('1')",
        "import builtins\nbuiltins.eval('1')",
    ],
)
def test_unsafe_code_is_found(tmp_path, code):
    (tmp_path / "module.py").write_text(code + "\n")
    status, out = check(tmp_path)
    assert status == 1
    assert "module.py:" in out
    assert "runs what it reads" in out


def test_names_and_words_that_only_look_alike_pass(tmp_path):
    (tmp_path / "module.py").write_text(
        '"""No pickle, no eval()."""\nimport json\njson.load\nmodel.eval()\nregex.exec("x")\n'
    )
    assert check(tmp_path)[0] == 0


def test_long_modules_and_nameless_files_are_found(tmp_path):
    (tmp_path / "long.py").write_text("x = 1\n" * 501)
    (tmp_path / "utils.py").write_text("")
    status, out = check(tmp_path)
    assert status == 1
    assert "has 501 lines" in out
    assert "utils.py:1: is called utils.py" in out


def test_an_empty_folder_is_an_error(tmp_path):
    assert check(tmp_path)[0] == 2

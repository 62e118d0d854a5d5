"""Data sets behind a real web server on loopback."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from .conftest import CONTENT, write_tree

READ = """
import json, sys
from manyhands.data.blobs import Blob, BlobTree
tree = BlobTree.at(sys.argv[1])
found = {blob.name: blob.read_bytes().hex() for blob in tree.walk()}
found["one"] = Blob.at(sys.argv[1] + "hello.txt").read_bytes().hex()
print(json.dumps(found))
"""


@pytest.fixture
def url(tmp_path):
    root = write_tree(tmp_path / "content")
    words = ("-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(root))
    process = subprocess.Popen(
        [sys.executable, "-u", *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    with process:
        said = process.stdout.readline()  # Serving HTTP on 127.0.0.1 port 41873 (...) ...
        yield f"http://127.0.0.1:{said.split(' port ')[1].split()[0]}/"
        process.terminate()


def test_what_a_server_lists_is_a_tree(url):
    """In a process of its own, with which ends what the file system keeps open."""
    done = subprocess.run(
        [sys.executable, "-c", READ, url], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert bytes.fromhex(found.pop("one")) == CONTENT["hello.txt"]
    assert {name: bytes.fromhex(data) for name, data in found.items()} == CONTENT

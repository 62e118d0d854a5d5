"""Data sets behind a real web server on loopback."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

import pytest

from manyhands.core.errors import DataError, NotThere
from manyhands.data.stores import named

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


FAIL = """
import json, threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from manyhands.data.blobs import BlobTree
from manyhands.data.stores import store_at

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_error(int(self.path.strip("/")))

    do_HEAD = do_GET

    def log_message(self, *words):
        pass

def raised(url, name):
    try:
        BlobTree(store_at(url), "", "").read_blob(name)
    except Exception as error:
        return [type(error).__name__, str(error)]

server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/"
found = {name: raised(url, name) for name in ("404", "410", "403", "503")}
server.shutdown()
server.server_close()
print(json.dumps({**found, "nobody": raised(url, "404")}))
"""


def test_a_server_that_fails_is_no_file_that_is_not_there():
    """fsspec says the same of both. What is not there is a bad sample; an outage must be none."""
    done = subprocess.run([sys.executable, "-c", FAIL], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    kinds = {name: kind for name, (kind, _) in found.items()}
    gone = dict.fromkeys(("404", "410"), "NotThere")
    assert kinds == {**gone, **dict.fromkeys(("403", "503", "nobody"), "DataError")}
    assert "503" in found["503"][1]
    assert found["nobody"][1].endswith("/404 cannot be read: Connection refused")


class HubError(OSError):
    """What a hub answers, 404 say, as packages for hubs raise it."""


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (None, NotThere),
        (KeyError("x"), NotThere),
        (FileNotFoundError("x"), NotThere),
        (HubError("404 Client Error"), NotThere),
        (TimeoutError("x"), DataError),
        (ConnectionResetError("x"), DataError),
        (socket.gaierror(-3, "Temporary failure in name resolution"), DataError),
    ],
    ids=repr,
)
def test_what_is_behind_a_file_that_is_not_there(cause, kind):
    with pytest.raises(DataError) as caught, named("x cannot be read"):
        raise FileNotFoundError("x") from cause
    assert type(caught.value) is kind


def test_a_name_that_nobody_knows_is_said_in_words():
    with pytest.raises(DataError, match="Temporary failure in name resolution"), named("x"):
        raise FileNotFoundError("x") from socket.gaierror(
            -3, "Temporary failure in name resolution"
        )


LINES = """
import sys
from manyhands.data.jsonl import JsonlTable
try:
    JsonlTable(sys.argv[1])
except Exception as error:
    print(error)
"""


def test_a_server_that_gives_whole_pages_only(url, tmp_path):
    lines = "".join(f'{{"a": {number}}}\\n' for number in range(20_000))
    (tmp_path / "content" / "rows.jsonl").write_text(lines)
    done = subprocess.run(
        [sys.executable, "-c", LINES, f"{url}rows.jsonl"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "rows.jsonl cannot be read" in done.stdout, done.stderr
    assert "cache = true" in done.stdout

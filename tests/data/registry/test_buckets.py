"""Data sets in buckets, at a real S3 server on loopback.

Server and readers are processes of their own: what s3fs keeps open ends with them.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys

import pytest

from manyhands.core.errors import UsageError
from manyhands.data.registry import dataset

from .conftest import CONTENT, config

SERVER = """
import json, sys
import boto3
from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
client = boto3.client("s3", region_name="us-east-1", endpoint_url=f"http://{host}:{port}")
client.create_bucket(Bucket="bucket")
client.put_object(Bucket="bucket", Key="some/where/")  # as consoles mark a folder
client.put_object(Bucket="bucket", Key="some/where/d/")
for name, text in json.loads(sys.argv[1]).items():
    client.put_object(Bucket="bucket", Key=f"some/where/{name}", Body=bytes.fromhex(text))
print(port, flush=True)
sys.stdin.read()  # until we are told, or those who started us are gone
server.stop()
"""
READ = """
import hashlib, json, multiprocessing
from manyhands.data.registry import dataset

def digests(tree):
    return {blob.name: hashlib.sha256(blob.read_bytes()).hexdigest() for blob in tree.walk()}

def tell(tree, pipe):
    pipe.send(digests(tree))

def elsewhere(tree, method):
    context = multiprocessing.get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=tell, args=(tree, theirs))
    process.start()
    theirs.close()
    found = ours.recv()
    process.join()
    return found

def look(name, methods):
    with dataset(name).open() as tree:
        found = {"here": digests(tree), "keys": tree.keys(), "d": tree["d"].keys()}
        found["missing"] = [name for name in ("no", "d/no", "d.txt/no") if name not in tree]
        found["size"] = tree["d/a.bin"].size
        with tree["d/a.bin"].open() as file:
            file.seek(-4, 2)
            found["end"] = file.read().hex()
        for method in methods:
            found[method] = elsewhere(tree, method)
    return found

if __name__ == "__main__":
    ours = look("ours", ["spawn", "fork"])
    others = {name: look(name, []) for name in ("kept", "julia/hub", "by_url")}
    print(json.dumps({"ours": ours, **others}))
"""
LOAD = """
import io, json
import fsspec, s3fs
from PIL import Image
from manyhands.data import Blob, ImageTree, JsonlTable, Loader
from manyhands.data.access import open_access

LINES = 20_000
fetched = []  # bytes that were asked for of the file of lines

class Counting(s3fs.S3FileSystem):
    async def _call_s3(self, method, *words, **options):
        if method == "get_object" and options["Key"] == "tables/lines.jsonl":
            first, last = map(int, options["Range"].removeprefix("bytes=").split("-"))
            fetched.append(last + 1 - first)
        return await super()._call_s3(method, *words, **options)

def write(system):
    for number in range(6):
        file = io.BytesIO()
        Image.new("RGB", (8, 8), (number, 0, 0)).save(file, "png")
        system.pipe(f"bucket/pictures/{'ab'[number % 2]}/{number}.png", file.getvalue())
    lines = (f'{{"id": {i}, "text": "{"x" * 1000}"}}\\n' for i in range(LINES))
    system.pipe("bucket/tables/lines.jsonl", "".join(lines).encode())

def shade(image):
    return int(image[0, 0, 0])

def id_of(row):
    return row["id"]

def read(table, batch, batches, kind):
    with Loader(table, batch, seed=3, workers=2, kind=kind, collate=list) as loader:
        return [sample for batch, _ in zip(loader, range(batches)) for sample in batch]

if __name__ == "__main__":
    fsspec.register_implementation("s3", Counting, clobber=True)
    system = Counting(skip_instance_cache=True)
    write(system)
    size = system.size("bucket/tables/lines.jsonl")
    pictures = ImageTree("s3://bucket/pictures", transform=shade)
    lines = JsonlTable("s3://bucket/tables/lines.jsonl", transform=id_of)
    scanned, requests = sum(fetched), len(fetched)
    found = {"size": size, "scanned": scanned, "requests": requests}
    for kind in ("thread", "process"):
        fetched.clear()
        found[kind] = read(pictures, 2, 3, kind), read(lines, 10, 10, kind)
        found[kind + " fetched"] = sum(fetched)
    inner = open_access(Blob.at("dir://lines.jsonl", path="bucket/tables", target_protocol="s3"))
    fetched.clear()
    found["inner"] = len(inner.read(5, 1000)), sum(fetched)
    print(json.dumps(found))
"""
DATA = """
data_config_version = 1

[[datasets]]
name = "ours"
uuid = "71f5a1a9-2c39-4bd4-9f42-2f2e8a7c5d11"
    [datasets.storage]
    driver = "S3"
    type = "BlobTree"
    bucket = "bucket"
    prefix = "some/where"
    region = "us-east-1"
    endpoint_url = "http://127.0.0.1:{port}"

[[datasets]]
name = "kept"
uuid = "71f5a1a9-2c39-4bd4-9f42-2f2e8a7c5d12"
    [datasets.storage]
    driver = "S3"
    bucket = "bucket"
    prefix = "/some/where/"
    endpoint_url = "http://127.0.0.1:{port}"
    profile = "research"
    cache = {{ folder = "@__DIR__/copies" }}

[[datasets]]
name = "julia/hub"
uuid = "71f5a1a9-2c39-4bd4-9f42-2f2e8a7c5d13"
    [datasets.storage]
    driver = "JuliaHubDataRepo"
    type = "BlobTree"
    bucket_region = "us-east-1"
    bucket = "bucket"
    prefix = "some/where"
    aws_profile = "research"

[[datasets]]
name = "by_url"
uuid = "71f5a1a9-2c39-4bd4-9f42-2f2e8a7c5d14"
    [datasets.storage]
    driver = "fsspec"
    url = "s3://bucket/some/where"
    options = {{ endpoint_url = "http://127.0.0.1:{port}" }}

[[datasets]]
name = "one_file"
uuid = "71f5a1a9-2c39-4bd4-9f42-2f2e8a7c5d15"
    [datasets.storage]
    driver = "S3"
    type = "Blob"
    bucket = "bucket"
    prefix = "some/where/hello.txt"
    endpoint_url = "http://127.0.0.1:{port}"

[[datasets]]
name = "no_profile"
uuid = "71f5a1a9-2c39-4bd4-9f42-2f2e8a7c5d17"
    [datasets.storage]
    driver = "S3"
    bucket = "bucket"
    profile = "nobody"

[[datasets]]
name = "no_bucket"
uuid = "71f5a1a9-2c39-4bd4-9f42-2f2e8a7c5d16"
    [datasets.storage]
    driver = "S3"
    bucket = "nothing-here"
    endpoint_url = "http://127.0.0.1:{port}"
"""
EXPECTED = {name: hashlib.sha256(data).hexdigest() for name, data in CONTENT.items()}
KEYS = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing"}


@pytest.fixture(scope="module")
def port():
    environ = os.environ | KEYS
    content = json.dumps({name: data.hex() for name, data in CONTENT.items()})
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER, content],
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with process:
        yield int(process.stdout.readline())
        process.stdin.close()


@pytest.fixture
def place(port, tmp_path):
    """The working directory, with its Data.toml."""
    (tmp_path / "here" / "Data.toml").write_text(DATA.format(port=port))
    profile = "[research]\naws_access_key_id = testing\naws_secret_access_key = testing\n"
    (tmp_path / "home" / ".aws").mkdir()
    (tmp_path / "home" / ".aws" / "credentials").write_text(profile)
    (tmp_path / "read.py").write_text(READ)
    return tmp_path


def call(place, *words, **environ):
    bare = os.environ | {"AWS_EC2_METADATA_DISABLED": "true"}
    done = subprocess.run(
        [sys.executable, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        cwd=place / "here",
        env=bare | environ,
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout, done.stderr


def test_a_bucket_is_a_tree_in_every_process(place, port):
    """With keys from the environment or a profile, through each driver, with and without copies."""
    environ = KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    code, out, err = call(place, place / "read.py", **environ)
    assert code == 0, err
    found = json.loads(out)
    assert found["ours"]["spawn"] == found["ours"]["fork"] == EXPECTED
    for name in ("ours", "kept", "julia/hub", "by_url"):
        one = found[name]
        assert one["here"] == EXPECTED
        assert one["keys"] == ["d", "d.txt", "hello.txt"]
        assert one["d"] == ["a.bin", "e", "\N{GREEK SMALL LETTER DELTA} #%?.txt"]
        assert one["missing"] == ["no", "d/no", "d.txt/no"]
        assert one["size"] == len(CONTENT["d/a.bin"])
        assert one["end"] == CONTENT["d/a.bin"][-4:].hex()
    copies = [p for p in (place / "here" / "copies").rglob("*") if p.is_file()]
    assert sorted(p.read_bytes() for p in copies) == sorted(CONTENT.values())


def test_loaders_read_buckets(place, port):
    """By threads and by processes, which open the bucket anew. A line costs its own bytes."""
    (place / "load.py").write_text(LOAD)
    environ = KEYS | {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    code, out, err = call(place, place / "load.py", **environ)
    assert code == 0, err
    found = json.loads(out)
    assert found["size"] > 20_000_000
    assert found["scanned"] < found["size"] + 200_000  # once, and the ends again
    assert found["requests"] < 6
    pictures, lines = found["thread"]
    assert sorted(pictures) == sorted([n, n % 2] for n in range(6))
    assert len(set(lines)) == 100
    assert found["process"] == found["thread"]
    # Ten batches of ten, a kilobyte each, and what was read ahead: four batches at most.
    assert 0 < found["thread fetched"] < 200_000
    assert found["inner"] == [995, 995]  # through a folder of a bucket, too


def test_check_looks_into_buckets(place):
    names = ("kept", "one_file", "no_bucket", "no_profile")
    words = ("-m", "manyhands", "data", "check", "--json", *names)
    code, out, _ = call(place, *words, **KEYS)
    assert code == 1
    found = {one["name"]: one["problem"] for one in json.loads(out)["datasets"]}
    assert found["kept"] is None  # its profile is all that it needs
    assert found["one_file"] is None
    assert "s3://nothing-here: there is no such file or folder" in found["no_bucket"]
    assert "could not be found\nhint: name a profile that ~/.aws" in found["no_profile"]
    assert not (place / "here" / "copies").exists()


def test_without_the_package_the_pip_line_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "s3fs", None)  # as if it were not installed
    storage = {"driver": "S3", "bucket": "b"}
    with pytest.raises(UsageError, match="needs a package") as caught:
        dataset("content", project=config(storage)).open()
    assert caught.value.hint == "pip install 'manyhands[s3]'"

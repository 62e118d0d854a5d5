"""Data.toml files: what loads, and what is told of those that do not."""

from __future__ import annotations

import gzip
import struct
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manyhands.core.errors import RegistryError, UsageError
from manyhands.data import CsvTable
from manyhands.data.drivers import DRIVERS, open_storage
from manyhands.data.project import EXAMPLE, make_project, parse_project, read_project
from manyhands.data.registry import dataset
from manyhands.data.secret import hide

from .conftest import patient

VERSION_0 = """
# As files were before names had a '/'.
data_config_version=0

[[datasets]]
description="A greeting"
name="a_greeting"
uuid="e0ad7f5c-4d9e-4f37-8f0c-cb0f6c7e4b52"

    [datasets.storage]
    driver="FileSystem"
    type="Blob"
    path="@__DIR__/content/hello.txt"

[[datasets]]
name="a_tree"
uuid="e0ad7f5c-4d9e-4f37-8f0c-cb0f6c7e4b52"
anything={else=["is", "kept"]}

    [datasets.storage]
    driver="FileSystem"
    type="BlobTree"
    path="@__DIR__/content"
"""
VERSION_1 = """
data_config_version=1

[[datasets]]
name="group/a_greeting"
uuid="71f5a1a9-2c39-4bd4-9f42-2f2e8a7c5d11"
tags=["text", "small"]

    [datasets.storage]
    driver="FileSystem"
    type="Blob"
    path="@__DIR__/content/hello.txt"

[[datasets]]
name="embedded"
uuid="71f5a1a9-2c39-4bd4-9f42-2f2e8a7c5d11"

    [datasets.storage]
    driver="TomlDataStorage"
    type="FileTree"

        [datasets.storage.data.d01]
        "b.txt" = "MSBi"
        "token" = "MSBh"

[[datasets]]
name="from_elsewhere"
uuid="0a3bb8a0-77f1-4c51-b6ac-0c0a4a0d7c95"

    [datasets.storage]
    driver="SomeJuliaStorage"
    type="Blob"
    data="whatever it likes"

[[drivers]]
type="storage"
name="SomeJuliaStorage"

    [drivers.module]
    name="SomeJuliaPackage"
    uuid="5f3c9d3b-8d5b-4d36-bd8b-5e3a2f7cf1a4"
"""

AS_THEIRS = """
# All that the Data.toml of DataSets.jl's own tests has, in words of ours: comments between the
# fields, one UUID for several entries, names in a group, data in the file, a driver of somebody's.
data_config_version=1

#--------------------------------------------------
[[datasets]]
description="One file"
name="one_file"
uuid="71f5a1a9-2c39-4bd4-9f42-2f2e8a7c5d11"

    [datasets.storage]
    driver="FileSystem"
    type="Blob"
    path="@__DIR__/content/hello.txt"

    # [[datasets.maps]]
    # type="text"
    # parameters={encoding="UTF-8"}

[[datasets]]
description="The same file, in a group"
name="some_group/one_file"
uuid="71f5a1a9-2c39-4bd4-9f42-2f2e8a7c5d11"

    [datasets.storage]
    driver="FileSystem"
    type="Blob"
    path="@__DIR__/content/hello.txt"

#--------------------------------------------------
[[datasets]]
description="Rows, packed"
name="packed_rows"
uuid="e0ad7f5c-4d9e-4f37-8f0c-cb0f6c7e4b52"

    [datasets.storage]
    driver="FileSystem"
    type="Blob"
    path="@__DIR__/rows.csv.gz"

[[datasets]]
name="a_folder"
uuid="0a3bb8a0-77f1-4c51-b6ac-0c0a4a0d7c95"

    [datasets.storage]
    driver="FileSystem"
    type="BlobTree"
    path="@__DIR__/content"

#--------------------------------------------------
[[datasets]]
description="Eight bytes: a number"
name="a_number"
uuid="71f5a1a9-2c39-4bd4-9f42-2f2e8a7c5d11"

    [datasets.storage]
    driver="TomlDataStorage"
    type="Blob"
    data="AAAAAAAA+D8="

[[datasets]]
description="Two folders"
name="two_folders"
uuid="71f5a1a9-2c39-4bd4-9f42-2f2e8a7c5d11"

    [datasets.storage]
    driver="TomlDataStorage"
    type="BlobTree"

# written by a program

        [datasets.storage.data.f2]
        "z.txt" = "MiB6"
        "y.txt" = "MiB5"

        [datasets.storage.data.f1]
        "z.txt" = "MSB6"
        "y.txt" = "MSB5"

#--------------------------------------------------
[[datasets]]
name="anothers_file"
uuid="785b3cdc-428e-426f-a3f7-3f6ae88a9637"

    [datasets.storage]
    driver="AnotherDriver"
    type="Blob"
    data="eA=="

[[datasets]]
name="anothers_tree"
uuid="4af3a8a9-983b-487b-bfd8-804ca50b4a0c"

    [datasets.storage]
    driver="AnotherDriver"
    type="BlobTree"

        [datasets.storage.data]
        "y.txt" = "eQ=="
"""


def problems(config):
    with pytest.raises(RegistryError) as caught:
        make_project(config, "F")
    return caught.value.problems


def entry(**changes):
    made = {"name": "n", "uuid": "71f5a1a9-2c39-4bd4-9f42-2f2e8a7c5d11"}
    made["storage"] = {"driver": "FileSystem", "path": "/x"}
    made |= changes
    return {key: value for key, value in made.items() if value is not None}


def test_version_0(folder):
    file = folder.parent / "Data.toml"
    file.write_text(VERSION_0)
    assert dataset("a_greeting", project=file).open().read_text() == "Hello\n"
    tree = dataset("a_tree", project=folder.parent)  # a folder has its Data.toml
    assert tree.conf["anything"] == {"else": ["is", "kept"]}
    assert tree.open()["d/e"].keys() == ["empty"]


def test_version_1(folder):
    file = folder.parent / "Data.toml"
    file.write_text(VERSION_1)
    assert dataset("group/a_greeting", project=file).open().read_bytes() == b"Hello\n"
    assert dataset("embedded#d01/b.txt", project=file).open().read_text() == "1 b"
    assert dataset("embedded#d01", project=file).open().keys() == ["b.txt", "token"]
    elsewhere = dataset("from_elsewhere", project=file)  # is known, and cannot be opened
    assert elsewhere.storage["data"] == "whatever it likes"
    with pytest.raises(RegistryError, match="Julia package 'SomeJuliaPackage'"):
        elsewhere.open()


def test_a_file_as_datasets_jl_tests_with(folder):
    (folder.parent / "Data.toml").write_text(AS_THEIRS)
    (folder.parent / "rows.csv.gz").write_bytes(gzip.compress(b"name,age\nAda,36\n"))
    project = read_project(folder.parent / "Data.toml")

    def opened(name):
        return dataset(name, project=project).open()

    assert len(project.entries) == 8
    for name in ("one_file", "some_group/one_file", "a_folder#hello.txt"):
        assert opened(name).read_text() == "Hello\n"
    assert list(CsvTable(opened("packed_rows"))) == [{"name": "Ada", "age": "36"}]
    assert struct.unpack("<d", opened("a_number").read_bytes()) == (1.5,)
    texts = {blob.name: blob.read_text() for blob in opened("two_folders").walk()}
    assert texts == {"f1/y.txt": "1 y", "f1/z.txt": "1 z", "f2/y.txt": "2 y", "f2/z.txt": "2 z"}
    for name in ("anothers_file", "anothers_tree"):
        assert dataset(name, project=project).storage["data"]
        with pytest.raises(RegistryError, match="got 'AnotherDriver'"):
            opened(name)


@pytest.mark.parametrize(
    ("version", "said"),
    [(2, "newer"), (-1, "expected 0 or 1"), (True, "whole number"), ("1", "whole number")],
)
def test_versions_that_are_none_of_ours(version, said):
    (problem,) = problems({"data_config_version": version, "datasets": []})
    assert said in problem


def test_version_0_has_no_groups():
    (problem,) = problems({"data_config_version": 0, "datasets": [entry(name="a/b")]})
    assert "entry 1 ('a/b'), name" in problem
    assert "data_config_version 0" in problem


def test_of_two_of_a_name_the_last_one_counts(caplog):
    """As in DataSets.jl, whose files load unchanged."""
    first, last = entry(description="first"), entry(description="last")
    made = make_project({"data_config_version": 1, "datasets": [first, entry(name="m"), last]}, "F")
    assert [one.description for one in made.entries.values()] == ["last", ""]
    assert "F: 'n' is there twice, and the last one counts" in caplog.text


def test_everything_that_is_wrong_is_told_at_once():
    wrong = {
        "datasets": [
            entry(name=None),
            entry(name="a b", uuid="b498f769"),
            entry(uuid=5, storage="s3://b"),
            entry(description=["x"], tags=["x", 1]),
            entry(storage={"driver": 3}),
            entry(),
            entry(),
            "no table",
        ],
        "drivers": [{"type": "storage", "module": {"name": "X"}}, 4],
    }
    said = problems(wrong)
    for line, expected in zip(
        said,
        [
            "Data.toml, data_config_version: is missing",
            "entry 1, name: is missing",
            "entry 2 ('a b'), name: 'a b' is not made of",
            "entry 2 ('a b'), uuid: 'b498f769' is no UUID",
            "entry 3 ('n'), uuid: expected text in quotes, got 5",
            "entry 3 ('n'), storage: expected a table, got 's3://b'",
            "entry 4 ('n'), description: expected text in quotes, got a list",
            "entry 4 ('n'), tags: expected text in quotes, got 1",
            "entry 5 ('n'), storage, driver: expected text in quotes, got 3",
            "entry 8: expected a table",
            "driver 1, name: is missing",
            "driver 1, module, uuid: is missing",
            "driver 2: expected a table",
        ],
        strict=True,
    ):
        assert line.startswith(expected)


def test_an_error_names_the_file_and_an_example(tmp_path):
    file = tmp_path / "Data.toml"
    file.write_text("data_config_version = 1\n")
    with pytest.raises(RegistryError) as caught:
        read_project(file)
    assert str(file) in str(caught.value)
    assert str(EXAMPLE) in caught.value.hint


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b"datasets = [", "not valid TOML"),
        (b"\xff", "not UTF-8"),
        (b"a = 1" + b"0" * 5000, "not valid TOML"),
        (b"a = " + b"[" * 5000, "not valid TOML"),
        (b"a" + b".a" * 2000 + b" = 1", "too deep"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, text, said):
    (tmp_path / "Data.toml").write_bytes(text)
    with pytest.raises(RegistryError, match=said):
        read_project(tmp_path / "Data.toml")


def test_a_folder_in_the_place_of_the_file(tmp_path):
    with pytest.raises(RegistryError, match="cannot be read"):
        read_project(tmp_path)


def test_dir_is_the_folder_of_the_file(tmp_path):
    made = parse_project(VERSION_0.replace('"is"', '"@__DIR__"'), tmp_path / 'a "b"' / "Data.toml")
    assert made.entries["a_tree"].storage["path"] == str(tmp_path / 'a "b"' / "content")
    assert made.entries["a_tree"].conf["anything"]["else"][0] == str(tmp_path / 'a "b"')


def test_the_example_is_good():
    made = read_project(EXAMPLE)
    assert {"imagenet_local", "imagenet"} <= set(made.entries)
    for one in made.entries.values():
        assert open_storage(one.storage, one.name).kind is not None
    used = {one.storage["driver"] for one in made.entries.values()}
    assert used == set(DRIVERS) - {"JuliaHubDataRepo"}
    assert dataset("examples/greeting#hello.txt", project=made).open().read_text() == "Hello\n"


@pytest.mark.parametrize(
    "storage",
    [
        {"driver": "S3", "bucket": "b", "key": "AKIA"},
        {"driver": "S3", "bucket": "b", "aws_secret_access_key": "x"},
        {"driver": "S3", "bucket": "b", "endpoint_url": "https://u:p@h"},
        {"driver": "fsspec", "url": "ftp://user:pass@host/x"},
        {"driver": "fsspec", "url": "simplecache::https://host/x?X-Amz-Signature=1"},
        {"driver": "fsspec", "url": "gs://x", "options": {"token": "abc"}},
        {"driver": "fsspec", "url": "gs://x", "options": {"a": [{"apiKey": "abc"}]}},
        {"driver": "fsspec", "url": "x://x", "options": {"password": 5}},
        {"driver": "TomlDataStorage", "data": {}, "token": "x"},
        {"driver": "Unknown", "credentials": {"secret": "x"}},
        {"driver": "Unknown", "data": "eA==", "token": "x"},
        {"driver": "FileSystem", "path": "/x", "data": {"token": "x"}},
        {"driver": "fsspec", "url": "x://x", "options": {"headers": {"Authorization": "Bearer x"}}},
        {"driver": "fsspec", "url": "x://x", "options": {"client_kwargs": {"auth": "me:x"}}},
        {"driver": "fsspec", "url": "x://x", "options": {"auth": {"login": "me"}}},
        {"driver": "fsspec", "url": "x://x", "options": {"cookies": {"session": "x"}}},
        {"driver": "fsspec", "url": "x://x", "options": {"headers": {"Cookie": "session=x"}}},
        {"driver": "fsspec", "url": "x://x", "options": {"credential": "x"}},
        {"driver": "fsspec", "url": "abfs://x", "options": {"connection_string": "AccountKey=x"}},
        {"driver": "fsspec", "url": "abfs://x", "options": {"connectionString": "AccountKey=x"}},
        {"driver": "fsspec", "url": "https://ghp_AKIA@host/x"},
        {"driver": "S3", "bucket": "b", "endpoint_url": "https://AKIA@h"},
        {"driver": "fsspec", "url": "x://x", "options": {"apikey": "x"}},
        {"driver": "fsspec", "url": "x://x", "options": {"accesskeyid": "AKIA"}},
        {"driver": "fsspec", "url": "x://x", "options": {"clientsecret": "x"}},
        {"driver": "fsspec", "url": "https://host/x?sastoken=AKIA"},
    ],
)
def test_secrets_are_refused(storage):
    with pytest.raises(RegistryError) as caught:
        make_project({"data_config_version": 1, "datasets": [entry(storage=storage)]}, "F")
    (problem,) = caught.value.problems
    assert problem.startswith("entry 1 ('n'), storage.")
    assert "secret" in problem
    assert "environment" in caught.value.hint
    assert "AKIA" not in str(caught.value)
    assert "pass@" not in str(caught.value)


@pytest.mark.parametrize("at", ["entry 1 ('n'), ", ""], ids=["in an entry", "beside them"])
@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"password": "x"}, "password"),
        ({"login": {"api_key": "x"}}, "login.api_key"),
        ({"token": "x"}, "token"),
        ({"a": [{"privateKey": "x"}]}, "a[0].privateKey"),
        ({"aws_secret_access_key": "x"}, "aws_secret_access_key"),
        ({"hub_access_token": "x"}, "hub_access_token"),
        ({"credentials": {"user": "me"}}, "credentials.user"),
        ({"homepage": "https://me:x@host/"}, "homepage"),
        ({"mirror": "https://AKIA@host/"}, "mirror"),
        ({"mirror": "https://host/x?X-Amz-Signature=1"}, "mirror"),
        ({"mirror": "https://host/x?key=AIza"}, "mirror"),
        ({"mirror": "https://host/x?page=1&hf_token=x"}, "mirror"),
        ({"auth": "me:x"}, "auth"),
        ({"cookie": "session=x"}, "cookie"),
        ({"cookies": {"session": "x"}}, "cookies.session"),
        ({"password": 12345}, "password"),
        ({"login": {"passphrase": 12345}}, "login.passphrase"),
    ],
)
def test_secrets_are_refused_wherever_they_are(at, more, field):
    one = entry(storage={"driver": "FileSystem", "path": "/x"}, **(more if at else {}))
    with pytest.raises(RegistryError) as caught:
        make_project({"data_config_version": 1, "datasets": [one], **({} if at else more)}, "F")
    (problem,) = caught.value.problems
    assert problem == f"{at}{field}: looks like a secret"


@pytest.mark.parametrize(
    "name",
    [
        *("hf_token", "HF_TOKEN", "hfToken", "github_token", "session_token", "aws_session_token"),
        *("sas_token", "oauth_token", "id_token", "hf_token_2"),
        *("wandb_key", "aws_key", "gcp_key", "storage_key", "subscription_key", "signing_key"),
        *("encryption_key", "shared_key", "session_key"),
        *("apikey", "APIKEY", "secretkey", "aws_accesskey", "authtoken", "clientsecret"),
    ],
)
def test_a_name_that_means_a_secret_is_refused_beside_a_storage(name):
    with pytest.raises(RegistryError) as caught:
        make_project({"data_config_version": 1, "datasets": [entry(**{name: "AKIA"})]}, "F")
    assert list(caught.value.problems) == [f"entry 1 ('n'), {name}: looks like a secret"]
    assert hide({name: "AKIA"}, beside=True) == {name: "***"}


def test_both_halves_of_a_login_are_refused():
    with pytest.raises(RegistryError) as caught:
        make_project({"data_config_version": 1, "datasets": [], "auth": ["ann", "pw"]}, "F")
    assert list(caught.value.problems) == [f"auth[{i}]: looks like a secret" for i in (0, 1)]


@pytest.mark.parametrize(
    "more",
    [
        {"eos_token": "</s>", "pad_token_id": 0, "token_count": 1_000_000, "tokens": ["a", "b"]},
        {"image_key": "jpg", "primary_key": "id", "key": "uid", "keys": {"label": "cls"}},
        {"bos_token": "<s>", "mask_token": "[MASK]", "image_token": 32_000, "maxToken": 8},
        {"max_token": 8, "max_tokens": 8, "start_token_2": "<b>", "token_type": "bpe"},
        {"sort_key": "id", "partition_key": "day", "cookie_count": 5, "auth_url": "https://host/"},
        {"signature": "(image, label)", "auth": {"scheme": "none"}, "secret": False},
        {"homepage": "https://host/list?page=5&sort=x", "secret_file": "~/x"},
    ],
)
def test_what_describes_the_data_is_no_secret(more):
    made = make_project({"data_config_version": 1, "datasets": [entry(**more)], **more}, "F")
    (read,) = made.entries.values()
    assert {name: read.conf[name] for name in more} == more


@pytest.mark.parametrize(
    "storage",
    [
        {"driver": "fsspec", "url": "gs://public", "options": {"token": "anon"}},
        {"driver": "fsspec", "url": "sftp://host/x", "options": {"key_file": "~/.ssh/id"}},
        {"driver": "fsspec", "url": "https://host/x?page=1", "options": {"monkey": "see"}},
        {"driver": "fsspec", "url": "sftp://me@host/x", "options": {"auth_method": "agent"}},
        {"driver": "fsspec", "url": "abfs://box@account/x", "options": {"author": "me"}},
        {"driver": "fsspec", "url": "gs://x", "options": {"credentials_file": "~/me.json"}},
        {"driver": "fsspec", "url": "https://host/a@b", "options": {"connection": "keep"}},
        {"driver": "TomlDataStorage", "data": {"key": "eA==", "password": {"token": "eA=="}}},
        {"driver": "Unknown", "data": {"tokens.json": "eA==", "key": "eA=="}},
    ],
)
def test_what_is_no_secret_is_not_refused(storage):
    project = make_project({"data_config_version": 1, "datasets": [entry(storage=storage)]})
    (read,) = project.entries.values()
    assert read.storage == storage


KEYS = st.sampled_from(
    [
        *("name", "uuid", "storage", "driver", "type", "path", "data", "bucket", "prefix", "url"),
        *("options", "cache", "folder", "anon", "datasets", "drivers", "module", "description"),
        *("data_config_version", "tags", "region", "endpoint_url", "profile"),
    ]
)
TEXTS = st.one_of(
    st.sampled_from([*DRIVERS, "Blob", "BlobTree", "storage", "n", "a/b", "s3://b", "memory://x"]),
    st.just("71f5a1a9-2c39-4bd4-9f42-2f2e8a7c5d11"),
    st.text(max_size=8),
)
VALUES = st.recursive(
    st.one_of(TEXTS, st.booleans(), st.integers(-1, 3), st.none(), st.floats()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(KEYS, TEXTS), inner, max_size=5)
    ),
    max_leaves=12,
)
ENTRIES = st.fixed_dictionaries(
    {"name": TEXTS, "uuid": TEXTS, "storage": st.dictionaries(KEYS, VALUES, max_size=6)}
)


@patient
@given(st.dictionaries(KEYS, VALUES, max_size=6), st.lists(ENTRIES, max_size=3))
def test_any_table_is_a_project_or_a_usage_error(config, entries):
    for made in (config, config | {"data_config_version": 1, "datasets": entries}):
        try:
            project = make_project(made)
        except UsageError:
            continue
        assert all(one.uuid and one.name for one in project.entries.values())


@patient
@given(st.sampled_from(sorted(DRIVERS)), st.dictionaries(KEYS, VALUES, max_size=6))
def test_any_storage_is_a_store_or_a_usage_error(driver, storage):
    said = None
    try:
        open_storage(storage | {"driver": driver}, "F: 'n'")
    except RegistryError as error:
        said = error.problems
    assert said is None or (said and all(one.startswith("storage.") for one in said))


@patient
@given(st.text(st.sampled_from(VERSION_1 + "\x00é"), max_size=200))
def test_any_text_is_a_project_or_a_usage_error(text):
    try:
        parse_project(text, Path("Data.toml"))
    except UsageError:
        return
    assert "datasets" in tomllib.loads(text)


@patient
@given(st.data())
def test_a_file_with_a_slip_of_the_pen(data):
    place = data.draw(st.integers(0, len(VERSION_1)))
    end = data.draw(st.integers(place, min(place + 30, len(VERSION_1))))
    put = data.draw(st.text(st.sampled_from('[]"=.a1\n#{}@\\'), max_size=3))
    said = "Data.toml"
    try:
        parse_project(VERSION_1[:place] + put + VERSION_1[end:], Path("Data.toml"))
    except UsageError as error:
        said = str(error)
    assert said.startswith("Data.toml")

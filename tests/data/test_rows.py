"""CSV by row number: quotes, new lines inside them, types, and rows that are none."""

from __future__ import annotations

import csv
import gzip
import pickle
import random
from decimal import Decimal

import pytest

from manyhands.core.errors import UsageError
from manyhands.data.rows import CsvTable
from manyhands.data.table import BadSample
from tests.data.kit import bad


def written(tmp_path, data: bytes | str, name: str = "rows.csv"):
    path = tmp_path / name
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_as_the_standard_library_reads_it(tmp_path):
    """Random texts with all that makes CSV hard, written and read by Python's own module."""
    dice = random.Random(3)
    pieces = ['"', ",", "\n", "\r\n", "ä", "x", " ", "", "''", ";", "line\u2028"]
    rows = [["".join(dice.choices(pieces, k=dice.randrange(9))) for _ in "abc"] for _ in range(400)]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows([["a", "b", "c"], *rows])
    table = CsvTable(path)
    assert table.columns == ("a", "b", "c")
    assert len(table) == len(rows)
    order = list(range(len(rows)))
    dice.shuffle(order)
    for i in order:
        assert list(table[i].values()) == rows[i]
    assert [list(row.values()) for row in table] == rows
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.reader(file)
        lines = [reader.line_num + 1 for _ in reader]  # of the row after each
    assert [table.where(i) for i in range(len(rows))] == [f"{path}:{n}" for n in lines[:-1]]


def test_columns_and_types(tmp_path):
    path = written(tmp_path, "\ufeffid,x,on,name\r\n1,0.5,yes,a\r\n\r\n 2 ,-1e3,FALSE,\r\n")
    table = CsvTable(path, types={"id": int, "x": float, "on": bool, "name": str})
    assert list(table) == [
        {"id": 1, "x": 0.5, "on": True, "name": "a"},
        {"id": 2, "x": -1000.0, "on": False, "name": ""},
    ]
    assert table.where(1) == f"{path}:4"
    assert CsvTable(path, transform=lambda row: row["x"])[0] == "0.5"


def test_without_a_header(tmp_path):
    path = written(tmp_path, "1;'a;b'\n2;c")
    table = CsvTable(path, columns=["n", "text"], delimiter=";", quotechar="'", types={"n": int})
    assert list(table) == [{"n": 1, "text": "a;b"}, {"n": 2, "text": "c"}]
    assert table.where(0) == f"{path}:1"
    # The same file, read in another way, has another index.
    assert len(CsvTable(path, delimiter=";")) == 1


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("1", "1 columns, expected 2"),
        ("1,2,3", "3 columns, expected 2"),
        ("x,2", "column a: 'x': invalid literal"),
        (",2", "column a: '': invalid literal"),
        ('"1"7,2', "not CSV"),
        ('1,"2', "not CSV: unexpected end"),
        ('"1,2', "not CSV: unexpected end"),
    ],
)
@pytest.mark.parametrize("rest", [3, 30_000])
def test_a_broken_row_is_named_and_the_others_are_read(tmp_path, row, reason, rest):
    """Also if it opens a quote that nothing closes, however long the file is."""
    lines = ["a,b", "1,1", row, *(f"{i},{i}" for i in range(rest))]
    path = written(tmp_path, "\n".join(lines))
    table = CsvTable(path, types={"a": int})
    assert len(table) == rest + 2
    for _ in range(2):
        error = bad(lambda: table[1])
        assert error.where == f"{path}:3"
        assert reason in error.reason
    assert table[0] == {"a": 1, "b": "1"}
    assert [table[i + 2]["a"] for i in range(0, rest, 997)] == list(range(0, rest, 997))
    assert table[rest + 1] == {"a": rest - 1, "b": str(rest - 1)}


def test_a_quote_that_another_row_closes(tmp_path):
    """Nobody can tell which lines are good: all that the two quotes enclose is one bad sample."""
    path = written(tmp_path, 'a,b\n1,"x\n2,y\n3,"z"\n4,w\n')
    table = CsvTable(path)
    assert len(table) == 2
    with pytest.raises(BadSample, match=r"rows.csv:2: not CSV"):
        table[0]
    assert table[1] == {"a": "4", "b": "w"}
    assert table.where(1) == f"{path}:5"


def test_bytes_that_are_no_text(tmp_path):
    path = written(tmp_path, b"a,b\n1,\xff\n2,\xc3\xa4\n")
    table = CsvTable(path)
    with pytest.raises(BadSample, match=r"rows.csv:2: not UTF-8"):
        table[0]
    assert table[1] == {"a": "2", "b": "ä"}


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        ("", {}, "is empty"),
        ("a,a\n1,2\n", {}, "columns of one name: a"),
        ("a,b\n1,2\n", {"types": {"c": int}}, "has no column c\nhint: it has a, b"),
        ("a,b\n1,2\n", {"delimiter": "||"}, "one ASCII character"),
        ("a,b\n1,2\n", {"quotechar": ""}, "one ASCII character"),
        ("a,b\n1,2\n", {"delimiter": '"'}, "delimiter and quotechar are both"),
        ("a,b\n1,2\n", {"columns": ["x", "x"]}, "columns of one name: x"),
        ('"a,b\n', {}, "rows.csv:1: the names of the columns: not CSV"),
    ],
)
def test_what_cannot_be_used(tmp_path, data, options, message):
    with pytest.raises(UsageError, match=message):
        CsvTable(written(tmp_path, data), **options)


def test_a_table_without_rows(tmp_path):
    assert len(CsvTable(written(tmp_path, "a,b\n\n"))) == 0


def test_compressed_files_are_read_from_the_beginning_only(tmp_path):
    path = written(tmp_path, gzip.compress(b'a,b\n1,"x\ny"\n2\n3,z\n'), "rows.csv.gz")
    table = CsvTable(path, types={"a": int})
    with pytest.raises(UsageError, match="from its beginning only"):
        table[0]
    rows = iter(table)
    assert next(rows) == {"a": 1, "b": "x\ny"}
    with pytest.raises(BadSample, match="gz:4: 1 columns"):
        next(rows)
    assert list(rows) == [{"a": 3, "b": "z"}]


def test_it_can_be_pickled(tmp_path):
    table = CsvTable(written(tmp_path, "a\n1\n2\n"), types={"a": int})
    assert list(pickle.loads(pickle.dumps(table))) == [{"a": 1}, {"a": 2}]


KINDS = {"cat": 0, "dog": 1}


@pytest.mark.parametrize(
    ("turn", "text", "reason"),
    [
        (KINDS.__getitem__, "cow", "column kind: 'cow': KeyError: 'cow'"),
        (["a", "b"].index, "c", "column kind: 'c': "),
        (Decimal, "much", "column kind: 'much': InvalidOperation: "),
        (lambda text: 1 / int(text), "0", "column kind: '0': ZeroDivisionError: division by zero"),
        (lambda text: float(text) ** 1000, "1e9", "column kind: '1e9': OverflowError: "),
    ],
    ids=["key", "value", "decimal", "zero", "overflow"],
)
def test_a_text_that_cannot_be_turned_is_bad_whatever_says_so(tmp_path, turn, text, reason):
    table = CsvTable(written(tmp_path, f"kind\n{text}\n"), types={"kind": turn})
    assert bad(lambda: table[0]).reason.startswith(reason)


def test_a_slip_in_a_function_of_the_users_is_no_bad_row(tmp_path):
    table = CsvTable(written(tmp_path, "kind\ncat\n"), types={"kind": lambda text: text.no_such()})
    with pytest.raises(AttributeError):
        table[0]

"""Tokenized rows in memory and on disk: columns of every type are read back unchanged."""

import pickle
from array import array

import pytest

from burnish.config.errors import UserError
from burnish.data.rows import store
from burnish.data.rows.store import BLOCKS, MANIFEST, RowWriter, open_rows

ROWS = [
    {"input_ids": array("i", [1, 2, 3]), "labels": [-100, 2, 3], "is_desirable": True, "margin": 0.5, "prompt": "é"},
    {"input_ids": [4], "labels": [4], "is_desirable": False, "images": ["a.png", "b/ü.png"], "margin": None},
    {"input_ids": [], "labels": [], "prompt": "", "images": [], "weights": [1, 0.5], "big": [2**40]},
    {"input_ids": [5, 6], "labels": [5, 6], "tools": [{"name": "f", "arguments": {"a": None}}, {"other": 1}]},
    {"chosen_input_ids": [1], "rejected_input_ids": [2, 3], "flags": [True, False], "nested": [[1], []]},
]  # fmt: skip
EXPECTED = [
    {
        name: values.tolist() if isinstance(values, array) else values
        for name, values in row.items()
        if values is not None
    }
    for row in ROWS
]


def write(writer, rows=ROWS):
    for number, row in enumerate(rows):
        writer.add(number + 10, row)
    return writer


@pytest.mark.parametrize("rows_of_block", [1, 2, 1000])
def test_columns_of_every_type_round_trip(tmp_path, monkeypatch, rows_of_block):
    monkeypatch.setattr(store, "BLOCK_ROWS", rows_of_block)
    write(RowWriter(tmp_path)).close(known="fact")
    for rows in (open_rows(tmp_path), write(RowWriter()).in_memory()):
        assert list(rows) == EXPECTED
        assert [type(rows[number]["is_desirable"]) for number in (0, 1)] == [bool, bool]
        assert list(rows.lengths) == [3, 1, 0, 2, 3]
        assert list(rows.origins) == [10, 11, 12, 13, 14]
        assert list(pickle.loads(pickle.dumps(rows))) == EXPECTED


def test_row_of_many_numbers_fills_a_block(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "BLOCK_NUMBERS", 3)
    write(RowWriter(tmp_path)).close()
    blocks = store.read_rows_manifest(tmp_path)["blocks"]
    assert [block["rows"] for block in blocks[:-1]] == [1, 3, 1]
    assert list(open_rows(tmp_path)) == EXPECTED


def test_only_reading_a_damaged_block_raises(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "BLOCK_ROWS", 2)
    write(RowWriter(tmp_path)).close()
    second_block = store.read_rows_manifest(tmp_path)["blocks"][1]
    content = bytearray((tmp_path / BLOCKS).read_bytes())
    content[second_block["end"] - 9] ^= 1
    (tmp_path / BLOCKS).write_bytes(content)
    rows = open_rows(tmp_path)
    assert [rows[number] for number in (0, 1, 4)] == [EXPECTED[number] for number in (0, 1, 4)]
    with pytest.raises(UserError, match=r'block 1 of "rows\.arrow" of the tokenized dataset is corrupted'):
        rows[2]
    with pytest.raises(UserError, match="Run the same command again: the dataset is tokenized"):
        open_rows(tmp_path, is_cache=True)[3]
    assert not (tmp_path / MANIFEST).exists()


@pytest.mark.parametrize(
    ("text", "message"), [("[" * 200_000 + "]" * 200_000, "is nested too deeply"), ("[1", "is not valid JSON")]
)
def test_value_that_cannot_be_read_is_reported_with_its_folder(tmp_path, monkeypatch, text, message):
    monkeypatch.setattr(store, "_as_json", lambda value: text)
    writer = store.RowWriter(tmp_path)
    writer.add(0, {"input_ids": [1], "record": {"a": 1}})
    writer.close()
    with pytest.raises(UserError, match=message) as raised:
        store.open_rows(tmp_path)[0]
    assert str(tmp_path) in str(raised.value)
    assert '"record"' in str(raised.value)

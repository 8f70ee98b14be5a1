"""Detection of the columns of an undescribed data file."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from threading import Barrier, BrokenBarrierError

import pytest

from burnish.config.errors import UserError
from burnish.data.options import DataOptions
from burnish.data.sets.sources import load_datasets
from burnish.data.stats import DataStats
from burnish.serve.page import form
from burnish.serve.page.planner_process import columns_of_file
from burnish.utils.json_files import read_object

RECORDS = [{"frage": "1+1", "antwort": "2", "n": 3}, {"frage": "Hot?", "antwort": "cold"}]


def test_columns_are_returned_with_first_values_and_possible_roles(tmp_path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    result = columns_of_file(file)
    assert result["columns"] == [["frage", ["1+1", "Hot?"]], ["antwort", ["2", "cold"]], ["n", ["3"]]]
    assert (result["known"], result["proposed"]) == ("", {})
    assert dict(result["formats"])["alpaca"][:3] == ["prompt", "query", "response"]
    file.write_text('{"my_question": "a", "my_answer": "b"}\n')
    assert columns_of_file(file)["proposed"] == {"prompt": "my_question", "response": "my_answer"}
    file.write_text('{"instruction": "a", "output": "b"}\n')
    assert columns_of_file(file)["known"] == "alpaca"
    file.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    assert columns_of_file(file)["known"] == "preference"
    file.write_text("{torn\n")
    with pytest.raises(UserError, match=r"own\.jsonl"):
        columns_of_file(file)


def test_column_mapping_is_written_for_the_trainer_without_overwriting(page, root) -> None:
    (root / "sets").mkdir()
    (root / "sets/own.jsonl").write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    body = {"file": "sets/own.jsonl", "formatting": "alpaca", "columns": {"prompt": "frage", "response": "antwort"}}
    status, _, text = page.send("PUT", "/api/datasets/own", body)
    assert (status, json.loads(text)) == (201, {"name": "own", "folder": "sets"})
    assert page.send("PUT", "/api/datasets/own", body)[0] == 201
    entry = {"file_name": "own.jsonl", "formatting": "alpaca", "columns": body["columns"]}
    assert json.loads((root / "sets/dataset_info.json").read_text()) == {"own": entry}
    (listed,) = page.get("/api/datasets")["datasets"]
    size = (root / "sets/own.jsonl").stat().st_size
    assert listed == {"name": "own", "folder": "sets", "file": "sets/own.jsonl", "bytes": size}
    (example, _) = load_datasets(DataOptions(dataset=["own"], dataset_dir=str(root / "sets")), 0, DataStats()).train
    assert [message.content for message in example.messages] == ["1+1", "2"]
    for change, expected in (
        ({"columns": {"prompt": "antwort"}}, 409), ({"formatting": "shell"}, 422), ({"columns": {"prompt": 3}}, 422),
        ({"file": "/etc/passwd"}, 422), ({"file": "sets/none.jsonl"}, 404),
    ):  # fmt: skip
        assert page.send("PUT", "/api/datasets/own", {**body, **change})[0] == expected, change
    assert page.send("PUT", "/api/datasets/..%2Fown", body)[0] in (404, 405)
    (root / "sets/dataset_info.json").write_text("{torn")
    assert page.send("PUT", "/api/datasets/own", body)[0] == 422
    assert (root / "sets/dataset_info.json").read_text() == "{torn"


def test_entries_of_concurrent_requests_are_all_written(tmp_path, monkeypatch) -> None:
    file, both_have_read = tmp_path / "dataset_info.json", Barrier(2)

    def read_slowly(path):
        found = read_object(path)
        with suppress(BrokenBarrierError):
            both_have_read.wait(0.2)
        return found

    file.write_text("{}")
    monkeypatch.setattr(form, "read_object", read_slowly)
    with ThreadPoolExecutor(2) as threads:
        [*threads.map(lambda name: form._add_entry(file, name, {"file_name": name}), ("a", "b"))]
    assert set(json.loads(file.read_text())) == {"a", "b"}


def test_columns_are_read_below_the_roots_only(page, root, monkeypatch) -> None:
    async def whole(question):
        return {"columns": [], "asked": question["columns_of"]}

    monkeypatch.setattr(page.site.planner, "whole", whole)
    (root / "own.jsonl").write_text("{}\n")
    assert page.get("/api/datasets/columns?file=own.jsonl")["asked"] == str(root / "own.jsonl")
    assert page.send("GET", "/api/datasets/columns?file=/etc/passwd")[0] == 422
    assert page.send("GET", "/api/datasets/columns?file=none.jsonl")[0] == 404

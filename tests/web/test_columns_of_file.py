"""Which column is which, of a file that is not described."""

from __future__ import annotations

import json

import pytest

from burnish.app.columns import columns_of_file
from burnish.core.errors import UserError

RECORDS = [{"frage": "1+1", "antwort": "2", "n": 3}, {"frage": "Hot?", "antwort": "cold"}]


def test_columns_come_with_their_first_values_and_what_they_may_be(tmp_path) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    found = columns_of_file(file)
    assert found["columns"] == [["frage", ["1+1", "Hot?"]], ["antwort", ["2", "cold"]], ["n", ["3"]]]
    assert (found["known"], found["proposed"]) == ("", {})
    assert dict(found["formats"])["alpaca"][:3] == ["prompt", "query", "response"]
    file.write_text('{"my_question": "a", "my_answer": "b"}\n')
    assert columns_of_file(file)["proposed"] == {"prompt": "my_question", "response": "my_answer"}
    file.write_text('{"instruction": "a", "output": "b"}\n')
    assert columns_of_file(file)["known"] == "alpaca"
    file.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    assert columns_of_file(file)["known"] == "preference"
    file.write_text("{torn\n")
    with pytest.raises(UserError, match=r"own\.jsonl"):
        columns_of_file(file)


def test_columns_are_read_below_the_roots_only(page, root, monkeypatch) -> None:
    async def whole(question):
        return {"columns": [], "asked": question["columns_of"]}

    monkeypatch.setattr(page.site.planner, "whole", whole)
    (root / "own.jsonl").write_text("{}\n")
    assert page.get("/api/datasets/columns?file=own.jsonl")["asked"] == str(root / "own.jsonl")
    assert page.send("GET", "/api/datasets/columns?file=/etc/passwd")[0] == 422
    assert page.send("GET", "/api/datasets/columns?file=none.jsonl")[0] == 404

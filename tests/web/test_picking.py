"""Results of the pickers, and uploaded files."""

from __future__ import annotations

import http.client
import json
import time
from types import SimpleNamespace

import pytest


def put(page, path: str, body: bytes) -> tuple[int, dict]:
    connection = http.client.HTTPConnection("127.0.0.1", page.port, timeout=30)
    headers = {"Cookie": f"{page.sessions.cookie}={page.cookie}", "Origin": f"http://127.0.0.1:{page.port}"}
    connection.request("PUT", path, body, headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def test_models_and_datasets_are_described_with_their_files(page, root) -> None:
    (root / "m").mkdir()
    (root / "m/config.json").write_text('{"model_type": "qwen2"}')
    (root / "m/model.safetensors").write_bytes(b"0" * 100)
    (root / "own.jsonl").write_text('{"text": "a"}\n')
    (root / "named.jsonl").write_text('{"text": "a"}\n')
    (root / "dataset_info.json").write_text(
        json.dumps({"n": {"file_name": "named.jsonl"}, "gone": {"file_name": "no"}})
    )
    assert page.get("/api/models")["models"] == [{"path": "m", "kind": "model", "type": "qwen2", "bytes": 100}]
    assert page.get("/api/datasets")["datasets"] == [
        {"name": "n", "folder": ".", "file": "named.jsonl", "bytes": 14},
        {"name": "gone", "folder": "."},
        {"name": "own.jsonl", "folder": "", "file": "own.jsonl", "bytes": 14},
    ]  # fmt: skip  (a run's logs are no data)


def test_json_file_is_a_dataset_if_it_holds_a_list(page, root) -> None:
    (root / "mine").mkdir()
    (root / "mine/alpaca.json").write_text('\ufeff [{"instruction": "a", "output": "b"}]')
    (root / "mine/settings.json").write_text('{"a": [1]}')
    found = [one["name"] for one in page.get("/api/datasets")["datasets"] if "mine" in one["name"]]
    assert found == ["mine/alpaca.json"]


def test_file_is_uploaded_in_chunks_without_overwriting(page, root) -> None:
    assert put(page, "/api/uploads/a.jsonl?offset=0", b'{"a": 1}\n')[0] == 202
    assert not (root / "data/a.jsonl").exists()
    assert put(page, "/api/uploads/a.jsonl?offset=3&last=1", b"x")[0] == 409  # not at the end of the last chunk
    assert put(page, "/api/uploads/a.jsonl?offset=9&last=1", b'{"a": 2}\n') == (201, {"file": "data/a.jsonl"})
    assert (root / "data/a.jsonl").read_text() == '{"a": 1}\n{"a": 2}\n'
    assert sorted(path.name for path in (root / "data").iterdir()) == ["a.jsonl"]
    assert put(page, "/api/uploads/a.jsonl?offset=0&last=1", b"x")[0] == 409
    for name in ("..%2fb.jsonl", ".hidden.jsonl", "run.py", "a%00.jsonl", "x" * 200 + ".csv"):
        assert put(page, f"/api/uploads/{name}?offset=0&last=1", b"x")[0] in (404, 422), name


def test_upload_that_cannot_be_written_is_an_error_of_the_request(page, root) -> None:
    (root / "data").write_text("a file where the folder of uploads would be")
    status, body = put(page, "/api/uploads/a.jsonl?offset=0&last=1", b"x")
    assert (status, body["error"]["code"]) == (422, "not_written")


def test_upload_follows_no_link_out_of_the_roots(page, root, tmp_path) -> None:
    (root / "data").symlink_to(tmp_path)
    assert put(page, "/api/uploads/a.jsonl?offset=0&last=1", b"x")[0] == 422


def test_hub_is_searched_on_request(page, monkeypatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    asked = []

    def get(address, params, headers, timeout):
        asked.append((address.rpartition("/api/")[2], params["search"], timeout))
        result = [{"id": "org/model", "downloads": 5}, {"id": "org/other"}]
        return SimpleNamespace(raise_for_status=lambda: None, json=lambda: result)

    monkeypatch.setattr(hub, "get_session", lambda: SimpleNamespace(get=get))
    found = [{"name": "org/model", "downloads": 5}, {"name": "org/other", "downloads": None}]
    assert page.get("/api/hub?kind=model&q=mod")["found"] == found
    assert page.get("/api/hub?kind=dataset&q=x")["found"] == found
    assert asked == [("models", "mod", 5.0), ("datasets", "x", 5.0)]
    assert page.send("GET", "/api/hub?q=")[0] == 422


def test_search_gives_up_at_once_if_the_hub_is_unreachable(page, monkeypatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    begun_s = time.monotonic()
    status, _, text = page.send("GET", "/api/hub?kind=dataset&q=x")
    assert (status, json.loads(text)["error"]["code"]) == (502, "hub_unreachable")
    assert time.monotonic() - begun_s < 3

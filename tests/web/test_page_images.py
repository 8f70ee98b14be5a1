"""Images of datasets and predictions in the web UI: thumbnails for files below the roots only."""

from __future__ import annotations

import json
import os
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from urllib.parse import quote

import pytest

from burnish.data.images.sources import store_image
from burnish.loop.types import ContentPart, Example, Message
from burnish.serve.page.planner_process import question_of
from burnish.serve.page.routes.images import SIDE, Images
from burnish.serve.page.runs.predictions import predictions

pil = pytest.importorskip("PIL.Image")


def drawn(size=(800, 600), form="PNG", **options) -> bytes:
    file = BytesIO()
    pil.new("RGB", size, "red").save(file, form, **options)
    return file.getvalue()


@pytest.fixture
def outside(root: Path) -> Path:
    folder = root.parent / "private"
    folder.mkdir()
    (folder / "secret.png").write_bytes(drawn((10, 10)))
    return folder


def shown(page, path: str, more: str = ""):
    return page.send("GET", f"/api/images?path={quote(path)}{more}")


def test_image_below_a_root_is_shown_as_thumbnail(page, root) -> None:
    (root / "a.png").write_bytes(drawn())
    for path in ("a.png", str(root / "a.png"), "saves/../a.png"):
        status, headers, _ = shown(page, path)
        assert (status, headers["content-type"]) == (200, "image/jpeg"), path
        assert headers["x-content-type-options"] == "nosniff"
    body = Images(page.site)._body("a.png", False)
    assert pil.open(BytesIO(body)).size == (SIDE, SIDE * 3 // 4)
    assert Images(page.site)._body("a.png", True) == drawn()


def test_image_stored_as_bytes_in_a_dataset_is_found_by_hash(page, root, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    path = store_image(drawn((20, 10)))
    assert shown(page, path)[0] == 200
    other = tmp_path / "cache/images/ab/notes.png"
    other.parent.mkdir(parents=True)
    other.write_bytes(drawn((10, 10)))
    unknown = str(tmp_path / "cache/images/ab" / sha256(b"x").hexdigest())
    for hidden in (
        str(other),
        f"{path}/../../../../cache/images/ab/notes.png",
        unknown,
        str(tmp_path / "cache/images"),
    ):
        assert shown(page, hidden)[0] in (404, 422), hidden


@pytest.mark.parametrize("whole", ["", "&whole=1"])
def test_files_outside_the_roots_and_non_images_are_not_shown(page, root, outside, whole) -> None:
    (root / "link.png").symlink_to(outside / "secret.png")
    (root / "folder").symlink_to(outside)
    (root / "notes.png").write_text("SECRET")
    (root / "broken.png").write_bytes(drawn()[:40])
    (root / "empty.png").write_bytes(b"")
    (root / "a.eps").write_bytes(drawn(form="EPS"))
    os.mkfifo(root / "pipe.png")
    tricks = [
        str(outside / "secret.png"), "../private/secret.png", "link.png", "folder/secret.png", "", ".", "saves", "/",
        f"file://{outside}/secret.png", "http://127.0.0.1:1/a.png", "https://example.org/a.png",
        "data:image/png;base64,",
        "a\0.png", "x" * 5000, "notes.png", "broken.png", "empty.png", "a.eps", "pipe.png", "none.png",
        "saves/first/run.yaml", "/proc/self/environ", "/dev/zero", "~/secret.png", "%2e%2e/private/secret.png",
    ]  # fmt: skip
    for trick in tricks:
        status, headers, text = shown(page, trick, whole)
        assert status in (404, 422), trick
        assert headers["content-type"] == "application/json", trick
        assert "SECRET" not in text, trick
    assert shown(page, str(outside / "secret.png"))[2] == shown(page, str(outside / "secret.png"))[2]
    reported = {shown(page, str(outside / name))[2].replace(name, "") for name in ("secret.png", "none.png")}
    assert len(reported) == 1


def test_image_requires_sign_in_and_same_site(page, root) -> None:
    (root / "a.png").write_bytes(drawn())
    assert page.send("GET", "/api/images?path=a.png", Cookie="")[0] in (303, 401)
    assert page.send("GET", "/api/images?path=a.png", Origin="http://example.org")[0] == 403


def test_image_with_too_many_pixels_is_not_decoded(page, root) -> None:
    pil.new("1", (9000, 9000)).save(root / "large.png")
    assert shown(page, "large.png")[0] == 404


def test_predictions_are_paginated_with_their_images(page, root) -> None:
    folder = root / "saves/first"
    rows = [{"prompt": f"q{n}", "predict": "p", "label": "l", "images": [f"/data/{n}.png", 3]} for n in range(25)]
    lines = [json.dumps(row) for row in rows]
    (folder / "generated_predictions.jsonl").write_text("\n".join([*lines[:2], "no json", *lines[2:]]) + "\n{")
    (folder / "generated_predictions_b.jsonl").write_text('{"record": 1, "chosen": 0.5, "rejected": -1.5}\n')
    (folder / "generated_predictions.partial.jsonl").write_text("{}\n")
    run = page.id_of("first")
    first = page.get(f"/api/runs/{run}/predictions")
    assert first["files"] == ["generated_predictions.jsonl", "generated_predictions_b.jsonl"]
    assert [row["prompt"] for row in first["rows"]] == [f"q{n}" for n in range(19)]
    assert first["rows"][0]["images"] == ["/data/0.png"]
    rest = page.get(f"/api/runs/{run}/predictions?offset={first['next']}")
    assert [row["prompt"] for row in rest["rows"]] == [f"q{n}" for n in range(19, 25)]
    scores = page.get(f"/api/runs/{run}/predictions?file=generated_predictions_b.jsonl")
    assert (scores["rows"], scores["next"]) == ([{"record": 1, "chosen": 0.5, "rejected": -1.5}], None)
    assert predictions(folder, "../../x.jsonl")["file"] == "generated_predictions.jsonl"
    assert 'id="tab-predictions"' in page.send("GET", f"/runs/{run}")[2]
    assert predictions(root / "trl") == {"files": [], "file": "", "rows": [], "next": None}


def test_question_with_images_lists_them_for_the_page(tmp_path) -> None:
    from burnish.data.images.image_file import read_header

    (tmp_path / "a.png").write_bytes(drawn((30, 20)))
    image = ContentPart("image", read_header(tmp_path / "a.png"))
    messages = (Message("user", (image, ContentPart("text", "What?"))), Message("assistant", "A square."))
    result = question_of(Example(messages=messages))
    named = {"path": str(tmp_path / "a.png"), "name": "a.png", "width": 30, "height": 20}
    assert (result["user"], result["answer"], result["images"]) == ("What?", "A square.", [named])
    result = question_of(Example(messages=(*messages, Message("user", "Sure?"), Message("assistant", "Yes."))))
    assert result["images"] == []
    assert result["before"][0] == {"role": "user", "content": "What?", "images": [named]}

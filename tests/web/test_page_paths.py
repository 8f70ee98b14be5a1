"""Paths below the roots that lead outside: links, dataset descriptions, adapters that name their base, images of
records, tasks; and malformed text in requests and folders.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from urllib.parse import quote

import pytest
import torch
from transformers import AutoTokenizer

import burnish
from burnish.adapters.peft import PeftAdapter, PeftOptions, folder_problems
from burnish.checkpoint.checkpoint import Checkpoints
from burnish.config.errors import UserError
from burnish.data.chat.choose import load_template
from burnish.data.images.image_file import BadImage
from burnish.data.images.sources import MediaReader
from burnish.data.options import DataOptions
from burnish.data.rows.encode import encode_rows
from burnish.data.stats import DataStats
from burnish.models.options import ModelOptions
from burnish.models.source import adapter_folders, find_source
from burnish.run.plan.options import RunOptions
from burnish.run.recovery.resume import checkpoint_to_resume
from burnish.serve.eval.local_tasks import local_tasks
from burnish.utils.files import ROOTS

MODEL = Path(burnish.__file__).parent / "demo" / "model"
DEEP = b"[" * 200_000


@pytest.fixture
def outside(root: Path) -> Path:
    folder = root.parent / "private"
    shutil.copytree(MODEL, folder / "model")
    (folder / "secret.json").write_text('[{"instruction": "q", "output": "SECRET"}]')
    (folder / "template.jinja").write_text("SECRET{% for m in messages %}{{ m.content }}{% endfor %}")
    return folder


@pytest.fixture
def below(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Set the environment of a process that the page has started."""
    monkeypatch.setenv(ROOTS, str(root))
    return root


# --- started processes ------------------------------------------------------------------------------------------------


def test_page_jobs_do_not_open_a_model_outside_the_roots(below, outside) -> None:
    with pytest.raises(UserError, match="the folders that the web UI may read"):
        find_source(str(outside / "model"), ModelOptions())
    with pytest.raises(UserError, match="the folders that the web UI may read"):
        adapter_folders(ModelOptions(adapter_name_or_path=[str(outside / "model")]))
    shutil.copytree(MODEL, below / "model")
    assert find_source(str(below / "model"), ModelOptions()).folder == below / "model"


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer.json", "model.safetensors", "deep/x.jinja"])
def test_model_link_out_of_the_roots_is_not_followed(below, outside, name) -> None:
    shutil.copytree(MODEL, below / "model")
    link = below / "model" / name
    link.parent.mkdir(exist_ok=True)
    link.unlink(missing_ok=True)
    link.symlink_to(outside / "template.jinja")
    with pytest.raises(UserError, match=Path(name).name):
        find_source(str(below / "model"), ModelOptions())


@pytest.mark.parametrize(
    "named",
    [{"peft_type": "SHADOW", "shadow_model": "{}/model"},
     {"peft_type": "MULTITASK_PROMPT_TUNING", "prompt_tuning_init_state_dict_path": "{}/model/model.safetensors"},
     {"peft_type": "PROMPT_TUNING", "tokenizer_name_or_path": "../private/model"},
     {"peft_type": "XLORA", "adapters": {"0": "link/model"}}],
    ids=lambda named: named["peft_type"],
)  # fmt: skip
def test_config_of_an_adapter_names_no_file_outside(below, outside, named, monkeypatch) -> None:
    monkeypatch.chdir(below)
    (below / "link").symlink_to(outside)
    text = json.dumps({**named, "base_model_name_or_path": "model"}).replace("{}", str(outside))
    (below / "adapter").mkdir()
    (below / "adapter/adapter_config.json").write_text(text)
    assert "the folders that the web UI may read" in str(folder_problems(below / "adapter")[0])
    options = PeftOptions(peft_config=str(below / "adapter"))
    assert "the folders that the web UI may read" in str(PeftAdapter(options).check(torch.nn.Linear(1, 1))[0])


def test_model_with_internal_links_is_opened(below) -> None:
    """The hub cache has this layout."""
    shutil.copytree(MODEL, below / "blobs")
    (below / "model").mkdir()
    for file in (below / "blobs").iterdir():
        (below / "model" / file.name).symlink_to(f"../blobs/{file.name}")
    assert find_source(str(below / "model"), ModelOptions()).folder == below / "model"


def test_tokenized_rows_outside_are_not_read_through_a_link(below, outside) -> None:
    (outside / "train").mkdir()
    (below / "rows/train").mkdir(parents=True)
    (below / "rows/train/rows.arrow").symlink_to(outside / "train")
    with pytest.raises(UserError, match="the folders that the web UI may read"):
        encode_rows(
            [], lambda options: ([], DataStats()), DataStats(), fingerprint={},
            options=DataOptions(tokenized_path=str(below / "rows")),
        )  # fmt: skip


@pytest.mark.parametrize("requested", [True, False])
def test_checkpoint_outside_is_not_read_through_a_link(below, outside, requested) -> None:
    Checkpoints(below / "run", in_background=False).save(2, {})
    (below / "run/checkpoint-2/link").symlink_to(outside / "secret.json")
    words = {"resume_from_checkpoint": str(below / "run/checkpoint-2")} if requested else {}
    options = RunOptions(output_dir=str(below / "run"), stage="sft", do_train=True, **words)
    with pytest.raises(UserError, match="the folders that the web UI may read"):
        checkpoint_to_resume(options)


@pytest.mark.parametrize("spelling", ["{}", "file://{}", "link/a.png"])
def test_record_cannot_name_an_image_outside(below, outside, spelling) -> None:
    from PIL import Image

    Image.new("RGB", (4, 4)).save(outside / "a.png")
    (below / "link").symlink_to(outside)
    with pytest.raises(BadImage, match="web UI"):
        MediaReader((below,)).image(spelling.format(outside / "a.png"), "images[0]")
    with pytest.raises(BadImage, match="web UI"):  # nor does the message reveal whether the file exists
        MediaReader((below,)).image(spelling.format(outside / "a.png").replace("a.png", "none.png"), "images[0]")
    with pytest.raises(BadImage, match="was not found"):
        MediaReader((below,)).image("none.png", "images[0]")


def test_page_jobs_do_not_read_a_template_outside_the_roots(below, outside) -> None:
    options = RunOptions(template=str(outside / "template.jinja"))
    with pytest.raises(UserError, match="the folders that the web UI may read"):
        load_template(options, AutoTokenizer.from_pretrained(MODEL))


@pytest.mark.parametrize("task", ["x/../../../private/mine_dev", "linked_dev", "folder_dev"])
def test_eval_task_opens_no_files_outside(below, outside, task) -> None:
    for folder in (outside / "mine/dev", below / "tasks/x", below / "tasks/folder/dev"):
        folder.mkdir(parents=True)
    (outside / "mine/dev/s_dev.csv").write_text("SECRET,a,b,c,d,A\n")
    (below / "tasks/linked").symlink_to(outside / "mine")
    (below / "tasks/folder/dev/s_dev.csv").symlink_to(outside / "mine/dev/s_dev.csv")
    with pytest.raises(UserError, match="the folders that the web UI may read"):
        local_tasks(task, below / "tasks", "en", 0, False)


@pytest.mark.slow
@pytest.mark.run
def test_linked_template_is_not_shown_by_the_form(page, root, outside) -> None:
    shutil.copytree(MODEL, root / "model")
    (root / "model/chat_template.jinja").unlink(missing_ok=True)
    (root / "model/chat_template.jinja").symlink_to(outside / "template.jinja")
    (root / "rows.json").write_text('[{"instruction": "q", "output": "a"}]')
    values = {"model_name_or_path": "model", "dataset": "rows.json", "dataset_dir": ".", "output_dir": "saves/z"}
    text = page.send("POST", "/api/check", {"values": values})[2]
    assert "SECRET" not in text
    assert "a different web_roots" in text


# --- the page itself --------------------------------------------------------------------------------------------------


def test_dataset_info_reveals_nothing_about_an_outside_file(page, root, outside) -> None:
    (root / "data").mkdir()
    (root / "data/here.jsonl").write_text('{"text": "x"}\n')
    (root / "data/linked.jsonl").symlink_to(outside / "secret.json")
    entries = {"here": "here.jsonl", "far": str(outside / "secret.json"), "up": "../../private/secret.json",
               "nul": "a\0b", "long": "x" * 5000}  # fmt: skip
    info = {name: {"file_name": file} for name, file in entries.items()}
    assert page.send("PUT", "/api/uploads/dataset_info.json?last=1", json.dumps(info).encode())[0] == 201
    result = {one["name"]: one for one in page.get("/api/datasets")["datasets"]}
    assert result["here"]["bytes"] == 14
    assert all("bytes" not in result.get(name, {}) for name in ("far", "up", "nul", "long", "data/linked.jsonl"))
    assert "private" not in json.dumps(result)


def test_deeply_nested_dataset_info_hides_no_other_dataset(page, root) -> None:
    (root / "rows.jsonl").write_text('{"text": "x"}\n')
    assert page.send("PUT", "/api/uploads/dataset_info.json?last=1", DEEP)[0] == 201
    assert [one["name"] for one in page.get("/api/datasets")["datasets"]] == ["rows.jsonl"]


def test_model_that_links_out_of_the_roots_is_not_listed(page, root, outside) -> None:
    (root / "models").mkdir()
    (root / "models/mine").symlink_to(outside / "model")
    shutil.copytree(MODEL, root / "models/ours")
    assert [one["path"] for one in page.get("/api/models")["models"]] == ["models/ours"]


@pytest.mark.parametrize("folder", ["x/a\0b/c", "\ud800/x", "x" * 5000, 7, "link/x"])
def test_invalid_trash_entry_hides_no_other(page, root, folder) -> None:
    (root / "link").symlink_to(root / "nowhere")
    run = page.id_of("first")
    assert page.send("DELETE", f"/api/runs/{run}")[0] == 200
    odd = root / ".burnish-trash" / "0000"
    (odd / "run").mkdir(parents=True)
    place = f"{root}/{folder}" if isinstance(folder, str) else folder
    (odd / "entry.json").write_text(json.dumps({"folder": place, "name": "odd"}))
    listed = page.get("/api/trash")["runs"]
    assert "first" in [one["name"] for one in listed]
    assert page.send("POST", "/api/trash/0000")[0] in (200, 404, 409)
    assert not (root / "nowhere").exists()
    good = next(one["id"] for one in listed if one["name"] == "first")
    assert page.send("POST", f"/api/trash/{good}")[0] == 200
    assert page.send("DELETE", "/api/trash")[0] == 200


def test_non_string_values_are_rejected_or_kept(page, root) -> None:
    run = page.id_of("first")
    lone = b'{"name": "\\ud800", "notes": "\\udfff", "tags": ["\\ud800"]}'
    assert page.send("PUT", f"/api/runs/{run}/label", lone)[0] in (200, 400, 422)
    assert page.send("PUT", "/api/chats/x", b'{"messages": ["\\ud800"]}')[0] in (200, 400, 422)
    for path in ("/api/runs", f"/runs/{run}", "/runs", f"/api/runs/{run}/report"):
        assert page.send("GET", path)[0] == 200, path
    for number in ("²", "9" * 5000, "-1", "1e3"):
        assert page.send("GET", f"/api/runs/{run}/held-out?number={quote(number)}")[0] == 422


@pytest.mark.slow
@pytest.mark.run
@pytest.mark.parametrize("folder", ["/a\0b", "\ud800", "x" * 5000])
def test_invalid_folder_in_launch_record_is_not_a_server_error(page, root, folder) -> None:
    sent = root / "sent"
    sent.mkdir()
    (sent / "run.yaml").write_text("model_name_or_path: m\ndataset: d\noutput_dir: sent\n")
    launch = json.loads((root / "saves/first/launch.json").read_text())
    (sent / "launch.json").write_text(json.dumps({**launch, "folder": folder}))
    run = page.id_of("sent")
    assert page.send("POST", f"/api/runs/{run}/continue", {})[0] in (202, 409, 422)
    assert page.send("GET", f"/api/runs/{run}/held-out")[0] in (200, 422, 409)

"""Models and datasets from hubs, through the hubs' own clients, with a local server.

The clients read their address at import, so each run is a new process.
"""

import json
import os
import shutil
import subprocess
import sys
from contextlib import ExitStack, nullcontext

import huggingface_hub
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from burnish.config.errors import UserError
from burnish.inference.images.family import load_family
from burnish.models.fingerprint import adapters_fingerprint, model_fingerprint
from burnish.models.load import load_config, load_model
from burnish.models.options import ModelOptions
from burnish.models.reward_files import WEIGHT, head_folders, read_head, write_value_head
from burnish.models.save import save_model
from burnish.models.source import PROCESSOR_FILES, adapter_folders, find_source
from burnish.models.tokens import load_tokenizer
from image_runs import save_model as save_image_model
from loopback_hub import COMMIT, TOKEN, hub
from small_run import as_arguments, make_model, records

pytestmark = pytest.mark.run


@pytest.fixture(scope="module")
def repositories(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    make_model(folder / "model")
    (folder / "rows").mkdir()
    (folder / "rows" / "train.jsonl").write_text("\n".join(map(json.dumps, records(8))))
    return {"private_model": folder / "model", "org_rows": folder / "rows"}


def run(folder, environment, command="train", **overrides):
    """Train one step with the hub's model and dataset. Return exit status and output."""
    options = {
        "model_name_or_path": "private/model", "dataset": "org/rows", "dataset_dir": "ONLINE", "cutoff_len": 128,
        "finetuning_type": "lora", "lora_rank": 2, "max_steps": 1, "per_device_train_batch_size": 2, "use_cpu": True,
        "output_dir": folder / "out", "report_to": "none", "plot_loss": False,
        "overwrite_output_dir": True, **overrides,
    }  # fmt: skip
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "MODELSCOPE", "USE_MODELSCOPE"))}
    environment = {**clean, "HF_HOME": str(folder / "cache"), "MODELSCOPE_CACHE": str(folder / "ms"),
                   "BURNISH_CACHE": str(folder / "rows"), "no_proxy": "127.0.0.1", **environment}  # fmt: skip
    argv = [sys.executable, "-m", "burnish", command, *as_arguments(options)]
    process = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=300)
    return process.returncode, process.stdout + process.stderr


@pytest.mark.slow
def test_private_model_and_dataset_are_downloaded_and_reused_offline(tmp_path, repositories):
    with hub(**repositories) as (address, requested):
        code, message = run(tmp_path, {"HF_ENDPOINT": address}, hf_hub_token=TOKEN, model_revision="v2")
        assert code == 0, message
        assert "GET /private/model/resolve/" in " ".join(requested)
        assert "/datasets/org/rows/resolve/" in " ".join(requested)
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()
    code, message = run(tmp_path, {"HF_ENDPOINT": address, "HF_HUB_OFFLINE": "1"}, model_revision="v2")
    assert code == 0, message


def find(address, monkeypatch, name, **options):
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setenv("HF_ENDPOINT", address)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return find_source(name, ModelOptions(model_name_or_path=name, **options))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("private/model", {}, "set hf_hub_token to your token"),
        ("private/model", {"hf_hub_token": TOKEN, "model_revision": "v9"}, '"model_revision" v9'),
        ("private/model", {"hf_hub_token": TOKEN, "model_revision": "my branch"}, '"model_revision" my branch'),
        ("org/none", {}, "has no such model, or you have no access to it"),
    ],
)
def test_failed_download_is_reported_with_its_reason(
    tmp_path, monkeypatch, repositories, name, options, message
):  # fmt: skip
    with hub(**repositories) as (address, _), pytest.raises(UserError, match=message):
        find(address, monkeypatch, name, cache_dir=str(tmp_path), **options)


@pytest.mark.parametrize("token", [TOKEN, ""])
def test_token_of_the_environment_is_used(tmp_path, monkeypatch, repositories, token):
    """huggingface_hub reads it as well."""
    monkeypatch.setenv("HF_TOKEN", token)
    monkeypatch.setenv("HF_TOKEN_PATH", str(tmp_path / "none"))
    with (
        hub(**repositories) as (address, _),
        nullcontext() if token else pytest.raises(UserError, match="hf_hub_token"),
    ):
        assert find(address, monkeypatch, "private/model", cache_dir=str(tmp_path)).folder is None


def test_revision_may_contain_a_slash(tmp_path, monkeypatch, repositories):
    """The hub names pull requests in this way."""
    with hub(**repositories) as (address, _):
        options = {"hf_hub_token": TOKEN, "model_revision": "refs/pr/1", "cache_dir": str(tmp_path)}
        assert find(address, monkeypatch, "private/model", **options).folder is None


def test_cached_config_alone_does_not_count_as_cached_model(tmp_path, monkeypatch, repositories):
    """``explain`` downloads the config, the next run downloads the rest, and the one after it finds all files."""
    snapshot = tmp_path / "models--private--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (tmp_path / "models--private--model" / "refs").mkdir()
    (tmp_path / "models--private--model" / "refs" / "main").write_text(COMMIT)
    config, weights = (repositories["private_model"] / name for name in ("config.json", "model.safetensors"))
    with hub(**repositories) as (address, _):
        shutil.copy(config, snapshot)
        options = {"hf_hub_token": TOKEN, "cache_dir": str(tmp_path)}
        assert find(address, monkeypatch, "private/model", **options).folder is None
        shutil.copy(weights, snapshot)
        assert find(address, monkeypatch, "private/model", **options).folder == snapshot


@pytest.fixture
def downloads(monkeypatch, tmp_path):
    """A function that serves repositories to huggingface_hub in this process, and returns options with its cache."""
    with ExitStack() as stack:

        def served(**repositories):
            address, _ = stack.enter_context(hub(**repositories))
            monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
            monkeypatch.setenv("HF_ENDPOINT", address)
            monkeypatch.setenv("no_proxy", "127.0.0.1")
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
            monkeypatch.setattr(constants, "ENDPOINT", address)
            monkeypatch.setattr(huggingface_hub.hf_api.api, "endpoint", address)  # read when it was imported
            url = f"{address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
            monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
            return {"cache_dir": str(tmp_path / "hub_cache")}

        yield served


def test_adapter_is_downloaded_with_its_reward_head_and_tokenizer(downloads, tmp_path):
    """They are used if the adapter is a local folder."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    for name in (
        "adapter_config.json",
        "tokenizer.json",
        "chat_template.jinja",
        "merged_adapters.json",
        "optimizer.pt",
    ):
        (adapter / name).write_text("{}")
    write_value_head(adapter, {WEIGHT: torch.ones(1, 4)})
    options = ModelOptions(adapter_name_or_path=["org/adapter"], **downloads(org_adapter=adapter))
    (folder,) = adapter_folders(options)
    assert {path.name for path in folder.iterdir()} == {path.name for path in adapter.iterdir()} - {"optimizer.pt"}
    assert adapters_fingerprint(["org/adapter"], options, "") == adapters_fingerprint([str(adapter)], options, "")


@pytest.mark.parametrize("is_classifier", [False, True])
def test_reward_head_of_a_model_on_the_hub_is_found_before_the_model_is_loaded(downloads, tmp_path, is_classifier):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["LlamaFor" + "SequenceClassification" * is_classifier]})
    )
    save_file({"score.weight": torch.ones(1, 4)} if is_classifier else {}, folder / "model.safetensors")
    if not is_classifier:
        write_value_head(folder, {WEIGHT: torch.ones(1, 4)})
    options = ModelOptions(model_name_or_path="org/model", **downloads(org_model=folder))
    weights, file = read_head(head_folders(options, []))
    assert weights[WEIGHT].tolist() == [[1] * 4]
    assert (file.parent / "model.safetensors").exists() == is_classifier  # large, and loaded later


@pytest.fixture(scope="module")
def vision_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    save_image_model(folder, "llava_onevision")
    return folder / "llava_onevision"


@pytest.mark.slow
def test_image_settings_of_a_model_do_not_depend_on_the_cache(downloads, vision_model):
    options = ModelOptions(model_name_or_path="org/model", **downloads(org_model=vision_model))
    local = ModelOptions(model_name_or_path=str(vision_model))
    families = [load_family(one, load_config(one), load_tokenizer(one)) for one in (options, local)]
    assert families[0].identity == families[1].identity


def test_processor_files_of_a_model_on_the_hub_are_saved_with_the_trained_model(downloads, vision_model, tmp_path):
    options = ModelOptions(model_name_or_path="org/model", **downloads(org_model=vision_model))
    save_model(load_model(options), None, tmp_path / "out")
    names = [name for name in PROCESSOR_FILES if (vision_model / name).exists()]
    assert names
    assert all((tmp_path / "out" / name).read_text() == (vision_model / name).read_text() for name in names)


def test_tokenizer_with_own_code_on_the_hub_is_rejected(downloads, repositories, tmp_path):
    """transformers would silently use another class."""
    folder = tmp_path / "model"
    shutil.copytree(repositories["private_model"], folder)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    own = {"auto_map": {"AutoTokenizer": ["tokenization_own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | own))
    with pytest.raises(UserError, match=r"tokenization_own\.Own"):
        load_tokenizer(ModelOptions(model_name_or_path="org/model", **downloads(org_model=folder)))


def test_fingerprint_of_a_model_on_the_hub_does_not_depend_on_the_cache(downloads, tmp_path, repositories):
    folder = tmp_path / "model"
    shutil.copytree(repositories["private_model"], folder)
    for name in ("chat_template.jinja", "merges.txt", "modeling_own.py"):
        (folder / name).write_text("#")
    options = ModelOptions(model_name_or_path="org/model", trust_remote_code=True, **downloads(org_model=folder))
    before = model_fingerprint("org/model", options, "reward_model", reads_text=True)
    huggingface_hub.snapshot_download("org/model", cache_dir=options.cache_dir)
    assert before == model_fingerprint("org/model", options, "reward_model", reads_text=True)
    assert before == model_fingerprint(str(folder), options, "reward_model", reads_text=True)


# --- ModelScope -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_modelscope_model_is_downloaded_and_then_cached(tmp_path, repositories):
    pytest.importorskip("modelscope")
    rows = repositories["org_rows"] / "train.jsonl"
    options = {"dataset": rows, "dataset_dir": tmp_path}
    with hub(**repositories) as (address, requested):
        scope = {"USE_MODELSCOPE_HUB": "1", "MODELSCOPE_ENDPOINT": address, "MODELSCOPE_DOMAIN": address}
        code, message = run(tmp_path, scope, "explain", ms_hub_token=TOKEN, **options)
        assert code == 0, message
        assert not list((tmp_path / "ms").rglob("*.safetensors"))  # planning needs no weights
        code, message = run(tmp_path, scope, ms_hub_token=TOKEN, **options)
        assert code == 0, message
        assert any("/api/v1/models/private/model" in path for path in requested)
        code, message = run(tmp_path, scope, ms_hub_token=TOKEN, model_revision="v9", **options)
        assert code == 2, message
        assert "asked for: v9" in message
    code, message = run(tmp_path, {**scope, "HF_HUB_OFFLINE": "1"}, ms_hub_token=TOKEN, **options)
    assert code == 0, message


def test_missing_modelscope_is_reported_with_its_extra(monkeypatch):
    monkeypatch.setenv("USE_MODELSCOPE_HUB", "1")
    monkeypatch.setitem(sys.modules, "modelscope_hub", None)
    monkeypatch.setitem(sys.modules, "modelscope_hub.errors", None)
    with pytest.raises(UserError, match=r"burnish\[modelscope\]"):
        find_source("org/model", ModelOptions(model_name_or_path="org/model"))

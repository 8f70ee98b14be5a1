"""A run sharded over two processes equals one process up to rounding; any number of processes reads its checkpoints."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

import burnish.run.build  # noqa: F401 - before two processes are forked, not in each of them
from burnish.cli import main
from burnish.parallel.checks import check_parallel, parallel_notes
from burnish.parallel.fsdp.parallel import replace_parameters
from burnish.parallel.fsdp.settings import FsdpSettings, fsdp_notes, fsdp_settings, uses_fsdp
from burnish.parallel.options import ParallelOptions
from burnish.parallel.selection import parallel_name
from representative import collected_values
from run_outputs import weights_in
from small_run import as_arguments, make_workspace
from two_processes import in_two_processes

pytestmark = pytest.mark.run

KINDS = {
    "full": {},
    "lora": {"finetuning_type": "lora", "lora_rank": 4, "lora_target": "all"},
    "checkpointed": {"gradient_checkpointing": True, "max_grad_norm": 0.05},
}


def run_all(commands):
    for argv in commands:
        assert main(argv) == 0


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    workspace = make_workspace(folder, max_steps=6, save_steps=3, plot_loss=False, val_size=0.2, eval_strategy="epoch")
    two = {**workspace, "per_device_train_batch_size": 1, "ddp_backend": "gloo", "fsdp": "full_shard"}

    def argv(workspace, place):
        return ["train", *as_arguments({**workspace, "output_dir": str(folder / place)})]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BURNISH_CACHE", str(folder / "cache"))
        kinds = {"full", *collected_values(request, "kind")}
        run_all([argv({**workspace, **KINDS[kind]}, f"one/{kind}") for kind in sorted(kinds)])
        keep_first_half(folder / "one/full", folder / "one then two")
        in_two_processes(
            run_all,
            [
                *(argv({**two, **KINDS[kind]}, f"two/{kind}") for kind in sorted(kinds)),
                argv(two, "one then two"),
            ],
        )  # fmt: skip
        for kind in sorted(kinds & {"full", "lora"}):
            keep_first_half(folder / "two" / kind, folder / f"two then one {kind}")
            run_all([argv({**workspace, **KINDS[kind]}, f"two then one {kind}")])
    return folder


def keep_first_half(run, target):
    target.mkdir()
    shutil.copytree(run / "checkpoint-3", target / "checkpoint-3")


def same(ours, theirs):
    ours, theirs = weights_in(ours), weights_in(theirs)
    for name, weight in theirs.items():  # sums over ranks are added in another order
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-5)
    assert ours.keys() == theirs.keys()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_two_fsdp_processes_give_the_weights_of_one(folder, kind):
    same(folder / "two" / kind, folder / "one" / kind)
    if kind == "lora":
        assert (folder / "two/lora/checkpoint-6/adapter_model.safetensors").is_file()
    first, second = (json.loads((folder / n / kind / "eval_results.json").read_text()) for n in ("one", "two"))
    assert first["eval_loss"] == pytest.approx(second["eval_loss"], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixed", "alone"),
    [
        ("one then two", "one/full"),
        ("two then one full", "one/full"),
        ("two then one lora", "one/lora"),
    ],
)
def test_run_resumes_with_other_number_of_processes_and_other_engine(folder, mixed, alone):
    assert "checkpoint-3" in (folder / mixed / "run.log").read_text()
    same(folder / mixed, folder / alone)


@pytest.mark.slow
def test_each_process_writes_its_shard_and_an_index_lists_them(folder):
    checkpoint = folder / "two/full/checkpoint-6"
    for stem in ("model", "optimizer"):
        assert not (checkpoint / f"{stem}.safetensors").exists()
        index = json.loads((checkpoint / f"{stem}.shards.json").read_text())["tensors"]
        files = {name for entry in index.values() for name, _, _ in entry["pieces"]}
        assert files == {f"{stem}-0000{rank}-of-00002.safetensors" for rank in (1, 2)}
        assert files <= json.loads((checkpoint / "manifest.json").read_text())["files"].keys()
    sizes = [(checkpoint / f"model-0000{rank}-of-00002.safetensors").stat().st_size for rank in (1, 2)]
    assert max(sizes) < 1.2 * min(sizes)


@pytest.mark.slow
def test_damaged_shard_is_detected(folder, tmp_path):
    from burnish.checkpoint.manifest import integrity_errors

    shutil.copytree(folder / "two/full/checkpoint-6", tmp_path / "checkpoint-6")
    shard = tmp_path / "checkpoint-6" / "optimizer-00002-of-00002.safetensors"
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    assert integrity_errors(tmp_path / "checkpoint-6") == [f"{shard.name} is corrupted (checksum mismatch)"]


# --- options ----------------------------------------------------------------------------------------------------------


def settings(**options):
    return fsdp_settings(ParallelOptions(**options))


def test_fsdp_keywords_of_all_versions_keep_their_meaning(tmp_path, monkeypatch):
    assert (
        settings(fsdp=True) == settings(fsdp="full_shard auto_wrap") == settings(fsdp=["full_shard"]) == FsdpSettings()
    )
    assert settings(fsdp="shard_grad_op") == settings(fsdp=True, fsdp_config={"fsdp_sharding_strategy": 2})
    assert not settings(fsdp="shard_grad_op").reshards
    assert not settings(fsdp=True, fsdp_config={"reshard_after_forward": "false"}).reshards
    assert settings(fsdp="full_shard offload").offloads
    assert settings(fsdp=True, fsdp_config={"fsdp_offload_params": True}).offloads
    assert settings(fsdp="hybrid_shard").copies == 0
    (tmp_path / "fsdp.json").write_text('{"transformer_layer_cls_to_wrap": ["A", "B"], "min_num_params": 9}')
    named = settings(fsdp=True, fsdp_config=str(tmp_path / "fsdp.json"))
    assert named == FsdpSettings(layer_classes=("A", "B"))
    for name, value in {"ACCELERATE_USE_FSDP": "true", "FSDP_RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP",
                        "FSDP_TRANSFORMER_CLS_TO_WRAP": "A,B", "FSDP_OFFLOAD_PARAMS": "false"}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    assert settings() == FsdpSettings(reshards=False, layer_classes=("A", "B"))
    assert parallel_name(ParallelOptions()) == "fsdp"


@pytest.mark.parametrize("words", ["no_shard", ["no_shard"], ["no_shard", "auto_wrap"]])
def test_no_shard_disables_fsdp(words):
    """Options from YAML and flags are lists of words."""
    assert not uses_fsdp(ParallelOptions(fsdp=words))


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("min_num_params", "many", "an integer of at least 0"),
        ("dp_replicate_size", 0, "an integer of at least 1"),
        ("dp_replicate_size", 2.5, "an integer of at least 1"),
        ("reshard_after_forward", "maybe", "true or false"),
        ("activation_checkpointing", "yess", "true or false"),
        ("sharding_strategy", "FULL_SHRAD", "one of full_shard"),
        ("transformer_layer_cls_to_wrap", 5, "a class name"),
    ],
)
def test_value_that_a_setting_of_fsdp_cannot_have_is_rejected(monkeypatch, key, value, expected):
    (problem,) = check_parallel(ParallelOptions(use_cpu=True, fsdp=True, fsdp_config={key: value}))
    assert f'"{key}" must be {expected}' in problem.what
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setenv(f"FSDP_{key.upper()}", "None")  # as accelerate writes settings without a value
    assert not check_parallel(ParallelOptions(use_cpu=True))


def test_fsdp_keys_without_effect_are_reported_and_unknown_ones_rejected(tmp_path):
    old = {"fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_version": 1}
    notes = list(fsdp_notes(ParallelOptions(fsdp=True, fsdp_config=old)))
    assert len(notes) == 2
    assert "reshard_after_forward: true" in notes[1]
    assert not list(fsdp_notes(ParallelOptions()))
    assert any(
        "offload has no effect" in note for note in parallel_notes(ParallelOptions(use_cpu=True, fsdp="offload"))
    )

    def problems(**options):
        return [str(problem) for problem in check_parallel(ParallelOptions(use_cpu=True, **options))]

    assert not problems(fsdp=True, fsdp_config=old)
    assert 'Did you mean "full_shard"' in problems(fsdp="fullshard")[0]
    assert 'Did you mean "offload_params"' in problems(fsdp=True, fsdp_config={"offload_param": True})[0]
    assert "without" in problems(fsdp_config={"min_num_params": 1})[0]
    (tmp_path / "fsdp.json").write_text("{")
    assert "not JSON" in problems(fsdp=True, fsdp_config=str(tmp_path / "fsdp.json"))[0]
    assert "does not exist" in problems(fsdp=True, fsdp_config=str(tmp_path / "fsdp2.json"))[0]


def test_optimizer_with_states_of_full_weights_is_rejected():
    from burnish.config.errors import UserError

    weight = torch.nn.Parameter(torch.ones(4))
    with pytest.raises(UserError, match="Adagrad creates its states from full weights"):
        replace_parameters(torch.optim.Adagrad([weight]), {})


def test_optimizer_that_needs_full_weights_is_rejected_by_name():
    from burnish.run.plan.checks import check_sharded
    from burnish.run.plan.plan import RunOptions

    (problem,) = check_sharded(RunOptions(fsdp=True, use_badam=True))
    assert "badam requires unsharded weights" in str(problem)
    assert not list(check_sharded(RunOptions(fsdp=True)))
    assert not list(check_sharded(RunOptions(use_badam=True)))
    assert "torch_compile" in str(next(check_sharded(RunOptions(deepspeed="zero2", torch_compile=True))))


def test_a_scaled_loss_gives_the_same_weights_with_and_without_fsdp(tmp_path, monkeypatch):
    """float16 is used on GPUs only; here its loss scaling runs on the CPU."""
    monkeypatch.setattr("burnish.parallel.single.autocast_dtype", lambda options, device: torch.float16)
    for name, fsdp in (("plain", {}), ("sharded", {"fsdp": "full_shard"})):
        overrides = {"max_steps": 3, "fp16": True, "optim": "sgd", "learning_rate": 0.1, **fsdp}
        workspace = make_workspace(tmp_path / name, count=16, **overrides)
        assert main(["train", *as_arguments({**workspace, "output_dir": str(tmp_path / name / "run")})]) == 0
    plain, sharded = (weights_in(tmp_path / name / "run") for name in ("plain", "sharded"))
    assert plain.keys() == sharded.keys()
    for name, weight in plain.items():
        torch.testing.assert_close(sharded[name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("targets", ["norm", "embed_tokens,lm_head"])
def test_adapter_is_written_after_an_evaluation(tmp_path, targets):
    """After an evaluation, the weights of the root module, which an adapter may train in full, stay gathered."""
    for name, fsdp in (("plain", {}), ("sharded", {"fsdp": "full_shard"})):
        workspace = make_workspace(
            tmp_path / name, count=16, max_steps=2, optim="sgd", learning_rate=0.1, save_strategy="no", val_size=0.2,
            eval_strategy="epoch", additional_target=targets, **KINDS["lora"], **fsdp,
        )  # fmt: skip
        assert main(["train", *as_arguments({**workspace, "output_dir": str(tmp_path / name / "run")})]) == 0
    plain, sharded = (load_file(tmp_path / name / "run" / "adapter_model.safetensors") for name in ("plain", "sharded"))
    assert plain.keys() == sharded.keys()
    for name, weight in plain.items():
        torch.testing.assert_close(sharded[name], weight, rtol=1e-4, atol=1e-5)

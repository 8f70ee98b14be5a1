"""Runs as LLaMA-Factory users write them: a long command line, and YAML files of common kinds."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from PIL import Image
from safetensors import safe_open

from burnish.cli import main
from burnish.config.options import specs
from burnish.loop.state import TrainerState
from burnish.parallel.precision import has_fast_bfloat16
from burnish.run.plan.plan import RunOptions, aliases
from burnish.run.plan.unsupported import NO_EFFECT, UNSUPPORTED
from representative import representative_slow
from small_run import WALK_THROUGH, make_model, records

pytestmark = pytest.mark.run

SOURCE = Path(__file__).parents[2] / "src"
OUT = Path("saves/Qwen2-0.5B/full/train_test")
FILES = {
    "README.md", "all_results.json", "chat_template.jinja", "config.json", "eval_results.json",
    "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "train_results.json",
    "trainer_log.jsonl", "trainer_state.json", "training_eval_loss.png", "training_loss.png",
    # and those that only burnish writes
    "run.log", "run.yaml", "launch.json", "events.jsonl", "outcome.json",
}  # fmt: skip
RESULTS = {
    "epoch", "eval_loss", "eval_runtime", "eval_samples_per_second", "eval_steps_per_second", "num_input_tokens_seen",
    "total_flos", "train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second",
}  # fmt: skip
LOG_ROW = {
    "current_steps", "total_steps", "loss", "lr", "epoch", "percentage", "elapsed_time", "remaining_time", "throughput",
    "total_tokens", "grad_norm", "step_seconds", "tokens_per_second", "memory_bytes", "time",
}  # fmt: skip


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """Create the working folder: a bfloat16 model whose end token differs from the template's, and 1000 records."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    make_model(Path("models/Qwen2-0.5B"), end="<|endoftext|>", dtype="bfloat16")
    Path("data").mkdir()
    Path("data/alpaca_data_zh_51k.json").write_text(json.dumps(records(1000)))
    lines = [json.dumps({"text": f"{record['instruction']} {record['output']}. " * 3}) for record in records(30)]
    Path("data/plain.jsonl").write_text("\n".join(lines))
    entries = {
        "alpaca_zh": {"file_name": "alpaca_data_zh_51k.json"},
        "c4_demo": {"file_name": "plain.jsonl", "columns": {"prompt": "text"}},
    }
    Path("data/dataset_info.json").write_text(json.dumps(entries))
    zero = {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "zero_allow_untested_optimizer": True, "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0}, "zero_optimization": {"stage": 3, "overlap_comm": False},
    }  # fmt: skip
    Path("ds_z3_config.json").write_text(json.dumps(zero))
    return tmp_path


def as_mapping(argv):
    """Return the command line as the content of a YAML file."""
    return {name.removeprefix("--"): value for name, value in zip(argv[::2], argv[1::2], strict=True)}


def assert_outputs(steps, checkpoints, evaluations):
    """Check the files and keys of the output folder against those of LLaMA-Factory."""
    assert {path.name for path in OUT.iterdir() if path.is_file() and not path.name.startswith(".")} == FILES
    assert sorted(int(path.name.split("-")[1]) for path in OUT.glob("checkpoint-*")) == checkpoints
    state = TrainerState.load_from_json(str(OUT / "trainer_state.json"))
    assert state.global_step == state.max_steps == steps
    assert [entry["step"] for entry in state.log_history if "eval_loss" in entry] == evaluations
    assert json.loads((OUT / "all_results.json").read_text()).keys() == RESULTS
    rows = [json.loads(line) for line in (OUT / "trainer_log.jsonl").read_text().splitlines()]
    assert [row["current_steps"] for row in rows if "loss" in row] == sorted({*range(5, steps + 1, 5), steps})
    assert all(row.keys() == LOG_ROW for row in rows if "loss" in row)
    assert [row["current_steps"] for row in rows if "eval_loss" in row] == evaluations
    assert json.loads((OUT / "generation_config.json").read_text())["eos_token_id"] == [2, 0]  # im_end, endoftext
    trained_in = "BF16" if has_fast_bfloat16() else "F32"
    with safe_open(OUT / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {trained_in}  # noqa: SIM118
    assert "You are a helpful assistant" in (OUT / "chat_template.jinja").read_text()
    assert not [path for path in OUT.rglob("*") if path.suffix in (".bin", ".pt", ".pth", ".pkl")]
    for image in OUT.glob("*.png"):
        assert Image.open(image).size[0] > 300


@pytest.mark.slow
def test_walk_through_command_runs_unchanged(workspace):
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "burnish.train", *WALK_THROUGH.split()]
    assert subprocess.run(command, env=environment, check=False).returncode == 0
    assert_outputs(171, [100, 171], [100, 171])
    assert (OUT / "README.md").read_text().count("alpaca_zh")


SMALLER = {"max_samples": "60", "save_steps": "10", "eval_steps": "10", "badam_switch_interval": "3"}


@pytest.mark.parametrize("written_as", representative_slow(["yaml", "command", "json"], 1))
def test_walk_through_on_60_rows_runs_in_every_config_format(workspace, written_as):
    options = {**as_mapping(WALK_THROUGH.split()), **SMALLER}
    if written_as == "command":
        argv = [word for name, value in options.items() for word in (f"--{name}", value)]
    else:
        argv = [f"run.{written_as}"]
        Path(argv[0]).write_text(yaml.safe_dump(options) if written_as == "yaml" else json.dumps(options))
    assert main(["train", *argv]) == 0
    assert_outputs(12, [10, 12], [10, 12])


# --- config files -----------------------------------------------------------------------------------------------------

COMMON = """
model_name_or_path: models/Qwen2-0.5B
trust_remote_code: true
do_train: true
max_samples: 24
overwrite_cache: true
preprocessing_num_workers: 16
output_dir: saves/out
logging_steps: 10
save_steps: 500
plot_loss: true
overwrite_output_dir: true
save_only_model: false
report_to: none  # choices: [none, wandb, tensorboard, swanlab, mlflow]
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-4
num_train_epochs: 1.0
lr_scheduler_type: cosine
warmup_ratio: 0.1
ddp_timeout: 180000000
resume_from_checkpoint: null
"""
SFT = "stage: sft\ndataset: alpaca_zh\ntemplate: qwen3_nothink\ncutoff_len: 256\n"
EVALUATED = "val_size: 0.1\nper_device_eval_batch_size: 1\neval_strategy: steps\neval_steps: 500\n"
LORA = "finetuning_type: lora\nlora_rank: 8\nlora_target: all\n"
QUICK = ("full", "lora", "galore", "llama pro", "lora, as versions 0.7 and 0.8 wrote it")
KINDS = {
    "full": (SFT + "finetuning_type: full\nbf16: true\ndeepspeed: ds_z3_config.json\n", "model"),
    "full, evaluated under an old name": (
        SFT
        + "finetuning_type: full\npure_bf16: true\nwarmup_steps: 0.1\n"
        + EVALUATED.replace("eval_s", "evaluation_s", 1),
        "model",
    ),
    "lora": (SFT + LORA + "bf16: true\n", "adapter_model"),
    "lora on plain text": (LORA + "stage: pt\ndataset: c4_demo\ncutoff_len: 64\nbf16: true\n", "adapter_model"),
    "lora of two targets": (SFT + "finetuning_type: lora\nlora_target: q_proj,v_proj\nfp16: true\n" + EVALUATED,
                            "adapter_model"),
    "lora+": (SFT + "finetuning_type: lora\nlora_target: all\nloraplus_lr_ratio: 16.0\nbf16: true\n" + EVALUATED,
              "adapter_model"),
    "pissa": (SFT + LORA + "pissa_init: true\npissa_iter: 16\npissa_convert: true\nbf16: true\n", "adapter_model"),
    "freeze": (SFT + "finetuning_type: freeze\nfreeze_trainable_layers: 1\nfreeze_trainable_modules: all\nfp16: true\n",
               "model"),
    "badam": (SFT + "finetuning_type: full\nuse_badam: true\nbadam_mode: layer\nbadam_switch_mode: ascending\n"
              "badam_switch_interval: 50\nbadam_verbose: 2\n# deepspeed: ds_z3_config.json\n" + EVALUATED, "model"),
    "galore": (SFT + "finetuning_type: full\nuse_galore: true\ngalore_target: mlp,self_attn\ngalore_rank: 8\n"
               "galore_layerwise: true\n"
               "galore_scale: 2.0\npure_bf16: true\n" + EVALUATED, "model"),
    "apollo": (SFT + "finetuning_type: full\nuse_apollo: true\napollo_layerwise: true\napollo_target: all\n"
               "apollo_rank: 8\napollo_scale: 32.0\napollo_scale_type: channel\npure_bf16: true\n", "model"),
    "llama pro": (SFT + "finetuning_type: freeze\nfreeze_trainable_layers: 1\nfreeze_trainable_modules: all\n"
                  "use_llama_pro: true\nbf16: true\n", "model"),
    "oft": (SFT + "finetuning_type: oft\noft_block_size: 8\noft_target: all\nbf16: true\n", "adapter_model"),
    "dft": (SFT + "finetuning_type: full\nuse_dft_loss: true\nbf16: true\n", "model"),
    "eaft": (SFT + "finetuning_type: full\nuse_eaft_loss: true\nbf16: true\n", "model"),
    "muon": (SFT + "finetuning_type: full\nuse_muon: true\nbf16: true\n", "model"),
    "lora, as versions 0.7 and 0.8 wrote it": (
        SFT + "finetuning_type: lora\nlora_target: q_proj,v_proj\nlora_alpha: 16\nlora_dropout: 0\nadditional_target:\n"
        "dataset_dir: data\nsplit: train\nreserved_label_len: 1\nmix_strategy: concat\nbuffer_size: 16384\n"
        "flash_attn: auto\nuse_unsloth: false\nshift_attn: false\nrope_scaling: linear\nvisual_inputs: false\n"
        "use_fast_tokenizer: true\nlow_cpu_mem_usage: true\nsplit_special_tokens: false\nuse_cache: true\n"
        "include_num_input_tokens_seen: true\ninclude_effective_tokens_per_second: true\nlogging_dir: saves/logs\n"
        "optim: adamw_torch\npacking: false\nfp16: true\n" + EVALUATED.replace("eval_s", "evaluation_s", 1),
        "adapter_model"),
}  # fmt: skip


def written(text, name="run.yaml"):
    """Write a config file; later keys override earlier ones."""
    Path(name).write_text(yaml.safe_dump(yaml.safe_load(COMMON) | yaml.safe_load(text)))
    return name


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", representative_slow(KINDS, QUICK))
def test_config_file_of_each_method_trains(workspace, kind):
    text, weights = KINDS[kind]
    if "deepspeed" in text:
        pytest.importorskip("deepspeed")
    assert main(["train", written(text)]) == 0
    assert Path(f"saves/out/{weights}.safetensors").is_file()
    results = json.loads(Path("saves/out/all_results.json").read_text())
    assert results["train_loss"] > 0
    assert ("eval_loss" in results) == ("val_size" in text)


@pytest.mark.sample(1)
@pytest.mark.parametrize("more", ["", "double_quantization: false\n"])
def test_config_file_with_4_bit_base_trains(workspace, more):
    pytest.importorskip("bitsandbytes")
    text = SFT + LORA + f"quantization_bit: 4\nquantization_method: bnb\nbf16: true\n{more}"
    assert main(["train", written(text)]) == 0
    assert Path("saves/out/adapter_model.safetensors").is_file()


OFF = {"neftune_noise_alpha": "0", "quantization_method": "hqq", "flash_attn": "fa2"}


@pytest.mark.slow
def test_options_set_to_off_train_like_none(workspace):
    """Options are set to values that turn them off, or that have no effect on this machine or in this run."""
    assert main(["train", written(SFT + LORA + "bf16: true\nmax_steps: 3\noutput_dir: saves/none\n")]) == 0
    off = "".join(f"{name}: {value}\n" for name, value in OFF.items())
    assert main(["explain", written(SFT + LORA + "bf16: true\nmax_steps: 3\noutput_dir: saves/off\n" + off)]) == 0
    assert main(["train", "run.yaml"]) == 0
    first, second = (Path(f"saves/{name}/adapter_model.safetensors").read_bytes() for name in ("none", "off"))
    assert first == second


def test_frozen_bfloat16_with_trained_float32_weights_stays_padding_free(workspace, capsys):
    assert main(["train", written(KINDS["freeze"][0])]) == 0
    output = capsys.readouterr()
    assert "batches are padded" not in output.out + output.err
    assert "full logits" not in output.out + output.err


def test_prediction_or_evaluation_config_does_not_train(workspace):
    assert main(["train", written(SFT + LORA + "bf16: true\n")]) == 0
    only = (
        "model_name_or_path: models/Qwen2-0.5B\nadapter_name_or_path: saves/out\nstage: sft\nfinetuning_type: lora\n"
        "eval_dataset: alpaca_zh\ntemplate: qwen3_nothink\ncutoff_len: 256\nmax_samples: 4\noverwrite_cache: true\n"
        "overwrite_output_dir: true\nper_device_eval_batch_size: 1\nddp_timeout: 180000000\n"
    )
    Path("predict.yaml").write_text(
        f"{only}output_dir: saves/predict\ndo_predict: true\npredict_with_generate: true\n"
        "max_new_tokens: 4\npredict_metrics: exact_match\n"
    )
    Path("eval.yaml").write_text(f"{only}output_dir: saves/eval\ndo_eval: true\n")
    for name in ("predict", "eval"):
        assert main(["explain", f"{name}.yaml"]) == 0
        assert main(["train", f"{name}.yaml"]) == 0
        assert not list(Path(f"saves/{name}").glob("*.safetensors"))
        assert not list(Path(f"saves/{name}").glob("*.png"))
        assert not list(Path(f"saves/{name}").glob("checkpoint-*"))
    assert {path.name for path in Path("saves/predict").glob("[!.]*")} == {
        "all_results.json", "generated_predictions.jsonl", "predict_results.json", "run.log",
        "launch.json", "run.yaml", "events.jsonl", "outcome.json", "progress.json",
    }  # fmt: skip
    answers = [json.loads(line) for line in Path("saves/predict/generated_predictions.jsonl").read_text().splitlines()]
    assert len(answers) == 4
    assert all(answer.keys() == {"prompt", "predict", "label"} for answer in answers)
    assert json.loads(Path("saves/eval/all_results.json").read_text())["eval_loss"] > 0


def test_prediction_metrics_match_llamafactory(workspace):
    for library in ("nltk", "jieba", "rouge_chinese"):
        pytest.importorskip(library)
    text = "stage: sft\ndo_train: false\ndo_predict: true\npredict_with_generate: true\neval_dataset: alpaca_zh\n"
    assert main(["train", written(text + "template: qwen3_nothink\nmax_new_tokens: 4\nmax_samples: 4\n")]) == 0
    assert json.loads(Path("saves/out/predict_results.json").read_text()).keys() == {
        "predict_bleu-4", "predict_rouge-1", "predict_rouge-2", "predict_rouge-l", "predict_exact_match",
        "predict_runtime", "predict_samples_per_second", "predict_steps_per_second",
    }  # fmt: skip


def test_adapter_merge_config_exports_full_model(workspace, capsys):
    assert main(["train", written(SFT + LORA)]) == 0
    Path("merge.yaml").write_text(
        "### Note: DO NOT use quantized model or quantization_bit when merging lora adapters\n"
        "model_name_or_path: models/Qwen2-0.5B\nadapter_name_or_path: saves/out\ntemplate: qwen3_nothink\n"
        "trust_remote_code: true\nexport_dir: saves/merged\nexport_size: 5\n"
        "export_device: cpu  # choices: [cpu, auto]\nexport_legacy_format: false\n"
    )
    assert main(["export", "merge.yaml"]) == 0
    assert {path.name for path in Path("saves/merged").iterdir()} == {
        "Modelfile", "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    # Files for earlier versions set the device to cuda.
    assert main(["export", "merge.yaml", "export_device=cuda", "export_dir=saves/on_gpu"]) == 0
    assert torch.cuda.is_available() or "no GPU is available" in capsys.readouterr().out


def test_tokenized_path_config_encodes_then_trains(workspace):
    text = SFT + LORA + "tokenized_path: saves/dataset/sft\n"
    assert main(["train", written(text)]) == 0
    assert Path("saves/dataset/sft/train").is_dir()
    Path("data/alpaca_data_zh_51k.json").unlink()
    alone = "stage: sft\ntemplate: qwen3_nothink\ncutoff_len: 256\noverwrite_cache: false\n"
    assert main(["train", written(LORA + alone + "tokenized_path: saves/dataset/sft\n")]) == 0


REJECTED = {
    "deepspeed": ("deepspeed: ds_lamb.json", "optim, learning_rate"),
    "ray": ("ray_num_workers: 4", "torchrun"),
    "ray_num_workers": ("ray_run_name: one\nray_num_workers: 2\nplacement_strategy: PACK", "torchrun"),
    "tensor_model_parallel_size": ("tensor_model_parallel_size: 2\nmoe_grouped_gemm: true", "shard the weights"),
    "train_dataset": ("model: models/Qwen2-0.5B\ntrain_dataset: data/v1.yaml\nmodel_class: llm", "Set dataset"),
    "visual_inputs": ("visual_inputs: true", "the columns of the dataset determine"),
    "use_asft_loss": ("use_asft_loss: true\nasft_alpha: 0.1", "use_dft_loss: true"),
    "orpo": ("stage: orpo", "Set stage: dpo and pref_loss: orpo"),
    "gpu_kernels": ("gpu_kernels: burnish", "Liger kernels are used"),
    '"gpu_kernels": none': ("gpu_kernels: none", "Set enable_liger_kernel: false"),
    "flash_attn": ("flash_attn: 'off'", "disabled"),
    "hqq": ("quantization_bit: 4\nquantization_method: hqq", "quantization_method: bnb"),
    "mmlu_test": ("task: mmlu_test\nlang: en\nn_shot: 5", "burnish eval"),
    "mixture_of_depths": ("mixture_of_depths: convert", "Mixture-of-Depths"),
    "fp8": ("fp8: true", "bf16"),
    "checkpoint_dir": ("checkpoint_dir: saves/first\nresume_lora_training: true", "Set adapter_name_or_path"),
    "resume_lora_training": ("resume_lora_training: false", "Set create_new_adapter: true"),
    '"flash_attn": true': ("flash_attn: true", "Set flash_attn: fa2"),
    "init_special_tokens": ("init_special_tokens: description", "Set init_special_tokens: desc_init"),
    "target_modules": ("target_modules: q_proj", "Set lora_target"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_unsupported_option_is_rejected_with_an_alternative(workspace, capsys, name):
    Path("ds_lamb.json").write_text('{"optimizer": {"type": "Lamb"}}')
    text, remedy = REJECTED[name]
    assert main(["train", written(SFT + LORA + text) if "finetuning_type" not in text else written(SFT + text)]) == 2
    output = capsys.readouterr().err
    assert name in output
    assert remedy in output
    assert not Path("saves").exists()


def test_every_llamafactory_argument_is_known_or_rejected_by_name():
    """The names are those of LLaMA-Factory 0.7.1 to 0.9.5 (hparams), without derived ones that cannot be set."""
    peers = json.loads((SOURCE.parent / "scripts" / "peer_options.json").read_text())
    names = [name for tool, keys in peers.items() if tool.startswith("LLaMA-Factory") for name in keys]
    assert {"ray_run_name", "reserved_label_len"} <= set(names)
    assert len(names) > 230
    assert not [name for name in names if name not in {**specs(RunOptions), **aliases(), **UNSUPPORTED, **NO_EFFECT}]

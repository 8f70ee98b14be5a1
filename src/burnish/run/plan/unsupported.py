"""Options of LLaMA-Factory, transformers and TRL that burnish knows and does not have.

A file that was written for those tools often has keys that ask for nothing: ``use_galore: false``. A key of ``ABSENT``
at its harmless value is ignored; at any other value it is refused by name, with a replacement, because silently
dropping a key would give another run than the user asked for. So is a choice of ``ABSENT_CHOICES``. A key of
``NO_EFFECT`` changes nothing in burnish; a note says so once.

Names and defaults: LLaMA-Factory 0.9.5 (hparams) with those of its older versions from 0.7.1 on, transformers 5.23
(TrainingArguments, Seq2SeqTrainingArguments) with those that older transformers had, TRL 1.16 (SFTConfig).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from burnish.config.errors import Problem
from burnish.config.options import RawValue
from burnish.config.secrets import has_secret_name, keep_secret
from burnish.utils.environment import number_in


@dataclass(frozen=True)
class Absent:
    """An option that is not here. ``harmless`` asks for nothing; ``instead`` is a sentence."""

    harmless: Any
    instead: str


def take_absent(
    given: Mapping[str, RawValue], known: Mapping[str, Any]
) -> tuple[dict[str, RawValue], list[Problem], list[str]]:
    """Remove the names of these tables from ``given``; returns it, a problem for each name that asks for something, and
    notes on the others.

    Args:
        known: the options and other names that burnish has; they are never absent.
    """
    for key, item in given.items():
        if has_secret_name(key):
            keep_secret(item.value)
    foreign = {key: item for key, item in given.items() if key not in known and key in ABSENT | NO_EFFECT}
    chosen = {key: item for key, item in given.items() if str(item.value) in ABSENT_CHOICES.get(key, {})}
    problems = [
        Problem(
            f'"{key}" {item.value} is not part of burnish.',
            item.where,
            remedy=ABSENT_CHOICES[key][str(item.value)],
            option=key,
        )
        for key, item in chosen.items()
    ]
    problems += [
        Problem(
            f'"{key}" is not part of burnish. Received: {item.value}.',
            item.where,
            remedy=ABSENT[key].instead,
            option=key,
        )
        for key, item in foreign.items()
        if key in ABSENT and not _asks_for_nothing(item.value, ABSENT[key].harmless)
    ]
    notes = [f'"{k}" ({foreign[k].where}) has no effect: {NO_EFFECT[k]}' for k in foreign if k in NO_EFFECT]
    return {key: item for key, item in given.items() if key not in {**foreign, **chosen}}, problems, notes


def _asks_for_nothing(value: Any, harmless: Any) -> bool:
    """Return whether a value is the harmless one, in any spelling: "False", "1e3", "none"."""
    written = str(value).strip().lower()
    if value is None or written in {"", "none", "null", "~"}:
        return True
    if isinstance(harmless, bool):
        return written in ({"true", "yes", "on", "1"} if harmless else {"false", "no", "off", "0"})
    if isinstance(harmless, int | float):
        return number_in(written) == harmless
    return written == str(harmless).lower()


ABSENT: dict[str, Absent] = {}
NO_EFFECT: dict[str, str] = {}
ABSENT_CHOICES: dict[str, dict[str, str]] = {
    "stage": {
        "ppo": "It writes answers while it trains, which burnish does not. stage: dpo learns from the same pairs.",
        "grpo": "It writes answers while it trains, which burnish does not. stage: dpo learns from pairs.",
        "rloo": "It writes answers while it trains, which burnish does not. stage: dpo learns from pairs.",
        "orpo": "Set stage: dpo and pref_loss: orpo.",
    },
    "flash_attn": {"off": "Set flash_attn: disabled, which is its name since LLaMA-Factory 0.8.1."},
    "infer_backend": {"burnish": "Set infer_backend: huggingface, which names the same engine."},
    "gpu_kernels": {"none": "Set enable_liger_kernel: false."},
    "quantization_method": dict.fromkeys(
        ("hqq", "eetq"), "Set quantization_method: bnb, with quantization_bit: 4 or quantization_bit: 8."
    ),
}
"""Option and value -> a sentence, for values that burnish lacks of options that it has."""


EARLIER = {
    "save_safetensors": "weights are always written as safetensors.",
    "half_precision_backend": "there is one, torch's autocast.",
    "fp16_backend": "there is one, torch's autocast.",
    "fp16_opt_level": "apex is gone; fp16 runs under torch's autocast.",
    "use_ipex": "Intel's extension is part of torch now.",
    "use_mps_device": "an accelerator that is there is used.",
    "use_legacy_prediction_loop": "there is one evaluation loop.",
    "past_index": "models return their cache themselves.",
    "jit_mode_eval": "torch.jit is gone; torch_compile compiles.",
    "torchdynamo": "torch_compile_backend says it.",
    "ray_scope": "the search runs through Optuna.",
    "mp_parameters": "SageMaker's model parallelism is not part of burnish.",
    "sharded_ddp": "fsdp took its place.",
    "fsdp_min_num_params": "fsdp_config says it: min_num_params.",
    "fsdp_transformer_layer_cls_to_wrap": "fsdp_config says it: transformer_layer_cls_to_wrap.",
    "tpu_num_cores": "burnish does not run on TPUs.",
    "tpu_metrics_debug": "burnish does not run on TPUs.",
}
"""Earlier arguments of transformers -> the reason why they have no effect, here and in ``TrainingArguments``."""
NO_EFFECT.update(EARLIER)


def _absent(instead: str, **harmless: Any) -> None:
    ABSENT.update({name: Absent(value, instead) for name, value in harmless.items()})


def _no_effect(reason: str, names: str) -> None:
    NO_EFFECT.update(dict.fromkeys(names.split(), reason))


def _family(switch: str, harmless: Any, instead: str, members: str) -> None:
    """Add a feature that burnish lacks: its switch is refused where it is on; its settings are ignored without it."""
    ABSENT[switch] = Absent(harmless, instead)
    _no_effect(f'it belongs to "{switch}", which burnish does not have.', members)


# --- data, objectives, templates --------------------------------------------------------------------------------------
_no_effect(
    "it belongs to stage: ppo, which burnish does not have.",
    "ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards reward_model reward_model_adapters "
    "reward_model_quantization_bit reward_model_type",
)
_family(
    "use_asft_loss", False,
    "It keeps a frozen copy of the model beside the one that trains. use_dft_loss: true is the same loss without it.",
    "asft_alpha",
)  # fmt: skip
_absent("Leave it out: what is learned follows from the data, and train_on_prompt.", completion_only_loss=None)
_no_effect(
    "rows are encoded before the first step and cached. Set streaming: true to encode them during training.",
    "encode_ahead",
)
_no_effect("texts are always tokenized whole; the ids are the same.", "tokenize_by_word")
_no_effect("the answers are what is learned, unless train_on_prompt says otherwise.", "assistant_only_loss label_names")
_absent(
    "burnish trains on text; leave it out.",
    media_dir=None, image_dir=None, freeze_language_model=False, visual_inputs=False, train_mm_proj_only=False,
)  # fmt: skip
_no_effect(
    "burnish trains on text.",
    "image_max_pixels image_min_pixels image_do_pan_and_scan crop_to_patches video_max_pixels video_min_pixels "
    "image_resolution video_resolution video_fps video_maxlen "
    "use_audio_in_video audio_sampling_rate freeze_vision_tower freeze_multi_modal_projector",
)

# --- optimizers, adapters, models -------------------------------------------------------------------------------------
_absent("Set optim: adafactor.", adafactor=False)
_absent(
    "Leave it out: Liger's kernels are used on a GPU where the library liger-kernel is installed.", gpu_kernels="auto"
)
_no_effect(
    "weights move after the backward pass, once gradients are added up and clipped, and not inside it; that takes the "
    "memory of the gradients.",
    "galore_layerwise apollo_layerwise",
)
_absent(
    "It takes layers of the model out and others in; leave it out: burnish trains the model that it was given.",
    mixture_of_depths=None,
)
_absent(
    "It attends within pieces of a long row; leave it out, and rope_scaling stretches the context.", shift_attn=False
)
_family("fp8", False, "Use bf16: true.", "fp8_backend fp8_enable_fsdp_float8_all_gather")
_family(
    "use_kt", False, "Leave it out: the experts of a model stay beside its other layers.",
    "kt_weight_path kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num kt_lora_expert_intermediate_size "
    "kt_optimize_rule kt_maxlen kt_use_cuda_graph kt_mode kt_force_think cpu_infer chunk_size mode",
)  # fmt: skip
_absent("Use gradient_accumulation_steps: the update is the same however a step is cut.", auto_find_batch_size=False)
_absent("Leave it out, or lower per_device_train_batch_size.", torch_empty_cache_steps=None)
_absent("Set train_sampling_strategy: sequential.", disable_shuffling=False)
_absent("Set it in the tokenizer of the model.", eos_token=None, pad_token=None)
_absent("Give the folder in adapter_name_or_path.", adapter_folder=None)
_absent("Set template: to its path.", chat_template_path=None)
_absent("Set truncation or on_too_long.", truncation_mode="keep_start")
_absent("Leave it out: a long row gives up part of its prompt, and keeps its answer.", reserved_label_len=1)
_absent('Say it of the data set, in dataset_info.json: "split": "validation".', split="train")
_absent("Set model_revision, flash_attn, trust_remote_code and their like directly.", model_init_kwargs=None)
_absent("Set the options of the data directly.", dataset_kwargs=None)
_absent("Set columns: {text: <name>}.", dataset_text_field="text")
_absent("Set preprocessing_num_workers.", dataset_num_proc=None)
_absent("Set per_device_train_batch_size or per_device_eval_batch_size.", batch_size=None)
_no_effect("every process reads the data, and finds what another has encoded in the cache.", "data_shared_file_system")
_absent("Leave it out: a run goes on at its place at once, without reading what came before.", ignore_data_skip=False)
_no_effect(
    "burnish has a fused loss and unpadded batches of its own.",
    "use_unsloth use_v1_kernels block_diag_attn",
)
_no_effect("the loss is computed in float32.", "upcast_lmhead_output")
_no_effect("activations are kept unless gradient_checkpointing is set.", "disable_gradient_checkpointing")
_no_effect("say it in gradient_checkpointing_kwargs: {use_reentrant: true}.", "use_reentrant_gc")
_no_effect("text of users is always encoded with special tokens off.", "split_special_tokens")
_no_effect("the mean of a step is always over the tokens of all processes.", "average_tokens_across_devices")
_no_effect("rows hold what the model reads, and nothing else.", "remove_unused_columns length_column_name")
_no_effect("the rows are shuffled anew in every epoch.", "shuffle_dataset")
_no_effect(
    "an evaluation keeps sums of losses, not predictions.",
    "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps batch_eval_metrics "
    "include_for_metrics",
)

# LLaMA-Factory's version 1 has other names than its older versions and burnish.
_absent("Set model_name_or_path.", model=None)
_absent("Set dataset and dataset_dir.", train_dataset=None)
_absent(
    "Set per_device_train_batch_size and gradient_accumulation_steps.", micro_batch_size=None, global_batch_size=None
)
_absent("Set quantization_bit and its kin.", quant_config=None)
_no_effect("burnish finds it out by itself.", "model_class kernel_config init_config sample_backend")

# --- devices, processes, checkpoints ----------------------------------------------------------------------------------
_LAUNCH = "Set num_processes, or start the run with torchrun or accelerate launch."
_SHARD = "Leave it out, and shard the weights: fsdp, or deepspeed: zero3. There is no tensor or context parallelism."
_absent(_LAUNCH, use_mca=False, ray_num_workers=1, ray_init_kwargs=None)
_absent(_SHARD, parallelism_config=None)
_no_effect(
    'it belongs to "ray_num_workers", which burnish does not have.',
    "ray_run_name ray_storage_path ray_storage_filesystem resources_per_worker placement_strategy",
)
_absent(
    _SHARD, tensor_model_parallel_size=1, pipeline_model_parallel_size=1, expert_model_parallel_size=1,
    sequence_parallel=False, dist_config=None,
)  # fmt: skip
_no_effect(
    "it is a setting of Megatron.",
    "bias_activation_fusion apply_rope_fusion use_distributed_optimizer overlap_param_gather overlap_grad_reduce "
    "moe_grouped_gemm moe_token_dispatcher_type recompute_granularity",
)
_family("use_hyper_parallel", False, _LAUNCH, "hyper_parallel_args")
_no_effect("the launcher says it.", "local_rank master_addr master_port")
_no_effect("batches always come in order.", "dataloader_in_order")
_no_effect("the system's own way of starting processes is used.", "dataloader_multiprocessing_context")
_no_effect("a signal to stop always saves a checkpoint first.", "enable_jit_checkpoint")
_no_effect("callbacks always go on with their state.", "restore_callback_states_from_checkpoint")
_absent("Let every node write into one shared folder.", save_on_each_node=False)
_family(
    "push_to_hub", False, "Upload output_dir after training: hf upload <name> <output_dir>.",
    "hub_token hub_model_id hub_strategy hub_always_push hub_revision push_to_hub_model_id push_to_hub_organization "
    "push_to_hub_token",
)  # fmt: skip
_absent("Give a folder or an id of the Hugging Face hub.", om_hub_token=None)

# --- reports ----------------------------------------------------------------------------------------------------------
_family(
    "use_swanlab", False, "Set report_to instead: burnish train --help report_to.",
    "swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir "
    "swanlab_lark_webhook_url swanlab_lark_secret",
)  # fmt: skip
_family(
    "enable_torch_profiler", False, "Run the command under py-spy or nsys.",
    "profiler_output_dir profiler_wait_steps profiler_warmup_steps profiler_active_steps profiler_repeat "
    "profiler_record_shapes profiler_profile_memory profiler_with_stack profile_modules",
)  # fmt: skip
_absent("burnish explain estimates the memory of a run.", skip_memory_metrics=True)
_absent("Leave it out: a step that is not finite is never applied, and said.", debug="")
_no_effect("tokens per second are always shown.", "include_effective_tokens_per_second include_tokens_per_second")

# --- other commands ---------------------------------------------------------------------------------------------------
_absent("Say how answers are generated with do_sample, temperature and their like.", generation_config=None)
_no_effect(
    "answers are generated by the model that was trained, as it is in memory.",
    "sortish_sampler use_kv_cache offload_folder vllm_dtype sglang_lora_backend",
)
_absent("Leave it out: weights are written as safetensors, never as pickles.", export_legacy_format=False)
_family(
    "task", None, "Score the saved model with a tool such as lm-evaluation-harness.",
    "task_dir lang n_shot save_dir download_mode",
)  # fmt: skip

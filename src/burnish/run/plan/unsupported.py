"""Options of LLaMA-Factory, transformers and TRL that burnish knows but does not support.

Configuration files of those tools often contain keys that disable something: ``use_galore: false``. A key of
``UNSUPPORTED`` with its harmless value is ignored. Any other value is an error that names a replacement, because
ignoring the key would silently change the run. The same holds for values in ``UNSUPPORTED_CHOICES``. Keys of
``NO_EFFECT`` have no effect in burnish, which a note reports once.

Names and defaults: LLaMA-Factory 0.9.5 (hparams) and older versions from 0.7.1, transformers 5.23 (TrainingArguments,
Seq2SeqTrainingArguments) and older versions, TRL 1.16 (SFTConfig).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from burnish.config.conversion import members
from burnish.config.errors import Problem
from burnish.config.options import OptionSpec, RawValue
from burnish.config.secrets import has_secret_name, keep_secret
from burnish.run.plan.config_files import COMMAND_LINE
from burnish.utils.environment import number_in


@dataclass(frozen=True)
class UnsupportedOption:
    """An unsupported option. ``harmless`` is the value that disables it; ``instead`` is the remedy."""

    harmless: Any
    instead: str


def take_unsupported(
    values: Mapping[str, RawValue], known: Mapping[str, Any]
) -> tuple[dict[str, RawValue], list[Problem], list[str]]:
    """Remove unsupported options from ``values``.

    Returns the remaining options, a problem for each unsupported option that is enabled, and notes on the others.

    Args:
        values: option values with their places.
        known: names that burnish supports, which are never removed.
    """
    values = _negate_flags(values, known)
    for key, item in values.items():
        if has_secret_name(key):
            keep_secret(item.value)
    foreign = {key: item for key, item in values.items() if key not in known and key in UNSUPPORTED | NO_EFFECT}
    chosen = {key: item for key, item in values.items() if str(item.value).lower() in UNSUPPORTED_CHOICES.get(key, {})}
    unread = [key for key in chosen if key in DEPENDS_ON and DEPENDS_ON[key] not in values]
    problems = [
        Problem(
            f'burnish does not support "{key}": {item.value}.',
            item.where,
            remedy=UNSUPPORTED_CHOICES[key][str(item.value).lower()],
            option=key,
        )
        for key, item in chosen.items()
        if key not in unread
    ]
    problems += [
        Problem(
            f'burnish does not support "{key}". Received: {item.value}.',
            item.where,
            remedy=UNSUPPORTED[key].instead,
            option=key,
        )
        for key, item in foreign.items()
        if key in UNSUPPORTED and not _has_no_effect(item.value, UNSUPPORTED[key].harmless)
    ]
    notes = [f'"{k}" ({foreign[k].where}) has no effect: {NO_EFFECT[k]}' for k in foreign if k in NO_EFFECT]
    notes += [f'"{k}" ({chosen[k].where}) has no effect without "{DEPENDS_ON[k]}".' for k in unread]
    return {key: item for key, item in values.items() if key not in {**foreign, **chosen}}, problems, notes


def _negate_flags(values: Mapping[str, RawValue], known: Mapping[str, Any]) -> dict[str, RawValue]:
    """Replace a flag such as ``--no_enable_thinking`` by ``enable_thinking: false``.

    transformers' argument parser has such a flag, without a value, for each switch that is on by default.
    """
    switches = [name for name, spec in known.items() if isinstance(spec, OptionSpec) and bool in members(spec.type)]
    switches += [name for name, absent in UNSUPPORTED.items() if isinstance(absent.harmless, bool)]
    names = {"no_" + name: name for name in (*switches, *NO_EFFECT)}
    negations = {
        key: item
        for key, item in values.items()
        if key in names and item.value == "true" and item.where == COMMAND_LINE
    }
    others = {key: item for key, item in values.items() if key not in negations}
    return others | {names[key]: RawValue("false", item.where) for key, item in negations.items()}


def _has_no_effect(value: Any, harmless: Any) -> bool:
    """Return whether a value equals the harmless one, in any spelling: "False", "1e3", "none"."""
    text = str(value).strip().lower()
    if value is None or text in {"", "none", "null", "~"}:
        return True
    if isinstance(harmless, bool):
        return text in ({"true", "yes", "on", "1"} if harmless else {"false", "no", "off", "0"})
    if isinstance(harmless, int | float):
        return number_in(text) == harmless
    return text == str(harmless).lower()


UNSUPPORTED: dict[str, UnsupportedOption] = {}
NO_EFFECT: dict[str, str] = {}
UNSUPPORTED_CHOICES: dict[str, dict[str, str]] = {
    "stage": {
        "orpo": "Set stage: dpo and pref_loss: orpo.",
    },
    "flash_attn": {
        "off": "Set flash_attn: disabled, its name since LLaMA-Factory 0.8.1.",
        "false": "Set flash_attn: auto, or disabled for eager attention.",
        "true": "Set flash_attn: fa2, its name since LLaMA-Factory 0.7.1.",
    },
    "infer_backend": {
        "burnish": "Set infer_backend: huggingface, another name for the same engine.",
        "ktransformers": "Set infer_backend: huggingface, the engine of burnish.",
    },
    "init_special_tokens": {
        "description": "Set init_special_tokens: desc_init, its name in LLaMA-Factory 0.9.5.",
        "description_noise": "Set init_special_tokens: desc_init_w_noise, its name in LLaMA-Factory 0.9.5.",
        "vocab_mean_noise": "Set init_special_tokens: noise_init, its name in LLaMA-Factory 0.9.5.",
        "vocab_mean": "Set init_special_tokens: noise_init, which adds noise to the mean.",
        "noise": "Set init_special_tokens: noise_init, which adds noise to the mean.",
    },
    "gpu_kernels": {"none": "Set enable_liger_kernel: false."},
    "quantization_method": dict.fromkeys(
        ("hqq", "eetq"), "Set quantization_method: bnb, with quantization_bit: 4 or quantization_bit: 8."
    ),
}
"""Option -> value -> remedy, for unsupported values of supported options."""
DEPENDS_ON = {"quantization_method": "quantization_bit"}
"""Option of ``UNSUPPORTED_CHOICES`` -> the option without which it has no effect."""


REMOVED_OPTIONS = {
    "save_safetensors": "weights are always saved as safetensors.",
    "half_precision_backend": "mixed precision always uses torch.autocast.",
    "fp16_backend": "mixed precision always uses torch.autocast.",
    "fp16_opt_level": "apex is no longer supported; fp16 uses torch.autocast.",
    "use_ipex": "Intel's extension is now part of PyTorch.",
    "use_mps_device": "an available accelerator is used automatically.",
    "use_legacy_prediction_loop": "there is only one evaluation loop.",
    "past_index": "models return their cache in their output.",
    "jit_mode_eval": "torch.jit is deprecated; use torch_compile.",
    "torchdynamo": "use torch_compile_backend.",
    "ray_scope": "hyperparameter search uses Optuna.",
    "mp_parameters": "SageMaker model parallelism is not supported.",
    "sharded_ddp": "use fsdp.",
    "fsdp_min_num_params": "set min_num_params in fsdp_config.",
    "fsdp_transformer_layer_cls_to_wrap": "set transformer_layer_cls_to_wrap in fsdp_config.",
    "dispatch_batches": "examples are distributed to processes by burnish itself.",
    "split_batches": "examples are distributed to processes by burnish itself.",
    "tpu_num_cores": "TPUs are not supported.",
    "tpu_metrics_debug": "TPUs are not supported.",
}
"""Earlier arguments of transformers -> the reason why they have no effect, here and in ``TrainingArguments``."""
NO_EFFECT.update(REMOVED_OPTIONS)


def _add_unsupported(instead: str, **harmless: Any) -> None:
    UNSUPPORTED.update({name: UnsupportedOption(value, instead) for name, value in harmless.items()})


def _no_effect(reason: str, names: str) -> None:
    NO_EFFECT.update(dict.fromkeys(names.split(), reason))


def _add_feature(switch: str, harmless: Any, instead: str, members: str) -> None:
    """Add an unsupported feature. Enabling its switch is an error; its settings are ignored."""
    UNSUPPORTED[switch] = UnsupportedOption(harmless, instead)
    _no_effect(f'it belongs to "{switch}", which burnish does not support.', members)


# --- data, objectives, templates --------------------------------------------------------------------------------------
_add_feature(
    "use_asft_loss", False,
    "ASFT requires a frozen reference model. use_dft_loss: true is the same loss without the KL term.",
    "asft_alpha",
)  # fmt: skip
_add_feature(
    "use_vllm", False,
    "Completions are generated in the training process. Remove use_vllm and vllm_*.",
    "vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex vllm_server_base_url "
    "vllm_server_host vllm_server_port vllm_server_timeout vllm_group_port vllm_gpu_memory_utilization "
    "vllm_max_model_length vllm_tensor_parallel_size vllm_importance_sampling_correction "
    "vllm_importance_sampling_mode vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min "
    "vllm_importance_sampling_cap",
)  # fmt: skip
_add_unsupported(
    "It is an option of TRL's former PPOTrainer. Use per_device_train_batch_size, gradient_accumulation_steps, "
    "ppo_buffer_size and max_steps.",
    total_episodes=None,
    num_mini_batches=None,
    local_rollout_forward_batch_size=None,
    num_sample_generations=None,
    num_total_batches=None,
    local_batch_size=None,
    local_mini_batch_size=None,
    mini_batch_size=None,
)
_add_unsupported(
    "Generation stops at the EOS and end-of-turn tokens of the template.", stop_token=None, stop_token_id=None
)
_add_unsupported("The KL divergence is estimated by the difference of log-probabilities (k1).", kl_estimator=None)
_add_unsupported("Set model_name_or_path to the policy, and reward_model to the reward model.", sft_model_path=None,
        reward_model_path=None)  # fmt: skip
_add_unsupported("Weights are always gathered while completions are generated.", ds3_gather_for_generation=True)
_add_unsupported("Upload the file after training: hf upload <name> completions.jsonl.", log_completions_hub_repo=None)
_no_effect("log-probabilities are always computed in float32.", "cast_lm_head_to_fp32")
_no_effect(
    "generation always uses continuous batching, without padding.",
    "use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged",
)
_no_effect("tools are a feature of GRPOTrainer.", "max_tool_calling_iterations")
_no_effect("images are not shown in logs.", "log_multimodal")
_add_unsupported(
    "Remove it. The data format and train_on_prompt determine which tokens contribute to the loss.",
    completion_only_loss=None,
)
_no_effect(
    "the dataset is tokenized and cached before training. Set streaming: true to tokenize it during training.",
    "encode_ahead",
)
_no_effect("each text is tokenized in one call; the token ids are the same.", "tokenize_by_word")
_no_effect("the loss covers the responses only, unless train_on_prompt is set.", "assistant_only_loss label_names")
_add_unsupported(
    "Remove it: the columns of the dataset determine whether there are images.", visual_inputs=False,
)  # fmt: skip
_no_effect("set image_max_pixels, a number of pixels.", "image_resolution")
_no_effect("set video_max_pixels, a number of pixels.", "video_resolution")
_no_effect("a video is a list of frames, and all of them are used.", "video_maxlen")
_no_effect("audio is not supported.", "use_audio_in_video audio_sampling_rate")

# --- optimizers, adapters, models -------------------------------------------------------------------------------------
_add_unsupported("Set optim: adafactor.", adafactor=False)
_add_unsupported("Remove it. On a GPU, Liger kernels are used if liger-kernel is installed.", gpu_kernels="auto")
_no_effect(
    "weights are updated after the backward pass, on accumulated and clipped gradients. Layerwise updates, which save "
    "the memory of the gradients, are not supported.",
    "galore_layerwise apollo_layerwise",
)
_add_unsupported(
    "Remove it. Mixture-of-Depths conversion of a model is not supported.",
    mixture_of_depths=None,
)
_add_unsupported(
    "Remove it. Use rope_scaling to extend the context; shifted sparse attention is not supported.", shift_attn=False
)
_add_feature("fp8", False, "Use bf16: true.", "fp8_backend fp8_enable_fsdp_float8_all_gather")
_add_unsupported("Set temperature, top_p, top_k, min_p and repetition_penalty directly.", generation_kwargs=None)
_add_feature(
    "use_kt", False, "Remove it. KTransformers is not supported.",
    "kt_weight_path kt_expert_checkpoint_path kt_use_lora_experts kt_lora_expert_num kt_lora_expert_intermediate_size "
    "kt_non_expert_weight_path kt_cpu_activation kt_config "
    "kt_optimize_rule kt_maxlen kt_use_cuda_graph kt_mode kt_force_think cpu_infer chunk_size mode",
)  # fmt: skip
_add_unsupported(
    "Lower per_device_train_batch_size and raise gradient_accumulation_steps by the same factor. The update stays the "
    "same.",
    auto_find_batch_size=False,
)
_add_unsupported("Remove it, or reduce per_device_train_batch_size.", torch_empty_cache_steps=None)
_add_unsupported("Set it in the model's tokenizer files.", eos_token=None, pad_token=None)
_add_unsupported("Set adapter_name_or_path to the folder.", adapter_folder=None)
_add_unsupported("Set adapter_name_or_path to an adapter, or model_name_or_path to a model.", checkpoint_dir=None)
_add_unsupported("Set create_new_adapter: true.", resume_lora_training=True)
_add_unsupported("Set lora_rank.", lora_r=None)
_add_unsupported("Set lora_target.", target_modules=None)
_add_unsupported("Set additional_target.", modules_to_save=None)
_add_unsupported("Set quantization_bit: 4.", load_in_4bit=False)
_add_unsupported("Set quantization_bit: 8.", load_in_8bit=False)
_add_unsupported("Set bf16: true or fp16: true, or infer_dtype for inference.", torch_dtype="auto")
_add_unsupported("Set template to its path.", chat_template_path=None)
_add_unsupported("Set truncation or on_too_long.", truncation_mode="keep_start")
_add_unsupported(
    "Remove it. If an example is too long, its prompt is truncated first, so the response is kept.",
    reserved_label_len=1,
)
_add_unsupported(
    'Remove it. Set "split": "validation" for the dataset in dataset_info.json, or the split of a benchmark in task: '
    "mmlu_test.",
    split="train",
)
_add_unsupported(
    "Set its entries as options, such as model_revision, attn_implementation and trust_remote_code.",
    model_init_kwargs=None,
)
_add_unsupported("Set its entries as options.", dataset_kwargs=None)
_add_unsupported("Remove it. Full fine-tuning trains all rows of the embedding.", freeze_original_embeddings=False)
_add_unsupported("Set columns: {text: <name>}.", dataset_text_field="text")
_add_unsupported("Set preprocessing_num_workers.", dataset_num_proc=None)
_add_unsupported(
    "Set cutoff_len, for prompt and response together.",
    max_source_length=None,
    max_target_length=None,
    max_prompt_length=None,
)
_add_unsupported("Set per_device_train_batch_size or per_device_eval_batch_size.", batch_size=None)
_no_effect("every process reads the dataset and shares the cache of tokenized examples.", "data_shared_file_system")
_add_unsupported(
    "Remove it. Resuming jumps to the right position without reading earlier batches.", ignore_data_skip=False
)
_no_effect(
    "burnish has its own fused loss and padding-free batches.",
    "use_unsloth use_v1_kernels block_diag_attn",
)
_no_effect("the loss is computed in float32.", "upcast_lmhead_output")
_no_effect("activations are kept unless gradient_checkpointing is set.", "disable_gradient_checkpointing")
_no_effect("use gradient_checkpointing_kwargs: {use_reentrant: true}.", "use_reentrant_gc")
_no_effect("special tokens in message texts are always tokenized as plain text.", "split_special_tokens")
_no_effect("the loss is always averaged over the tokens of all processes.", "average_tokens_across_devices")
_no_effect("only columns that the model needs are kept.", "remove_unused_columns length_column_name")
_no_effect("the dataset is reshuffled every epoch.", "shuffle_dataset")
_no_effect(
    "evaluation accumulates losses and does not keep predictions.",
    "prediction_loss_only eval_do_concat_batches eval_use_gather_object eval_accumulation_steps batch_eval_metrics "
    "include_for_metrics",
)

# LLaMA-Factory's version 1 uses other names than its older versions and burnish.
_add_unsupported("Set model_name_or_path.", model=None)
_add_unsupported("Set dataset and dataset_dir.", train_dataset=None)
_add_unsupported(
    "Set per_device_train_batch_size and gradient_accumulation_steps.", micro_batch_size=None, global_batch_size=None
)
_add_unsupported("Set quantization_bit and quantization_method.", quant_config=None)
_no_effect("it is determined automatically.", "model_class kernel_config init_config sample_backend")

# --- devices, processes, checkpoints ----------------------------------------------------------------------------------
_LAUNCH = "Remove it, and set num_processes, or start the run with torchrun or accelerate launch."
_SHARD = "Use fsdp or deepspeed: zero3 to shard the weights. Tensor and context parallelism are not supported."
_add_unsupported(_LAUNCH, use_mca=False, ray_num_workers=1, ray_init_kwargs=None)
_add_unsupported(_SHARD, parallelism_config=None)
_no_effect(
    'it belongs to "ray_num_workers", which burnish does not support.',
    "ray_run_name ray_storage_path ray_storage_filesystem resources_per_worker placement_strategy",
)
_add_unsupported(
    _SHARD, tensor_model_parallel_size=1, pipeline_model_parallel_size=1, expert_model_parallel_size=1,
    sequence_parallel=False, dist_config=None,
)  # fmt: skip
_no_effect(
    "it is a Megatron setting.",
    "bias_activation_fusion apply_rope_fusion use_distributed_optimizer overlap_param_gather overlap_grad_reduce "
    "moe_grouped_gemm moe_token_dispatcher_type recompute_granularity",
)
_add_feature("use_hyper_parallel", False, _LAUNCH, "hyper_parallel_args")
_no_effect("it is set by the launcher.", "local_rank master_addr master_port")
_no_effect("batches are always in order.", "dataloader_in_order")
_no_effect("the default start method of the platform is used.", "dataloader_multiprocessing_context")
_no_effect("a checkpoint is always saved before a signal stops the run.", "enable_jit_checkpoint")
_no_effect("the state of callbacks is always restored.", "restore_callback_states_from_checkpoint")
_add_unsupported("Use an output_dir on storage that all nodes share.", save_on_each_node=False)
_add_unsupported("Set hub_model_id to <organization>/<name>.", push_to_hub_organization=None)
_add_unsupported("Set model_name_or_path to a folder or a model ID on the Hugging Face Hub.", om_hub_token=None)

# --- reports ----------------------------------------------------------------------------------------------------------
_add_feature(
    "use_swanlab", False, "Remove it, or use a different tracker; burnish train --help report_to lists them.",
    "swanlab_project swanlab_workspace swanlab_run_name swanlab_mode swanlab_api_key swanlab_logdir "
    "swanlab_lark_webhook_url swanlab_lark_secret",
)  # fmt: skip
_add_feature(
    "enable_torch_profiler", False, "Set profile: true and profile_steps.",
    "profiler_output_dir profiler_wait_steps profiler_warmup_steps profiler_active_steps profiler_repeat "
    "profiler_record_shapes profiler_profile_memory profiler_with_stack profile_modules",
)  # fmt: skip
_no_effect(
    "trainer_log.jsonl always contains memory_bytes; profile: true measures the memory of each step.",
    "skip_memory_metrics",
)
_add_unsupported("Remove it. An update with a non-finite loss or gradient is never applied (on_non_finite).", debug="")
_no_effect("tokens per second are always logged.", "include_effective_tokens_per_second include_tokens_per_second")

# --- other commands ---------------------------------------------------------------------------------------------------
_add_unsupported("Set do_sample, temperature and the other generation options.", generation_config=None)
_no_effect(
    "predictions are generated with the trained model in memory.",
    "sortish_sampler use_kv_cache offload_folder vllm_dtype sglang_lora_backend",
)
_add_unsupported("Remove it. Weights are always saved as safetensors.", export_legacy_format=False)
_add_feature(
    "task", None, "Evaluate the saved model with burnish eval.",
    "task_dir lang n_shot save_dir download_mode",
)  # fmt: skip

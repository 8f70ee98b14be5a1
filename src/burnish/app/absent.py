"""Options of LLaMA-Factory and transformers that burnish knows and does not have.

A file that was written for those tools often carries keys that ask for nothing: ``use_galore: false``. A key here at
its harmless value is passed over. At any other value it is refused by name, with what to use instead, because a key
that is dropped in silence gives a run that was not asked for.

Names and defaults: LLaMA-Factory 0.9.5 (hparams) and transformers 5.23 (TrainingArguments, Seq2SeqTrainingArguments),
with those that older transformers had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from burnish.core.errors import Problem
from burnish.core.options import Given


@dataclass(frozen=True)
class Absent:
    """An option that is not here. ``harmless`` asks for nothing; ``instead`` is a sentence."""

    harmless: Any
    instead: str


def take_absent(given: Mapping[str, Given], known: Mapping[str, Any]) -> tuple[dict[str, Given], list[Problem]]:
    """``given`` without the names of this table, and a problem for each that asks for something.

    Args:
        known: the options and other names that burnish has; they are never absent.
    """
    missing = {key: item for key, item in given.items() if key in ABSENT and key not in known}
    problems = [
        Problem(f'"{key}" is not part of burnish yet. Received: {item.value}.', item.where, remedy=ABSENT[key].instead)
        for key, item in missing.items()
        if not _asks_for_nothing(item.value, ABSENT[key].harmless)
    ]
    return {key: item for key, item in given.items() if key not in missing}, problems


def _asks_for_nothing(value: Any, harmless: Any) -> bool:
    """Whether a written value is the harmless one, whatever way it was written: "False", "1e3", "none"."""
    written = str(value).strip().lower()
    if value is None or written in {"", "none", "null", "~"}:
        return True
    if isinstance(harmless, bool):
        return written in ({"true", "yes", "on", "1"} if harmless else {"false", "no", "off", "0"})
    if isinstance(harmless, int | float):
        return _number(written) == harmless
    return written == str(harmless).lower()


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _absent(instead: str, **harmless: Any) -> Iterator[tuple[str, Absent]]:
    return ((name, Absent(value, instead)) for name, value in harmless.items())


_STAGES = "burnish trains with stage: sft or stage: pt."
_LOW_MEMORY = "To train with less memory, use finetuning_type: lora or freeze, or activation checkpointing."
_GENERATE = "Load output_dir with transformers' AutoModelForCausalLM and call generate()."
_TEXT_ONLY = "burnish trains on text; leave it out."
_TRACKERS = "Set report_to instead: burnish train --help report_to lists the trackers."
_HUB = "Upload output_dir after training: huggingface-cli upload <name> <output_dir>."
_PROFILE = "Run the command under py-spy or torch.profiler, or use a shorter max_steps and compare."
_LOADER = "Rows are encoded before training, so no loader processes are needed; leave it out."

ABSENT: dict[str, Absent] = dict(
    [
        *_absent(
            _STAGES,
            pref_beta=0.1, pref_ftx=0.0, pref_bco_weight=0.0, pref_loss="sigmoid", dpo_label_smoothing=0.0,
            kto_chosen_weight=1.0, kto_rejected_weight=1.0, simpo_gamma=0.5, ppo_buffer_size=1, ppo_epochs=4,
            ppo_score_norm=False, ppo_target=6.0, ppo_whiten_rewards=False, ref_model=None, ref_model_adapters=None,
            ref_model_quantization_bit=None, reward_model=None, reward_model_adapters=None,
            reward_model_quantization_bit=None, reward_model_type="lora", ld_alpha=None,
        ),
        *_absent(
            "The loss of stage: sft and stage: pt is cross entropy; leave it out.",
            use_dft_loss=False, use_asft_loss=False, asft_alpha=0.1, use_eaft_loss=False, eaft_alpha=1.0,
        ),
        *_absent(
            _LOW_MEMORY,
            use_badam=False, badam_mode="layer", badam_start_block=None, badam_switch_mode="ascending",
            badam_switch_interval=50, badam_update_ratio=0.05, badam_mask_mode="adjacent", badam_verbose=0,
            use_galore=False, galore_target="all", galore_rank=16, galore_update_interval=200, galore_scale=2.0,
            galore_proj_type="std", galore_layerwise=False, use_apollo=False, apollo_target="all", apollo_rank=16,
            apollo_update_interval=200, apollo_scale=32.0, apollo_proj="random", apollo_proj_type="std",
            apollo_scale_type="channel", apollo_layerwise=False, apollo_scale_front=False, use_adam_mini=False,
            optim_target_modules=None,
        ),
        *_absent(
            "Choose an optimizer with optim: burnish train --help optim lists them.",
            use_muon=False, loraplus_lr_ratio=None, loraplus_lr_embedding=1e-6, adafactor=False,
        ),
        *_absent(
            "Use finetuning_type: lora, freeze or full.",
            use_llama_pro=False, module_dropout=0.0, oft_rank=0, oft_block_size=32, oft_target="all",
            mixture_of_depths=None, shift_attn=False, pissa_convert=False,
        ),
        *_absent(
            "Load the model in bf16 and train an adapter: finetuning_type: lora.",
            quantization_method="bnb", quantization_bit=None, quantization_type="nf4", double_quantization=True,
            quantization_device_map=None, fp8=False, fp8_backend="auto", fp8_enable_fsdp_float8_all_gather=False,
            use_kt=False, kt_weight_path=None, kt_expert_checkpoint_path=None, kt_use_lora_experts=None,
            kt_lora_expert_num=None, kt_lora_expert_intermediate_size=None,
        ),
        *_absent(
            "The fused loss and the unpadded batches are burnish's own and always on; leave it out.",
            use_unsloth=False, use_unsloth_gc=False, enable_liger_kernel=False, use_liger_kernel=False,
            liger_kernel_config=None, use_v1_kernels=False, torch_compile=False, torch_compile_backend=None,
            torch_compile_mode=None, torchdynamo=None, jit_mode_eval=False, use_ipex=False, upcast_layernorm=False,
            upcast_lmhead_output=False, block_diag_attn=False,
        ),
        *_absent(
            "Start the run with torchrun or accelerate launch, with the usual environment variables.",
            ray_num_workers=1, ray_init_kwargs=None, ray_scope="last", master_addr=None, master_port=None,
            use_mca=False, use_hyper_parallel=False, hyper_parallel_args=None, local_rank=-1, sharded_ddp="",
            fsdp_min_num_params=0, fsdp_transformer_layer_cls_to_wrap=None, parallelism_config=None,
            accelerator_config=None, mp_parameters="", tpu_num_cores=None, tpu_metrics_debug=False,
            use_mps_device=False,
        ),
        *_absent(
            _TRACKERS,
            use_swanlab=False, swanlab_project="llamafactory", swanlab_workspace=None, swanlab_run_name=None,
            swanlab_mode="cloud", swanlab_api_key=None, swanlab_logdir=None, swanlab_lark_webhook_url=None,
            swanlab_lark_secret=None, project="huggingface", trackio_space_id=None, trackio_bucket_id=None,
            trackio_static_space_id=None, logging_dir=None, run_name=None,
        ),
        *_absent(
            _PROFILE,
            enable_torch_profiler=False, profiler_output_dir=None, profiler_wait_steps=1, profiler_warmup_steps=1,
            profiler_active_steps=1, profiler_repeat=1, profiler_record_shapes=True, profiler_profile_memory=True,
            profiler_with_stack=True, profile_modules=None, skip_memory_metrics=True,
        ),
        *_absent(
            _GENERATE,
            predict_with_generate=False, do_sample=True, temperature=0.95, top_p=0.7, top_k=50, num_beams=1,
            max_length=1024, max_new_tokens=1024, repetition_penalty=1.0, length_penalty=1.0,
            skip_special_tokens=True, eval_num_beams=None, generation_max_length=None, generation_num_beams=None,
            generation_config=None, sortish_sampler=False, infer_backend="huggingface", infer_dtype="auto",
            vllm_maxlen=4096, vllm_gpu_util=0.7, vllm_enforce_eager=False, vllm_max_lora_rank=32, vllm_config=None,
            sglang_maxlen=4096, sglang_mem_fraction=0.7, sglang_tp_size=-1, sglang_config=None,
            sglang_lora_backend="triton", use_kv_cache=True, offload_folder="offload",
        ),
        *_absent(
            "A LoRA adapter is saved in peft's format: peft's merge_and_unload() merges it into its base model.",
            export_dir=None, export_size=5, export_device="cpu", export_quantization_bit=None,
            export_quantization_dataset=None, export_quantization_nsamples=128, export_quantization_maxlen=1024,
            export_legacy_format=False, export_hub_model_id=None,
        ),
        *_absent(
            _HUB,
            push_to_hub=False, hub_token=None, hub_private_repo=None, hub_model_id=None, hub_strategy="every_save",
            hub_always_push=False, hub_revision=None, push_to_hub_model_id=None, push_to_hub_organization=None,
            push_to_hub_token=None,
        ),
        *_absent(
            _TEXT_ONLY,
            media_dir=None, image_max_pixels=768 * 768, image_min_pixels=32 * 32, image_do_pan_and_scan=False,
            crop_to_patches=False, video_max_pixels=256 * 256, video_min_pixels=16 * 16, video_fps=2.0,
            video_maxlen=128, use_audio_in_video=False, audio_sampling_rate=16000, freeze_vision_tower=True,
            freeze_multi_modal_projector=True, freeze_language_model=False,
        ),
        *_absent(
            _LOADER,
            dataloader_num_workers=0, dataloader_persistent_workers=False, dataloader_prefetch_factor=None,
            dataloader_multiprocessing_context=None, dataloader_in_order=True,
        ),
        *_absent(
            "Score the saved model with an evaluation tool such as lm-evaluation-harness.",
            task=None, task_dir="evaluation", lang="en", n_shot=5, save_dir=None, download_mode=None,
        ),
    ]
)  # fmt: skip

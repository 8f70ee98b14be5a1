"""A value of each option of a run and its expected effect: the tables of ``test_every_key.py``.

``OPTION_EFFECTS`` has a row for each option whose effect a tiny run can show: the value, the part of the outcome that
differs from a run without it, and how it differs. ``TESTED_BY`` names the tests of the other options.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from burnish.parallel.precision import has_fast_bfloat16


@dataclass(frozen=True)
class Row:
    """The expected effect of an option.

    Args:
        value: the value of the option.
        part: a part of the outcome, one of ``PARTS``.
        shows: a function of the part without and with the option that tells whether the effect is the expected one.
        beside: further options of both runs.
    """

    value: Any
    part: str
    shows: Callable[[Any, Any], bool] = operator.ne
    beside: dict[str, Any] = field(default_factory=dict)


def has_fewer(before, after):
    return len(after) < len(before)


def has_more(before, after):
    return len(after) > len(before)


def becomes(expected):
    return lambda before, after: after == expected != before


def prints(sentence):
    return lambda before, after: sentence in after and sentence not in before


def becomes_empty(before, after):
    return bool(before) and not after


def groups_have(name, *values):
    """The parameter groups have exactly these values of a setting, unlike without the option."""

    def changed_values(before, after):
        old, new = ({group.get(name) for group in outcome["groups"]} for outcome in (before, after))
        return new == set(values) != old

    return changed_values


def another_optimizer(before, after):
    return after["name"] != before["name"]


def sets(name, value):
    return lambda before, after: after[name] == value != before[name]


def writes(*names):
    return lambda before, after: set(names) <= set(after) - set(before)


def leaves_out(*names):
    return lambda before, after: set(names) <= set(before) - set(after)


def loss_falls_below(share):
    return lambda before, after: after[0]["loss"] < share * before[0]["loss"]


def logs_more(before, after):
    return after[0].keys() > before[0].keys()


def other_numbers(before, after):
    return before.keys() == after.keys() and before != after


def only_some_moved(names):
    return lambda before, after: all(any(part in name for part in names) for name in after) and set(after) < set(before)


EVALUATED = {"val_size": 4}
LORA = {"finetuning_type": "lora", "learning_rate": 1e-2}
BADAM = {"use_badam": True, "badam_switch_interval": 2}
BADAM_IN_ONE_BLOCK = {"use_badam": True, "badam_switch_interval": 9}
GALORE = {"use_galore": True, "galore_rank": 4}
APOLLO = {"use_apollo": True, "apollo_rank": 4}
PREDICTED = {"do_train": False, "do_predict": True, "predict_with_generate": True, "predict_metrics": "exact_match",
             "do_sample": False, "max_new_tokens": 4, "val_size": 2}  # fmt: skip
EVERY_STEP = {"val_size": 4, "eval_strategy": "steps", "eval_steps": 1}
BEST = {"metric_for_best_model": "eval_loss", **EVERY_STEP}

OPTION_EFFECTS: dict[str, Row] = {
    # training, evaluation and prediction
    "stage": Row("pt", "rows", beside={"dataset": "texts.jsonl"}),
    "do_train": Row(False, "weights", becomes_empty, {"do_eval": True, **EVALUATED}),
    "do_eval": Row(True, "files", writes("eval_results.json"), EVALUATED),
    "do_predict": Row(
        True, "files", writes("predict_results.json"), EVALUATED
    ),
    # the model
    "model_name_or_path": Row("other", "weights", other_numbers),
    "train_from_scratch": Row(True, "weights", other_numbers),
    "add_tokens": Row([" a number?"], "rows", lambda before, after: len(after[0][0]) < len(before[0][0])),
    "add_special_tokens": Row(["<|more|>"], "tokenizer", lambda before, after: "<|more|>" in after),
    "rope_scaling": Row("linear", "config", beside={"cutoff_len": 512}),
    "finetuning_type": Row("freeze", "moved", only_some_moved(["layers.0.", "layers.1."])),
    "liger_kernel_config": Row({"rope": True}, "said", prints("Liger's kernels are not used")),
    "print_param_status": Row(True, "said", prints("trainable: True")),
    # the data
    "dataset": Row("b.jsonl", "rows", has_fewer),
    "dataset_dir": Row("elsewhere", "rows", has_fewer, {"dataset": "named"}),
    "formatting": Row("sharegpt", "refused"),
    "columns": Row({"prompt": "output", "response": "instruction"}, "rows"),
    "tags": Row(
        {"role_tag": "who", "content_tag": "what", "user_tag": "u", "assistant_tag": "a"}, "refused", becomes_empty,
        {"dataset": "renamed.json", "formatting": "sharegpt", "columns": {"messages": "talk"}},
    ),
    "max_samples": Row(5, "rows", lambda before, after: after == before[:5]),
    "val_size": Row(0.5, "evaluated", lambda before, after: not before and len(after[""]) == 12),
    "eval_dataset": Row("b.jsonl", "evaluated", lambda before, after: not before and len(after[""]) == 6),
    "eval_on_each_dataset": Row(
        True, "evaluated", lambda before, after: after.keys() == {"a", "b"}, {"eval_dataset": "a.json,b.jsonl"}
    ),
    "mix_strategy": Row("interleave_under", "rows", has_fewer, {"dataset": "a.json,b.jsonl"}),
    "interleave_probs": Row(
        [0.9, 0.1], "rows", beside={"dataset": "a.json,b.jsonl", "mix_strategy": "interleave_under"}
    ),
    "streaming": Row(True, "rows", lambda before, after: sorted(map(str, before)) == sorted(map(str, after))),
    "on_bad_record": Row("drop", "refused", becomes_empty, {"dataset": "bad.json"}),
    "on_empty_target": Row("raise", "refused", lambda before, after: "empty" in after, {"dataset": "empty.json"}),
    # labels and templates
    "train_on_prompt": Row(True, "learned", has_more),
    "mask_history": Row(True, "learned", has_fewer, {"dataset": "chats.json"}),
    "train_on_eos": Row("none", "learned", has_fewer),
    "template": Row("default", "rows"),
    "default_system": Row("seven", "rows", lambda before, after: len(after[0][0]) > len(before[0][0])),
    "enable_thinking": Row(False, "rows", beside={"template": "qwen3"}),
    "missing_control_tokens": Row("split", "refused", becomes_empty, {"template": "llama3"}),
    "cutoff_len": Row(24, "rows", lambda before, after: max(len(ids) for ids, _ in after) <= 24),
    "truncation": Row("llamafactory", "rows", beside={"cutoff_len": 24}),
    "on_too_long": Row("drop", "rows", has_fewer, {"cutoff_len": 28}),
    # batches
    "padding_free": Row(False, "batch", lambda before, after: len(after["input_ids"]) == 2 * len(before["input_ids"])),
    "needed_tokens_only": Row(
        False, "batch", lambda before, after: len(after["input_ids"][0]) > len(before["input_ids"][0]),
        {"default_system": "You are a helpful assistant who answers in one word, or in two."},
    ),
    "packing": Row(True, "rows", has_fewer),
    "neat_packing": Row(True, "rows", has_fewer),
    "packing_strategy": Row("wrapped", "rows", beside={"packing": True}),
    "eval_packing": Row(
        False, "evaluated", lambda before, after: len(after[""]) > len(before[""]), {"packing": True, **EVALUATED}
    ),
    "drop_incomplete_block": Row(True, "rows", has_fewer, {"stage": "pt", "dataset": "texts.jsonl"}),
    "pad_to_multiple_of": Row(
        16, "batch", lambda before, after: len(after["input_ids"][0]) % 16 == 0, {"padding_free": False}
    ),
    "ignore_pad_token_for_loss": Row(False, "batch", beside={"padding_free": False}),
    "train_sampling_strategy": Row("sequential", "order", becomes(list(range(12)))),
    "group_by_length": Row(True, "order"),
    "disable_shuffling": Row(True, "order", becomes(list(range(12)))),
    "max_tokens_per_batch": Row(200, "cuts", lambda before, after: sum(before[0]) == sum(after[0]) and after != before),
    "dataloader_prefetch_factor": Row(2, "said", prints("dataloader_num_workers")),
    # steps
    "per_device_train_batch_size": Row(3, "cuts", lambda before, after: after[0] == [3, 3]),
    "per_device_eval_batch_size": Row(1, "eval batches", becomes([1, 1, 1, 1]), EVALUATED),
    "gradient_accumulation_steps": Row(3, "cuts", lambda before, after: after[0] == [2, 2, 2]),
    "num_train_epochs": Row(5, "steps", becomes(30), {"max_steps": -1}),
    "max_steps": Row(2, "steps", becomes(2)),
    "dataloader_drop_last": Row(True, "steps", becomes(3), {"max_samples": 5, "max_steps": -1, "num_train_epochs": 3}),
    "lr_scheduler_type": Row("cosine", "rates"),
    "lr_scheduler_kwargs": Row({"num_cycles": 1.5}, "rates", beside={"lr_scheduler_type": "cosine"}),
    "warmup_steps": Row(2, "rates", lambda before, after: after[:2] == [0.0, 5e-4]),
    "warmup_ratio": Row(0.5, "rates", lambda before, after: after[:2] == [0.0, 5e-4]),
    # the optimizer
    "optim": Row("sgd", "optimizer", another_optimizer),
    "optim_args": Row("momentum=0.9", "optimizer", groups_have("momentum", 0.9), {"optim": "sgd"}),
    "learning_rate": Row(2e-3, "optimizer", groups_have("initial_lr", 2e-3)),
    "weight_decay": Row(0.25, "optimizer", groups_have("weight_decay", 0.25, 0.0)),
    "adam_beta1": Row(0.8, "optimizer", groups_have("betas", (0.8, 0.999))),
    "adam_beta2": Row(0.9, "optimizer", groups_have("betas", (0.9, 0.9))),
    "adam_epsilon": Row(1e-3, "optimizer", groups_have("eps", 1e-3)),
    "max_grad_norm": Row(1e-3, "weights", other_numbers, {"optim": "sgd"}),
    # intervals
    "logging_strategy": Row("no", "log", has_fewer),
    "logging_steps": Row(2, "log", has_fewer),
    "logging_first_step": Row(True, "log", has_more, {"logging_steps": 2}),
    "eval_strategy": Row("steps", "log", has_more, EVALUATED),
    "eval_steps": Row(1, "log", has_more, {"eval_strategy": "steps", "logging_steps": 3, **EVALUATED}),
    "eval_delay": Row(3, "log", has_fewer, EVERY_STEP),
    "eval_on_start": Row(True, "log", has_more, EVERY_STEP),
    "save_strategy": Row("steps", "files", writes("checkpoint-3")),
    "save_steps": Row(2, "files", writes("checkpoint-2"), {"save_strategy": "steps"}),
    "save_total_limit": Row(
        1, "files", leaves_out("checkpoint-1", "checkpoint-2"),
        {"save_strategy": "steps", "save_steps": 1},
    ),
    "save_only_model": Row(
        True, "files", leaves_out("checkpoint-3/optimizer.safetensors"),
        {"save_strategy": "steps"},
    ),
    "early_stopping_steps": Row(1, "log", has_fewer, {"early_stopping_threshold": 100.0, **BEST}),
    "early_stopping_threshold": Row(100.0, "log", has_fewer, {"early_stopping_steps": 1, **BEST}),
    "output_dir": Row("another", "files", becomes_empty),
    # generation
    "predict_with_generate": Row(
        True, "answers", lambda before, after: not before and len(after) == 2,
        {**PREDICTED, "predict_with_generate": False},
    ),
    "skip_special_tokens": Row(
        False, "answers", lambda before, after: "more" not in before[0]["label"] and "more" in after[0]["label"],
        {**PREDICTED, "dataset": "marked.json", "add_special_tokens": ["<|more|>"]},
    ),
    "samples": Row(
        2, "answers", lambda before, after: "samples" not in before[0] and len(after[0]["samples"]) == 2,
        {**PREDICTED, "do_sample": True},
    ),
    "do_sample": Row(True, "generation", sets("do_sample", True), PREDICTED),
    "temperature": Row(0.5, "generation", sets("temperature", 0.5)),
    "top_p": Row(0.5, "generation", sets("top_p", 0.5)),
    "top_k": Row(5, "generation", sets("top_k", 5)),
    "num_beams": Row(3, "generation", sets("num_beams", 3)),
    "max_new_tokens": Row(7, "generation", sets("max_new_tokens", 7)),
    "max_length": Row(99, "generation", sets("max_length", 99), {"max_new_tokens": 0}),
    "repetition_penalty": Row(1.5, "generation", sets("repetition_penalty", 1.5)),
    "length_penalty": Row(2.0, "generation", sets("length_penalty", 2.0), {"num_beams": 2}),
    "cache_implementation": Row("static", "generation", sets("cache_implementation", "static")),
    # output
    "plot_loss": Row(True, "files", writes("training_loss.png")),
    "include_num_input_tokens_seen": Row(True, "log", lambda before, after: "num_input_tokens_seen" in after[0]),
    # devices and precision
    "bf16": Row(True, "weights", other_numbers),
    "fp16": Row(True, "weights", other_numbers)
    if has_fast_bfloat16()
    else Row(True, "said", prints('"fp16" is not used on a CPU: the run computes in float32')),
    "pure_bf16": Row(True, "dtypes", becomes({"torch.bfloat16"})),
    "tf32": Row(True, "said", prints('"tf32" has no effect on a CPU')),
    "seed": Row(7, "order"),
    "data_seed": Row(7, "order"),
    "full_determinism": Row(True, "determinism", becomes(True)),
    # methods
    "lora_rank": Row(2, "shapes", beside=LORA),
    "lora_alpha": Row(64, "weights", other_numbers, LORA),
    "lora_dropout": Row(0.5, "weights", other_numbers, LORA),
    "lora_target": Row(["q_proj"], "moved", only_some_moved(["q_proj"]), LORA),
    "additional_target": Row(["lm_head"], "moved", lambda before, after: set(after) > set(before), LORA),
    "use_rslora": Row(True, "weights", other_numbers, LORA),
    "use_dora": Row(True, "shapes", has_more, LORA),
    "pissa_init": Row(True, "weights", other_numbers, LORA),
    "pissa_iter": Row(-1, "weights", other_numbers, {**LORA, "pissa_init": True, "pissa_iter": 1}),
    "loraplus_lr_ratio": Row(
        8.0, "optimizer", groups_have("initial_lr", 1e-2, 8e-2), LORA
    ),
    "loraplus_lr_embedding": Row(
        3e-6, "optimizer", lambda before, after: 3e-6 in {g["initial_lr"] for g in after["groups"]},
        {**LORA, "loraplus_lr_ratio": 8.0, "lora_target": ["embed_tokens", "q_proj"]},
    ),
    # the loss
    "label_smoothing_factor": Row(0.5, "weights", other_numbers),
    "neftune_noise_alpha": Row(5.0, "weights", other_numbers),
    "use_dft_loss": Row(True, "log", loss_falls_below(0.1)),
    "use_eaft_loss": Row(True, "log", loss_falls_below(1)),
    "eaft_alpha": Row(9.0, "log", loss_falls_below(1), {"use_eaft_loss": True}),
    "compute_accuracy": Row(True, "log", logs_more),
    "compute_entropy": Row(True, "log", logs_more),
    # options of single optimizers
    "use_badam": Row(True, "moved", only_some_moved(["layers.0."]), {"badam_switch_interval": 9}),
    "badam_mode": Row("ratio", "weights", other_numbers, BADAM),
    "badam_start_block": Row(1, "moved", lambda before, after: not set(before) & set(after), BADAM_IN_ONE_BLOCK),
    "badam_switch_mode": Row("fixed", "moved", only_some_moved(["layers.0."]), BADAM),
    "badam_switch_interval": Row(3, "moved", only_some_moved(["layers.0."]), BADAM),
    "badam_update_ratio": Row(0.5, "weights", other_numbers, {**BADAM, "badam_mode": "ratio"}),
    "badam_mask_mode": Row("scatter", "weights", other_numbers, {**BADAM, "badam_mode": "ratio"}),
    "badam_verbose": Row(2, "said", prints("BAdam"), BADAM),
    "use_galore": Row(True, "weights", other_numbers, {"galore_rank": 4}),
    "galore_target": Row(["mlp"], "weights", other_numbers, GALORE),
    "galore_rank": Row(2, "weights", other_numbers, GALORE),
    "galore_update_interval": Row(1, "weights", other_numbers, GALORE),
    "galore_scale": Row(0.5, "weights", other_numbers, GALORE),
    "galore_proj_type": Row("full", "weights", other_numbers, GALORE),
    "use_apollo": Row(True, "weights", other_numbers, {"apollo_rank": 4}),
    "apollo_target": Row(["mlp"], "weights", other_numbers, APOLLO),
    "apollo_rank": Row(2, "weights", other_numbers, APOLLO),
    "apollo_update_interval": Row(1, "weights", other_numbers, APOLLO),
    "apollo_scale": Row(2.0, "weights", other_numbers, APOLLO),
    "apollo_proj": Row("svd", "weights", other_numbers, APOLLO),
    "apollo_proj_type": Row("right", "weights", other_numbers, APOLLO),
    "apollo_scale_type": Row("tensor", "weights", other_numbers, APOLLO),
    "apollo_scale_front": Row(True, "weights", other_numbers, APOLLO),
    "optim_target_modules": Row(["mlp"], "weights", other_numbers, {"optim": "galore_adamw"}),
    "use_muon": Row(True, "optimizer", another_optimizer),
    "use_adam_mini": Row(True, "weights", other_numbers),
}  # fmt: skip

# --- options that other tests cover -----------------------------------------------------------------------------------

TESTED_BY: dict[str, str] = {
    "crop_to_patches": "run/image_options: internvl_tiles_can_be_disabled",
    "image_do_pan_and_scan": "run/image_options: gemma_crops_can_be_enabled",
    "freeze_language_model": "models/images: invalid_part_selection_is_rejected",
    "freeze_multi_modal_projector": "models/images: full_training_trains_unfrozen_parts",
    "freeze_vision_tower": "models/images: full_training_trains_unfrozen_parts",
    "train_mm_proj_only": "models/images: full_training_trains_unfrozen_parts",
    "image_ahead_mb": "run/image_options: image_memory_limit_is_respected",
    "image_cache": "run/image_options: image_memory_limit_is_respected",
    "image_cache_mb": "run/image_options: image_memory_limit_is_respected",
    "image_backend": "run/image_options: missing_torchvision_backend_is_reported",
    "image_fit": "run/image_options: long_record_loses_text_or_its_images_are_downscaled",
    "image_max_pixels": "run/image_options: pixel_limits_change_number_of_image_tokens",
    "image_min_pixels": "run/image_options: pixel_limits_change_number_of_image_tokens",
    "video_fps": "run/image_options: video_options_change_rows",
    "video_max_pixels": "run/image_options: video_options_change_rows",
    "video_min_pixels": "run/image_options: video_options_change_rows",
    "media_dir": "run/image_options: images_are_searched_in_media_dir",
    "rl_loss_type": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "rl_beta": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "epsilon": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "epsilon_high": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "delta": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "importance_sampling_level": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "sapo_temperature_pos": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "sapo_temperature_neg": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "vespo_k_pos": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "vespo_lambda_pos": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "vespo_k_neg": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "vespo_lambda_neg": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "use_bias_correction_kl": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "off_policy_mask_threshold": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "top_entropy_quantile": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "entropy_coef": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "use_adaptive_entropy": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "entropy_target": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "entropy_coef_delta": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "entropy_coef_max": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "entropy_coef_min": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "multi_objective_aggregation": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "scale_rewards": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "reward_weights": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "normalize_advantages": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "reward_clip_range": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "mask_truncated_completions": "rollouts/rollout_options: each_loss_option_changes_the_loss",
    "rl_preset": "rollouts/rollout_options: preset_sets_options_that_are_not_given",
    "max_concurrent_completions": "rollouts/rollout_options: generation_options_are_applied",
    "min_p": "rollouts/rollout_options: generation_options_are_applied",
    "eval_temperature": "rollouts/rollout_options: generation_options_are_applied",
    "num_generations_eval": "rollouts/rollout_options: generation_options_are_applied",
    "log_completions": "rollouts/rollout_options: completions_are_printed_and_saved_according_to_options",
    "num_completions_to_print": "rollouts/rollout_options: completions_are_printed_and_saved_according_to_options",
    "log_unique_prompts": "rollouts/rollout_options: completions_are_printed_and_saved_according_to_options",
    "reward_model": "rollouts/rollout_options: reward_model_options_are_applied",
    "reward_model_type": "rollouts/rollout_options: reward_model_options_are_applied",
    "reward_model_adapters": "rollouts/rollout_options: reward_model_options_are_applied",
    "reward_model_quantization_bit": "rollouts/rollout_options: reward_model_options_are_applied",
    "reward_funcs": "rollouts/rollout_options: reward_model_options_are_applied",
    "reward_timeout_s": "rollouts/rollout_options: slow_reward_function_stops_the_run",
    "on_changed_reward": "rollouts/rollout_runs: resume_with_changed_reward_is_rejected_unless_accepted",
    "drop_zero_variance_groups": "rollouts/rollout_runs: step_with_all_groups_dropped_changes_no_weights",
    "num_generations": "rollouts/rollout_runs: all_variants_run",
    "max_completion_length": "rollouts/rollout_runs: all_variants_run",
    "generation_batch_size": "rollouts/rollout_runs: all_variants_run",
    "steps_per_generation": "rollouts/rollout_runs: all_variants_run",
    "num_iterations": "rollouts/rollout_runs: all_variants_run",
    "online": "rollouts/online_pairs: run_learns_from_best_and_worst_completion_of_a_prompt",
    "ppo_whiten_rewards": "rollouts/ppo: each_option_changes_training_data",
    "ppo_gamma": "rollouts/ppo: each_option_changes_training_data",
    "ppo_lam": "rollouts/ppo: each_option_changes_training_data",
    "ppo_cliprange": "rollouts/ppo: each_option_changes_training_data",
    "ppo_cliprange_value": "rollouts/ppo: each_option_changes_training_data",
    "ppo_vf_coef": "rollouts/ppo: each_option_changes_training_data",
    "kl_coef": "rollouts/ppo: kl_coefficient_options_are_applied",
    "ppo_init_kl_coef": "rollouts/ppo: kl_coefficient_options_are_applied",
    "ppo_target": "rollouts/ppo: kl_coefficient_options_are_applied",
    "ppo_horizon": "rollouts/ppo: kl_coefficient_options_are_applied",
    "ppo_ratio_threshold": "rollouts/ppo_runs: step_beyond_ratio_threshold_has_no_loss",
    "ppo_score_norm": "rollouts/ppo_runs: evaluation_changes_nothing",
    "missing_eos_penalty": "rollouts/ppo_runs: unfinished_completion_is_penalized",
    "ppo_epochs": "rollouts/ppo_runs: run_trains_policy_and_value_head_and_adapts_coefficient",
    "ppo_buffer_size": "rollouts/ppo_runs: run_trains_policy_and_value_head_and_adapts_coefficient",
    "kto_chosen_weight": "preferences/preference_options: each_kto_and_reward_option_changes_the_loss",
    "kto_rejected_weight": "preferences/preference_options: each_kto_and_reward_option_changes_the_loss",
    "kl_pairing": "preferences/streamed: step_mismatched_responses_do_not_depend_on_micro_batching",
    "kto_loss": "preferences/preference_options: each_kto_and_reward_option_changes_the_loss",
    "center_rewards_coefficient": "preferences/preference_options: each_kto_and_reward_option_changes_the_loss",
    "reward_head": "preferences/preference_options: reward_head_selects_saved_format_of_reward_model",
    "max_train_seconds": "run/interruptions: run_stops_with_a_checkpoint_at_its_time_limit",
    "max_concurrent_requests": "inference/loading: model_folder_is_loaded_and_generates",
    "infer_context": "inference/loading: model_folder_is_loaded_and_generates",
    **dict.fromkeys(
        (
            "vllm_maxlen",
            "vllm_gpu_util",
            "vllm_enforce_eager",
            "vllm_max_lora_rank",
            "vllm_config",
            "sglang_maxlen",
            "sglang_mem_fraction",
            "sglang_tp_size",
            "sglang_config",
        ),
        "inference/remote: llamafactory_options_become_server_flags",
    ),
    "export_format": "export/gguf: llama_cpp_verifies_export_if_its_path_is_given",
    "export_image_limits": "run/runs_with_images: exported_processor_files_contain_the_limits_if_requested",
    "export_gguf_type": "export/gguf: transformers_reads_exported_gguf_back",
    "llama_cpp": "export/gguf: llama_cpp_verifies_export_if_its_path_is_given",
    "infer_backend": "inference/remote: child_server_is_started_awaited_and_stopped",
    "infer_executable": "inference/remote: child_server_is_started_awaited_and_stopped",
    "infer_url": "inference/remote: options_that_the_engine_does_not_read_are_reported",
    "infer_exact": "inference/loading: model_folder_is_loaded_and_generates",
    "served_adapters": "inference/loading: parallel_adapters_respond_as_each_alone",
    "pref_beta": "preferences/preference_options: each_pair_option_changes_the_loss",
    "pref_ftx": "preferences/preference_options: each_pair_option_changes_the_loss",
    "pref_loss": "preferences/preference_options: each_pair_option_changes_the_loss",
    "pref_loss_weights": "preferences/preference_options: each_pair_option_changes_the_loss",
    "dpo_label_smoothing": "preferences/preference_options: each_pair_option_changes_the_loss",
    "pref_bco_weight": "preferences/preference_options: each_pair_option_changes_the_loss",
    "simpo_gamma": "preferences/preference_options: each_pair_option_changes_the_loss",
    "ld_alpha": "preferences/preference_options: each_pair_option_changes_the_loss",
    "discopop_tau": "preferences/preference_options: each_pair_option_changes_the_loss",
    "f_divergence_type": "preferences/preference_options: each_pair_option_changes_the_loss",
    "f_alpha_divergence_coef": "preferences/preference_options: each_pair_option_changes_the_loss",
    "use_weighting": "preferences/preference_options: each_pair_option_changes_the_loss",
    "cpo_alpha": "preferences/preference_options: each_pair_option_changes_the_loss",
    "alphapo_alpha": "preferences/preference_options: each_pair_option_changes_the_loss",
    "dpop_lambda": "preferences/preference_options: each_pair_option_changes_the_loss",
    "ref_model": "preferences/preference_options: each_pair_option_changes_the_loss",
    "sync_ref_model": "preferences/preference_options: each_pair_option_changes_the_loss",
    "ref_model_mixup_alpha": "preferences/preference_options: each_pair_option_changes_the_loss",
    "ref_model_sync_steps": "preferences/preference_options: each_pair_option_changes_the_loss",
    "precompute_ref_log_probs": "preferences/preference_options: precomputed_reference_gives_the_same_loss",
    "disable_dropout": "preferences/preference_options: dropout_is_disabled_by_default",
    "ref_model_adapters": "preferences/preference_options: reference_can_have_adapters_and_be_quantized",
    "ref_model_quantization_bit": "preferences/preference_options: reference_can_have_adapters_and_be_quantized",
    "adapter_name_or_path": "run/methods_end_to_end: adapters_are_merged_in_order_as_in_peft",
    "create_new_adapter": "run/methods_end_to_end: adapters_are_merged_in_order_as_in_peft",
    "model_revision": "run/hubs: failed_download_is_reported_with_its_reason",
    "hf_hub_token": "run/hubs: private_model_and_dataset_are_downloaded_and_reused_offline",
    "ms_hub_token": "data/data_arguments: online_names_are_hub_ids",
    "cache_dir": "models/bad_models: cached_model_is_found_when_offline",
    "trust_remote_code": "models/bad_models: model_code_is_not_run_without_trust_remote_code",
    "new_special_tokens_config": "models/new_tokens: described_token_starts_as_mean_of_its_description",
    "init_special_tokens": "models/new_tokens: noise_is_added_on_request",
    "resize_vocab": "models/models: tokenizer_larger_than_embedding_is_rejected_unless_resizable",
    "flash_attn": "models/models: flash_attn_names_an_implementation",
    "attn_implementation": "models/models: attention_accepts_transformers_names",
    "upcast_layernorm": "run/methods_end_to_end: weights_are_kept_in_requested_dtype",
    "use_cache": "models/models: cache_is_disabled_in_training_and_enabled_in_saved_config",
    "patches": "models/patching: losses_without_patches_are_equal_up_to_rounding",
    "leave_out": "models/patching: explain_lists_the_patches_of_the_run",
    "enable_liger_kernel": "models/liger: liger_kernels_are_used_only_on_gpu",
    "quantization_bit": "models/quantize: model_is_quantized_while_loading_except_head",
    "quantization_type": "models/quantize: model_is_quantized_while_loading_except_head",
    "double_quantization": "models/quantize: model_is_quantized_while_loading_except_head",
    "quantization_method": "run/llamafactory_runs: unsupported_option_is_rejected_with_an_alternative",
    "preprocessing_batch_size": "run/prepare: examples_are_encoded_in_batches",
    "preprocessing_num_workers": "run/prepare: several_processes_give_the_same_rows_and_counts",
    "overwrite_cache": "run/prepare: overwrite_cache_encodes_again",
    "tokenized_path": "run/prepare: tokenized_path_is_written_and_then_read",
    "buffer_size": "data/streaming: records_are_shuffled_within_the_buffer",
    "tool_format": "data/tools: tool_format_can_be_overridden",
    "preserve_thinking": "data/templates_peers: template_rows_match_llamafactory",
    "dataloader_num_workers": "data/loader: workers_give_the_same_batches_as_the_main_process",
    "dataloader_pin_memory": "data/loader: worker_options_are_passed_to_workers",
    "logging_nan_inf_filter": "trainer/trainer: non_finite_step_is_skipped_reported_and_not_logged",
    "on_non_finite": "loop/loop: non_finite_step_can_be_skipped_and_is_not_logged",
    "on_spike": "run/spikes: rolled_back_run_equals_run_without_skipped_rows",
    "spike_ratio": "run/spikes: large_gradient_norm_is_a_spike",
    "overwrite_output_dir": "checkpoint/bad_checkpoints: overwriting_a_run_removes_all_its_files",
    "resume": "run/plan: folder_with_checkpoints_is_resumed_by_default",
    "resume_from_checkpoint": "models/quantize: qlora_trains_and_resumes_bitwise_equal",
    "resume_despite_changes": "run/train_run: different_run_in_same_folder_is_rejected_with_the_difference",
    "save_in_background": "checkpoint/checkpoint: weights_copied_during_next_step_belong_to_their_step",
    "load_best_model_at_end": "loop/loop: best_weights_are_loaded_at_the_end",
    "metric_for_best_model": "loop/loop: unknown_metric_is_rejected_with_available_ones",
    "greater_is_better": "loop/early_stopping: early_stopping_stops_at_the_same_step_as_transformers",
    "predict_metrics": "run/predict: custom_metric_is_selected_by_name",
    "export_dir": "export/export: export_command_accepts_the_training_file",
    "export_size": "export/export: export_command_accepts_the_training_file",
    "export_device": "run/llamafactory_runs: adapter_merge_config_exports_full_model",
    "infer_dtype": "run/every_key: exported_weights_have_requested_format",
    "export_quantization_bit": "export/quantized_export: llamafactory_quantization_config_is_accepted",
    "export_quantization_dataset": "export/quantized_export: llamafactory_quantization_config_is_accepted",
    "export_quantization_method": "export/quantized_export: incompatible_layers_are_reported",
    "export_quantization_nsamples": "export/quantized_export: template_rows_calibrate_and_others_measure_perplexity",
    "export_quantization_maxlen": "export/quantized_export: template_rows_calibrate_and_others_measure_perplexity",
    "export_hub_model_id": "export/export: exported_folder_is_uploaded_on_request",
    "report_to": "report/report_trackers: report_to_is_a_list_of_names",
    "run_name": "report/report_trackers: trackio_callback_of_transformers_runs_on_these_options",
    "project": "report/report_trackers: trackio_callback_of_transformers_runs_on_these_options",
    "logging_dir": "report/report_trackers: tensorboard_callback_of_transformers_runs_on_these_options",
    "trackio_space_id": "report/report_trackers: trackio_callback_of_transformers_runs_on_these_options",
    "trackio_bucket_id": "report/report_trackers: trackio_callback_of_transformers_runs_on_these_options",
    "trackio_static_space_id": "report/report_trackers: trackio_callback_of_transformers_runs_on_these_options",
    "push_to_hub": "run/uploads: trained_model_is_uploaded_with_its_card",
    "hub_model_id": "run/uploads: trained_model_is_uploaded_with_its_card",
    "hub_token": "run/uploads: trained_model_is_uploaded_with_its_card",
    "hub_private_repo": "run/uploads: trained_model_is_uploaded_with_its_card",
    "hub_always_push": "run/uploads: hub_strategy_decides_what_is_uploaded_during_training",
    "hub_revision": "run/uploads: model_is_uploaded_to_the_branch_in_hub_revision",
    "hub_strategy": "run/uploads: hub_strategy_decides_what_is_uploaded_during_training",
    "disable_tqdm": "report/report_progress: disable_tqdm_prints_every_log",
    "log_level": "report/report_progress: log_levels_follow_the_process",
    "log_level_replica": "report/report_progress: log_levels_follow_the_process",
    "log_on_each_node": "report/report_progress: log_levels_follow_the_process",
    "profile": "report/profile: profiled_run_reports_step_times_and_saves_a_trace",
    "profile_steps": "report/profile: profiled_run_reports_step_times_and_saves_a_trace",
    "num_processes": "parallel/launch: num_processes_is_the_requested_or_one_per_gpu",
    "max_restarts": "parallel/launch: failed_run_is_restarted_from_its_checkpoint_with_max_restarts",
    "stall_timeout_s": "parallel/rank_failures: stalled_run_ends_with_stack_traces_of_its_processes",
    "engine": "parallel/backends: engine_is_plain_torch_for_a_single_process",
    "use_cpu": "run/plan: attention_for_gpus_is_rejected_on_cpu",
    "bf16_full_eval": "run/train_run: weights_are_converted_for_evaluations_outside_of_training",
    "fp16_full_eval": "run/train_run: weights_are_converted_for_evaluations_outside_of_training",
    "gradient_checkpointing": "models/models: checkpointing_gives_the_same_gradients",
    "gradient_checkpointing_kwargs": "parallel/backends: every_nth_layer_can_be_checkpointed",
    "activation_offloading": "models/activations: engine_offloads_only_on_gpu_and_reports_it",
    "torch_compile": "parallel/backends: compiled_model_takes_the_same_steps",
    "torch_compile_backend": "parallel/backends: compile_uses_requested_backend_and_mode",
    "torch_compile_mode": "parallel/backends: compile_uses_requested_backend_and_mode",
    "ddp_backend": "parallel/backends: ddp_options_are_passed_to_accelerate",
    "ddp_timeout": "parallel/backends: ddp_options_are_passed_to_accelerate",
    "ddp_bucket_cap_mb": "parallel/backends: ddp_options_are_passed_to_accelerate",
    "ddp_broadcast_buffers": "parallel/backends: ddp_options_are_passed_to_accelerate",
    "ddp_find_unused_parameters": "parallel/backends: ddp_options_are_passed_to_accelerate",
    "ddp_static_graph": "parallel/backends: ddp_options_are_passed_to_accelerate",
    "fsdp": "parallel/fsdp: fsdp_keywords_of_all_versions_keep_their_meaning",
    "fsdp_config": "parallel/fsdp: fsdp_keywords_of_all_versions_keep_their_meaning",
    "deepspeed": "parallel/deepspeed: settings_that_change_results_are_rejected",
    "freeze_trainable_layers": "adapters/freeze: trainable_layers_are_counted_from_either_end",
    "freeze_trainable_modules": "adapters/freeze: only_named_modules_of_a_layer_are_trained",
    "freeze_extra_modules": "adapters/freeze: extra_modules_are_trained_with_layers",
    "use_llama_pro": "adapters/freeze: llama_pro_trains_last_layer_of_each_group",
    "peft_config": "adapters/freeze: peft_method_trains_saves_and_resumes",
    "oft_block_size": "adapters/freeze: oft_accepts_llamafactory_options",
    "oft_rank": "adapters/freeze: oft_accepts_llamafactory_options",
    "oft_target": "adapters/freeze: oft_accepts_llamafactory_options",
    "module_dropout": "adapters/freeze: oft_accepts_llamafactory_options",
    "fused_loss": "losses/language_modeling: impossible_fused_loss_request_is_rejected",
    "router_aux_loss_coef": "losses/language_modeling: router_loss_is_added_as_in_transformers",
}

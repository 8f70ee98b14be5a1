"""The section of ``explain`` on completions: their number and timing, reward functions, memory and time."""

from __future__ import annotations

from collections.abc import Iterator

from burnish.explain.view import Line, Section
from burnish.parallel.selection import device_of
from burnish.report.pace import format_count
from burnish.rollouts.objective import RolloutObjective
from burnish.rollouts.options import preset_in_words, preset_of
from burnish.run.plan.memory import DecoderShape, shown_bytes
from burnish.run.plan.plan import Plan
from burnish.run.prepare import Prepared
from burnish.run.rollouts import longest_of, slots_of


def rollouts_section(plan: Plan, prepared: Prepared) -> Iterator[Section]:
    """The section, for a run that learns from completions of the model."""
    if not isinstance(prepared.objective, RolloutObjective):
        return
    options, objective = plan.options, prepared.objective
    group, longest = options.num_generations, options.max_completion_length
    prompts = objective.rows_per_rank * plan.world_size
    drawn = prompts * group
    steps = format_count(objective.inner_steps, "step")
    passes = f", each trained on {options.num_iterations} times" if options.num_iterations > 1 else ""
    sampling = [f"temperature {options.temperature:g}"]
    sampling += [f"top_p {options.top_p:g}"] * (options.top_p < 1) + [f"top_k {options.top_k}"] * (options.top_k > 0)
    lines = [
        Line("prompts", f"{format_count(prompts, 'prompt')} per generation batch", plan.where("steps_per_generation")),
        Line("completions", f"x {group} = {drawn:,} for {steps}{passes}", plan.where("num_generations")),
        Line("tokens", f"at most {longest:,} per completion, {drawn * longest:,} in total; {', '.join(sampling)}",
             plan.where("max_completion_length")),
    ]  # fmt: skip
    for function in objective.functions:
        place = f" ({function.place})" if function.place else ""
        lines.append(Line("reward", f"{function.name}{place}, weight {function.weight:g}", plan.where("reward_funcs")))
    if preset := preset_of(options.stage, options.rl_preset):
        text = f"{options.rl_preset} {preset_in_words(options, preset)}"
        lines.append(Line("preset", text, plan.where("rl_preset")))
    lines += [*_phases(plan, prepared, objective)]
    yield Section("Rollouts", lines)


def _phases(plan: Plan, prepared: Prepared, objective: RolloutObjective) -> Iterator[Line]:
    """Yield a line per phase of a rollout step: its memory and its forward passes."""
    options, shape = plan.options, DecoderShape.of(prepared.config.get_text_config())
    slots = slots_of(objective, device_of(options), prepared.config, longest_of(options, prepared.config))
    longest = max(prepared.sample.lengths, default=0) + options.max_completion_length
    num_bytes = 2 * shape.layers * shape.keys * slots * longest * prepared.formats.compute
    text = (
        f"at most {shown_bytes(int(num_bytes))} of KV cache for {slots} concurrent completions, freed before the first "
        "backward pass"
    )
    yield Line("generate", text, plan.where("max_concurrent_completions"))
    models = ["the policy"] * objective.needs_old_logps + ["the reference"] * objective.needs_reference
    without = "not needed: the weights do not change between generation and training"
    yield Line("log-probs", f"one forward pass of {' and '.join(models)} without gradients" if models else without)
    tokens = objective.rows_per_rank * options.num_generations * options.max_completion_length
    size = shown_bytes(16 * tokens)
    where = "in checkpoints saved between the steps of a generation batch" if objective.inner_steps > 1 else "in memory"
    yield Line("buffer", f"{size} at most, {where}")

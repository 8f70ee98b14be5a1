"""Shared prefixes are computed once and tokens without loss are skipped; the step is unchanged."""

import json
import random
from itertools import product

import pytest
import torch

from burnish.adapters.base import FinetuningOptions
from burnish.adapters.lora import LoraAdapter, LoraOptions
from burnish.cli import main
from burnish.config.options import union
from burnish.data.batches.batching import BatchingOptions, collate_padding_free, collate_prefix_sharing, collator, pack
from burnish.data.batches.loader import num_tokens
from burnish.data.batches.prefix_sharing import segments
from burnish.kernels.probe import shares_prefixes
from burnish.kernels.shared_prefix import gather_runs
from burnish.loop.types import IGNORE_INDEX
from burnish.losses.lm import LmOptions, SftObjective
from burnish.models.patches.attention import make_padding_free
from burnish.models.patches.capabilities import find_capabilities
from burnish.parallel.options import ParallelOptions
from burnish.run.build import wants_prefix_sharing
from burnish.utils.patching import PatchOptions
from small_run import as_arguments, make_workspace
from tiny_shapes import KEEPS_APART, tiny

Options = union("Options", LmOptions, BatchingOptions, ParallelOptions, PatchOptions)


def row(ids, prompt):
    return {"input_ids": list(ids), "labels": [IGNORE_INDEX] * prompt + list(ids)[prompt:]}


def rows_of_a_tree(seed=0, num=9):
    """Return rows with two system prompts, one of which is continued by two prompts, and one unrelated row."""
    draw = random.Random(seed)

    def tokens(count):
        return [draw.randint(3, 96) for _ in range(count)]

    systems = [tokens(40), tokens(21)]
    starts = [systems[0] + tokens(17), systems[0] + tokens(30), systems[0], systems[1]]
    made = [row([*starts[i % 4], *(own := tokens(draw.randint(2, 30)))], len(starts[i % 4]) + len(own) // 2)
            for i in range(num)]  # fmt: skip
    return [*made, row(tokens(12), 5)]


# --- selected tokens --------------------------------------------------------------------------------------------------


def test_common_prefix_of_two_rows_becomes_a_shared_segment():
    result = segments([row([1, 2, 3, 4, 5], 4), row([1, 2, 3, 6, 7, 8], 5), row([9, 9], 1)], least_skipped=1)
    pieces = {(segment.sequence, segment.begin, segment.end, len(segment.path)) for segment in result}
    assert pieces == {(0, 0, 3, 0), (0, 3, 4, 1), (1, 3, 5, 1), (2, 0, 1, 0)}
    assert all(parent < number for number, segment in enumerate(result) for parent in segment.path)


def test_segments_of_a_row_cover_it_up_to_last_trained_token():
    sequences = rows_of_a_tree()
    result = segments(sequences, least_skipped=4)
    assert max(len(segment.path) for segment in result) == 2  # one continues a prompt that continues another
    ends = {segment.sequence: segment for segment in result if segment.is_last}
    for number, sequence in enumerate(sequences):
        pieces = [*(result[parent] for parent in ends[number].path), ends[number]]
        message = [id for s in pieces for id in sequences[s.sequence]["input_ids"][s.begin : s.end]]
        assert message == sequence["input_ids"][:-1]


def test_shared_prefix_ends_before_position_predicting_a_trained_token():
    result = segments([row([1, 2, 3, 4, 5], 3), row([1, 2, 3, 4, 6], 3)], least_skipped=1)
    assert (result[0].begin, result[0].end) == (0, 2)  # token 2 predicts token 3, which is trained
    assert all(not segment.path for segment in segments([row([1, 2, 3], 0), row([1, 2, 3], 0)], least_skipped=1))


def test_equal_ids_of_different_images_are_not_shared():
    same = [row([1, 9, 9, 2, 3, 4, 5], 6) for _ in range(3)]
    hashes = [[0, 7, 7, 0, 0, 0, 0], [0, 8, 8, 0, 0, 0, 0], [0, 7, 7, 0, 0, 0, 0]]
    imaged = [{**each, "content_hashes": those} for each, those in zip(same, hashes, strict=True)]
    result = segments([*imaged, same[0]], least_skipped=2)
    shared = {(segment.begin, segment.end) for segment in result if not segment.is_last}
    assert shared == {(0, 1), (1, 5)}  # all rows share the first id, and the first and third row also the image
    assert {s.sequence for s in result if s.is_last and len(s.path) == 2} == {0, 2}


def test_tokens_after_last_trained_one_and_untrained_rows_are_skipped():
    ends_early = {"input_ids": [1, 2, 3, 4, 5], "labels": [-100, 2, 3, -100, -100]}
    nothing = {"input_ids": [6, 7], "labels": [6, -100]}
    result = segments([ends_early, nothing])
    assert [(segment.sequence, segment.begin, segment.end) for segment in result] == [(0, 0, 2)]


def test_label_of_last_token_is_stored_at_start_of_next_row():
    batch = collate_prefix_sharing([row([1, 2, 3], 1), row([4, 5, 6], 2)])
    assert batch["input_ids"].tolist() == [[1, 2, 4, 5, 6]]
    assert batch["labels"].tolist() == [[-100, 2, 3, -100, 6]]
    weighted = [{**row([1, 2, 3], 1), "loss_weights": [1.0, 0.5, 0.25]}, row([4, 5, 6], 2)]
    assert collate_prefix_sharing(weighted)["loss_weights"].tolist() == [[1.0, 0.5, 0.25, 1.0, 1.0]]


def test_batch_without_trained_tokens_is_unchanged():
    rows = [row([1, 2, 3], 3), row([4, 5], 2)]
    assert torch.equal(collate_prefix_sharing(rows)["input_ids"], collate_padding_free(rows)["input_ids"])


def test_short_prefixes_are_not_shared():
    alike = [row([1, 2, 3, *range(10 + i, 20 + i)], 8) for i in range(3)]
    assert all(not segment.path for segment in segments(alike))
    assert "key_runs" not in collate_prefix_sharing(alike)


def test_batch_contains_all_tokens_of_its_rows():
    sequences = rows_of_a_tree()
    needed, flat = collate_prefix_sharing(sequences), collate_padding_free(sequences)
    assert needed["input_ids"].numel() < 0.7 * flat["input_ids"].numel()
    assert num_tokens(needed) == num_tokens(flat)
    assert (needed["labels"][:, 1:] != IGNORE_INDEX).sum() == (flat["labels"][:, 1:] != IGNORE_INDEX).sum()


def test_packs_share_prefixes():
    sequences = rows_of_a_tree()
    assert (
        collate_prefix_sharing(pack(sequences, 200))["input_ids"].shape
        == collate_prefix_sharing(sequences)["input_ids"].shape
    )


def test_gradient_of_a_shared_run_is_summed_over_uses():
    x = torch.randn(7, 2, 3, dtype=torch.double, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: gather_runs(x, ((0, 3), (0, 3), (3, 2), (0, 3), (5, 2))), x)


# --- the model --------------------------------------------------------------------------------------------------------


def gradients(model, batch, options=None):
    objective = SftObjective(options or Options(), template=None)
    objective.configure(find_capabilities(model, head_of=model), lambda rows: batch)
    module = objective.module(model)
    made = objective.collate([])
    loss = objective.loss(module, made).total / objective.num_items(made)
    model.zero_grad()
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", KEEPS_APART)
def test_step_matches_full_computation_in_every_family(family):
    model = tiny(family, output_router_logits=False)
    assert make_padding_free(model).is_padding_free
    # Before transformers 5.23, OPT draws a random number per layer in training, even if it has no effect.
    assert shares_prefixes(model) or family == "opt"
    sequences = rows_of_a_tree()
    loss, shared = gradients(model, collate_prefix_sharing(sequences))
    plain_loss, plain = gradients(model, collate_padding_free(sequences))
    assert abs(loss - plain_loss) < 1e-6
    assert shared.keys() == plain.keys()
    for name, gradient in plain.items():
        assert (shared[name] - gradient).abs().max() < 1e-6 * max(1, gradient.abs().max()), name


@pytest.mark.parametrize("seed", range(4))
def test_step_matches_full_computation_for_any_rows(seed):
    draw = random.Random(seed)
    tree = rows_of_a_tree(seed, num=draw.randint(2, 20))
    # Some rows are longer than 384 tokens.
    whole = [row(one["input_ids"] * draw.randint(1, 9), len(one["input_ids"]) - 1) for one in tree]
    for one in whole:
        for place in range(draw.randint(0, len(one["labels"])), len(one["labels"])):
            one["labels"][place] = IGNORE_INDEX
        if draw.random() < 0.5:
            one["loss_weights"] = [draw.random() * 2 for _ in one["labels"]]
    draw.shuffle(whole)
    model = tiny("qwen2", max_position_embeddings=4096)
    make_padding_free(model)
    (loss, shared), (plain_loss, plain) = (
        gradients(model, made(whole)) for made in (collate_prefix_sharing, collate_padding_free)
    )
    assert abs(loss - plain_loss) < 1e-6
    for name, gradient in plain.items():
        assert (shared[name] - gradient).abs().max() < 1e-6 * max(1, gradient.abs().max()), name


def test_bfloat16_step_is_as_accurate_as_with_all_tokens():
    """Compare two orders of summation in bfloat16 with float64."""
    sequences = rows_of_a_tree(num=20)
    made = {}
    for name, collate in (
        ("shared", collate_prefix_sharing),
        ("plain", collate_padding_free),
        ("truth", collate_padding_free),
    ):
        model = tiny("qwen2").to(torch.float64 if name == "truth" else torch.float32)
        make_padding_free(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=name != "truth"):
            _, made[name] = gradients(model, collate(sequences))

    def error(name):
        return sum(float((made[name][w] - exact).double().square().sum()) for w, exact in made["truth"].items())

    assert error("shared") < 1.1 * error("plain")


def test_model_with_random_operations_computes_all_tokens():
    model = tiny("llama", attention_dropout=0.2)
    make_padding_free(model)
    assert not shares_prefixes(model)
    assert model.training


def test_dropout_of_new_adapter_is_detected_despite_equal_logits():
    """The second factor of the adapter is zero, so dropout of its inputs does not change the logits."""
    for dropout in (0.0, 0.2):
        options = union("AdapterOptions", FinetuningOptions, LoraOptions)(lora_dropout=dropout)
        model = LoraAdapter(options).attach(tiny("llama"))
        make_padding_free(model)
        assert shares_prefixes(model) is (dropout == 0.0)


def test_model_with_custom_attention_mask_computes_all_tokens():
    model = tiny("llama")
    make_padding_free(model, own_attention=False)
    assert not shares_prefixes(model)


def test_positions_depending_on_longest_row_need_all_tokens():
    for kind, is_fixed in (("linear", True), ("dynamic", False)):
        model = tiny("llama", rope_parameters={"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0})
        make_padding_free(model)
        assert shares_prefixes(model) == is_fixed


def test_embedding_noise_and_loss_over_all_tokens_need_all_tokens():
    for family, overrides in (
        ("llama", {"neftune_noise_alpha": 5.0}),
        ("mixtral", {}),
        ("llama", {"needed_tokens_only": False}),
    ):
        options, model = Options(**overrides), tiny(family)
        make_padding_free(model)
        assert not wants_prefix_sharing(SftObjective(options, template=None), model, options, torch.device("cpu"))
    options = Options(router_aux_loss_coef=0.0)
    assert wants_prefix_sharing(SftObjective(options, template=None), model, options, torch.device("cpu"))
    assert find_capabilities(model, padding_free=True, prefix_sharing=True).shares_prefixes


def test_only_flat_batches_skip_tokens():
    for is_padding_free, shares in product((True, False), repeat=2):
        made = collator(Options(), 0, is_padding_free, shares)(rows_of_a_tree())
        assert ("key_runs" in made) == (is_padding_free and shares)


# --- a run ------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.run
@pytest.mark.parametrize("method", ["full", "lora"])
def test_run_gives_the_same_weights(tmp_path, method):
    from safetensors.torch import load_file

    system = "You are a helpful assistant who knows the colors of stones and rivers, and answers in one word."
    options = make_workspace(
        tmp_path, default_system=system, finetuning_type=method, include_num_input_tokens_seen=True
    )
    made = {}
    for shares in (True, False):
        out = tmp_path / str(shares)
        assert main(["train", *as_arguments({**options, "needed_tokens_only": shares, "output_dir": str(out)})]) == 0
        name = "model.safetensors" if method == "full" else "adapter_model.safetensors"
        made[shares] = load_file(out / name), json.loads((out / "trainer_state.json").read_text())
    for name, weight in made[False][0].items():
        assert (made[True][0][name] - weight).abs().max() < 1e-6
    assert made[True][1]["num_input_tokens_seen"] == made[False][1]["num_input_tokens_seen"] > 0


def test_explain_reports_skipped_tokens(tmp_path, capsys):
    options = make_workspace(tmp_path, default_system="You are a helpful assistant who answers in one word.")
    assert main(["explain", *as_arguments(options)]) == 0
    assert "skipped tokens" in capsys.readouterr().out
    drawing = {"finetuning_type": "lora", "lora_dropout": 0.1}
    for other in ({"needed_tokens_only": False}, {"neftune_noise_alpha": 5}, drawing):
        assert main(["explain", *as_arguments({**options, **other})]) == 0
        assert "skipped tokens" not in capsys.readouterr().out

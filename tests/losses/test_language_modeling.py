"""Next-token prediction: the same values for any micro-batching, layout and implementation."""

import pytest
import torch

from burnish.config.errors import UserError
from burnish.data.batches.batching import pack
from burnish.data.batches.loader import _without_labels
from burnish.data.stats import DataStats
from burnish.loop.types import IGNORE_INDEX, Example
from burnish.losses.base import OBJECTIVES
from burnish.losses.lm import PretrainObjective, SftObjective
from burnish.losses.logits import target_positions
from burnish.losses.neftune import sequence_lengths
from representative import representative
from tiny_shapes import tiny
from training_step import Options, fit_objective, gradients, rows, split_rows


def reference(model, all_rows):
    """Return loss and gradients of the same step with transformers: one row at a time, its loss times its tokens."""
    model.zero_grad()
    counts = [sum(label != IGNORE_INDEX for label in row["labels"][1:]) for row in all_rows]
    losses = []
    for row, count in zip(all_rows, counts, strict=True):
        ids, labels = torch.tensor([row["input_ids"]]), torch.tensor([row["labels"]])
        losses.append(model(input_ids=ids, labels=labels, use_cache=False).loss * count / sum(counts))
        losses[-1].backward()
    return torch.stack(losses).sum().detach(), {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_same(result, expected, tolerance=1e-6):
    assert abs(result[0] - expected[0]) < tolerance * max(1, expected[0])
    assert result[1].keys() == expected[1].keys()
    assert max((result[1][name] - expected[1][name]).abs().max() for name in expected[1]) < tolerance


# --- steps ------------------------------------------------------------------------------------------------------------

LAYOUTS = {
    "flat": {},
    "padded": {"padding_free": False},
    "padded to a multiple": {"padding_free": False, "pad_to_multiple_of": 16},
    "flat, whole logits": {"fused_loss": False},
    "padded, whole logits": {"padding_free": False, "fused_loss": False},
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("size", [8, 2, 1], ids=["1 x 8", "4 x 2", "8 x 1"])
@pytest.mark.parametrize("family", representative(["llama", "qwen2"], 1))
def test_step_does_not_depend_on_micro_batching_and_layout(family, size, layout):
    all_rows = rows()
    expected = reference(tiny(family), all_rows)
    assert_same(gradients(tiny(family), split_rows(all_rows, size), **layout), expected)


@pytest.mark.parametrize("layout", ["flat", "padded"])
def test_packed_step_equals_step_of_its_rows(layout):
    all_rows = rows()
    packs = pack(all_rows, 40)
    assert 1 < len(packs) < len(all_rows)
    assert_same(gradients(tiny(), split_rows(packs, 2), **LAYOUTS[layout]), reference(tiny(), all_rows))


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "mistral", "cohere", "bloom", "opt", "stablelm", "falcon"])
def test_other_families_take_the_same_step(family):
    all_rows = rows(4)
    assert_same(gradients(tiny(family), split_rows(all_rows, 2)), reference(tiny(family), all_rows), 5e-6)


def test_token_weights_scale_loss_and_count_in_the_mean():
    all_rows = rows(weights=True)
    flat = gradients(tiny(), split_rows(all_rows, 4))
    assert_same(flat, gradients(tiny(), split_rows(all_rows, 1), padding_free=False, fused_loss=False))
    doubled = [{**row, "loss_weights": [2 * weight for weight in row["loss_weights"]]} for row in all_rows]
    assert_same(flat, gradients(tiny(), split_rows(doubled, 4)))
    silent = [{**row, "loss_weights": [0.0] * len(row["input_ids"])} for row in all_rows[:4]]
    assert_same(gradients(tiny(), [silent, all_rows[4:]]), gradients(tiny(), [all_rows[4:]]))


def test_bfloat16_step_is_equal_up_to_rounding():
    all_rows = rows()
    exact = reference(tiny(), all_rows)
    with torch.autocast("cpu", torch.bfloat16):
        rough, plain = gradients(tiny(), split_rows(all_rows, 4)), reference(tiny(), all_rows)
    distance = [sum((one[1][n] - exact[1][n]).square().sum() for n in exact[1]) for one in (rough, plain)]
    assert distance[0] < 1.5 * distance[1]


def test_batch_without_labels_gives_exact_zero_with_a_graph():
    objective, module = fit_objective(model := tiny())
    blank = _without_labels(objective.collate(rows(2)))
    loss = objective.loss(module, blank)
    loss.total.backward()
    assert loss.total == 0
    assert objective.num_items(blank) == 0
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_batch_without_trained_tokens_gives_no_nan():
    objective, module = fit_objective(tiny())
    untrained = {"input_ids": [5, 6, 7], "labels": [IGNORE_INDEX] * 3}
    assert objective.loss(module, objective.collate([untrained])).total == 0


def test_training_computes_only_logits_of_one_chunk():
    from largest_tensor import LargestTensor

    objective, module = fit_objective(tiny(vocab_size=4001))
    batch = objective.collate(rows())
    learned = len(batch["target_positions"])
    with LargestTensor() as largest:
        objective.loss(module, batch).total.backward()
    assert largest.numel <= max(learned * 4001, 4001 * 32)
    assert learned < batch["input_ids"].numel() * 0.6


# --- loss implementations ---------------------------------------------------------------------------------------------


def test_non_linear_head_computes_full_logits_and_is_reported():
    model = tiny()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    objective, _ = fit_objective(model)
    assert "not a plain linear layer" in objective.notes[0]
    expected = reference(tiny(), all_rows := rows(4))
    mine = gradients(model, split_rows(all_rows, 2))
    assert_same((mine[0], {name.replace("head.0", "head"): grad for name, grad in mine[1].items()}), expected)


@pytest.mark.parametrize("whole", [["lm_head"], ["embed_tokens", "lm_head"]], ids="-".join)
def test_head_that_peft_trains_as_a_whole_computes_no_full_logits(whole):
    from peft import LoraConfig, get_peft_model

    def adapted():
        torch.manual_seed(0)
        config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=whole, task_type="CAUSAL_LM")
        return get_peft_model(tiny(), config)

    objective, _ = fit_objective(adapted())
    assert not objective.notes
    groups = split_rows(rows(4), 2)
    fused, whole_logits = gradients(adapted(), groups), gradients(adapted(), groups, fused_loss=False)
    assert_same(fused, whole_logits)
    assert any("lm_head.modules_to_save" in name for name in fused[1])


def test_head_is_the_original_one_while_the_adapter_is_disabled():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(tiny(), LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"]))
    objective, _ = fit_objective(model)
    wrapper = model.get_base_model().lm_head
    assert objective.head.linear is wrapper.modules_to_save["default"]
    with model.disable_adapter():
        assert objective.head.linear is wrapper.original_module


class PromptTuned(torch.nn.Module):
    """Puts a trainable prompt of three tokens before each row, like peft's prompt tuning."""

    def __init__(self, model):
        super().__init__()
        self.model, self.prompt = model.requires_grad_(False), torch.nn.Parameter(torch.randn(1, 3, 32))

    def get_base_model(self):
        return self.model

    def forward(self, input_ids, attention_mask=None, position_ids=None, cu_seq_lens_q=None, **inputs):
        embeddings = self.model.get_input_embeddings()(input_ids)
        prompted = torch.cat([self.prompt.expand(len(input_ids), -1, -1), embeddings], 1)
        return self.model(inputs_embeds=prompted, use_cache=inputs["use_cache"])


def test_learned_prompt_does_not_shift_positions():
    all_rows = rows(4)
    whole = gradients(model := PromptTuned(tiny()), [all_rows])
    assert whole[1].keys() == {"prompt"}
    assert_same(whole, gradients(model, split_rows(all_rows, 1)))
    ids, labels = (torch.tensor([all_rows[0][name]]) for name in ("input_ids", "labels"))
    logits = model(ids, use_cache=False).logits[:, 3:]
    alone = model.model.loss_function(logits, labels, 97)
    assert torch.allclose(gradients(model, [all_rows[:1]])[0], alone)


def test_impossible_fused_loss_request_is_rejected():
    model = tiny()
    model.lm_head = torch.nn.Sequential(model.lm_head)
    with pytest.raises(UserError, match="fused_loss"):
        fit_objective(model, fused_loss=True)


def test_label_smoothing_matches_transformers():
    from transformers.trainer_pt_utils import LabelSmoother

    all_rows, model = rows(1), tiny()
    labels = torch.tensor([all_rows[0]["labels"]])
    output = model(input_ids=torch.tensor([all_rows[0]["input_ids"]]))
    expected = LabelSmoother(0.2)(output, labels, shift_labels=True)
    for layout in LAYOUTS.values():
        assert torch.allclose(gradients(tiny(), [all_rows], label_smoothing_factor=0.2, **layout)[0], expected)


def test_accuracy_and_entropy_are_summed_on_request():
    for layout in LAYOUTS.values():
        objective, module = fit_objective(tiny(), compute_accuracy=True, compute_entropy=True, **layout)
        batch = objective.collate(rows(4))
        sums, weight = objective.loss(module, batch).sums, objective.num_items(batch)
        assert set(sums) == {"accuracy", "entropy"}
        assert 0 <= sums["accuracy"] <= weight
        # The entropy of random weights is close to that of a uniform distribution, log 97 = 4.57.
        assert 4.5 < sums["entropy"] / weight < 4.58
    assert fit_objective(tiny())[1](batch).sums == {}


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_router_loss_is_added_as_in_transformers(family):
    all_rows = rows(1)
    ids, labels = (torch.tensor([all_rows[0][name]]) for name in ("input_ids", "labels"))
    model = tiny(family)
    output = model(input_ids=ids, labels=labels, output_router_logits=True)
    assert torch.allclose(gradients(tiny(family), [all_rows])[0], output.loss)
    assert torch.allclose(
        gradients(tiny(family), [all_rows], router_aux_loss_coef=0.5)[0],
        output.loss + (0.5 - model.config.router_aux_loss_coef) * output.aux_loss,
    )
    without = gradients(tiny(family, output_router_logits=False), [all_rows])[0]
    assert torch.allclose(without, gradients(tiny(family), [all_rows], router_aux_loss_coef=0.0)[0])
    assert without < output.loss


def test_router_loss_is_rejected_without_a_router():
    with pytest.raises(UserError, match="router_aux_loss_coef"):
        fit_objective(tiny(), router_aux_loss_coef=0.1)


def test_router_loss_without_gradient_is_rejected():
    """With reentrant checkpointing, the router logits that the loss gets have no graph."""
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(UserError, match="auxiliary loss would have no gradient"):
        fit_objective(tiny("mixtral"), **reentrant)
    for options in (reentrant | {"router_aux_loss_coef": 0.0}, {"gradient_checkpointing": True}):
        fit_objective(tiny("mixtral"), **options)


# --- noise ------------------------------------------------------------------------------------------------------------


def noise_of(module, batch):
    """Return the noise that is added to the embeddings of a batch."""
    recorded = []
    embedding = module.model.get_input_embeddings()
    hook = embedding.register_forward_hook(lambda layer, inputs, output: recorded.append((layer, inputs[0], output)))
    module(batch)
    hook.remove()
    layer, ids, output = recorded[0]
    return output - torch.nn.functional.embedding(ids, layer.weight)


def test_embedding_noise_is_training_only_and_scales_with_sequence_length():
    objective, module = fit_objective(tiny(), neftune_noise_alpha=5.0)
    lengths = [4, 64]
    batch = objective.collate([{"input_ids": [3] * n, "labels": [3] * n} for n in lengths])
    noise = noise_of(module, batch)[0]
    for part, length in zip(noise.split(lengths), lengths, strict=True):
        bound = 5.0 / (length * 32) ** 0.5
        assert part.abs().max() <= bound
        assert part.abs().max() > 0.9 * bound
    assert not noise_of(module.eval(), batch).any()


def test_embedding_noise_matches_transformers_for_a_single_row():
    from transformers.integrations import activate_neftune

    objective, module = fit_objective(tiny(), neftune_noise_alpha=5.0)
    batch = objective.collate([{"input_ids": list(range(3, 20)), "labels": list(range(3, 20))}])
    torch.manual_seed(1)
    ours = noise_of(module, batch)
    theirs = tiny()
    activate_neftune(theirs, 5.0)
    torch.manual_seed(1)
    noisy = theirs.get_input_embeddings()(batch["input_ids"])
    plain = torch.nn.functional.embedding(batch["input_ids"], theirs.get_input_embeddings().weight)
    assert torch.allclose(ours, noisy - plain, atol=1e-6)


def test_row_length_excludes_padding():
    objective, _ = fit_objective(tiny(), padding_free=False)
    batch = objective.collate([{"input_ids": [3] * n, "labels": [3] * n} for n in (4, 64)])
    assert sequence_lengths(batch).flatten().tolist() == [4, 64]


# --- rows -------------------------------------------------------------------------------------------------------------


class Template:
    fingerprint = "abc"

    def encode_arrays(self, examples, stats):
        return [{"input_ids": [1], "labels": [1]} for _ in examples]

    def encode_text(self, examples, stats, truncate=True):
        return [{"input_ids": [2, 2], "labels": [2, 2]} if truncate else None for _ in examples]


def test_fine_tuning_encodes_conversations_and_pretraining_text():
    examples, stats = [Example(text="a")], DataStats()
    assert SftObjective(Options(), Template()).encode(examples, stats)[0]["input_ids"] == [1]
    pretrain = PretrainObjective(Options(), Template())
    assert pretrain.encode(examples, stats)[0]["input_ids"] == [2, 2]
    assert pretrain.encode(examples, stats, truncate=False) == [None]


def test_objectives_are_selected_by_stage_and_reject_rows_of_another():
    assert (OBJECTIVES["sft"], OBJECTIVES["pt"]) == (SftObjective, PretrainObjective)
    assert SftObjective(Options(), Template()).fingerprint != PretrainObjective(Options(), Template()).fingerprint


def test_collating_before_the_model_is_set_raises():
    with pytest.raises(RuntimeError, match="configure"):
        SftObjective(Options(), Template()).collate([])


def test_position_t_predicts_token_t_plus_one():
    labels = torch.tensor([[5, IGNORE_INDEX, 7], [IGNORE_INDEX, 8, IGNORE_INDEX]])
    assert target_positions(labels).tolist() == [1, 3]

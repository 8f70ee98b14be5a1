"""A preference training step gives the same update for any micro-batching and layout."""

import pytest
import torch

from burnish.config.options import union
from burnish.data.batches.batching import BatchingOptions, collator
from burnish.losses.kto import KtoObjective, KtoOptions
from burnish.losses.lm import LmOptions
from burnish.losses.pairs import PairObjective
from burnish.losses.preference_losses import PAIR_LOSSES
from burnish.losses.preference_options import PairOptions, PreferenceOptions
from burnish.losses.reference import SeparateModel
from burnish.losses.reward import RewardObjective, RewardOptions
from burnish.models.patches.attention import make_padding_free
from burnish.models.patches.capabilities import find_capabilities
from burnish.parallel.options import ParallelOptions
from burnish.parallel.single import SingleProcess
from burnish.utils.patching import PatchOptions
from representative import representative_slow
from tiny_models import tiny_model

pytestmark = pytest.mark.run

Flat = union(
    "Flat", PairOptions, KtoOptions, RewardOptions, LmOptions, PreferenceOptions, PatchOptions, BatchingOptions
)
CUTS = {"8x1": (1,) * 8, "4x2": (2,) * 4, "1x8": (8,), "3+3+2": (3, 3, 2)}
SAME = 5e-6  # relative, of the whole update; float32 sums in another order


def answer(generator, prompt):
    length = int(torch.randint(3, 14, (), generator=generator))
    ids = torch.randint(3, 64, (length,), generator=generator).tolist()
    return prompt + ids, [-100] * len(prompt) + ids


def rows(kind, count=8):
    generator = torch.Generator().manual_seed(1)
    result = []
    for number in range(count):
        prompt = torch.randint(
            3, 64, (int(torch.randint(4, 40, (), generator=generator)),), generator=generator
        ).tolist()
        (first, first_labels), (second, second_labels) = answer(generator, prompt), answer(generator, prompt)
        if kind == "unpaired":
            result.append({"input_ids": first, "labels": first_labels, "tag": number % 3 > 0, "kl_input_ids": second,
                         "kl_labels": second_labels})  # fmt: skip
        else:
            result.append({"chosen_input_ids": first, "chosen_labels": first_labels, "rejected_input_ids": second,
                         "rejected_labels": second_labels})  # fmt: skip
    return result


def update(kind, cut, is_padding_free=True, needed=True, fused=True, **overrides):
    """Return loss and gradients of one step, computed as in the loop."""
    options = Flat(**overrides, fused_loss="auto" if fused else False)
    policy, reference = tiny_model(seed=0, max_position_embeddings=128), tiny_model(seed=1, max_position_embeddings=128)
    objective = {"pairs": PairObjective, "unpaired": KtoObjective, "scores": RewardObjective}[kind](
        options, template=None
    )
    if is_padding_free:
        assert make_padding_free(policy).is_padding_free
        assert make_padding_free(reference).is_padding_free
    torch.manual_seed(0)
    objective.configure(
        find_capabilities(policy, head_of=policy), collator(options, 0, is_padding_free, is_padding_free and needed)
    )
    if kind != "scores":
        objective.reference = SeparateModel(objective.module_of_reference(reference))
    module, engine = objective.module(policy).train(), SingleProcess(ParallelOptions(use_cpu=True))
    every, batches, start = rows("pairs" if kind == "scores" else kind), [], 0
    for size in cut:
        batches.append(objective.collate(every[start : start + size]))
        start += size
    ready = objective.prepare_step(module, batches, engine)
    weight = torch.stack([objective.num_items(batch) for batch in ready]).sum()
    total = 0.0
    for batch in ready:
        loss = objective.loss(module, batch)
        (loss.total / weight).backward()
        total += loss.total.item()
    gradients = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    return total / weight.item(), gradients


CASES = {
    **{name: ("pairs", {"pref_loss": [name]}) for name in PAIR_LOSSES if name != "exo_pair"},
    "exo_pair": ("pairs", {"pref_loss": ["exo_pair"], "dpo_label_smoothing": 0.1}),
    "mpo": ("pairs", {"pref_loss": ["sigmoid", "bco_pair", "sft"], "pref_loss_weights": [0.8, 0.2, 1.0]}),
    "ftx": ("pairs", {"pref_ftx": 1.0}),
    "bco": ("pairs", {"pref_bco_weight": 1.0}),
    "cpo with its likelihood": ("pairs", {"pref_loss": ["cpo"], "cpo_alpha": 1.0}),
    "longer answers count less": ("pairs", {"ld_alpha": 0.5}),
    "weighted": ("pairs", {"use_weighting": True}),
    "kto": ("unpaired", {}),
    "kto with ftx": ("unpaired", {"pref_ftx": 1.0}),
    "rm": ("scores", {"center_rewards_coefficient": 0.1}),
}


@pytest.mark.parametrize("name", representative_slow(CASES, ("sigmoid", "kto with ftx", "rm")))
def test_update_does_not_depend_on_micro_batching_or_layout(name):
    kind, options = CASES[name]
    loss, whole = update(kind, CUTS["8x1"], **options)
    assert whole.norm() > 0
    ways = {cut: {"cut": CUTS[cut]} for cut in ("4x2", "1x8", "3+3+2")}
    ways["padded"] = {"cut": CUTS["4x2"], "is_padding_free": False}
    ways["flat"] = {"cut": CUTS["3+3+2"], "needed": False}
    ways["whole logits"] = {"cut": CUTS["4x2"], "fused": False}
    for way, how in ways.items():
        other, gradients = update(kind, **how, **options)
        assert other == pytest.approx(loss, rel=1e-5, abs=1e-6), way
        assert (gradients - whole).norm() < SAME * whole.norm(), way


@pytest.mark.parametrize("fused", [True, False])
def test_token_log_probabilities_have_gradients_and_sum_to_sequence_ones(fused):
    options, policy = Flat(fused_loss="auto" if fused else False), tiny_model(seed=0, max_position_embeddings=128)
    assert make_padding_free(policy).is_padding_free
    objective = PairObjective(options, template=None)
    objective.configure(find_capabilities(policy, head_of=policy), collator(options, 0, True))
    batch = objective.collate(rows("pairs", 3))
    values = objective.module(policy).train()(batch)
    sums = torch.zeros(6).index_add(0, batch["owner"], values.token_logps.detach())
    assert torch.allclose(sums, values.logps.detach(), atol=1e-5)

    weights = torch.linspace(-1, 1, len(values.token_logps))  # like per-token advantages
    (values.token_logps * weights).sum().backward()
    result = {name: parameter.grad.clone() for name, parameter in policy.named_parameters()}
    policy.zero_grad()
    logps = []
    for row in rows("pairs", 3):
        for side in ("chosen", "rejected"):
            ids, labels = torch.tensor(row[f"{side}_input_ids"]), torch.tensor(row[f"{side}_labels"])
            every = policy(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            logps.append(every[labels[1:] >= 0])
    plain = torch.cat(logps)
    assert torch.allclose(plain, values.token_logps, atol=1e-5)
    (plain * weights).sum().backward()
    for name, parameter in policy.named_parameters():
        assert torch.allclose(result[name], parameter.grad, atol=1e-4), name


def test_each_sequence_of_a_row_has_a_title_for_explain():
    kinds = {KtoObjective: "unpaired", PairObjective: "pairs", RewardObjective: "pairs"}
    titles = {
        objective: [objective(Flat(), template=None).sequence_title(rows(kind, 1)[0], name) for name in names]
        for (objective, kind), names in zip(kinds.items(), [["", "kl"], ["chosen"], ["rejected"]], strict=True)
    }
    assert titles == {
        KtoObjective: ["an undesirable response, ", "its prompt with another example's response, for the KL term; "],
        PairObjective: ["the chosen response, "],
        RewardObjective: ["the rejected response, scored at its last token; "],
    }

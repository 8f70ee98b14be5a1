"""One training step of a tiny language model: rows, objective, loss and gradients for a micro-batching."""

import random

import torch

from burnish.config.options import union
from burnish.data.batches.batching import BatchingOptions, collator
from burnish.loop.types import IGNORE_INDEX
from burnish.losses.lm import LmOptions, SftObjective
from burnish.models.patches.attention import make_padding_free
from burnish.models.patches.capabilities import find_capabilities
from burnish.parallel.options import ParallelOptions
from burnish.utils.patching import PatchOptions

Options = union("Options", LmOptions, BatchingOptions, ParallelOptions, PatchOptions)


def rows(num=8, seed=0, weights=False):
    """Return rows of 3 to 30 tokens whose first half is the prompt."""
    generator = random.Random(seed)
    result = []
    for _ in range(num):
        ids = [generator.randint(3, 96) for _ in range(generator.randint(3, 30))]
        row = {"input_ids": ids, "labels": [IGNORE_INDEX] * (len(ids) // 2) + ids[len(ids) // 2 :]}
        result.append({**row, "loss_weights": [generator.random() * 2 for _ in ids]} if weights else row)
    return result


def split_rows(all_rows, size):
    return [all_rows[start : start + size] for start in range(0, len(all_rows), size)]


def fit_objective(model, **overrides):
    options = Options(**overrides)
    objective = SftObjective(options, template=None)
    is_padding_free = options.padding_free and make_padding_free(model).is_padding_free
    objective.notes = objective.configure(
        find_capabilities(model, head_of=model), collator(options, 0, is_padding_free)
    )
    return objective, objective.module(model)


def gradients(model, groups, **options):
    """Return the loss and the gradients of one step whose micro-batches are ``groups`` of rows."""
    objective, module = fit_objective(model, **options)
    batches = [objective.collate(group) for group in groups]
    weight = torch.stack([objective.num_items(batch) for batch in batches]).sum()
    model.zero_grad()
    losses = [objective.loss(module, batch) for batch in batches]
    for loss in losses:
        (loss.total / weight).backward()
    mean = torch.stack([loss.total.detach() for loss in losses]).sum() / weight
    return mean, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

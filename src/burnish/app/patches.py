"""The patches that a run will make to a model's code, found without its weights.

In:  options, config, tokenizer. Out: the patches of the model on the meta device, made by the very functions that the
     run calls; and the kinds of those that the run tries before its first step and keeps where the model says the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from burnish.adapters.base import ADAPTERS
from burnish.app.build import takes_own_attention, wants_padding_free
from burnish.app.options import RunOptions
from burnish.core.patching import Reason, allows, patch
from burnish.engine.checkpointing import checkpoint_activations
from burnish.engine.options import device_of
from burnish.models.attention import PADDING_FREE
from burnish.models.fused import patch_forwards
from burnish.models.liger import LIGER, takes_liger
from burnish.models.load import SAMPLING, samples_without_sampling
from burnish.models.quantize import UNTOUCHED
from burnish.models.source import adapter_folders
from burnish.models.tokens import fitted_shapes
from burnish.objectives.neftune import EmbeddingNoise
from burnish.ops.gpu.kernels import ask_for_kernels
from burnish.ops.probe import causal_lm
from burnish.ops.tied import TIED


def patched_shapes(options: RunOptions, config: Any, tokenizer: Any) -> nn.Module:
    """The model without weights, with its adapter and the patches that its structure alone decides."""
    with torch.device("meta"):
        model = ADAPTERS[options.finetuning_type](options, adapter_folders(options)).attach(
            fitted_shapes(config, tokenizer, options)
        )
    if samples_without_sampling(model):
        patch(model, "generation_config.do_sample", True, SAMPLING)
    ask_for_kernels(options.gpu_kernels)
    if not options.torch_compile:
        patch_forwards(model, options, device_of(options))
    if options.neftune_noise_alpha is not None:
        EmbeddingNoise(causal_lm(model).get_input_embeddings(), options.neftune_noise_alpha)
    if options.gradient_checkpointing:
        checkpoint_activations(model, options.gradient_checkpointing_kwargs)
    return model


def tried_patches(options: RunOptions, config: Any) -> list[Reason]:
    """The kinds that the run tries on the weights."""
    wanted = {
        PADDING_FREE: wants_padding_free(options) and takes_own_attention(options),
        TIED: options.fused_loss is not False and config.get_text_config().tie_word_embeddings,
        LIGER: takes_liger(options, device_of(options)),
    }
    found = [why for why, is_wanted in wanted.items() if is_wanted and allows(options, why)]
    return [*found, UNTOUCHED] if options.quantization_bit == 4 else found

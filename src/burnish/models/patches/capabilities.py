"""Probe the capabilities of a model once before its first step, for the command line and for ``Trainer``.

In: a model with its adapter, and the requested features. Out: ``Capabilities``: the features that reproduce the model's
own results. Each probe needs a few forward passes over about twenty tokens (``kernels.probe``). Weights, gradients,
random states and the mode of every module are not changed. The attention implementation is replaced if sequences are to
be concatenated and the model's own attention cannot separate them (``models.patches.attention``).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

from torch import nn

from burnish.kernels.last_layer import find_last_layer
from burnish.kernels.probe import Capabilities, find_head, makes_some_logits, shares_prefixes, unwrap_peft
from burnish.models.patches.attention import PaddingFree, make_padding_free
from burnish.models.quantization.quantize import keep_as_loaded


def find_capabilities(
    model: nn.Module, *, padding_free: bool = False, own_attention: bool = True, prefix_sharing: bool = False,
    last_layer: bool = True, head_of: nn.Module | None = None,
) -> Capabilities:  # fmt: skip
    """Probe a model.

    Args:
        model: a model of transformers, with or without adapter.
        padding_free: whether sequences should be concatenated.
        own_attention: whether burnish's attention may replace the model's; false if one was selected explicitly.
        prefix_sharing: whether common prefixes of rows should be computed once.
        last_layer: whether then the last layer may be computed only where the loss reads its result.
        head_of: the model whose head is searched: ``model`` or the one inside an adapter. None: no head is needed.
    """
    keep_as_loaded(model)  # the probes run outside of training
    layout = make_padding_free(model, own_attention=own_attention) if padding_free else PaddingFree(False)
    head = None if head_of is None else find_head(head_of)
    shares = prefix_sharing and layout.is_padding_free and shares_prefixes(model)
    limited = find_last_layer(model) if shares and last_layer else None
    needs_logits = head_of is not None and (  # the loss of a mixture of experts may need the model's own output
        head is None or hasattr(unwrap_peft(model).config.get_text_config(), "router_aux_loss_coef")
    )
    return Capabilities(
        model,
        is_padding_free=layout.is_padding_free,
        shares_prefixes=shares,
        head=head if head is None or limited is None else replace(head, only=limited.only),
        only=nullcontext if limited is None else limited.only,
        makes_some_logits=needs_logits and makes_some_logits(model),
        notes=(layout.note,) if layout.note else (),
    )

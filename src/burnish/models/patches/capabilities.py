"""Capabilities of a model, probed once before its first step, for the command line and for ``Trainer``.

In: a model with its adapter, and the features that a run would like to use. Out: ``Capabilities``: the features that
were seen to give the model's own result. Each probe is a few forward passes over about twenty tokens
(``kernels.probe``); features that are not requested are not probed. Weights, gradients, random states and the mode of
every module stay unchanged. The attention implementation is replaced where sequences are to be concatenated and the
model's own cannot keep them apart (``models.patches.attention``).
"""

from __future__ import annotations

from torch import nn

from burnish.kernels.probe import Capabilities, causal_lm, find_head, makes_some_logits, shares_prefixes
from burnish.models.patches.attention import PaddingFree, make_padding_free
from burnish.models.quantization.quantize import keep_as_loaded


def find_capabilities(
    model: nn.Module, *, padding_free: bool = False, own_attention: bool = True, prefix_sharing: bool = False,
    head_of: nn.Module | None = None,
) -> Capabilities:  # fmt: skip
    """Ask a model.

    Args:
        padding_free: are sequences to lie end to end?
        own_attention: may burnish's attention stand in for the model's? Not where one was asked for by name.
        prefix_sharing: are prefixes that rows have in common to be computed once?
        head_of: the model whose head is looked for: this one, or the one inside an adapter; None for none.
    """
    keep_as_loaded(model)  # questions are asked outside of training
    layout = make_padding_free(model, own_attention=own_attention) if padding_free else PaddingFree(False)
    head = None if head_of is None else find_head(head_of)
    needs_logits = head_of is not None and (  # the loss of a mixture of experts may be made of its own output
        head is None or hasattr(causal_lm(model).config.get_text_config(), "router_aux_loss_coef")
    )
    return Capabilities(
        model,
        is_padding_free=layout.is_flat,
        shares_prefixes=prefix_sharing and layout.is_flat and shares_prefixes(model),
        head=head,
        makes_some_logits=needs_logits and makes_some_logits(model),
        notes=(layout.note,) if layout.note else (),
    )

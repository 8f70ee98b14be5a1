"""Next-token prediction: pretraining (``stage: pt``) and supervised fine-tuning (``stage: sft``).

In: examples, a template, a causal language model. Out: rows; micro-batches; and for a micro-batch the sum of the
negative log-likelihood of the tokens that are learned, never a mean.

Position t predicts token t + 1; the shift happens in ``learned_positions`` and nowhere else. From there on only
learned positions count: they alone go through the head, in chunks (``ops.cross_entropy``). The plain way, all logits
of all positions, is a switch away (``fused_loss: false``) and gives the same numbers.
"""

# B rows, T tokens in a row, S sequences in a flat row, N learned positions, H hidden size, V vocabulary

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from burnish.core.errors import Problem, UserError
from burnish.core.options import option
from burnish.core.types import IGNORE_INDEX, Batch, Example, FlatRow, Loss, Row
from burnish.engine.options import device_of
from burnish.objectives.base import OBJECTIVES, Collate, Encoder
from burnish.objectives.neftune import EmbeddingNoise
from burnish.ops.cross_entropy import TokenLoss, TokenSums, plain_cross_entropy
from burnish.ops.head_kernels import LIBRARIES, WAYS, head_loss, obstacle
from burnish.ops.probe import Head, causal_lm, find_head, makes_some_logits
from burnish.ops.tied import TiedWeight, is_plain_lookup

_NOT_FOR_THE_MODEL = {"labels", "loss_weights", "learned", "num_tokens"}


@dataclass
class LmOptions:
    """How the loss of a language model is made."""

    label_smoothing_factor: float = option(0.0, "Share of each target spread over the whole vocabulary.", ge=0, lt=1)
    neftune_noise_alpha: float | None = option(None, "Size of the noise on embeddings in training (NEFTune).", gt=0)
    fused_loss: bool | str = option(
        "auto", "Head and loss in chunks, without all logits; auto does so where the model's head allows it. By name: "
        "chunked is burnish's own, liger and cut_cross_entropy are kernels of other libraries, for a GPU.",
        choices=("auto", True, False, *WAYS),
    )  # fmt: skip
    use_dft_loss: bool = option(
        False, "Multiply the loss of each token by the probability that the model gives it (DFT)."
    )
    use_eaft_loss: bool = option(
        False, "Multiply the loss of each token by how undecided the model is between its likeliest candidates (EAFT)."
    )
    eaft_alpha: float = option(1.0, "The power to which EAFT raises that entropy.", ge=0)
    router_aux_loss_coef: float | None = option(
        None, "Weight of the loss that balances a mixture of experts; as the model's config says if not given.", ge=0,
        aliases=("moe_aux_loss_coef",),
    )  # fmt: skip
    compute_accuracy: bool = option(False, "Log the share of tokens whose most probable candidate is right.")
    compute_entropy: bool = option(False, "Log the mean entropy of the predictions.")


def check_fused_loss(options: Any) -> list[Problem]:
    """A kernel that was asked for by name, and cannot do what else is asked, or not here."""
    reason = obstacle(way_of(options), device_of(options), token_loss(options)) if options.fused_loss else ""
    if not reason:
        return []
    return [Problem(f"fused_loss: {options.fused_loss} cannot be used. {reason}", remedy="Leave fused_loss out.")]


def check_loss_factors(options: Any) -> list[Problem]:
    if not (options.use_dft_loss and options.use_eaft_loss):
        return []
    return [Problem('"use_dft_loss" and "use_eaft_loss" are two losses.', remedy="Leave one of the two out.")]


def loss_notes(options: Any) -> list[str]:
    if options.eaft_alpha == LmOptions().eaft_alpha or options.use_eaft_loss:
        return []
    return ['"eaft_alpha" has no effect without use_eaft_loss.']


def way_of(options: Any) -> str:
    """The way of ``ops.head_kernels`` that head and loss go, where they are fused."""
    return options.fused_loss if options.fused_loss in LIBRARIES else "chunked"


def token_loss(options: Any, softcap: float | None = None) -> TokenLoss:
    factor: Literal["dft", "eaft"] | None = "dft" if options.use_dft_loss else "eaft" if options.use_eaft_loss else None
    return TokenLoss(
        options.label_smoothing_factor, softcap, options.compute_accuracy, options.compute_entropy, factor,
        options.eaft_alpha,
    )  # fmt: skip


class LmObjective:
    """What pretraining and fine-tuning share: everything but the way from an example to a row.

    Args:
        options: the flat options; those of ``LmOptions`` are read.
        template: examples -> rows.
        tokenizer: what every objective is given; not read here.
    """

    def __init__(self, options: Any, template: Encoder, tokenizer: Any = None) -> None:
        self.options = options
        self.template = template
        self.head: Head | None = None
        self.makes_some_logits = False
        self.collate: Collate = _unfitted

    @property
    def fingerprint(self) -> str:
        return f"{type(self).__name__} {self.template.fingerprint}"

    @property
    def metrics(self) -> list[str]:
        """What an evaluation says of a set; the last is there where the model has a router."""
        accuracy, entropy = self.options.compute_accuracy, self.options.compute_entropy
        return ["loss", *["accuracy"] * accuracy, *["entropy"] * entropy, "aux_loss"]

    def fit(self, model: nn.Module, collate: Collate) -> list[str]:
        """Learn how the model makes its logits.

        Args:
            collate: rows -> micro-batch, flat or padded, as suits the model (``data.batching.collator``).
        Returns:
            Sentences for a person.
        Raises:
            UserError: where ``fused_loss`` is asked for and the head of the model does not allow it, and where the loss
                of a router would have no gradient.
        """
        self.collate = partial(collate_learned, collate)
        if aux_coefficient(causal_lm(model), self.options.router_aux_loss_coef) and _is_reentrant(self.options):
            raise UserError(_ROUTER_WITHOUT_GRADIENT)
        if self.options.fused_loss is False:
            return []
        self.head = find_head(model)
        if self.head is None or aux_coefficient(causal_lm(model), self.options.router_aux_loss_coef):
            self.makes_some_logits = makes_some_logits(model)
        if self.head is not None:
            bias, weight = self.head.linear.bias, self.head.linear.weight
            what = obstacle(way_of(self.options), weight.device, token_loss(self.options), bias is not None)
        else:
            name = type(causal_lm(model)).__name__
            what = f"The head of {name} is not a plain linear layer over its last hidden states."
        if what and self.options.fused_loss != "auto":
            asked = str(self.options.fused_loss).lower()
            raise UserError(Problem(f'"fused_loss" is {asked}. {what}', remedy="Leave fused_loss out."))
        return [f"{what} Its loss is made of whole logits, which takes more memory."] if what else []

    def allows_needed_only(self, model: nn.Module) -> bool:
        """Whether tokens that no loss depends on may be left out, and those that rows share be computed once: not where
        each token of a row gets noise of its own, nor where a loss is a mean over all tokens."""
        aux = aux_coefficient(causal_lm(model), self.options.router_aux_loss_coef)
        return self.options.neftune_noise_alpha is None and not aux

    def module(self, model: nn.Module) -> nn.Module:
        """The model and its loss as one module. ``fit`` comes first."""
        return ModelWithLoss(model, self.head, self.makes_some_logits, self.options)

    def weight(self, batch: Batch) -> Tensor:
        """() the learned tokens, or the sum of their weights."""
        is_learned: Tensor = batch["labels"][:, 1:] != IGNORE_INDEX
        if "loss_weights" in batch:
            return is_learned.mul(batch["loss_weights"][:, 1:]).sum()
        return is_learned.sum().float()

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        """Args: module: what ``module`` made, as the engine wrapped it."""
        loss: Loss = module(batch)
        return loss


@OBJECTIVES.register("sft", options=LmOptions)
class SftObjective(LmObjective):
    """Answers, given what precedes them."""

    def encode(self, examples: Sequence[Example], tally: Any, cut: bool = True) -> list[FlatRow | None]:
        """Args: cut: without effect: a conversation is always held to ``cutoff_len``, turn by turn."""
        return self.template.encode_flat(examples, tally)


@OBJECTIVES.register("pt", options=LmOptions)
class PretrainObjective(LmObjective):
    """Plain text, all of it."""

    def encode(self, examples: Sequence[Example], tally: Any, cut: bool = True) -> list[FlatRow | None]:
        """Args: cut: hold rows to ``cutoff_len``; false where packing splits them (``data.batching.splits_rows``)."""
        return self.template.encode_text(examples, tally, cut=cut)


# --- batches ----------------------------------------------------------------------------------------------------------


def collate_learned(collate: Collate, rows: Sequence[Row]) -> Batch:
    """A micro-batch that says which positions are learned, found while it is still on the CPU: on a GPU to look for
    them would mean to wait for the device."""
    batch = collate(rows)
    return {**batch, "learned": learned_positions(batch["labels"])}


def learned_positions(labels: Tensor) -> Tensor:
    """(N,) the positions whose next token is learned, counted through the rows of ``labels`` (B, T)."""
    is_learned = torch.zeros_like(labels, dtype=torch.bool)
    is_learned[:, :-1] = labels[:, 1:] != IGNORE_INDEX
    return is_learned.flatten().nonzero().squeeze(-1)


def _unfitted(rows: Sequence[Row]) -> Batch:
    raise RuntimeError("The objective was not fitted to a model; call fit() before collate().")


# --- model and loss ---------------------------------------------------------------------------------------------------


class ModelWithLoss(nn.Module):
    """A causal language model and its loss as one module: a micro-batch goes in, a ``Loss`` comes out.

    So the wrapper of an engine is called once per micro-batch, and all weights, the head's too, are used inside that
    call: gradients are synced, and sharded weights gathered, as the wrapper means it.

    Args:
        model: a causal language model of transformers, adapted or not.
        head: how its logits are made; None to let it make them.
        makes_some_logits: whether it then can make those of chosen positions alone.
        options: those of ``LmOptions`` are read.

    ``keeps_outputs`` is for an evaluation that wants logits: ``Loss.outputs`` is (B, T, V) then.
    """

    def __init__(self, model: nn.Module, head: Head | None, makes_some_logits: bool, options: Any) -> None:
        super().__init__()
        inner = causal_lm(model)
        self.model = model
        self.keeps_outputs = False
        self._head = head
        self._way = way_of(options)
        self._rules = token_loss(options, head.softcap if head else None)
        self._makes_some_logits = makes_some_logits
        self._aux_coefficient = aux_coefficient(inner, options.router_aux_loss_coef)
        alpha = options.neftune_noise_alpha
        self._noise = EmbeddingNoise(inner.get_input_embeddings(), alpha) if alpha is not None else None

    def forward(self, batch: Batch) -> Loss:
        """The sum over the learned tokens of a micro-batch; an exact zero, with a graph, where there is none."""
        learned = batch["learned"] if "learned" in batch else learned_positions(batch["labels"])
        targets = batch["labels"].flatten()[learned + 1]
        weights = batch["loss_weights"].flatten()[learned + 1] if "loss_weights" in batch else None
        inputs = {name: value for name, value in batch.items() if name not in _NOT_FOR_THE_MODEL}
        inputs["use_cache"] = False  # a cache would let sequences that lie flat see each other
        with self._noise.around(batch) if self._noise and self.training else nullcontext():
            if self._head is not None and not self.keeps_outputs and not self._aux_coefficient:
                return self._loss(self._sums_in_chunks(self._head, inputs, learned, targets, weights))
            return self._loss_from_logits(inputs, learned, targets, weights)

    def _sums_in_chunks(
        self, head: Head, inputs: dict[str, Any], learned: Tensor, targets: Tensor, weights: Tensor | None
    ) -> TokenSums:
        """Args: targets: (N,), ``IGNORE_INDEX`` in a blank batch, which has the positions of the batch that it was made
        of, and no labels. weights: (N,) of tokens; None is 1."""
        weight = head.linear.weight
        with self._tied_weight(weight) as joined:
            hidden = head.hidden_at(learned, **inputs)  # (N, H)
        if head.scale != 1.0:
            hidden = hidden * head.scale
        return head_loss(self._way, hidden, joined, targets, self._rules, head.linear.bias, weights)

    @contextmanager
    def _tied_weight(self, weight: Tensor) -> Iterator[Tensor]:
        """Inside it, an embedding that shares the head's weight (V, H) looks its rows up so that there is one gradient
        of both (``ops.tied``). Yields the weight for the head; the same one where the embedding has its own, or does
        more than to look up."""
        embedding = causal_lm(self.model).get_input_embeddings()
        is_tied = getattr(embedding, "weight", None) is weight and weight.requires_grad and torch.is_grad_enabled()
        if not is_tied or not is_plain_lookup(embedding):
            yield weight
            return
        tied = TiedWeight(weight, embedding.padding_idx)
        embedding.forward = tied.look_up
        try:
            yield tied.joined
        finally:
            del embedding.forward

    def _loss_from_logits(
        self, inputs: dict[str, Any], learned: Tensor, targets: Tensor, weights: Tensor | None
    ) -> Loss:
        """From logits that the model makes: of learned positions where it can make some only, else of all."""
        makes_some = self._makes_some_logits and len(inputs["input_ids"]) == 1 and not self.keeps_outputs
        if makes_some:
            inputs["logits_to_keep"] = learned
        if self._aux_coefficient:
            inputs["output_router_logits"] = True
        output = self.model(**inputs)
        # A learned prompt stands before the tokens of each row, and has logits too.
        logits = output.logits if makes_some else output.logits[:, -inputs["input_ids"].shape[1] :]
        of_learned = logits.flatten(0, 1) if makes_some else logits.flatten(0, 1).index_select(0, learned)
        counts = (targets != IGNORE_INDEX).float()
        weights = counts if weights is None else counts * weights
        sums = plain_cross_entropy(of_learned, targets.clamp(min=0), self._rules, weights)
        aux = output.aux_loss * weights.sum() if self._aux_coefficient else None
        return self._loss(sums, aux, logits.detach() if self.keeps_outputs else None)

    def _loss(self, sums: TokenSums, aux: Tensor | None = None, outputs: Tensor | None = None) -> Loss:
        """Args: aux: () the loss of a router, a mean over tokens, times the weight of the micro-batch: its share of the
        step's mean."""
        named = {}
        if self._rules.accuracy:
            named["accuracy"] = sums.correct
        if self._rules.entropy:
            named["entropy"] = sums.entropy
        if aux is None:
            return Loss(sums.total, named, outputs)
        return Loss(sums.total + self._aux_coefficient * aux, named | {"aux_loss": aux.detach()}, outputs)


def _is_reentrant(options: Any) -> bool:
    given = options.gradient_checkpointing_kwargs if options.gradient_checkpointing else None
    return bool((given or {}).get("use_reentrant"))


_ROUTER_WITHOUT_GRADIENT = Problem(
    'gradient_checkpointing_kwargs: "use_reentrant" is true, and the model has a router. That way runs a layer without '
    "a graph first, and what the router says there is what its loss is made of: the loss would move nothing.",
    remedy="Leave use_reentrant out, or set router_aux_loss_coef: 0.",
)


def aux_coefficient(model: Any, given: float | None) -> float:
    """The weight of the loss that balances the experts: as given, or as the config has it where it asks for that loss.

    Raises:
        UserError: where one is given, and the model has no router.
    """
    config = model.config.get_text_config()
    own = getattr(config, "router_aux_loss_coef", None)
    if given and own is None:
        raise UserError(
            Problem(
                f'"router_aux_loss_coef" balances a mixture of experts, and {type(model).__name__} has none.',
                remedy="Leave it out.",
            )
        )
    if given is not None:
        return given
    return float(own or 0.0) if getattr(config, "output_router_logits", False) else 0.0

"""Next-token prediction: pretraining (``stage: pt``) and supervised fine-tuning (``stage: sft``).

In: examples, a template, a causal language model. Out: rows; micro-batches; for a micro-batch the sum (never the mean)
of the negative log-likelihood of its trained tokens.

Position t predicts token t + 1. The shift happens only in ``logits.target_positions``. Target positions are those whose
next token is trained. Only they pass the head, in chunks (``kernels.cross_entropy``). ``fused_loss: false`` computes
the logits of all positions instead, with the same results.
"""

# B rows, T tokens in a row, S sequences in a padding-free row, N target positions, H hidden size, V vocabulary

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch import Tensor, is_grad_enabled, nn

from burnish.config.checks import check, notes
from burnish.config.errors import Problem, UserError
from burnish.config.options import option
from burnish.kernels.cross_entropy import TokenLoss, TokenSums
from burnish.kernels.probe import Capabilities, Head, unwrap_peft
from burnish.kernels.tied import TIED, TiedEmbedding
from burnish.loop.types import IGNORE_INDEX, Batch, Example, Loss, Row
from burnish.losses.base import OBJECTIVES, Collate, RowEncoder, StageObjective, options_of
from burnish.losses.logits import logits_at, model_inputs
from burnish.losses.neftune import EmbeddingNoise
from burnish.losses.targets import Targets, collate_trained, sums_of_hidden, sums_of_logits
from burnish.parallel.options import ParallelOptions
from burnish.utils.patching import PatchOptions, allows_patch

_ALL_PATCHES = PatchOptions()


@dataclass
class LmOptions:
    """Language modeling loss."""

    label_smoothing_factor: float = option(0.0, "Label smoothing factor.", ge=0, lt=1)
    neftune_noise_alpha: float | None = option(
        None, "Alpha of NEFTune noise on the embeddings in training. 0: no noise.", ge=0
    )
    fused_loss: bool | str = option(
        "auto",
        "Compute the LM head and the loss in chunks, without materializing the full logits. auto: if the LM head is a "
        "plain linear layer; true: raise an error if it is not; false: always materialize the full logits.",
        choices=("auto", True, False),
    )  # fmt: skip
    use_dft_loss: bool = option(False, "Multiply the loss of each token by its predicted probability (DFT).")
    use_eaft_loss: bool = option(
        False, "Multiply the loss of each token by the entropy of the model's top-k predictions (EAFT)."
    )
    eaft_alpha: float = option(1.0, "Exponent of the entropy in EAFT.", ge=0)
    router_aux_loss_coef: float | None = option(
        None, "Weight of the load-balancing loss of a mixture of experts. Default: as in the model's config.", ge=0,
        aliases=("moe_aux_loss_coef",),
    )  # fmt: skip
    compute_accuracy: bool = option(False, "Log the token accuracy.")
    compute_entropy: bool = option(False, "Log the mean entropy of the predictions.")


_TOKEN_LOSS_OPTIONS = ("label_smoothing_factor", "neftune_noise_alpha", "use_dft_loss", "use_eaft_loss")
"""Options of the loss that only stages of language modeling read."""


class LossChoices(LmOptions):
    """Options of losses over tokens, and of gradient checkpointing."""

    gradient_checkpointing: bool
    gradient_checkpointing_kwargs: dict[str, Any] | None


class LmChoices(ParallelOptions, PatchOptions, LossChoices):
    """Options of the language modeling loss."""

    stage: str


@check
def check_loss_factors(options: LmChoices) -> Iterator[Problem]:
    if not (options.use_dft_loss and options.use_eaft_loss):
        return
    yield Problem(
        '"use_dft_loss" and "use_eaft_loss" cannot be combined.',
        remedy="Remove one of them.",
        option=("use_dft_loss", "use_eaft_loss"),
    )


@notes
def loss_notes(options: LmChoices) -> Iterator[str]:
    """Yield notes on loss options that have no effect with the selected stage or loss."""
    unread = [name for name in _TOKEN_LOSS_OPTIONS if name not in options_of(options.stage)] if options.stage else []
    yield from (f'"{name}" has no effect: stage is {options.stage}.' for name in unread if getattr(options, name))
    if options.eaft_alpha != LmOptions().eaft_alpha and not options.use_eaft_loss:
        yield '"eaft_alpha" has no effect without use_eaft_loss.'


def token_loss(options: LmChoices, softcap: float | None = None) -> TokenLoss:
    factor: Literal["dft", "eaft"] | None = "dft" if options.use_dft_loss else "eaft" if options.use_eaft_loss else None
    return TokenLoss(
        options.label_smoothing_factor, softcap, options.compute_accuracy, options.compute_entropy, factor,
        options.eaft_alpha,
    )  # fmt: skip


class LmObjective(StageObjective):
    """Base of pretraining and supervised fine-tuning, which differ only in the encoding of examples.

    Args:
        options: the flat options; those of ``LmOptions`` are read.
        template: examples -> rows.
        tokenizer: not used; part of the interface.
    """

    def __init__(self, options: LmChoices, template: RowEncoder, tokenizer: Any = None) -> None:
        self.options = options
        self.template = template
        self.head: Head | None = None
        self.makes_some_logits = False
        self.collate: Collate = not_configured

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics of an evaluation. The last one applies to models with a router only."""
        accuracy, entropy = self.options.compute_accuracy, self.options.compute_entropy
        return ["loss", *["accuracy"] * accuracy, *["entropy"] * entropy, "aux_loss"]

    def configure(self, capabilities: Capabilities, collate: Collate) -> list[str]:
        """Store how the model computes its logits.

        Args:
            capabilities: properties of the model (``models.patches.capabilities``).
            collate: rows -> micro-batch, padding-free or padded (``data.batches.batching.collator``).

        Returns:
            Notes for the user.

        Raises:
            UserError: if ``fused_loss`` is set but the model's head does not support it, or if a router's auxiliary
                loss would have no gradient.
        """
        self.collate = partial(collate_trained, collate)
        self.makes_some_logits = capabilities.makes_some_logits and self.options.fused_loss is not False
        self.head, notes = head_for_loss(capabilities, self.options)
        return notes

    def allows_prefix_sharing(self, model: nn.Module) -> bool:
        """Whether tokens without influence on a loss may be skipped and shared prefixes computed once.

        Not if each token of a row gets its own noise (NEFTune), or if a loss is a mean over all tokens (router).
        """
        aux = aux_coefficient(unwrap_peft(model), self.options.router_aux_loss_coef)
        return not self.options.neftune_noise_alpha and not aux

    def module(self, model: nn.Module) -> nn.Module:
        """The model and its loss as one module. Requires ``configure`` first."""
        return ModelWithLoss(
            model, self.head, self.makes_some_logits, self.options, self.options, batch_keys=self.batch_keys
        )

    def num_items(self, batch: Batch) -> Tensor:
        """() number of trained tokens, or the sum of their weights."""
        is_trained: Tensor = batch["labels"][:, 1:] != IGNORE_INDEX
        if "loss_weights" in batch:
            return is_trained.mul(batch["loss_weights"][:, 1:]).sum()
        return is_trained.sum().float()

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        """Compute the loss. ``module`` is the ``ModelWithLoss``, as the backend prepared it."""
        loss: Loss = module(batch)
        return loss


@OBJECTIVES.register("sft", options=LmOptions)
class SftObjective(LmObjective):
    """Supervised fine-tuning: responses, given the preceding text."""

    title = "supervised fine-tuning"

    def encode(self, examples: Sequence[Example], stats: Any, truncate: bool = True) -> list[Row | None]:
        """Encode conversations. They are always truncated per turn; ``truncate`` has no effect."""
        return self.template.encode_arrays(examples, stats)


@OBJECTIVES.register("pt", options=LmOptions)
class PretrainObjective(LmObjective):
    """Pretraining: all of a plain text."""

    default_packing = "wrapped"
    has_prompts = False
    reads_images = False
    title = "continued pretraining"

    def encode(self, examples: Sequence[Example], stats: Any, truncate: bool = True) -> list[Row | None]:
        """Encode texts. ``truncate`` applies ``cutoff_len``; false if packing splits rows (``splits_rows``)."""
        return self.template.encode_text(examples, stats, truncate=truncate)


# --- batches ----------------------------------------------------------------------------------------------------------


def not_configured(rows: Sequence[Row]) -> Batch:
    raise RuntimeError("The objective was not configured for a model; call configure() before collate().")


# --- model and loss ---------------------------------------------------------------------------------------------------


class ModelWithLoss(nn.Module):
    """A causal language model and its loss as one module: micro-batch -> ``Loss``.

    The backend's wrapper is called once per micro-batch, and all weights, including the head's, are used inside this
    call. Wrappers rely on this to sync gradients and to gather sharded weights.

    Args:
        model: a causal language model of transformers, with or without adapter.
        head: the model's head; None: the model computes its logits.
        makes_some_logits: whether the model can compute the logits of selected positions only.
        options: those of ``LmOptions`` are read.
        patches: whether the embedding may be patched.
        batch_keys: keys of batches that are not model inputs, besides the general ones.
    """

    def __init__(
        self, model: nn.Module, head: Head | None, makes_some_logits: bool, options: LmChoices,
        patches: PatchOptions = _ALL_PATCHES, batch_keys: Collection[str] = (),
    ) -> None:  # fmt: skip
        super().__init__()
        inner = unwrap_peft(model)
        self.model = model
        self._batch_keys = batch_keys
        self._head = head
        self._tied = tied_embedding(inner, head) if head is not None and allows_patch(patches, TIED) else None
        self._rules = token_loss(options, head.softcap if head else None)
        self._makes_some_logits = makes_some_logits
        self._aux_coefficient = aux_coefficient(inner, options.router_aux_loss_coef)
        alpha = options.neftune_noise_alpha
        self._noise = EmbeddingNoise(inner.get_input_embeddings(), alpha) if alpha else None

    def forward(self, batch: Batch) -> Loss:
        """The sum over the trained tokens of a micro-batch. Without trained tokens: an exact zero with a graph."""
        targets = Targets.of(batch["labels"], batch.get("target_positions"), batch.get("loss_weights"))
        inputs = model_inputs(batch, self._batch_keys)
        with self._noise.around(batch) if self._noise and self.training else nullcontext():
            if self._head is not None and not self._aux_coefficient:
                return self._loss(self._sums_in_chunks(self._head, inputs, targets))
            return self._loss_from_logits(inputs, targets)

    def _sums_in_chunks(self, head: Head, inputs: dict[str, Any], targets: Targets) -> TokenSums:
        """Compute the sums from hidden states, in chunks."""
        hidden, weight = hidden_and_weight(head, self._tied, targets.positions, inputs)
        return sums_of_hidden(hidden, head, targets, self._rules, weight)

    def _loss_from_logits(self, inputs: dict[str, Any], targets: Targets) -> Loss:
        """Compute the loss from the model's logits: of trained positions if the model supports it, else of all."""
        needs_router = bool(self._aux_coefficient)
        of_targets, output = logits_at(self.model, inputs, targets.positions, self._makes_some_logits, needs_router)
        sums = sums_of_logits(of_targets, targets, self._rules)
        aux = output.aux_loss * targets.token_weights.sum() if self._aux_coefficient else None
        return self._loss(sums, aux)

    def _loss(self, sums: TokenSums, aux: Tensor | None = None) -> Loss:
        """Combine the sums to a ``Loss``. ``aux`` is () the router's auxiliary loss: its mean over tokens times the
        number of items of the micro-batch.
        """
        named = {}
        if self._rules.accuracy:
            named["accuracy"] = sums.correct
        if self._rules.entropy:
            named["entropy"] = sums.entropy
        if aux is None:
            return Loss(sums.total, named)
        return Loss(sums.total + self._aux_coefficient * aux, named | {"aux_loss": aux.detach()})


def tied_embedding(model: Any, head: Head) -> TiedEmbedding | None:
    """The input embedding if it shares the head's weight and only looks up rows, else None."""
    embedding = model.get_input_embeddings()
    return TiedEmbedding.of(embedding) if getattr(embedding, "weight", None) is head.linear.weight else None


def hidden_and_weight(
    head: Head, tied: TiedEmbedding | None, positions: Tensor, inputs: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Hidden states (N, H) at ``positions``, and the head's weight (V, H), which shares its gradient with ``tied``."""
    is_joined = head.linear.weight.requires_grad and is_grad_enabled()
    with tied.shared_gradient() if tied is not None and is_joined else nullcontext() as joined:
        hidden = head.hidden_at(positions, **inputs)
    # Read the weight here: ZeRO-3 may have released a tied weight after the embedding ran.
    return hidden, head.linear.weight if joined is None else joined


def head_for_loss(capabilities: Capabilities, options: LossChoices) -> tuple[Head | None, list[str]]:
    """Return the head for a loss in chunks, and a note if ``fused_loss`` is auto and the model has no such head.

    Raises:
        UserError: if ``fused_loss`` is true and the model has no such head, or if a router's auxiliary loss would have
            no gradient.
    """
    model = unwrap_peft(capabilities.model)
    has_router = bool(aux_coefficient(model, options.router_aux_loss_coef))
    settings = options.gradient_checkpointing_kwargs if has_router and options.gradient_checkpointing else None
    if (settings or {}).get("use_reentrant"):
        raise UserError(_ROUTER_WITHOUT_GRADIENT)
    if options.fused_loss is False or capabilities.head is not None:
        return (None if options.fused_loss is False else capabilities.head), []
    what = f"The LM head of {type(model).__name__} is not a plain linear layer over its last hidden states."
    if options.fused_loss != "auto":
        raise UserError(f'"fused_loss" is true. {what}', remedy="Remove fused_loss.", option="fused_loss")
    return None, [f"{what} The loss is computed from full logits, which takes more memory."]


_ROUTER_WITHOUT_GRADIENT = Problem(
    'gradient_checkpointing_kwargs: "use_reentrant" is true, and the model has a router. Reentrant checkpointing runs '
    "the first forward pass without a graph, so the router's auxiliary loss would have no gradient.",
    remedy="Remove use_reentrant, or set router_aux_loss_coef: 0.",
    option="gradient_checkpointing_kwargs",
)


def aux_coefficient(model: Any, coefficient: float | None) -> float:
    """The weight of the load-balancing loss of experts: ``coefficient``, or the model config's value if the config
    enables it.

    Raises:
        UserError: if a weight is given but the model has no router.
    """
    config = model.config.get_text_config()
    own = getattr(config, "router_aux_loss_coef", None)
    if coefficient and own is None:
        raise UserError(
            f'"router_aux_loss_coef" requires a mixture of experts, but {type(model).__name__} has none.',
            remedy="Remove it.",
            option="router_aux_loss_coef",
        )
    if coefficient is not None:
        return coefficient
    return float(own or 0.0) if getattr(config, "output_router_logits", False) else 0.0

"""``stage: rm``: train a reward model, which scores responses, on pairs.

In: pairs, a language model. Out: a score per response, computed by a linear layer from the last hidden state of its
last token; per pair the Bradley-Terry loss, as a sum over pairs. The language model head is not used and no logits are
computed. There is no dropout before the score.

The last token is found by the length of a sequence. Searching for the first padding token would stop one token early if
the padding token is also the EOS token.
"""

# P pairs in a micro-batch, S = 2P sequences, H hidden size

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from burnish.checkpoint.parts import Part
from burnish.config.errors import UserError
from burnish.config.options import option
from burnish.config.registry import Registry
from burnish.kernels.probe import Capabilities, Only, unwrap_peft
from burnish.loop.protocols import Parallel
from burnish.loop.types import IGNORE_INDEX, Batch, Example, Loss, Metric, Row, Sum
from burnish.losses.base import OBJECTIVES, Collate, RowEncoder, StageObjective, WrappedModel
from burnish.losses.lm import not_configured
from burnish.losses.logits import model_inputs, target_positions
from burnish.losses.pair_values import PAIR_COLUMNS, two_answers
from burnish.losses.preference_losses import bradley_terry

WEIGHT, BIAS = "v_head.summary.weight", "v_head.summary.bias"
"""Names in LLaMA-Factory's ``value_head.safetensors``."""


class RewardHead(nn.Module):
    """Base class of modules that compute scores from hidden states. Members of ``REWARD_HEADS`` are called with H.

    Args:
        width: H.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, hidden: Tensor) -> Tensor:
        """(N, H) -> (N,) float32."""
        raise NotImplementedError

    def weights(self) -> dict[str, Tensor]:
        """The weights of the head, by their names in its file."""
        return {f"v_head.{name}": parameter for name, parameter in self.named_parameters()}

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights, named as in ``weights``.

        Raises:
            UserError: if they belong to another head.
        """
        own = self.weights()
        if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in weights.items()}:
            what = f"The reward head in the checkpoint does not match {type(self).__name__}: names or shapes differ."
            remedy = "Use the base model and the reward_head that it was saved with."
            raise UserError(what, remedy=remedy, option="reward_head")
        with torch.no_grad():
            for name, parameter in own.items():
                parameter.copy_(weights[name])


REWARD_HEADS: Registry[Callable[[int], RewardHead]] = Registry("reward head")


@dataclass
class RewardOptions:
    """Reward model training."""

    center_rewards_coefficient: float | None = option(
        None,
        "Coefficient of an auxiliary loss that centers the scores around 0: the squared sum of the two "
        "scores of a pair.",
        ge=0,
    )
    reward_head: str | None = option(
        None, "Type of the reward head: a linear layer in a separate file alongside the language model (value_head), "
        "or a transformers sequence classifier (score). Default: as in the loaded model; value_head for a new head.",
        choices=REWARD_HEADS.names,
    )  # fmt: skip


@REWARD_HEADS.register("value_head")
class ValueHead(RewardHead):
    """A linear layer in float32.

    Args:
        width: H.
        has_bias: whether it has a bias; sequence classifiers of transformers have none.
    """

    def __init__(self, width: int, has_bias: bool = True) -> None:
        super().__init__(width)
        self.summary = nn.Linear(width, 1, bias=has_bias, dtype=torch.float32)
        with torch.no_grad():
            # The initial score of normalized hidden states is of the order of 1 (Stiennon et al. 2020, appendix B.1).
            self.summary.weight.normal_(0.0, 1 / (width + 1) ** 0.5)
            if has_bias:
                self.summary.bias.zero_()

    def forward(self, hidden: Tensor) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False):  # FSDP and ZeRO may have converted it to bfloat16
            scores: Tensor = self.summary(hidden.to(self.summary.weight.dtype)).squeeze(-1)
        return scores.float()

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Load weights, named as in ``weights``. A missing bias is set to zero."""
        with torch.no_grad():
            self.summary.weight.copy_(weights[WEIGHT].reshape(1, -1))
            if self.summary.bias is not None:
                bias = weights.get(BIAS)
                self.summary.bias.zero_() if bias is None else self.summary.bias.copy_(bias.reshape(1))


@REWARD_HEADS.register("score")
def score_head(width: int) -> RewardHead:
    """A linear layer in float32 without bias, saved as a sequence classifier of transformers."""
    return ValueHead(width, has_bias=False)


class ScoringModel(WrappedModel):
    """A language model without its head, and a score head.

    Args:
        model: a model of transformers, with or without adapter.
        head: (N, H) -> (N,).
        batch_keys: keys of batches that are not model inputs, besides the general ones.
        only: positions (N,) -> context manager for a forward pass whose hidden states are only read there.
    """

    def __init__(
        self, model: nn.Module, head: nn.Module, batch_keys: Collection[str] = (), only: Only = nullcontext
    ) -> None:
        super().__init__()
        self._batch_keys, self._only = batch_keys, only
        self.model, self.head = model, head

    def forward(self, batch: Batch) -> Tensor:
        """(S,) the score of each sequence."""
        backbone = unwrap_peft(self.model).base_model
        positions = batch["target_positions"]
        with self._only(positions):
            hidden: Tensor = backbone(**model_inputs(batch, self._batch_keys))[0]
        scores: Tensor = self.head(hidden.flatten(0, 1).index_select(0, positions))
        return torch.zeros_like(scores).index_add(0, batch["owner"], scores)


@OBJECTIVES.register("rm", options=RewardOptions, reads=("disable_dropout",))
class RewardObjective(StageObjective):
    """Scores of responses, trained on pairs (reward model)."""

    records = "pairs"
    without_pairs = "To score single responses with a trained reward model, run burnish score PATH dataset=FILE."
    reads_images = False
    row_columns = PAIR_COLUMNS
    batch_keys = frozenset({"margin"})
    uses_lm_head = False
    disables_dropout = True

    def __init__(self, options: RewardOptions, template: RowEncoder, tokenizer: Any = None) -> None:
        self.options = options
        self.template = template
        self.head: nn.Module | None = None  # a ``RewardHead``, or a score layer of the model
        self.head_kind = ""  # registered name of a third-party head, as stored in its file
        self.is_from_classifier = False  # set by the caller if the head comes from a sequence classifier
        self.collate: Collate = not_configured
        self.margins = Margins()
        self.only: Only = nullcontext

    @property
    def metrics(self) -> list[str]:
        """Names of the metrics of an evaluation."""
        return ["loss", "accuracy", "margin", "min_reward", "mean_reward", "max_reward"]

    @property
    def parts(self) -> Mapping[str, Any]:
        if not isinstance(self.head, RewardHead):
            return {}
        return {"value_head": Part(HeadState(self.head), "value_head", is_of_model=True)}

    def sequence_title(self, row: Row, name: str) -> str:
        return f"the {name} response, scored at its last token; "

    def encode(self, examples: Sequence[Example], stats: Any, truncate: bool = True) -> Sequence[Row | None]:
        """Encode pairs. They are always truncated to ``cutoff_len``; ``truncate`` has no effect."""
        return self.template.encode_pairs(examples, stats)

    def configure(self, capabilities: Capabilities, collate: Collate) -> list[str]:
        """Create the head if needed, as ``LmObjective.configure``."""
        self.collate, inner = partial(self._collate, collate), unwrap_peft(capabilities.model)
        self.only = capabilities.only
        if self.head is None:
            width = inner.get_input_embeddings().weight.shape[1]
            width = getattr(inner.config.get_text_config(), "hidden_size", width)
            self.head = REWARD_HEADS[self.options.reward_head or "value_head"](width)
        output = inner.get_output_embeddings()
        if output is not None and output.weight is not inner.get_input_embeddings().weight:
            output.requires_grad_(False)  # it is not used, so it would have no gradient
        return []

    def allows_prefix_sharing(self, model: nn.Module) -> bool:
        return True

    def module(self, model: nn.Module) -> ScoringModel:
        """The model and its score head as one module. Requires ``configure`` first."""
        assert self.head is not None
        self.head.to(next(model.parameters()).device)
        return ScoringModel(model, self.head, self.batch_keys, self.only)

    def own_parameters(self) -> Iterable[tuple[str, nn.Parameter]]:
        assert self.head is not None
        return ((f"v_head.{name}", parameter) for name, parameter in self.head.named_parameters())

    def _collate(self, collate: Collate, rows: Sequence[Row]) -> Batch:
        """The micro-batch with ``items`` (P,) and ``margin`` (P,) of its pairs."""
        batch = collate_scored(collate, [answer for row in rows for answer in two_answers(row)])
        margins = torch.tensor([row.get("margin", 0.0) for row in rows])
        return {**batch, "items": torch.ones(len(rows)), "margin": margins}

    def num_items(self, batch: Batch) -> Tensor:
        """() number of pairs."""
        items: Tensor = batch["items"]
        return items.sum()

    def iter_eval(self, module: nn.Module, batches: Iterable[Batch], parallel: Parallel) -> Iterator[Batch]:
        self.margins.begin(batches)
        yield from super().iter_eval(module, batches, parallel)

    def loss(self, module: nn.Module, batch: Batch) -> Loss:
        scores: Tensor = module(batch)
        chosen, rejected, items = scores[0::2], scores[1::2], batch["items"]
        self.margins.add((chosen - rejected).detach(), items, is_training=module.training)
        centring = self.options.center_rewards_coefficient or 0.0
        losses = bradley_terry(chosen, rejected, batch["margin"], centring)
        measured = {"accuracy": (chosen > rejected).float(), "margin": (chosen - rejected).detach()}
        metrics: dict[str, Metric] = {name: (value * items).sum() for name, value in measured.items()}
        return Loss((losses * items).sum(), metrics | _rewards(scores.detach(), items), outputs=scores.detach())


def _rewards(scores: Tensor, items: Tensor) -> dict[str, Metric]:
    """Mean, minimum and maximum of the scores of all responses."""
    counted = items.repeat_interleave(2)
    count, there = counted.sum(), counted > 0
    least = torch.where(there, scores, torch.inf).amin()
    most = torch.where(there, scores, -torch.inf).amax()
    return {
        "mean_reward": Sum((scores * counted).sum(), count),
        "min_reward": Sum(least, count, "min"),
        "max_reward": Sum(most, count, "max"),
    }


class Margins:
    """The margins of pairs: of the last training micro-batches, and of each set's last evaluation. They stay on the
    device until a plot needs them.
    """

    def __init__(self) -> None:
        self.trained: deque[Tensor] = deque(maxlen=_LAST)
        self._of_sets: WeakKeyDictionary[Any, list[Tensor]] = WeakKeyDictionary()
        self._evaluated: list[Tensor] = []

    def begin(self, batches: Iterable[Batch]) -> None:
        """Start an evaluation of these batches."""
        self._evaluated = self._of_sets[batches] = []

    def add(self, margins: Tensor, items: Tensor, is_training: bool) -> None:
        """Add ``margins`` (P,) of a micro-batch. Pairs whose entry in ``items`` (P,) is 0 are padding."""
        (self.trained if is_training else self._evaluated).append(torch.stack([margins, items.to(margins)]))

    def of(self, batches: Iterable[Batch] | None) -> list[float]:
        """The margins of an evaluated set, or of training for None."""
        found = list(self.trained if batches is None else self._of_sets.get(batches, []))
        if not found:
            return []
        margins, items = torch.cat(found, 1).cpu()
        return margins[items > 0].tolist()  # type: ignore[no-any-return]


_LAST = 1000
"""Number of training micro-batches whose margins are kept."""


class HeadState:
    """The head as a part of a checkpoint."""

    def __init__(self, head: RewardHead) -> None:
        self.head = head

    def parameters(self) -> Iterable[nn.Parameter]:
        """The trainable weights, for a backend that shards them."""
        return self.head.parameters()

    def state_dict(self) -> dict[str, Tensor]:
        return self.head.weights()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.head.take(state)


def collate_scored(collate: Collate, sequences: Sequence[Row]) -> Batch:
    """A micro-batch whose target positions are the last tokens of its sequences.

    One trained token is appended to each sequence. Code that selects the tokens needed for trained tokens then selects
    the last real token, which precedes it.

    Returns:
        As ``collate``, with target_positions: (S,), owner: (S,), num_tokens: without the appended tokens.
    """
    marked: list[Row] = [
        {
            "input_ids": [*row["input_ids"], row["input_ids"][-1]],
            "labels": [IGNORE_INDEX] * len(row["input_ids"]) + [0],
            "sequence": [at] * (len(row["input_ids"]) + 1),
        }
        for at, row in enumerate(sequences)
    ]
    batch = collate(marked)
    positions = target_positions(batch["labels"])
    owner = batch.pop("sequence").flatten()[positions + 1]
    count = sum(len(row["input_ids"]) for row in sequences)
    return {**batch, "target_positions": positions, "owner": owner, "num_tokens": count}

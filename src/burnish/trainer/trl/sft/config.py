"""``SFTConfig``: every field of TRL's class, with its name, type and default."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from burnish.config.options import option
from burnish.trainer.arguments.training import for_argument_parser
from burnish.trainer.arguments.trl import TrlArguments

_PACKS = "the whole dataset is packed at once."


@dataclass
class SFTConfig(TrlArguments):
    """The arguments of an ``SFTTrainer``, as in TRL 1."""

    renamed: ClassVar[Mapping[str, str]] = {"max_seq_length": "max_length", "use_liger": "use_liger_kernel"}
    without_effect: ClassVar[Mapping[str, str]] = {
        "dataset_batch_size": _PACKS, "num_of_sequences": _PACKS, "chars_per_token": "packing counts tokens."
    }  # fmt: skip

    learning_rate: float = 2e-5

    # --- the data
    dataset_text_field: str = option("text", "Column with plain text.")
    dataset_kwargs: dict[str, Any] | str | None = option(
        None, "skip_prepare_dataset: the dataset is already tokenized."
    )
    shuffle_dataset: bool = option(False, "Shuffle the dataset once during preparation.")
    packing: bool = option(False, "Pack several examples into sequences of max_length tokens.")
    packing_strategy: str = option(
        "bfd",
        "Packing strategy: best fit (bfd), best fit with long examples split (bfd_split), or fixed-size "
        "blocks of concatenated text (wrapped).",
        choices=("bfd", "bfd_split", "wrapped"),
    )
    eval_packing: bool | None = option(None, "Pack the examples of the evaluation set. Default: same as packing.")

    # --- trained tokens
    completion_only_loss: bool | None = option(
        None, "Compute the loss on completions only. Default: true for datasets with prompts."
    )
    assistant_only_loss: bool = option(False, "Compute the loss on assistant messages only.")
    loss_type: str = option(
        "nll", "nll: cross entropy. dft: weight the loss of each token by its probability (arXiv 2508.05629).",
        choices=("nll", "dft", "chunked_nll"),
    )  # fmt: skip

    def _convert_old_values(self) -> None:
        if self.loss_type == "chunked_nll":
            self._warn(
                "`loss_type='chunked_nll'` is deprecated. Use 'nll', which does not materialize all logits either."
            )
            self.loss_type = "nll"
        if self.packing_strategy == "bfd-requeue":
            self._warn('`packing_strategy="bfd-requeue"` is deprecated. Use "bfd_split" instead.')
            self.packing_strategy = "bfd_split"
        super()._convert_old_values()


for_argument_parser(SFTConfig)

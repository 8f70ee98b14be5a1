"""``SFTConfig``: every field of TRL's class, by its name, type and default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from burnish.config.options import option
from burnish.trainer.arguments.training import for_argument_parser
from burnish.trainer.arguments.trl import TrlArguments

_PACKS = "packs are filled over the whole set."


@dataclass
class SFTConfig(TrlArguments):
    """The arguments of an ``SFTTrainer``, as in TRL 1."""

    renamed: ClassVar[Mapping[str, str]] = {"max_seq_length": "max_length", "use_liger": "use_liger_kernel"}
    without_effect: ClassVar[Mapping[str, str]] = {
        "dataset_batch_size": _PACKS, "num_of_sequences": _PACKS, "chars_per_token": "packs are filled by tokens."
    }  # fmt: skip

    learning_rate: float = option(2e-5, "The first learning rate.", ge=0, lt=math.inf)

    # --- the data
    dataset_text_field: str = option("text", "The column of plain text.")
    dataset_kwargs: dict[str, Any] | str | None = option(None, "skip_prepare_dataset: the rows are ready as they are.")
    max_length: int | None = option(
        1024, "Rows are cut to it, and packs filled up to it; None cuts nothing.", unit="tokens", ge=1
    )
    shuffle_dataset: bool = option(False, "Shuffle the data once, when it is prepared.")
    packing: bool = option(False, "Put several rows into one of max_length tokens.")
    packing_strategy: str = option("bfd", "How packs are filled.", choices=("bfd", "bfd_split", "wrapped"))
    eval_packing: bool | None = option(None, "Pack evaluation sets; as packing by default.")

    # --- what is learned
    completion_only_loss: bool | None = option(None, "Learn completions only; by default where there are prompts.")
    assistant_only_loss: bool = option(False, "Learn what the assistant says, and nothing else.")
    loss_type: str = option(
        "nll", "dft weights each token's loss by its probability (arXiv 2508.05629).",
        choices=("nll", "dft", "chunked_nll"),
    )  # fmt: skip

    def _lead_old_values(self) -> None:
        if self.loss_type == "chunked_nll":
            self._warn("`loss_type='chunked_nll'` is deprecated: it is 'nll' now, which never holds all logits either.")
            self.loss_type = "nll"
        if self.packing_strategy == "bfd-requeue":
            self._warn('`packing_strategy="bfd-requeue"` is now "bfd_split".')
            self.packing_strategy = "bfd_split"
        super()._lead_old_values()


for_argument_parser(SFTConfig)

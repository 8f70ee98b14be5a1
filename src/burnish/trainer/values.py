"""Types that a ``Trainer`` passes to scripts and accepts from them: those of transformers.

They are the same classes, so that metric functions, callbacks and ``isinstance`` checks work with both libraries.
"""

from transformers.data.data_collator import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DataCollatorForTokenClassification,
    DataCollatorWithPadding,
    default_data_collator,
)
from transformers.trainer_callback import PrinterCallback, ProgressCallback
from transformers.trainer_utils import (
    EvalLoopOutput,
    EvalPrediction,
    IntervalStrategy,
    PredictionOutput,
    get_last_checkpoint,
    set_seed,
)

from burnish.loop.early_stopping import EarlyStoppingCallback
from burnish.loop.loop import TrainOutput

__all__ = [
    "DataCollatorForLanguageModeling", "DataCollatorForSeq2Seq", "DataCollatorForTokenClassification",
    "DataCollatorWithPadding", "EarlyStoppingCallback", "EvalLoopOutput", "EvalPrediction", "IntervalStrategy",
    "PredictionOutput", "PrinterCallback", "ProgressCallback", "TrainOutput", "default_data_collator",
    "get_last_checkpoint", "set_seed",
]  # fmt: skip

"""Names that a script may ask ``burnish`` for once its import line is changed, and that are not here.

In: such a name. Out: the sentence that says where it is, or what serves instead. Nothing is imported for it.
"""

from __future__ import annotations

_LATER = "burnish has no {name} yet: it learns from answers that are there (SFTTrainer, DPOTrainer, KTOTrainer, ...)."
_OTHERS = "{name} is not burnish's: leave it in the import from {library}."
_OF = {
    "transformers": (
        "AutoModelForCausalLM", "AutoModelForSequenceClassification", "AutoTokenizer", "BitsAndBytesConfig",
        "DataCollatorForLanguageModeling", "DataCollatorForSeq2Seq", "DataCollatorForTokenClassification",
        "DataCollatorWithPadding", "EarlyStoppingCallback", "HfArgumentParser", "IntervalStrategy", "PrinterCallback",
        "ProgressCallback", "SchedulerType", "default_data_collator", "set_seed",
    ),
    "trl": (
        "ModelConfig", "ScriptArguments", "TrlParser", "clone_chat_template", "get_kbit_device_map", "get_peft_config",
        "get_quantization_config",
    ),
    "peft": ("LoraConfig", "PeftConfig", "PeftModel", "TaskType", "get_peft_model", "prepare_model_for_kbit_training"),
}  # fmt: skip
ELSEWHERE = {
    **{f"{method}{kind}": _LATER for method in ("GRPO", "OnlineDPO", "PPO", "RLOO") for kind in ("Config", "Trainer")},
    **{name: _OTHERS.replace("{library}", library) for library, names in _OF.items() for name in names},
    "DataCollatorForCompletionOnlyLM": (
        "{name} is neither here nor in TRL any more. Of rows with `prompt` and `completion` the completion alone is "
        "learned; of `messages`, the answers alone with SFTConfig(assistant_only_loss=True)."
    ),
    "ConstantLengthDataset": "{name} is neither here nor in TRL any more. SFTConfig(packing=True) packs rows.",
    "setup_chat_format": (
        "{name} is neither here nor in TRL any more. SFTConfig(chat_template_path=...) takes a template from a file, "
        "or from another tokenizer with its tokens."
    ),
}
"""Name -> sentence, with ``{name}`` in it."""


def place_of(name: str) -> str:
    """The sentence on a name of transformers, TRL or peft that a script asks for here; "" for any other."""
    return ELSEWHERE.get(name, "").replace("{name}", name)

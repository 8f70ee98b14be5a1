"""Re-exports of transformers, TRL and PEFT.

A script can replace ``from transformers import ...`` or ``from trl import ...`` with ``from burnish import ...``: names
that scripts often import come from the library that owns them. Other names of these libraries, and names that no
library has, get an error message.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

OWNERS: dict[str, tuple[str, ...]] = {
    "transformers": (
        "Adafactor", "AutoConfig", "AutoFeatureExtractor", "AutoImageProcessor", "AutoModel",
        "AutoModelForAudioClassification", "AutoModelForAudioFrameClassification", "AutoModelForAudioXVector",
        "AutoModelForCTC", "AutoModelForCausalLM", "AutoModelForDepthEstimation",
        "AutoModelForDocumentQuestionAnswering", "AutoModelForImageClassification", "AutoModelForImageSegmentation",
        "AutoModelForImageTextToText", "AutoModelForInstanceSegmentation", "AutoModelForMaskGeneration",
        "AutoModelForMaskedImageModeling", "AutoModelForMaskedLM", "AutoModelForMultimodalLM",
        "AutoModelForMultipleChoice", "AutoModelForNextSentencePrediction", "AutoModelForObjectDetection",
        "AutoModelForPreTraining", "AutoModelForQuestionAnswering", "AutoModelForSemanticSegmentation",
        "AutoModelForSeq2SeqLM", "AutoModelForSequenceClassification", "AutoModelForSpeechSeq2Seq",
        "AutoModelForTableQuestionAnswering", "AutoModelForTextEncoding", "AutoModelForTextToSpectrogram",
        "AutoModelForTextToWaveform", "AutoModelForTimeSeriesPrediction", "AutoModelForTokenClassification",
        "AutoModelForUniversalSegmentation", "AutoModelForVideoClassification",
        "AutoModelForVisualQuestionAnswering", "AutoModelForZeroShotImageClassification",
        "AutoModelForZeroShotObjectDetection", "AutoProcessor", "AutoTokenizer", "AutoVideoProcessor",
        "BitsAndBytesConfig", "DataCollator", "DataCollatorForLanguageModeling", "DataCollatorForMultipleChoice",
        "DataCollatorForPermutationLanguageModeling", "DataCollatorForSeq2Seq",
        "DataCollatorForTokenClassification", "DataCollatorWithFlattening", "DataCollatorWithPadding",
        "DefaultDataCollator", "DefaultFlowCallback", "EarlyStoppingCallback", "GenerationConfig",
        "HfArgumentParser", "IntervalStrategy", "PreTrainedConfig", "PreTrainedModel", "PreTrainedTokenizer",
        "PreTrainedTokenizerBase", "PreTrainedTokenizerFast", "PrinterCallback", "ProgressCallback",
        "SchedulerType", "StoppingCriteria", "StoppingCriteriaList", "TextStreamer", "default_data_collator",
        "get_constant_schedule", "get_constant_schedule_with_warmup", "get_cosine_schedule_with_warmup",
        "get_cosine_with_hard_restarts_schedule_with_warmup", "get_cosine_with_min_lr_schedule_with_warmup",
        "get_inverse_sqrt_schedule", "get_linear_schedule_with_warmup", "get_polynomial_decay_schedule_with_warmup",
        "get_scheduler", "get_wsd_schedule", "pipeline", "set_seed",
    ),
    "trl": (
        "BEMACallback", "DatasetMixtureConfig", "LogCompletionsCallback", "ModelConfig", "RichProgressCallback",
        "ScriptArguments", "TrlParser", "apply_chat_template", "clone_chat_template", "create_reference_model",
        "extract_prompt", "get_dataset", "get_peft_config", "get_quantization_config", "is_conversational",
        "maybe_apply_chat_template", "maybe_convert_to_chatml", "maybe_extract_prompt",
        "maybe_unpair_preference_dataset", "pack_dataset", "unpair_preference_dataset",
    ),
    "peft": (
        "AutoPeftModel", "AutoPeftModelForCausalLM", "LoraConfig", "PeftConfig", "PeftModel", "PeftModelForCausalLM",
        "TaskType", "get_peft_model", "prepare_model_for_kbit_training",
    ),
}  # fmt: skip
"""Library -> the names that are re-exported from it."""
OWNER_OF = {name: library for library, names in OWNERS.items() for name in names}

_GENERATING_TRAINER_MESSAGE = (
    "burnish does not provide {name}. For responses that the model generates, use GRPOTrainer or RLOOTrainer, or "
    "`burnish train` with stage: {stage}."
)
UNSUPPORTED = {
    **{
        f"{method}{kind}": _GENERATING_TRAINER_MESSAGE.replace("{stage}", stage)
        for method, stage in (
            ("PPO", "ppo"), ("OnlineDPO", "dpo and online: true"), ("NashMD", "dpo and online: true"),
            ("XPO", "dpo and online: true"),
        )
        for kind in ("Config", "Trainer")
    },
    **{
        f"{method}{kind}": f"burnish does not provide {{name}}. {remedy}"
        for method, remedy in (
            ("BCO", 'For pairs, use DPOTrainer with loss_type="bco_pair"; for single responses, KTOTrainer.'),
            ("PRM", "RewardTrainer trains a reward model on entire responses."),
            ("GKD", "It has no distillation; SFTTrainer trains on the responses of a teacher."),
            ("Distillation", "It has no distillation; SFTTrainer trains on the responses of a teacher."),
        )
        for kind in ("Config", "Trainer")
    },
    "ConstantLengthDataset": (
        "{name} was removed from TRL and is not available in burnish. Set SFTConfig(packing=True) to pack examples."
    ),
    "get_kbit_device_map": (
        "{name} was removed from TRL and is not available in burnish. Remove it and the argument `device_map`: each "
        "process uses its own device, also for quantized models."
    ),
    "setup_chat_format": (
        "{name} was removed from TRL and is not available in burnish. SFTConfig(chat_template_path=...) takes a chat "
        "template from a file, or from another tokenizer with its tokens."
    ),
}  # fmt: skip
"""Name that was removed from its library or is not supported yet -> error message, with the placeholder ``{name}``."""


def reexport(name: str) -> Any:
    """Return the object called ``name`` from the library that owns it.

    Raises:
        ImportError: if that library is not installed.
    """
    library = OWNER_OF[name]
    try:
        return getattr(import_module(library), name)
    except ImportError as error:
        message = f"{name} belongs to the library {library}, which is not installed. Run: pip install {library}"
        raise ImportError(message) from error


def owner_message(name: str) -> str:
    """Return an error message for a name that burnish does not re-export, with its import if a library has it. Imports
    the libraries."""
    searched = []
    for library in OWNERS:
        try:
            found = name in dir(import_module(library))
        except ImportError:
            continue
        if found:
            return f"burnish does not re-export {name}. Import it from its library: from {library} import {name}"
        searched.append(library)
    return (
        f"cannot import name {name!r} from burnish: {' and '.join(searched)} have no such name either. It may be in a "
        "module of one of them, or only in an earlier version."
    )


def message_for(name: str) -> str:
    """Return the error message for an unavailable name that scripts commonly import, or "" for any other name."""
    return UNSUPPORTED.get(name, "").replace("{name}", name)

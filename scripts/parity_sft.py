"""Compare burnish's SFTTrainer with TRL's, step by step: the table of docs/parity-sft.md.

    python scripts/parity_sft.py              # print the table
    python scripts/parity_sft.py --write      # write it into docs/parity-sft.md
    python scripts/parity_sft.py text packed  # only cases whose names start with these

Each case is trained twice, by the two trainers, from the same model, rows, arguments and seed, on the CPU in float32.
Compared are the logged losses, learning rates, gradient norms and token counts of every step, and the final weights.
Models are tiny and created here; the tokenizer is that of the demo. Without TRL, the script prints a message and does
nothing.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import datasets
import torch
import transformers
from transformers import PrinterCallback

DOCUMENT = Path(__file__).parents[1] / "docs" / "parity-sft.md"
BEGIN, END = "<!-- table: made by scripts/parity_sft.py -->", "<!-- end of table -->"
NUM_STEPS = 50
COMPARED = ("loss", "learning_rate", "grad_norm", "num_tokens", "entropy", "mean_token_accuracy")


@dataclass(frozen=True)
class Case:
    """A training that is run with both trainers.

    Args:
        rows: creates the training dataset.
        arguments: of SFTConfig, besides those of all cases.
        trainer: creates arguments of the constructor.
        model: creates the model.
        differs: why results are expected to differ; empty if they are not.
    """

    name: str
    rows: Callable[[], datasets.Dataset]
    arguments: dict[str, Any] = field(default_factory=dict)
    trainer: Callable[[], dict[str, Any]] = dict
    model: Callable[[], Any] = lambda: llama()
    differs: str = ""


def tokenizer() -> Any:
    import burnish

    return transformers.AutoTokenizer.from_pretrained(Path(burnish.__file__).parent / "demo" / "model")


def llama(**config: Any) -> Any:
    torch.manual_seed(1)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": 326, "pad_token_id": 0,
             "eos_token_id": 2, "bos_token_id": 2}  # fmt: skip
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**sizes, **config}))


def gpt2() -> Any:
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=326, n_positions=256, n_embd=32, n_layer=2, n_head=2, eos_token_id=2, bos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def mixture() -> Any:
    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig(
        vocab_size=326, hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_experts=4, num_experts_per_tok=2,
        eos_token_id=2, bos_token_id=2, output_router_logits=True, router_aux_loss_coef=0.1,
    )  # fmt: skip
    return transformers.Qwen3MoeForCausalLM(config)


def gemma() -> Any:
    torch.manual_seed(1)
    config = transformers.Gemma2Config(
        vocab_size=326, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, eos_token_id=2, bos_token_id=2, final_logit_softcapping=5.0,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config)


# --- rows -------------------------------------------------------------------------------------------------------------

NUMBER = 64


def question(number: int) -> str:
    return f"What is {number} plus {number * 7 % 11}?" + " Think." * (number % 4)


def answer(number: int) -> str:
    return f"It is {number + number * 7 % 11}" + ", surely" * (number * 5 % 7) + "."


def texts() -> datasets.Dataset:
    return datasets.Dataset.from_list([{"text": f"{question(n)} {answer(n)}"} for n in range(NUMBER)])


def questions() -> datasets.Dataset:
    return datasets.Dataset.from_list([{"question": question(n), "answer": answer(n)} for n in range(NUMBER)])


def completions() -> datasets.Dataset:
    return datasets.Dataset.from_list([{"prompt": question(n) + "\n", "completion": answer(n)} for n in range(NUMBER)])


def chat(*numbers: int) -> list[dict[str, str]]:
    turns = (({"role": "user", "content": question(n)}, {"role": "assistant", "content": answer(n)}) for n in numbers)
    return [message for pair in turns for message in pair]


def chats() -> datasets.Dataset:
    return datasets.Dataset.from_list([{"messages": chat(n, n + 1)} for n in range(NUMBER)])


def chat_completions() -> datasets.Dataset:
    pairs = (chat(n) for n in range(NUMBER))
    return datasets.Dataset.from_list([{"prompt": pair[:1], "completion": pair[1:]} for pair in pairs])


def ids() -> datasets.Dataset:
    rows = [{"input_ids": [3 + (n * k) % 300 for k in range(5 + n % 9)]} for n in range(NUMBER)]
    masks = [[int(k > 2) for k in range(len(row["input_ids"]))] for row in rows]
    return datasets.Dataset.from_list([{**row, "completion_mask": mask} for row, mask in zip(rows, masks, strict=True)])


def streamed() -> Any:
    return texts().to_iterable_dataset()


# --- cases ------------------------------------------------------------------------------------------------------------


def lora() -> dict[str, Any]:
    from peft import LoraConfig

    return {"peft_config": LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])}


def prompt_tuning() -> dict[str, Any]:
    from peft import PromptTuningConfig

    return {"peft_config": PromptTuningConfig(num_virtual_tokens=4, task_type="CAUSAL_LM")}


CASES = [
    Case("text", texts),
    Case("text, accumulation 3, ragged", texts, {"gradient_accumulation_steps": 3, "per_device_train_batch_size": 3},
         differs="metrics are means over tokens, in TRL over micro-batches"),
    Case("text, GPT-2 with dropout", texts, {"learning_rate": 1e-3}, model=gpt2),
    Case("text, no checkpointing, cosine", texts, {"gradient_checkpointing": False, "lr_scheduler_type": "cosine"}),
    Case("text, truncated at the start", texts, {"max_length": 20, "truncation_mode": "keep_end"}),
    Case("text, shuffled once", texts, {"shuffle_dataset": True}),
    Case("text, a logit cap", texts, model=gemma),
    Case("text, streamed", streamed),
    Case("text, label smoothing", texts, {"label_smoothing_factor": 0.1}),
    Case("text, dft", texts, {"loss_type": "dft"}),
    Case("text, formatting_func", questions, {},
         lambda: {"formatting_func": lambda row: row["question"] + " " + row["answer"]}),
    Case("text, strong gradient clipping", texts, {"max_grad_norm": 0.01}),
    Case("text, NEFTune", texts, {"neftune_noise_alpha": 5.0}),
    Case("completions", completions),
    Case("completions, prompts trained too", completions, {"completion_only_loss": False}),
    Case("completions, padded to 16", completions, {"pad_to_multiple_of": 16}),
    Case("chats", chats),
    Case("chats, the assistant only", chats, {"assistant_only_loss": True}),
    Case("chat completions", chat_completions),
    Case("ids with a mask", ids, {"completion_only_loss": True}),
    Case("LoRA", texts, trainer=lora),
    Case("prompt tuning", texts, trainer=prompt_tuning),
    Case("mixture of experts", texts, model=mixture),
    Case("mixture of experts, off", texts, {"router_aux_loss_coef": 0.0}, model=mixture),
    Case("padding-free", texts, {"padding_free": True, "max_length": None}),
    Case("packed, wrapped", texts, {"packing": True, "packing_strategy": "wrapped", "max_length": 64}),
    Case("packed, bfd", texts, {"packing": True, "max_length": 64}),
    Case("packed, bfd, one row each", texts, {"packing": True, "max_length": 40}),
    Case("packed, bfd_split", texts, {"packing": True, "packing_strategy": "bfd_split", "max_length": 24}),
]  # fmt: skip


# --- the comparison ---------------------------------------------------------------------------------------------------


def trained(
    case: Case, trainer_class: Any, config_class: Any
) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return the logs of every step and the final weights."""
    shared = {"max_steps": NUM_STEPS, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 5e-3,
              "bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no",
              "disable_tqdm": True}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_class(
            case.model(), config_class(output_dir=folder, **{**shared, **case.arguments}), train_dataset=case.rows(),
            processing_class=tokenizer(), **case.trainer(),
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return logs, {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def differences(case: Case) -> dict[str, float]:
    """The largest over the run: relative, but for weights."""
    import trl

    import burnish

    theirs, their_weights = trained(case, trl.SFTTrainer, trl.SFTConfig)
    ours, our_weights = trained(case, burnish.SFTTrainer, burnish.SFTConfig)
    assert len(theirs) == len(ours) == NUM_STEPS, (len(theirs), len(ours))
    found = {
        name: max(abs(a[name] - b[name]) / max(abs(a[name]), 1e-12) for a, b in zip(theirs, ours, strict=True))
        for name in COMPARED
    }
    assert their_weights.keys() == our_weights.keys()
    found["weights"] = max((their_weights[n] - our_weights[n]).abs().max().item() for n in their_weights)
    return found


def table(names: list[str]) -> list[str]:
    lines = [
        "| case | loss | learning rate | gradient norm | tokens | entropy | accuracy | weights | |",
        "|" + "---|" * 9,
    ]
    for case in CASES:
        if names and not any(case.name.startswith(name) for name in names):
            continue
        found = differences(case)
        lines.append(
            f"| {case.name} | " + " | ".join(f"{value:.0e}" for value in found.values()) + f" | {case.differs} |"
        )
        print(lines[-1], flush=True)
    return lines


def main(arguments: list[str]) -> None:
    names, writes = [name for name in arguments if not name.startswith("--")], "--write" in arguments
    if names and writes:  # the versions above the table apply to all its lines
        raise SystemExit(
            "--write replaces the entire table of docs/parity-sft.md and cannot be combined with names of cases"
        )
    try:
        import trl
    except ImportError:
        print("TRL is not installed, so there is nothing to compare.")
        return
    quiet()
    lines = table(names)
    if writes:
        versions = (
            f"TRL {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}; {processor()}."
        )
        put_into(DOCUMENT, f"{versions}\n\n" + "\n".join(lines), BEGIN)


def quiet() -> None:
    """Silence other output and use one thread."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    datasets.disable_caching()
    torch.set_num_threads(1)


def processor() -> str:
    """Return the name of the processor."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))
    name: str = import_module("document").processor()
    return name


def put_into(document: Path, made: str, begin: str) -> None:
    """Write a table into a document, between the marker ``begin`` and the next ``END``."""
    before, rest = document.read_text(encoding="utf-8").split(begin)
    document.write_text(f"{before}{begin}\n{made}\n{END}{rest.split(END, 1)[1]}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])

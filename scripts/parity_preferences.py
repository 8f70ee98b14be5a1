"""Compare preference training with TRL and LLaMA-Factory, step by step: the tables of docs/parity-preferences.md.

    python scripts/parity_preferences.py              # print the tables
    python scripts/parity_preferences.py --write      # write them into docs/parity-preferences.md
    python scripts/parity_preferences.py dpo kto,     # only cases whose names start with these

Each case is trained twice from the same model, records, arguments and seed, on the CPU in float32: by another library
and by burnish, with the interface of that library. Compared are all values that both log in every step, and the final
weights. The cases of a library run in one process in its environment (``bench/environments.py``), which writes logs and
weights into a folder. Models are tiny and created here; the tokenizer is that of the demo.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from parity_sft import (
    NUM_STEPS,
    NUMBER,
    answer,
    gpt2,
    llama,
    lora,
    mixture,
    processor,
    put_into,
    question,
    quiet,
    tokenizer,
)
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "parity-preferences.md"
PEERS = ("trl", "llamafactory")
SHOWN = {"loss": ["loss", "nll_loss", "sft_loss"], "rate": ["learning_rate"], "gradient": ["grad_norm"],
         "rewards": ["rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "kl", "accuracy",
                     "margin", "min_reward", "mean_reward", "max_reward"],
         "log-probabilities": ["logps/chosen", "logps/rejected", "log_odds_ratio", "log_odds_chosen",
                               "odds_ratio_loss"],
         "logits, tokens": ["logits/chosen", "logits/rejected", "entropy", "mean_token_accuracy",
                            "num_tokens"]}  # fmt: skip
"""Column -> logged values."""


@dataclass(frozen=True)
class Case:
    """A training that is run with another library and with burnish.

    Args:
        peer: one of ``PEERS``. kind: DPO, KTO, Reward, ORPO or CPO; or a stage of LLaMA-Factory.
        arguments: of the config, or options, besides those of all cases.
        records: creates the dataset.
        trainer: creates arguments of the constructor. model: creates the model.
        takes_rows: burnish gets the rows that TRL has tokenized, with the mismatched completions of KTO.
        differs: why results are expected to differ; empty if they are not.
    """

    name: str
    peer: str
    kind: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    records: Callable[[], list[dict[str, Any]]] | None = None
    trainer: Callable[[], dict[str, Any]] = dict
    model: Callable[[], Any] = llama
    takes_rows: bool = False
    differs: str = ""

    @property
    def folder(self) -> str:
        return "".join(letter if letter.isalnum() else "-" for letter in self.name)


# --- records ----------------------------------------------------------------------------------------------------------


def messages(role: str, text: str) -> list[dict[str, str]]:
    return [{"role": role, "content": text}]


def wrong(number: int) -> str:
    return f"No idea, {question(number + 1).split()[2]}." + " Sorry." * (number % 3)


def texts() -> list[dict[str, Any]]:
    return [{"prompt": question(n) + "\n", "chosen": answer(n), "rejected": wrong(n)} for n in range(NUMBER)]


def pairs() -> list[dict[str, Any]]:
    """Return pairs as conversations."""
    return [
        {"prompt": messages("user", question(n)), "chosen": messages("assistant", answer(n)),
         "rejected": messages("assistant", wrong(n))}
        for n in range(NUMBER)
    ]  # fmt: skip


def implicit() -> list[dict[str, Any]]:
    return [{side: [*pair["prompt"], *pair[side]] for side in ("chosen", "rejected")} for pair in pairs()]


def labelled_examples() -> list[dict[str, Any]]:
    return [
        {"prompt": pair["prompt"], "completion": pair["chosen" if n % 3 else "rejected"], "label": bool(n % 3)}
        for n, pair in enumerate(pairs())
    ]


def with_margins() -> list[dict[str, Any]]:
    return [{**pair, "margin": n % 4 / 4} for n, pair in enumerate(implicit())]


def ranked() -> list[dict[str, Any]]:
    """Return records in LLaMA-Factory's format."""
    return [{"instruction": question(n), "input": "", "chosen": answer(n), "rejected": wrong(n)} for n in range(NUMBER)]


def tagged() -> list[dict[str, Any]]:
    return [
        {"instruction": question(n), "input": "", "output": answer(n) if n % 3 else wrong(n), "kto_tag": bool(n % 3)}
        for n in range(NUMBER)
    ]


# --- models -----------------------------------------------------------------------------------------------------------


def scorer() -> Any:
    from transformers import LlamaForSequenceClassification

    torch.manual_seed(1)
    return LlamaForSequenceClassification(llama(num_labels=1).config)


def second() -> dict[str, Any]:
    torch.manual_seed(2)
    other = llama()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.05)
    return {"ref_model": other}


def classifier_lora() -> dict[str, Any]:
    found = lora()
    found["peft_config"].task_type = "SEQ_CLS"
    return found


# --- cases ------------------------------------------------------------------------------------------------------------

TWO = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
RAGGED = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 2}
SHORT = "64 is not a multiple of 6, and TRL gives the short last micro-batch the weight of a full one"


def dpo(name: str, records: Callable[[], list[dict[str, Any]]] = pairs, **more: Any) -> Case:
    own = {field: more.pop(field) for field in ("trainer", "model", "differs") if field in more}
    return Case(f"DPO, {name}", "trl", "DPO", more, records, **own)


def smoothed(name: str) -> dict[str, Any]:
    return {"loss_type": [name], "label_smoothing": 0.1}


PLAIN_LOSSES = ("hinge", "ipo", "nca_pair", "bco_pair", "sppo_hard", "aot", "aot_unpaired", "apo_zero", "apo_down",
                "sigmoid_norm")  # fmt: skip
DIVERGENCES = ("forward_kl", "js_divergence", "alpha_divergence")
_BIAS = "weights: the bias of the head cancels in the loss, so its gradient is rounding error"
_SMOOTHED = "TRL 1.16 ignores label_smoothing for sigmoid"

CASES = [
    dpo("sigmoid"),
    dpo("texts", texts),
    dpo("implicit prompts", implicit),
    dpo("truncated to 40 tokens", max_length=40),
    dpo("two micro-batches", **TWO, differs="entropy and accuracy are means over tokens, in TRL over micro-batches"),
    dpo("two micro-batches of three", **RAGGED, differs=SHORT),
    dpo("LoRA", trainer=lora),
    dpo("separate reference model", trainer=second),
    dpo("precomputed reference", trainer=second, precompute_ref_log_probs=True),
    dpo("synchronized reference", sync_ref_model=True, ref_model_sync_steps=7),
    dpo("GPT-2", model=gpt2, learning_rate=1e-4),
    dpo("mixture of experts", model=mixture),
    *(dpo(name, loss_type=[name]) for name in PLAIN_LOSSES),
    dpo("discopop", loss_type=["discopop"], differs="its temperature of 0.05 amplifies rounding errors 20 times"),
    dpo("sft", loss_type=["sft"], differs="burnish uses no reference: rewards are those of the policy alone"),
    *(dpo(name, **smoothed(name)) for name in ("robust", "exo_pair")),
    dpo("sigmoid, smoothed", **smoothed("sigmoid"), differs=_SMOOTHED),
    dpo("aot, two micro-batches", loss_type=["aot"], **TWO, differs="TRL sorts within a micro-batch"),
    dpo("sft, two micro-batches", loss_type=["sft"], **TWO, differs="TRL averages over the tokens of a micro-batch"),
    dpo("three losses", loss_type=["sigmoid", "bco_pair", "sft"], loss_weights=[0.8, 0.2, 1.0]),
    *(dpo(name, f_divergence_type=name, trainer=second) for name in DIVERGENCES),
    dpo("LD-DPO", ld_alpha=0.5),
    dpo("WPO", use_weighting=True),
    Case("KTO", "trl", "KTO", {}, labelled_examples, takes_rows=True),
    Case("KTO, burnish's mismatched completions", "trl", "KTO", {}, labelled_examples,
         differs="the previous record of the dataset, not of the micro-batch, gives another KL term"),
    Case("KTO, two micro-batches", "trl", "KTO", TWO, labelled_examples, takes_rows=True,
         differs="the KL term is a mean over the step, in TRL over the micro-batch"),
    Case("KTO, LoRA", "trl", "KTO", {}, labelled_examples, lora, takes_rows=True),
    Case("KTO, weights", "trl", "KTO", {"desirable_weight": 1.5, "undesirable_weight": 0.5}, labelled_examples, second,
         takes_rows=True),
    Case("KTO, without a KL term", "trl", "KTO", {"loss_type": "apo_zero_unpaired"}, labelled_examples),
    Case("reward", "trl", "Reward", {}, implicit, model=scorer),
    Case("reward, margins and centering", "trl", "Reward", {"center_rewards_coefficient": 0.01}, with_margins,
         model=scorer),
    Case("reward, two micro-batches", "trl", "Reward", TWO, implicit, model=scorer,
         differs="min_reward and max_reward are those of the step, in TRL means over micro-batches"),
    Case("reward, LoRA", "trl", "Reward", {}, implicit, classifier_lora, scorer),
    Case("ORPO", "trl", "ORPO", {}, texts, differs="TRL trains on the prompt of chosen responses too"),
    Case("ORPO, learning rate 0", "trl", "ORPO", {"learning_rate": 0.0}, texts,
         differs="TRL's loss includes the prompt; the log odds agree"),
    Case("CPO", "trl", "CPO", {}, texts),
    Case("CPO, conversations", "trl", "CPO", {}, pairs, differs="TRL adds an EOS token after that of the template"),
    Case("CPO, hinge", "trl", "CPO", {"loss_type": "hinge"}, texts),
    Case("CPO, IPO", "trl", "CPO", {"loss_type": "ipo"}, texts),
    Case("CPO, SimPO", "trl", "CPO", {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0}, texts),
    Case("CPO, AlphaPO", "trl", "CPO", {"loss_type": "alphapo", "alpha": 0.1, "beta": 2.0}, texts),
    Case("CPO, two micro-batches", "trl", "CPO", TWO, texts, differs="TRL averages over the tokens of a micro-batch"),
    *(
        Case(f"dpo, {name}", "llamafactory", "dpo", more)
        for name, more in {
            "sigmoid": {}, "two micro-batches": TWO, "LoRA": {"finetuning_type": "lora"},
            "smoothed": {"dpo_label_smoothing": 0.1}, "with ftx": {"pref_ftx": 1.0},
            "with BCO": {"pref_bco_weight": 0.5}, "a short cutoff": {"cutoff_len": 48, "truncation": "llamafactory"},
            "orpo": {"pref_loss": "orpo"}, "simpo": {"pref_loss": "simpo", "pref_beta": 2.0},
        }.items()
    ),
    *(
        Case(f"dpo, {name}", "llamafactory", "dpo", {"pref_loss": name},
             differs=f"LLaMA-Factory uses sigmoid for {name}")
        for name in ("hinge", "ipo")
    ),
    Case("dpo, LD-DPO", "llamafactory", "dpo", {"ld_alpha": 0.5},
         differs="LLaMA-Factory weights the policy's tokens only"),
    Case("kto", "llamafactory", "kto"),
    Case("kto, LoRA", "llamafactory", "kto", {"finetuning_type": "lora"}),
    Case("kto, weights", "llamafactory", "kto", {"kto_chosen_weight": 1.5, "kto_rejected_weight": 0.5}),
    Case("kto, two micro-batches", "llamafactory", "kto", TWO,
         differs="KL term and means are those of the step, in LLaMA-Factory of the micro-batch"),
    Case("rm", "llamafactory", "rm", differs=_BIAS),
    Case("rm, LoRA", "llamafactory", "rm", {"finetuning_type": "lora"}, differs=_BIAS),
]  # fmt: skip


# --- a training -------------------------------------------------------------------------------------------------------

SHARED = {"max_steps": NUM_STEPS, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-3,
          "bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no", "disable_tqdm": True}  # fmt: skip


def script(case: Case, library: str, folder: Path) -> tuple[list[Any], Mapping[str, torch.Tensor]]:
    """Train with a trainer class of TRL or burnish."""
    from datasets import Dataset
    from transformers import PrinterCallback

    is_experimental = library == "trl" and case.kind in ("ORPO", "CPO")
    names = import_module(f"trl.experimental.{case.kind.lower()}" if is_experimental else library)
    rows, given = folder / "rows.json", case.trainer()
    assert case.records is not None
    records = json.loads(rows.read_text()) if case.takes_rows and library == "burnish" else case.records()
    arguments = getattr(names, f"{case.kind}Config")(output_dir=str(folder / library), **{**SHARED, **case.arguments})
    trainer = getattr(names, f"{case.kind}Trainer")(
        model=loaded(case, folder), args=arguments, train_dataset=Dataset.from_list(records),
        processing_class=tokenizer(), **given,
    )  # fmt: skip
    if case.takes_rows and library == "trl":
        columns = ("prompt_ids", "completion_ids", "KL_completion_ids", "label")
        rows.write_text(json.dumps([{name: row[name] for name in columns} for row in trainer.train_dataset]))
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return trainer.state.log_history, dict(trainer.model.named_parameters())


def loaded(case: Case, folder: Path) -> Any:
    """Save the model and load it, because TRL loads the reference model from the folder."""
    made = case.model()
    made.save_pretrained(folder / "start")
    return type(made).from_pretrained(folder / "start")


def configured(case: Case, library: str, folder: Path) -> tuple[list[Any], Mapping[str, torch.Tensor]]:
    """Train with a configuration of LLaMA-Factory."""
    made = folder / "model"
    if library == "llamafactory":
        _prepare(case, folder)
    output = folder / library
    options = {
        **SHARED, "stage": case.kind, "do_train": True, "finetuning_type": "full", "model_name_or_path": str(made),
        "dataset_dir": str(folder), "dataset": "records", "template": "chatml", "cutoff_len": 256, "plot_loss": False,
        "output_dir": str(output), "overwrite_output_dir": True, "overwrite_cache": True, "lora_rank": 4,
        "lora_target": "q_proj,v_proj", "optim": "adamw_torch", **case.arguments,
    }  # fmt: skip
    if library == "llamafactory":
        options.pop("truncation", None)
        import_module("without_torchaudio")  # LLaMA-Factory imports torchaudio without need
        import_module("llamafactory.train.tuner").run_exp(options)
    else:
        words = [f"{name}={value}" for name, value in options.items() if name != "disable_tqdm"]
        if import_module("burnish.cli").main(["train", *words]):
            raise RuntimeError(f"{case.name} failed")
    history = json.loads((output / "trainer_state.json").read_text())["log_history"]
    files = sorted(output.glob("*.safetensors"))
    return history, {name: tensor for file in files for name, tensor in load_file(file).items()}


def _prepare(case: Case, folder: Path) -> None:
    """Write the model, a value head that LLaMA-Factory can read, and the dataset."""
    model = case.model()
    model.config.summary_dropout_prob = 0.0
    model.save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    torch.manual_seed(3)
    head = {"v_head.summary.weight": torch.randn(1, 32) / 8, "v_head.summary.bias": torch.zeros(1)}
    if case.kind == "rm":
        save_file(head, folder / "model" / "value_head.safetensors")
    columns = {"prompt": "instruction", "query": "input", "chosen": "chosen", "rejected": "rejected"}
    of_tags = {"prompt": "instruction", "query": "input", "response": "output", "kto_tag": "kto_tag"}
    is_kto = case.kind == "kto"
    entry = {"columns": of_tags} if is_kto else {"ranking": True, "columns": columns}
    (folder / "records.json").write_text(json.dumps(tagged() if is_kto else ranked()))
    (folder / "dataset_info.json").write_text(json.dumps({"records": {"file_name": "records.json", **entry}}))


def run(library: str, folder: Path, cases: Iterable[Case]) -> None:
    """Train all cases with one library and write logs and weights."""
    quiet()
    for case in cases:
        case_folder = folder / case.folder
        case_folder.mkdir(parents=True, exist_ok=True)
        logs, weights = (script if case.peer == "trl" else configured)(case, library, case_folder)
        logs = [entry for entry in logs if "loss" in entry]
        (case_folder / f"{library}.json").write_text(json.dumps(logs))
        copied = {name: tensor.detach().clone().contiguous() for name, tensor in weights.items()}
        save_file(copied, case_folder / f"{library}.safetensors")


# --- the comparison ---------------------------------------------------------------------------------------------------


def differences(case: Case, folder: Path) -> dict[str, float | None]:
    """Return the largest differences over the run, relative to the largest value of the run; absolute for weights."""
    logs = {library: json.loads((folder / f"{library}.json").read_text()) for library in (case.peer, "burnish")}
    theirs, ours = logs[case.peer], logs["burnish"]
    if not len(theirs) == len(ours) == NUM_STEPS:
        raise RuntimeError(f"{case.name}: {len(theirs)} steps with {case.peer}, {len(ours)} with burnish")

    def difference(name: str) -> float | None:
        both = [(float(a[name]), float(b[name])) for a, b in zip(theirs, ours, strict=True) if name in a and name in b]
        if not both:
            return None
        return max(abs(a - b) for a, b in both) / max(1e-9, *(abs(a) for a, _ in both))

    found = {
        column: max((value for value in map(difference, names) if value is not None), default=None)
        for column, names in SHOWN.items()
    }
    one, other = (load_file(folder / f"{library}.safetensors") for library in (case.peer, "burnish"))
    shared = one.keys() & other.keys()
    if not shared:
        raise RuntimeError(f"{case.name}: no weights with the same name: {sorted(one)[:3]}, {sorted(other)[:3]}")
    return {**found, "weights": max((one[name] - other[name]).abs().max().item() for name in shared)}


def table(cases: Iterable[Case], folder: Path) -> str:
    columns = [*SHOWN, "weights"]
    lines = [f"| case | {' | '.join(columns)} | |", "|" + "---|" * (len(columns) + 2)]
    for case in cases:
        numbers = differences(case, folder / case.folder)
        cells = ["-" if numbers[column] is None else f"{numbers[column]:.0e}" for column in columns]
        lines.append(f"| {case.name} | {' | '.join(cells)} | {case.differs} |")
    return "\n".join(lines)


def versions(python: Path) -> str:
    """Return the versions of the libraries of an environment that affect results."""
    names = ("trl", "llamafactory", "transformers", "peft", "torch")
    done = subprocess.run([python, "-m", "pip", "list", "--format=json"], capture_output=True, text=True, check=True)
    there = ((package["name"], package["version"]) for package in json.loads(done.stdout))
    return ", ".join(f"{name} {version}" for name, version in there if name in names)


def main(arguments: list[str]) -> None:
    sys.path.insert(0, str(ROOT / "bench"))
    if arguments[:1] == ["--run"]:
        library, folder, *names = arguments[1:]
        run(library, Path(folder), [case for case in CASES if case.name in names])
        return
    names, writes = [name for name in arguments if not name.startswith("--")], "--write" in arguments
    if names and writes:  # the versions above the tables apply to all their lines
        raise SystemExit(
            "--write replaces entire tables of docs/parity-preferences.md and cannot be combined with names of cases"
        )
    interpreters = import_module("environments").interpreters([*PEERS, "burnish"])
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "USE_V1": "0"}
    tables = {}
    with tempfile.TemporaryDirectory() as folder:
        for peer in PEERS:
            cases = [case for case in CASES if case.peer == peer and (not names or case.name.startswith(tuple(names)))]
            if not cases:
                continue
            for library in (peer, "burnish"):
                python = interpreters[library]
                if isinstance(python, str):
                    raise SystemExit(python)
                words = [__file__, "--run", library, folder, *(case.name for case in cases)]
                subprocess.run([python, *words], env=environment, check=True)
            made = table(cases, Path(folder))
            both = (versions(interpreters[library]) for library in (peer, "burnish"))
            tables[peer] = f"{'; burnish with '.join(both)}; {processor()}.\n\n{made}"
            print(tables[peer], flush=True)
    for peer, made in tables.items() if writes else ():
        put_into(DOCUMENT, made, f"<!-- {peer}: made by scripts/parity_preferences.py -->")


if __name__ == "__main__":
    main(sys.argv[1:])

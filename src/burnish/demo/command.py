"""``burnish demo [dpo]``: fine-tune the included model on the included data, and show its answers before and after.

In: nothing, or ``dpo``, to learn from pairs of answers; options may be overridden like those of ``train``. Out:
``./demo-run`` or ``./demo-dpo-run``, about thirty lines of text.
The saved model answers through transformers alone, to show that it works without burnish.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.config.errors import UserError
from burnish.config.options import RawValue
from burnish.models.quiet import quiet
from burnish.report.console import note
from burnish.run.plan.config_files import read_config, split_arguments
from burnish.run.plan.plan import Plan, plan

BUNDLED = Path(__file__).parent
SHOWN = 6
"""Held-out questions printed with their answers."""


@dataclass(frozen=True)
class DemoQuestion:
    prompt: str
    answer: str
    wrong: str = ""


def demo(words: list[str]) -> int:
    """Train, ask before and after, print. Returns the exit status."""
    from burnish.checkpoint.checkpoint import output_folder
    from burnish.run.build import train_run

    is_dpo = words[:1] == ["dpo"]
    name = "demo_dpo.yaml" if is_dpo else "demo.yaml"
    run = demo_plan(words[is_dpo:], name)
    questions, pairs = demo_questions(), demo_questions("pairs_heldout") if is_dpo else []
    note(f"Generating responses to {len(questions)} held-out questions before training ...")
    before, knew = answers(BUNDLED / "model", questions), preferred(BUNDLED / "model", pairs)
    result = train_run(run)
    if result.exit_code is not None:
        return result.exit_code
    folder = output_folder(run.options)
    after = answers(folder, questions)
    note(_report(questions, before, after))
    if is_dpo:
        share = f"{knew:.2f} before, {preferred(folder, pairs):.2f} after"
        note(f"preference accuracy on {len(pairs)} held-out pairs: {share}")
    note(_next_steps(str(folder), name))
    return 0


def demo_plan(words: list[str], name: str = "demo.yaml") -> Plan:
    """The included configuration, with the paths of the installed package, overridden by the command line."""
    given = read_config(BUNDLED / name)
    places = {"model_name_or_path": BUNDLED / "model", "dataset_dir": BUNDLED / "data"}
    config, flags = split_arguments(words)
    if config is not None:
        what = f"burnish demo has a fixed configuration and does not accept a file. Received: {config}."
        raise UserError(what, remedy=f"Try: burnish train {config}")
    return plan({**given, **{name: RawValue(str(path), "burnish demo") for name, path in places.items()}, **flags})


def demo_questions(name: str = "heldout") -> list[DemoQuestion]:
    lines = (BUNDLED / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [
        DemoQuestion(f"{r['instruction']}\n{r['input']}".strip(), r.get("output") or r["chosen"], r.get("rejected", ""))
        for r in records
    ]


def answers(folder: Path, questions: list[DemoQuestion], batch_size: int = 50) -> list[str]:
    """Greedy answers of the model in ``folder``."""
    model, tokenizer = _loaded(folder)
    found: list[str] = []
    for start in range(0, len(questions), batch_size):
        found += _answer_batch(model, tokenizer, [q.prompt for q in questions[start : start + batch_size]])
    return found


def _loaded(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with quiet():
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        return AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer


def _answer_batch(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    longest = 24  # the longest answer has 18 tokens
    tokens = model.generate(**inputs, max_new_tokens=longest, do_sample=False)
    texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in texts]


def preferred(folder: Path, pairs: list[DemoQuestion]) -> float:
    """The share of pairs whose right answer the model in ``folder`` finds likelier than the wrong one. In [0, 1]."""
    import torch

    if not pairs:
        return 0.0
    model, tokenizer = _loaded(folder)

    def logp(question: DemoQuestion, answer: str) -> float:
        turns = [{"role": "user", "content": question.prompt}]
        asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        said = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        of_tokens = model(torch.tensor([asked + said])).logits[0, len(asked) - 1 : -1].float().log_softmax(-1)
        return float(of_tokens.gather(1, torch.tensor(said).unsqueeze(1)).sum())

    with torch.no_grad():
        found = [logp(question, question.answer) > logp(question, question.wrong) for question in pairs]
    return sum(found) / len(found)


def share_exact(questions: list[DemoQuestion], found: list[str]) -> float:
    """The share of answers that equal the right one, letter for letter. In [0, 1]."""
    return sum(q.answer == text for q, text in zip(questions, found, strict=True)) / len(questions)


def _report(questions: list[DemoQuestion], before: list[str], after: list[str]) -> str:
    """A table of some questions, spread over the set, and the two scores."""
    lines = [f"\n{'question':<46}{'before':<16}{'after':<20}"]
    for index in range(0, len(questions), max(1, len(questions) // SHOWN))[:SHOWN]:
        question = questions[index]
        mark = "right" if after[index] == question.answer else f"wrong, expected {question.answer}"
        asked = _cut(question.prompt.replace("\n", " "), 44)
        lines.append(f"{asked:<46}{_cut(before[index], 14):<16}{_cut(after[index], 18):<20}{mark}")
    scores = f"{share_exact(questions, before):.2f} before, {share_exact(questions, after):.2f} after"
    return "\n".join([*lines, f"\nexact match on {len(questions)} held-out questions: {scores}"])


def _cut(text: str, width: int) -> str:
    visible = " ".join(text.split())
    return visible if len(visible) <= width else visible[: width - 1] + "…"


def _next_steps(output_dir: str, name: str) -> str:
    config = _short_path(BUNDLED / name)
    command = _command()
    return (
        f"\nNext steps, from {Path.cwd()}:\n"
        f"  {command} chat {output_dir}\n"
        f"  {command} api {output_dir}\n"
        f"  {command} explain {config}\n"
        f"  {command} train {config} finetuning_type=lora output_dir=lora-run\n"
        f"  {command} train --help"
    )


def _command() -> str:
    """``burnish`` where the shell finds this one, else its path as it can be typed from here."""
    here = Path(sys.executable).with_name("burnish")
    found = shutil.which("burnish")
    return "burnish" if found and Path(found).resolve() == here.resolve() else str(_short_path(here))


def _short_path(path: Path) -> Path:
    """The path relative to the working directory, if it is inside it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path

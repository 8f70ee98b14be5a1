"""``burnish demo [dpo | grpo | picture]``: fine-tune a small model, and show its responses before and after.

By default the bundled model is fine-tuned on the bundled data. ``dpo`` trains on preference pairs, ``grpo`` on rewards
of the model's own responses, ``picture`` a vision model (``images.py``). Options of ``train`` may be overridden. The
run is saved in ``./demo-run``, ``./demo-dpo-run`` or similar. Responses are generated with transformers only, to show
that the saved model works without burnish.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from burnish.demo.images import demo_picture
from burnish.demo.report import (
    BUNDLED,
    DemoQuestion,
    answered_right,
    demo_plan,
    next_steps,
    report,
)
from burnish.models.quiet import suppress_loading_messages
from burnish.report.console import note
from burnish.report.metadata import RUN_YAML


def demo(argv: list[str]) -> int:
    """Train, generate responses before and after, and print them. Returns the exit status."""
    from burnish.checkpoint.checkpoint import output_folder
    from burnish.run.build import train_run
    from burnish.run.prepare import prepare

    if argv[:1] == ["picture"]:
        return demo_picture(argv[1:])
    if argv[:1] == ["grpo"]:
        return grpo_demo(argv[1:])
    is_dpo = argv[:1] == ["dpo"]
    name = "demo_dpo.yaml" if is_dpo else "demo.yaml"
    run = demo_plan(argv[is_dpo:], name)
    prepare(run)  # reports errors before responses are generated
    questions, pairs = demo_questions(), demo_questions("pairs_heldout") if is_dpo else []
    note(f"Generating responses to {len(questions)} held-out questions before training ...")
    before, knew = answers(BUNDLED / "model", questions), preference_accuracy(BUNDLED / "model", pairs)
    result = train_run(run)
    if result.exit_code is not None:
        return result.exit_code
    folder = output_folder(run.options)
    after = answers(folder, questions)
    note(report(questions, before, after))
    if is_dpo:
        share = f"{knew:.2f} before, {preference_accuracy(folder, pairs):.2f} after"
        note(f"preference accuracy on {len(pairs)} held-out pairs: {share}")
    note(next_steps(_commands(folder, answered_right(questions, after))))
    return 0


FIRST_STEPS = 100
"""Steps of supervised fine-tuning before GRPO. After them about half of the sampled responses are correct, so that
responses to the same question differ in reward."""


def grpo_demo(argv: list[str]) -> int:
    """Run a short supervised fine-tuning, then GRPO, and print responses before and after. Returns the exit status."""
    from burnish.checkpoint.checkpoint import output_folder
    from burnish.run.build import train_run

    name = "demo_grpo.yaml"
    folder = output_folder(demo_plan(argv, name).options)
    start = folder.with_name(f"{folder.name}-sft")
    note(f"{FIRST_STEPS} steps of supervised fine-tuning, so that some responses are correct before GRPO ...")
    first = train_run(demo_plan([f"max_steps={FIRST_STEPS}", f"output_dir={start}", "plot_loss=false"]))
    if first.exit_code is not None:
        return first.exit_code
    result = train_run(demo_plan(argv, name, start))
    if result.exit_code is not None:
        return result.exit_code
    questions = demo_questions()
    before, after = answers(start, questions), answers(folder, questions)
    note(report(questions, before, after))
    note(reward_lines(folder))
    note(next_steps(_commands(folder, answered_right(questions, after))))
    return 0


def reward_lines(folder: Path) -> str:
    """Return the mean rewards of training and of held-out questions as sparklines."""
    log = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))["log_history"]
    lines = []
    for name, title in (("reward", "reward during training"), ("eval_reward", "reward on held-out prompts")):
        values = [entry[name] for entry in log if name in entry]
        low, high = min(values, default=0.0), max(values, default=0.0)
        bars = "".join("▁▂▃▄▅▆▇█"[round(7 * (value - low) / ((high - low) or 1))] for value in values)
        if values:
            lines.append(f"{title:<28}{bars}  {values[0]:.2f} before, {values[-1]:.2f} after")
    return "\n".join(lines)


def demo_questions(name: str = "heldout") -> list[DemoQuestion]:
    lines = (BUNDLED / "data" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [
        DemoQuestion(f"{r['instruction']}\n{r['input']}".strip(), r.get("output") or r["chosen"], r.get("rejected", ""))
        for r in records
    ]


def answers(folder: Path, questions: list[DemoQuestion], batch_size: int = 50) -> list[str]:
    """Return greedy responses of the model in ``folder``."""
    model, tokenizer = _load_model(folder)
    found: list[str] = []
    for start in range(0, len(questions), batch_size):
        found += _answer_batch(model, tokenizer, [q.prompt for q in questions[start : start + batch_size]])
    return found


def _load_model(folder: Path) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with suppress_loading_messages():
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        return AutoModelForCausalLM.from_pretrained(folder).eval(), tokenizer


def _answer_batch(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
    inputs = tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    longest = 24  # the longest response has 18 tokens
    tokens = model.generate(**inputs, max_new_tokens=longest, do_sample=False)
    texts = tokenizer.batch_decode(tokens[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return [text.strip() for text in texts]


def preference_accuracy(folder: Path, pairs: list[DemoQuestion]) -> float:
    """Return the fraction of pairs whose chosen response is likelier than the rejected one, in [0, 1]."""
    import torch

    if not pairs:
        return 0.0
    model, tokenizer = _load_model(folder)

    def logp(question: DemoQuestion, answer: str) -> float:
        turns = [{"role": "user", "content": question.prompt}]
        prompt_ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=True)["input_ids"]
        answer_ids = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        of_tokens = (
            model(torch.tensor([prompt_ids + answer_ids])).logits[0, len(prompt_ids) - 1 : -1].float().log_softmax(-1)
        )
        return float(of_tokens.gather(1, torch.tensor(answer_ids).unsqueeze(1)).sum())

    with torch.no_grad():
        found = [logp(question, question.answer) > logp(question, question.wrong) for question in pairs]
    return sum(found) / len(found)


def _commands(folder: Path, question: str | None) -> list[str]:
    """Return the commands to go on with. Args: question: one that the model answers, or None."""
    place, config = shlex.quote(str(folder)), shlex.quote(str(folder / RUN_YAML))
    asked = [] if question is None else [f"chat {place} --once {shlex.quote(question)} temperature=0"]
    return [
        *asked,
        f"chat {place}",
        f"api {place}",
        f"explain {config}",
        f"train {config} finetuning_type=lora output_dir=lora-run",
        "train --help",
    ]

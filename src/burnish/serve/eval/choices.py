"""Questions -> which choice a model finds likeliest.

In:  subjects, a loop over a model, the template. Out: per question the probability of each choice. A choice is scored
     by the ids that the template writes for that answer there: by the first one where all differ in it, else by all.

The prompts are the benchmarks' own lines, which are part of their format. Examples ("shots") are the first of the
subject's ``dev`` file, in order, the published way; ``shots: random`` draws them by seed, subject and number. They are
turns of the template, and since all questions of a subject begin with them, the engine computes them once.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from burnish.config.errors import UserError
from burnish.data.chat.rows import Template
from burnish.data.stats import DataStats
from burnish.inference.batch import generate_all
from burnish.inference.scheduler import Scheduler
from burnish.inference.types import GenerationRequest
from burnish.loop.types import Example, Message
from burnish.serve.eval.questions import LETTERS, ChoiceQuestion, Subject

_HEADS = {
    "en": "The following are multiple choice questions (with answers) about {subject}.\n\n",
    "zh": "以下是中国关于{subject}考试的单项选择题，请选出其中的正确答案。\n\n",
}
_ANSWER = {"en": "\nAnswer:", "zh": "\n答案："}


@dataclass(frozen=True)
class Chosen:
    """Outcome of one question. ``is_right`` is None where its answer is not told."""

    letter: str
    chances: tuple[float, ...]
    is_right: bool | None


class Chooser:
    """The choices of one model.

    Args:
        lang: "en" or "zh", of the lines around a question.
        num_shots: examples before each question.
        draws: whether they are drawn instead of the first.
    """

    def __init__(
        self, loop: Scheduler, template: Template, *, lang: str = "en", num_shots: int = 5, draws: bool = False,
        seed: int = 42,
    ) -> None:  # fmt: skip
        self.loop, self.template, self.lang = loop, template, lang
        self.num_shots, self.draws, self.seed = num_shots, draws, seed
        self.shortened = 0  # questions that had fewer shots, because of the model's context

    def choose(self, subject: Subject) -> list[Chosen]:
        """All questions of a subject."""
        asks: list[GenerationRequest] = []
        plans: list[tuple[bool, int, list[list[int]]]] = []
        for number, question in enumerate(subject.questions):
            prompt, answers = self._fitting(subject, question, number)
            are_apart = len({ids[0] for ids in answers}) == len(answers)
            plans.append((are_apart, len(asks), answers))
            if are_apart:
                also = tuple(ids[0] for ids in answers)
                asks.append(GenerationRequest(prompt, 1, top_logprobs=0, also=also))
            else:
                asks += [GenerationRequest([*prompt, *ids], 0, prompt_logprobs_from=len(prompt)) for ids in answers]
        found = generate_all(self.loop, asks)
        chosen = []
        for question, (are_apart, first, answers) in zip(subject.questions, plans, strict=True):
            if are_apart:
                logps = dict(found[first].logprobs[0].top)
                scores = [logps[ids[0]] for ids in answers]
            else:
                each = found[first : first + len(answers)]
                scores = [sum(logprob.logprob for logprob in one.prompt_logprobs) for one in each]
            chosen.append(_chosen(scores, question))
        return chosen

    def _fitting(self, subject: Subject, question: ChoiceQuestion, number: int) -> tuple[list[int], list[list[int]]]:
        """The prompt, with as many shots as the context holds, and the ids of each choice behind it."""
        shots = self.shots(subject, number)
        while True:
            prompt, answers = self._ids(subject, shots, question)
            if len(prompt) + max(map(len, answers)) <= self.loop.limits.context:
                self.shortened += len(shots) < min(self.num_shots, len(subject.examples))
                return prompt, answers
            if not shots:
                what = f"question {number + 1} has {len(prompt)} tokens, and the context is {self.loop.limits.context}."
                raise UserError(what, where=subject.key, remedy="Raise infer_context, if the model allows it.")
            shots = shots[:-1]

    def shots(self, subject: Subject, number: int) -> Sequence[ChoiceQuestion]:
        if not self.draws:
            return subject.examples[: self.num_shots]
        key = int.from_bytes(sha256(f"{self.seed} {subject.key} {number}".encode()).digest()[:8], "big")
        drawn = random.Random(key)  # noqa: S311 (a choice of examples, not a secret)
        return drawn.sample(subject.examples, min(self.num_shots, len(subject.examples)))

    def messages(self, subject: Subject, shots: Sequence[ChoiceQuestion], question: ChoiceQuestion) -> list[Message]:
        """Up to the question; its answer follows."""
        found: list[Message] = []
        for shot in shots:
            found += [Message("user", self.written(shot)), Message("assistant", shot.answer or "")]
        found.append(Message("user", self.written(question)))
        head = _HEADS[self.lang].format(subject=subject.name)
        return [Message("user", head + found[0].text), *found[1:]]

    def written(self, question: ChoiceQuestion) -> str:
        lines = (f"\n{letter}. {text}" for letter, text in zip(LETTERS, question.choices, strict=False))
        return question.text + "".join(lines) + _ANSWER[self.lang]

    def _ids(
        self, subject: Subject, shots: Sequence[ChoiceQuestion], question: ChoiceQuestion
    ) -> tuple[list[int], list[list[int]]]:  # fmt: skip
        asked = self.messages(subject, shots, question)
        letters = LETTERS[: len(question.choices)]
        examples = [Example(messages=(*asked, Message("assistant", letter)), source=subject.key) for letter in letters]
        prompt = self.template.prompt(examples[0])
        rows = self.template.encode(examples, DataStats())
        stops = set(self.template.stop_token_ids())
        answers: list[list[int]] = []
        for row in rows:
            ids: Any = [] if row is None else row["input_ids"]
            behind = list(ids[len(prompt) :])
            while behind and (behind[-1] in stops or not self.template.tokenizer.decode([behind[-1]]).strip()):
                behind.pop()
            answers.append(behind)
        if not all(answers) or len({tuple(ids) for ids in answers}) < len(answers):
            what = f'template "{self.template.name}" does not write the choices apart.'
            raise UserError(what, remedy="Name another template; template=fewshot writes plain text.")
        return prompt, answers


def _chosen(scores: Sequence[float], question: ChoiceQuestion) -> Chosen:
    most = max(scores)
    weights = [math.exp(score - most) for score in scores]
    letter = LETTERS[scores.index(most)]
    chances = tuple(weight / sum(weights) for weight in weights)
    return Chosen(letter, chances, None if question.answer is None else letter == question.answer)

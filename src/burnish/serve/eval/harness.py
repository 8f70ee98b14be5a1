"""lm-evaluation-harness with burnish's engine and template.

``task: lm_eval:arc_easy,gsm8k`` selects its tasks; custom tasks are YAML files in ``task_dir``. Its own class for
Hugging Face models is not used, because it would apply another chat template. Requires the extra ``eval``
(https://github.com/EleutherAI/lm-evaluation-harness, docs/model_guide.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from burnish.config.errors import MissingExtraError
from burnish.data.chat.rows import Template
from burnish.inference.batch import generate_all
from burnish.inference.replies.replies import read_whole
from burnish.inference.replies.reply_forms import ReplyForm
from burnish.inference.scheduler import Scheduler
from burnish.inference.types import GenerationRequest, Sampling
from burnish.loop.types import Example, Message

EXTRA = "eval"
_LONGEST_ANSWER = 256
_GREEDY = {"temperature": 0.0}


class EngineModel:
    """The model interface of the harness.

    Args:
        loop: scheduler of the model.
        template: template of the model.
        form: how responses are parsed.
        name: name of the model.
        seed: seed for sampling.
        is_benchmark: for local benchmark files: the task description begins the first question, and each choice is
            encoded separately, as the template encodes a response.
    """

    def __init__(
        self, loop: Scheduler, template: Template, form: ReplyForm, name: str, seed: int = 42,
        is_benchmark: bool = False,
    ) -> None:  # fmt: skip
        self.is_benchmark = is_benchmark
        self.loop, self.template, self.form, self.seed = loop, template, form, seed
        self.tokenizer, self.name = template.tokenizer, name
        self._stops = frozenset(template.stop_token_ids())

    # --- interface of the harness -------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        return 0

    @property
    def world_size(self) -> int:
        return 1

    @property
    def tokenizer_name(self) -> str:
        return self.name

    def chat_template(self, chat_template: Any = False) -> str:
        return self.template.name

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, str]], add_generation_prompt: bool = True) -> str:
        """Render a conversation as text with the model's template. ``_ids`` parses its control tokens again."""
        turns = [Message(turn["role"], turn["content"]) for turn in chat_history if turn["role"] != "system"]  # type: ignore[arg-type]
        system = next((turn["content"] for turn in chat_history if turn["role"] == "system"), None)
        if self.is_benchmark and system is not None:
            turns[0], system = Message("user", system.rstrip() + "\n\n" + turns[0].text), None
        ids = self.template.prompt(Example(messages=tuple(turns), system=system, source="a task"))
        return self._text(ids)

    def loglikelihood(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """(context, continuation) -> log-probability of the continuation, and whether greedy decoding gives it."""
        asks = [self._scoring_request(*request.args) for request in requests]
        found = generate_all(self.loop, asks)
        return [self._score(one.prompt_logprobs) for one in found]

    def loglikelihood_rolling(self, requests: Sequence[Any], **_: Any) -> list[float]:
        """(text,) -> log-probability of the text, computed in windows if it is longer than the context."""
        return [self._rolling_log_likelihood(request.args[0]) for request in requests]

    def generate_until(self, requests: Sequence[Any], **_: Any) -> list[str]:
        """(context, settings) -> generated text, up to one of the strings in ``until``."""
        asks = [self._request(context, settings, at) for at, (context, settings) in enumerate(r.args for r in requests)]
        found = generate_all(self.loop, asks)
        return [self._cut(one.ids, request.args[1]) for one, request in zip(found, requests, strict=True)]

    # --- requests -----------------------------------------------------------------------------------------------------

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _start(self) -> list[int]:
        """Return the token that precedes a text without context."""
        first = self.tokenizer.bos_token_id
        return [self.tokenizer.eos_token_id if first is None else first]

    def _scoring_request(self, context: str, continuation: str) -> GenerationRequest:
        """Return a scoring request. Trailing blanks of the context belong to the continuation, as in the harness."""
        if self.is_benchmark:
            before = self._ids(context)
            return GenerationRequest(
                [*before, *self._ids(continuation)], 0, prompt_logprobs_from=len(before), top_logprobs=1
            )
        blanks = len(context) - len(context.rstrip())
        if blanks:
            context, continuation = context[:-blanks], context[-blanks:] + continuation
        before = self._ids(context) if context else self._start()
        whole = self._ids(context + continuation) if context else [*before, *self._ids(continuation)]
        most = self.loop.limits.context
        cut = max(0, len(whole) - most)
        return GenerationRequest(whole[cut:], 0, prompt_logprobs_from=max(1, len(before) - cut), top_logprobs=1)

    def _score(self, logprobs: Sequence[Any]) -> tuple[float, bool]:
        return sum(one.logprob for one in logprobs), all(one.token == one.top[0][0] for one in logprobs)

    def _rolling_log_likelihood(self, text: str) -> float:
        ids, most, sum_, done = [*self._start(), *self._ids(text)], self.loop.limits.context, 0.0, 1
        while done < len(ids):
            end = min(len(ids), max(most, done + most // 2))
            begin = max(0, end - most)
            (found,) = generate_all(
                self.loop, [GenerationRequest(ids[begin:end], 0, prompt_logprobs_from=done - begin)]
            )
            sum_, done = sum_ + sum(one.logprob for one in found.prompt_logprobs), end
        return sum_

    def _request(self, context: str, settings: Mapping[str, Any], number: int) -> GenerationRequest:
        most = int(settings.get("max_gen_toks") or settings.get("max_tokens") or _LONGEST_ANSWER)
        samples = settings.get("do_sample", False) and settings.get("temperature", 1.0) > 0
        drawn = {name: settings[name] for name in ("temperature", "top_p", "top_k") if name in settings}
        sampling = Sampling(seed=self.seed, **(drawn if samples else _GREEDY))
        ids = self._ids(context) or self._start()
        ids = ids[-(self.loop.limits.context - min(most, self.loop.limits.context // 2)) :]
        return GenerationRequest(ids, most, sampling=sampling, stop_ids=self._stops, index=number)

    def _cut(self, ids: Sequence[int], settings: Mapping[str, Any]) -> str:
        text = read_whole(ids, self.form, self.tokenizer).content
        until = settings.get("until") or []
        for stop in [until] if isinstance(until, str) else until:
            text = text.split(stop)[0] if stop else text
        return text


def check_harness() -> None:
    """Raise MissingExtraError if lm-evaluation-harness is not installed. Does not import it, which takes seconds."""
    if find_spec("lm_eval") is None:
        raise MissingExtraError("lm_eval", "burnish eval with a task", EXTRA, option="task")


def run_tasks(
    model: EngineModel, tasks: Sequence[str | Mapping[str, Any]], task_dir: Path | None, num_shots: int | None,
    limit: int | None, is_chat: bool,
) -> dict[str, Any]:  # fmt: skip
    """Return the harness's results for some tasks.

    Args:
        tasks: names or configurations.
        task_dir: folder of custom YAML tasks.
        num_shots: number of few-shot examples. Default: the task's.
        limit: maximum number of documents per task.
        is_chat: render questions with the chat template.
    """
    check_harness()
    import lm_eval
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Model(EngineModel, LM):  # type: ignore[misc]
        """A subclass of the harness's ``LM``, since the harness checks the class."""

        def __init__(self) -> None:
            LM.__init__(self)
            self.__dict__.update(model.__dict__)

    manager = TaskManager(include_path=str(task_dir) if task_dir else None, include_defaults=not model.is_benchmark)
    found: dict[str, Any] = lm_eval.simple_evaluate(
        model=Model(), tasks=[task if isinstance(task, str) else dict(task) for task in tasks], task_manager=manager,
        num_fewshot=num_shots, limit=limit, apply_chat_template=is_chat, log_samples=model.is_benchmark,
        bootstrap_iters=0 if model.is_benchmark else 100_000, random_seed=model.seed, fewshot_random_seed=model.seed,
    )  # fmt: skip
    keys = ("results", "versions", "n-shot", "n-samples", "samples")
    return {name: found[name] for name in keys if name in found}

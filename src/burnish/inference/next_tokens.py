"""Select the next token of each running request: requests and one row of logits each -> token ids or problems."""

# N requests, V vocabulary size

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from burnish.config.errors import Problem, is_out_of_memory
from burnish.inference.replies.grammar import GrammarError
from burnish.inference.sampling import DrawSettings, draw, draw_logps
from burnish.inference.slots import Job


def next_tokens(jobs: Sequence[Job], logits: Tensor) -> list[int | Problem]:
    """Draw the next token of N requests from (N, V) logits."""
    largest, top_ids = logits.max(-1)  # on a CPU, four times faster than argmax
    found: list[int | Problem] = list(top_ids.tolist())
    drawn: dict[int, DrawSettings] = {}
    for at, (job, is_finite) in enumerate(zip(jobs, torch.isfinite(largest).tolist(), strict=True)):
        if not is_finite:
            found[at] = Problem("The model's logits contain NaN or infinity.", code="non_finite_logits")
        elif not _is_greedy(job):
            try:
                drawn[at] = _draw_settings(job, logits.shape[1])
            except GrammarError as error:
                found[at] = grammar_problem(error)
    if drawn:
        rows = logits if len(drawn) == len(jobs) else logits[list(drawn)]
        for at, token in zip(drawn, draw(rows, list(drawn.values())).tolist(), strict=True):
            found[at] = token
    return found


def drawn_logps(jobs: Sequence[Job], logits: Tensor, tokens: Sequence[int | Problem]) -> list[float | None]:
    """Return the log-probability of each next token under the distribution it was drawn from, if requested."""
    found: list[float | None] = [None] * len(jobs)
    requested = {
        at: token
        for at, (job, token) in enumerate(zip(jobs, tokens, strict=True))
        if job.request.draw_logprobs and isinstance(token, int)
    }
    if requested:
        rows = [_draw_settings(jobs[at], logits.shape[1]) for at in requested]
        logps = draw_logps(logits[list(requested)], rows, torch.tensor(list(requested.values())))
        for at, logp in zip(requested, logps.tolist(), strict=True):
            found[at] = logp
    return found


def grammar_problem(error: GrammarError) -> Problem:
    """Return the problem of a request whose grammar failed."""
    return Problem(f"The response cannot follow its grammar: {error}", code="grammar_failed")


def failed_pass(error: BaseException) -> Problem:
    """Return the problem of the requests in a failed pass."""
    if is_out_of_memory(error):
        return Problem("Not enough memory for this step.", code="out_of_memory")
    return Problem(str(error).strip().split("\n")[0], code="internal_error")


def _is_greedy(job: Job) -> bool:
    """Return whether the next token is the argmax of the model's unmodified logits."""
    sampling, request = job.request.sampling, job.request
    is_changed = sampling.bias or sampling.presence_penalty or sampling.frequency_penalty
    is_early = request.stop_ids and len(job.answer) < request.min_new_tokens
    return not (
        sampling.temperature
        or is_changed
        or sampling.repetition_penalty != 1
        or request.grammar is not None
        or is_early
    )


def _draw_settings(job: Job, vocabulary: int) -> DrawSettings:
    """Return the settings of one draw. Raises GrammarError if the request's grammar failed."""
    request, mask = job.request, None
    if request.grammar is not None:
        mask = torch.zeros(vocabulary)
        request.grammar.mask(mask)
    is_early = (
        len(job.answer) < request.min_new_tokens and request.grammar is None
    )  # a grammar itself decides when a response is complete
    barred = request.stop_ids if is_early else ()
    return DrawSettings(request.sampling, request.ids, job.answer, job.noise, mask, barred)

"""Scheduler: assigns slots to requests, reads prompts in parts, and generates one token per slot and turn.

    loop = Scheduler(model, SlotLimits(slots=8, context=4096))
    loop.submit(request, callback)
    while loop.turn(): ...

The model must be in evaluation mode. Results are passed to the callback of each request. No thread is started here
(``engine.py`` does that): the caller of ``turn`` owns the model. A turn removes cancelled and expired requests, assigns
free slots to queued requests, reads one part of the prompts, generates one token for every running response, and
delivers the results. A long prompt therefore delays other requests by one part at a time.

Slots are ordered in three ranges: running responses, prompts being read, free slots. A pass over a range of slots is
then a view of the cache and never a gather. When a slot leaves its range, two slots are swapped. A free slot keeps its
contents: a request with a common prefix takes the slot over, or copies the prefix.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count

import torch
from torch import Tensor, nn

from burnish.config.errors import Problem
from burnish.inference.forward import NewTokens, Precision
from burnish.inference.next_tokens import NextToken, failed_pass, grammar_problem, next_tokens
from burnish.inference.probe import select_backend
from burnish.inference.replies.grammar import GrammarError
from burnish.inference.sampling import log_probabilities
from burnish.inference.slots import (
    AdapterContext,
    Deliver,
    Job,
    RecentSpeed,
    Slot,
    SlotLimits,
    check_request,
    common_prefix,
    deliver_each,
)
from burnish.inference.types import (
    EndReason,
    EngineFacts,
    GenerationRequest,
    OutputCallback,
    PromptProcessed,
    QueueFullError,
    RequestHandle,
    StepOutput,
)

MAX_CHUNK_TOKENS = 512
"""Maximum number of prompt tokens read per turn."""


class Scheduler:
    """Runs requests over the slots of a model.

    Args:
        model: the model, in evaluation mode.
        limits: limits on concurrent and queued requests.
        precision: context for forward passes, such as autocast.
        adapters: names that requests may select besides BASE.
        adapter_context: context in which each row of a pass uses its adapter; required with adapters.
        deliver: receives all results of a turn. Default: each callback is called.

    ``note`` is a message for the user if the model does not support batched slots.
    """

    def __init__(
        self, model: nn.Module, limits: SlotLimits, *, precision: Precision = nullcontext,
        adapters: Sequence[str] = (), adapter_context: AdapterContext | None = None, deliver: Deliver | None = None,
    ) -> None:  # fmt: skip
        self.model, self.adapters = model, tuple(adapters)
        self.backend, self.note = select_backend(model, limits.slots, precision)
        self.limits = limits if self.backend.is_batched else SlotLimits(1, limits.context, limits.waiting, limits.exact)
        self._adapter_context = adapter_context or (lambda names: nullcontext())
        self._deliver = deliver or deliver_each
        self._slots = [Slot() for _ in range(self.limits.slots)]
        self._num_generating = self._num_reading = 0  # sizes of the first two ranges of slots
        self._arrived: deque[Job] = deque()  # filled by other threads
        self._waiting: deque[Job] = deque()
        self._cancelled: deque[int | None] = deque()  # filled by other threads; None for all requests
        self._numbers = count(1)
        self._turn = 0
        self._is_out_of_memory = False
        self._outputs: list[tuple[OutputCallback, StepOutput]] = []
        self._speed = RecentSpeed()
        self._sums = {"prompt_tokens": 0, "cached_prompt_tokens": 0, "new_tokens": 0}

    def submit(self, request: GenerationRequest, callback: OutputCallback) -> RequestHandle:
        """Queue a request, as in ``types.InferenceEngine``. Thread-safe."""
        check_request(request, self.limits, self.adapters)
        waiting = self.num_waiting
        if self.limits.waiting is not None and waiting >= self.limits.waiting:
            raise QueueFullError(waiting, self._speed.estimated_wait_s([*self._arrived, *self._waiting]))
        handle = RequestHandle(next(self._numbers))
        limit = min(request.max_new_tokens, self.limits.context - len(request.ids))
        self._arrived.append(Job(request, callback, handle, limit, request.noise_key()))
        return handle

    def cancel(self, handle: RequestHandle) -> None:
        """Cancel a request. Thread-safe; its callback is notified within a turn."""
        self._cancelled.append(handle.number)

    def cancel_all(self) -> None:
        """Cancel all requests. Thread-safe."""
        self._cancelled.append(None)

    @property
    def num_waiting(self) -> int:
        return len(self._arrived) + len(self._waiting)

    @property
    def is_busy(self) -> bool:
        return bool(self._arrived or self._waiting or self._num_generating or self._num_reading)

    def forget(self) -> None:
        """Drop all keys and values because the weights have changed. Call between turns, in the thread of ``turn``.

        Raises RuntimeError if a request is running: it would mix old and new weights.
        """
        if running := self._num_generating + self._num_reading:
            raise RuntimeError(f"forget() requires an idle scheduler; {running} requests are running.")
        self._slots = [Slot() for _ in self._slots]

    def free(self) -> None:
        """Like ``forget``, but also release the cache memory. Later requests behave as with a new scheduler."""
        self.forget()
        self.backend.free()
        self._numbers, self._turn = count(1), 0

    def facts(self) -> EngineFacts:
        weights = {id(p): p.nbytes for p in self.model.parameters()}
        memory = {"weights": sum(weights.values()), "cache": self.backend.cache_bytes}
        return EngineFacts(
            self.backend.name, len(self._slots), self._num_generating + self._num_reading,
            self.num_waiting, self.limits.context, self.adapters, memory,
            self._sums["prompt_tokens"], self._sums["cached_prompt_tokens"], self._sums["new_tokens"],
            self._speed.rate(),
        )  # fmt: skip

    def turn(self) -> bool:
        """Run one round. Returns False if there was nothing to do."""
        self._turn += 1
        self._end_cancelled()
        self._admit()
        is_busy = bool(self._num_generating or self._num_reading)
        if self._num_reading:
            self._step(*self._next_chunk(), self._read_chunk)
            self._release_ended()
        if self._num_generating:
            size = 1 if self.limits.exact else self._num_generating
            for first in range(0, self._num_generating, size):
                self._step(first, size, self._generate_tokens)
            self._release_ended()
        if self._is_out_of_memory:
            self._reduce_slots()
        outputs, self._outputs = self._outputs, []
        if outputs:
            self._speed.add(sum(len(each.ids) for _, each in outputs))
            self._deliver(outputs)
        return is_busy or bool(outputs)

    # --- slots --------------------------------------------------------------------------------------------------------

    def _receive_requests(self) -> None:
        self._waiting += [self._arrived.popleft() for _ in range(len(self._arrived))]

    def _end_cancelled(self) -> None:
        """Receive new requests, and remove those that were cancelled or have expired."""
        # Other threads submit a request before they cancel it. In this order, a cancelled request is received already.
        cancelled, now = {self._cancelled.popleft() for _ in range(len(self._cancelled))}, time.monotonic()
        self._receive_requests()
        for job in [*self._waiting, *(slot.job for slot in self._slots if slot.job)]:
            has_timed_out = now > job.request.deadline
            if has_timed_out or None in cancelled or job.handle.number in cancelled:
                error = Problem("the request timed out.") if has_timed_out else None
                self._end(job, "cancelled", error)
        self._waiting = deque(job for job in self._waiting if not job.is_over)
        self._release_ended()

    def _admit(self) -> None:
        """Assign free slots to requests in order. One waits if its prefix is being read for another request."""
        while self._waiting and self._num_generating + self._num_reading < len(self._slots):
            job = self._waiting[0]
            source, common = self._longest_prefix(job)
            if self._is_being_read(job, common):
                return
            self._take_slot(job, source, common)
            self._waiting.popleft()

    def _longest_prefix(self, job: Job) -> tuple[int, int]:
        """Return the slot with the longest prefix of a request's prompt, and the length of the prefix."""
        most = len(job.request.ids) - 1  # at least one token must be read, for its logits
        if job.request.prompt_logprobs_from is not None:
            most = min(most, job.request.prompt_logprobs_from - 1)
        busy = [
            common_prefix(slot, job.request, most)
            if self.backend.can_rewind and slot.adapter == job.request.adapter
            else 0
            for slot in self._slots
        ]
        best, images = max(range(len(busy)), key=lambda at: (busy[at], at)), job.request.images
        return best, busy[best] if images is None else images.whole_begin(busy[best])

    def _is_being_read(self, job: Job, common: int) -> bool:
        others = (slot.job.request for slot in self._range(self._num_generating, self._num_reading) if slot.job)
        own = job.request
        alike = (common_prefix(other, own, len(own.ids)) for other in others if other.adapter == own.adapter)
        return self.backend.can_rewind and max(alike, default=0) >= common + self.limits.min_shared_tokens

    def _take_slot(self, job: Job, source: int, common: int) -> None:
        """Assign a slot to a request: a free slot that consists mostly of the request's prefix is taken over.
        Otherwise the prefix is copied to the slot that has been free longest."""
        first_free = self._num_generating + self._num_reading
        if source < first_free or common * 2 < len(self._slots[source].ids):
            target = min(range(first_free, len(self._slots)), key=lambda at: self._slots[at].used)
            if source != target:
                self.backend.copy_row(source, target, common)
                self._slots[target].ids = job.request.ids[:common]  # so that all of it is swapped
        else:
            target = source
        self._swap_slots(first_free, target)
        request = job.request
        self._slots[first_free] = Slot(request.ids[:common], request.content_hashes, request.adapter, job, self._turn)
        self._num_reading += 1
        job.cached = common
        self._sums["prompt_tokens"] += len(job.request.ids)
        self._sums["cached_prompt_tokens"] += common

    def _swap_slots(self, a: int, b: int) -> None:
        self.backend.swap_rows(a, b, max(len(self._slots[a].ids), len(self._slots[b].ids)))
        self._slots[a], self._slots[b] = self._slots[b], self._slots[a]

    def _release_ended(self) -> None:
        """Free the slots of finished requests. Their contents are kept."""
        for at in range(self._num_generating + self._num_reading - 1, -1, -1):
            slot = self._slots[at]
            if slot.job is not None and not slot.job.is_over:
                continue
            slot.job, slot.used = None, self._turn
            if at < self._num_generating:
                self._num_generating -= 1
                self._swap_slots(at, self._num_generating)
                at, self._num_reading = self._num_generating, self._num_reading + 1  # now the first that reads
            self._num_reading -= 1
            self._swap_slots(at, self._num_generating + self._num_reading)

    # --- forward passes -----------------------------------------------------------------------------------------------

    def _next_chunk(self) -> tuple[int, int]:
        """Return the slots that read next. The oldest request and the one with the shortest rest alternate, so that no
        prompt waits for long. Neighbouring slots are included as long as they fit into one part."""
        reading = self._range(self._num_generating, self._num_reading)
        priority = (lambda slot: slot.active.handle.number) if self._turn % 2 else self._num_unread
        lead = reading.index(min(reading, key=priority))
        number, longest = 1, len(self._next_prompt_tokens(reading[lead]))
        if self.backend.is_batched and not self.limits.exact:
            for slot in reading[lead + 1 :]:
                longest = max(longest, len(self._next_prompt_tokens(slot)))
                if longest * (number + 1) > MAX_CHUNK_TOKENS:
                    break
                number += 1
        return self._num_generating + lead, number

    def _num_unread(self, slot: Slot) -> int:
        return len(slot.active.request.ids) - len(slot.ids)

    def _next_prompt_tokens(self, slot: Slot) -> list[int]:
        """Return the prompt tokens that are read next."""
        begin, request = len(slot.ids), slot.active.request
        end = begin + (MAX_CHUNK_TOKENS if self.backend.splits_prompts else len(request.ids))
        return request.ids[begin : end if request.images is None else request.images.whole_end(end)]

    def _read_chunk(self, first: int, number: int) -> None:
        slots = self._range(first, number)
        rows = []
        for slot in slots:
            rest, request = self._next_prompt_tokens(slot), slot.active.request
            start, last = len(slot.ids), len(slot.ids) + len(rest) == len(request.ids)
            since = max((request.prompt_logprobs_from or len(request.ids) + 1) - 1 - start, 0)
            scored = range(since, len(rest) - last)
            rows.append(NewTokens(rest, start, [*scored, *([len(rest) - 1] if last else [])], request.images))
        with self._adapter_context([slot.adapter for slot in slots]):
            logits = self.backend.run(first, rows)
        ends = [sum(len(row.wanted) for row in rows[: at + 1]) for at in range(len(rows))]
        finished = []
        for slot, row, end in zip(slots, rows, ends, strict=True):
            slot.ids += row.ids
            self._score_prompt(slot, row, logits[end - len(row.wanted) : end])
            if len(slot.ids) == len(slot.active.request.ids) and self._begin_answer(slot):
                finished.append((slot, end - 1))
        if finished:
            self._sample([slot for slot, _ in finished], logits[[last for _, last in finished]])

    def _score_prompt(self, slot: Slot, row: NewTokens, logits: Tensor) -> None:
        """Collect the log-probabilities of prompt tokens if requested: position p predicts token p + 1."""
        job = slot.active
        if job.request.prompt_logprobs_from is None:
            return
        following = [row.start + place + 1 for place in row.wanted]
        tokens = [job.request.ids[place] for place in following if place < len(job.request.ids)]
        if tokens:
            of_tokens = logits[: len(tokens)]
            job.prompt_logprobs += log_probabilities(of_tokens, torch.tensor(tokens), job.request.top_logprobs or 0)

    def _begin_answer(self, slot: Slot) -> bool:
        """After the prompt was read, move its slot to the running responses. Returns whether a token is to be drawn."""
        job = slot.active
        self._outputs.append((job.callback, StepOutput(filled=PromptProcessed(job.cached, tuple(job.prompt_logprobs)))))
        self._swap_slots(self._slots.index(slot), self._num_generating)
        self._num_generating += 1
        self._num_reading -= 1
        if job.limit == 0:
            self._end(job, "length")
        return job.limit > 0

    def _generate_tokens(self, first: int, number: int) -> None:
        """Generate one more token for a range of slots: read the last token, draw the next one."""
        slots = self._range(first, number)
        rows = [NewTokens([slot.active.answer[-1]], len(slot.ids), [0], slot.active.request.images) for slot in slots]
        with self._adapter_context([slot.adapter for slot in slots]):
            logits = self.backend.run(first, rows)
        for slot, row in zip(slots, rows, strict=True):
            slot.ids += row.ids
        self._sample(slots, logits)

    def _sample(self, slots: Sequence[Slot], logits: Tensor) -> None:
        """Sample the next token of each slot from its row of logits."""
        jobs = [slot.active for slot in slots]
        for job, found in zip(jobs, next_tokens(jobs, logits), strict=True):
            if isinstance(found, Problem):
                self._end(job, "failed", found)
            else:
                self._add(job, found)

    def _add(self, job: Job, found: NextToken) -> None:
        request, token = job.request, found.token
        job.answer.append(token)
        self._sums["new_tokens"] += 1
        if request.grammar is not None:
            try:
                request.grammar.take(token)
            except GrammarError as error:
                return self._end(job, "failed", grammar_problem(error))
        reason: EndReason | None = "stop" if token in request.stop_ids else None
        if reason is None and len(job.answer) >= job.limit:
            reason = "length"
        self._outputs.append((job.callback, StepOutput((token,), found.logprobs, found.draw_logprob, reason=reason)))
        job.is_over = reason is not None

    # --- ends and failures --------------------------------------------------------------------------------------------

    def _step(self, first: int, number: int, run: Callable[[int, int], None]) -> None:
        """Run a pass. If it fails, its requests fail and the others continue."""
        try:
            run(first, number)
        except Exception as error:  # of a model's or a library's code; the other requests must not be affected
            problem = failed_pass(error)
            for slot in self._range(first, number):
                if slot.job is not None:
                    self._end(slot.job, "failed", problem)
                slot.ids = []
            self._is_out_of_memory |= problem.code == "out_of_memory"

    def _reduce_slots(self) -> None:
        """Reduce the number of slots and release the cache memory of the others."""
        self._is_out_of_memory = False
        running = self._num_generating + self._num_reading
        fewer = max(1, running, len(self._slots) - 1 if len(self._slots) < 4 else len(self._slots) * 3 // 4)
        self._slots = self._slots[:fewer]
        self.backend.resize(fewer)
        self.note = f"Out of memory; reduced to {fewer} concurrent requests."
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def fail_all(self, problem: Problem) -> None:
        """End all requests, including queued ones, with an error. Uses no device, which may be the cause."""
        self._receive_requests()
        for job in [*self._waiting, *(slot.job for slot in self._slots if slot.job)]:
            self._end(job, "failed", problem)
        self._waiting.clear()
        self._slots = [Slot() for _ in self._slots]
        self._num_generating = self._num_reading = 0
        outputs, self._outputs = self._outputs, []
        self._deliver(outputs)

    def _end(self, job: Job, reason: EndReason, error: Problem | None = None) -> None:
        self._outputs += [] if job.is_over else [(job.callback, StepOutput(reason=reason, error=error))]
        job.is_over = True

    def _range(self, first: int, number: int) -> list[Slot]:
        return self._slots[first : first + number]

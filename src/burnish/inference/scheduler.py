"""The loop of answering: asks take seats, prompts are read in pieces, all seats go on by one token per turn.

    loop = SeatLoop(model, SeatLimits(seats=8, context=4096))
    loop.submit(ask, sink)
    while loop.turn(): ...

In:  a model in evaluation mode, asks. Out: what each turn made, to the sink of each ask. Nothing here starts a thread
     (``engine.py`` does): whoever calls ``turn`` owns the model meanwhile.
A turn, in order: leave out what was cancelled or is too late; give waiting asks a seat; read one piece of prompts; make
one token of every answer under way; deliver. A long prompt thus delays others by a piece at a time.

Seats stand in three stretches: answers under way first, then prompts that are being read, then free ones. So one pass
over seats a to b is a view of the cache and never a gather; where a seat leaves its stretch, two exchange their places.
A free seat remembers what it holds: an ask that begins alike takes it over, or copies what it needs.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from secrets import randbits

import torch
from torch import Tensor, nn

from burnish.config.errors import Problem, is_out_of_memory
from burnish.inference.forward import NewTokens, Precision
from burnish.inference.next_tokens import grammar_problem, next_tokens
from burnish.inference.probe import choose
from burnish.inference.replies.grammar import GrammarError
from burnish.inference.sampling import log_probabilities
from burnish.inference.slots import (
    Deliver,
    Job,
    RecentSpeed,
    Seat,
    SeatLimits,
    Through,
    common_prefix,
    deliver_each,
    refuse_ask,
)
from burnish.inference.types import Ask, EndReason, EngineFacts, Filled, Full, Logprob, Made, Sink, Ticket

PIECE = 512
"""Tokens of prompts that are read in one turn."""
WORTH_WAITING = 32
"""An ask waits for another one's prompt where so many more tokens of its own would be read by it."""


class SeatLoop:
    """See the head of this file.

    Args:
        adapters: names that asks may give beside BASE.
        through: lets each row of a pass go through its adapter; needed where there are adapters.
        deliver: takes all that one turn made, at once; by default each sink is called.

    ``note`` is a sentence for a person where the model is not answered over seats.
    """

    def __init__(
        self, model: nn.Module, limits: SeatLimits, *, precision: Precision = nullcontext,
        adapters: Sequence[str] = (), through: Through | None = None, deliver: Deliver | None = None,
    ) -> None:  # fmt: skip
        self.model, self.adapters = model, tuple(adapters)
        self.way, self.note = choose(model, limits.seats, precision)
        self.limits = limits if self.way.batches else SeatLimits(1, limits.context, limits.waiting, limits.exact)
        self._through = through or (lambda names: nullcontext())
        self._deliver = deliver or deliver_each
        self._seats = [Seat() for _ in range(self.limits.seats)]
        self._answering = self._reading = 0  # how many seats the first two stretches have
        self._arrived: deque[Job] = deque()  # filled by other threads
        self._waiting: deque[Job] = deque()
        self._cancelled: set[int] = set()
        self._numbers = count(1)
        self._turn = 0
        self._lacks_memory = self._cancels_all = False
        self._made: list[tuple[Sink, Made]] = []
        self._pace = RecentSpeed()
        self._sums = {"prompt_tokens": 0, "cached_prompt_tokens": 0, "new_tokens": 0}

    def submit(self, ask: Ask, sink: Sink) -> Ticket:
        """As ``types.AnswerEngine`` has it; from any thread."""
        refuse_ask(ask, self.limits, self.adapters)
        waiting = self.num_waiting
        if self.limits.waiting is not None and waiting >= self.limits.waiting:
            raise Full(waiting, self._pace.patience([*self._arrived, *self._waiting]))
        ticket = Ticket(next(self._numbers))
        limit = min(ask.max_new_tokens, self.limits.context - len(ask.ids))
        seed = randbits(63) if ask.sampling.seed is None else ask.sampling.seed
        self._arrived.append(Job(ask, sink, ticket, limit, seed))
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """From any thread; within a turn the sink hears of it."""
        self._cancelled.add(ticket.number)

    def cancel_all(self) -> None:
        """Every ask that was taken in; from any thread."""
        self._cancels_all = True

    @property
    def num_waiting(self) -> int:
        return len(self._arrived) + len(self._waiting)

    @property
    def is_busy(self) -> bool:
        return bool(self._arrived or self._waiting or self._answering or self._reading)

    def forget(self) -> None:
        """Drop all keys and values: the weights have changed. Call it between turns, in the thread of ``turn``.

        Raises:
            RuntimeError: if an answer is under way; it would mix the old weights with the new ones.
        """
        if running := self._answering + self._reading:
            raise RuntimeError(f"forget() needs an idle scheduler; {running} requests are running.")
        for seat in self._seats:
            seat.ids, seat.content_hashes = [], None

    def facts(self) -> EngineFacts:
        weights = {id(p): p.nbytes for p in self.model.parameters()}
        memory = {"weights": sum(weights.values()), "cache": self.way.cache_bytes}
        return EngineFacts(
            self.way.name, len(self._seats), self._answering + self._reading,
            self.num_waiting, self.limits.context, self.adapters, memory,
            self._sums["prompt_tokens"], self._sums["cached_prompt_tokens"], self._sums["new_tokens"],
            self._pace.rate(),
        )  # fmt: skip

    def turn(self) -> bool:
        """One round; false where there was nothing to do."""
        self._turn += 1
        self._take_in()
        self._drop_ended()
        self._admit()
        is_busy = bool(self._answering or self._reading)
        if self._reading:
            self._step(*self._next_piece(), self._read_piece)
            self._release_ended()
        if self._answering:
            for first, number in self._passes(0, self._answering):
                self._step(first, number, self._make_tokens)
            self._release_ended()
        if self._lacks_memory:
            self._give_memory_back()
        made, self._made = self._made, []
        if made:
            self._pace.add(sum(len(each.ids) for _, each in made))
            self._deliver(made)
        return is_busy or bool(made)

    # --- who sits where -----------------------------------------------------------------------------------------------

    def _take_in(self) -> None:
        while self._arrived:
            self._waiting.append(self._arrived.popleft())

    def _drop_ended(self) -> None:
        """Asks that were cancelled or whose time is over."""
        cancelled, now = self._cancelled, time.monotonic()
        self._cancelled = set()
        everyone, self._cancels_all = self._cancels_all, False
        for job in [*self._waiting, *(seat.job for seat in self._seats if seat.job)]:
            is_late = now > job.ask.deadline
            if is_late or everyone or job.ticket.number in cancelled:
                error = Problem("the answer was not ready before its deadline.") if is_late else None
                self._end(job, "cancelled", error)
        self._waiting = deque(job for job in self._waiting if not job.is_over)
        self._release_ended()

    def _admit(self) -> None:
        """Waiting asks take free seats, first come, first served; but one whose beginning is being read for another
        ask right now waits for that."""
        while self._waiting and self._answering + self._reading < len(self._seats):
            job = self._waiting[0]
            source, common = self._best_beginning(job)
            if self._is_read_right_now(job, common):
                return
            self._waiting.popleft()
            self._seat(job, source, common)

    def _best_beginning(self, job: Job) -> tuple[int, int]:
        """The seat that holds the longest beginning of an ask's prompt, and its length."""
        most = len(job.ask.ids) - 1  # at least one token is read, for its logits
        if job.ask.prompt_logprobs_from is not None:
            most = min(most, job.ask.prompt_logprobs_from - 1)
        held = [
            common_prefix(seat, job.ask, most) if self.way.goes_back and seat.adapter == job.ask.adapter else 0
            for seat in self._seats
        ]
        best = max(range(len(held)), key=lambda at: (held[at], at))
        return best, held[best]

    def _is_read_right_now(self, job: Job, common: int) -> bool:
        others = (seat.job.ask for seat in self._stretch(self._answering, self._reading) if seat.job)
        alike = (common_prefix(o, job.ask, len(job.ask.ids)) for o in others if o.adapter == job.ask.adapter)
        return self.way.goes_back and max(alike, default=0) >= common + WORTH_WAITING

    def _seat(self, job: Job, source: int, common: int) -> None:
        """Give an ask a seat: the one that holds its beginning where that is free and mostly that, else the one that
        was free longest, with a copy of the beginning."""
        first_free = self._answering + self._reading
        if source < first_free or common * 2 < len(self._seats[source].ids):
            target = min(range(first_free, len(self._seats)), key=lambda at: self._seats[at].used)
            if source != target:
                self.way.copy_row(source, target, common)
        else:
            target = source
        self._exchange(first_free, target)
        self._seats[first_free] = Seat(job.ask.ids[:common], job.ask.content_hashes, job.ask.adapter, job, self._turn)
        self._reading += 1
        job.cached = common
        self._sums["prompt_tokens"] += len(job.ask.ids)
        self._sums["cached_prompt_tokens"] += common

    def _exchange(self, a: int, b: int) -> None:
        self.way.swap_rows(a, b, max(len(self._seats[a].ids), len(self._seats[b].ids)))
        self._seats[a], self._seats[b] = self._seats[b], self._seats[a]

    def _release_ended(self) -> None:
        """Free the seats of asks that have ended; what they hold stays."""
        for at in range(self._answering + self._reading - 1, -1, -1):
            seat = self._seats[at]
            if seat.job is not None and not seat.job.is_over:
                continue
            seat.job, seat.used = None, self._turn
            if at < self._answering:
                self._answering -= 1
                self._exchange(at, self._answering)
                at, self._reading = self._answering, self._reading + 1  # now the first of those that read
            self._reading -= 1
            self._exchange(at, self._answering + self._reading)

    # --- passes over the model ----------------------------------------------------------------------------------------

    def _passes(self, first: int, number: int) -> list[tuple[int, int]]:
        return [(first + i, 1) for i in range(number)] if self.limits.exact else [(first, number)]

    def _next_piece(self) -> tuple[int, int]:
        """The seats that read next: by turns from the oldest ask and from the one with the least to read, so that a
        short prompt does not wait for a long one, nor a long one for ever; and those beside it, as many as fit into a
        piece."""
        reading = self._stretch(self._answering, self._reading)
        by_turns = (lambda seat: self._job(seat).ticket.number) if self._turn % 2 else self._left_to_read
        lead = reading.index(min(reading, key=by_turns))
        number, longest = 1, len(self._rest(reading[lead]))
        if self.way.batches and not self.limits.exact:
            for seat in reading[lead + 1 :]:
                longest = max(longest, len(self._rest(seat)))
                if longest * (number + 1) > PIECE:
                    break
                number += 1
        return self._answering + lead, number

    def _left_to_read(self, seat: Seat) -> int:
        return len(self._ask(seat).ids) - len(seat.ids)

    def _rest(self, seat: Seat) -> list[int]:
        """The tokens of a prompt that are read next."""
        assert seat.job is not None
        begin = len(seat.ids)
        return seat.job.ask.ids[begin : begin + PIECE if self.way.splits else None]

    def _read_piece(self, first: int, number: int) -> None:
        seats = self._stretch(first, number)
        rows = []
        for seat in seats:
            rest, ask = self._rest(seat), self._ask(seat)
            start, last = len(seat.ids), len(seat.ids) + len(rest) == len(ask.ids)
            since = max((ask.prompt_logprobs_from or len(ask.ids) + 1) - 1 - start, 0)
            scored = range(since, len(rest) - last)
            rows.append(NewTokens(rest, start, [*scored, *([len(rest) - 1] if last else [])]))
        with self._through([seat.adapter for seat in seats]):
            logits = self.way.run(first, rows)
        for seat, row, found in zip(seats, rows, logits, strict=True):
            seat.ids += row.ids
            self._score_prompt(seat, row, found)
            if len(seat.ids) == len(self._ask(seat).ids):
                self._begin_answer(self._seats.index(seat), found)

    def _score_prompt(self, seat: Seat, row: NewTokens, logits: Tensor) -> None:
        """Log-probabilities of the prompt's own tokens, where asked for: position p predicts token p + 1."""
        job = seat.job
        assert job is not None
        if job.ask.prompt_logprobs_from is None:
            return
        following = [row.start + place + 1 for place in row.wanted]
        tokens = [job.ask.ids[place] for place in following if place < len(job.ask.ids)]
        if tokens:
            job.prompt_logprobs += log_probabilities(logits[: len(tokens)], tokens, job.ask.top_logprobs or 0)

    def _begin_answer(self, at: int, logits: Tensor) -> None:
        """The prompt is read: its seat moves to the stretch of answers, and the first token is drawn."""
        seat = self._seats[at]
        job = seat.job
        assert job is not None
        self._say(job, Made(filled=Filled(job.cached, tuple(job.prompt_logprobs))))
        self._exchange(at, self._answering)
        self._answering += 1
        self._reading -= 1
        if job.limit == 0:
            self._end(job, "length")
        else:
            self._draw([seat], logits[-1:])

    def _make_tokens(self, first: int, number: int) -> None:
        """One more token for each answer of a stretch: the last one is read, the next one drawn."""
        seats = self._stretch(first, number)
        rows = [NewTokens([self._job(seat).answer[-1]], len(seat.ids), [0]) for seat in seats]
        with self._through([seat.adapter for seat in seats]):
            logits = self.way.run(first, rows)
        for seat, row in zip(seats, rows, strict=True):
            seat.ids += row.ids
        self._draw(seats, torch.cat(logits))

    def _draw(self, seats: Sequence[Seat], logits: Tensor) -> None:
        """The next token of each seat, from one row of logits each."""
        jobs = [self._job(seat) for seat in seats]
        for job, row, found in zip(jobs, logits, next_tokens(jobs, logits), strict=True):
            if isinstance(found, Problem):
                self._end(job, "failed", found)
            else:
                self._add(job, found, row)

    def _add(self, job: Job, token: int, logits: Tensor) -> None:
        ask = job.ask
        job.answer.append(token)
        self._sums["new_tokens"] += 1
        if ask.grammar is not None:
            try:
                ask.grammar.take(token)
            except GrammarError as error:
                return self._end(job, "failed", grammar_problem(error))
        logprobs: tuple[Logprob, ...] = ()
        if ask.top_logprobs is not None:
            logprobs = tuple(log_probabilities(logits[None], [token], ask.top_logprobs, ask.also))
        reason: EndReason | None = "stop" if token in ask.stop_ids else None
        if reason is None and len(job.answer) >= job.limit:
            reason = "length"
        self._say(job, Made((token,), logprobs, reason=reason))
        job.is_over = reason is not None

    # --- ends and failures --------------------------------------------------------------------------------------------

    def _step(self, first: int, number: int, run: Callable[[int, int], None]) -> None:
        """A pass; where it fails its asks fail, and the others go on."""
        try:
            run(first, number)
        except (RuntimeError, MemoryError, IndexError, ValueError) as error:
            is_memory = is_out_of_memory(error)
            what = "out_of_memory: there was no memory for this step." if is_memory else f"internal_error: {error}"
            for seat in self._stretch(first, number):
                if seat.job is not None:
                    self._end(seat.job, "failed", Problem(what.strip().split("\n")[0]))
                seat.ids = []
            self._lacks_memory |= is_memory

    def _give_memory_back(self) -> None:
        """Fewer seats from now on, and what the cache had for the others goes back."""
        self._lacks_memory = False
        taken = self._answering + self._reading
        fewer = max(1, taken, len(self._seats) - 1 if len(self._seats) < 4 else len(self._seats) * 3 // 4)
        self._seats = self._seats[:fewer]
        self.way.resize(fewer)
        self.note = f"Memory ran out; {fewer} asks are answered at once from now on."
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def fail_all(self, problem: Problem) -> None:
        """End every ask, those that wait too."""
        self._take_in()
        for job in [*self._waiting, *(seat.job for seat in self._seats if seat.job)]:
            self._end(job, "failed", problem)
        self._waiting.clear()
        self._release_ended()
        made, self._made = self._made, []
        self._deliver(made)

    def _end(self, job: Job, reason: EndReason, error: Problem | None = None) -> None:
        if not job.is_over:
            self._say(job, Made(reason=reason, error=error))
            job.is_over = True

    def _say(self, job: Job, made: Made) -> None:
        self._made.append((job.sink, made))

    def _stretch(self, first: int, number: int) -> list[Seat]:
        return self._seats[first : first + number]

    def _job(self, seat: Seat) -> Job:
        assert seat.job is not None
        return seat.job

    def _ask(self, seat: Seat) -> Ask:
        return self._job(seat).ask

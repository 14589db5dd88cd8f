"""Which requests' tokens come next, in transformers' continuous batching: by the pages that compressed rows fill."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import Scheduler

from .admission import Answer
from .bounds import LEAST, most_whole
from .order import LOOKED_AT
from .requests import Requests
from .served import Known
from .served_pass import Part


class PageScheduler(Scheduler):
    """All that decode get a token in every pass; then prompts are read in the order of their requests, in parts of as
    many tokens as find their pages in any case; then waiting requests are let in.

    Where pages run out, whoever came last gives its pages up, waits, and is read again, what it has written included. A
    request that has all pages and needs more fails, as does one whose prompt cannot fit.
    requests: at most so many at once. fail: tells a request's owner why it failed. forget: is told who
    was cancelled, of whom nobody will hear.
    """

    def __init__(
        self, cache: Any, served: Requests, requests: int, fail: Callable[[RequestState, Exception], None],
        forget: Callable[[str], object],
    ) -> None:  # fmt: skip
        self.served, self.fail, self.forget = served, fail, forget
        self.known = Known(served.decoder)
        self.preempted, self.peak, self.peak_pages = 0, 0, 0
        self.taken = 0  # pages of this pass's parts so far
        super().__init__(cache, 0.0, requests)
        served.most = most_whole(cache.max_batch_tokens, self.max_requests_per_batch)
        served.answer_of = self._answer

    def schedule_batch(
        self, token_budget: int, cache_budget: int
    ) -> tuple[list[FutureRequestState] | None, bool, int, int]:
        served = self.served
        served.settle()
        self._make_room()
        budget, self.taken = token_budget - len(served.decoding), 0
        batch = [self._scheduled(self.active_requests[request], 1) for request in served.decoding]
        self.parts: list[Part] = []
        starved = False
        for state in list(self.active_requests.values()):
            if budget < 1 or state.request_id in served.decoding:
                continue
            part = self._part(state, budget, bool(batch))
            if part is None:
                starved = True
                break  # those behind it would take the pages that it waits for
            self.taken += served.part_pages(part)
            budget -= part.tokens
            self.parts.append(part)
            batch.append(self._scheduled(state, part.tokens))
        self._order()
        blocked = starved or (self.block_new_requests and bool(self.active_requests))
        while not blocked and budget > 0 and self.waiting_requests_order:
            if len(self.active_requests) >= self.max_requests_per_batch:
                break
            state = self.waiting_requests[self.waiting_requests_order[0]]
            part = self._first_part(state, budget)
            if part is None:
                if state.request_id in self.waiting_requests:
                    break
                continue  # it failed
            self.waiting_requests_order.popleft()
            del self.waiting_requests[state.request_id]
            self._add_children(state)
            seen = served.start(state.request_id, part.prompt)
            self.taken += served.part_pages(part)
            state.position_offset, state.remaining_prefill_tokens = seen, state.remaining_prefill_tokens[seen:]
            budget -= part.tokens
            self.parts.append(part)
            batch.append(self._scheduled(state, part.tokens))
        if not batch and self.active_requests:
            self._give_up(list(self.active_requests.values())[-1])
            return self.schedule_batch(token_budget, cache_budget)
        self.peak = max(self.peak, len(self.active_requests))
        self.peak_pages = max(self.peak_pages, served.used)
        return batch, False, token_budget - budget, 0

    def add_waiting_request(self, state: RequestState) -> None:
        """Raises ValueError for an id that another request has, whose pages it would take."""
        if state.request_id in self.waiting_requests or state.request_id in self.active_requests:
            raise ValueError(f"request_id must be of one request at a time, got {state.request_id!r} again")
        super().add_waiting_request(state)

    def finish_request(self, request_id: str) -> None:
        state = self.active_requests.get(request_id)
        if state is not None and state.status == RequestStatus.FINISHED:
            self.served.lengths.note(self._answer(request_id).written)
            self.served.ends(request_id, [*state.initial_tokens, *state.generated_tokens])
        super().finish_request(request_id)

    def clear_cancelled_requests(self) -> list[RequestState]:
        cancelled: list[RequestState] = super().clear_cancelled_requests()
        for state in cancelled:
            self.served.drop(state.request_id)
            self.forget(state.request_id)
            self.block_new_requests = False  # its pages are back
        return cancelled

    def _answer(self, request: str) -> Answer:
        state = self.active_requests.get(request) or self.waiting_requests[request]
        before = len(state.initial_tokens) - _given(state)  # it has given its pages up
        most = state._new_tokens_limit  # what is left of them, where it has
        return Answer(before + len(state.generated_tokens), before + most)

    # ---- parts ----

    def _scheduled(self, state: RequestState, tokens: int) -> FutureRequestState:
        coming = state.tokens_to_process if state.status == RequestStatus.DECODING else state.remaining_prefill_tokens
        self._schedule_request(state, coming, tokens, set())
        return FutureRequestState(state, not state.remaining_prefill_tokens, {}, tokens)

    def _prompt(self, state: RequestState) -> int:
        """Tokens that are read as the prompt."""
        return self.served.prompt_of(state.request_id, _given(state), len(state.initial_tokens))

    def _part(self, state: RequestState, budget: int, others: bool) -> Part | None:
        """The next part of a prompt; None where pages or the budget of this pass do not suffice."""
        served, prompt, request = self.served, self._prompt(state), state.request_id
        tokens = served.next_part(request, prompt, budget)
        if tokens < 1:
            return None
        part = Part(request, tokens, prompt, _given(state))
        least = tokens if served.whole else min(tokens, LEAST) if others else 1
        return part if served.fit(part, least, self.taken) else None

    def _first_part(self, state: RequestState, budget: int) -> Part | None:
        """That of a waiting request; None where it must wait, or has failed."""
        served, prompt = self.served, self._prompt(state)
        reason = served.refusal(_given(state) if served.whole else prompt)
        if (why := self.known.refusal(state.initial_tokens, state._new_tokens_limit)) is not None:
            reason = why
        if state._new_tokens_limit < 1:
            reason = f"may write nothing behind its prompt of {prompt} tokens: max_new_tokens must be at least 1"
        if reason is not None:
            self._refuse(state, reason)
            return None
        if served.prompts.offer(state.request_id, state.initial_tokens, _given(state)):
            return None
        if self.active_requests:
            pages = served.coming_pages({state.request_id: prompt})
            if not served.make_free(pages, state.request_id):
                return None
        part = self._part(state, budget, bool(self.active_requests))
        if part is None and not self.active_requests and served.drop_prefixes():  # its own, too
            part = self._part(state, budget, False)
        if part is None and not self.active_requests:  # nobody will give pages back
            self._refuse(state, f"needs more than all {served.pages} pages for its prompt of {prompt} tokens")
        return part

    def _order(self) -> None:
        """Of those that wait, who gave its pages up stays in front."""
        front = list(itertools.islice(self.waiting_requests_order, LOOKED_AT))
        fresh = [name for name in front if not self.waiting_requests[name]._true_initial_tokens]
        for name in fresh:
            tokens = self.waiting_requests[name].initial_tokens
            self.served.prompts.note(name, tokens, len(tokens))
        for i, name in enumerate(self.served.prompts.ordered(fresh), len(front) - len(fresh)):
            self.waiting_requests_order[i] = name

    # ---- pages run out ----

    def _make_room(self) -> None:
        """Makes whoever came last give its pages up until all others' next tokens find theirs."""
        while not self.served.make_free(0):
            self._give_up(list(self.active_requests.values())[-1])

    def _give_up(self, state: RequestState) -> None:
        request = state.request_id
        self.active_requests.pop(request)
        if self.active_requests:
            self.served.give_up(request)
        else:
            self.served.drop(request)
        self.served.settle()
        if not self.active_requests:
            tokens = state.position_offset
            self._fail(state, f"needs more than all {self.served.pages} pages after {tokens} tokens")
            return
        again = state.create_equivalent_initial_request()
        state._status = RequestStatus.FINISHED
        self.waiting_requests[request] = again
        self.waiting_requests_order.appendleft(request)
        self.preempted += 1
        self.block_new_requests = True  # until somebody has finished

    def _refuse(self, state: RequestState, reason: str) -> None:
        self._add_children(state)  # which are refused for themselves: each is waited for
        self.served.drop(state.request_id)
        self.waiting_requests_order.remove(state.request_id)
        del self.waiting_requests[state.request_id]
        self._fail(state, reason)

    def _fail(self, state: RequestState, reason: str) -> None:
        self.fail(state, RuntimeError(f"request {state.request_id} {reason}"))
        self.block_new_requests = False

    def _add_children(self, state: RequestState) -> None:
        """Further answers to the same prompt are requests of their own, which read it again."""
        for i in range(state.num_children):
            child = state.create_equivalent_initial_request()
            child.request_id, child.num_children = f"{state.request_id}__child#{i}", 0
            child._true_initial_tokens = 0
            try:
                self.add_waiting_request(child)
            except ValueError as error:
                self.fail(child, error)
        state.num_children = 0


def _given(state: RequestState) -> int:
    """Tokens of the prompt as the user gave it."""
    return state._true_initial_tokens or len(state.initial_tokens)

"""Delivers batches, each until all of its events are settled."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Final

import anyio
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from msgspec import Struct, field
from msgspec.structs import replace

from shipper.config.secrets import MASK
from shipper.config.settings import DeliverySettings
from shipper.delivery.answer import Answer
from shipper.delivery.credentials import SKEW_REPORTED_S, Authorization, ClockSkew, Credentials, NoTokenError
from shipper.delivery.endpoint import Endpoint, NoAnswerError, compress, new_traceparent
from shipper.delivery.gate import Admission, Gate
from shipper.delivery.parts import OutgoingBatch, event_ids, merge_outgoing, parts, without_released
from shipper.delivery.quoting import quotation
from shipper.delivery.verdicts import ANSWER_BYTES, Action, Verdict, judge, without_answer
from shipper.model.records import Batch, BatchResult, Refusal
from shipper.model.wire import INTAKE_PATH
from shipper.system.work import WorkItem, at_work

log = structlog.get_logger("delivery")

REFUSALS: Final = ("rejected", "too_large")  # rules of dead letters that the service refused

_NAMED_MAX: Final = 32  # send up to this many refused events one by one, more of them as one batch
# How a service refuses an event that it already has. For an event that may have been sent before, this is no error.
_REPEATED: Final = re.compile(r"\brepeat|\bduplicate|\balready\b|\breceived before\b|\bexists\b|\bis known\b", re.I)
# The first events of a run, or after it took over a partition, may have been sent before, by a process that was killed.
# Such a process cannot have held more unsaved events in memory than this.
_RESENT_EVENTS: Final = 400_000
_PROVEN_AFTER: Final = 100  # acceptances until a larger size is tried again
_PROVEN_MAX: Final = 10_000
_MERGES_MAX: Final = 3  # how often the parts of a batch are merged again after a refused record
_BLAMED_AFTER: Final = 8  # attempts after which a batch is split if it fails while others are accepted
# Upper bounds of the latency histogram, seconds; longer latencies have a bucket of their own.
BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SKEW_INTERVAL_S: Final = 10.0


class DeliveryCounts(Struct):
    """Counts shared by the senders of a run."""

    batches: int = 0
    by_status: Counter[str] = field(default_factory=Counter)  # requests by status of the answer; `none` = no answer
    by_cause: Counter[str] = field(default_factory=Counter)  # retries by reason
    latency_counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))  # until the complete answer
    latency_total_s: float = 0.0
    _latest_s: list[float] = []

    def note_request(self, status: str, seconds: float) -> None:
        self.by_status[status] += 1
        self.latency_counts[bisect_left(BUCKETS, seconds)] += 1
        self.latency_total_s += seconds
        self._latest_s.append(seconds)

    def take_latencies(self) -> list[float]:
        """Return the latencies since the last call, in ascending order."""
        latest_s, self._latest_s = self._latest_s, []
        return sorted(latest_s)


class SharedState(Struct, kw_only=True, eq=False):
    """State shared by the senders of a pipeline."""

    gate: Gate
    credentials: Credentials
    settings: DeliverySettings
    counts: DeliveryCounts
    skew: ClockSkew
    rng: Random
    wall_time: Callable[[], float]  # seconds since the epoch
    is_compressing: bool = False  # reset if the service does not support compressed bodies
    has_compressed: bool = False  # a compressed body was accepted
    working_bytes: float = math.inf  # body size that the service is assumed to accept
    proofs: int = 0  # acceptances since that size was set
    proofs_needed: int = _PROVEN_AFTER  # acceptances until a larger size is tried

    def __post_init__(self) -> None:
        self.is_compressing = self.settings.compression == "gzip"

    def remember_size(self, refused_bytes: int) -> None:
        """Lower the working size, because a body was refused as too large."""
        working_bytes = refused_bytes // 2
        if working_bytes < self.working_bytes:
            self.working_bytes = working_bytes
            log.warning("batch_size_lowered", refused_bytes=refused_bytes, max_bytes=working_bytes)
            self.proofs_needed = min(2 * self.proofs_needed, _PROVEN_MAX) if self.proofs else _PROVEN_AFTER
        self.proofs = 0

    def prove_size(self) -> None:
        """Count an acceptance; double the size after many, because the service may have raised its limit."""
        if self.working_bytes == math.inf:
            return
        self.proofs += 1
        if self.proofs >= self.proofs_needed:
            self.working_bytes *= 2
            self.proofs = 1


class Sender:
    """
    Delivers batches through an endpoint of its own, beside the other senders of the pipeline.

    Args:
        index: Number of the sender, from 0; it is idle while the concurrency limit is not above this number.
    """

    def __init__(self, endpoint: Endpoint, shared: SharedState, index: int) -> None:
        self.endpoint = endpoint
        self._shared = shared
        self._gate = shared.gate
        self._index = index
        self._skew_due_at = 0.0
        self._quote: Callable[[str], str]  # quotes the last answer
        self._settled_tx: MemoryObjectSendStream[BatchResult]

    async def run(
        self, batches_rx: MemoryObjectReceiveStream[Batch], settled_tx: MemoryObjectSendStream[BatchResult]
    ) -> None:
        """
        Deliver batches until the stream ends.

        Args:
            settled_tx: Must have capacity for one result per sender.
        Raises:
            DeliveryGaveUpError: The service accepted nothing for too long.
        """
        self._settled_tx = settled_tx
        with batches_rx, settled_tx:
            try:
                while await self._gate.is_needed(self._index):
                    await self._deliver(await batches_rx.receive())
            except anyio.EndOfStream:
                self._gate.finish()
            finally:
                with anyio.move_on_after(1, shield=True):
                    await self.endpoint.aclose()

    async def _deliver(self, batch: Batch) -> None:
        queue = deque([OutgoingBatch(batch, accepted_before=self._gate.acceptances)])
        refused = 0
        while queue:
            outgoing = queue.popleft()
            is_too_large = len(outgoing.batch.body) > self._shared.working_bytes
            if outgoing.batch.events > 1 and (outgoing.is_suspect or is_too_large):
                queue.extendleft(reversed(outgoing.halve(is_refused=outgoing.is_suspect)))
                continue
            left = await self._send(outgoing, has_others=bool(queue))
            if left == [outgoing]:
                queue.append(outgoing)  # perhaps its records are not the cause: send the others first
            else:
                queue.extendleft(reversed(left))
            refused += outgoing.is_refused
            if outgoing.is_refused and refused <= _MERGES_MAX and len(queue) > 1:
                queue = deque([merge_outgoing(queue)])  # usually the refused record was the only bad one
        self._shared.counts.batches += outgoing.attempts > 0

    async def _send(self, outgoing: OutgoingBatch, *, has_others: bool) -> list[OutgoingBatch]:
        """
        Send a batch until the service accepts or refuses its events.

        Between attempts, wait for the time that the service asks for, a backoff, or the gate. The number of attempts is
        unlimited; the gate ends the run if necessary.

        Args:
            has_others: Whether other parts of the same batch wait.
        Returns:
            The parts that must still be sent; all other events are settled, or went to another process.
        """
        gate = self._gate
        while True:
            attempts = outgoing.attempts
            admission = await gate.enter(outgoing.batch.events)
            try:
                if not self._drop_released(outgoing):
                    return []
                verdict = await self._answer(outgoing)
            finally:
                gate.leave()
            # No await between the answer and its settlement, so that a cancellation cannot separate them.
            result = self._conclude(outgoing, verdict, admission)
            if not isinstance(result, Verdict):
                return result
            outgoing.failures += 1
            was_sent = outgoing.attempts > attempts  # otherwise a secret is missing
            is_blamed = was_sent and self._blame(outgoing, result)
            wait_s = 0.0 if gate.reason else max(gate.backoff_s(outgoing.failures), result.retry_after_s or 0.0)
            if was_sent:
                self._shared.counts.by_cause[result.reason] += 1
            (log.debug if gate.reason else log.info)(  # a pause has been logged by the gate
                "retry_scheduled",
                reason=result.reason,
                message=result.message,
                attempt=outgoing.failures,
                wait_seconds=round(max(wait_s, gate.wait_s), 3),
            )
            await gate.sleep(wait_s)
            if is_blamed and outgoing.batch.events > 1:
                return outgoing.halve(is_refused=False)
            if has_others and outgoing.attempts >= _BLAMED_AFTER:
                return [outgoing]

    def _blame(self, outgoing: OutgoingBatch, verdict: Verdict) -> bool:
        """Decide whether a batch, or its size, is why it keeps failing; log the position of a single record."""
        accepted, is_single = self._gate.acceptances, outgoing.batch.events == 1
        are_others_accepted = accepted > outgoing.accepted_before
        is_blamed = verdict.action is Action.RETRY and outgoing.attempts >= _BLAMED_AFTER and are_others_accepted
        if is_blamed or is_single:
            outgoing.accepted_before = accepted
        if is_blamed and is_single:
            span, (ordinal,) = outgoing.batch.parts[0]
            assert span.chunk is not None
            log.warning(
                "record_keeps_failing",
                message=f"{verdict.message}, but others are accepted",
                path=span.stream.shown_path,
                **span.stream.position_fields(span.chunk.start_offset + span.bounds_of(ordinal)[0]),
            )
        return is_blamed

    def _drop_released(self, outgoing: OutgoingBatch) -> bool:
        """Drop events that went to another process while they waited; return whether any are left to send."""
        kept = without_released(outgoing.batch)
        if kept is not outgoing.batch:
            self._gate.refund(outgoing.batch.events - (kept.events if kept else 0))
        if kept is not None:
            outgoing.batch = kept
        return kept is not None

    def _conclude(
        self, outgoing: OutgoingBatch, verdict: Verdict, admission: Admission
    ) -> list[OutgoingBatch] | Verdict:
        """Settle events according to the verdict; return the parts still to be sent, or the reason for a retry."""
        if verdict.action is Action.ACCEPT:
            return self._accept(outgoing, verdict, admission)
        if verdict.action in {Action.BISECT, Action.HALVE}:
            return self._split(outgoing, verdict, admission)
        self._gate.note_failure(verdict, admission)
        return verdict

    # Sending -----------------------------------------------------------------------------------------------------

    async def _answer(self, outgoing: OutgoingBatch) -> Verdict:
        """Send a batch; resend it at once if a change may help, once for each kind of change."""
        changes: set[str] = set()
        while True:
            verdict, change = await self._answer_once(outgoing)
            if not change or change in changes:
                return verdict
            changes.add(change)
            self._shared.counts.by_cause[change] += 1
            log.debug("retried_at_once", reason=change)

    async def _answer_once(self, outgoing: OutgoingBatch) -> tuple[Verdict, str]:
        """Send a batch once; return the verdict, and the change after which to resend it at once, or ""."""
        shared, batch = self._shared, outgoing.batch
        try:
            authorization = await shared.credentials.authorize()
        except NoTokenError as error:
            return without_answer(error), ""
        is_compressed = shared.is_compressing and not outgoing.is_uncompressed
        traceparent = new_traceparent(shared.rng) if shared.settings.traceparent else ""
        outgoing.attempts += 1
        started_at = anyio.current_time()
        try:
            answer = await self.endpoint.request(
                "POST",
                INTAKE_PATH,
                _compressed(batch) if is_compressed else batch.body,
                authorization=authorization,
                traceparent=traceparent,
                encoding="gzip" if is_compressed else "",
                max_answer_bytes=ANSWER_BYTES,
            )
        except NoAnswerError as error:
            shared.counts.note_request("none", anyio.current_time() - started_at)
            log.debug("no_answer", batch=batch.number, reason=error.cause, traceparent=traceparent)
            outgoing.is_ambiguous |= error.was_sent
            return without_answer(error), "connection" if error.is_stale else ""
        shared.counts.note_request(str(answer.status), anyio.current_time() - started_at)
        self._quote = partial(quotation, authorization=authorization, body=batch.body)
        with at_work(_work_item(batch)):
            verdict = judge(
                answer,
                events=batch.events,
                wall_time=shared.wall_time(),
                event_ids=partial(event_ids, batch),
                quote=self._quote,
            )
        verdict = _without_secrets(verdict, authorization)
        outgoing.is_ambiguous |= verdict.is_ambiguous
        self._note_skew(answer, verdict)
        log.debug(
            "batch_sent",
            batch=batch.number,
            events=batch.events,
            bytes=len(batch.body),
            status=answer.status,
            traceparent=traceparent,
            request_id=_masked(answer.request_id, authorization),
        )
        if shared.is_compressing and (change := self._compression_change(verdict, outgoing)):
            return verdict, change
        return self._authorization_change(verdict, authorization)

    def _compression_change(self, verdict: Verdict, outgoing: OutgoingBatch) -> str:
        """Return "compression" if the batch should be resent uncompressed; stop compressing if that has helped."""
        shared = self._shared
        if verdict.action is Action.ACCEPT:
            if outgoing.is_uncompressed:
                shared.is_compressing = False
                log.warning("compression_refused", message="requests are sent uncompressed from now on")
            else:
                shared.has_compressed = True
        elif not outgoing.is_uncompressed and (
            verdict.status == 415 or (verdict.status == 400 and not shared.has_compressed)
        ):
            outgoing.is_uncompressed = True
            return "compression"
        return ""

    def _authorization_change(self, verdict: Verdict, authorization: Authorization) -> tuple[Verdict, str]:
        """Discard refused credentials; return the verdict, and the change if it helps to resend now."""
        has_others = self._shared.credentials.note_answer(verdict.action, authorization)
        skew_s = self._shared.skew.seconds
        if verdict.action is Action.RENEW_TOKEN and abs(skew_s) > SKEW_REPORTED_S:
            skew = f"; the service's clock differs from this machine's by {skew_s:+.0f} s"
            verdict = replace(verdict, problem=verdict.problem + skew)
        return verdict, verdict.reason if has_others and not self._gate.reason else ""

    def _note_skew(self, answer: Answer, verdict: Verdict) -> None:
        now = anyio.current_time()
        if verdict.action is not Action.ACCEPT or now >= self._skew_due_at:
            self._skew_due_at = now + _SKEW_INTERVAL_S
            self._shared.skew.note(answer.date, self._shared.wall_time())

    # Settling ----------------------------------------------------------------------------------------------------

    def _accept(self, outgoing: OutgoingBatch, verdict: Verdict, admission: Admission) -> list[OutgoingBatch] | Verdict:
        if verdict.results.rejected or verdict.results.retried:
            return self._accept_partly(outgoing, verdict, admission)
        self._settle(outgoing.batch)
        self._gate.note_accepted(admission)
        self._shared.prove_size()
        if outgoing.sibling is not None:
            outgoing.sibling.is_suspect = True
        return []

    def _accept_partly(
        self, outgoing: OutgoingBatch, verdict: Verdict, admission: Admission
    ) -> list[OutgoingBatch] | Verdict:
        results, everything = verdict.results, range(outgoing.batch.events)
        refused = sorted(results.rejected)
        again = sorted(results.retried.difference(refused))
        accepted = sorted(set(everything).difference(refused, again))
        # If all events are refused, the gate limits how many of them become dead letters.
        is_certain = bool(accepted) or all(_is_repeat(outgoing, words) for words in results.rejected.values())
        if is_certain:
            believed = len(refused)
        else:
            quote = partial(self._quote, results.rejected[refused[-1]])
            believed = self._gate.accept_refusals(len(refused), admission, quote)
        refused, doubted = refused[:believed], refused[believed:]
        singles = zip(refused, parts(outgoing.batch, [[index] for index in refused]), strict=True)
        refusals = [(single, _refusal(outgoing, verdict, results.rejected[index])) for index, single in singles]
        self._settle(next(iter(parts(outgoing.batch, [accepted])), None), refusals)
        if accepted:
            self._gate.note_accepted(admission)
        if doubted:
            (outgoing.batch,) = parts(outgoing.batch, [sorted({*doubted, *again})])
            return [outgoing]
        if not again:
            self._gate.note_answered(admission)
            return []
        (outgoing.batch,) = parts(outgoing.batch, [again])
        verdict = Verdict(Action.RETRY, "partly_accepted", "the service could not accept part of the batch yet")
        self._gate.note_failure(verdict, admission)
        return verdict

    def _split(self, outgoing: OutgoingBatch, verdict: Verdict, admission: Admission) -> list[OutgoingBatch]:
        """Split a batch that was refused because of its records; settle it if it is a single record."""
        batch = outgoing.batch
        if batch.events == 1:
            words = next(iter(verdict.results.rejected.values()), "") or verdict.statement
            if not _is_repeat(outgoing, words):
                quote, are_too_large = partial(self._quote, words), verdict.action is Action.HALVE
                if not self._gate.accept_refusals(1, admission, quote, are_too_large=are_too_large):
                    return [outgoing]
            self._gate.note_answered(admission)
            outgoing.is_refused = True
            self._settle(None, [(batch, _refusal(outgoing, verdict, words))])
            return []
        self._gate.note_answered(admission)
        if verdict.action is Action.HALVE:
            self._shared.remember_size(len(batch.body))
            return outgoing.halve(is_refused=False)
        named = sorted(verdict.results.rejected)
        if not 0 < len(named) < batch.events:
            return outgoing.halve(is_refused=True)
        others = sorted(set(range(batch.events)).difference(named))
        bad: list[Sequence[int]] = [[index] for index in named] if len(named) <= _NAMED_MAX else [named]
        return outgoing.split(parts(batch, [others, *bad]))

    def _settle(self, accepted: Batch | None, refused: Sequence[tuple[Batch, Refusal]] = ()) -> None:
        """Pass on the events that an answer settles; the stream has room, as each sender has one answer at a time."""
        if accepted is not None or refused:
            self._settled_tx.send_nowait(BatchResult(accepted, refused))


def _refusal(outgoing: OutgoingBatch, verdict: Verdict, words: str) -> Refusal:
    return Refusal(
        rule=REFUSALS[verdict.action is Action.HALVE],
        message=words or f"refused with status {verdict.status}",
        status=verdict.status,
        attempts=outgoing.attempts,
        is_ambiguous=outgoing.is_ambiguous or _is_repeat(outgoing, words),
    )


def _is_repeat(outgoing: OutgoingBatch, words: str) -> bool:
    """Return whether an event is refused because the service already has it, for instance after a lost answer."""
    may_be_repeat = outgoing.is_ambiguous or outgoing.batch.events_before < _RESENT_EVENTS
    return may_be_repeat and bool(_REPEATED.search(words))


def _without_secrets(verdict: Verdict, authorization: Authorization) -> Verdict:
    """Mask the request's secrets in the service's texts; called after `judge`, which needs the original texts."""
    results = verdict.results
    if not (verdict.statement or results.rejected):
        return verdict
    rejected = {index: _masked(words, authorization) for index, words in results.rejected.items()}
    return replace(
        verdict, statement=_masked(verdict.statement, authorization), results=replace(results, rejected=rejected)
    )


def _masked(text: str, authorization: Authorization) -> str:
    for secret in filter(None, authorization):
        text = text.replace(secret, MASK)
    return text


def _compressed(batch: Batch) -> bytes:
    with at_work(_work_item(batch)):
        return compress(batch.body)


def _work_item(batch: Batch) -> WorkItem:
    """Return the first record of a batch as the place to report if work on the batch gets stuck."""
    span = batch.parts[0][0]
    return WorkItem("deliver", span.stream.path, offset=span.start_offset)

"""A sender: takes batches and delivers each of them until all of its events are settled."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Final

import anyio
import msgspec
import structlog
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from msgspec import Struct
from msgspec.structs import replace

from shipper.config.secrets import MASK
from shipper.config.settings import DeliverySettings
from shipper.delivery.answer import Answer
from shipper.delivery.credentials import SKEW_TOLD_S, Authorization, ClockSkew, Credentials, NoTokenError
from shipper.delivery.endpoint import Endpoint, NoAnswerError, compressed, new_traceparent
from shipper.delivery.gate import Gate, Passage
from shipper.delivery.parts import Parcel, event_ids, merged_parcel, parts
from shipper.delivery.quoting import quotation
from shipper.delivery.verdicts import ANSWER_BYTES, Action, Verdict, judge, without_answer
from shipper.model.records import Batch, Refusal, Settled
from shipper.model.wire import INTAKE_PATH
from shipper.system.work import Piece, at_work

log = structlog.get_logger("delivery")

REFUSALS: Final = ("rejected", "too_large")  # the rules that the service's refusals go by

_NAMED_MAX: Final = 32  # of the events that a refusal names, so many are sent alone at once
# What a service says of an event that it already has. For an event that may have been sent before, that is no error.
_REPEATED: Final = re.compile(r"\brepeat|\bduplicate|\balready\b|\breceived before\b|\bexists\b|\bis known\b", re.I)
_RESENT_BATCHES: Final = 128  # at the start of a run: a process that was killed may have sent them already
_PROVEN_AFTER: Final = 100  # acceptances, until a larger size is tried again
_PROVEN_MAX: Final = 10_000
_MERGED_AFTER: Final = 3  # refused records of a batch; beyond them, its parts are better sent one by one
# Of the latencies: upper ends, seconds; what is longer is counted beyond the last.
BUCKETS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_SKEW_INTERVAL_S: Final = 10.0


class Latencies:
    """
    How long requests took: a histogram of all, and the latest ones exactly.

    Attributes:
        counts: Requests by bucket, one more than there are `BUCKETS`.
        total_s: Sum of all, seconds.
    """

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total_s = 0.0
        self._latest: list[float] = []

    def note(self, seconds: float) -> None:
        """Count a request."""
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total_s += seconds
        self._latest.append(seconds)

    def take_latest(self) -> list[float]:
        """Return the requests since the last call, the shortest first."""
        latest, self._latest = self._latest, []
        latest.sort()
        return latest


class DeliveryCounts(Struct):
    """
    Counts of what the senders of a run did; shared by them.

    Attributes:
        by_status: Requests by the status of the answer, and `none` for those without one.
        by_cause: Repeated attempts by their reason.
        latencies: From sending to the whole answer.
    """

    batches: int = 0
    by_status: dict[str, int] = {}
    by_cause: dict[str, int] = {}
    latencies: Latencies = msgspec.field(default_factory=Latencies)

    @property
    def requests(self) -> int:
        return sum(self.by_status.values())

    @property
    def retries(self) -> int:
        return sum(self.by_cause.values())

    def note_request(self, status: str, seconds: float) -> None:
        self.by_status[status] = self.by_status.get(status, 0) + 1
        self.latencies.note(seconds)

    def note_retry(self, cause: str) -> None:
        self.by_cause[cause] = self.by_cause.get(cause, 0) + 1


class Shared(Struct, kw_only=True, eq=False):
    """
    What the senders of a pipeline have in common.

    Attributes:
        wall_time: Seconds since the epoch.
        is_compressing: Bodies are compressed; until the service shows that it does not understand them.
        has_compressed: A compressed body was accepted.
        working_bytes: Size of a body that was not refused for its size, so far as is known.
        proofs: Acceptances since that was found out.
        proofs_needed: So many, until a larger size is tried again.
    """

    gate: Gate
    credentials: Credentials
    settings: DeliverySettings
    counts: DeliveryCounts
    skew: ClockSkew
    rng: Random
    wall_time: Callable[[], float]
    is_compressing: bool = False
    has_compressed: bool = False
    working_bytes: float = float("inf")
    proofs: int = 0
    proofs_needed: int = _PROVEN_AFTER


class Sender:
    """
    One of a pipeline's senders; it owns its endpoint.

    Args:
        index: From 0; a sender with a higher one waits until the concurrency limit needs it.
    """

    def __init__(self, endpoint: Endpoint, shared: Shared, index: int) -> None:
        self._endpoint = endpoint
        self._shared = shared
        self._gate = shared.gate
        self._index = index
        self._skew_due_at = 0.0
        self._settled_tx: MemoryObjectSendStream[Settled]

    @property
    def certificate_expires_at(self) -> float | None:
        """When the certificate expires that the service showed, seconds since the epoch; None if there was none."""
        return self._endpoint.certificate_expires_at

    async def run(
        self, batches_rx: MemoryObjectReceiveStream[Batch], settled_tx: MemoryObjectSendStream[Settled]
    ) -> None:
        """
        Deliver batches until the stream ends.

        Args:
            settled_tx: Has room for what one answer for each sender settles.
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
                    await self._endpoint.aclose()

    async def _deliver(self, batch: Batch) -> None:
        parcels = deque([Parcel(batch)])
        refused = 0
        while parcels:
            parcel = parcels.popleft()
            is_too_large = len(parcel.batch.body) > self._shared.working_bytes
            if parcel.batch.events > 1 and (parcel.is_suspect or is_too_large):
                parcels.extendleft(reversed(parcel.halved(is_refused=parcel.is_suspect)))
                continue
            left = await self._sent(parcel)
            if left == [parcel]:
                parcels.append(parcel)  # its refusal is not believed yet: others first
            else:
                parcels.extendleft(reversed(left))
            refused += parcel.is_refused
            if parcel.is_refused and refused <= _MERGED_AFTER and len(parcels) > 1:
                parcels = deque([merged_parcel(parcels)])  # mostly it was the only one
        self._shared.counts.batches += 1

    async def _sent(self, parcel: Parcel) -> list[Parcel]:
        """
        Send a parcel until there is an answer to what is in it.

        Before the next attempt it waits as long as the service asks for, or for a backoff; while the gate is shut, it
        waits there. There is no last attempt: the gate gives the run up.

        Returns:
            What is left of it to be sent; what is not, is settled.
        """
        attempt = 0
        while True:
            attempt += 1
            left = await self._attempt(parcel)
            if not isinstance(left, Verdict):
                return left
            wait_s = 0.0 if self._gate.reason else max(self._gate.backoff_s(attempt), left.retry_after_s or 0.0)
            self._note_retry(left, attempt, wait_s)
            await self._gate.sleep(wait_s)

    def _note_retry(self, failure: Verdict, attempt: int, wait_s: float) -> None:
        self._shared.counts.note_retry(failure.reason)
        tell = log.debug if self._gate.reason else log.info  # a pause is told once, and not at each probe
        tell(
            "retry_scheduled",
            reason=failure.reason,
            message=failure.message,
            attempt=attempt,
            wait_seconds=round(max(wait_s, self._gate.wait_s), 3),
        )

    async def _attempt(self, parcel: Parcel) -> list[Parcel] | Verdict:
        """Send a parcel once; returns what is left of it, or why it has to be sent once more."""
        batch = parcel.batch
        passage = await self._gate.enter(batch.events)
        try:
            verdict = await self._answer(parcel)
        finally:
            self._gate.leave()
        # From here on nothing is awaited: an answer and its consequences cannot be separated by a cancellation.
        if verdict.action is Action.ACCEPT:
            return self._accepted(parcel, verdict, passage)
        if verdict.action in {Action.BISECT, Action.HALVE}:
            return self._taken_apart(parcel, verdict, passage)
        self._gate.note_failure(verdict, passage)
        return verdict

    # Sending -----------------------------------------------------------------------------------------------------

    async def _answer(self, parcel: Parcel) -> Verdict:
        """Send a parcel; repeat it at once where the answer shows what to change, once for each change."""
        changes: set[str] = set()
        while True:
            verdict, change = await self._answer_once(parcel)
            if not change or change in changes:
                return verdict
            changes.add(change)
            self._shared.counts.note_retry(change)
            log.debug("retried_at_once", reason=change)

    async def _answer_once(self, parcel: Parcel) -> tuple[Verdict, str]:
        """Send a parcel; return the verdict, and what has changed so that it is worth sending again at once."""
        shared, batch = self._shared, parcel.batch
        try:
            authorization = await shared.credentials.authorize()
        except NoTokenError as error:
            verdict = Verdict(
                Action.PAUSE,
                error.reason,
                error.message,
                retry_after_s=error.retry_after_s,
                is_set_up_fault=error.is_set_up_fault,
            )
            return verdict, ""
        is_compressed = shared.is_compressing and not parcel.is_plain
        traceparent = new_traceparent(shared.rng) if shared.settings.traceparent else ""
        parcel.attempts += 1
        started_at = anyio.current_time()
        try:
            answer = await self._endpoint.request(
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
            parcel.is_ambiguous |= error.was_sent
            return without_answer(error.cause, str(error), is_tls=error.is_tls), "connection" if error.is_stale else ""
        shared.counts.note_request(str(answer.status), anyio.current_time() - started_at)
        with at_work(_piece(batch)):
            verdict = judge(
                answer,
                events=batch.events,
                wall_time=shared.wall_time(),
                event_ids=partial(event_ids, batch),
                quote=partial(quotation, authorization=authorization, body=batch.body),
            )
        verdict = _without_secrets(verdict, authorization)
        parcel.is_ambiguous |= verdict.is_ambiguous
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
        if shared.is_compressing and (change := self._compression_change(verdict, parcel)):
            return verdict, change
        return self._authorization_change(verdict, authorization)

    def _compression_change(self, verdict: Verdict, parcel: Parcel) -> str:
        """Send a body uncompressed if its compression may be why it was refused; stop compressing if it was."""
        shared = self._shared
        if verdict.action is Action.ACCEPT:
            if parcel.is_plain:
                shared.is_compressing = False
                log.warning("compression_refused", message="requests are sent uncompressed from now on")
            else:
                shared.has_compressed = True
        elif not parcel.is_plain and (verdict.status == 415 or (verdict.status == 400 and not shared.has_compressed)):
            parcel.is_plain = True
            return "compression"
        return ""

    def _authorization_change(self, verdict: Verdict, authorization: Authorization) -> tuple[Verdict, str]:
        """Get another token or key if one is refused; while delivery pauses, the next probe uses it."""
        can_go_on = self._shared.credentials.learn(verdict.action, authorization)
        skew_s = self._shared.skew.seconds
        if verdict.action is Action.RENEW_TOKEN and abs(skew_s) > SKEW_TOLD_S:
            skew = f"; the service's clock is {skew_s:+.0f} s off this machine's"
            verdict = replace(verdict, message=verdict.message + skew, what=verdict.what + skew)
        return verdict, verdict.reason if can_go_on and not self._gate.reason else ""

    def _note_skew(self, answer: Answer, verdict: Verdict) -> None:
        now = anyio.current_time()
        if verdict.action is not Action.ACCEPT or now >= self._skew_due_at:
            self._skew_due_at = now + _SKEW_INTERVAL_S
            self._shared.skew.note(answer.date, self._shared.wall_time())

    # What an answer leads to -------------------------------------------------------------------------------------

    def _accepted(self, parcel: Parcel, verdict: Verdict, passage: Passage) -> list[Parcel] | Verdict:
        if verdict.results.rejected or verdict.results.retried:
            return self._partly_accepted(parcel, verdict, passage)
        self._settle(parcel.batch)
        self._gate.note_accepted(passage)
        self._prove_size()
        if parcel.sibling is not None:
            parcel.sibling.is_suspect = True
        return []

    def _partly_accepted(self, parcel: Parcel, verdict: Verdict, passage: Passage) -> list[Parcel] | Verdict:
        results, everything = verdict.results, range(parcel.batch.events)
        refused = sorted(results.rejected)
        again = sorted(results.retried.difference(refused))
        taken = sorted(set(everything).difference(refused, again))
        # The records of a batch that is refused as a whole are dead letters only as far as the gate believes it.
        is_certain = bool(taken) or _is_repeat(parcel, *results.rejected.values())
        believed = len(refused) if is_certain else self._gate.believed(len(refused), passage)
        refused, doubted = refused[:believed], refused[believed:]
        singles = zip(refused, parts(parcel.batch, [[index] for index in refused]), strict=True)
        refusals = [(single, _refusal(parcel, verdict, results.rejected[index])) for index, single in singles]
        accepted = next(iter(parts(parcel.batch, [taken])), None)
        self._settle(accepted, refusals)
        if taken:
            self._gate.note_accepted(passage)
        if doubted:
            (parcel.batch,) = parts(parcel.batch, [sorted({*doubted, *again})])
            return [parcel]
        if not again:
            self._gate.note_answered(passage)
            return []
        (parcel.batch,) = parts(parcel.batch, [again])
        verdict = Verdict(Action.RETRY, "partly_accepted", "the service could not take a part of the batch yet")
        self._gate.note_failure(verdict, passage)
        return verdict

    def _taken_apart(self, parcel: Parcel, verdict: Verdict, passage: Passage) -> list[Parcel]:
        """Split a batch that the service refuses for its records, until the bad records are alone."""
        batch = parcel.batch
        if batch.events == 1:
            words = next(iter(verdict.results.rejected.values()), "") or verdict.words
            if not _is_repeat(parcel, words) and not self._gate.believed(1, passage):
                return [parcel]
            self._gate.note_answered(passage)
            parcel.is_refused = True
            self._settle(None, [(batch, _refusal(parcel, verdict, words))])
            return []
        self._gate.note_answered(passage)
        if verdict.action is Action.HALVE:
            self._remember_size(len(batch.body))
            return parcel.halved(is_refused=False)
        named = sorted(verdict.results.rejected)
        if not 0 < len(named) < batch.events:
            return parcel.halved(is_refused=True)
        others = sorted(set(range(batch.events)).difference(named))
        guilty: list[Sequence[int]] = [[index] for index in named] if len(named) <= _NAMED_MAX else [named]
        return parcel.parted(parts(batch, [others, *guilty]))

    def _settle(self, accepted: Batch | None, refused: Sequence[tuple[Batch, Refusal]] = ()) -> None:
        """Pass on what an answer settles, at once: the sender waits for the network before it has another one."""
        if accepted is not None or refused:
            self._settled_tx.send_nowait(Settled(accepted, refused))

    def _remember_size(self, refused_bytes: int) -> None:
        shared, working_bytes = self._shared, refused_bytes // 2
        if working_bytes < shared.working_bytes:
            shared.working_bytes = working_bytes
            log.warning("batch_size_lowered", refused_bytes=refused_bytes, max_bytes=working_bytes)
            shared.proofs_needed = min(2 * shared.proofs_needed, _PROVEN_MAX) if shared.proofs else _PROVEN_AFTER
        shared.proofs = 0

    def _prove_size(self) -> None:
        """Try twice the size after many acceptances, as the service's limit may have been raised."""
        shared = self._shared
        if shared.working_bytes == math.inf:
            return
        shared.proofs += 1
        if shared.proofs >= shared.proofs_needed:
            shared.working_bytes *= 2
            shared.proofs = 1


def _refusal(parcel: Parcel, verdict: Verdict, words: str) -> Refusal:
    return Refusal(
        rule=REFUSALS[verdict.action is Action.HALVE],
        message=words or f"refused with status {verdict.status}",
        status=verdict.status,
        attempts=parcel.attempts,
        is_ambiguous=parcel.is_ambiguous,
    )


def _is_repeat(parcel: Parcel, *words: str) -> bool:
    """Return whether events are refused because the service already has them, as after a lost answer."""
    may_be = parcel.is_ambiguous or parcel.batch.number <= _RESENT_BATCHES
    is_told = may_be and bool(words) and all(map(_REPEATED.search, words))
    parcel.is_ambiguous |= is_told
    return is_told


def _without_secrets(verdict: Verdict, authorization: Authorization) -> Verdict:
    """Mask the request's secrets in the service's words; after judging, as a secret may look like a word."""
    results = verdict.results
    if not (verdict.words or results.rejected):
        return verdict
    rejected = {index: _masked(words, authorization) for index, words in results.rejected.items()}
    return replace(verdict, words=_masked(verdict.words, authorization), results=replace(results, rejected=rejected))


def _masked(text: str, authorization: Authorization) -> str:
    for secret in filter(None, authorization):
        text = text.replace(secret, MASK)
    return text


def _compressed(batch: Batch) -> bytes:
    with at_work(_piece(batch)):
        return compressed(batch.body)


def _piece(batch: Batch) -> Piece:
    """Name the first of the records of a batch."""
    span = batch.parts[0][0]
    return Piece("deliver", span.stream.path, offset=span.start_offset)

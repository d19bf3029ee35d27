"""
Maps an answer of the service to a verdict. No I/O.

The service documents no answers, so the table follows HTTP and the behaviour of common gateways. An answer that is not
understood pauses delivery: a pause costs time, a wrong guess costs records. A 2xx answer is an acceptance only if it is
empty, plain text that indicates success, or a document in which `answer_reading` finds no sign of a failure.
"""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from functools import lru_cache
from typing import Final, NoReturn

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from shipper.delivery.answer import ALL_ACCEPTED, Answer, Results
from shipper.delivery.no_answer import SETUP_CAUSES, NoAnswerError
from shipper.delivery.tokens import NoTokenError
from shipper.delivery.waits import requested_wait_s

ANSWER_BYTES: Final = 4_194_304  # large enough for an answer with a result for each event of a batch
STATEMENT_BYTES: Final = 4_096  # part of an error's body that is kept with a dead letter
# Messages of gateways that can be logged. Others may quote a record or a header.
_KNOWN_WORDS: Final = re.compile(
    r"Access denied due to \w+ subscription key|Rate limit is exceeded|Out of [a-z ]+ quota"
    r"|Resource not found|JWT not present"
)
_BLANKS: Final = b" \t\r\n" + BOM_UTF8
# Whole titles or answers of servers, in which a record cannot be quoted.
_TLS_DEMANDS: Final = re.compile(
    rb"<title>400 (?:No required SSL certificate was sent|The SSL certificate error"
    rb"|The plain HTTP request was sent to HTTPS port)</title>"
    rb"|\AClient sent an HTTP request to an HTTPS server\.\s*\Z"
)
_QUOTA: Final = re.compile(r"\bquota\b", re.IGNORECASE)


class Action(Enum):
    """What the sender does next with the batch."""

    ACCEPT = "accept"
    RETRY = "retry"
    THROTTLE = "throttle"  # all senders wait as long as the service asks for
    RENEW_TOKEN = "renew_token"
    CHANGE_KEY = "change_key"
    PAUSE = "pause"  # not caused by the records
    HALVE = "halve"
    BISECT = "bisect"


class Verdict(Struct, frozen=True):
    action: Action
    reason: str = ""  # one word for logs and metrics, such as `http_503`
    problem: str = ""  # what happened, for users; contains no secrets and no values of records
    check: str = ""  # which settings to check
    status: int = 0  # of the answer; 0 = no answer
    retry_after_s: float | None = None  # the wait that the service asked for, seconds
    results: Results = ALL_ACCEPTED  # of single events
    statement: str = ""  # the service's text, for dead letters; must not be logged, as it may quote a record
    is_congestion: bool = False  # the service is overloaded
    is_ambiguous: bool = False  # the service may have accepted the batch nevertheless
    is_setup_problem: bool = False  # the problem must be fixed by a person; retrying does not help

    @property
    def message(self) -> str:
        """What happened and what to check."""
        return f"{self.problem}; check {self.check}" if self.check else self.problem


# Verdicts; `{section}` is the settings section of the endpoint.
_RETRY: Final = Verdict(Action.RETRY)
_REJECTED: Final = Verdict(Action.BISECT, "rejected", "the service refuses a record")
_UNEXPECTED: Final = Verdict(Action.PAUSE, "unexpected_answer", "shipper does not support this status")
_NOT_FOUND: Final = Verdict(Action.PAUSE, "not_found", "the address was not found", "{section}.base_url")
_REDIRECT: Final = Verdict(
    Action.PAUSE, "redirect", "the service redirects, which shipper does not follow", "{section}.base_url"
)
_KEY: Final = Verdict(
    Action.CHANGE_KEY, "subscription_key", "the service refused the subscription key", "{section}.subscription_key"
)
_NO_TLS: Final = Verdict(
    Action.PAUSE,
    "tls",
    "the service demands TLS or another client certificate",
    "{section}.base_url and {section}.client_certificate",
)
_FORBIDDEN: Final = Verdict(
    Action.PAUSE, "forbidden", "the service denied access", "the permissions of the token and the subscription key"
)
_BLOCKED: Final = replace(_FORBIDDEN, problem="the service denied access, or a firewall, as the answer is not JSON")
_QUOTA_USED_UP: Final = Verdict(Action.THROTTLE, "quota", "the quota of the subscription is used up")
_ACCEPTED: Final = Verdict(Action.ACCEPT)
_PARTLY: Final = Verdict(Action.BISECT, "rejected", "the service refuses a record without naming it")
_HTML: Final = Verdict(Action.PAUSE, "html_answer", "the answer is a web page", "{section}.base_url")
UNREADABLE: Final = "unreadable_answer"
_BROKEN: Final = Verdict(Action.PAUSE, UNREADABLE, "the service's answer is invalid, too long, or of an unknown form")

_TABLE: Final = {
    400: _REJECTED,
    401: Verdict(
        Action.RENEW_TOKEN, "token", "the service refused the access token", "{section}.token or {section}.oauth2"
    ),
    403: _FORBIDDEN,
    404: _NOT_FOUND,
    405: Verdict(Action.PAUSE, "not_found", "the method is not allowed at this address", "{section}.base_url"),
    408: _RETRY,
    409: _REJECTED,
    413: Verdict(Action.HALVE, "too_large", "the batch is too large for the service"),
    415: _REJECTED,
    422: _REJECTED,
    425: _RETRY,
    429: Verdict(Action.THROTTLE, "throttled", "the service asks for fewer requests"),
    501: _UNEXPECTED,
    505: _UNEXPECTED,
}
_SETUP_PROBLEMS: Final = {*("token", "subscription_key", "forbidden", "not_found", "redirect", "html_answer", "tls")}
_NO_ACCESS: Final = {401, 403}
_RETRIED: Final = {408, 425, 429}
_SAYS_RETRY: Final = Verdict(Action.RETRY, "", "the service answered 2xx but says that it cannot accept the batch yet")
_SAYS_THROTTLED: Final = Verdict(Action.THROTTLE, "throttled", "the service answered 2xx but asks for fewer requests")
_PARTIAL: Final = {206, 207}  # these must contain a result for each event
_SHORT_BYTES: Final = 512  # maximum size of an answer whose verdict is cached
_PLAIN_MAX: Final = 4_096  # maximum characters of an answer in plain text
_MARKUP: Final = re.compile(r"[<>{}\[\]\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_STARTS: Final = {b"{", b"["}
_NO_DOCUMENT: Final = object()
_CONGESTION: Final = {408, 429, 503, 504}
_TIMEOUTS: Final = {"connect_timeout", "read_timeout", "write_timeout"}


def _quote_nothing(statement: str) -> str:
    return ""


def judge(
    answer: Answer,
    *,
    events: int | None,
    section: str = "intake",
    wall_time: float | None = None,
    event_ids: Callable[[], Sequence[str]] = tuple,
    quote: Callable[[str], str] = _quote_nothing,
) -> Verdict:
    """
    Return the verdict on an answer.

    Args:
        events: Number of sent events; None for a request that does not send events.
        wall_time: The current time, for a `Retry-After` date in an answer without a `Date`.
        event_ids: Returns the EventIds of the sent events in order; called only if an EventId must be looked up.
        quote: Returns the part of an unknown text about refused access that a message may quote.
    """
    if len(answer.body) <= _SHORT_BYTES and not answer.compression and 200 <= answer.status < 300:
        accepted = _short_acceptance(answer.status, answer.content_type, answer.body, events)
        if accepted is not None:
            return accepted
    return _judge(answer, events, section, wall_time, event_ids, quote)


class _NeedsIdsError(Exception):
    """The verdict depends on the EventIds that were sent."""


@lru_cache(maxsize=64)
def _short_acceptance(status: int, content_type: str, body: bytes, events: int | None) -> Verdict | None:
    """Return the verdict if an answer accepts the batch regardless of its EventIds; None otherwise."""

    def no_ids() -> NoReturn:
        raise _NeedsIdsError

    try:
        verdict = _judge(Answer(status, content_type, "", body), events, "", None, no_ids, _quote_nothing)
    except _NeedsIdsError:
        return None
    return verdict if verdict.action is Action.ACCEPT else None


def _judge(
    answer: Answer,
    events: int | None,
    section: str,
    wall_time: float | None,
    event_ids: Callable[[], Sequence[str]],
    quote: Callable[[str], str],
) -> Verdict:
    document, is_text = _decoded(answer.body)
    results = ALL_ACCEPTED
    if 200 <= answer.status < 300:
        row = _broken_success(answer, document, events, is_text=is_text)
        if row is None and events is not None and not is_text:
            results = _results(document, events, event_ids)
            row = _verdict_on_results(results, answer.status, events)
            if row is _ACCEPTED and document and _repeats_a_name(answer.body, document):
                row = _unreadable("it has a field twice")
        row = row or _ACCEPTED
    else:
        row = _refusal(answer, document)
        if row.action is Action.BISECT:
            results = _results(document, events or 0, event_ids)
    if row.action is Action.ACCEPT:
        return Verdict(Action.ACCEPT, status=answer.status, results=results)
    is_success = answer.status < 300
    is_quiet = row is _RETRY and not is_success
    # A 2xx answer that asks for a retry counts as a 503 unless it contains another status.
    status = results.status or 503 if is_success and row.action is not Action.PAUSE else answer.status
    reason = row.reason or f"http_{status}"
    wait_s = requested_wait_s(answer.retry_after, _text(document), date=answer.date, wall_time=wall_time)
    problem = (
        f"the service answered {answer.status}" if is_quiet else f"{row.problem} {_details(answer, document, quote)}"
    )
    return replace(
        row,
        reason=reason,
        problem=problem,
        check=row.check.replace("{section}", section),
        status=answer.status,
        retry_after_s=wait_s,
        results=results,
        statement=_statement(answer.body, document),
        is_congestion=status in _CONGESTION,
        is_ambiguous=is_quiet or is_success,
        is_setup_problem=reason in _SETUP_PROBLEMS and wait_s is None,
    )


def without_answer(error: NoAnswerError | NoTokenError) -> Verdict:
    """Return the verdict on a request that got no answer, or was not sent because there is no token."""
    message = str(error)
    if isinstance(error, NoTokenError):
        wait_s, is_setup_problem = error.retry_after_s, error.is_setup_problem
        return Verdict(Action.PAUSE, error.reason, message, retry_after_s=wait_s, is_setup_problem=is_setup_problem)
    cause = error.cause
    action = Action.PAUSE if cause in {"tls", "credentials"} else Action.RETRY
    return Verdict(action, cause, message, is_congestion=cause in _TIMEOUTS, is_setup_problem=cause in SETUP_CAUSES)


def _broken_success(answer: Answer, document: object, events: int | None, *, is_text: bool) -> Verdict | None:
    """Return the verdict on a 2xx answer that is neither a document nor a successful text; otherwise None."""
    start = answer.body.lstrip(_BLANKS)
    # The content type of a web page may be wrong or missing.
    if answer.content_type == "text/html" or start[:1] == b"<":
        return _HTML
    if answer.content_type.endswith("problem+json"):
        return _unreadable("its type indicates an error")
    if len(answer.body) >= ANSWER_BYTES:  # truncated
        return _BROKEN
    if answer.compression:
        return _unreadable(f"it is compressed ({answer.compression}), although the request does not ask for that")
    if not start:
        return _BROKEN if answer.status in _PARTIAL else None
    if not is_text:
        return _BROKEN if document is _NO_DOCUMENT else None
    try:
        text = start.decode()
    except UnicodeDecodeError:
        return _BROKEN
    if len(text) > _PLAIN_MAX or _MARKUP.search(text):
        return _BROKEN
    from shipper.delivery.answer_words import indicates_failure, indicates_success

    if indicates_failure(text, events):
        return _unreadable("its text indicates a failure")
    if not indicates_success(text):
        return _unreadable("its text is not understood")
    return _BROKEN if answer.status in _PARTIAL else None


def _results(document: object, events: int, event_ids: Callable[[], Sequence[str]]) -> Results:
    if document is None or document == {}:
        return ALL_ACCEPTED
    from shipper.delivery.answer_reading import read_results  # imported here because it is rarely needed

    return read_results(document, events, event_ids)


def _verdict_on_results(results: Results, status: int, events: int) -> Verdict:
    is_named = bool(results.rejected or results.retried)
    if results.failure:
        if 500 <= results.status < 600 or results.status in _RETRIED:
            return _SAYS_THROTTLED if results.status == 429 else _SAYS_RETRY
        if results.unclear or not (is_named or results.unnamed):
            return _unreadable(f"{results.failure} says that it failed")
        return _PARTLY  # the other events may not have been accepted
    if results.unclear:
        return _unreadable(results.unclear)
    if results.has_unnamed_retries:
        return _SAYS_RETRY
    if results.unnamed:
        return _PARTLY
    if status in _PARTIAL and not results.has_event_results and events:
        return _unreadable(f"it does not give a result for each event, as {status} should")
    return _ACCEPTED


def _repeats_a_name(body: bytes, document: object) -> bool:
    """Return whether an object has two fields with the same name, of which decoding keeps only one."""
    try:
        if msgspec.json.encode(document) == body:
            return False
        json.loads(body.removeprefix(BOM_UTF8), object_pairs_hook=_distinct, parse_int=str)
    except (ValueError, RecursionError):
        return True
    return False


def _distinct(pairs: list[tuple[str, object]]) -> None:
    if len(dict(pairs)) < len(pairs):
        raise ValueError("repeated")


def _unreadable(problem: str) -> Verdict:
    return Verdict(Action.PAUSE, UNREADABLE, f"the service's answer is not a clear acceptance: {problem}")


def _refusal(answer: Answer, document: object) -> Verdict:
    status = answer.status
    text = _text(document)
    if status == 401 and b"subscription key" in answer.body.lower():
        return _KEY
    if status == 400 and answer.content_type != "application/json" and _TLS_DEMANDS.search(answer.body):
        return _NO_TLS
    if status == 403 and (answer.retry_after or _QUOTA.search(text)):
        return _QUOTA_USED_UP
    if status == 403 and document is _NO_DOCUMENT and not answer.compression:
        return _BLOCKED
    if 300 <= status < 400 and answer.redirects_to:
        problem = _REDIRECT.problem.replace("redirects", f"redirects to {answer.redirects_to}")
        return replace(_REDIRECT, problem=problem)
    if 300 <= status < 400:
        return _REDIRECT
    return _TABLE.get(status, _RETRY if status >= 500 else _UNEXPECTED)


def _details(answer: Answer, document: object, quote: Callable[[str], str]) -> str:
    if answer.compression and answer.status >= 300:  # of a 2xx answer, it is the problem
        return f"(HTTP {answer.status}; unreadable, as it is compressed: {answer.compression})"
    known = _KNOWN_WORDS.search(_text(document))
    words = known[0] if known else quote(_statement(answer.body, document)) if answer.status in _NO_ACCESS else ""
    return f'(HTTP {answer.status}: "{words}")' if words else f"(HTTP {answer.status})"


def _text(document: object) -> str:
    """Return the message in an error document; empty if there is none."""
    if not isinstance(document, dict):
        return ""
    for name in ("message", "detail", "error_description", "error", "title"):
        value = document.get(name)
        if isinstance(value, dict):
            value = value.get("message")
        if isinstance(value, str) and value:
            return value
    return ""


def _statement(body: bytes, document: object) -> str:
    return (_text(document).encode() or body)[:STATEMENT_BYTES].decode(errors="replace").strip()


def _decoded(body: bytes) -> tuple[object, bool]:
    """
    Decode a body; return the document, and whether the body is plain text instead.

    The document is `_NO_DOCUMENT` if it cannot be decoded. This includes one that is too long, because decoding may
    need thirty times its size in memory.
    """
    if not body:
        return None, False
    if len(body) < ANSWER_BYTES:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(body.removeprefix(BOM_UTF8)), False
    return _NO_DOCUMENT, body.lstrip(_BLANKS)[:1] not in _STARTS

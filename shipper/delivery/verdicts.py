"""
The verdict on an answer of the service: one table, no I/O.

The service documents no answers, so the table follows HTTP and what gateways do. An answer that is not understood
pauses delivery: a pause costs time, a wrong guess costs records. A 2xx answer is an acceptance only if it is
empty, plain words, or a document in which `answer_reading` understands everything that could speak of failure.
"""

from __future__ import annotations

import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from functools import lru_cache
from typing import Final, NamedTuple, NoReturn

import msgspec
from msgspec import Struct

from shipper.delivery.answer import ALL_TAKEN, Answer, Results
from shipper.delivery.waits import asked_wait_s

ANSWER_BYTES: Final = 4_194_304  # an answer may name every event of a batch
WORDS_BYTES: Final = 4_096  # of an error's body, kept with a dead letter
# Words of gateways. Others may quote a record or a header, and must not be logged as they are.
_KNOWN_WORDS: Final = re.compile(
    r"Access denied due to \w+ subscription key|Rate limit is exceeded|Out of [a-z ]+ quota"
    r"|Resource not found|JWT not present"
)
_BLANKS: Final = b" \t\r\n" + BOM_UTF8
_QUOTA: Final = re.compile(r"\bquota\b", re.IGNORECASE)


class Action(Enum):
    """What the sender does next with the batch."""

    ACCEPT = "accept"
    RETRY = "retry"
    THROTTLE = "throttle"  # nobody sends before the wait that was asked for is over
    RENEW_TOKEN = "renew_token"
    CHANGE_KEY = "change_key"
    PAUSE = "pause"  # a fault of the set-up, never of the records
    HALVE = "halve"
    BISECT = "bisect"


class Verdict(Struct, frozen=True):
    """
    Attributes:
        reason: One word for logs and metrics, such as `http_503`.
        message: What happened and what to check, for a person; never a secret or a record's value.
        what: The message without what to check, for readers who have the advice of the reason; empty = the same.
        status: Of the answer; 0 if there was none.
        retry_after_s: The wait that the service asked for, seconds; None if it did not.
        results: What the answer says of single events.
        words: The service's own, for the dead letters; they may quote a record, and are not for a log.
        is_congestion: The service has more to do than it can.
        is_ambiguous: The service may have taken the batch all the same.
        is_set_up_fault: Somebody has to put something right; waiting alone is of no use.
    """

    action: Action
    reason: str = ""
    message: str = ""
    status: int = 0
    retry_after_s: float | None = None
    results: Results = ALL_TAKEN
    words: str = ""
    what: str = ""
    is_congestion: bool = False
    is_ambiguous: bool = False
    is_set_up_fault: bool = False


class _Row(NamedTuple):
    action: Action
    reason: str = ""
    what: str = ""
    check: str = ""  # what to look at


_RETRY: Final = _Row(Action.RETRY)
_REJECTED: Final = _Row(Action.BISECT, "rejected", "the service refuses a record")
_UNEXPECTED: Final = _Row(Action.PAUSE, "unexpected_answer", "shipper does not know this status")
_NOT_FOUND: Final = _Row(Action.PAUSE, "not_found", "nothing is there", "{section}.base_url")
_REDIRECT: Final = _Row(
    Action.PAUSE, "redirect", "the service redirects, which shipper does not follow", "{section}.base_url"
)
_KEY: Final = _Row(
    Action.CHANGE_KEY, "subscription_key", "the service refused the subscription key", "{section}.subscription_key"
)
_QUOTA_ROW: Final = _Row(Action.THROTTLE, "quota", "the quota of the subscription is used up")
_ACCEPTED: Final = _Row(Action.ACCEPT)
_PARTLY: Final = _Row(Action.BISECT, "rejected", "the service refuses a record without naming it")
_HTML: Final = _Row(Action.PAUSE, "html_answer", "a web page answered, not the service", "{section}.base_url")
UNREADABLE: Final = "unreadable_answer"
_BROKEN: Final = _Row(Action.PAUSE, UNREADABLE, "the service's answer is broken, too long, or of an unknown form")

_TABLE: Final = {
    400: _REJECTED,
    401: _Row(
        Action.RENEW_TOKEN, "token", "the service refused the access token", "{section}.token or {section}.oauth2"
    ),
    403: _Row(
        Action.PAUSE,
        "forbidden",
        "the service denied access",
        "what the token and the subscription key are allowed to do",
    ),
    404: _NOT_FOUND,
    405: _Row(Action.PAUSE, "not_found", "the method is not allowed there", "{section}.base_url"),
    408: _RETRY,
    409: _REJECTED,
    413: _Row(Action.HALVE, "too_large", "the batch is too large for the service"),
    415: _REJECTED,
    422: _REJECTED,
    425: _RETRY,
    429: _Row(Action.THROTTLE, "throttled", "the service asks for fewer requests"),
    501: _UNEXPECTED,
    505: _UNEXPECTED,
}
_SET_UP_FAULTS: Final = {
    *("token", "subscription_key", "forbidden", "not_found", "redirect", "html_answer", "tls", "unknown_host")
}
_NO_ACCESS: Final = {401, 403}
_RETRIED: Final = {408, 425, 429}
_SAYS_AGAIN: Final = _Row(Action.RETRY, "", "the service answered 2xx but says that it cannot take the batch yet")
_SAYS_THROTTLED: Final = _Row(Action.THROTTLE, "throttled", "the service answered 2xx but asks for fewer requests")
_PARTIAL: Final = {206, 207}  # these have to say what became of each event
_SHORT_BYTES: Final = 512  # of an answer that services repeat for each batch
_PLAIN_MAX: Final = 4_096  # characters of an answer that is plain words
_MARKUP: Final = re.compile(r"[<>{}\[\]\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_STARTS: Final = {b"{", b"["}
_NO_DOCUMENT: Final = object()
_CONGESTION: Final = {408, 429, 503, 504}
_TIMEOUTS: Final = {"connect_timeout", "read_timeout", "write_timeout"}


def _nothing(said: str) -> str:
    """Quote nothing."""
    return ""


def judge(
    answer: Answer,
    *,
    events: int | None,
    section: str = "intake",
    wall_time: float | None = None,
    event_ids: Callable[[], Sequence[str]] = tuple,
    quote: Callable[[str], str] = _nothing,
) -> Verdict:
    """
    Return what an answer means for what was asked.

    Args:
        events: How many were sent; None if what was asked for was no acceptance of events.
        section: Of the settings, named in the advice.
        wall_time: For a `Retry-After` date where the answer has no date of its own.
        event_ids: Of the events that were sent, in their order; asked for only if the answer names some.
        quote: Returns what a message may quote of the service's words, if access is refused with other than known ones.
    """
    if len(answer.body) <= _SHORT_BYTES and 200 <= answer.status < 300:
        accepted = _short_acceptance(answer.status, answer.content_type, answer.body, events)
        if accepted is not None:
            return accepted
    return _judged(answer, events, section, wall_time, event_ids, quote)


class _AskedForIdsError(Exception):
    """The answer means nothing without the EventIds that were sent."""


@lru_cache(maxsize=64)
def _short_acceptance(status: int, content_type: str, body: bytes, events: int | None) -> Verdict | None:
    """Return the verdict on an answer that takes the batch whatever was in it; None if it is none."""

    def ask() -> NoReturn:
        raise _AskedForIdsError

    try:
        verdict = _judged(Answer(status, content_type, "", body), events, "", None, ask, _nothing)
    except _AskedForIdsError:
        return None
    return verdict if verdict.action is Action.ACCEPT else None


def _judged(
    answer: Answer,
    events: int | None,
    section: str,
    wall_time: float | None,
    event_ids: Callable[[], Sequence[str]],
    quote: Callable[[str], str],
) -> Verdict:
    document, is_text = _decoded(answer.body)
    results = ALL_TAKEN
    if 200 <= answer.status < 300:
        row = _broken_success(answer, document, events, is_text=is_text)
        if row is None and events is not None and not is_text:
            results = _results(document, events, event_ids)
            row = _told_by(results, answer.status, events)
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
    # A 2xx answer that asks to try again counts as the answer that its status should have been.
    status = results.status or 503 if is_success and row.action is not Action.PAUSE else answer.status
    reason = row.reason or f"http_{status}"
    wait_s = asked_wait_s(answer.retry_after, _text(document), date=answer.date, wall_time=wall_time)
    what = message = f"the service answered {answer.status}"
    if not is_quiet:
        details = _details(answer, document, quote)
        what, check = f"{row.what} {details}", row.check.replace("{section}", section)
        message = f"{row.what}; check {check} {details}" if check else what
    return Verdict(
        action=row.action,
        reason=reason,
        message=message,
        status=answer.status,
        retry_after_s=wait_s,
        results=results,
        words=_words(answer.body, document),
        what=what,
        is_congestion=status in _CONGESTION,
        is_ambiguous=is_quiet or is_success,
        is_set_up_fault=reason in _SET_UP_FAULTS and wait_s is None,
    )


def without_answer(cause: str, message: str, *, is_tls: bool) -> Verdict:
    """
    Return the verdict on a request without an answer.

    Args:
        cause: One word, such as `read_timeout`.
        is_tls: A certificate was not accepted, which a retry does not change.
    """
    if is_tls:
        return Verdict(Action.PAUSE, "tls", message, is_set_up_fault=True)
    is_set_up_fault = cause in _SET_UP_FAULTS
    return Verdict(Action.RETRY, cause, message, is_congestion=cause in _TIMEOUTS, is_set_up_fault=is_set_up_fault)


def _broken_success(answer: Answer, document: object, events: int | None, *, is_text: bool) -> _Row | None:
    """Return the row for a 2xx answer that is neither a document nor plain words; None if it is one of them."""
    start = answer.body.lstrip(_BLANKS)
    # A page may come under another type, or under none; no document that says yes begins like one.
    if answer.content_type == "text/html" or start[:1] == b"<":
        return _HTML
    if answer.content_type.endswith("problem+json"):
        return _unreadable("its type is that of an error")
    if len(answer.body) >= ANSWER_BYTES:  # the rest of it was not read
        return _BROKEN
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
    from shipper.delivery.answer_words import speaks_of_failure, speaks_of_success

    if speaks_of_failure(text, events):
        return _unreadable("its text speaks of failure")
    if not speaks_of_success(text):
        return _unreadable("its text says nothing that is known")
    return _BROKEN if answer.status in _PARTIAL else None


def _results(document: object, events: int, event_ids: Callable[[], Sequence[str]]) -> Results:
    """Read what a document says of the events; how to read it is loaded with the first one that says anything."""
    if document is None or document == {}:
        return ALL_TAKEN
    from shipper.delivery.answer_reading import read_results

    return read_results(document, events, event_ids)


def _told_by(results: Results, status: int, events: int) -> _Row:
    """Return the row for what a document says."""
    is_named = bool(results.rejected or results.retried)
    if results.denial:
        if 500 <= results.status < 600 or results.status in _RETRIED:
            return _SAYS_THROTTLED if results.status == 429 else _SAYS_AGAIN
        if results.unclear or not (is_named or results.unnamed):
            return _unreadable(f"{results.denial} says that it failed")
        return _PARTLY  # whether the others were taken is not certain
    if results.unclear:
        return _unreadable(results.unclear)
    if results.is_again:
        return _SAYS_AGAIN
    if results.unnamed:
        return _PARTLY
    if status in _PARTIAL and not results.is_told and events:
        return _unreadable(f"it does not say what became of each event, as {status} should")
    return _ACCEPTED


def _repeats_a_name(body: bytes, document: object) -> bool:
    """Return whether an object has two fields of one name, of which decoding keeps only one."""
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


def _unreadable(what: str) -> _Row:
    return _Row(Action.PAUSE, UNREADABLE, f"the service's answer is not a clear acceptance: {what}")


def _refusal(answer: Answer, document: object) -> _Row:
    status = answer.status
    text = _text(document)
    if status == 401 and b"subscription key" in answer.body.lower():
        return _KEY
    if status == 403 and (answer.retry_after or _QUOTA.search(text)):
        return _QUOTA_ROW
    if 300 <= status < 400:
        return _REDIRECT
    return _TABLE.get(status, _RETRY if status >= 500 else _UNEXPECTED)


def _details(answer: Answer, document: object, quote: Callable[[str], str]) -> str:
    known = _KNOWN_WORDS.search(_text(document))
    said = known[0] if known else quote(_words(answer.body, document)) if answer.status in _NO_ACCESS else ""
    return f'(HTTP {answer.status}: "{said}")' if said else f"(HTTP {answer.status})"


def _text(document: object) -> str:
    """Find what an error document says in words; empty if it does not."""
    if not isinstance(document, dict):
        return ""
    for name in ("message", "detail", "error_description", "error", "title"):
        value = document.get(name)
        if isinstance(value, dict):
            value = value.get("message")
        if isinstance(value, str) and value:
            return value
    return ""


def _words(body: bytes, document: object) -> str:
    return (_text(document).encode() or body)[:WORDS_BYTES].decode(errors="replace").strip()


def _decoded(body: bytes) -> tuple[object, bool]:
    """
    Decode JSON.

    Returns:
        The document, and whether the body is none, but a text. A document that cannot be decoded is `_NO_DOCUMENT`; so
        is one too long to be an answer, as what is made of it may take thirty times its memory.
    """
    if not body:
        return None, False
    if len(body) < ANSWER_BYTES:
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return msgspec.json.decode(body.removeprefix(BOM_UTF8)), False
    return _NO_DOCUMENT, body.lstrip(_BLANKS)[:1] not in _STARTS

"""
What an answer of the service means: one table, no I/O.

The service documents no answers, so the table follows HTTP and what gateways do. What is not understood pauses
delivery: a pause costs time, a wrong guess costs records.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Struct

from shipper.delivery.results import ALL_TAKEN, Results, read_results
from shipper.delivery.waits import asked_wait_s

ANSWER_BYTES: Final = 4_194_304  # an answer may name every event of a batch
WORDS_BYTES: Final = 4_096  # of an error's body, kept with a dead letter
# What gateways say of themselves. Other words may quote a record or a header, and are not for a log.
_KNOWN_WORDS: Final = re.compile(
    r"Access denied due to \w+ subscription key|Rate limit is exceeded|Out of [a-z ]+ quota"
    r"|Resource not found|JWT not present"
)
_BLANKS: Final = b" \t\r\n" + BOM_UTF8
_QUOTA: Final = re.compile(r"\bquota\b", re.IGNORECASE)


class Answer(Struct, frozen=True):
    """
    What came back for one request.

    Attributes:
        status: The HTTP status code.
        content_type: Lower case, without parameters; empty if there was none.
        retry_after, date: The headers as they came; empty if there were none.
        body: At most the bytes asked for; the rest was not read.
        request_id: By which the service's people find the request again; empty if it named none.
    """

    status: int
    content_type: str
    retry_after: str
    body: bytes
    date: str = ""
    request_id: str = ""


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
        message: What happened and what to do, for a person; never a secret or a record's value.
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
    is_congestion: bool = False
    is_ambiguous: bool = False
    is_set_up_fault: bool = False


class _Row(NamedTuple):
    action: Action
    reason: str = ""
    advice: str = ""


_RETRY: Final = _Row(Action.RETRY)
_REJECTED: Final = _Row(Action.BISECT, "rejected", "the service refuses a record")
_UNEXPECTED: Final = _Row(Action.PAUSE, "unexpected_answer", "the answer is none that shipper knows")
_NOT_FOUND: Final = _Row(Action.PAUSE, "not_found", "nothing is there; check {section}.base_url")
_REDIRECT: Final = _Row(Action.PAUSE, "redirect", "redirects are not followed; check {section}.base_url")
_KEY: Final = _Row(
    Action.CHANGE_KEY, "subscription_key", "the service refused the subscription key; check {section}.subscription_key"
)
_QUOTA_ROW: Final = _Row(Action.THROTTLE, "quota", "the quota of the subscription is used up")
_PARTLY: Final = _Row(Action.BISECT, "rejected", "the service refuses a record, and does not name it")
_HTML: Final = _Row(Action.PAUSE, "html_answer", "a web page answered, not the service; check {section}.base_url")
_UNREADABLE: Final = _Row(
    Action.PAUSE,
    "unreadable_answer",
    "the service's answer is broken, too long, or of a form that shipper does not know",
)
_DENIED: Final = _Row(Action.PAUSE, "unexpected_answer", "the service says that it failed, in an answer of success")

_TABLE: Final = {
    400: _REJECTED,
    401: _Row(
        Action.RENEW_TOKEN, "token", "the service refused the access token; check {section}.token or {section}.oauth2"
    ),
    403: _Row(
        Action.PAUSE,
        "forbidden",
        "the service forbids it; check what the token and the subscription key are allowed to do",
    ),
    404: _NOT_FOUND,
    405: _Row(Action.PAUSE, "not_found", "the method is not allowed there; check {section}.base_url"),
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
_CONGESTION: Final = {408, 429, 503, 504}
_TIMEOUTS: Final = {"connect_timeout", "read_timeout", "write_timeout"}


def judge(
    answer: Answer,
    *,
    section: str = "intake",
    wall_time: float | None = None,
    event_ids: Callable[[], Sequence[str]] = tuple,
) -> Verdict:
    """
    Tell what an answer means for what was asked.

    Args:
        section: Of the settings, named in the advice.
        wall_time: For a `Retry-After` date where the answer has no date of its own.
        event_ids: Of the events that were sent, in their order; asked for only if the answer names some.
    """
    document = _decoded(answer.body)
    row = _success(answer, document) if 200 <= answer.status < 300 else _refusal(answer, document)
    results = ALL_TAKEN
    if row.action in {Action.ACCEPT, Action.BISECT}:
        found = read_results(document, event_ids)
        if found.unnamed and row.action is Action.ACCEPT:
            row = _PARTLY
        if found is ALL_TAKEN and answer.status == 207:
            row = _UNREADABLE
        results = found
    if row.action is Action.ACCEPT:
        return Verdict(Action.ACCEPT, status=answer.status, results=results)
    reason = row.reason or f"http_{answer.status}"
    is_quiet = row is _RETRY
    wait_s = asked_wait_s(answer.retry_after, _text(document), date=answer.date, wall_time=wall_time)
    return Verdict(
        action=row.action,
        reason=reason,
        message=f"the service answered {answer.status}" if is_quiet else _message(answer, document, row, section),
        status=answer.status,
        retry_after_s=wait_s,
        results=results,
        words=_words(answer.body, document),
        is_congestion=answer.status in _CONGESTION,
        is_ambiguous=is_quiet,
        is_set_up_fault=reason in _SET_UP_FAULTS and wait_s is None,
    )


def without_answer(cause: str, message: str, *, is_tls: bool) -> Verdict:
    """
    Tell what it means that there was no answer.

    Args:
        cause: One word, such as `read_timeout`.
        is_tls: A certificate was not accepted: that does not pass by itself.
    """
    if is_tls:
        return Verdict(Action.PAUSE, "tls", message, is_set_up_fault=True)
    is_set_up_fault = cause in _SET_UP_FAULTS
    return Verdict(Action.RETRY, cause, message, is_congestion=cause in _TIMEOUTS, is_set_up_fault=is_set_up_fault)


def _success(answer: Answer, document: object) -> _Row:
    # A page may come under another type, or under none; no document that says yes begins like one.
    if answer.content_type == "text/html" or answer.body.lstrip(_BLANKS)[:1] == b"<":
        return _HTML
    if document is None and answer.body.lstrip(_BLANKS)[:1] in {b"{", b"["}:
        return _UNREADABLE
    if isinstance(document, dict) and _denies(document):
        return _DENIED
    return _Row(Action.ACCEPT)


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


def _denies(document: dict[str, Any]) -> bool:
    """Whether a document says plainly that nothing was taken, and names no event."""
    failed = any(value is False and str(name).lower() in {"success", "ok"} for name, value in document.items())
    return failed and read_results(document, tuple) is ALL_TAKEN


def _message(answer: Answer, document: object, row: _Row, section: str) -> str:
    known = _KNOWN_WORDS.search(_text(document))
    said = f'; it says "{known[0]}"' if known else ""
    return f"{row.advice.format(section=section)} (HTTP {answer.status}{said})"


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


def _decoded(body: bytes) -> object:
    """Decode JSON; None if it is none."""
    try:
        return msgspec.json.decode(body.removeprefix(BOM_UTF8))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None

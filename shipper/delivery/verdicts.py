"""
What an answer of the intake means: one table, no I/O.

The service documents no answers, so the table follows HTTP and what gateways do. What is not understood pauses
delivery: a pause costs time, a wrong guess costs records.
"""

from __future__ import annotations

import re
from enum import Enum
from random import Random
from typing import Final

import msgspec
from msgspec import Struct

ANSWER_BYTES: Final = 4_194_304  # an answer may name every event of a batch
RETRY_AFTER_MAX_S: Final = 3_600.0  # a longer wait is served in parts: asking once an hour harms nobody
# What gateways say of themselves. Other words may quote a record or a header, and are not for a log.
_KNOWN_WORDS: Final = re.compile(
    r"Access denied due to \w+ subscription key|Rate limit is exceeded|Out of [a-z ]+ quota"
    r"|Resource not found|JWT not present"
)


class Answer(Struct, frozen=True):
    """
    What came back for one request.

    Attributes:
        status: The HTTP status code.
        content_type: Lower case, without parameters; empty if there was none.
        retry_after: The header as it came; empty if there was none.
        body: At most the bytes asked for; the rest was not read.
    """

    status: int
    content_type: str
    retry_after: str
    body: bytes


class Action(Enum):
    """What the sender does next with the batch."""

    ACCEPT = "accept"
    RETRY = "retry"
    PAUSE = "pause"


class Verdict(Struct, frozen=True):
    """
    Attributes:
        reason: One word for logs and metrics, such as `http_503`.
        message: What happened and what to do, for a person; never a secret or a record's value.
        retry_after_s: The wait that the service asked for, seconds; None if it did not.
    """

    action: Action
    reason: str = ""
    message: str = ""
    retry_after_s: float | None = None


_RETRIED: Final = {408, 425, 429}
_NOT_RETRIED_SERVER_ERRORS: Final = {501, 505}
_PAUSES: Final = {
    401: ("token", "the service refused the access token; check {section}.token"),
    403: ("forbidden", "the service forbids it; check what the token and the subscription key are allowed to do"),
    404: ("not_found", "nothing is there; check {section}.base_url"),
    405: ("not_found", "the method is not allowed there; check {section}.base_url"),
    413: ("too_large", "the batch is too large for the service; lower batch.max_bytes or batch.max_events"),
}
_KEY: Final = (
    "subscription_key",
    "the service refused the subscription key; check {section}.subscription_key",
)
_REFUSED: Final = ("rejected", "the service refused the batch")
_UNEXPECTED: Final = ("unexpected_answer", "the answer is none that shipper knows")


def judge(answer: Answer, *, section: str = "intake") -> Verdict:
    """Tell what an answer means for what was asked; `section` of the settings is named in the advice."""
    status = answer.status
    if 200 <= status < 300:
        return _judge_success(answer, section)
    if status in _RETRIED or (status >= 500 and status not in _NOT_RETRIED_SERVER_ERRORS):
        return Verdict(Action.RETRY, f"http_{status}", f"the service answered {status}", _seconds(answer.retry_after))
    if status == 401 and b"subscription key" in answer.body.lower():
        reason, advice = _KEY
    elif 300 <= status < 400:
        reason, advice = "redirect", "redirects are not followed; check {section}.base_url"
    elif status in {400, 409, 415, 422}:
        reason, advice = _REFUSED
    else:
        reason, advice = _PAUSES.get(status, _UNEXPECTED)
    return _pause(answer, reason, advice.format(section=section))


def _judge_success(answer: Answer, section: str) -> Verdict:
    if answer.content_type == "text/html":
        return _pause(answer, "html_answer", f"a web page answered, not the service; check {section}.base_url")
    document = _decoded(answer.body)
    if document is None and answer.body.lstrip()[:1] in {b"{", b"["}:
        return _pause(answer, "unreadable_answer", "the service's answer is broken, or too long to be read")
    if answer.status == 207 or (isinstance(document, dict) and document.get("rejected")):
        return _pause(answer, "partly_rejected", "the service took only a part of the batch")
    return Verdict(Action.ACCEPT)


def _pause(answer: Answer, reason: str, advice: str) -> Verdict:
    words = _service_words(answer.body)
    said = f'; it says "{words}"' if words else ""
    return Verdict(Action.PAUSE, reason, f"{advice} (HTTP {answer.status}{said})", _seconds(answer.retry_after))


def _service_words(body: bytes) -> str:
    """Find in the `message` of an error document what may be repeated."""
    document = _decoded(body)
    message = document.get("message") if isinstance(document, dict) else None
    known = _KNOWN_WORDS.search(message) if isinstance(message, str) else None
    return known[0] if known else ""


def _decoded(body: bytes) -> object:
    """Decode JSON; None if it is none."""
    try:
        return msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def _seconds(retry_after: str) -> float | None:
    is_number = retry_after.isascii() and retry_after.isdigit()
    return min(float(retry_after), RETRY_AFTER_MAX_S) if is_number else None


def full_jitter_s(attempt: int, *, initial_s: float, max_s: float, rng: Random) -> float:
    """
    Draw the wait before the next attempt.

    Args:
        attempt: Attempts already made, at least 1.
        initial_s: Upper end of the first wait, seconds.
        max_s: Upper end of every wait, seconds.
    Returns:
        Seconds, uniform in [0, min(max_s, initial_s * 2 ** (attempt - 1))].
    Source:
        "Exponential Backoff And Jitter", AWS Architecture Blog. The jitter is drawn under the cap: added before
        clamping it would vanish at the cap.
    """
    assert attempt >= 1
    return rng.uniform(0, min(max_s, initial_s * 2 ** min(attempt - 1, 63)))

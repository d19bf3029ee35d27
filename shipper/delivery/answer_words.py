"""
The words of answers: what the name of a field says about its value, and what a status or a text says. Pure.

No answers are documented, so names are recognised by their parts: `FailedRecordCount`, `failed_records` and
`numFailed` all speak of refusals. A name that says nothing of the outcome, such as
an id, a time or a link, is harmless.
"""

from __future__ import annotations

import re
from enum import IntEnum, auto
from functools import lru_cache
from typing import Final

from shipper.model.wire import ActivityEvent

_COUNT_MAX: Final = 10**9
_KINDS: Final[tuple[tuple[type, str], ...]] = (
    (bool, "true or false"),
    (int, "a number"),
    (float, "a number"),
    (str, "a text"),
    (list, "a list"),
    (dict, "an object"),
)
_NAME_MAX: Final = 64  # characters of a name that are looked at
_TEXT_MAX: Final = 4_096  # characters of a text that is read for what it says


class Role(IntEnum):
    """What the value of a field is about."""

    HARMLESS = auto()  # an id, a time, a link: nothing in it is about the outcome
    LINKS = auto()  # likewise, with all that is below it
    OTHER = auto()  # unknown: harmless as long as nothing in it speaks of failure
    WORDS = auto()  # a message for a person
    STATUS = auto()  # a number or word for the outcome
    RESULTS = auto()  # a list with something for each event
    TOTAL = auto()  # how many events arrived
    TAKEN = auto()  # whether, how many or which events were accepted
    PART = auto()  # how many of the accepted events were new, and how many were not
    KNOWN = auto()  # how many or which events the service had before
    REFUSED = auto()  # whether, how many or which events were refused
    UNPROCESSED = auto()  # which events are to be sent again
    DENIAL = auto()  # an error of the whole request
    INDEX = auto()  # the place of an event in the batch, from 0


class Outcome(IntEnum):
    """What was said about one event, or about all."""

    NONE = auto()
    GOOD = auto()
    WEAK = auto()  # 0 or 1 as a status, which is success in some services and failure in others
    UNKNOWN = auto()
    PARTIAL = auto()
    BAD = auto()
    AGAIN = auto()  # could not be taken for now


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_EVENT_FIELDS: Final = frozenset(field.lower() for field in ActivityEvent.__struct_fields__)
_EXACT: Final[dict[str, Role]] = {
    name: role
    for role, names in {
        Role.LINKS: "links link href url uri self ratelimit ratelimits limits usage",
        Role.HARMLESS: "id version took duration elapsed latency host server node region name row rownumber line "
        "linenumber position retryafter retryable isretryable",
        Role.WORDS: "message messages msg text description detail details title note notes reason info comment type "
        "warning warnings",
        Role.STATUS: "status statuscode code state result outcome disposition httpstatus httpstatuscode httpcode "
        "resultcode returncode responsecode responsestatus statustext rc ret retcode",
        Role.RESULTS: "results items events responses records data entries outcomes statuses offsets receipts rows "
        "elements",
        Role.TOTAL: "count total size n received submitted receivedcount",
        Role.PART: "created updated inserted upserted modified unchanged merged totalcreated totalupdated new",
        Role.TAKEN: "ok valid isvalid allvalid ack acks",
        Role.DENIAL: "error err fault exception errormessage errormsg errordescription errorcode errno errcode",
        Role.REFUSED: "bad badrecords badevents issues problems missing lost validationmessages nack nacks ko nok",
        Role.UNPROCESSED: "retry shouldretry needsretry retryneeded",
        Role.INDEX: "index idx eventindex itemindex recordindex indexinrequest batchindex",
        Role.OTHER: "default defaults",
    }.items()
    for name in names.split()
} | dict.fromkeys(_EVENT_FIELDS, Role.HARMLESS)
_BY_PART: Final = (
    (Role.UNPROCESSED, re.compile(r"unprocessed|toretry|retried|notprocessed|deferred|postponed|onhold")),
    (
        Role.DENIAL,
        re.compile(
            r"(?:error|fault|exception|error(?:message|type|code|string)|fault(?:code|string))$|^exception|stacktrace|^traceback"
        ),
    ),
    (
        Role.REFUSED,
        re.compile(
            r"reject|partial|fail|error|invalid|refus|denied|deny|declin|dropped|discard|unsuccess|exception|fault|violation"
            r"|abort|forbid|throttl|unavail|unaccept|not(?:accept|stor|sav|deliver|valid)|skipped|ignored|blocked"
            r"|bounced|conflict|incomplete|problem|dryrun|validateonly|simulat|unsent|unsaved|undeliver|unmatched"
            r"|unable|quarantin|suspend|expired|cancel|excluded|filtered|omitted|deadletter"
        ),
    ),
    (Role.HARMLESS, re.compile(r"(?:request|trace|correlation|batch|message|operation|transaction|job)id$|edat$")),
    (
        Role.TOTAL,
        re.compile(
            r"^(?:num|numberof|total)?(?:event|record|row|item|entry|entrie|message|line|object)s?"
            r"(?:count|total|size|received)$|^(?:batchsize|batchcount|(?:num|numberof|total)(?:event|record|row|item)s?)$"
        ),
    ),
    (Role.STATUS, re.compile(r"(?:status|statuscode|resultcode|returncode|outcome)$")),
    (Role.KNOWN, re.compile(r"duplicat|repeat|alreadyknown|existing")),
    (
        Role.TAKEN,
        re.compile(
            r"accept|succe|ingest|import|process|stored|received|queued|deliver|written|saved|persist|publish|insert"
            r"|acknowledg|completed|committed|loaded|added|tracked|consumed|handled|registered|recorded|affected"
            r"|applied|captured|collected|(?:^|events|records)sent$|^good$|^passed$"
        ),
    ),
    (Role.RESULTS, re.compile(r"(?:results|responses|ids|items|records|events|entries)$")),
)
_HARMLESS_ENDS: Final = _words(
    "id at on by time timestamp date since until url uri link href version ms millis seconds bytes key hash checksum "
    "cursor token uuid guid trace etag locale lang"
)
_LAST_WORD: Final = re.compile(r"([A-Z]?[a-z]+|[A-Z]+)[^A-Za-z]*$", re.ASCII)
_SHOWABLE: Final = re.compile(r"[A-Za-z_@$][A-Za-z_.$-]{0,39}", re.ASCII)

_GOOD: Final = _words(
    "ok okay success successful succeeded accepted accept acknowledged ack created updated upserted inserted unchanged "
    "noop queued enqueued pending processing processed inprogress running submitted scheduled done complete completed "
    "finished stored saved persisted written received delivered published ingested imported committed valid duplicate "
    "duplicated repeated known existing yes true y up nocontent sent new "
    "recorded registered loaded added tracked applied"
)
_PARTIAL: Final = _words(
    "partial partially partialsuccess partiallyaccepted partialcontent partialfailure partiallysucceeded mixed "
    "multistatus completedwitherrors completewitherrors"
)
_BAD: Final = re.compile(
    r"^(?:no|n|false|nok|ko|nack|bad|down)$|fail|error|reject|refus|invalid|denied|declin|forbid|drop|discard|ignor|skip"
    r"|abort|cancel|exception|fault|malform|unknown|unsupported|unauthor|notfound|notaccept|notvalid|conflict|expired"
    r"|violat|missing|toolarge|toolong|badrequest|unprocessable|blocked|bounce|dead"
)
_AGAIN: Final = re.compile(
    r"throttl|throughput|ratelimit|rateexceed|toomany|unavailable|timeout|timedout|internal|servererror|busy|overload"
    r"|tempor|transient|tryagain|retry|slowdown"
)
_NOTHING: Final = _words("none no null nil false 0 ok success noerror noerrors na")
_AGAIN_NUMBERS: Final = {408, 425, 429}
_NUMBER: Final = re.compile(r"(?:HTTP/\d(?:\.\d)? )?(-?\d{1,9})(?:\.0{1,9})?(?: [A-Za-z -]{1,40})?", re.ASCII)
_NOT_A_LETTER: Final = re.compile(r"[^a-z0-9]+")

_NO_FAILURE: Final = re.compile(
    r"\b(?:no|0|zero|without(?: any)?|non) (?:[a-z]+ )?(?:errors?|failures?|failed|rejected|refused|rejections?|invalid"
    r"|problems?|exceptions?|conflicts?|dropped|skipped|missing)\b"
    r"|\b(?:errors?|failed|failures?|rejected|refused|invalid|dropped|skipped|exceptions?)\s?[:=]\s?(?:0|no|none|null|\[\])(?![\w.])"
    r"|\bnot yet\b",
    re.IGNORECASE,
)
_SPEAKS_OF_FAILURE: Final = re.compile(
    r"error|exception|fail|reject|refus|denied|\bden(?:y|ies)\b|declin|invalid|malform|illegal|unable|cannot|n't\b"
    r"|unavailab|unauthori|forbidden|fault\b|abort|time[d -]{0,2}out|exceed|throttl|discard|\bdropp|\bdrops?\b|ignored"
    r"|skipped|unsupported|unrecogni|conflict|partial|incomplete|unprocess|unsuccess|unexpected|violat|maintenance|fatal|critical|\bpanic"
    r"|deadlock|traceback|\bquota\b|\bout of\b|\bdry[ -]?run\b"
    r"|\b(?:no|not|none|nothing|full|busy|again|bad|wrong|false|missing|unknown|expired|crashed|down|nack|nok|ko|lost|too)\b"
    r"|\b(?:log|sign)(?:ged)?[ -]?in\b|\blogin\b"
    r"|fehler|ung.ltig|abgelehnt|erreur|\berrore\b|\berro\b|rechazad|rifiutat|inv.lid|nieprawid|ошибк"
    r"|(?:success|ok|accepted|received|stored|processed|valid)\W{1,3}(?:0\b|no\b|false)"
    r"|\b(?:0|zero) (?:[a-z]+ ){0,3}(?:accepted|stored|processed|received|created|inserted|imported"
    r"|ingested|saved|queued)",
    re.IGNORECASE,
)
_DONE: Final = (
    r"(?:accepted|received|stored|processed|created|inserted|imported|ingested|saved|queued|succeeded"
    r"|delivered|written)"
)
_THINGS: Final = r"(?:events?|records?|items?|rows?|messages?|entries)"
_COUNTS: Final = re.compile(
    rf"(?:^|[,;(] ?)(\d{{1,9}}) (?:{_THINGS} )?(?:\w+ )?{_DONE}|{_DONE} ?(?:[:=] ?(\d{{1,9}})\b|(\d{{1,9}}) {_THINGS})",
    re.ASCII | re.IGNORECASE,
)
_IS_DONE: Final = dict(_BY_PART)[Role.TAKEN]
_YES: Final = re.compile(r"authori[sz]ed|authenticated|allowed|permitted|passed|verified|enabled|acceptable")
_OF: Final = re.compile(r"\b(\d{1,9}) ?(?:of|/|out of)(?: the)? ?(\d{1,9})\b", re.ASCII | re.IGNORECASE)


def normal(word: str) -> str:
    """Return a name or word in lower case, without anything but letters and digits."""
    return _NOT_A_LETTER.sub("", word[:_NAME_MAX].lower())


@lru_cache(maxsize=2048)
def _plain(name: str) -> str:
    return normal(name)


def plain(name: str) -> str:
    """Return the name of a field in lower case, without anything but letters and digits."""
    return _plain(name[:_NAME_MAX])


def role_of(name: str) -> Role:
    """Return what the value under a name is about."""
    return _role_of(name[:_NAME_MAX])


@lru_cache(maxsize=2048)
def _role_of(name: str) -> Role:
    lowered = normal(name)
    role = _EXACT.get(lowered)
    if role is not None:
        return role
    last = _LAST_WORD.search(name)
    for found, pattern in _BY_PART:
        if pattern.search(lowered):
            return found
        if found is Role.REFUSED and last is not None and last[1].lower() in _HARMLESS_ENDS and last[1] != name:
            return Role.HARMLESS
    return Role.OTHER


def shown(name: str) -> str:
    """Return a name for a message; names that are not made of known words may be personal data and are not shown."""
    is_known = role_of(name) is not Role.OTHER and plain(name) not in _EVENT_FIELDS
    return f"`{name}`" if is_known and _SHOWABLE.fullmatch(name) else "a field of unknown meaning"


def outcome_of(value: object, *, is_code: bool = False) -> tuple[Outcome, int]:
    """
    Return what a status says, and its number; 0 if it has none.

    Args:
        is_code: The name speaks of a code, of which 0 means success.
    """
    if value is None:
        return Outcome.NONE, 0
    if isinstance(value, bool):
        return (Outcome.GOOD if value else Outcome.BAD), 0
    number = whole_number(value)
    if number is not None:
        return _outcome_of_number(number, is_code=is_code), number
    if not isinstance(value, str):
        return Outcome.UNKNOWN, 0
    if found := _NUMBER.fullmatch(value):
        return _outcome_of_number(int(found[1]), is_code=is_code), int(found[1])
    return _outcome_of_word(value), 0


def _outcome_of_word(value: str) -> Outcome:
    word = normal(value)
    if not word:
        return Outcome.UNKNOWN if value.strip() else Outcome.NONE
    if word in _GOOD:
        return Outcome.GOOD
    if word in _PARTIAL:
        return Outcome.PARTIAL
    if _AGAIN.search(word):
        return Outcome.AGAIN
    if _BAD.search(word) or speaks_of_failure(value):
        return Outcome.BAD
    return Outcome.GOOD if " " in value and _IS_DONE.search(word) else Outcome.UNKNOWN


def _outcome_of_number(number: int, *, is_code: bool) -> Outcome:
    if number in {0, 1}:
        return Outcome.GOOD if is_code and number == 0 else Outcome.WEAK
    if number in {206, 207}:
        return Outcome.PARTIAL
    if 200 <= number < 300:
        return Outcome.GOOD
    if number in _AGAIN_NUMBERS or 500 <= number < 600:
        return Outcome.AGAIN
    return Outcome.BAD if 400 <= number < 500 else Outcome.UNKNOWN


def failure_of(value: object) -> tuple[Outcome, int]:
    """Return what a value says under a name that speaks of failure, and its number."""
    if not value:
        return Outcome.NONE, 0
    if isinstance(value, str):
        if normal(value) in _NOTHING:
            return Outcome.NONE, 0
        if " " in value.strip():
            return Outcome.BAD, 0
    outcome, number = outcome_of(value)
    return (Outcome.AGAIN if outcome is Outcome.AGAIN else Outcome.BAD), number


def whole_number(value: object) -> int | None:
    """Return a number that is whole, however it is written, such as 503, 503.0; None if it is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else None


def is_yes(name: str) -> bool:
    """Return whether `false` under this name is a refusal."""
    return _YES.search(plain(name)) is not None


def speaks_of_failure(text: str, events: int | None = None) -> bool:
    """
    Return whether a text could say that something failed.

    Args:
        events: How many were sent; a count of others speaks of failure. None if the text may count anything.
    """
    if text[:1] in {"{", "["} and len(text) > 2:
        return True  # a document within a text is not looked into
    if text.startswith(("http://", "https://")) and " " not in text:
        return False
    if len(text) > _TEXT_MAX:
        return True  # which is not read, and so not understood
    if any(int(part) != int(whole) for part, whole in _OF.findall(text)):
        return True
    if events is not None and any(int(a or b or c) != events for a, b, c in _COUNTS.findall(text)):
        return True
    return _SPEAKS_OF_FAILURE.search(_NO_FAILURE.sub("", text)) is not None


def speaks_of_success(text: str) -> bool:
    """Return whether a text says that something was done or that nothing failed, or is but an id."""
    words = text.lower().split()
    if _NO_FAILURE.search(text) or (len(words) == 1 and any(map(str.isdigit, text))):
        return True
    return any(normal(word) in _GOOD or _IS_DONE.search(normal(word)) for word in words)


def is_code(name: str) -> bool:
    """Return whether a status of this name is a code, of which 0 means success."""
    lowered = plain(name)
    return ("code" in lowered and "status" not in lowered and "http" not in lowered) or lowered in {
        "errno",
        "rc",
        "ret",
    }


def count_of(value: object) -> int | None:
    """Return a count; None if the value is none."""
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and len(value) <= 9 else None
    number = whole_number(value)
    return number if number is not None and 0 <= number <= _COUNT_MAX else None


def described(name: str, value: object, number: int = 0) -> str:
    """Return a field's name and kind, and its number if it is a status; never another value."""
    kind = next((words for kind, words in _KINDS if isinstance(value, kind)), "null")
    number_said = f", {number}" if 100 <= number < 600 else ""
    return f"{shown(name) if name else 'the whole answer'} ({kind}{number_said})"

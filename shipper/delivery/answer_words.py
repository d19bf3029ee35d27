"""
The vocabulary of answers: the roles of fields by name, and the meaning of values. No I/O.

The service documents no answers, so names are recognised by substrings: `FailedRecordCount`, `failed_records` and
`numFailed` are all about refusals. A name unrelated to the outcome, such as an id, a time or a link, is harmless.
"""

from __future__ import annotations

import re
from enum import IntEnum, auto
from functools import lru_cache
from typing import Final, NamedTuple

from shipper.model.wire import ActivityEvent

_NAME_MAX: Final = 64  # maximum characters of a name that are used
_TEXT_MAX: Final = 4_096  # maximum characters of a text that is searched
_COUNT_MAX: Final = 10**9
_ID_MIN: Final = 16  # minimum characters of a word that counts as an id; error codes such as `ORA-12541` are shorter


class Role(IntEnum):
    """The meaning of a field's value."""

    HARMLESS = auto()  # an id, a time: not about the outcome
    LINKS = auto()  # the same, including all nested fields
    OTHER = auto()  # unknown: harmless unless it indicates a failure
    MESSAGE = auto()  # a text for people
    STATUS = auto()  # a number or word for the outcome
    RESULTS = auto()  # a list of results
    TOTAL = auto()  # number of received events
    ACCEPTED = auto()  # whether, how many or which events were accepted
    PART = auto()  # number of accepted events that were new, or that were not
    REPEATED = auto()  # how many or which events the service already had
    REFUSED = auto()  # whether, how many or which events were refused
    RETRIED = auto()  # which events must be sent again
    ERROR = auto()  # an error of the whole request
    INDEX = auto()  # the index of an event in the batch, from 0


class Outcome(IntEnum):
    """The outcome of an event, or of the whole batch."""

    NONE = auto()
    GOOD = auto()
    WEAK = auto()  # 0 or 1 as a status: success in some services, failure in others
    UNKNOWN = auto()
    PARTIAL = auto()  # some failed; also a text that indicates a failure
    BAD = auto()
    RETRY = auto()  # cannot be accepted yet


class Field(NamedTuple):
    name: str
    plain: str  # in lower case, letters and digits only
    role: Role


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_EVENT_FIELDS: Final = frozenset(field.lower() for field in ActivityEvent.__struct_fields__)
_EXACT: Final[dict[str, Role]] = {
    name: role
    for role, names in {
        Role.LINKS: "links link href url uri self ratelimit ratelimits limits usage",
        Role.HARMLESS: "id version took duration elapsed latency host server node region name row rownumber line "
        "linenumber position retryafter",
        Role.MESSAGE: "message messages msg text description detail details title note notes reason info comment type "
        "warning warnings",
        Role.STATUS: "status statuscode code state result outcome disposition httpstatus httpstatuscode httpcode "
        "resultcode returncode responsecode responsestatus statustext rc ret retcode",
        Role.RESULTS: "results items events responses records data entries outcomes statuses offsets receipts rows "
        "elements",
        Role.TOTAL: "count total size n received submitted receivedcount",
        Role.PART: "created updated inserted upserted modified unchanged merged totalcreated totalupdated new",
        Role.ACCEPTED: "ok valid isvalid allvalid ack acks",
        Role.ERROR: "error err fault exception errormessage errormsg errordescription errorcode errno errcode",
        Role.REFUSED: "bad badrecords badevents issues problems missing lost validationmessages nack nacks ko nok",
        Role.RETRIED: "retry shouldretry needsretry retryneeded retryable isretryable",
        Role.INDEX: "index idx eventindex itemindex recordindex indexinrequest batchindex",
        Role.OTHER: "default defaults",
    }.items()
    for name in names.split()
} | dict.fromkeys(_EVENT_FIELDS, Role.HARMLESS)
_BY_SUBSTRING: Final = (
    (Role.RETRIED, re.compile(r"unprocessed|toretry|retried|notprocessed|deferred|postponed|onhold")),
    (
        Role.ERROR,
        re.compile(
            r"(?:error|fault|exception|error(?:message|type|code|string)|fault(?:code|string))$|^exception|stacktrace|^traceback"
        ),
    ),
    (
        Role.REFUSED,
        re.compile(
            r"reject|partial|fail|error|invalid|refus|denied|deny|declin|drop|discard|unsuccess|exception|fault|violation"
            r"|malform|corrupt|mismatch|ineligib|(?:dis|un|not)qualif|(?:black|block|deny)list|suppress|orphan|nacked|n(?:o|ot)match"
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
    (Role.REPEATED, re.compile(r"duplicat|repeat|already|existing")),
    (
        Role.ACCEPTED,
        re.compile(
            r"accept|succe|ingest|import|process|stored|received|queued|deliver|written|saved|persist|publish|insert"
            r"|acknowledg|completed|committed|loaded|added|tracked|consumed|handled|registered|recorded|affected"
            r"|applied|captured|collected|(?:^|events|records)sent$|^good$|^passed$"
        ),
    ),
    (Role.RESULTS, re.compile(r"(?:results|responses|ids|items|records|events|entries)$")),
)
_HARMLESS_SUFFIXES: Final = _words(
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
_RETRY: Final = re.compile(
    r"throttl|throughput|ratelimit|rateexceed|toomany|unavailable|timeout|timedout|internal|servererror|busy|overload"
    r"|tempor|transient|tryagain|retry|slowdown"
)
_NOTHING: Final = _words("none no null nil false 0 ok success noerror noerrors na")
_RETRY_NUMBERS: Final = {408, 425, 429}
_NUMBER: Final = re.compile(r"(?:HTTP/\d(?:\.\d)? )?(-?\d{1,9})(?:\.0{1,9})?(?: [A-Za-z -]{1,40})?", re.ASCII)
_FLAGS: Final = {"ok", "valid", "isvalid", "ack"}
_KINDS: Final[tuple[tuple[type, str], ...]] = (
    (bool, "true or false"),
    (int, "a number"),
    (float, "a number"),
    (str, "a text"),
    (list, "a list"),
    (dict, "an object"),
)
_NOT_A_LETTER: Final = re.compile(r"[^a-z0-9]+")

_NO_FAILURE: Final = re.compile(
    r"\b(?:no|0|zero|without(?: any)?|non) (?:[a-z]+ )?(?:errors?|failures?|failed|rejected|refused|rejections?|invalid"
    r"|problems?|exceptions?|conflicts?|dropped|skipped|missing)\b"
    r"|\b(?:errors?|failed|failures?|rejected|refused|invalid|dropped|skipped|exceptions?)\s?[:=]\s?(?:0|no|none|null|\[\])(?![\w.])"
    r"|\bnot yet\b",
    re.IGNORECASE,
)
_FAILURE: Final = re.compile(
    r"error|exception|fail|reject|refus|denied|\bden(?:y|ies)\b|declin|invalid|malform|corrupt|mismatch|ineligib|illegal|unable"
    r"|cannot|n't\b"
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
_IS_DONE: Final = dict(_BY_SUBSTRING)[Role.ACCEPTED]
_PERMISSION: Final = re.compile(r"authori[sz]ed|authenticated|allowed|permitted|passed|verified|enabled|acceptable")
_OF: Final = re.compile(r"\b(\d{1,9}) ?(?:of|/|out of)(?: the)? ?(\d{1,9})\b", re.ASCII | re.IGNORECASE)


def field_of(name: str) -> Field:
    """Return the field for a name; only its first 64 characters count."""
    return _field(name[:_NAME_MAX])


@lru_cache(maxsize=2048)
def _field(name: str) -> Field:
    plain = _plain(name)
    return Field(name, plain, _EXACT.get(plain) or _role_by_substring(name, plain))


def _plain(word: str) -> str:
    return _NOT_A_LETTER.sub("", word[:_NAME_MAX].lower())


def _role_by_substring(name: str, plain: str) -> Role:
    last = _LAST_WORD.search(name)
    for role, pattern in _BY_SUBSTRING:
        if pattern.search(plain):
            return role
        if role is Role.REFUSED and last is not None and last[1].lower() in _HARMLESS_SUFFIXES and last[1] != name:
            return Role.HARMLESS
    return Role.OTHER


def describe_field(field: Field, value: object, number: int = 0) -> str:
    """
    Describe a field by its name and the type of its value, for a message; no value is shown, except a status.

    A name that does not consist of known words is not shown, as it may be personal data.
    """
    is_known = field.role is not Role.OTHER and field.plain not in _EVENT_FIELDS
    name = f"`{field.name}`" if is_known and _SHOWABLE.fullmatch(field.name) else "a field of unknown meaning"
    kind = next((kind for type_, kind in _KINDS if isinstance(value, type_)), "null")
    status = f", {number}" if 100 <= number < 600 else ""
    return f"{name if field.name else 'the whole answer'} ({kind}{status})"


def outcome_of_field(field: Field, value: object, events: int | None = None) -> tuple[Outcome, int]:
    """Return the outcome of a scalar value under a name, and its status; 0 = none."""
    match field.role:
        case Role.STATUS:
            return outcome_of(value, is_code=_is_code(field.plain))
        case Role.ACCEPTED if (outcome := _outcome_of_flag(value)) is not Outcome.NONE:
            return outcome, 0
        case Role.REPEATED if value is True:
            return Outcome.GOOD, 0
        case Role.REFUSED | Role.ERROR:
            return _outcome_of_failure(value)
        case Role.RETRIED:
            outcome, number = _outcome_of_failure(value)
            return (Outcome.RETRY if outcome is Outcome.BAD else outcome), number
        case Role.HARMLESS | Role.INDEX | Role.LINKS:
            return Outcome.NONE, 0
    return (Outcome.PARTIAL if isinstance(value, str) and indicates_failure(value, events) else Outcome.NONE), 0


def outcome_of(value: object, *, is_code: bool = False) -> tuple[Outcome, int]:
    """Return the outcome of a status, and its number, 0 = none; in a code (`is_code`), 0 means success."""
    if value is None:
        return Outcome.NONE, 0
    if isinstance(value, bool):
        return (Outcome.GOOD if value else Outcome.BAD), 0
    number = whole_number(value)
    if isinstance(value, str):
        match = _NUMBER.fullmatch(value)
        if match is None:
            return _outcome_of_word(value), 0
        number = int(match[1])
    return (Outcome.UNKNOWN, 0) if number is None else (_outcome_of_number(number, is_code=is_code), number)


def _outcome_of_word(value: str) -> Outcome:
    word = _plain(value)
    if not word:
        return Outcome.UNKNOWN if value.strip() else Outcome.NONE
    if word in _GOOD:
        return Outcome.GOOD
    if word in _PARTIAL:
        return Outcome.PARTIAL
    if _RETRY.search(word):
        return Outcome.RETRY
    if _BAD.search(word) or indicates_failure(value):
        return Outcome.BAD
    return Outcome.GOOD if " " in value and _IS_DONE.search(word) else Outcome.UNKNOWN


def _outcome_of_number(number: int, *, is_code: bool) -> Outcome:
    if number in {0, 1}:
        return Outcome.GOOD if is_code and number == 0 else Outcome.WEAK
    if number in {206, 207}:
        return Outcome.PARTIAL
    if 200 <= number < 300:
        return Outcome.GOOD
    if number in _RETRY_NUMBERS or 500 <= number < 600:
        return Outcome.RETRY
    return Outcome.BAD if 400 <= number < 500 else Outcome.UNKNOWN


def _outcome_of_failure(value: object) -> tuple[Outcome, int]:
    """Return the outcome of a value under a name about failures, and its status."""
    if not value or (isinstance(value, str) and _plain(value) in _NOTHING):
        return Outcome.NONE, 0
    if isinstance(value, str) and " " in value.strip():
        return Outcome.BAD, 0
    outcome, number = outcome_of(value)
    return (Outcome.RETRY if outcome is Outcome.RETRY else Outcome.BAD), number


def _outcome_of_flag(value: object) -> Outcome:
    """Return the outcome of a flag such as `true`, `"false"` or 0 under a name about acceptance."""
    number = int(value) if isinstance(value, bool) else count_of(value)
    if number is not None:
        return Outcome.BAD if number == 0 else Outcome.GOOD if number == 1 else Outcome.NONE
    outcome, _ = outcome_of(value)
    return outcome if outcome in {Outcome.GOOD, Outcome.BAD, Outcome.RETRY} else Outcome.NONE


def whole_number(value: object) -> int | None:
    """Return a whole number, such as 503 or 503.0; None for any other value."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, float) and value.is_integer() else None


def count_of(value: object) -> int | None:
    """Return a count; None for any other value."""
    if isinstance(value, str):
        return int(value) if value.isascii() and value.isdigit() and len(value) <= 9 else None
    number = whole_number(value)
    return number if number is not None and 0 <= number <= _COUNT_MAX else None


def is_flag(field: Field, value: object) -> bool:
    """Return whether a value is a 0 or 1 that means false or true."""
    is_named_so = field.plain in _FLAGS or field.name.startswith("is")
    return field.role is Role.ACCEPTED and is_named_so and count_of(value) in {0, 1}


def is_permission(field: Field) -> bool:
    """Return whether `false` means a refusal for this field."""
    return _PERMISSION.search(field.plain) is not None


def _is_code(plain: str) -> bool:
    """Return whether a status with this name is a code, for which 0 means success."""
    return ("code" in plain and "status" not in plain and "http" not in plain) or plain in {"errno", "rc", "ret"}


def indicates_failure(text: str, events: int | None = None) -> bool:
    """Return whether a text may indicate a failure, such as a count other than `events`, if given."""
    if text[:1] in {"{", "["} and len(text) > 2:
        return True  # a nested document is not parsed
    if text.startswith(("http://", "https://")) and " " not in text:
        return False
    if len(text) > _TEXT_MAX:
        return True  # too long to be searched
    if any(int(part) != int(whole) for part, whole in _OF.findall(text)):
        return True
    if events is not None and any(int(a or b or c) != events for a, b, c in _COUNTS.findall(text)):
        return True
    return _FAILURE.search(_NO_FAILURE.sub("", text)) is not None


def indicates_success(text: str) -> bool:
    """Return whether a text says that something was done or nothing failed, or is only an id."""
    words = text.lower().split()
    if _NO_FAILURE.search(text) or (len(words) == 1 and len(text) >= _ID_MIN and any(map(str.isdigit, text))):
        return True
    return any(_plain(word) in _GOOD or _IS_DONE.search(_plain(word)) for word in words)

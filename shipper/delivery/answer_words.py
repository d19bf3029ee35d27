"""
The words and entries of answers: what a name, a status, a text or an object says, and which event it is about. No I/O.

No answers are documented, so names are recognised by their parts: `FailedRecordCount`, `failed_records` and
`numFailed` all speak of refusals. A name that says nothing of the outcome, such as an id, a time or a link, is
harmless.

An event is named by its EventId, or by its index from 0. Rows, lines and positions may be counted from 1 and are not
believed; nor is any index of an answer in which one is out of range.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import IntEnum, auto
from functools import lru_cache
from typing import Any, Final

import msgspec

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


# Entries --------------------------------------------------------------------------------------------------------------

_DEPTH_MAX: Final = 12
_VALUES_MIN: Final = 10_000  # looked at of any answer, and more for each event of the batch
_VALUES_PER_EVENT: Final = 64
_WORDS_MAX: Final = 4_096
_SAID: Final = ("message", "error", "reason", "description", "detail", "errors", "title", "errormessage", "msg")
_ID_LENGTH: Final = 36
_PLACES: Final = {"path", "field", "pointer", "loc", "location", "source", "property", "parameter", "target"}
_PLACE_STEPS: Final = 8
_ROWS: Final = {"row", "rownumber", "line", "linenumber", "position"}  # may be counted from 1
_SILENT: Final = frozenset({Role.LINKS, Role.HARMLESS, Role.INDEX})
_FAILING: Final = frozenset({Role.REFUSED, Role.DENIAL, Role.UNPROCESSED})
_CLEAR: Final = frozenset({Outcome.GOOD, Outcome.BAD, Outcome.AGAIN})
_RETRYABLE: Final = {"retryable", "isretryable"}
_KEY_STARTS: Final = set("0123456789[$#/")
# 3, [3], events[3].IP, $.events[3], /events/3/IP; what follows a number must begin with a letter, unlike in an address.
_IN_PATH: Final = re.compile(
    r"(?:\$\.|#?/)?(?:events[./]?)?\[?(\d{1,9})\]?(?P<field>[./\[]['\"]?[A-Za-z_].*)?", re.ASCII | re.IGNORECASE
)


class TooMuchError(Exception):
    """An answer has more values, or deeper ones, than any real answer to its batch."""


class Entries:
    """
    Reads the entries of one answer, and bounds how much of it is read.

    Args:
        events: How many were sent.
        event_ids: Of the events that were sent, in their order; asked for only if an EventId has to be found.

    Attributes:
        by_index: The events that are known by their index alone.
        has_stranger: An EventId was named that was not sent.
        has_wild_index: An index is out of range, or a row was named: no index is to be believed.
    """

    def __init__(self, events: int, event_ids: Callable[[], Sequence[str]]) -> None:
        self._events = events
        self._event_ids = event_ids
        self._indexes: dict[str, int] | None = None
        self._values_left = _VALUES_MIN + _VALUES_PER_EVENT * events
        self.by_index: set[int] = set()
        self.has_stranger = False
        self.has_wild_index = False

    def spend(self) -> None:
        """
        Count a value that is looked at.

        Raises:
            TooMuchError: There were too many.
        """
        self._values_left -= 1
        if self._values_left < 0:
            raise TooMuchError

    def go_down(self, depth: int) -> None:
        """
        Look into an object or a list.

        Raises:
            TooMuchError: It is nested too deep.
        """
        if depth > _DEPTH_MAX:
            raise TooMuchError

    def outcome_in(self, entry: dict[str, Any], depth: int) -> tuple[Outcome, int]:
        """Return what an object says of one event, and the number of its status."""
        seen: dict[Outcome, int] = {}
        self._collect(entry, depth, seen)
        bad, again = seen.get(Outcome.BAD), seen.get(Outcome.AGAIN)
        if Outcome.GOOD in seen and (bad is not None or again is not None or Outcome.PARTIAL in seen):
            return Outcome.UNKNOWN, 0
        if again is not None and not bad:
            return Outcome.AGAIN, again
        if bad is not None or Outcome.PARTIAL in seen:
            return Outcome.BAD, bad or 0
        if Outcome.UNKNOWN in seen or Outcome.WEAK in seen:
            return Outcome.UNKNOWN, 0
        return (Outcome.GOOD if Outcome.GOOD in seen else Outcome.NONE), 0

    def _collect(self, entry: dict[str, Any], depth: int, seen: dict[Outcome, int]) -> None:
        """Note what each field says; words that speak of failure count as `PARTIAL`."""
        self.go_down(depth)
        for name, value in entry.items():
            self.spend()
            role = role_of(name)
            if role in _SILENT and not isinstance(value, dict):
                if value is True and plain(name) in _RETRYABLE:
                    seen.setdefault(Outcome.AGAIN, 0)
                continue
            number: int | None
            if role in _FAILING:
                outcome, number = failure_of(value)
                if role is Role.UNPROCESSED and outcome is Outcome.BAD:
                    outcome = Outcome.AGAIN
                if isinstance(value, dict):
                    self._collect(value, depth + 1, seen)
                elif isinstance(value, list):
                    self._collect_all(value, depth + 1, seen)
            elif isinstance(value, dict):
                self._collect(value, depth + 1, seen)
                continue
            elif isinstance(value, list):
                self._collect_all(value, depth + 1, seen)
                continue
            elif role is Role.STATUS:
                outcome, number = outcome_of(value, is_code=is_code(name))
            elif role is Role.TAKEN:
                outcome, number = _flag(value), 0
            elif role is Role.KNOWN and value is True:
                outcome, number = Outcome.GOOD, 0
            elif isinstance(value, str) and speaks_of_failure(value):
                outcome, number = Outcome.PARTIAL, 0
            else:
                continue
            seen[outcome] = seen.get(outcome, 0) or number

    def _collect_all(self, values: list[Any], depth: int, seen: dict[Outcome, int]) -> None:
        self.go_down(depth)
        for value in values:
            self.spend()
            if isinstance(value, dict):
                self._collect(value, depth + 1, seen)
            elif isinstance(value, list):
                self._collect_all(value, depth + 1, seen)
            elif isinstance(value, str) and speaks_of_failure(value):
                seen.setdefault(Outcome.PARTIAL, 0)

    # Which event is meant --------------------------------------------------------------------------------------------

    def index_of(self, entry: dict[str, Any], depth: int) -> int | None:
        """Find which event an object is about; None if it does not say, or names none of the batch."""
        ids: set[int] = set()
        places: list[int | None] = []
        if not self._gather(entry, depth, ids, places):
            return None
        if ids:
            return next(iter(ids)) if len(ids) == 1 else None
        index = places[0] if len(set(places)) == 1 else None
        if index is not None:
            self.by_index.add(index)
        return index

    def _gather(self, entry: dict[str, Any], depth: int, ids: set[int], places: list[int | None]) -> bool:
        """Collect the events that an object names; False if it names one that was not sent."""
        self.go_down(depth)
        for name, value in entry.items():
            if isinstance(value, str):
                if (index := self.index_in(value, is_id=True)) is not None:
                    ids.add(index)
                elif plain(name) == "eventid" and value:
                    self.has_stranger = self.has_wild_index = True
                    return False
                elif plain(name) in _PLACES and (found := _IN_PATH.fullmatch(value)):
                    places.append(self._in_range(int(found[1])))
            elif isinstance(value, dict):
                if not self._gather(value, depth + 1, ids, places):
                    return False
            elif isinstance(value, list) and plain(name) in _PLACES:
                places += [self._in_range(step) for step in value[:_PLACE_STEPS] if type(step) is int][:1]
            elif (number := whole_number(value)) is not None:
                if role_of(name) is Role.INDEX:
                    places.append(self._in_range(number))
                elif plain(name) in _ROWS:
                    self.has_wild_index = True
        return True

    def looks_like_key(self, name: str) -> bool:
        """Return whether a name may be the EventId or index of an event."""
        return len(name) == _ID_LENGTH or name[:1] in _KEY_STARTS or "[" in name

    def index_in(self, name: str, *, is_id: bool = False) -> int | None:
        """Find the event that a text names by its EventId, or by its place in the batch."""
        if len(name) == _ID_LENGTH:
            if self._indexes is None:
                self._indexes = {event_id: index for index, event_id in enumerate(self._event_ids())}
            if (index := self._indexes.get(name.lower())) is not None:
                return index
        if is_id or len(name) > _WORDS_MAX or not (found := _IN_PATH.fullmatch(name)):
            return None
        return self.believed(int(found[1]))

    def believed(self, number: int) -> int | None:
        """Return an index that nothing else confirms; None if it is out of range."""
        index = self._in_range(number)
        if index is not None:
            self.by_index.add(index)
        return index

    def _in_range(self, number: int) -> int | None:
        """Return an index; None if it is out of range: then none is believed, as they may be counted from 1."""
        if 0 <= number < self._events:
            return number
        self.has_wild_index = True
        return None


def _flag(value: object) -> Outcome:
    """Return what a field of one event says that tells whether it was taken, such as `true`, `"false"` or 0."""
    number = int(value) if isinstance(value, bool) else count_of(value)
    if number is not None:
        return Outcome.BAD if number == 0 else Outcome.GOOD if number == 1 else Outcome.NONE
    outcome, _ = outcome_of(value)
    return outcome if outcome in _CLEAR else Outcome.NONE


def is_of_field(name: str) -> bool:
    """Return whether a name is the path to a field of an event, such as `events[3].IP`."""
    found = _IN_PATH.fullmatch(name)
    return found is not None and bool(found["field"])


def said(entry: object) -> str:
    """Return what is said of one event: its field and the words, or all of it as JSON."""
    if isinstance(entry, str):
        return entry[:_WORDS_MAX]
    if isinstance(entry, dict):
        fields = {plain(name): value for name, value in entry.items()}
        words = next((fields[name] for name in _SAID if isinstance(fields.get(name), str) and fields[name]), "")
        field = fields.get("field")
        if words:
            return (f"{field}: {words}" if isinstance(field, str) and field else words)[:_WORDS_MAX]
    return msgspec.json.encode(entry).decode()[:_WORDS_MAX]

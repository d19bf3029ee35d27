"""
Suggests a `records.mapping` for records with other field names, based on names and values.

Suggestions contain no values of records.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC
from functools import partial
from operator import itemgetter
from typing import Any, Final, NamedTuple

from shipper.codec.judge import Judge
from shipper.codec.normalize import Normalizer, normalizers, timestamps
from shipper.codec.rules import ANY_TIME
from shipper.config.mapping import FIELDS
from shipper.config.settings import RecordsSettings

_DEPTH_MAX: Final = 4
_COLUMNS_MAX: Final = 1000
FIT_MIN: Final = 0.5
"""Minimum share of valid values in a column; below it, the values must be changed."""
_FIT_BY_VALUES_MIN: Final = 0.9
_UNRELATED: Final = 1000  # as a distance
_JUDGE: Final = Judge(RecordsSettings())

_NAMES: Final[dict[str, str]] = {
    "EventId": "eventid eventuuid eventguid uuid guid messageid recordid registrationid id",
    "IP": "ip ipaddress clientip consumerip playerip userip customerip registrationip remoteaddr remoteip ipv4",
    "Timestamp": "timestamp eventtime registeredat registrationdate registrationtime registered createdat created "
    "signupdate signupat occurredat datetime time date ts",
    "BTag": "btag tag trackingtag affiliatetag trackingcode tracker clicktag token",
    "ConsumerID": "consumerid playerid customerid userid accountid memberid clientid player customer consumer",
    "ConsumerCountry": "consumercountry countrycode country countryiso ctry playercountry usercountry residence",
    "ConsumerCurrencyID": "consumercurrencyid currencycode currency currencyid playercurrency accountcurrency ccy cur",
    "Username": "username login loginname nickname nick screenname alias user name",
    "BrandID": "brandid brand siteid site skinid skin labelid label casinoid operatorid",
    "CustomerCurrencyID": "customercurrencyid customercurrency basecurrencyid",
    "ConsumerStatus": "consumerstatus accountstatus playerstatus status kycstatus",
    "AffiliateID": "affiliateid affiliate affid partnerid partner agentid",
    "ConsumerState": "consumerstate statecode state province region usstate",
}
_OTHER_TIME: Final = re.compile(r"\d{1,4}[-./]\d{1,2}[-./]\d{1,4}[T ,]+\d{1,2}:\d{2}\b")  # to be converted
_IN_UTC: Final = {"Timestamp": partial(timestamps, zone=UTC)}
_DISTINCTIVE: Final = ("EventId", "IP", "Timestamp", "BTag")  # recognisable by their values alone


class Suggestion(NamedTuple):
    """A suggested source of a field."""

    path: str = ""
    fit: float = 0.0  # share of nonempty values that are valid for the field, from 0 to 1
    is_by_values: bool = False  # suggested only by its values, not by its name
    is_local: bool = False  # the values are times without an offset, and their zone is not known


class Suggestions(NamedTuple):
    """Suggestions for records."""

    by_field: dict[str, Suggestion]  # the source of each field
    unused: list[str]  # the paths that are not suggested
    unnameable: list[str]  # names that no path leads to: empty ones, and names with a dot in an object


def suggest(
    documents: Iterable[Mapping[str, Any]],
    fields: Sequence[str] = FIELDS,
    *,
    used: Collection[str] = (),
    assume_timezone: str | None = None,
) -> Suggestions:
    """
    Suggest a source for each field.

    Args:
        documents: Sample records: strings from CSV, or values from JSON.
        used: Paths that are sources of other fields.
        assume_timezone: Zone of times without an offset, as for `normalizers`.
    """
    columns: dict[str, list[Any]] = {}
    unnameable: dict[str, None] = {}
    for document in documents:
        for path, value, has_path in _leaves(document):
            if not has_path:
                if len(unnameable) < _COLUMNS_MAX:
                    unnameable[path] = None
            elif path in columns or len(columns) < _COLUMNS_MAX:
                columns.setdefault(path, []).append(value)
    normalize = normalizers(assume_timezone, relaxed=())
    ranked = sorted(
        (_rank(field, path, values, normalize) for field in fields for path, values in columns.items()),
        key=itemgetter(0),
    )
    suggestions = dict.fromkeys(fields, Suggestion())
    taken = set(used)
    for (_, distance, _), field, suggestion in ranked:
        if distance < _UNRELATED and not suggestions[field].path and suggestion.path not in taken:
            suggestions[field] = suggestion
            taken.add(suggestion.path)
    return Suggestions(suggestions, [path for path in columns if path not in taken], list(unnameable))


def _rank(
    field: str, path: str, values: Sequence[Any], normalize: Mapping[str, Normalizer]
) -> tuple[tuple[bool, int, int], str, Suggestion]:
    """Return a sort key for a column as the source of a field, by values and then by name, and the suggestion."""
    values = [value for value in values if value not in (None, "")]
    fit = _fit(field, values, normalize)
    local_fit = _fit(field, values, _IN_UTC) if field == "Timestamp" and fit < FIT_MIN else 0.0
    is_local = local_fit >= FIT_MIN
    distance = _name_distance(field, path)
    looks = local_fit
    if field == "Timestamp" and max(fit, local_fit) < FIT_MIN and values:
        looks = sum(isinstance(value, str) and bool(_OTHER_TIME.match(value)) for value in values) / len(values)
    is_by_values = distance >= _UNRELATED and field in _DISTINCTIVE and max(fit, looks) >= _FIT_BY_VALUES_MIN
    if is_by_values:
        distance = _UNRELATED - 1
    return (fit < FIT_MIN and not is_local, distance, len(path)), field, Suggestion(path, fit, is_by_values, is_local)


def _fit(field: str, values: Sequence[Any], normalize: Mapping[str, Normalizer]) -> float:
    """Return the share of values that are valid for a field after normalisation."""
    values = list(values) or [""]  # a column without values is valid for a field that may be empty
    normalized = normalize[field](values) if field in normalize else values
    return sum(_JUDGE.is_good(field, value, ANY_TIME) for value in normalized) / len(values)


def _name_distance(field: str, path: str) -> int:
    """Return how close a name is to a field's: 0 = equal; `_UNRELATED` = unrelated."""
    if path == field:
        return 0
    names = _NAMES[field].split()
    whole, last = _fold(path), _fold(path.rpartition(".")[2])
    for distance, name in enumerate(names, 1):
        if name in (whole, last):
            return distance
    for distance, name in enumerate(names, 1):
        if len(name) >= 4 and (whole.endswith(name) or whole.startswith(name)):
            return distance + len(names)
    return _UNRELATED


def _fold(name: str) -> str:
    return "".join(filter(str.isalnum, name.casefold()))


def _leaves(
    document: Mapping[str, Any], prefix: str = "", depth: int = 1, *, has_path: bool = True
) -> Iterator[tuple[str, Any, bool]]:
    """Yield path and value of each field, and whether a mapping with this path would find it."""
    for name, value in document.items():
        path = f"{prefix}{name}"
        is_step = has_path and bool(name) and "." not in name
        if isinstance(value, dict) and depth < _DEPTH_MAX and value:
            yield from _leaves(value, f"{path}.", depth + 1, has_path=is_step)
        else:
            yield path, value, is_step or (depth == 1 and bool(name))

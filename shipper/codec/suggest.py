"""
Suggests a `records.mapping` for records with other names of fields, by these names and the form of the values.

No value of a record is part of a suggestion.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC
from functools import partial
from typing import Any, Final, NamedTuple

from shipper.codec.normalize import Normalizer, normalizers, timestamps
from shipper.codec.rules import ANY_TIME, are_btags, are_event_ids, are_ips, are_timestamps
from shipper.config.mapping import FIELDS

_DEPTH_MAX: Final = 4
_COLUMNS_MAX: Final = 1000
FITTING: Final = 0.5
"""With fewer of the values that are there in the form of a field, they need a change."""
_FORM_ALONE: Final = 0.9
_UNRELATED: Final = 1000  # as a place among names

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
_IN_UTC: Final = {"Timestamp": partial(timestamps, zone=UTC)}
_letters2: Final = re.compile(r"[A-Z]{2}").fullmatch
_letters3: Final = re.compile(r"[A-Z]{3}").fullmatch


def _is_id(value: Any) -> bool:
    return type(value) is int and 0 < value < 2**63


def _is_text(check: Callable[[str], object]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and bool(check(value))


_FORMS: Final[dict[str, Callable[[Any], bool]]] = {
    "EventId": _is_text(lambda value: len(value) == 36 and are_event_ids([value])),
    "IP": _is_text(lambda value: are_ips([value])),
    "Timestamp": _is_text(lambda value: len(value) == 20 and are_timestamps([value], ANY_TIME)),
    "BTag": _is_text(lambda value: are_btags([value])),
    "ConsumerID": _is_id,
    "ConsumerCountry": _is_text(_letters2),
    "ConsumerCurrencyID": _is_text(_letters3),
    "BrandID": _is_id,
    "ConsumerState": _is_text(_letters2),
}
_TELLING: Final = ("EventId", "IP", "Timestamp", "BTag")  # whose form is nobody else's


class Suggestion(NamedTuple):
    """
    Where a field may come from.

    Attributes:
        path: Empty = nothing was found.
        fit: Which part of the values that are there has the form of the field, from 0 to 1.
        is_by_form: The name tells nothing.
        is_local: The values are times without an offset.
    """

    path: str = ""
    fit: float = 0.0
    is_by_form: bool = False
    is_local: bool = False


def suggest(
    documents: Iterable[Mapping[str, Any]],
    fields: Sequence[str] = FIELDS,
    *,
    used: Collection[str] = (),
    assume_timezone: str | None = None,
) -> tuple[dict[str, Suggestion], list[str]]:
    """
    Find a source for each field.

    Args:
        documents: Some records; text of CSV, or what JSON has.
        fields: Those that need one.
        used: Paths that are the source of other fields.
        assume_timezone: Of times without an offset, as for `normalizers`.
    Returns:
        By field, and the paths that are left.
    """
    columns: dict[str, list[Any]] = {}
    for document in documents:
        for path, value in _leaves(document):
            if path in columns or len(columns) < _COLUMNS_MAX:
                columns.setdefault(path, []).append(value)
    normalize = normalizers(assume_timezone, relaxed=())
    ranked = sorted(
        (_rank(field, path, values, normalize) for field in fields for path, values in columns.items()),
        key=lambda each: each[0],
    )
    found: dict[str, Suggestion] = {}
    taken = set(used)
    for (_, place, _), field, suggestion in ranked:
        if place < _UNRELATED and field not in found and suggestion.path not in taken:
            found[field] = suggestion
            taken.add(suggestion.path)
    return {field: found.get(field, Suggestion()) for field in fields}, [path for path in columns if path not in taken]


def _rank(
    field: str, path: str, values: Sequence[Any], normalize: Mapping[str, Normalizer]
) -> tuple[tuple[bool, int, int], str, Suggestion]:
    """Rank how well a column goes with a field: first those whose values fit, then by the name."""
    there = [value for value in values if value not in (None, "")]
    fit = _fit(field, there, normalize)
    is_local = field == "Timestamp" and fit < FITTING <= _fit(field, there, _IN_UTC)
    place = _place_of(field, path)
    is_by_form = place >= _UNRELATED and field in _TELLING and fit >= _FORM_ALONE
    if is_by_form:
        place = _UNRELATED - 1
    return (fit < FITTING and not is_local, place, len(path)), field, Suggestion(path, fit, is_by_form, is_local)


def _fit(field: str, values: Sequence[Any], normalize: Mapping[str, Normalizer]) -> float:
    """Return which part of values has the form of a field once they are normalised."""
    form = _FORMS.get(field)
    if form is None or not values:
        return float(form is None)
    fitting = normalize[field](list(values)) if field in normalize else values
    return sum(map(form, fitting)) / len(values)


def _place_of(field: str, path: str) -> int:
    """Return how near a name is to a field's: 0 = the same; `_UNRELATED` = not at all."""
    if path == field:
        return 0
    names = _NAMES[field].split()
    whole, last = _folded(path), _folded(path.rpartition(".")[2])
    for place, name in enumerate(names, 1):
        if name in (whole, last):
            return place
    for place, name in enumerate(names, 1):
        if len(name) >= 4 and (whole.endswith(name) or whole.startswith(name)):
            return place + len(names)
    return _UNRELATED


def _folded(name: str) -> str:
    return "".join(filter(str.isalnum, name.casefold()))


def _leaves(document: Mapping[str, Any], prefix: str = "", depth: int = 1) -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        path = f"{prefix}{name}"
        if isinstance(value, dict) and depth < _DEPTH_MAX and value:
            yield from _leaves(value, f"{path}.", depth + 1)
        elif "." not in name and name:  # a path could not name it
            yield path, value

"""Remedies for records that break a rule: a setting, or a line of `records.mapping` to complete."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from typing import Any, Final

from shipper.cli.common import several
from shipper.cli.config import toml_value
from shipper.codec.documents import EMPTY, code_text
from shipper.codec.normalize import timestamps
from shipper.codec.rewrite import DERIVED_FROM
from shipper.codec.rules import ANY_TIME, FIELD_RULES, are_timestamps, why_not_real
from shipper.config.mapping import FieldSource
from shipper.config.settings import RecordsSettings

_PLACEHOLDER: Final = "..."
_CODES: Final = ("ConsumerCountry", "ConsumerCurrencyID", "BrandID", "ConsumerStatus", "ConsumerState")
_CODES_MAX: Final = 50
FIELD_OF_RULE: Final = {rule: field for field, rule in FIELD_RULES.items()}
_BY_RULE: Final = {
    "encoding": "convert the file to UTF-8, for example: iconv -f WINDOWS-1252 -t UTF-8 FILE",
    "repeated_key": 'to use the last value, set in [records]: mode = "normalize"',
    "unknown_field": 'to drop such fields, set in [records]: unknown_fields = "drop"',
}


class Remedy:
    """
    Examines records that break a rule, and suggests how to fix them.

    Args:
        shows_values: Whether suggestions may contain values of records.
    """

    def __init__(self, rule: str, settings: RecordsSettings, *, shows_values: bool) -> None:
        self._rule = rule
        self._field = FIELD_OF_RULE.get(rule, "")
        self._settings = settings
        self._source = settings.field_sources.get(self._field)
        self._shows_values = shows_values
        self._missing = self._local = self._others = 0
        self._codes: dict[str, str] = {}

    def add(self, values: Mapping[str, Any]) -> None:
        """Examine a record, given its original values by field."""
        value = values.get(self._field)
        if value in EMPTY:
            self._missing += 1
        elif self._field == "Timestamp":
            self._local += _is_local(value)
            self._others += not _is_local(value) and not _is_instant(value) and not why_not_real(value, has_zone=False)
        elif self._field in _CODES:
            self._add_code(value)
        else:
            self._others += 1

    def _add_code(self, value: Any) -> None:
        source = self._source or FieldSource(path=self._field)
        is_listed = source.const is not None or source.default is not None or code_text(value) in source.values
        if isinstance(value, str | int) and not is_listed and len(self._codes) <= _CODES_MAX:
            self._codes[code_text(value)] = _PLACEHOLDER

    def lines(self) -> list[str]:
        """Return lines of advice; none if no setting helps."""
        if self._rule in _BY_RULE:
            return [_BY_RULE[self._rule]]
        if not self._field:
            return []
        if self._field == "EventId":
            return self._event_id_lines()
        lines = self._timestamp_lines() if self._field == "Timestamp" else self._code_lines()
        if self._missing and not self._source and self._settings.mapping:
            lines.append(f'to read it from another column or field, add to [records.mapping]: {self._field} = "NAME"')
        return lines

    def _event_id_lines(self) -> list[str]:
        computed_from = " and ".join(self._settings.event_id_fields or DERIVED_FROM)
        lines = []
        if self._settings.event_id == "derive":
            if self._missing:
                lines.append(f"it is computed from {computed_from}, but at least one of them is missing")
        elif self._missing or self._others:
            lines.append(f'to compute it from {computed_from}, set in [records]: event_id = "derive"')
        if self._others:
            no_source = 'set in [records.mapping]: EventId = { const = "" }'
            unused = "leave EventId out of [records.mapping]" if self._source else no_source
            lines.append(f"a value that is not a UUID prevents the computation: {unused}")
        return lines

    def _timestamp_lines(self) -> list[str]:
        lines = []
        if self._local and not self._settings.assume_timezone:
            lines.append(
                'for times without an offset, set their time zone in [records]: assume_timezone = "Europe/Malta"'
            )
        if self._others:
            lines.append(
                "times must have the form 2026-03-01 14:05:09, with seconds; convert them, or change the program that "
                "writes them"
            )
        return lines

    def _code_lines(self) -> list[str]:
        lines = []
        if self._field == "ConsumerStatus" and self._settings.allowed_statuses:
            lines.append(f"records.allowed_statuses = {toml_value(self._settings.allowed_statuses)}")
        if len(self._codes) > _CODES_MAX:
            return [*lines, f"more than {_CODES_MAX} different values: is this the right column?"]
        if self._codes and not self._shows_values:
            count = several(len(self._codes), "code")
            lines.append(f"to map {count}, complete the line that shipper validate --show-values prints")
        elif self._codes:
            lines.append(f'to map them, replace each "{_PLACEHOLDER}" with the right code, in [records.mapping]:')
            lines.append(f"{self._field} = {toml_value(self._source_with_codes())}")
        return lines

    def _source_with_codes(self) -> dict[str, Any]:
        source = self._source or FieldSource(path=self._field)
        begin = {"template": source.template} if source.template else {"from": source.path}
        return {**begin, "values": {**source.values, **self._codes}}


def _is_instant(value: Any) -> bool:
    (text,) = timestamps([value], zone=None)
    return isinstance(text, str) and len(text) == len(ANY_TIME) and are_timestamps([text], ANY_TIME)


def _is_local(value: Any) -> bool:
    return not _is_instant(value) and _is_instant(timestamps([value], zone=UTC)[0])

"""What mends records that break a rule: a setting, or a line of `records.mapping` to complete."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC
from typing import Any, Final

from shipper.cli.common import several
from shipper.cli.config import toml_value
from shipper.codec.mapping import NOTHING, code_of
from shipper.codec.normalize import timestamps
from shipper.codec.rewrite import DERIVED_FROM
from shipper.codec.rules import ANY_TIME, FIELD_RULES, are_timestamps
from shipper.config.mapping import FieldSource
from shipper.config.settings import RecordsSettings

_TO_COMPLETE: Final = "..."
_CODES: Final = ("ConsumerCountry", "ConsumerCurrencyID", "BrandID", "ConsumerStatus", "ConsumerState")
_CODES_MAX: Final = 50
_FIELDS: Final = {rule: field for field, rule in FIELD_RULES.items()}
_OF_RECORDS: Final = {
    "encoding": "convert the file to UTF-8, for example: iconv -f WINDOWS-1252 -t UTF-8 FILE",
    "repeated_key": 'to have the last value count, set in [records]: mode = "normalize"',
    "unknown_field": 'to leave such fields out, set in [records]: unknown_fields = "drop"',
}


class Remedy:
    """
    Looks at records that break one rule, and says what mends them.

    Args:
        shows_values: Whether values of records may be part of what it says.
    """

    def __init__(self, rule: str, settings: RecordsSettings, *, shows_values: bool) -> None:
        self._rule = rule
        self._field = _FIELDS.get(rule, "")
        self._settings = settings
        self._source = settings.field_sources.get(self._field)
        self._shows_values = shows_values
        self._lacking = self._local = self._others = 0
        self._codes: dict[str, str] = {}

    def look(self, values: Mapping[str, Any]) -> None:
        """Look at what a record has for each field, as it came."""
        value = values.get(self._field)
        if value in NOTHING:
            self._lacking += 1
        elif self._field == "Timestamp":
            self._local += _is_local(value)
            self._others += not _is_local(value) and not _is_instant(value)
        elif self._field in _CODES:
            self._note_code(value)
        else:
            self._others += 1

    def _note_code(self, value: Any) -> None:
        source = self._source or FieldSource(path=self._field)
        is_listed = source.const is not None or source.default is not None or code_of(value) in source.values
        if isinstance(value, str | int) and not is_listed and len(self._codes) <= _CODES_MAX:
            self._codes[code_of(value)] = _TO_COMPLETE

    def words(self) -> list[str]:
        """Say what to do, some lines; none if no setting mends it."""
        if self._rule in _OF_RECORDS:
            return [_OF_RECORDS[self._rule]]
        if not self._field:
            return []
        if self._field == "EventId":
            return self._for_event_ids()
        lines = self._for_timestamps() if self._field == "Timestamp" else self._for_codes()
        if self._lacking and not self._source and self._settings.mapping:
            lines.append(f'to read it from another column or field, add to [records.mapping]: {self._field} = "NAME"')
        return lines

    def _for_event_ids(self) -> list[str]:
        computed_from = " and ".join(self._settings.event_id_fields or DERIVED_FROM)
        lines = []
        if self._settings.event_id == "derive":
            if self._lacking:
                lines.append(f"it is computed from {computed_from}, of which something is missing")
        elif self._lacking or self._others:
            lines.append(f'to have it computed from {computed_from}, set in [records]: event_id = "derive"')
        if self._others:
            no_source = 'set in [records.mapping]: EventId = { const = "" }'
            unused = "leave EventId out of [records.mapping]" if self._source else no_source
            lines.append(f"what is no UUID is in the way of a computed one: {unused}")
        return lines

    def _for_timestamps(self) -> list[str]:
        lines = []
        if self._local and not self._settings.assume_timezone:
            lines.append('for times without an offset, set their zone in [records]: assume_timezone = "Europe/Malta"')
        if self._others:
            lines.append("a time is read in the form 2026-03-01 14:05:09 alone: write it so where the file is made")
        return lines

    def _for_codes(self) -> list[str]:
        lines = []
        if self._field == "ConsumerStatus" and self._settings.allowed_statuses:
            lines.append(f"records.allowed_statuses = {toml_value(self._settings.allowed_statuses)}")
        if len(self._codes) > _CODES_MAX:
            return [*lines, f"more than {_CODES_MAX} different values: are these codes, or is it another column?"]
        if self._codes and not self._shows_values:
            these = several(len(self._codes), "code")
            lines.append(f"to map {these}, complete the line that shipper validate --show-values prints")
        elif self._codes:
            lines.append(f'to map them, write the right code in place of each "{_TO_COMPLETE}", in [records.mapping]:')
            lines.append(f"{self._field} = {toml_value(self._with_codes())}")
        return lines

    def _with_codes(self) -> dict[str, Any]:
        """Return the source of the field, with a table of `values` that lists all codes."""
        source = self._source or FieldSource(path=self._field)
        begin = {"template": source.template} if source.template else {"from": source.path}
        return {**begin, "values": {**source.values, **self._codes}}


def _is_instant(value: Any) -> bool:
    (written,) = timestamps([value], zone=None)
    return isinstance(written, str) and len(written) == len(ANY_TIME) and are_timestamps([written], ANY_TIME)


def _is_local(value: Any) -> bool:
    """Return whether it is a time without an offset."""
    return not _is_instant(value) and _is_instant(timestamps([value], zone=UTC)[0])

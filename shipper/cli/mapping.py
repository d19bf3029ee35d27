"""The command `mapping suggest`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from shipper.cli.commands import App
from shipper.cli.common import OutputOption, SettingsOptions, open_input, plain, prepare, with_settings_options
from shipper.cli.config import toml_value
from shipper.cli.writing import checked_target, write
from shipper.config.mapping import FIELDS
from shipper.model.errors import SourceError
from shipper.model.printable import printable

if TYPE_CHECKING:
    from shipper.codec.suggest import Suggestion
    from shipper.config.settings import Settings

_RECORDS = 1000
_BYTES = 16 << 20
_DERIVED = 'records.event_id = "derive" computes it from BrandID and ConsumerID'
_OPTIONAL = ("AffiliateID", "ConsumerState")
_CONSTANT = 'or the same for all: { const = "..." }'
_NO_SOURCE = {
    "EventId": _DERIVED,
    **dict.fromkeys(_OPTIONAL, "it can be empty"),
    **dict.fromkeys(("ConsumerCountry", "ConsumerCurrencyID", "BrandID", "ConsumerStatus"), _CONSTANT),
    "CustomerCurrencyID": 'or by the codes of another column: { from = "...", values = {} }',
}
_CODES = {
    "ConsumerCountry": '"Germany" = "DE"',
    "ConsumerCurrencyID": '"Euro" = "EUR"',
    "BrandID": '"Example Casino" = 11',
    "ConsumerState": '"Nevada" = "NV"',
}

mapping_app = App("mapping", "Write a mapping for records with other names of fields.")


@mapping_app.callback()
def _group() -> None:
    pass


@mapping_app.command()
@with_settings_options
def suggest(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A file of your records.")],
    output: OutputOption = "",
    *,
    options: SettingsOptions,
) -> None:
    """
    Write a [records.mapping] for a file, by the names of its fields and the form of their values.

    It reads the first 1,000 records and shows none of their values. Look the mapping over, put it into your
    configuration, and then: shipper validate FILE

    Example: shipper mapping suggest export.csv
    """
    target = checked_target(output)
    settings = prepare(options)
    mapping = suggested(path, settings)
    if not mapping:
        raise SourceError(
            f"{path}: no field has a name that is known; is the first row of CSV a header? The 13 fields are "
            f"{', '.join(FIELDS)}: see [records.mapping] in docs/records.md"
        )
    write(f"{plain(mapping)}\n".encode(), target)


def suggested(path: Path, settings: Settings) -> str:
    """
    Suggest a mapping for a file, in TOML; empty if no field has a name that is known, as these may be values.

    Raises:
        SourceError: It cannot be read.
    """
    suggestions, left = _suggestions(path, settings)
    if not any(found.path and not found.is_by_form for found in suggestions.values()):
        return ""
    return "\n".join(["[records.mapping]", *_in_toml(suggestions), *_not_used(left)])


def missing_lines(path: Path, settings: Settings, lacking: Collection[str]) -> list[str]:
    """
    Suggest what `records.mapping` of the settings lacks, as lines of that section; errors as for `suggested`.

    Args:
        lacking: The fields that records do not have with this mapping.
    """
    in_use = settings.records.field_sources
    fields = [field for field in FIELDS if field in lacking or (field in _OPTIONAL and field not in in_use)]
    used = {column for field in FIELDS if field not in fields and field in in_use for column in in_use[field].paths}
    suggestions, left = _suggestions(path, settings, fields, used)
    lines = _in_toml({field: found for field, found in suggestions.items() if found.path})
    return [*lines, *_not_used(left)] if lines else []


def _suggestions(
    path: Path, settings: Settings, fields: Sequence[str] = FIELDS, used: Collection[str] = ()
) -> tuple[dict[str, Suggestion], list[str]]:
    from shipper.codec.suggest import suggest as suggestion_for

    records = islice(_records_of(path, settings), _RECORDS)
    return suggestion_for(records, fields, used=used, assume_timezone=settings.records.assume_timezone)


def _records_of(path: Path, settings: Settings) -> Iterator[Mapping[str, Any]]:
    """
    Read the records at the beginning of a file that can be read, as they are before any mapping.

    What begins with no bracket is CSV, whatever its columns are called.

    Raises:
        SourceError: It cannot be read.
    """
    from shipper.codec.rows import read_document
    from shipper.model.framing import CsvRows

    reader = open_input(path, settings)
    try:
        head = reader.content.pread(1024, 0).removeprefix(b"\xef\xbb\xbf").lstrip()
        if settings.input.format == "auto" and head[:1] not in {b"{", b"[", b""}:
            reader.close()
            reader = open_input(path, replace(settings, input=replace(settings.input, format="csv")))
        while reader.offset < _BYTES and (chunk := reader.read(is_final=True)):
            framing = chunk.stream.framing
            for frame in framing.frames(chunk.data, 0):
                is_header = isinstance(framing, CsvRows) and chunk.start_offset + frame.start < len(framing.header)
                raw = chunk.data[frame.start : frame.end]
                if not is_header and raw.strip() and (document := read_document(raw, framing)):
                    yield document
    finally:
        reader.close()


def _in_toml(suggestions: Mapping[str, Suggestion]) -> list[str]:
    """Write suggestions as lines of a configuration, with comments where they guess; what has no source comes last."""
    from shipper.codec.suggest import FITTING

    lines, remarks = [], []
    for field, found in suggestions.items():
        if not found.path:
            instead = f"; {_NO_SOURCE[field]}" if field in _NO_SOURCE else ""
            remarks.append(f'# {field} = "?"  # nothing looks like it{instead}')
        elif found.fit < FITTING and field == "EventId":
            remarks.append(f"# {field} = {toml_value(found.path)}  # its values are no UUIDs; {_DERIVED}")
        elif found.fit < FITTING:
            lines.append(_with_other_values(field, found))
        elif found.path != field:
            why = "  # a guess, by the form of its values" if found.is_by_form else ""
            lines.append(f"{field} = {toml_value(found.path)}{why}")
    return [*lines, *remarks]


def _with_other_values(field: str, found: Suggestion) -> str:
    """Write a suggestion by the name alone, with what to do about the values."""
    path = toml_value(found.path)
    if field in _CODES:
        return f"{field} = {{ from = {path}, values = {{}} }}  # by its name; list its codes: {{ {_CODES[field]} }}"
    if found.is_local:
        return f"{field} = {path}  # its times have no offset: set records.assume_timezone"
    why = "write its times as 2026-03-01 14:05:09" if field == "Timestamp" else f"its values are not those of {field}"
    return f"{field} = {path}  # by its name; {why}"


def _not_used(paths: Sequence[str]) -> list[str]:
    return [f"# not used, see records.unknown_fields: {', '.join(map(printable, paths))}"] if paths else []

"""The command `mapping suggest`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
_VALUES = 'values = { "THEIRS" = "OURS" }'
_CONSTANT = 'or the same for all: { const = "..." }'
_REMEDIES = {"Timestamp": "an offset from UTC, or records.assume_timezone", "EventId": "to be UUIDs"}
_OPTIONAL = {
    "EventId": 'made from BrandID and ConsumerID with records.event_id = "derive"',
    "AffiliateID": "empty",
    "ConsumerState": "empty",
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
    from shipper.codec.suggest import suggest as suggestion_for

    suggestions, left = suggestion_for(islice(_records_of(path, settings), _RECORDS))
    if not any(found.path and not found.is_by_form for found in suggestions.values()):
        return ""
    return _in_toml(suggestions, left)


def _records_of(path: Path, settings: Settings) -> Iterator[dict[str, Any]]:
    """
    Read the records at the beginning of a file that can be read, as they are before any mapping.

    What begins with no bracket is CSV, whatever its columns are called.

    Raises:
        SourceError: It cannot be read.
    """
    from shipper.codec.judge import document_in
    from shipper.codec.rows import Unreadable, read_rows
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
                raw = chunk.data[frame.start : frame.end]
                if isinstance(framing, CsvRows):
                    if chunk.start_offset + frame.start >= len(framing.header) and raw.strip():
                        (row,) = read_rows([raw], framing)
                        if not isinstance(row, Unreadable):
                            yield dict(row)
                elif document := document_in(raw):
                    yield document
    finally:
        reader.close()


def _in_toml(suggestions: Mapping[str, Suggestion], left: Sequence[str]) -> str:
    """Write a suggestion as a section of a configuration, with comments where it guesses."""
    from shipper.codec.suggest import FITTING

    lines, remarks = ["[records.mapping]"], []
    for field, found in suggestions.items():
        if not found.path:
            instead = f"it can be {_OPTIONAL[field]}" if field in _OPTIONAL else _CONSTANT
            remarks.append(f'# {field} = "?"  # nothing looks like it; {instead}')
        elif found.fit < FITTING:
            source = f"{{ from = {toml_value(found.path)} }}"
            lines.append(f"{field} = {source}  # by its name; its values need {_REMEDIES.get(field, _VALUES)}")
        elif found.path != field:
            why = "  # a guess, by the form of its values" if found.is_by_form else ""
            lines.append(f"{field} = {toml_value(found.path)}{why}")
    if left:
        remarks.append(f"# not used, see records.unknown_fields: {', '.join(map(printable, left))}")
    return "\n".join([*lines, *remarks])

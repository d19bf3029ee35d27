"""The command `mapping suggest`."""

from __future__ import annotations

from codecs import BOM_UTF16_BE, BOM_UTF16_LE, getincrementaldecoder
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from shipper.cli.commands import App
from shipper.cli.common import OutputOption, SettingsOptions, open_input, plain, prepare, refuse_topic
from shipper.cli.config import toml_value
from shipper.cli.writing import check_target, write
from shipper.config.mapping import FIELDS
from shipper.model.errors import SourceError
from shipper.model.printable import printable
from shipper.sources.content import NOT_TEXT

if TYPE_CHECKING:
    from shipper.codec.suggest import Suggestion, Suggestions
    from shipper.config.settings import Settings
    from shipper.model.records import Chunk

_RECORDS = 1000
_BYTES = 16 << 20
_SEARCHED_BYTES = 1 << 20
_DERIVED = 'records.event_id = "derive" computes it from BrandID and ConsumerID'
_OPTIONAL = ("AffiliateID", "ConsumerState")
_CONSTANT = 'or the same value for all: { const = "..." }'
_NO_SOURCE = {
    "EventId": _DERIVED,
    **dict.fromkeys(_OPTIONAL, "it may be empty"),
    **dict.fromkeys(("ConsumerCountry", "ConsumerCurrencyID", "BrandID", "ConsumerStatus"), _CONSTANT),
    "CustomerCurrencyID": 'or translate the codes of another column: { from = "...", values = {} }',
}
_CODES = {
    "ConsumerCountry": '"Germany" = "DE"',
    "ConsumerCurrencyID": '"Euro" = "EUR"',
    "BrandID": '"Example Casino" = 11',
    "ConsumerState": '"Nevada" = "NV"',
}

mapping_app = App("mapping", "Suggest a mapping for records with other field names.")


@mapping_app.callback()
def _group() -> None:
    pass


@mapping_app.command()
def suggest(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="A file with your records.")],
    output: OutputOption = "",
    *,
    options: SettingsOptions,
) -> None:
    """
    Suggest a [records.mapping] for a file, from the names of its fields and the form of their values.

    Reads the first 1,000 records and shows none of their values. Review the mapping, add it to your configuration, and
    run: shipper validate FILE

    Example: shipper mapping suggest export.csv
    """
    target = check_target(output)
    refuse_topic(str(path))
    settings = prepare(options)
    mapping = suggest_mapping(path, settings)
    if not mapping:
        raise SourceError(f"{path}: {_why_no_mapping(path, settings)}")
    write(f"{plain(mapping)}\n".encode(), target)


def suggest_mapping(path: Path, settings: Settings) -> str:
    """Suggest a mapping for a file, as TOML; empty if no field has a known name, as the names may be values."""
    found = _suggestions(path, settings)
    sources = [suggestion for suggestion in found.by_field.values() if suggestion.path]
    if all(suggestion.is_by_values or "\0" in suggestion.path for suggestion in sources):  # or names in UTF-16
        return ""
    return "\n".join(["[records.mapping]", *_toml_lines(found.by_field), *_comments_on_others(found)])


def _why_no_mapping(path: Path, settings: Settings) -> str:
    with closing(open_input(path, settings)) as reader:
        head = reader.content.pread(_SEARCHED_BYTES, 0)
    try:
        getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return encoding_advice(head)
    if next(_records_of(path, settings), None) is None:
        return "it has no records that can be read; the first row of CSV is its header"
    return (
        "no field has a known name; if it is CSV, is the first row a header? The 13 fields are "
        f"{', '.join(FIELDS)}: see [records.mapping] in docs/records.md"
    )


def encoding_advice(head: bytes) -> str:
    """Return how to convert an input that is not UTF-8, from its first bytes."""
    if head.startswith((BOM_UTF16_LE, BOM_UTF16_BE)) or head[1:8:2] == bytes(4):
        return "it is UTF-16; convert it: iconv -f UTF-16 -t UTF-8"
    if b"\0" in head:
        return NOT_TEXT
    return "it is not UTF-8; convert it, for example: iconv -f WINDOWS-1252 -t UTF-8"


def suggest_missing(path: Path, settings: Settings, lacking: Collection[str]) -> list[str]:
    """Suggest lines to add to `records.mapping`, as `lacking` fields are missing with the current one."""
    sources = settings.records.field_sources
    fields = [field for field in FIELDS if field in lacking or (field in _OPTIONAL and field not in sources)]
    used = {column for field in FIELDS if field not in fields and field in sources for column in sources[field].paths}
    found = _suggestions(path, settings, fields, used)
    lines = _toml_lines({field: suggestion for field, suggestion in found.by_field.items() if suggestion.path})
    return [*lines, *_comments_on_others(found)] if lines else []


def _suggestions(
    path: Path, settings: Settings, fields: Sequence[str] = FIELDS, used: Collection[str] = ()
) -> Suggestions:
    from shipper.codec.suggest import suggest as suggest_sources

    records = islice(_records_of(path, settings), _RECORDS)
    return suggest_sources(records, fields, used=used, assume_timezone=settings.records.assume_timezone)


def _records_of(path: Path, settings: Settings) -> Iterator[Mapping[str, Any]]:
    """
    Yield the unmapped records at the beginning of a file, skipping those that cannot be parsed.

    A file that does not begin with a bracket is read as CSV, whatever the names of its columns.

    Raises:
        SourceError: The file cannot be read.
    """
    reader = open_input(path, settings)
    try:
        head = reader.content.pread(1024, 0).removeprefix(b"\xef\xbb\xbf").lstrip()
        if settings.input.format == "auto" and head[:1] not in {b"{", b"[", b""}:
            reader.close()
            reader = open_input(path, replace(settings, input=replace(settings.input, format="csv")))
        while reader.offset < _BYTES and (chunk := reader.read(is_final=True)):
            for _, document in documents_in(chunk):
                yield document
    finally:
        reader.close()


def documents_in(chunk: Chunk) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield the offset of each record of a chunk that can be parsed, and the record without a mapping."""
    from shipper.codec.documents import read_document

    framing = chunk.stream.framing
    for frame in framing.frames(chunk.data, 0):
        is_header = chunk.start_offset + frame.start < len(framing.header)
        raw = chunk.data[frame.start : frame.end]
        if not is_header and raw.strip() and (document := read_document(raw, framing)):
            yield chunk.start_offset + frame.start, document


def _toml_lines(suggestions: Mapping[str, Suggestion]) -> list[str]:
    """Return suggestions as lines of TOML, with comments on guesses; fields without a source come last."""
    from shipper.codec.suggest import FIT_MIN

    lines, comments = [], []
    for field, suggestion in suggestions.items():
        path = toml_value(suggestion.path)
        if not suggestion.path:
            alternative = f"; {_NO_SOURCE[field]}" if field in _NO_SOURCE else ""
            comments.append(f'# {field} = "?"  # no similar field{alternative}')
        elif suggestion.fit < FIT_MIN and field == "EventId":
            comments.append(f"# {field} = {path}  # its values are not UUIDs; {_DERIVED}")
        elif suggestion.fit < FIT_MIN:
            lines.append(_line_matched_by_name(field, suggestion))
        elif suggestion.path != field:
            comment = "  # guessed from its values" if suggestion.is_by_values else ""
            lines.append(f"{field} = {path}{comment}")
    return [*lines, *comments]


def _line_matched_by_name(field: str, suggestion: Suggestion) -> str:
    """Return the line of a source whose values do not fit yet, with what to do about them."""
    path = toml_value(suggestion.path)
    if field in _CODES:
        return f"{field} = {{ from = {path}, values = {{}} }}  # matched by name; list its codes: {{ {_CODES[field]} }}"
    how = "guessed from its values; " if suggestion.is_by_values else "matched by name; "
    if suggestion.is_local:
        how = how if suggestion.is_by_values else ""
        return f"{field} = {path}  # {how}its times have no offset: set records.assume_timezone"
    advice = "write its times as 2026-03-01 14:05:09" if field == "Timestamp" else f"its values do not fit {field}"
    return f"{field} = {path}  # {how}{advice}"


def _comments_on_others(found: Suggestions) -> list[str]:
    comments = []
    if found.unused:
        comments.append(f"# not used, see records.unknown_fields: {', '.join(map(printable, found.unused))}")
    if found.unnameable:
        names = ", ".join(repr(printable(name)) for name in found.unnameable)
        comments.append(f"# left out, as a name is empty or has a dot in an object; rename them: {names}")
    return comments

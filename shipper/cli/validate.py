"""`shipper validate`: applies the pipeline's own rules; sends and saves nothing."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from shipper.cli.common import (
    SettingsOptions,
    plain,
    prepare,
    print_json,
    reader_may_leave,
    several,
    with_settings_options,
)
from shipper.cli.ship import named_files
from shipper.config.settings import Settings
from shipper.model.printable import printable

if TYPE_CHECKING:
    from shipper.model.records import Chunk, Rejection

_EXAMPLES_PER_RULE = 5
_NAMES_SHOWN = 20
_SHAPE_CHARACTERS = 60


@with_settings_options
def validate(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...|-", help="Files, globs or folders; - for stdin.")],
    form: Annotated[Literal["text", "json"], typer.Option("--format", help="The output format.")] = "text",
    *,
    options: SettingsOptions,
) -> None:
    """
    Check records as the pipeline would, without sending anything.

    Prints how many records break which rule, and the first of each with file, line, byte offset and the form of the
    value, never the value itself; what normalisation changed; which unknown fields there are. Exits with 3 if any
    record fails.

    Example: shipper validate exports/*.ndjson
    """
    settings = prepare(options)
    check = _Check(settings)
    for path in paths:
        if path == "-":
            check.add("standard input", _chunks_of_pipe(sys.stdin.fileno(), settings))
        else:
            from shipper.model.records import shown

            for file in named_files([path], settings):
                check.add(shown(file), _chunks_of_file(file, settings))
    with reader_may_leave():
        if form == "json":
            print_json(msgspec.json.encode(check.findings))
        else:
            print(plain(check.in_words()), flush=True)
    raise typer.Exit(3 if check.findings.failed else 0)


class Example(msgspec.Struct):
    """
    A record that breaks a rule.

    Attributes:
        field: The field at fault; empty if it is the whole record.
        shape: The form of its value: letters are `a` and `A`, digits `9`.
    """

    file: str
    line: int
    offset: int
    field: str
    shape: str
    message: str


class BrokenRule(msgspec.Struct):
    """How many records break a rule, and the first of them."""

    count: int = 0
    examples: list[Example] = []


class Findings(msgspec.Struct):
    """
    What was found in all inputs; `records == good + duplicates + failed`.

    Attributes:
        without_header: Inputs of CSV of which no column has a name that is known; their names are not among the unknown
            fields, as they may be a record's values.
        missing_columns: Of inputs of CSV, the columns that `records.mapping` names and that are not there.
    """

    records: int = 0
    good: int = 0
    duplicates: int = 0
    failed: int = 0
    rules: dict[str, BrokenRule] = {}
    normalized: dict[str, int] = {}
    unknown_fields: dict[str, int] = {}
    without_header: list[str] = []
    missing_columns: dict[str, list[str]] = {}


class _Check:
    """Runs chunks through the codec and keeps the findings."""

    def __init__(self, settings: Settings) -> None:
        from shipper.codec import Codec, latest_timestamp
        from shipper.codec.mapping import SourceMapping

        sources = settings.records.field_sources
        self._known_names = SourceMapping(sources).names
        self._mapped_names = {path for source in sources.values() for path in source.paths if "." not in path}
        self._hidden_names: set[str] = set()
        self._codec = Codec(settings.records, max_record_bytes=settings.input.max_record_bytes)
        self._room_bytes = max(1 << 20, settings.input.max_record_bytes + 1)
        self._latest = latest_timestamp(time.time(), settings.records.max_future_seconds)
        self._unknown_fields = settings.records.unknown_fields
        self.findings = Findings()

    def add(self, name: str, chunks: Iterator[Chunk]) -> None:
        """Check one input; `name` identifies it in the findings."""
        from shipper.codec import accept_events

        found = self.findings
        lines_before = 0
        for chunk in chunks:
            self._look_at_header(name, chunk)
            for encoded in self._codec.encode_all(chunk, room_bytes=self._room_bytes, latest=self._latest):
                span = encoded.span
                found.records += span.records
                found.duplicates += span.duplicates + encoded.waits
                accept_events(self._codec.window, span, range(span.fresh))
                found.failed += len(span.rejections)
                for rejection in span.rejections:
                    broken = found.rules.setdefault(rejection.rule, BrokenRule())
                    broken.count += 1
                    if len(broken.examples) < _EXAMPLES_PER_RULE:
                        within = rejection.start_offset - chunk.start_offset
                        line = lines_before + chunk.data.count(b"\n", 0, within) + 1
                        broken.examples.append(self._example(name, line, rejection, chunk))
            lines_before += chunk.data.count(b"\n") or 1
        found.good = found.records - found.failed - found.duplicates
        found.normalized = _counted(self._codec.changes.normalized)
        unknown = {name: count for name, count in self._codec.changes.unknown.items() if name not in self._hidden_names}
        found.unknown_fields = _counted(unknown)

    def _look_at_header(self, name: str, chunk: Chunk) -> None:
        """Hide the names of columns if none is known: the first row may be a record."""
        from shipper.model.framing import CsvRows

        framing = chunk.stream.framing
        if not isinstance(framing, CsvRows):
            return
        if not self._known_names.intersection(framing.names):
            self._hidden_names.update(framing.names)
            if name not in self.findings.without_header:
                self.findings.without_header.append(name)
        elif missing := sorted(self._mapped_names.difference(framing.names)):
            self.findings.missing_columns[name] = missing

    def _example(self, name: str, line: int, rejection: Rejection, chunk: Chunk) -> Example:
        from shipper.codec import FIELD_RULES

        field = next((field for field, rule in FIELD_RULES.items() if rule == rejection.rule), "")
        document = self._codec.document_of(rejection.raw, chunk.stream.framing) if field else {}
        return Example(
            file=name,
            line=line,
            offset=rejection.start_offset,
            field=field,
            shape=shape_of(document[field]) if field in document else "absent" if field else "",
            message=rejection.message,
        )

    def in_words(self) -> str:
        """Write the findings for a person."""
        found = self.findings
        parts = [f"{several(found.records, 'record')}: {found.good:,} good"]
        if found.duplicates:
            parts[0] += f", {found.duplicates:,} repeat an EventId"
        if found.failed:
            parts[0] += f", {found.failed:,} break a rule"
        if found.normalized:
            parts.append(f"normalized: {_listed(found.normalized)}")
        if found.unknown_fields:
            parts.append(f"unknown fields ({self._unknown_fields}): {_listed(found.unknown_fields)}")
        question = "no column has a known name; is the first row a header?"
        parts += [f"{printable(name)}: {question}" for name in found.without_header]
        missing = "records.mapping names columns that are missing"
        parts += [
            f"{printable(name)}: {missing}: {', '.join(columns)}" for name, columns in found.missing_columns.items()
        ]
        for rule, broken in sorted(found.rules.items(), key=lambda item: -item[1].count):
            parts.append(f"\n{rule}: {broken.count:,}")
            parts += [_in_words(example) for example in broken.examples]
            if broken.count > len(broken.examples):
                parts.append(f"  ... and {broken.count - len(broken.examples):,} more")
        return "\n".join(parts)


def shape_of(value: object) -> str:
    """Return the form of a value, not the value: `aaaa_99`, `9-digit number`."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "true or false"
    if isinstance(value, str):
        shape = re.sub(r"\d", "9", re.sub(r"[^\W\d_]", lambda letter: "A" if letter[0].isupper() else "a", value))
        return repr(shape if len(shape) <= _SHAPE_CHARACTERS else f"{shape[:_SHAPE_CHARACTERS]}...")
    if isinstance(value, int):
        return f"{len(str(abs(value)))}-digit number" if abs(value) < 10**100 else "number of many digits"
    kinds: dict[type, str] = {float: "number with a fraction", list: "array", dict: "object"}
    return kinds.get(type(value), type(value).__name__)


def _in_words(example: Example) -> str:
    shape = f"; its form is {example.shape}" if example.shape not in {"", "absent"} else ""
    return f"  {printable(example.file)}:{example.line}: {example.message}{shape} (byte {example.offset})"


def _counted(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if count}


def _listed(counts: Mapping[str, int]) -> str:
    listed = [f"{printable(name)} {count:,}" for name, count in list(counts.items())[:_NAMES_SHOWN]]
    return ", ".join([*listed, "..."] if len(counts) > _NAMES_SHOWN else listed)


def _chunks_of_file(path: Path, settings: Settings) -> Iterator[Chunk]:
    from shipper.sources.identity import StreamBook
    from shipper.sources.reader import input_form

    max_bytes = settings.input.max_record_bytes
    reader = StreamBook((), lambda: 1, max_record_bytes=max_bytes, form=input_form(settings)).open(path)
    try:
        while chunk := reader.read(is_final=True):
            yield chunk
    finally:
        reader.close()


def _chunks_of_pipe(descriptor: int, settings: Settings) -> Iterator[Chunk]:
    from shipper.model.framing import csv_rows
    from shipper.model.records import Chunk, Stream
    from shipper.sources.incoming import Incoming
    from shipper.sources.reader import READ_BYTES, input_form

    incoming = Incoming(input_form(settings), max_record_bytes=settings.input.max_record_bytes)
    stream = Stream(stream_id=1, kind="spool", path="-")
    offset = 0
    rest = b""
    is_final = False
    while not is_final:
        read = os.read(descriptor, READ_BYTES)
        is_final = not read
        data = rest + incoming.take(read, is_final=is_final)
        if incoming.header and not offset:
            stream.framing = csv_rows(incoming.header, is_whole=True, delimiter=incoming.delimiter) or stream.framing
            data = incoming.header + data
        open_bytes = incoming.open_bytes if incoming.header else len(data) - data.rfind(b"\n") - 1
        end = len(data) - (0 if is_final else open_bytes)
        rest = data[end:]
        if end:
            yield Chunk(stream=stream, start_offset=offset, end_offset=offset + end, data=data[:end])
            offset += end

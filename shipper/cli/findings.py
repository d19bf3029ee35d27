"""What is found wrong with records, and in words: for `validate` and a rehearsed backfill."""

from __future__ import annotations

import codecs
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from shipper.cli.common import open_input, several
from shipper.config.mapping import FIELDS
from shipper.config.settings import Settings
from shipper.model.printable import printable

if TYPE_CHECKING:
    from shipper.cli.remedies import Remedy
    from shipper.model.framing import Framing
    from shipper.model.records import Chunk, Rejection, Stream

_EXAMPLES_PER_RULE = 5
_LOOKED_AT = 1000  # records of each rule that are looked at for what mends them
_NAMES_SHOWN = 20
_SHAPE_CHARACTERS = 60
_HEAD_BYTES = 1024
_DELIMITERS = (b",", b";", b"\t", b"|")
_BEGINNING = "a mapping to begin with, put it into your configuration"
_LACKS = "most records lack fields of the wire form"
CSV = "it looks like CSV, and no column has a name that is known; is the first row a header?"


class Example(msgspec.Struct):
    """
    A record that breaks a rule.

    Attributes:
        field: The field at fault; empty if it is the whole record.
        shape: The form of its value as it came: letters are `a` and `A`, digits `9`.
        value: The value itself as it came, at most 60 characters of it, if values are to be shown.
        becomes: What the table `values` of `records.mapping` makes of it; empty if it does not list it.
    """

    file: str
    line: int
    offset: int
    field: str
    shape: str
    message: str
    value: str = ""
    becomes: str = ""


class BrokenRule(msgspec.Struct):
    """
    How many records break a rule; a record may break several.

    Attributes:
        examples: The first five of them.
        advice: What mends them, in lines; a line may be TOML.
    """

    count: int = 0
    examples: list[Example] = []
    advice: list[str] = []


class Findings(msgspec.Struct):
    """
    What was found in all inputs; `records == good + duplicates + failed`.

    Attributes:
        unlisted: By field, how many good records have a code that `values` of `records.mapping` does not list.
        without_header: Inputs of CSV of which no column has a name that is known; their names are not among the unknown
            fields, as they may be a record's values.
        missing_columns: Of inputs of CSV, the columns that `records.mapping` names and that are not there.
        advice: By input, what is wrong with most of its records and what to do.
    """

    records: int = 0
    good: int = 0
    duplicates: int = 0
    failed: int = 0
    rules: dict[str, BrokenRule] = {}
    normalized: dict[str, int] = {}
    unknown_fields: dict[str, int] = {}
    unlisted: dict[str, int] = {}
    without_header: list[str] = []
    missing_columns: dict[str, list[str]] = {}
    advice: dict[str, str] = {}


class Check:
    """Runs chunks through the codec and keeps the findings."""

    def __init__(self, settings: Settings, *, shows_values: bool = False) -> None:
        from shipper.codec import Codec, latest_timestamp
        from shipper.codec.mapping import SourceMapping

        self._sources = sources = settings.records.field_sources
        self._as_it_came = SourceMapping({field: replace(each, values={}) for field, each in sources.items()})
        self._settings = settings.records
        self._remedies: dict[str, Remedy] = {}
        self._known_names = SourceMapping(sources).names
        self._mapped_names = {path for source in sources.values() for path in source.paths if "." not in path}
        self._hidden_names: set[str] = set()
        self._like: dict[str, str] = {}  # a column that is missing -> one whose name differs in case or blanks
        self._codec = Codec(settings.records, max_record_bytes=settings.input.max_record_bytes, notes_unlisted=True)
        self._room_bytes = max(1 << 20, settings.input.max_record_bytes + 1)
        self._latest = latest_timestamp(time.time(), settings.records.max_future_seconds)
        self._unknown_fields = settings.records.unknown_fields
        self._shows_values = shows_values
        self._records = self._unreadable = 0  # of the input at hand
        self._missing: Counter[str] = Counter()
        self.findings = Findings()

    def add(self, name: str, chunks: Iterator[Chunk], *, lines_before: int = 0) -> None:
        """Check one input from a line on; `name` identifies it in the findings."""
        from shipper.codec import accept_events

        found = self.findings
        records_before = found.records
        self._unreadable = 0
        self._missing.clear()
        for chunk in chunks:
            self._look_at_header(name, chunk)
            for encoded in self._codec.encode_all(chunk, room_bytes=self._room_bytes, latest=self._latest):
                span = encoded.span
                found.records += span.records
                found.duplicates += span.duplicates + encoded.waits
                accept_events(self._codec.window, span, range(span.fresh))
                found.failed += len(span.rejections)
                for rejection in span.rejections:
                    self._add_faults(name, rejection, chunk, lines_before)
            lines_before += chunk.data.count(b"\n") or 1
        self._records = found.records - records_before
        found.good = found.records - found.failed - found.duplicates
        found.normalized = _counted(self._codec.changes.normalized)
        unknown = {name: count for name, count in self._codec.changes.unknown.items() if name not in self._hidden_names}
        found.unknown_fields = _counted(unknown)
        found.unlisted = _counted(self._codec.changes.unlisted)
        for rule, remedy in self._remedies.items():
            found.rules[rule].advice = remedy.words()

    def _add_faults(self, name: str, rejection: Rejection, chunk: Chunk, lines_before: int) -> None:
        from shipper.cli.remedies import Remedy
        from shipper.codec.judge import IS_MISSING

        faults = rejection.faults or {rejection.rule: rejection.message}
        self._unreadable += rejection.rule in {"json", "encoding", "csv"}
        self._missing.update(rule for rule, message in faults.items() if message.endswith(IS_MISSING))
        values: dict[str, Any] | None = None
        for rule, message in faults.items():
            broken = self.findings.rules.setdefault(rule, BrokenRule())
            broken.count += 1
            if broken.count > _LOOKED_AT:
                continue
            if values is None:
                values = self._values_in(rejection.raw, chunk.stream.framing)
            if rule not in self._remedies:
                self._remedies[rule] = Remedy(rule, self._settings, shows_values=self._shows_values)
            self._remedies[rule].look(values)
            if broken.count <= _EXAMPLES_PER_RULE:
                line = lines_before + chunk.data.count(b"\n", 0, rejection.start_offset - chunk.start_offset) + 1
                broken.examples.append(self._example(name, line, rejection.start_offset, rule, message, values))

    def _values_in(self, raw: bytes, framing: Framing) -> dict[str, Any]:
        """Return what a record has for each field as it came: before `values` and normalisation."""
        from shipper.codec.normalize import ABSENT
        from shipper.codec.rows import read_document

        columns = self._as_it_came.columns([read_document(raw, framing)])
        return {field: value for field, (value,) in zip(FIELDS, columns, strict=True) if value is not ABSENT}

    def look_at(self, file: Path, settings: Settings) -> None:
        """Advise on a file of which most records cannot be read, or lack the same fields."""
        from shipper.cli.mapping import missing_lines, suggested
        from shipper.codec import FIELD_RULES
        from shipper.model.records import shown

        words = ""
        if 2 * self._unreadable > self._records:
            with file.open("rb") as opened:
                words = kind_of(opened.read(_HEAD_BYTES))
        lacking = [field for field, rule in FIELD_RULES.items() if 2 * self._missing[rule] > self._records]
        if words == CSV:
            mapping = suggested(file, settings)
            than = " than records.mapping has" if settings.records.mapping else ""
            lead = f"it looks like CSV with other names of columns{than}; {_BEGINNING}"
            words = f"{lead}:\n\n{mapping}\n" if mapping else CSV
        elif lacking and not words and settings.records.mapping:
            lines = "\n".join(missing_lines(file, settings, lacking))
            words = f"{_LACKS}; add to [records.mapping]:\n\n{lines}\n" if lines else ""
        elif lacking and not words:
            mapping = suggested(file, settings)
            words = f"{_LACKS}; {_BEGINNING}:\n\n{mapping}\n" if mapping else ""
        if words:
            self.findings.advice[shown(file)] = words

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
            there = {column.strip().casefold(): column for column in framing.names}
            self._like |= {column: there[low] for column in missing if (low := column.strip().casefold()) in there}

    def _example(
        self, name: str, line: int, offset: int, broken: str, message: str, values: Mapping[str, Any]
    ) -> Example:
        from shipper.codec import FIELD_RULES
        from shipper.codec.mapping import code_of

        field = next((field for field, rule in FIELD_RULES.items() if rule == broken), "")
        example = Example(name, line, offset, field, shape="absent" if field else "", message=message)
        if field in values:
            value = values[field]
            example.shape = shape_of(value)
            example.value = repr(value)[:_SHAPE_CHARACTERS] if self._shows_values else ""
            if field in self._sources and code_of(value) in self._sources[field].values:
                example.becomes = repr(self._sources[field].values[code_of(value)])
        return example

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
        if found.unlisted:
            parts.append(f"codes that values does not list, and that stay as they are: {_listed(found.unlisted)}")
        question = "no column has a known name; is the first row a header?"
        parts += [f"{printable(name)}: {question}" for name in found.without_header]
        missing = "records.mapping names columns that are missing"
        for name, columns in found.missing_columns.items():
            meant = [f"{each} (did you mean {self._like[each]!r}?)" if each in self._like else each for each in columns]
            parts.append(f"{printable(name)}: {missing}: {printable(', '.join(meant))}")
        parts += [f"\n{printable(name)}: {words}" for name, words in found.advice.items()]
        for rule, broken in sorted(found.rules.items(), key=lambda item: -item[1].count):
            parts.append(f"\n{rule}: {broken.count:,}")
            parts += [_in_words(example) for example in broken.examples]
            if broken.count > len(broken.examples):
                parts.append(f"  ... and {broken.count - len(broken.examples):,} more")
            parts += [f"  {printable(line)}" for line in broken.advice]
        return "\n".join(parts)


def kind_of(head: bytes) -> str:
    """Return what a file is, by its first bytes, that does not hold records, and what to do; empty if unknown."""
    text = head.removeprefix(codecs.BOM_UTF8).lstrip().lower()
    if head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "it is UTF-16; convert it: iconv -f UTF-16 -t UTF-8"
    if text.startswith((b"<!doctype html", b"<html")):
        return "it is a page of HTML, perhaps one that tells of an error, and holds no records"
    if text.startswith(b"<"):
        return "it is XML; records are JSON, one object on a line, or CSV"
    if text.startswith(b"{") and not text.partition(b"\n")[0].rstrip().endswith(b"}"):
        return "its objects stand on several lines; write each on a line of its own: jq -c ."
    if not text.startswith((b"{", b"[")) and max(map(text.partition(b"\n")[0].count, _DELIMITERS)) > 1:
        return CSV
    return ""


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
    shape = f"; it looks like {example.shape}" if example.shape not in {"", "absent"} else ""
    if example.value:
        shape = f"; it is {printable(example.value)}"
    if example.becomes:
        shape += f", which values turns into {printable(example.becomes)}"
    return f"  {printable(example.file)}:{example.line}: {example.message}{shape} (byte {example.offset})"


def _counted(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if count}


def _listed(counts: Mapping[str, int]) -> str:
    listed = [f"{printable(name)} {count:,}" for name, count in list(counts.items())[:_NAMES_SHOWN]]
    more = len(counts) - len(listed)
    return ", ".join(listed) + (f" and {more:,} more" if more else "")


def chunks_of_file(path: Path, settings: Settings, known: Sequence[Stream] = ()) -> tuple[Iterator[Chunk], int, int]:
    """
    Read a file.

    Args:
        known: The streams of which it may be one; it is read from the checkpoint of that on.
    Returns:
        The chunks, where the first one begins, and how many lines there are before.
    Raises:
        SourceError: It cannot be read.
    """
    from shipper.sources.reader import READ_BYTES

    reader = open_input(path, settings, known)

    def chunks() -> Iterator[Chunk]:
        with closing(reader):
            while chunk := reader.read(is_final=True):
                yield chunk

    read_before = (reader.content.pread(READ_BYTES, at) for at in range(0, reader.offset, READ_BYTES))
    lines = sum(data[: reader.offset - at * READ_BYTES].count(b"\n") for at, data in enumerate(read_before))
    return chunks(), reader.offset, lines

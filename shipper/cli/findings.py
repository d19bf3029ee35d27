"""Validation of records as in the pipeline, for `validate` and `backfill --dry-run`: problems and how to fix them."""

from __future__ import annotations

import codecs
import re
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from shipper.cli.common import open_input, several
from shipper.cli.mapping import documents_in, encoding_advice, suggest_mapping, suggest_missing
from shipper.cli.remedies import FIELD_OF_RULE, Remedy
from shipper.codec.codec import Codec
from shipper.codec.dedupe import accept_events
from shipper.codec.documents import EMPTY, SourceMapping, code_text, read_document
from shipper.codec.judge import IS_MISSING
from shipper.codec.normalize import ABSENT
from shipper.codec.rules import latest_timestamp
from shipper.config.mapping import FIELDS, is_nested
from shipper.config.settings import Settings
from shipper.model.errors import SourceError
from shipper.model.framing import CR_LINES, CsvRows, Framing
from shipper.model.printable import printable
from shipper.model.records import Chunk, Rejection, Stream
from shipper.sources.reader import READ_BYTES

_EXAMPLES_PER_RULE: Final = 5
_EXAMINED_MAX: Final = 1000  # records examined for a remedy, per rule, and for doubtful texts and unlisted codes
_NAMES_SHOWN: Final = 20
_SHAPE_CHARACTERS: Final = 60
_HEAD_BYTES: Final = 1024
_ARRAY: Final = re.compile(rb'\{\s*"([A-Za-z_]\w*)"\s*:\s*\[\s*\{')
_JQ: Final = "jq 1.7 or newer, as older ones round long numbers"
_TEXT: Final = re.compile(rb'\{[^\n]*?"([A-Za-z_]\w*)"\s*:\s*"\{\\"')
_TITLE_LINES: Final = 5  # that may precede a header
_DELIMITERS: Final = (b",", b";", b"\t", b"|")
_UNREADABLE_RULES: Final = {"json", "encoding", "csv"}
_BEGINNING: Final = "a mapping to start with; add it to your configuration"
_LACKS: Final = "most records lack required fields"
CSV: Final = (
    "it looks like CSV, but no column has a known name; is the first row a header? If it is, set "
    'input.format = "csv", or map the columns; otherwise add a header'
)
_CODES_SHOWN: Final = 20  # of each field
# Texts that programs write for a missing value, and traces of a conversion to a number and of an escape.
_DOUBTFUL: Final = re.compile(r"(\\N|#?N/A|nan|none|null|undefined)|[0-9]+(\.0)|(?s:.*(\\).*)", re.IGNORECASE)


class Example(msgspec.Struct):
    """
    A record that breaks a rule.

    Attributes:
        field: The invalid field; empty for the whole record.
        shape: The form of its original value: letters are `a` and `A`, digits `9`.
        value: At most 60 characters of the original value, if values are shown.
        becomes: Its translation by `values` of `records.mapping`; empty if it is not listed.
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
    The records that break a rule; a record may break several.

    Attributes:
        examples: The first five records.
        advice: Lines about how to fix them; some may be TOML.
    """

    count: int = 0
    examples: list[Example] = []
    advice: list[str] = []


class Findings(msgspec.Struct):
    """
    The results of all inputs; `records == good + duplicates + failed`.

    Attributes:
        doubtful: By field, how many of the first good records have which of `NULL`, `.0` and the like.
        unlisted: By field, the number of good records with a code that `values` of `records.mapping` does not list.
        without_header: CSV inputs without any known column name; their column names are not reported as unknown
            fields, as they may be values.
        missing_columns: By CSV input, columns named by `records.mapping` that are missing.
        advice: By input, what is wrong with most of its records and what to do.
    """

    records: int = 0
    good: int = 0
    duplicates: int = 0
    failed: int = 0
    rules: dict[str, BrokenRule] = {}
    normalized: dict[str, int] = {}
    unknown_fields: dict[str, int] = {}
    doubtful: dict[str, dict[str, int]] = {}
    unlisted: dict[str, int] = {}
    unlisted_codes: dict[str, list[str]] = {}
    without_header: list[str] = []
    missing_columns: dict[str, list[str]] = {}
    advice: dict[str, str] = {}


class Validation:
    """Runs chunks through the codec and collects findings."""

    def __init__(self, settings: Settings, *, shows_values: bool = False) -> None:
        self._settings = settings
        self._shows_values = shows_values
        self._sources = sources = settings.records.field_sources
        self._unmapped = SourceMapping({field: replace(source, values={}) for field, source in sources.items()})
        self._mapped = SourceMapping(sources)
        self._known_names = self._mapped.names
        self._mapped_names = {path for source in sources.values() for path in source.paths if not is_nested(path)}
        self._hidden_names: set[str] = set()
        self._similar: dict[str, str] = {}  # missing column -> column whose name differs only in case or blanks
        self._codec = Codec(settings.records, max_record_bytes=settings.input.max_record_bytes)
        self._room_bytes = max(1 << 20, settings.input.max_record_bytes + 1)
        self._latest = latest_timestamp(time.time(), settings.records.max_future_seconds)
        self._remedies: dict[str, Remedy] = {}
        self._examined = 0  # records whose values were examined
        self.findings = Findings()

    def add(self, name: str, chunks: Iterator[Chunk], *, lines_before: int = 0, file: Path | None = None) -> None:
        """
        Validate an input.

        Args:
            name: Identifies the input in the findings.
            file: The file to give advice about if most of its records cannot be parsed or lack the same fields.
        """
        findings = self.findings
        records_before, failed_before = findings.records, findings.failed
        unreadable: Counter[str] = Counter()
        head, is_csv = b"", False
        missing: Counter[str] = Counter()
        for chunk in chunks:
            self._check_header(name, chunk)
            head = head or chunk.data[:_HEAD_BYTES]
            is_csv = isinstance(chunk.stream.framing, CsvRows)
            rejected: set[int] = set()
            for encoded in self._codec.encode_all(chunk, room_bytes=self._room_bytes, latest=self._latest):
                span = encoded.span
                findings.records += span.read
                findings.duplicates += span.duplicates + encoded.waits
                accept_events(self._codec.window, span, range(encoded.events - encoded.waits))
                findings.failed += len(span.rejections)
                for rejection in span.rejections:
                    unreadable[rejection.rule] += rejection.rule in _UNREADABLE_RULES
                    rejected.add(rejection.start_offset)
                    faults = rejection.faults or {rejection.rule: rejection.message}
                    missing.update(rule for rule, message in faults.items() if message.endswith(IS_MISSING))
                    self._add_faults(name, rejection, faults, chunk, lines_before)
            self._examine(chunk, rejected)
            lines_before += chunk.data.count(b"\n") or 1
        findings.good = findings.records - findings.failed - findings.duplicates
        changes = self._codec.changes
        findings.normalized = _sort_counts(changes.normalized)
        unknown = {name: count for name, count in changes.unknown.items() if name not in self._hidden_names}
        findings.unknown_fields = _sort_counts(unknown)
        findings.unlisted = _sort_counts(changes.unlisted)
        for rule, remedy in self._remedies.items():
            findings.rules[rule].advice = remedy.lines()
        half = (findings.records - records_before) / 2
        advice = ""
        if unreadable.total() > half:
            advice = encoding_advice(head) if unreadable["encoding"] else describe_kind(head, is_csv=is_csv)
            if unreadable["encoding"]:
                findings.rules["encoding"].advice = [advice]
        elif findings.records - records_before == findings.failed - failed_before == 1:
            advice = _describe_array(head)
        if file is not None and advice in {CSV, ""}:
            lacking = [FIELD_OF_RULE[rule] for rule, count in missing.items() if rule in FIELD_OF_RULE and count > half]
            if len(lacking) > len(FIELDS) / 2 and (found := _TEXT.match(head)):
                advice = f"its records are texts in a field; write one per line: jq -r '.{found[1].decode()}'"
                lacking = []
            with suppress(SourceError):  # it was not read as CSV, and cannot be: its first row is no header
                advice = self._mapping_for(file, lacking, is_unknown_csv=advice == CSV) or advice
        if advice:
            findings.advice[name] = advice

    def _add_faults(
        self, name: str, rejection: Rejection, faults: Mapping[str, str], chunk: Chunk, lines_before: int
    ) -> None:
        values: dict[str, Any] | None = None
        for rule, message in faults.items():
            broken = self.findings.rules.setdefault(rule, BrokenRule())
            broken.count += 1
            if broken.count > _EXAMINED_MAX:
                continue
            if values is None:
                values = self._values_in(rejection.raw, chunk.stream.framing)
            if rule not in self._remedies:
                self._remedies[rule] = Remedy(rule, self._settings.records, shows_values=self._shows_values)
            self._remedies[rule].add(values)
            if broken.count <= _EXAMPLES_PER_RULE:
                line = lines_before + chunk.data.count(b"\n", 0, rejection.start_offset - chunk.start_offset) + 1
                field = FIELD_OF_RULE.get(rule, "")
                example = Example(name, line, rejection.start_offset, field, "absent" if field else "", message)
                if field in values:
                    self._show_value(example, values[field])
                broken.examples.append(example)

    def _values_in(self, raw: bytes, framing: Framing) -> dict[str, Any]:
        """Return a record's original values by field, before `values` and normalisation."""
        columns = self._unmapped.columns([read_document(raw, framing)])
        return {field: value for field, (value,) in zip(FIELDS, columns, strict=True) if value is not ABSENT}

    def _show_value(self, example: Example, value: object) -> None:
        example.shape = shape_of(value)
        if self._shows_values:
            example.value = repr(value)[:_SHAPE_CHARACTERS]
        source = self._sources.get(example.field)
        if source is not None and code_text(value) in source.values:
            example.becomes = repr(source.values[code_text(value)])

    def _examine(self, chunk: Chunk, rejected: Collection[int]) -> None:
        """Examine the values of good records, if they are among the first records."""
        records = documents_in(chunk) if self._examined < _EXAMINED_MAX else iter(())
        unlisted = {field for field, count in self._codec.changes.unlisted.items() if count > 0 and self._shows_values}
        for offset, document in islice(records, _EXAMINED_MAX - self._examined):
            self._examined += 1
            if offset in rejected:
                continue
            for field, (value,) in zip(FIELDS, self._mapped.columns([document]), strict=True):
                self._add_doubtful_text(field, value)
            for field, (value,) in zip(FIELDS, self._unmapped.columns([document]) if unlisted else (), strict=False):
                if field in unlisted:
                    self._add_unlisted_code(field, value)

    def _add_doubtful_text(self, field: str, value: object) -> None:
        """Count a text that may not be what was meant, by what is doubtful about it."""
        if isinstance(value, str) and (found := _DOUBTFUL.fullmatch(value)):
            counts = self.findings.doubtful.setdefault(field, {})
            mark = found[found.lastindex or 0]
            counts[mark] = counts.get(mark, 0) + 1

    def _add_unlisted_code(self, field: str, value: object) -> None:
        code = "" if value in EMPTY or isinstance(value, list | dict) else code_text(value)
        if code and code not in self._sources[field].values:
            codes = self.findings.unlisted_codes.setdefault(field, [])
            if code not in codes and len(codes) < _CODES_SHOWN:
                codes.append(code[:_SHAPE_CHARACTERS])

    def _check_header(self, name: str, chunk: Chunk) -> None:
        """Record missing columns; hide the column names if none is known, as the first row may be a record."""
        framing = chunk.stream.framing
        if not isinstance(framing, CsvRows):
            return
        if not self._known_names.intersection(framing.names):
            self._hidden_names.update(framing.names)
            if name not in self.findings.without_header:
                self.findings.without_header.append(name)
        elif missing := sorted(self._mapped_names.difference(framing.names)):
            self.findings.missing_columns[name] = missing
            folded = {column.strip().casefold(): column for column in framing.names}
            for column in missing:
                if similar := folded.get(column.strip().casefold()):
                    self._similar[column] = similar

    def _mapping_for(self, file: Path, lacking: Sequence[str], *, is_unknown_csv: bool) -> str:
        """Suggest a mapping for a file that looks like CSV, or most of whose records lack the same fields."""
        has_mapping = bool(self._settings.records.mapping)
        if is_unknown_csv:
            than = " than records.mapping has" if has_mapping else ""
            lead = f"it looks like CSV with other column names{than}; {_BEGINNING}"
            lines = suggest_mapping(file, self._settings)
        elif not lacking:
            return ""
        elif has_mapping:
            lead = f"{_LACKS}; add to [records.mapping]"
            lines = "\n".join(suggest_missing(file, self._settings, lacking))
        else:
            lead = f"{_LACKS}; {_BEGINNING}"
            lines = suggest_mapping(file, self._settings)
        return f"{lead}:\n\n{lines}\n" if lines else ""

    def text(self) -> str:
        findings = self.findings
        parts = [f"{several(findings.records, 'record')}: {findings.good:,} good"]
        if findings.duplicates:
            parts[0] += f", {findings.duplicates:,} repeat an EventId"
        if findings.failed:
            parts[0] += f", {findings.failed:,} break a rule"
        if findings.normalized:
            parts.append(f"normalized: {_format_counts(findings.normalized)}")
        if findings.unknown_fields:
            unknown = _format_counts(findings.unknown_fields)
            parts.append(f"unknown fields ({self._settings.records.unknown_fields}): {unknown}")
        for field, marks in findings.doubtful.items():
            parts.append(f"{field}: doubtful texts are sent unchanged, see docs/records.md: {_format_counts(marks)}")
        if findings.unlisted:
            counts = _format_counts(findings.unlisted)
            more = "" if self._shows_values else "; --show-values names them"
            parts.append(f"codes that `values` does not list, sent unchanged: {counts}{more}")
            for field, codes in findings.unlisted_codes.items():
                end = ", ..." if len(codes) == _CODES_SHOWN else ""
                parts.append(f"  {field}: {', '.join(printable(repr(code)) for code in codes)}{end}")
        question = "no column has a known name; is the first row a header?"
        parts += [f"{printable(name)}: {question}" for name in findings.without_header]
        for name, missing in findings.missing_columns.items():
            columns = [
                f"{column} (did you mean {self._similar[column]!r}?)" if column in self._similar else column
                for column in missing
            ]
            listed = printable(", ".join(columns))
            parts.append(f"{printable(name)}: records.mapping names columns that are missing: {listed}")
        parts += [f"\n{printable(name)}: {advice}" for name, advice in findings.advice.items()]
        # First what may cause the others.
        for rule, broken in sorted(findings.rules.items(), key=lambda item: (item[0] != "encoding", -item[1].count)):
            parts.append(f"\n{rule}: {broken.count:,}")
            parts += [_example_text(example) for example in broken.examples]
            if broken.count > len(broken.examples):
                parts.append(f"  ... and {broken.count - len(broken.examples):,} more")
            parts += [f"  {printable(line)}" for line in broken.advice]
        return "\n".join(parts)


def describe_kind(head: bytes, *, is_csv: bool) -> str:
    """Describe an input without records by its first bytes, and what to do; empty if its kind is unknown."""
    text = head.removeprefix(codecs.BOM_UTF8).lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html")):
        return "it is an HTML page, perhaps an error page, and contains no records"
    if text.startswith(b"<"):
        return "it is XML; records must be JSON, one object per line, or CSV"
    if wrapped := _describe_array(head):
        return wrapped
    line = text.partition(b"\n")[0].rstrip()
    if line.startswith(b"{") and line.endswith(b"},") and line.count(b"{") == line.count(b"}"):
        return "its lines end with commas; remove them: sed 's/,[[:space:]]*$//'"
    if b'{"' in line[1:] and not line.startswith((b"{", b"[")) and line.endswith(b"}"):
        return "its lines have text before the object; remove it: sed 's/^[^{]*//'"
    if text.startswith(b"{") and not line.endswith(b"}"):
        return f"its objects span several lines; write one per line: jq -c . ({_JQ})"
    if not is_csv and not text.startswith((b"{", b"[")):
        if b"\r" in line:
            return CR_LINES
        lines = text.split(b"\n")[:_TITLE_LINES]
        tables = [max(map(line.count, _DELIMITERS)) > 1 for line in lines]
        if any(tables):
            return CSV if tables[0] else "it looks like CSV; delete the lines before the header"
    return ""


def _describe_array(head: bytes) -> str:
    """Describe a file that is one object with an array of records by its first bytes; empty if it is not."""
    found = _ARRAY.match(head.removeprefix(codecs.BOM_UTF8).lstrip())
    return f"its records are in an array; write one per line: jq -c '.{found[1].decode()}[]' ({_JQ})" if found else ""


def shape_of(value: object) -> str:
    """Return the form of a value without revealing it: `aaaa_99`, `9-digit number`."""
    if isinstance(value, bool) or value is None:
        return "null" if value is None else "true or false"
    if isinstance(value, str):
        shape = re.sub(r"\d", "9", re.sub(r"[^\W\d_]", lambda letter: "A" if letter[0].isupper() else "a", value))
        return repr(shape if len(shape) <= _SHAPE_CHARACTERS else f"{shape[:_SHAPE_CHARACTERS]}...")
    if isinstance(value, int):
        return f"{len(str(abs(value)))}-digit number" if abs(value) < 10**100 else "number with many digits"
    kinds: dict[type, str] = {float: "number with a fraction", list: "array", dict: "object"}
    return kinds.get(type(value), type(value).__name__)


def _example_text(example: Example) -> str:
    shape = f"; it looks like {example.shape}" if example.shape not in {"", "absent"} else ""
    if example.value:
        shape = f"; it is {printable(example.value)}"
    if example.becomes:
        shape += f", which `values` translates to {printable(example.becomes)}"
    return f"  {printable(example.file)}:{example.line}: {example.message}{shape} (byte {example.offset})"


def _sort_counts(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])) if count}


def _format_counts(counts: Mapping[str, int]) -> str:
    listed = [f"{printable(name)} {count:,}" for name, count in list(counts.items())[:_NAMES_SHOWN]]
    more = len(counts) - len(listed)
    return ", ".join(listed) + (f" and {more:,} more" if more else "")


def chunks_of_file(path: Path, settings: Settings, known: Sequence[Stream] = ()) -> tuple[Iterator[Chunk], int, int]:
    """
    Read a file.

    Args:
        known: Known streams; if the file is one of them, reading begins at its checkpoint.
    Returns:
        The chunks, the offset of the first one, and the number of lines before it.
    Raises:
        SourceError: The file cannot be read.
    """
    reader = open_input(path, settings, known)

    def chunks() -> Iterator[Chunk]:
        with closing(reader):
            while chunk := reader.read(is_final=True):
                yield chunk

    read_before = (reader.content.pread(READ_BYTES, at) for at in range(0, reader.offset, READ_BYTES))
    lines = sum(data[: reader.offset - at * READ_BYTES].count(b"\n") for at, data in enumerate(read_before))
    return chunks(), reader.offset, lines

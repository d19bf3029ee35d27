"""`shipper validate`: the pipeline's own verdicts, with nothing sent and nothing saved."""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shipper.cli.common import ConfigOption, LogFormatOption, LogLevelOption, SetOption, prepare
from shipper.cli.ship import named_files
from shipper.config import Settings

if TYPE_CHECKING:
    from shipper.records import Chunk

_PIECE_LINES = 1000
_EXAMPLES_PER_RULE = 5


def validate(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...|-", help="Files, globs or folders; - for stdin.")],
    config: ConfigOption = None,
    overrides: SetOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """
    Check records as the pipeline would, without sending anything.

    Prints how many records break which rule, and the first of each with file, line and byte offset. Exits with 3 if
    any record fails.

    Example: shipper validate exports/*.ndjson
    """
    settings = prepare(config, overrides, log_level, log_format)
    check = _Check(settings)
    for path in paths:
        if path == "-":
            check.add("standard input", _chunks_of_pipe(sys.stdin.fileno(), settings.input.max_record_bytes))
        else:
            for file in named_files([path], settings):
                check.add(str(file), _chunks_of_file(file, settings.input.max_record_bytes))
    print(check.in_words())
    raise typer.Exit(3 if check.failed else 0)


class _Check:
    """Runs chunks through the codec and keeps the findings."""

    def __init__(self, settings: Settings) -> None:
        from shipper.codec import Codec, latest_timestamp

        self._codec = Codec(
            max_record_bytes=settings.input.max_record_bytes, dedupe_window=settings.records.dedupe_window
        )
        self._room_bytes = max(1 << 20, settings.input.max_record_bytes + 1)
        self._latest = latest_timestamp(time.time(), settings.records.max_future_seconds)
        self._examples: dict[str, list[str]] = {}
        self._by_rule: Counter[str] = Counter()
        self._records = 0
        self._duplicates = 0

    @property
    def failed(self) -> int:
        return self._by_rule.total()

    def add(self, name: str, chunks: Iterator[Chunk]) -> None:
        """Check one input; `name` stands in front of its findings."""
        lines_before = 0
        for chunk in chunks:
            offset = chunk.start_offset
            while offset < chunk.end_offset:
                encoded = self._codec.encode(
                    chunk, offset, room_events=_PIECE_LINES, room_bytes=self._room_bytes, latest=self._latest
                )
                assert encoded is not None, "a record alone always fits"
                span = encoded.span
                offset = span.end_offset
                self._records += span.records
                self._duplicates += span.duplicates
                for rejection in span.rejections:
                    self._by_rule[rejection.rule] += 1
                    examples = self._examples.setdefault(rejection.rule, [])
                    if len(examples) < _EXAMPLES_PER_RULE:
                        within = rejection.start_offset - chunk.start_offset
                        line = lines_before + chunk.data.count(b"\n", 0, within) + 1
                        examples.append(f"{name}:{line}: {rejection.message} (byte {rejection.start_offset})")
            lines_before += chunk.data.count(b"\n") or 1

    def in_words(self) -> str:
        """Write the findings for a person."""
        parts = [f"{self._records:,} records: {self._records - self.failed - self._duplicates:,} good"]
        if self._duplicates:
            parts[0] += f", {self._duplicates:,} repeat an EventId"
        if self.failed:
            parts[0] += f", {self.failed:,} break a rule"
        for rule, count in self._by_rule.most_common():
            parts.append(f"\n{rule}: {count:,}")
            parts += [f"  {example}" for example in self._examples[rule]]
            if count > _EXAMPLES_PER_RULE:
                parts.append(f"  ... and {count - _EXAMPLES_PER_RULE:,} more")
        return "\n".join(parts)


def _chunks_of_file(path: Path, max_record_bytes: int) -> Iterator[Chunk]:
    from shipper.sources.files import StreamBook

    reader = StreamBook((), lambda: 1, max_record_bytes=max_record_bytes).open(path)
    try:
        while chunk := reader.read(is_final=True):
            yield chunk
    finally:
        reader.close()


def _chunks_of_pipe(descriptor: int, max_record_bytes: int) -> Iterator[Chunk]:
    """Read what cannot be read twice; an endless line is cut to what tells that it is too long."""
    from shipper.records import Chunk, Stream
    from shipper.sources.reader import READ_BYTES

    stream = Stream(stream_id=1, kind="spool", path="-")
    offset = 0
    rest = b""
    while data := os.read(descriptor, READ_BYTES):
        data = rest + data
        end = data.rfind(b"\n") + 1
        rest = data[end:][: max_record_bytes + 1]
        if end:
            yield Chunk(stream=stream, start_offset=offset, end_offset=offset + end, data=data[:end])
            offset += end
    if rest:
        yield Chunk(stream=stream, start_offset=offset, end_offset=offset + len(rest), data=rest)

"""`shipper validate`: applies the pipeline's own rules; sends and saves nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from shipper.cli.common import (
    SettingsOptions,
    format_option,
    plain,
    prepare,
    print_json,
    reader_may_leave,
    with_settings_options,
)
from shipper.cli.findings import Check, chunks_of_file
from shipper.cli.ship import named_files
from shipper.config.settings import Settings

if TYPE_CHECKING:
    from shipper.model.records import Chunk


@with_settings_options
def validate(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...|-", help="Files, globs or folders; - for stdin.")],
    form: Annotated[Literal["text", "json"], format_option("text or json.")] = "text",
    show_values: Annotated[
        bool, typer.Option("--show-values", help="Show values that break a rule, and how to map codes.")
    ] = False,
    *,
    options: SettingsOptions,
) -> None:
    """
    Check records as the pipeline would, without sending anything.

    Prints how many records break which rule; of each the first five with file, line, byte offset and the form of the
    value, not the value itself; which setting mends them; what normalisation changed; which unknown fields there are;
    and a mapping to begin with, if the fields have other names. Exits with 3 if any record fails.

    Example: shipper validate exports/*.ndjson
    """
    settings = prepare(options)
    check = Check(settings, shows_values=show_values)
    for path in paths:
        if path == "-":
            check.add("standard input", _chunks_of_pipe(sys.stdin.fileno(), settings))
        else:
            from shipper.model.records import shown

            for file in named_files([path], settings):
                check.add(shown(file), chunks_of_file(file, settings)[0])
                check.look_at(file, settings)
    with reader_may_leave():
        if form == "json":
            print_json(msgspec.json.encode(check.findings))
        else:
            print(plain(check.in_words()), flush=True)
    raise typer.Exit(3 if check.findings.failed else 0)


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

"""`shipper validate`: applies the pipeline's rules without sending or saving anything."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from shipper.cli.commands import flag
from shipper.cli.common import SettingsOptions, format_option, plain, prepare, print_json, tolerate_closed_stdout
from shipper.cli.ship import expand_paths
from shipper.config.settings import Settings

if TYPE_CHECKING:
    from shipper.model.records import Chunk


def validate(
    paths: Annotated[list[str], typer.Argument(metavar="PATH...|-", help="Files, globs or folders; - for stdin.")],
    form: Annotated[Literal["text", "json"], format_option("text or json.")] = "text",
    show_values: Annotated[bool, flag("Show invalid values, and how to map codes.", "--show-values")] = False,
    *,
    options: SettingsOptions,
) -> None:
    """
    Validate records as the pipeline would, without sending anything.

    Prints how many records break each rule, the first five of them with file, line, byte offset and the form of the
    value (not the value itself), and which setting fixes them; what normalisation changed; unknown fields; and a
    suggested mapping, if the fields have other names. Exits with 3 if any record fails.

    Example: shipper validate exports/*.ndjson
    """
    from shipper.cli.findings import Validation, chunks_of_file
    from shipper.model.records import shown

    settings = prepare(options)
    validation = Validation(settings, shows_values=show_values)
    for path in paths:
        if path == "-":
            validation.add("standard input", _chunks_of_pipe(sys.stdin.fileno(), settings))
        else:
            for file in expand_paths([path], settings):
                validation.add(shown(file.path), chunks_of_file(file.path, settings)[0], file=file.path)
    with tolerate_closed_stdout():
        if form == "json":
            print_json(msgspec.json.encode(validation.findings))
        else:
            print(plain(validation.text()), flush=True)
    raise typer.Exit(3 if validation.findings.failed else 0)


def _chunks_of_pipe(descriptor: int, settings: Settings) -> Iterator[Chunk]:
    from shipper.model.framing import csv_rows
    from shipper.model.records import Chunk, Stream
    from shipper.sources.reader import READ_BYTES, input_form
    from shipper.sources.stdin import SpoolFramer

    framer = SpoolFramer(input_form(settings), max_record_bytes=settings.input.max_record_bytes)
    stream = Stream(stream_id=1, kind="spool", path="-")
    offset = 0
    rest = b""
    is_final = False
    while not is_final:
        received = os.read(descriptor, READ_BYTES)
        is_final = not received
        data = rest + framer.take(received, is_final=is_final)
        if framer.header and not offset:
            stream.framing = csv_rows(framer.header, is_whole=True, delimiter=framer.delimiter) or stream.framing
            data = framer.header + data
        open_bytes = framer.open_bytes if framer.header else len(data) - data.rfind(b"\n") - 1
        end = len(data) - (0 if is_final else open_bytes)
        rest = data[end:]
        if end:
            yield Chunk(stream=stream, start_offset=offset, end_offset=offset + end, data=data[:end])
            offset += end

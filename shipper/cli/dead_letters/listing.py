"""`shipper dead-letters list|show|export`: refused records as a table, in full, and in their original form."""

from __future__ import annotations

import sys
from typing import Annotated, Literal

import msgspec
import typer

from shipper.cli.commands import option
from shipper.cli.common import (
    OutputOption,
    SettingsOptions,
    format_option,
    in_columns,
    plain,
    prepare,
    print_json,
    readable_state,
    say,
    several,
    tolerate_closed_stdout,
)
from shipper.cli.dead_letters.selection import (
    OVERSIZED,
    Filters,
    empty_message,
    format_counts,
    letters_in,
    unknown_ids,
    warn_about_truncated,
)
from shipper.cli.writing import check_target, open_target
from shipper.model.printable import printable
from shipper.model.units import iso
from shipper.state.letters import EVERYTHING, Content, DeadLetter


def show_list(
    filters: Filters,
    limit: Annotated[int, option("N", "Show at most N.", "--limit", "-n", min=1)] = 20,
    form: Annotated[
        Literal["text", "json"], format_option("text, or json: one object per line, without the record.")
    ] = "text",
    *,
    options: SettingsOptions,
) -> None:
    """
    List dead letters, newest first, and count all matches by reason. Works while a shipper runs.

    Example: shipper dead-letters list --reason ip --since 2026-11-01
    """
    selection = filters.selection()
    settings = readable_state(prepare(options))
    with letters_in(settings) as letters:
        counts = letters.count_by_rule(selection)
        newest = letters.newest(selection, limit)
        reasons = letters.count_by_rule()
    with tolerate_closed_stdout():
        if form == "json":
            for letter in newest:
                print_json(msgspec.json.encode(_document(letter)))
        elif counts:
            print(_table(newest))
            count = sum(counts.values())
            shown = f"{len(newest):,} of " if len(newest) < count else ""
            print(f"\n{shown}{several(count, 'dead letter')}: {format_counts(counts)}")
        else:
            print(empty_message(selection, reasons))
        sys.stdout.flush()


def show(
    ids: Annotated[list[int], typer.Argument(metavar="ID...", help="IDs, as shown by `dead-letters list`.")],
    form: Annotated[Literal["text", "json"], format_option("text, or json: one object per line.")] = "text",
    *,
    options: SettingsOptions,
) -> None:
    """
    Show everything about dead letters, with the record as it was read. It contains personal data.

    Example: shipper dead-letters show 17
    """
    settings = readable_state(prepare(options))
    missing = []
    with letters_in(settings) as letters, tolerate_closed_stdout():
        for letter_id in ids:
            letter, content = letters.get(letter_id), letters.content(letter_id)
            if letter is None or content is None:
                missing.append(letter_id)
            elif form == "json":
                print_json(msgspec.json.encode(_document(letter, content)))
            else:
                print(_details(letter, content))
        sys.stdout.flush()
        if missing:
            raise unknown_ids(missing, letters.ids(EVERYTHING))


def export(filters: Filters, output: OutputOption = "", *, options: SettingsOptions) -> None:
    """
    Write the records as they were read, one per line, oldest first; CSV rows with their header. Works while a shipper
    runs.

    Example: shipper dead-letters export --reason ip -o ip.ndjson
    """
    selection = filters.selection()
    whole = msgspec.structs.replace(selection, is_whole=True)
    target = check_target(output)
    with letters_in(readable_state(prepare(options))) as letters:
        if not letters.count_by_rule():
            say(empty_message(selection))
        header = _common_header(letters.headers(whole))
        with open_target(target) as out:
            out.write(header)
            for letter_id in letters.ids(whole):
                content = letters.content(letter_id)
                if content is not None:
                    # Quoted CSV fields may contain newlines; JSON records only if they are malformed.
                    record = content.raw if header else content.raw.replace(b"\n", b" ")
                    out.write(record + b"\n")
        warn_about_truncated(letters, selection)


def _common_header(headers: dict[bytes, str]) -> bytes:
    """
    Return the header for records written to one file; empty for JSON.

    Raises:
        typer.BadParameter: The records have different headers.
    """
    if len(headers) > 1:
        inputs = ", ".join(map(printable, headers.values()))
        raise typer.BadParameter(
            f"these records have {len(headers)} forms (JSON lines, or CSV with different headers), which cannot be in "
            f"one file; choose inputs with --path, such as one of {inputs}"
        )
    header = next(iter(headers), b"")
    return header if not header or header.endswith(b"\n") else header + b"\n"


def _document(letter: DeadLetter, content: Content | None = None) -> dict[str, object]:
    """Return a letter as a JSON document; unlike in `export`, bytes that are not UTF-8 are escaped."""
    document = msgspec.structs.asdict(letter) | {"first_at": iso(letter.first_at), "last_at": iso(letter.last_at)}
    if content is not None:
        header, record = map(_text, content)
        document |= {"header": header, "record": record or None}
    return document


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _table(letters: list[DeadLetter]) -> str:
    rows = [["id", "time", "rule", "file:offset", "EventId", "message"]]
    for letter in letters:
        position = f"{letter.path}:{letter.start_offset}"
        row = [str(letter.id), iso(letter.first_at), letter.rule, position, letter.event_id or "-", letter.message]
        rows.append([printable(cell) for cell in row])
    return in_columns(rows)


def _details(letter: DeadLetter, content: Content) -> str:
    position = f"bytes {letter.start_offset} to {letter.end_offset}, stream {letter.stream_id}"
    size = several(len(content.raw), "byte")
    if letter.whole_bytes:
        size = f"truncated: the first {len(content.raw):,} of {letter.whole_bytes:,} bytes; it cannot be sent"
    fields = {
        "reason": f"{letter.rule}: {letter.message}",
        "delivery": f"{letter.delivery}, HTTP status {letter.status}" if letter.status else letter.delivery,
        "attempts": str(letter.attempts),
        "first refused": iso(letter.first_at),
        "last refused": iso(letter.last_at),
        "input": f"{printable(letter.path)}, {position}",
        "EventId": letter.event_id or "unknown",
        "ConsumerID": letter.consumer_id or "unknown",
        "header": _text(content.header),
        "record": size,
    }
    lines = [f"dead letter {letter.id}"]
    for name, value in fields.items():
        if value:  # indent further lines, so that none looks like a field
            lines.append(f"  {name + ':':<14} {plain(value)}".replace("\n", f"\n{'':17}"))
    record = plain(_text(content.raw)) or f"({letter.message})"
    if letter.rule == OVERSIZED and not content.raw:
        record = "(not stored: the record is too long; its position is above)"
    return "\n".join([*lines, record, ""])

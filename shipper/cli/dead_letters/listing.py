"""`shipper dead-letters list|show|export`: refused records as a table, in full, and in their original form."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

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
    several,
    state_on_disk,
    tolerate_closed_stdout,
)
from shipper.cli.dead_letters.selection import (
    OVERSIZED,
    Filters,
    empty_message,
    find_letters,
    format_counts,
    letter_name,
    letters_in,
    report_empty,
    unknown_ids,
    warn_about_truncated,
)
from shipper.cli.writing import check_target, open_target
from shipper.model.printable import printable
from shipper.model.units import iso
from shipper.state.letters import EVERYTHING, Content, DeadLetter

if TYPE_CHECKING:
    from shipper.kafka.view import KeyAndHeaders


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
    List dead letters, newest first, and count all matches by reason. Can be used while shipper is running.

    Example: shipper dead-letters list --reason ip --since 2026-11-01
    """
    selection = filters.selection()
    settings = prepare(options)
    is_group = settings.input.kafka is not None
    with letters_in(readable_state(settings)) as letters:
        counts = letters.count_by_rule(selection)
        newest = letters.newest(selection, limit)
        reasons = letters.count_by_rule()
    with tolerate_closed_stdout():
        if form == "json":
            for letter in newest:
                print_json(msgspec.json.encode(_document(letter, is_group=is_group)))
        elif counts:
            print(_table(newest, is_group=is_group))
            count = sum(counts.values())
            shown = f"{len(newest):,} of " if len(newest) < count else ""
            print(f"\n{shown}{several(count, 'dead letter')}: {format_counts(counts)}")
        else:
            print(empty_message(selection, reasons))
        sys.stdout.flush()


def show(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="IDs, as shown by `dead-letters list`.")],
    form: Annotated[Literal["text", "json"], format_option("text, or json: one object per line.")] = "text",
    *,
    options: SettingsOptions,
) -> None:
    """
    Show everything about dead letters, with the record as it was read. It contains personal data.

    Example: shipper dead-letters show 17
    """
    with state_on_disk(prepare(options)) as (settings, view), letters_in(settings) as letters, tolerate_closed_stdout():
        found, missing = find_letters(letters, ids, is_group=view is not None)
        for letter_id in found:
            letter, content = letters.get(letter_id), letters.content(letter_id)
            if letter is None or content is None:  # deleted since
                continue
            message = None if view is None else view.message_of(letter_id)
            if form == "json":
                print_json(msgspec.json.encode(_document(letter, content, message, is_group=view is not None)))
            else:
                print(_details(letter, content, message))
        sys.stdout.flush()
        if missing:
            raise unknown_ids(missing, letters.ids(EVERYTHING))


def export(
    filters: Filters,
    like: Annotated[int | None, option("ID", "Only those with the same CSV header as this one.", min=1)] = None,
    output: OutputOption = "",
    *,
    options: SettingsOptions,
) -> None:
    """
    Write the records as they were read, one per line, oldest first; CSV rows with their header. Can be used while
    shipper is running.

    Example: shipper dead-letters export --reason ip -o ip.ndjson
    """
    selection = msgspec.structs.replace(filters.selection(), like=like)
    whole = msgspec.structs.replace(selection, is_whole=True)
    target = check_target(output)
    with letters_in(readable_state(prepare(options))) as letters:
        report_empty(letters, selection)
        header = _common_header(letters.headers(whole))
        with open_target(target) as out:
            out.write(header)
            for content in letters.contents(whole):
                # Quoted CSV fields may contain newlines; JSON records only if they are malformed.
                record = content.raw if header else content.raw.replace(b"\n", b" ")
                out.write(record + b"\n")
        warn_about_truncated(letters, selection)


def _common_header(headers: Sequence[tuple[bytes, int, str]]) -> bytes:
    """Return the header for records in one file, empty for JSON; raise `BadParameter` if they have several."""
    if len(headers) > 1:
        choices = ", ".join(f"--like {letter_id} ({printable(path)})" for _, letter_id, path in headers)
        raise typer.BadParameter(
            f"these records have {len(headers)} forms (JSON lines, or CSV with different headers), which cannot be in "
            f"one file; choose one: {choices}"
        )
    header = headers[0][0] if headers else b""
    return header if not header or header.endswith(b"\n") else header + b"\n"


def _document(
    letter: DeadLetter, content: Content | None = None, message: KeyAndHeaders | None = None, *, is_group: bool
) -> dict[str, object]:
    """Return a letter as a JSON document; unlike in `export`, bytes that are not UTF-8 are escaped."""
    document = msgspec.structs.asdict(letter) | {"id": letter_name(letter, is_group=is_group)}
    document |= {"first_at": iso(letter.first_at), "last_at": iso(letter.last_at)}
    if message is not None:
        key, headers = message
        document |= {"key": key and _text(key), "headers": [(name, value and _text(value)) for name, value in headers]}
    if content is not None:
        header, record = map(_text, content)
        document |= {"header": header, "record": record or None}
    return document


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _table(letters: list[DeadLetter], *, is_group: bool) -> str:
    position = [] if is_group else ["file:offset"]  # that of a message is its ID
    rows = [["id", "time", "rule", *position, "EventId", "message"]]
    for letter in letters:
        row = [str(letter_name(letter, is_group=is_group)), iso(letter.first_at), letter.rule]
        row += [] if is_group else [f"{letter.path}:{letter.start_offset}"]
        rows.append([printable(cell) for cell in (*row, letter.event_id or "-", letter.message)])
    return in_columns(rows)


def _details(letter: DeadLetter, content: Content, message: KeyAndHeaders | None) -> str:
    is_group = message is not None
    position = f"bytes {letter.start_offset} to {letter.end_offset}, stream {letter.stream_id}"
    key, headers = message or (None, ())
    size = several(len(content.raw), "byte")
    if letter.whole_bytes:
        size = f"truncated: the first {len(content.raw):,} of {letter.whole_bytes:,} bytes; it cannot be sent"
    fields = {
        "reason": f"{letter.rule}: {letter.message}",
        "delivery": f"{letter.delivery}, HTTP status {letter.status}" if letter.status else letter.delivery,
        "attempts": str(letter.attempts),
        "first refused": iso(letter.first_at),
        "last refused": iso(letter.last_at),
        "input": f"{printable(letter.path)}, {f'offset {letter.start_offset}' if is_group else position}",
        "key": "" if key is None else _text(key),
        "headers": "\n".join(f"{name}: {'' if value is None else _text(value)}" for name, value in headers),
        "EventId": letter.event_id or "unknown",
        "ConsumerID": letter.consumer_id or "unknown",
        "header": _text(content.header),
        "record": size,
    }
    lines = [f"dead letter {printable(str(letter_name(letter, is_group=is_group)))}"]
    for name, value in fields.items():
        if value:  # indent further lines, so that none looks like a field
            lines.append(f"  {name + ':':<14} {plain(value)}".replace("\n", f"\n{'':17}"))
    record = plain(_text(content.raw)) or f"({letter.message})"
    if letter.rule == OVERSIZED and not content.raw:
        record = "(not stored: the record is too long; its position is above)"
    return "\n".join([*lines, record, ""])

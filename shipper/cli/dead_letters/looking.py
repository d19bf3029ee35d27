"""`shipper dead-letters list|show|export`: refused records as a table, in full, and as they were read."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
import typer

from shipper.cli.common import (
    OutputOption,
    SettingsOptions,
    format_option,
    in_columns,
    plain,
    prepare,
    print_json,
    readable_state,
    reader_may_leave,
    say,
    several,
    with_settings_options,
)
from shipper.cli.dead_letters.selecting import (
    DeliveryOption,
    PathOption,
    ReasonOption,
    SinceOption,
    by_rule,
    no_such_letters,
    none_found,
    opened,
    selection_of,
    warn_of_cut_letters,
)
from shipper.cli.writing import checked_target, opened_target
from shipper.model.printable import printable
from shipper.model.units import iso

if TYPE_CHECKING:
    from shipper.state.letters import Content, DeadLetter


@with_settings_options
def show_list(
    reason: ReasonOption = "",
    since: SinceOption = "",
    path: PathOption = "",
    delivery: DeliveryOption = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, metavar="N", help="Show at most N.")] = 20,
    form: Annotated[
        Literal["text", "json"],
        format_option("text, or json: one object per line, without the record."),
    ] = "text",
    *,
    options: SettingsOptions,
) -> None:
    """
    List the dead letters, newest first, and count all that match by reason. Works while a shipper runs.

    Example: shipper dead-letters list --reason ip --since 2026-11-01
    """
    selection = selection_of(reason, since, path, delivery)
    settings = readable_state(prepare(options))
    with opened(settings) as letters:
        counts = letters.count_by_rule(selection) if letters else {}
        found = letters.newest(selection, limit) if letters else []
        reasons = letters.count_by_rule(selection_of()) if letters and not found else {}
    with reader_may_leave():
        if form == "json":
            for letter in found:
                print_json(msgspec.json.encode(_document(letter)))
        elif counts:
            print(_table(found))
            count = sum(counts.values())
            of = f"{len(found):,} of " if len(found) < count else ""
            print(f"\n{of}{several(count, 'dead letter')}: {by_rule(counts)}")
        else:
            print(none_found(selection, reasons))
        sys.stdout.flush()


@with_settings_options
def show(
    ids: Annotated[list[int], typer.Argument(metavar="ID...", help="As `dead-letters list` shows them.")],
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
    known: Sequence[int] = ()
    with opened(settings) as letters, reader_may_leave():
        for letter_id in ids:
            letter = letters.get(letter_id) if letters else None
            content = letters.content(letter_id) if letters else None
            if letter is None or content is None:
                missing.append(letter_id)
            elif form == "json":
                print_json(msgspec.json.encode(_document(letter) | _content_document(content)))
            else:
                print(_in_full(letter, *content))
        sys.stdout.flush()
        known = letters.ids(selection_of()) if letters and missing else ()
    if missing:
        raise no_such_letters(missing, known)


@with_settings_options
def export(
    reason: ReasonOption = "",
    since: SinceOption = "",
    path: PathOption = "",
    delivery: DeliveryOption = None,
    output: OutputOption = "",
    *,
    options: SettingsOptions,
) -> None:
    """
    Write the records as they were read, one per line, oldest first; CSV rows with their header. Works while a shipper
    runs.

    Example: shipper dead-letters export --reason ip -o ip.ndjson
    """
    selection = selection_of(reason, since, path, delivery)
    whole = msgspec.structs.replace(selection, is_whole=True)
    target = checked_target(output)
    settings = readable_state(prepare(options))
    with opened(settings) as letters:
        if letters is None:
            say(none_found(selection))
            return
        header = _common_header(letters.forms(whole))
        with opened_target(target) as out:
            out.write(header)
            for letter_id in letters.ids(whole):
                content = letters.content(letter_id)
                if content is not None:
                    # Within quotes, CSV may have newlines; of JSON, only what is broken.
                    record = content.raw if header else content.raw.replace(b"\n", b" ")
                    out.write(record + b"\n")
        warn_of_cut_letters(letters, selection)


def _common_header(forms: dict[bytes, str]) -> bytes:
    """
    Return the header for records that are written to one file; empty for JSON.

    Raises:
        typer.BadParameter: They have several forms.
    """
    if len(forms) > 1:
        inputs = ", ".join(map(printable, forms.values()))
        raise typer.BadParameter(
            f"these records have {len(forms)} forms (JSON lines, or CSV with different headers), which cannot stand in "
            f"one file; choose inputs with --path, such as one of {inputs}"
        )
    header = next(iter(forms), b"")
    return header if not header or header.endswith(b"\n") else header + b"\n"


def _document(letter: DeadLetter) -> dict[str, object]:
    fields = msgspec.structs.asdict(letter)
    return fields | {"first_at": iso(letter.first_at), "last_at": iso(letter.last_at)}


def _content_document(content: Content) -> dict[str, object]:
    """Write the bytes of a letter as text; what is not UTF-8 is escaped, and `export` writes it as it came."""
    header, raw = (part.decode("utf-8", "backslashreplace") for part in content)
    return {"header": header, "record": raw or None}


def _table(letters: list[DeadLetter]) -> str:
    rows = [("id", "time", "rule", "file:offset", "EventId", "message")]
    rows += [
        (
            str(letter.id),
            iso(letter.first_at),
            letter.rule,
            f"{letter.path}:{letter.start_offset}",
            letter.event_id or "-",
            letter.message,
        )
        for letter in letters
    ]
    return in_columns([tuple(map(printable, row)) for row in rows])


def _indented(value: str) -> str:
    """Indent the further lines of a value, so that none looks like a line of ours."""
    return plain(value).replace("\n", f"\n{'':17}")


def _in_full(letter: DeadLetter, header: bytes, raw: bytes) -> str:
    facts = {
        "reason": f"{letter.rule}: {letter.message}",
        "delivery": f"{letter.delivery}, HTTP status {letter.status}" if letter.status else letter.delivery,
        "attempts": str(letter.attempts),
        "first refused": iso(letter.first_at),
        "last refused": iso(letter.last_at),
        "input": f"{printable(letter.path)}, "
        f"bytes {letter.start_offset} to {letter.end_offset}, stream {letter.stream_id}",
        "EventId": letter.event_id or "unknown",
        "ConsumerID": letter.consumer_id or "unknown",
    }
    if header:
        facts["header"] = _text(header)
    lines = [f"dead letter {letter.id}", *(f"  {name + ':':<14} {_indented(value)}" for name, value in facts.items())]
    record = _text(raw) if raw else "(not kept: it was too long to be read; its position is above)"
    size = several(len(raw), "byte")
    if letter.whole_bytes:
        size = f"cut: its first {len(raw):,} of {letter.whole_bytes:,} bytes; it cannot be sent"
    return "\n".join([*lines, f"  {'record:':<14} {size}", record, ""])


def _text(data: bytes) -> str:
    return plain(data.decode("utf-8", "backslashreplace"))

"""`shipper dead-letters list|show|export|replay|purge`: what becomes of the records that were refused."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import msgspec
import typer

from shipper.cli.common import (
    ConfigOption,
    LogFormatOption,
    LogLevelOption,
    RateOption,
    SetOption,
    on_one_line,
    plain,
    prepare,
    reader_may_leave,
    say,
)
from shipper.cli.ship import SummaryOption, checked_form, ship
from shipper.config import Settings
from shipper.errors import StateInUseError
from shipper.records import DeliveryClass

if TYPE_CHECKING:
    from shipper.pipeline import Source
    from shipper.pipeline.opening import OpenState
    from shipper.state.letters import DeadLetter, Letters, Selection

ReasonOption = Annotated[str, typer.Option("--reason", metavar="RULE", help="Only those that broke this rule.")]
SinceOption = Annotated[
    str, typer.Option("--since", metavar="TIME", help="Only those refused since an ISO date or date-time, UTC.")
]
PathOption = Annotated[str, typer.Option("--path", metavar="GLOB", help="Only those from inputs like this.")]
DeliveryOption = Annotated[
    str,
    typer.Option(
        "--delivery",
        metavar="CLASS",
        help="invalid (refused here), rejected (by the service) or ambiguous (rejected, but may have been accepted).",
    ),
]

_DAY_S = 86_400.0
_PIECE_LINES = 1000
_EXAMPLES_PER_RULE = 5


def show_list(
    reason: ReasonOption = "",
    since: SinceOption = "",
    path: PathOption = "",
    delivery: DeliveryOption = "",
    limit: Annotated[int, typer.Option("--limit", min=1, metavar="N", help="How many to show at most.")] = 20,
    form: Annotated[
        str, typer.Option("--format", metavar="FORM", help="text, or json: one object a line, without the record.")
    ] = "text",
    config: ConfigOption = None,
    overrides: SetOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """
    List the dead letters, newest first, and count all that match by reason. Works while a shipper runs.

    Example: shipper dead-letters list --reason ip --since 2026-11-01
    """
    if form not in {"text", "json"}:
        raise typer.BadParameter(f"{form!r} is not a format; there are: text, json")
    selection = _selection(reason, since, path, delivery)
    settings = prepare(config, overrides, log_level, log_format)
    with _opened(settings) as letters:
        counts = letters.count_by_rule(selection) if letters else {}
        found = letters.newest(selection, limit) if letters else []
    with reader_may_leave():
        if form == "json":
            for letter in found:
                print(msgspec.json.encode(_document(letter)).decode())
        elif counts:
            print(_table(found))
            print(f"\n{len(found):,} of {sum(counts.values()):,} dead letters: {_by_rule(counts)}")
        else:
            print(_none(selection))
        sys.stdout.flush()


def show(
    ids: Annotated[list[int], typer.Argument(metavar="ID...", help="As `dead-letters list` shows them.")],
    config: ConfigOption = None,
    overrides: SetOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """
    Show all that is known of dead letters, with the record as it came. That holds personal data.

    Example: shipper dead-letters show 17
    """
    settings = prepare(config, overrides, log_level, log_format)
    missing = []
    with _opened(settings) as letters, reader_may_leave():
        for letter_id in ids:
            letter = letters.get(letter_id) if letters else None
            content = letters.content(letter_id) if letters else None
            if letter is None or content is None:
                missing.append(str(letter_id))
            else:
                print(_in_full(letter, *content))
        sys.stdout.flush()
    if missing:
        raise typer.BadParameter(f"no dead letter {', '.join(missing)}; there are: shipper dead-letters list")


def export(
    reason: ReasonOption = "",
    since: SinceOption = "",
    path: PathOption = "",
    delivery: DeliveryOption = "",
    config: ConfigOption = None,
    overrides: SetOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """
    Write the records to standard output as they came, one a line, oldest first; rows of CSV behind their header. Works
    while a shipper runs.

    Example: shipper dead-letters export --reason ip > ip.ndjson
    """
    selection = _selection(reason, since, path, delivery)
    whole = msgspec.structs.replace(selection, has_raw=True)
    settings = prepare(config, overrides, log_level, log_format)
    with _opened(settings) as letters:
        if letters is None:
            say(_none(selection))
            return
        header = _common_header(letters.forms(whole))
        with reader_may_leave():
            sys.stdout.buffer.write(header)
            for letter_id in letters.ids(whole):
                content = letters.content(letter_id)
                if content is not None:
                    # Within quotes, CSV may have newlines; of JSON, only what is broken.
                    record = content.raw if header else content.raw.replace(b"\n", b" ")
                    sys.stdout.buffer.write(record + b"\n")
            sys.stdout.buffer.flush()
        _tell_position_only(letters, selection)


def _common_header(forms: dict[bytes, str]) -> bytes:
    """
    Tell what has to stand in front of records that are to be one file; empty for JSON.

    Raises:
        typer.BadParameter: They have several forms.
    """
    if len(forms) > 1:
        inputs = ", ".join(map(on_one_line, forms.values()))
        raise typer.BadParameter(
            f"these records have {len(forms)} forms (JSON lines, or CSV with different headers), which cannot stand in "
            f"one file; choose inputs with --path, such as one of {inputs}"
        )
    header = next(iter(forms), b"")
    return header if not header or header.endswith(b"\n") else header + b"\n"


def replay(
    reason: ReasonOption = "",
    since: SinceOption = "",
    path: PathOption = "",
    delivery: DeliveryOption = "",
    limit: Annotated[int | None, typer.Option("--limit", min=1, metavar="N", help="How many to send at most.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Tell what would be sent and what would fail.")] = False,
    summary: SummaryOption = "text",
    rate: RateOption = None,
    config: ConfigOption = None,
    overrides: SetOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """
    Send dead letters once more, oldest first, by the settings of now; what is accepted is no dead letter any more.

    What fails again stays, with its new reason. Run again, also after a crash, it goes on with those that are left.

    Example: shipper dead-letters replay --reason ip --set 'records.relax=["ip"]'
    """
    form = checked_form(summary)
    if dry_run and form == "json":
        raise typer.BadParameter("--dry-run sends nothing that a summary could tell of; leave out --summary json")
    selection = _selection(reason, since, path, delivery)
    settings = prepare(config, overrides, log_level, log_format, needs=None if dry_run else "intake", rate=rate)
    if dry_run:
        raise typer.Exit(_rehearse(settings, selection, limit))
    from shipper.state.directory import holder_of

    try:
        code = ship("dead-letters replay", settings, _replayed(settings, selection, limit), is_one_shot=True, form=form)
    except StateInUseError as error:
        raise StateInUseError(
            f"{settings.state.directory} is in use by the shipper whose dead letters they are (process "
            f"{holder_of(settings.state.directory)}); stop it, replay, and start it again. Nothing is lost meanwhile"
        ) from error
    with _opened(settings) as letters:
        has_position_only = letters is not None and _tell_position_only(letters, selection)
    raise typer.Exit(code or (3 if has_position_only else 0))


def purge(
    reason: ReasonOption = "",
    since: SinceOption = "",
    path: PathOption = "",
    delivery: DeliveryOption = "",
    older_than: Annotated[
        float | None, typer.Option("--older-than", min=0, metavar="DAYS", help="Only those refused before that.")
    ] = None,
    consumer_id: Annotated[
        str | None,
        typer.Option("--consumer-id", metavar="ID", help="Erase this consumer, in the spool, too."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    config: ConfigOption = None,
    overrides: SetOption = None,
    log_level: LogLevelOption = None,
    log_format: LogFormatOption = None,
) -> None:
    """
    Delete dead letters for good. They stay counted. Works while a shipper runs, except for --consumer-id.

    Example: shipper dead-letters purge --older-than 90
    """
    selection = _selection(reason, since, path, delivery, older_than)
    has_filter = selection != _selection()
    if consumer_id is not None:
        if has_filter or everything:
            raise typer.BadParameter("--consumer-id erases all that is kept of a consumer, so it goes with no filter")
        consumer_id = _checked_number(consumer_id)
    elif not has_filter and not everything:
        raise typer.BadParameter("name which ones, such as --older-than 90, or say --all")
    elif has_filter and everything:
        raise typer.BadParameter("--all goes with no filter; leave out one of them")
    settings = prepare(config, overrides, log_level, log_format)
    if consumer_id is not None:
        _erase(settings.state.directory, consumer_id, yes=yes)
    else:
        _purge(settings, selection, yes=yes)


# Which ones ---------------------------------------------------------------------------------------------------------


def _selection(
    reason: str = "", since: str = "", path: str = "", delivery: str = "", older_than: float | None = None
) -> Selection:
    from shipper.state.letters import Selection

    if delivery and delivery not in get_args(DeliveryClass):
        raise typer.BadParameter(f"{delivery!r} is not a class; there are: {', '.join(get_args(DeliveryClass))}")
    return Selection(
        rule=reason,
        since_s=_seconds(since) if since else None,
        before_s=None if older_than is None else time.time() - older_than * _DAY_S,
        path=path,
        delivery=delivery,
    )


def _seconds(text: str) -> float:
    """Read a date or date-time; what names no zone is UTC."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no time, such as 2026-11-01 or 2026-11-01T12:30:00Z") from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _checked_number(text: str) -> str:
    if not (text.isascii() and text.isdecimal() and len(text) <= 40):
        raise typer.BadParameter(f"{text!r} is no ConsumerID, which is a whole number")
    return str(int(text))


@contextmanager
def _opened(settings: Settings) -> Iterator[Letters | None]:
    """Look at the dead letters; None if there is no state yet."""
    from shipper.state.letters import open_letters
    from shipper.state.store import bring_state_up_to_date

    directory = settings.state.directory
    letters = open_letters(directory)
    if letters is None and (directory / "state.db").exists():
        bring_state_up_to_date(directory)
        letters = open_letters(directory)
    try:
        yield letters
    finally:
        if letters is not None:
            letters.close()


# In words -----------------------------------------------------------------------------------------------------------


def _none(selection: Selection) -> str:
    return "no dead letters" if selection == _selection() else "no dead letters match"


def _by_rule(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{rule} {count:,}" for rule, count in counts.items())


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _document(letter: DeadLetter) -> dict[str, object]:
    fields = msgspec.structs.asdict(letter)
    return fields | {"first_at": _iso(letter.first_at), "last_at": _iso(letter.last_at)}


def _table(letters: list[DeadLetter]) -> str:
    """Lay out columns; the last one, the message, is as long as it is."""
    rows: list[tuple[str, ...]] = [("id", "time", "rule", "file:offset", "EventId", "message")]
    rows += [
        (
            str(letter.id),
            _iso(letter.first_at),
            letter.rule,
            f"{letter.path}:{letter.start_offset}",
            letter.event_id or "-",
            letter.message,
        )
        for letter in letters
    ]
    rows = [tuple(map(on_one_line, row)) for row in rows]
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return "\n".join(
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    )


def _in_full(letter: DeadLetter, header: bytes, raw: bytes) -> str:
    facts = {
        "reason": f"{letter.rule}: {letter.message}",
        "delivery": f"{letter.delivery}, HTTP status {letter.status}" if letter.status else letter.delivery,
        "attempts": str(letter.attempts),
        "first refused": _iso(letter.first_at),
        "last refused": _iso(letter.last_at),
        "input": f"{on_one_line(letter.path)}, "
        f"bytes {letter.start_offset} to {letter.end_offset}, stream {letter.stream_id}",
        "EventId": letter.event_id or "unknown",
        "ConsumerID": letter.consumer_id or "unknown",
    }
    if header:
        facts["header"] = _text(header)
    lines = [f"dead letter {letter.id}", *(f"  {name + ':':<14} {plain(value)}" for name, value in facts.items())]
    record = _text(raw) if raw else "(not kept: it was too long to be read; its position is above)"
    return "\n".join([*lines, f"  {'record:':<14} {len(raw):,} bytes", record, ""])


def _text(data: bytes) -> str:
    return plain(data.decode("utf-8", "backslashreplace"))


def _tell_position_only(letters: Letters, selection: Selection) -> bool:
    """Tell of the letters whose record is not kept, if there are any."""
    count = sum(letters.count_by_rule(msgspec.structs.replace(selection, has_raw=False)).values())
    if count:
        say(f"{count:,} dead letters are known by their position only, as they were too long to be read; see: list")
    return count > 0


# Once more ----------------------------------------------------------------------------------------------------------


def _replayed(settings: Settings, selection: Selection, limit: int | None) -> Callable[[OpenState], Source]:
    """Make what makes the source, once the lock is held."""

    def source(state: OpenState) -> Source:
        from shipper.state.letters import open_letters
        from shipper.state.replay import Replay

        letters = open_letters(settings.state.directory)
        assert letters is not None, "the store has just made it"
        ids = state.store.letters.ids(msgspec.structs.replace(selection, has_raw=True), limit)
        return Replay(letters, ids, state.next_stream_id, csv_delimiter=settings.input.csv_delimiter)

    return source


def _rehearse(settings: Settings, selection: Selection, limit: int | None) -> int:
    """Judge the letters without sending them; returns the exit code."""
    failed: dict[str, list[str]] = {}
    sent = repeated = 0
    has_position_only = False
    with _opened(settings) as letters:
        if letters is not None:
            ids = letters.ids(msgspec.structs.replace(selection, has_raw=True), limit)
            sent, repeated = _judge(settings, letters, ids, failed)
            has_position_only = _tell_position_only(letters, selection)
    count = sum(map(len, failed.values()))
    repeats = f", {repeated:,} would be skipped, as their EventId is that of another one" if repeated else ""
    print(f"{sent:,} dead letters would be sent, {count:,} would fail again{repeats}")
    for rule, examples in sorted(failed.items()):
        print(f"\n{rule}: {len(examples):,}")
        print("\n".join(f"  {example}" for example in examples[:_EXAMPLES_PER_RULE]))
        if len(examples) > _EXAMPLES_PER_RULE:
            print(f"  ... and {len(examples) - _EXAMPLES_PER_RULE:,} more")
    return 3 if failed or has_position_only else 0


def _judge(settings: Settings, letters: Letters, ids: list[int], failed: dict[str, list[str]]) -> tuple[int, int]:
    """Run letters through the codec; adds words about those that fail, by rule, and counts good ones and repeats."""
    import itertools

    from shipper.codec import Codec, latest_timestamp
    from shipper.state.replay import Replay, ReplayStream

    codec = Codec(settings.records, max_record_bytes=settings.input.max_record_bytes)
    latest = latest_timestamp(time.time(), settings.records.max_future_seconds)
    source = Replay(letters, ids, itertools.count(1).__next__, csv_delimiter=settings.input.csv_delimiter)
    good = repeated = 0
    for chunk in source.chunks():
        assert isinstance(chunk.stream, ReplayStream)
        offset = chunk.start_offset
        while offset < chunk.end_offset:
            piece = codec.encode(
                chunk, offset, room_events=_PIECE_LINES, room_bytes=settings.batch.max_bytes, latest=latest
            )
            assert piece is not None, "a record alone always fits"
            offset = piece.span.end_offset
            good += piece.span.unsettled
            repeated += piece.span.duplicates
            for each in piece.span.rejections:
                words = f"dead letter {chunk.stream.letter_at(each.start_offset)}: {each.message}"
                failed.setdefault(each.rule, []).append(words)
    return good, repeated


# For good -----------------------------------------------------------------------------------------------------------


def _purge(settings: Settings, selection: Selection, *, yes: bool) -> None:
    from shipper.state.store import Store

    with _opened(settings) as letters:
        counts = letters.count_by_rule(selection) if letters else {}
        ids = letters.ids(selection) if letters else []
    if not ids:
        say(_none(selection))
        return
    _confirm(f"delete {len(ids):,} dead letters for good ({_by_rule(counts)})?", yes=yes)
    store = Store(settings.state.directory)
    try:
        say(f"{store.purge(ids):,} dead letters deleted")
    finally:
        store.close()


def _erase(directory: Path, consumer_id: str, *, yes: bool) -> None:
    """Erase what is kept of a consumer; also looks for what an earlier try that was cut off has left."""
    from shipper.state.directory import locked_directory
    from shipper.state.erasure import erase_spooled, spooled_records
    from shipper.state.store import Store

    if not directory.exists():
        say(f"nothing is kept of consumer {consumer_id}, as there is no state directory {directory}")
        return
    with locked_directory(directory):
        store = Store(directory)
        try:
            known, unknown = store.letters.of_consumer(consumer_id)
            spooled = spooled_records(directory / "spool", consumer_id)
            if known or unknown or spooled:
                _confirm(
                    f"erase consumer {consumer_id}: {len(known):,} dead letters, {len(unknown):,} more that hold the "
                    f"number and whose consumer is unknown, {spooled:,} records in the spool, which will not be sent?",
                    yes=yes,
                )
            erased = erase_spooled(directory / "spool", consumer_id)
            purged = store.purge([*known, *unknown])
            store.scrub()
        finally:
            store.close()
    say(f"consumer {consumer_id}: {purged:,} dead letters and {erased:,} spooled records erased")


def _confirm(question: str, *, yes: bool) -> None:
    """Go on only with a yes; ends the command otherwise."""
    if yes:
        return
    if not sys.stdin or not sys.stdin.isatty():
        raise typer.BadParameter(f"{question} There is nobody to ask; say --yes")
    if not typer.confirm(question, err=True):
        say("nothing was deleted")
        raise typer.Exit(0)

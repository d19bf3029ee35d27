"""Shared code of the commands: options, settings, logs, output, and running async code."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, date, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TextIO, TypeVar, cast

import typer

from shipper.cli.commands import UsageError, option
from shipper.config.load import USUAL_FILES, Entry, SettingsFile, misspelt_variables, read_entries
from shipper.config.settings import Settings, build_settings, literal_secrets, require_endpoint
from shipper.model.errors import ConfigError, ShipperError, SourceError, StateError, StateUnwritableError
from shipper.model.printable import printable, printable_json
from shipper.model.units import several as several
from shipper.system.files import FULL_DISK
from shipper.system.stderr import ForgivingStderr, discard

if TYPE_CHECKING:
    from shipper.kafka.view import GroupView
    from shipper.model.records import Stream
    from shipper.sources.reader import StreamReader

T = TypeVar("T")

_VIEW: Final = "shipper-view-"
_NEW_S: Final = 60.0  # it may not be held yet
_views: Final = ExitStack()  # temporary directories, deleted when the process ends

# New objects between two garbage collections. Shipping leaves almost no garbage, but a connection to the admin address
# leaves cycles of about 5 KB.
_GC_THRESHOLDS: Final = (10_000, 20, 20)

_FULL_OUTPUT: Final = FULL_DISK | {errno.EFBIG, errno.EIO}


def format_option(text: str, *aliases: str) -> Any:
    """Return the option --format, which selects machine-readable output."""
    return option("FORMAT", text, "--format", *aliases)


_setting: Final = partial(option, rich_help_panel="Settings and logs")
_CONFIG_HELP: Final = "The settings file (default: $SHIPPER_CONFIG, ./shipper.toml or /etc/shipper/shipper.toml)."

ConfigOption = Annotated[Path | None, _setting("FILE", _CONFIG_HELP, "--config", "-c")]
SetOption = Annotated[list[str] | None, _setting("KEY=VALUE", "A setting; overrides file and environment.", "--set")]
OutputOption = Annotated[str, option("FILE", "The file to write; - for stdout.", "--output", "-o")]
RateOption = Annotated[float | None, option("N", "Maximum events per second; 0 = no limit.", "--rate")]
RATE_KEY: Final = "delivery.rate_limit_events_per_second"

Needed = Literal["intake", "report"]


class SettingsOptions(NamedTuple):
    """The options of all commands that read the settings."""

    config: ConfigOption = None
    overrides: SetOption = None
    log_level: Annotated[str | None, _setting("LEVEL", "debug, info, warning or error.")] = None
    log_format: Annotated[str | None, _setting("FORMAT", "auto, json or console.")] = None

    def file(self) -> SettingsFile:
        return SettingsFile(self.config, os.environ)

    def entries(self, flags: Mapping[str, object] = {}) -> dict[str, Entry]:
        """Read all keys that are set; `flags` are settings with options of their own."""
        flags = {"log.level": self.log_level, "log.format": self.log_format, **flags}
        return read_entries(
            Settings, config_path=self.config, environ=os.environ, overrides=self.overrides or (), flags=flags
        )


def read_settings(options: SettingsOptions, needs: Needed | None = None, flags: Mapping[str, object] = {}) -> Settings:
    """Read the settings; `needs` is an endpoint that the command requires. Raise `ConfigError` if one is wrong."""
    entries = options.entries(flags)
    settings = build_settings(entries, environ=os.environ)
    if needs is not None:
        try:
            require_endpoint(settings, needs)
        except ConfigError as error:
            sources = [entry.source for key, entry in entries.items() if key.startswith(f"{needs}.")]
            message = error.message + (_missing_file() if not options.config and error.key == needs else "")
            raise ConfigError(message, key=error.key, source=sources[0] if sources else "") from None
    return settings


def _missing_file() -> str:
    """Describe where no settings file was found; empty if there is one."""
    if os.environ.get("SHIPPER_CONFIG") or any(os.path.exists(path) for path in USUAL_FILES):
        return ""
    paths = " and ".join(str(path.absolute()) for path in USUAL_FILES)
    return f". No settings file was found: {paths} do not exist, or this user cannot access them"


def prepare(options: SettingsOptions, needs: Needed | None = None, flags: Mapping[str, object] = {}) -> Settings:
    """Read the settings and set up the logs; arguments and errors as for `read_settings`."""
    settings = read_settings(options, needs, flags)
    set_up_logs(settings, uses_secrets=needs is not None)
    return settings


def require_directory(settings: Settings) -> Settings:
    """Return the settings; raise `ConfigError` if their state is in the brokers."""
    kafka = settings.input.kafka
    if kafka is not None:
        raise ConfigError(
            "this command needs a state directory, but a consumer group has none: its dead letters and counts are in "
            f"the topics {kafka.letters} and {kafka.ledger}. For files, use settings without input.kafka",
            key="input.kafka",
        )
    return settings


@contextmanager
def state_on_disk(
    settings: Settings, *, is_writer: bool = False, has_ledger: bool = False
) -> Iterator[tuple[Settings, GroupView | None]]:
    """
    Yield settings whose state is in a directory; with input.kafka, a temporary copy of the state in the brokers.

    Args:
        is_writer: Become the only process that can change the letters of the group.
        has_ledger: The copy contains the ledger, too, not only the dead letters.
    Raises:
        SourceError: The brokers cannot be reached.
    """
    kafka = settings.input.kafka
    if kafka is None:
        yield settings, None
        return
    from msgspec.structs import replace

    from shipper.kafka.view import GroupView

    with private_folder() as folder:
        try:
            longest = settings.input.max_record_bytes if is_writer else None
            view = GroupView(kafka, folder, max_record_bytes=longest, has_ledger=has_ledger)
        except StateUnwritableError as error:
            raise no_room(folder, error.__cause__) from error
        for (topic, group), count in view.skipped.items():
            messages = several(count, "message") + f" of group {group}" if group else several(count, "other message")
            say(f"the topic {topic} also contains {messages}: skipped")
        state = replace(settings.state, directory=folder)
        yield replace(settings, input=replace(settings.input, kafka=None), state=state), view


@contextmanager
def private_folder() -> Iterator[Path]:
    """
    Create a temporary folder (0700) until the context ends; delete those of processes that were killed.

    Raises:
        StateError: No folder for temporary files can be written.
    """
    from shutil import rmtree
    from tempfile import TemporaryDirectory, gettempdir

    try:
        folder = gettempdir()
    except OSError as error:
        raise no_room("/tmp", error) from error
    for old in Path(folder).glob(f"{_VIEW}*"):
        with suppress(OSError), _held(old) as status:  # an error if it is in use
            if status.st_uid == os.geteuid() and status.st_mtime < time.time() - _NEW_S:
                rmtree(old)
    with TemporaryDirectory(prefix=_VIEW) as name, _held(Path(name)):
        yield Path(name)


def no_room(folder: Path | str, error: object) -> StateError:
    """Return the error that temporary files cannot be written to a folder."""
    return StateError(
        f"temporary files cannot be written to {folder} ({error}); make room there, or name a folder with more room in "
        "the environment variable TMPDIR"
    )


@contextmanager
def _held(folder: Path) -> Iterator[os.stat_result]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield os.fstat(descriptor)
    finally:
        os.close(descriptor)


def readable_state(settings: Settings, *, has_ledger: bool = False) -> Settings:
    """Return the settings of `state_on_disk`, whose directory exists until the command ends."""
    return _views.enter_context(state_on_disk(settings, has_ledger=has_ledger))[0]


def refuse_topic(path: str) -> None:
    """Raise `SourceError` if a path is the address of a topic, in a command that reads only files."""
    if path.startswith("kafka:/"):
        raise SourceError(
            f"{path}: this command reads files; copy some messages of the topic into one, such as with "
            "kafka-console-consumer --max-messages 1000 > sample.ndjson"
        )


def open_input(path: Path, settings: Settings, known: Sequence[Stream] = ()) -> StreamReader:
    """Open an input file, at its checkpoint if it is a `known` stream; raise `SourceError` if it cannot be read."""
    from shipper.sources.identity import StreamIndex
    from shipper.sources.reader import input_form

    ids = itertools.count(max((stream.stream_id for stream in known), default=0) + 1)
    max_bytes = settings.input.max_record_bytes
    return StreamIndex(known, ids.__next__, max_record_bytes=max_bytes, form=input_form(settings)).open(path)


def set_up_logs(settings: Settings, *, uses_secrets: bool = True) -> None:
    """Set up the logs, and log warnings about misspelt variables and literal secrets."""
    import structlog  # commands that do not log start without it

    from shipper.status.logs import configure_logs

    configure_logs(settings.log.level, settings.log.format, now=time.monotonic)
    for name, similar in misspelt_variables(Settings, os.environ).items():
        structlog.get_logger("config").warning("variable_ignored", name=name, message=f"did you mean {similar}?")
    if uses_secrets and (keys := literal_secrets(settings)):
        structlog.get_logger("config").warning(
            "literal_secrets", keys=keys, message='better: references, { env = "NAME" } or { file = "/path" }'
        )


@contextmanager
def tolerate_closed_stdout() -> Iterator[None]:
    """Treat a closed stdout as success; raise `ShipperError` if it cannot be written, such as on a full disk."""
    try:
        yield
    except BrokenPipeError:
        discard(sys.stdout)
    except OSError as error:
        is_output = error.errno in _FULL_OUTPUT and error.filename is None  # after a large write, a flush succeeds
        try:
            sys.stdout.flush()  # otherwise it fails again if stdout was the cause
        except OSError:
            is_output = True
        if not is_output:
            raise
        discard(sys.stdout)
        raise ShipperError(f"cannot write to standard output: {error.strerror}") from error


def say(text: str) -> None:
    """Print text to standard error, with control characters escaped."""
    print(plain(text), file=cast(TextIO, ForgivingStderr()))


def confirm(question: str, *, yes: bool) -> None:
    """Ask a question, and end the command unless the answer is yes."""
    if yes:
        return
    if not sys.stdin or not sys.stdin.isatty():
        raise UsageError(f"--yes is missing, and there is no terminal to ask on: {question}")
    if not typer.confirm(question, err=True):
        say("nothing was deleted")
        raise typer.Exit(0)


def run_async(function: Callable[[], Awaitable[T]]) -> T:
    """Run on uvloop where it is available."""
    import gc

    import anyio

    gc.freeze()  # exclude everything imported so far from garbage collection
    gc.set_threshold(*_GC_THRESHOLDS)
    return anyio.run(function, backend_options={"use_uvloop": sys.platform != "win32"})


def parse_time(text: str, *, is_end: bool = False, now: float | None = None) -> float:
    """
    Parse a time: ISO 8601, UTC unless it names another zone.

    Args:
        is_end: Whether a date without a time means its end instead of its beginning.
        now: The value of the word `now`; None = not allowed.
    Returns:
        Seconds since the epoch.
    Raises:
        typer.BadParameter: The text is not a time.
    """
    if text == "now" and now is not None:
        return now
    try:
        try:
            moment = datetime.combine(date.fromisoformat(text) + timedelta(days=is_end), datetime.min.time())
        except ValueError:
            moment = datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        example = f"2026-11-01 (its {'end' if is_end else 'beginning'}, UTC){'' if now is None else ' or now'}"
        raise typer.BadParameter(f"{text!r} is not a time, such as 2026-11-01T12:30:00Z or {example}") from None


def in_columns(rows: Sequence[Sequence[str]], justify: Callable[[str, int], str] = str.ljust) -> str:
    """Format rows as a table; the last column is not padded."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return "\n".join("  ".join([*map(justify, row, widths), row[-1]]) for row in rows)


def plain(text: str) -> str:
    """Escape control characters except newlines and tabs."""
    return printable(text, keep="\n\t")


def print_json(document: bytes) -> None:
    """Print and flush a JSON document to standard output, with control characters escaped."""
    print(printable_json(document.decode()), flush=True)

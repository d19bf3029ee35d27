"""What the commands share: options, settings, logs, and running async code."""

from __future__ import annotations

import inspect
import itertools
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, date, datetime, timedelta
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TextIO, TypeVar, cast

import typer

from shipper.config.load import USUAL_FILES, SettingsFile, Written, misspelt_variables, read_written
from shipper.config.settings import KafkaSettings, Settings, literal_secrets, require_endpoint, settings_from
from shipper.model.errors import ConfigError
from shipper.model.printable import printable, printable_json
from shipper.model.units import several as several
from shipper.system.stderr import ForgivingStderr

if TYPE_CHECKING:
    from shipper.kafka.view import GroupView
    from shipper.model.records import Stream
    from shipper.sources.reader import StreamReader

T = TypeVar("T")

_views: Final = ExitStack()  # temporary directories, which go with the process

# New objects between two collections. Of what flows next to nothing is left to them, but a connection to the admin
# address leaves cycles of some 5 KB behind.
_GC_THRESHOLDS: Final = (10_000, 20, 20)


def format_option(text: str, *older: str) -> Any:
    """Make the option --format, by which a command is asked for output that programs read; `older` are spellings."""
    return typer.Option("--format", *older, metavar="FORMAT", help=text)


def setting_option(*spellings: str, metavar: str, text: str) -> Any:
    """Make an option that most commands have, and that help shows last."""
    return typer.Option(*spellings, metavar=metavar, help=text, rich_help_panel="Settings and logs")


ConfigOption = Annotated[
    Path | None,
    setting_option("--config", "-c", metavar="FILE", text="The settings file (default: the usual places)."),
]
SetOption = Annotated[
    list[str] | None,
    setting_option("--set", metavar="KEY=VALUE", text="One setting; overrides file and environment."),
]
LogLevelOption = Annotated[
    str | None, setting_option("--log-level", metavar="LEVEL", text="debug, info, warning or error.")
]
LogFormatOption = Annotated[str | None, setting_option("--log-format", metavar="FORMAT", text="auto, json or console.")]
OutputOption = Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="The file to write; - for stdout.")]
RateOption = Annotated[
    float | None, typer.Option("--rate", metavar="N", help="Maximum events per second; 0 = no limit.")
]
ListenOption = Annotated[
    str, typer.Option("--listen", metavar="HOST:PORT", help="Serve metrics, probes and the status page there.")
]


Needed = Literal["intake", "report"]


class SettingsOptions(NamedTuple):
    """The options of every command that reads the settings, as they were given."""

    config: Path | None = None
    overrides: list[str] | None = None
    log_level: str | None = None
    log_format: str | None = None

    def file(self) -> SettingsFile:
        """Return the settings file that `load` is going to read."""
        return SettingsFile(self.config, os.environ)

    def load(self, rate: float | None = None, include: Sequence[str] | None = None) -> dict[str, Written]:
        """
        Load every key that is written somewhere.

        Args:
            rate: What was given as --rate.
            include: Patterns that were given as arguments.
        """
        flags = {
            "log.level": self.log_level,
            "log.format": self.log_format,
            "delivery.rate_limit_events_per_second": rate,
            "input.include": include or None,
        }
        given = self.overrides or ()
        return read_written(Settings, config_path=self.config, environ=os.environ, overrides=given, flags=flags)


_SETTINGS_OPTIONS: Final = {
    "config": ConfigOption,
    "overrides": SetOption,
    "log_level": LogLevelOption,
    "log_format": LogFormatOption,
}


def with_settings_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add --config, --set, --log-level and --log-format to a command, which takes them as the keyword `options`."""

    @wraps(command)
    def run(**arguments: Any) -> None:
        options = SettingsOptions(**{name: arguments.pop(name) for name in _SETTINGS_OPTIONS})
        command(**arguments, options=options)

    own = inspect.signature(command, eval_str=True)
    parameters = [parameter for name, parameter in own.parameters.items() if name != "options"]
    parameters += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
        for name, annotation in _SETTINGS_OPTIONS.items()
    ]
    run.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def read_settings(
    options: SettingsOptions,
    needs: Needed | None = None,
    rate: float | None = None,
    include: Sequence[str] | None = None,
) -> Settings:
    """
    Read the settings as a command line says.

    Args:
        needs: The endpoint that the command requires.
        rate: What was given as --rate.
        include: Patterns that were given as arguments.
    Raises:
        ConfigError: The first thing that is wrong with a setting.
    """
    written = options.load(rate, include)
    settings = settings_from(written, environ=os.environ)
    if needs is not None:
        try:
            require_endpoint(settings, needs)
        except ConfigError as error:
            sources = [entry.source for key, entry in written.items() if key.startswith(f"{needs}.")]
            message = error.message + (_no_file() if not options.config and error.key == needs else "")
            raise ConfigError(message, key=error.key, source=sources[0] if sources else "") from None
    return settings


def _no_file() -> str:
    """Return where a settings file was looked for, if there is none."""
    if os.environ.get("SHIPPER_CONFIG") or any(os.path.exists(path) for path in USUAL_FILES):
        return ""
    places = " and ".join(str(path.absolute()) for path in USUAL_FILES)
    return f". There is no settings file: {places} do not exist, or cannot be looked at by this user"


def prepare(options: SettingsOptions, needs: Needed | None = None, rate: float | None = None) -> Settings:
    """Read the settings and set up the logs; arguments and errors as for `read_settings`."""
    settings = read_settings(options, needs, rate)
    set_up_logs(settings, uses_secrets=needs is not None)
    return settings


def require_directory(settings: Settings) -> Settings:
    """
    Return settings whose state is in a directory.

    Raises:
        ConfigError: They are of a member of a consumer group, which keeps its state in the brokers.
    """
    kafka = settings.input.kafka
    if kafka is not None:
        raise ConfigError(
            "this command needs a state directory, and a member of a consumer group has none: dead letters and counts "
            f"are in the topics {kafka.letters} and {kafka.ledger}. For files, use settings without input.kafka",
            key="input.kafka",
        )
    return settings


def readable_state(settings: Settings) -> Settings:
    """
    Return settings whose state is in a directory that can be read.

    That of a consumer group is copied from the brokers into a temporary one, which is gone when the command ends.

    Raises:
        SourceError: The brokers cannot be asked.
    """
    if settings.input.kafka is None:
        return settings
    return _views.enter_context(copied_state(settings, settings.input.kafka))[1]


@contextmanager
def copied_state(settings: Settings, kafka: KafkaSettings) -> Iterator[tuple[GroupView, Settings]]:
    """
    Copy what the brokers keep of a group into a temporary directory; give the view, and settings with that directory.

    Raises:
        SourceError: The brokers cannot be asked.
    """
    from tempfile import TemporaryDirectory

    from msgspec.structs import replace

    from shipper.kafka.view import GroupView

    with TemporaryDirectory(prefix="shipper-view-") as name:
        view = GroupView(kafka, Path(name))
        state = replace(settings.state, directory=Path(name))
        yield view, replace(settings, input=replace(settings.input, kafka=None), state=state)


def open_input(path: Path, settings: Settings, known: Sequence[Stream] = ()) -> StreamReader:
    """
    Open a file for reading alone.

    Args:
        known: The streams of which it may be one; it is read from the checkpoint of that on.
    Raises:
        SourceError: It cannot be read.
    """
    from shipper.sources.identity import StreamBook
    from shipper.sources.reader import input_form

    ids = itertools.count(max((stream.stream_id for stream in known), default=0) + 1)
    max_bytes = settings.input.max_record_bytes
    return StreamBook(known, ids.__next__, max_record_bytes=max_bytes, form=input_form(settings)).open(path)


def set_up_logs(settings: Settings, *, uses_secrets: bool = True) -> None:
    """Set up the logs, and warn of secrets in the settings themselves where they are used."""
    import structlog  # commands that do not log start without it

    from shipper.status.logs import configure_logs

    configure_logs(settings.log.level, settings.log.format, now=time.monotonic)
    for name, meant in misspelt_variables(Settings, os.environ).items():
        structlog.get_logger("config").warning("variable_ignored", name=name, message=f"did you mean {meant}?")
    if uses_secrets and (keys := literal_secrets(settings)):
        structlog.get_logger("config").warning(
            "literal_secrets", keys=keys, message='better: references, { env = "NAME" } or { file = "/path" }'
        )


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Treat a closed stdout as success."""
    try:
        yield
    except BrokenPipeError:
        # The interpreter flushes once more at its end: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """Print lines to standard error, with control characters escaped."""
    print(plain(text), file=cast(TextIO, ForgivingStderr()))


def confirm(question: str, *, yes: bool) -> None:
    """Ask, and end the command unless the answer is yes."""
    if yes:
        return
    if not sys.stdin or not sys.stdin.isatty():
        raise typer.BadParameter(f"{question} There is no terminal to ask on; give --yes")
    if not typer.confirm(question, err=True):
        say("nothing was deleted")
        raise typer.Exit(0)


def run_async(function: Callable[[], Awaitable[T]]) -> T:
    """Run on uvloop where it is available."""
    import gc

    import anyio

    gc.freeze()  # what is loaded by now stays: no collection has to look at it again
    gc.set_threshold(*_GC_THRESHOLDS)
    return anyio.run(function, backend_options={"use_uvloop": sys.platform != "win32"})


def parsed_time(text: str, *, is_end: bool = False, now: float | None = None) -> float:
    """
    Parse a time: ISO 8601, UTC unless it names another zone.

    Args:
        is_end: Whether a date alone means its end instead of its beginning.
        now: What the word `now` means; None = it is no time.
    Returns:
        Seconds since the epoch.
    Raises:
        typer.BadParameter: It is no time.
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
    """Lay out rows as columns; the first row has the titles, the last column no fixed width."""
    widths = [max(map(len, column)) for column in list(zip(*rows, strict=True))[:-1]]
    return "\n".join("  ".join([*map(justify, row, widths), row[-1]]) for row in rows)


def plain(text: str) -> str:
    """Escape control characters in a text of several lines."""
    return printable(text, keep="\n\t")


def print_json(document: bytes) -> None:
    """Print a JSON document to standard output, at once; a terminal shows all of it, and obeys nothing."""
    print(printable_json(document.decode()), flush=True)

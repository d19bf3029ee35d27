"""What the commands share: options, settings, logs, and running async code."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal, TextIO, TypeVar, cast

import structlog
import typer

from shipper.config.settings import Settings, literal_secrets, load_written, require_endpoint, settings_from
from shipper.model.errors import ConfigError
from shipper.model.printable import printable, printable_json
from shipper.status.logs import ForgivingStderr, configure_logs
from shipper.status.units import several as several

T = TypeVar("T")

ConfigOption = Annotated[
    Path | None, typer.Option("--config", "-c", metavar="FILE", help="The settings file; else the usual places.")
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="One setting, before file and environment.")
]
LogLevelOption = Annotated[
    str | None, typer.Option("--log-level", metavar="LEVEL", help="debug, info, warning or error.")
]
RateOption = Annotated[
    float | None, typer.Option("--rate", metavar="N", help="Events per second at most; 0 = no limit.")
]
ListenOption = Annotated[
    str, typer.Option("--listen", metavar="HOST:PORT", help="Serve metrics, probes and the status page there.")
]
LogFormatOption = Annotated[str | None, typer.Option("--log-format", metavar="FORMAT", help="auto, json or console.")]


Needed = Literal["intake", "report"]


def settings_reader(
    config: Path | None,
    overrides: list[str] | None,
    log_level: str | None,
    log_format: str | None,
    needs: Needed | None = None,
    rate: float | None = None,
) -> Callable[[], Settings]:
    """
    Make what reads the settings as a command line says, each time it is called.

    Args:
        needs: The endpoint that the command cannot do without.
        rate: What was given as --rate.
    """
    flags = {
        "log.level": log_level,
        "log.format": log_format,
        "delivery.rate_limit_events_per_second": rate,
    }

    def read() -> Settings:
        written = load_written(config_path=config, environ=os.environ, overrides=overrides or (), flags=flags)
        settings = settings_from(written, environ=os.environ)
        if needs is not None:
            try:
                require_endpoint(settings, needs)
            except ConfigError as error:
                sources = [entry.source for key, entry in written.items() if key.startswith(f"{needs}.")]
                raise ConfigError(error.message, key=error.key, source=sources[0] if sources else "") from None
        return settings

    return read


def prepare(
    config: Path | None,
    overrides: list[str] | None,
    log_level: str | None,
    log_format: str | None,
    needs: Needed | None = None,
    rate: float | None = None,
) -> Settings:
    """
    Read the settings and set up the logs; arguments as for `settings_reader`.

    Raises:
        ConfigError: The first thing that is wrong with a setting.
    """
    settings = settings_reader(config, overrides, log_level, log_format, needs, rate)()
    set_up_logs(settings, uses_secrets=needs is not None)
    return settings


def set_up_logs(settings: Settings, *, uses_secrets: bool = True) -> None:
    """Set up the logs, and warn of secrets in the settings themselves where they are used."""
    configure_logs(settings.log.level, settings.log.format, now=time.monotonic)
    if uses_secrets and (keys := literal_secrets(settings)):
        structlog.get_logger("config").warning(
            "literal_secrets", keys=keys, message='better: references, { env = "NAME" } or { file = "/path" }'
        )


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """Take it for no fault if whoever reads our output has what it wanted."""
    try:
        yield
    except BrokenPipeError:
        # The interpreter flushes once more at its end: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say(text: str) -> None:
    """Print lines for people, to standard error; what in them comes from outside moves no cursor."""
    print(plain(text), file=cast(TextIO, ForgivingStderr()))


def confirm(question: str, *, yes: bool) -> None:
    """Go on only with a yes; ends the command otherwise."""
    if yes:
        return
    if not sys.stdin or not sys.stdin.isatty():
        raise typer.BadParameter(f"{question} There is nobody to ask; say --yes")
    if not typer.confirm(question, err=True):
        say("nothing was deleted")
        raise typer.Exit(0)


def run_async(function: Callable[[], Awaitable[T]]) -> T:
    """Run on the fast event loop where there is one."""
    import gc

    import anyio

    gc.freeze()  # what is loaded by now stays: no collection has to look at it again
    return anyio.run(function, backend_options={"use_uvloop": sys.platform != "win32"})


def plain(text: str) -> str:
    """Return a text of several lines as people may see it."""
    return printable(text, keep="\n\t")


def on_one_line(text: str) -> str:
    """Return a text as people may see it within a line."""
    return printable(text)


def print_json(document: bytes) -> None:
    """Print a JSON document to standard output, at once; a terminal shows all of it, and obeys nothing."""
    print(printable_json(document.decode()), flush=True)

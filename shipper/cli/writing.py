"""Writing the output of commands to standard output or a file, which is replaced atomically."""

from __future__ import annotations

import io
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final

import typer

from shipper.cli.common import plain, tolerate_closed_stdout
from shipper.model.errors import ShipperError
from shipper.model.printable import printable_json
from shipper.system.files import replacing_file
from shipper.system.stderr import discard

if TYPE_CHECKING:
    from rich.console import Console

_BINARY: Final = {"parquet", "xlsx"}
_FORMS_WITHOUT_ESCAPES: Final = {"csv", "text"}


def check_target(output: str, form: str = "text") -> Path | None:
    """Check the option --output before any work is done; return the file, or None for stdout."""
    if output in {"", "-"}:
        if form in _BINARY and (not output or sys.stdout.isatty()):
            raise typer.BadParameter(f"{form} is not for a terminal; name a file", param_hint="--output")
        return None
    path = Path(output)
    if path.is_dir():
        raise typer.BadParameter(f"{output!r} is a directory; name a file", param_hint="--output")
    if not (folder := Path(os.path.realpath(path)).parent).is_dir():
        raise typer.BadParameter(f"there is no directory {str(folder)!r}", param_hint="--output")
    return path


def capture(show: Callable[[Console], None], target: Path | None) -> bytes:
    """Return the output printed to a console, of the terminal's width or, for a file, 120 columns."""
    from rich.console import Console

    console = Console() if target is None else Console(file=io.StringIO(), width=120)
    with console.capture() as captured:
        show(console)
    return captured.get().encode(console.encoding, "replace")


def write(data: bytes, target: Path | None, *, form: str = "table") -> None:
    """
    Write to stdout or a file, as `open_target` does.

    Args:
        form: On a terminal, control characters are escaped in all formats except table, which has colours.
    Raises:
        ShipperError: The output cannot be written.
    """
    if target is None and form != "table" and sys.stdout.isatty():
        text = data.decode().replace("\r\n", "\n")
        data = (plain(text) if form in _FORMS_WITHOUT_ESCAPES else printable_json(text)).encode()
    with open_target(target) as out:
        out.write(data)


@contextmanager
def open_target(target: Path | None) -> Iterator[BinaryIO]:
    """
    Open stdout, or a file to be replaced atomically.

    Symbolic links are followed. Special files, such as named pipes, are written to directly. New files have mode 0600.
    A closed stdout is not an error; the rest of the output is discarded.

    Raises:
        ShipperError: The output cannot be written.
    """
    try:
        if target is None:
            with tolerate_closed_stdout():
                yield sys.stdout.buffer
                sys.stdout.buffer.flush()
        elif is_special(target):
            with target.open("wb") as file:
                yield file
        else:
            with replacing_file(Path(os.path.realpath(target))) as file:
                yield file
    except OSError as error:
        if target is None:
            discard(sys.stdout)
        where = "to standard output" if target is None else repr(str(target))
        raise ShipperError(f"cannot write {where}: {error.strerror}") from error


def write_lines(lines: Iterable[str]) -> None:
    """Write lines to stdout immediately; raise `ShipperError` if that fails."""
    write("".join(f"{line}\n" for line in lines).encode(sys.stdout.encoding, "replace"), None)


def is_special(path: Path) -> bool:
    """Return whether a path exists and is not a regular file on a disk."""
    try:
        return not stat.S_ISREG(path.stat().st_mode) or Path("/dev") in path.parents
    except OSError:
        return False

"""Where a command writes what it was asked for: standard output, or a file that is replaced as a whole."""

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

from shipper.cli.common import plain, reader_may_leave
from shipper.model.errors import ShipperError
from shipper.model.printable import printable_json
from shipper.system.files import replacing_file

if TYPE_CHECKING:
    from rich.console import Console

_BINARY: Final = {"parquet", "xlsx"}
_FORMS_WITHOUT_ESCAPES: Final = {"csv", "text"}


def checked_target(output: str, form: str = "text") -> Path | None:
    """
    Check where to write before anything is done.

    Returns:
        The file; None for stdout.
    Raises:
        typer.BadParameter: Nothing can be written there.
    """
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


def printed(show: Callable[[Console], None], target: Path | None) -> bytes:
    """Return what is printed to a console: to the terminal's, or, for a file, to one of 120 columns."""
    from rich.console import Console

    console = Console() if target is None else Console(file=io.StringIO(), width=120)
    with console.capture() as captured:
        show(console)
    return captured.get().encode(console.encoding, "replace")


def write(data: bytes, target: Path | None, *, form: str = "table") -> None:
    """
    Write to stdout or a file, as `opened_target` does.

    Args:
        form: What is for programs reaches a terminal without what it would obey; a table has colours.
    Raises:
        ShipperError: It cannot be written.
    """
    if target is None and form != "table" and sys.stdout.isatty():
        text = data.decode().replace("\r\n", "\n")
        data = (plain(text) if form in _FORMS_WITHOUT_ESCAPES else printable_json(text)).encode()
    with opened_target(target) as out:
        out.write(data)


@contextmanager
def opened_target(target: Path | None) -> Iterator[BinaryIO]:
    """
    Open stdout, or the file as a whole: under its name stands the old one or the new one, never a part.

    A link is followed. What is no file of a disk, such as a named pipe, is written into. A new file is the owner's
    alone (mode 0600). If the reader of stdout leaves, the rest is not written, and that is no error.

    Raises:
        ShipperError: It cannot be written.
    """
    try:
        if target is None:
            with reader_may_leave():
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
            # The interpreter flushes once more at its end: into nothing.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        where = "to standard output" if target is None else repr(str(target))
        raise ShipperError(f"cannot write {where}: {error.strerror}") from error


def write_lines(lines: Iterable[str]) -> None:
    """
    Write lines to stdout, at once.

    Raises:
        ShipperError: They cannot be written.
    """
    write("".join(f"{line}\n" for line in lines).encode(sys.stdout.encoding, "replace"), None)


def is_special(path: Path) -> bool:
    """Return whether a path names something else than a file of a disk."""
    try:
        return not stat.S_ISREG(path.stat().st_mode) or Path("/dev") in path.parents
    except OSError:
        return False

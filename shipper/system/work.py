"""
Records what each thread works on, so that others can see when one does not finish.

A stage registers a piece of work before it begins: some bytes to be read, records to be validated, a transaction.
Waiting for the service, for room, or for something to read is not work. `Watch` reads the clock, outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Final, Literal

from msgspec import Struct

Stage = Literal["find", "open", "read", "validate", "deliver", "spool", "save"]


class Piece(Struct, eq=False):
    """
    A piece of work.

    Attributes:
        path: Of a file, or a pattern; for people.
        source: Which input that is, whatever its name; empty = none.
        offset: Where in the input the work begins.
        end: Where it ends at the latest; 0 = not known.
        is_single: It is one record, and this is noted.
        steps: How far the work has come, in whatever unit; as long as that grows, it is not stuck.
    """

    stage: Stage
    path: str = ""
    source: str = ""
    offset: int = 0
    end: int = 0
    is_single: bool = False
    steps: int = 0


_pieces: Final[dict[int, Piece]] = {}  # by thread
_note: Callable[[Piece, bool], None] | None = None


@contextmanager
def at_work(piece: Piece) -> Iterator[Piece]:
    """Name what this thread does within; nothing within may be awaited. A piece within a piece stands for both."""
    thread, around = get_ident(), _pieces.get(get_ident())
    _pieces[thread] = piece
    try:
        if piece.is_single or piece.stage == "read":
            with noted(piece):
                yield piece
        else:
            yield piece
    finally:
        if around is None:
            del _pieces[thread]
        else:
            around.steps += 1
            _pieces[thread] = around


def go_on_with(piece: Piece) -> None:
    """Name the next of many small pieces, within an `at_work`."""
    _pieces[get_ident()] = piece


@contextmanager
def noted(piece: Piece) -> Iterator[None]:
    """Write down a piece for the next process; done once for many pieces, as it costs a write."""
    note = _note
    if note is not None:
        note(piece, True)
    try:
        yield
    finally:
        if note is not None:
            note(piece, False)


@contextmanager
def waiting() -> Iterator[None]:
    """Wait for another thread or process within some work; that is no part of it."""
    thread = get_ident()
    around = _pieces.pop(thread, None)
    try:
        yield
    finally:
        if around is not None:
            around.steps += 1
            _pieces[thread] = around


def step() -> None:
    """Count one step of what this thread is working on."""
    if (piece := _pieces.get(get_ident())) is not None:
        piece.steps += 1


def pieces() -> dict[int, Piece]:
    """Return what threads are at work on now."""
    return _pieces.copy()


def have_noted(note: Callable[[Piece, bool], None] | None) -> None:
    """Set the function that is called in the working thread: with True before a noted piece, with False after it."""
    global _note
    _note = note

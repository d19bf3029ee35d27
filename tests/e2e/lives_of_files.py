"""Many cases of what becomes of files, in one life of `shipper run`: each has a folder and lines of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Self

import pytest

from tests.e2e.conftest import Sample
from tests.e2e.driver import Service, Shipper, State, sandbox
from tests.e2e.files import Tail, copytruncate

GLOB, NAME = "app.ndjson*", "app.ndjson"


# What a case goes on after: the process sees only before and after, or it runs, or the next one does.
HELD, RUNNING, RESTART = "held", "running", "restart"
Steps = Iterator[str]


class Files:
    """
    The files of one case, in a folder of its own, beside those of other cases.

    Attributes:
        include: The globs in the folder; a case may have others.
        wanted: Which of its lines must have arrived by now.
        open_files: What the process held open, as far as the case took note.
        warned_of: What it complained of, likewise.
    """

    LINES = 300

    def __init__(self, tail: Tail, folder: Path, first: int) -> None:
        folder.mkdir()
        self.tail = tail
        self.folder = folder
        self.file = folder / NAME
        self.lines = tail.sample.lines[first:]
        self.include = [GLOB]
        self.wanted: set[int] = set()
        self.open_files: list[str] = []
        self.warned_of: set[str] = set()
        self._ids = tail.sample.ids[first:]

    @property
    def ids(self) -> set[str]:
        return {self._ids[number] for number in self.wanted}

    def append(self, start: int, end: int, to: str | Path = NAME) -> Path:
        path = self.folder / to
        with path.open("ab") as out:
            out.writelines(self.lines[start:end])
        self.wanted.update(range(start, end))
        return path

    def copytruncate(self, file: Path, copy: Path, start: int, end: int) -> None:
        copytruncate(file, copy, self.lines[start:end])
        self.wanted.update(range(start, end))


class Life:
    """
    One shipper, which is restarted, and all cases go on together: each fails or succeeds by its own files.

    Attributes:
        cases: Their files, by the name of the case.
        state: What it left behind.
    """

    def __init__(self, steps: Mapping[str, Callable[[Files], Steps]]) -> None:
        self.cases: dict[str, Files] = {}
        self.state = State()
        self._steps = steps
        self._given_up: set[str] = set()
        self._skipped: dict[str, str] = {}
        self._failed: dict[str, str] = {}
        self._times: dict[str, int] = {}

    def live(self, folder: Path, sample: Sample, **settings: Any) -> Self:
        with sandbox() as service, Shipper(folder, service.target) as shipper, ExitStack() as stack:
            tail = Tail(shipper, service, sample)
            going = {}
            for number, (name, case) in enumerate(self._steps.items()):
                self.cases[name] = Files(tail, tail.folder / f"case-{number}", number * Files.LINES)
                going[name] = stack.enter_context(closing(case(self.cases[name])))
            after = dict.fromkeys(going, RESTART)
            while RESTART in after.values():
                self._go_on(RESTART, going, after)
                include = [str(each.folder / glob) for each in self.cases.values() for glob in each.include]
                tail.start(include, **settings)
                self._wait(tail, service)
                while {HELD, RUNNING} & set(after.values()):
                    with tail.held():
                        self._go_on(HELD, going, after)
                    self._go_on(RUNNING, going, after)
                    self._wait(tail, service)
                assert tail.running.stop().returncode == 0
            self.state, self._times = shipper.read_state(), service.times_received()
        return self

    def _go_on(self, when: str, going: Mapping[str, Steps], after: dict[str, str]) -> None:
        for name in [name for name, what in after.items() if what == when]:
            try:
                after[name] = next(going[name], "")
            except pytest.skip.Exception as error:
                after[name], self._skipped[name] = "", str(error)
            except AssertionError as error:
                after[name], self._failed[name] = "", str(error)

    def _wait(self, tail: Tail, service: Service) -> None:
        ids = set().union(*(files.ids for files in self.cases.values())) - self._given_up
        with suppress(AssertionError):  # the case that lacks something is told by its own test
            tail.running.wait_until(lambda: service.stored >= len(ids) and service.holds(ids), "all events")
        self._given_up |= ids - set(service.event_ids())

    def times_received(self, name: str) -> dict[str, int]:
        """How often each line of a case came."""
        if name in self._skipped:
            pytest.skip(self._skipped[name])
        assert name not in self._failed, self._failed[name]
        ids = self.cases[name].ids
        assert ids, "the case was not exercised"
        return {key: self._times.get(key, 0) for key in ids}

    def checkpoints(self, name: str) -> list[int]:
        """Those of the files of a case."""
        folder = self.cases[name].folder
        return [offset for *_, path, offset in self.state.checkpoints if folder in Path(path).parents]

    @property
    def events(self) -> int:
        """How many different ones arrived."""
        ids: set[str] = set().union(*(files.ids for files in self.cases.values()))
        assert self._times.keys() <= ids, "invented"
        return len(self._times)


def each(case: Callable[..., Steps], *values: tuple[Any, ...]) -> dict[str, Callable[[Files], Steps]]:
    """A case with each of these for its arguments."""
    return {" ".join(map(str, (case.__name__, *those))): partial(_with, case, those) for those in values}


def _with(case: Callable[..., Steps], values: tuple[Any, ...], files: Files) -> Steps:
    return case(files, *values)

"""The lane with `input.on_complete`: rotated files are deleted or moved, files that only seem rotated must stay."""

from __future__ import annotations

import os
import shutil
import time
from random import Random
from typing import Any, ClassVar, Final

from tests.torture.application import LogFile, RunLane

_FILES: Final = ("orders", "bets")
_PATIENCE_S: Final = 8.0
_SPARE_S: Final = 1.0  # in addition to `input.rotate_wait_seconds`, for a look and a save


class LiveFile(LogFile):
    """A file that must exist whenever it is written to."""

    def write(self, data: bytes) -> None:
        try:
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:
            raise AssertionError(f"{self.path} was completed although it is live") from None
        with open(descriptor, "ab") as out:
            out.write(data)


class LiveLane(RunLane):
    """`shipper run` with `input.on_complete` on files that are restored, moved with their folder and written late."""

    name: ClassVar = "live"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.files = [LiveFile(self.folder / f"{name}.ndjson") for name in _FILES]
        for file in self.files:
            file.begin()
        self._completion = self.rng.choice(["delete", "move"])

    def settings(self) -> dict[str, object]:
        completion: dict[str, object] = {"input.on_complete": self._completion}
        if self._completion == "move":
            completion["input.completed_directory"] = str(self.shipper.folder / "done")
        return {**super().settings(), **completion}

    # Each fault returns whether one process delivered the whole file and then had time to complete it.

    def restore(self, file: LogFile, rng: Random) -> bool:
        """Replace a file by a copy: the same name and content with another inode, and then more records."""
        self._fill(file, rng)
        copy = LogFile(self.shipper.folder / "restored")
        shutil.copyfile(file.path, copy.path)
        copy.append(self, rng.randrange(1, 20), rng)
        copy.finish_line()
        copy.path.rename(file.path)
        file.numbers += copy.numbers
        return self._is_left_alone(file)

    def rename_folder(self, file: LogFile, rng: Random) -> bool:
        """Rename the folder, write more, and rename it back."""
        self._fill(file, rng)
        away = LiveFile(self.folder.with_name("away") / file.path.name)
        self.folder.rename(away.path.parent)
        away.append(self, rng.randrange(1, 20), rng)
        away.finish_line()
        time.sleep(rng.uniform(0.3, 3))
        away.path.parent.rename(self.folder)
        file.numbers += away.numbers
        return self._is_left_alone(file)

    def write_late(self, file: LogFile, rng: Random) -> bool:
        """Rename a file that its writer keeps open and writes to much later."""
        self._fill(file, rng)
        with file.path.open("ab", buffering=0) as kept:
            old = self._rename_away(file)
            is_delivered = self._has_time_for(old)
            for _ in range(rng.randrange(1, 20)):
                kept.write(self.next_record()[1].line)
        return is_delivered

    def leave_empty(self, file: LogFile, rng: Random) -> bool:
        """Rename a file for good and create an empty one in its place: only the renamed one is completed."""
        self._fill(file, rng)
        old = self._rename_away(file)
        is_left_alone = self._has_time_for(old)
        file.write(b"")
        return is_left_alone and not old.path.exists()

    def _fill(self, file: LogFile, rng: Random) -> None:
        file.append(self, rng.randrange(1, 20), rng)
        file.finish_line()

    def _rename_away(self, file: LogFile) -> LogFile:
        old = LogFile(self._rotated(file))
        file.path.rename(old.path)
        old.numbers, file.numbers = file.numbers, []
        file.begin()
        return old

    def _is_left_alone(self, file: LogFile) -> bool:
        is_delivered = self._has_time_for(file)
        file.write(b"")
        return is_delivered

    def _has_time_for(self, file: LogFile) -> bool:
        """Wait until a file is delivered and could have been completed; False = not in time, or the process ended."""
        process, until = self.running, time.monotonic() + _PATIENCE_S
        while self.is_in_flight(file) and time.monotonic() < until:
            time.sleep(0.05)
        is_delivered = not self.is_in_flight(file)
        wait_s = self._chosen["input.rotate_wait_seconds"]
        assert isinstance(wait_s, float)
        time.sleep(wait_s + _SPARE_S)
        return is_delivered and process is not None and self.running is process

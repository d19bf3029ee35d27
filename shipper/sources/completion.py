"""What becomes of a file when everything in it is settled: it is kept, deleted or moved away."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final, Literal, NamedTuple

import structlog

from shipper.crash_points import crash_point
from shipper.records import Stream
from shipper.sources.identity import shown

log = structlog.get_logger("sources")


class Completion(NamedTuple):
    """
    Attributes:
        action: What to do with a settled file.
        directory: Where to move it.
    """

    action: Literal["keep", "delete", "move"] = "keep"
    directory: Path | None = None

    def complete(self, stream: Stream) -> bool:
        """
        Delete or move a settled file, if it still is the one that was read and nothing has come to it since.

        Returns:
            Whether nothing is left to do.
        """
        path = Path(os.fsdecode(stream.path))
        try:
            status = path.stat()
        except OSError:
            return True  # somebody else has taken it away
        if (status.st_dev, status.st_ino) != stream.place:
            return True
        if (status.st_size, status.st_mtime_ns) != (stream.ended_size, stream.ended_ns) or not stream.is_settled:
            return False
        crash_point("complete.delete")
        try:
            if self.action == "delete":
                path.unlink()
                log.info("source_deleted", path=shown(path), bytes=stream.size)
            elif self.directory is not None and path.parent.resolve() != self.directory.resolve():
                self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                moved = _free_name(self.directory / path.name)
                shutil.move(path, moved)
                log.info("source_moved", path=shown(path), to=shown(moved), bytes=stream.size)
        except OSError as error:
            log.error("source_not_completed", path=shown(path), action=self.action, error=str(error))
        crash_point("complete.done")
        return True


KEEP: Final = Completion()


def _free_name(path: Path) -> Path:
    number = 1
    free = path
    while os.path.lexists(free):
        free = path.with_name(f"{path.name}.{number}")
        number += 1
    return free

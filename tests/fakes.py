"""Stand-ins for the edges of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import anyio
import anyio.lowlevel

from shipper.config import RecordsSettings
from shipper.delivery.endpoint import NoAnswerError
from shipper.delivery.verdicts import Answer


def strict_records(dedupe_window: int = 0) -> RecordsSettings:
    """Settings by which a record is sent as it came or not at all."""
    return RecordsSettings(mode="strict", unknown_fields="reject", dedupe_window=dedupe_window)


OK = Answer(status=202, content_type="application/json", retry_after="", body=b"{}")


def answer(status: int, retry_after: str = "", body: bytes = b"") -> Answer:
    return Answer(status=status, content_type="application/json", retry_after=retry_after, body=body)


class ScriptedEndpoint:
    """
    Answers with the next item of a script, then with 202.

    An item is an answer, an error, or an event to wait for, after which the request is accepted.
    """

    def __init__(self, script: Sequence[Answer | NoAnswerError | anyio.Event] = ()) -> None:
        self.script = list(script)
        self.bodies: list[bytes] = []
        self.is_closed = False

    async def request(self, method: str, path: str, body: bytes = b"", *, max_answer_bytes: int) -> Answer:
        assert (method, path) == ("POST", "/dim/v1/player/activities")
        self.bodies.append(body)
        await anyio.lowlevel.checkpoint()
        item = self.script.pop(0) if self.script else OK
        if isinstance(item, NoAnswerError):
            raise item
        if isinstance(item, anyio.Event):
            await item.wait()
            return OK
        return item

    async def aclose(self) -> None:
        self.is_closed = True

"""The first stage of a member: takes what its thread has read."""

from __future__ import annotations

from collections.abc import Sequence

from anyio.streams.memory import MemoryObjectSendStream

from shipper.kafka.group import Member
from shipper.kafka.store import TransactionStore
from shipper.kafka.stream import KafkaStream
from shipper.model.records import Backlog, Checkpoint, Chunk


class KafkaSource:
    """A source; it ends behind the ranges of the member, and without them only when it is cancelled."""

    def __init__(self, member: Member, store: TransactionStore) -> None:
        self._member = member
        self._store = store

    def __repr__(self) -> str:
        return f"<KafkaSource {self._member!r}>"

    @property
    def is_exhausted(self) -> bool:
        """Whether the whole group has settled all that was to be read."""
        return self._member.left == set()

    async def run(self, chunks_tx: MemoryObjectSendStream[Chunk]) -> None:
        """Send chunks; those of a partition that goes to another member are left out."""
        with self._member.reading():
            while (chunk := await self._member.next_chunk()) is not None:
                if not chunk.stream.is_ending:
                    await chunks_tx.send(chunk)

    async def after_save(self, saved: Sequence[Checkpoint]) -> None:
        """Drop what is settled."""
        for each in saved:
            assert isinstance(each.stream, KafkaStream)
            each.stream.note_saved(each.end_offset)

    def backlog(self) -> Backlog:
        """Describe the group, as far as this member knows it."""
        return Backlog(group=self._member.state(dict(self._store.transactions), self._store.seconds))

"""The checks of the siege, in addition to those of the torture. Each returns a list of problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from tests.campaign import some
from tests.e2e.driver import State
from tests.siege.canaries import canaries_in, commands_in
from tests.siege.feeds import Feed, TrashFeed
from tests.siege.visitors import Seen

RSS_MAX: Final = 200 << 20
STARVED_MAX_S: Final = 60.0
_SHOWN: Final = 5


def starved(feeds: Sequence[Feed]) -> list[str]:
    """Name the feeds whose records did not arrive for a long time."""
    return [
        f"{feed.name}: no good record arrived for {feed.starved_s:.0f} s although some were pending"
        for feed in feeds
        if feed.starved_s > STARVED_MAX_S
    ]


def written(feeds: Sequence[Feed]) -> tuple[int, int]:
    """Return the number of good records written, and the minimum number of bad ones."""
    return sum(feed.owed for feed in feeds), sum(len(feed.letters) + feed.hostile_records for feed in feeds)


def accounts(feeds: Sequence[Feed], state: State) -> list[str]:
    """
    Compare the totals of the state with what was written.

    The number of records in the trash is unknown, but all of them become dead letters. A file that is read twice under
    two names yields duplicates, which are counted and not sent.
    """
    good, bad = written(feeds)
    wrong = []
    if state.read != state.accepted + state.dead_lettered + state.duplicates:
        wrong.append(f"the totals do not add up: {state.read} read, {_settled(state)}")
    if state.accepted != good:
        wrong.append(f"{good} good records were written, each once, but {_settled(state)}")
    has_trash = any(isinstance(feed, TrashFeed) for feed in feeds)
    if state.dead_lettered < bad or (state.dead_lettered > bad and not has_trash):
        wrong.append(f"{bad} bad records were written outside the trash, but {_settled(state)}")
    if state.dead_lettered != len(state.dead_letters) + state.purged:
        wrong.append(f"{len(state.dead_letters)} dead letters and {state.purged} purged ones, but {_settled(state)}")
    return wrong


def _settled(state: State) -> str:
    return f"{state.accepted} accepted, {state.dead_lettered} dead-lettered, {state.duplicates} duplicates"


def memory(peak_bytes: int) -> list[str]:
    return [f"peak memory was {peak_bytes / (1 << 20):.0f} MiB, more than 200"] if peak_bytes > RSS_MAX else []


def health(seen: Seen) -> list[str]:
    if not seen.probes:
        return ["/healthz was never probed"]
    some = "; ".join(seen.unhealthy[:_SHOWN])
    return [f"{len(seen.unhealthy)} of {seen.probes} probes did not get a 200: {some}"] if some else []


def shown(where: str, data: bytes) -> list[str]:
    """Name the canaries and the terminal control sequences in an output."""
    wrong = [f"{where} shows {some(sorted(found), _SHOWN)}" for found in [canaries_in(data)] if found]
    return wrong + [f"{where} holds {sorted(found)[:_SHOWN]!r}" for found in [commands_in(data)] if found]


def pages(seen: Seen) -> list[str]:
    """Name the canaries shown by the admin address, and its other problems."""
    wrong = [f"{where} shows {some(sorted(found), _SHOWN)}" for where, found in seen.canaries.items()]
    return wrong + [f"{count} times: {what}" for what, count in Counter(seen.wrong).items()]


def cores(folders: Iterable[Path]) -> list[str]:
    return [f"a core: {core}" for folder in folders for core in folder.glob("core*")]

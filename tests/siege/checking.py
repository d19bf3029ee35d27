"""What must hold, during a siege and in its end. Each check returns what is wrong, in words; nothing = it holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.e2e.driver import State
from tests.siege.canaries import canaries_in, commands_in
from tests.siege.feeds import Feed, TrashFeed
from tests.siege.visitors import Seen

RSS_MAX: Final = 200 << 20
STARVED_MAX_S: Final = 60.0
_SHOWN: Final = 5


def losses(feeds: Sequence[Feed]) -> list[str]:
    """Name the good records that the service has to have and has not."""
    wrong = []
    for feed in feeds:
        lost = [number for number in range(feed.written) if not feed.has(number) and not feed.make(number).rule]
        if lost:
            wrong.append(f"{feed.name}: {len(lost)} of {feed.owed} good records lost, such as {lost[:_SHOWN]}")
    return wrong


def starved(feeds: Sequence[Feed]) -> list[str]:
    """Name the feeds of which nothing arrived for long although there was something."""
    return [
        f"{feed.name}: for {feed.starved_s:.0f} s no good record arrived although there were some"
        for feed in feeds
        if feed.starved_s > STARVED_MAX_S
    ]


def written(feeds: Sequence[Feed]) -> tuple[int, int]:
    """Return how many good records were written, and how many bad ones at least."""
    return sum(feed.owed for feed in feeds), sum(len(feed.letters) + feed.bait_records for feed in feeds)


def accounts(feeds: Sequence[Feed], state: State) -> list[str]:
    """
    Compare the accounts of the state with what was written.

    How many records the trash holds nobody can tell, but that all of them are dead letters. A file that is read twice,
    as it is known by another name, gives duplicates, which are counted and not sent.
    """
    good, bad = written(feeds)
    wrong = []
    if state.read != state.accepted + state.dead_lettered + state.duplicates:
        wrong.append(f"the account does not balance: {state.read} read, {_settled(state)}")
    if state.accepted != good:
        wrong.append(f"{good} good records were written, each once; but {_settled(state)}")
    has_trash = any(isinstance(feed, TrashFeed) for feed in feeds)
    if state.dead_lettered < bad or (state.dead_lettered > bad and not has_trash):
        wrong.append(f"{bad} bad records were written beside the trash; but {_settled(state)}")
    if state.dead_lettered != len(state.dead_letters) + state.purged:
        wrong.append(f"{len(state.dead_letters)} dead letters and {state.purged} purged ones; but {_settled(state)}")
    return wrong


def _settled(state: State) -> str:
    return f"{state.accepted} accepted, {state.dead_lettered} dead-lettered, {state.duplicates} duplicates"


def memory(peak_bytes: int) -> list[str]:
    return [f"it held {peak_bytes / (1 << 20):.0f} MiB, more than 200"] if peak_bytes > RSS_MAX else []


def health(seen: Seen) -> list[str]:
    if not seen.probes:
        return ["nobody asked for /healthz"]
    some = "; ".join(seen.unhealthy[:_SHOWN])
    return [f"{len(seen.unhealthy)} of {seen.probes} probes got no 200: {some}"] if some else []


def shown(where: str, data: bytes) -> list[str]:
    """Name the canaries, and what a terminal would obey, in an output."""
    wrong = [f"{where} shows {', '.join(sorted(found)[:_SHOWN])}" for found in [canaries_in(data)] if found]
    return wrong + [f"{where} holds {sorted(found)[:_SHOWN]!r}" for found in [commands_in(data)] if found]


def pages(seen: Seen) -> list[str]:
    """Name the canaries that the admin address showed, and what else it did."""
    wrong = [f"{where} shows {', '.join(sorted(found)[:_SHOWN])}" for where, found in seen.canaries.items()]
    return wrong + [f"{count} times: {what}" for what, count in Counter(seen.wrong).items()]


def cores(folders: Iterable[Path]) -> list[str]:
    return [f"a core: {core}" for folder in folders for core in folder.glob("core*")]


def unseen(happened: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Name what was planned and never happened."""
    return [
        f"never happened: {where}: {what}" for where, counts in happened.items() for what, n in counts.items() if not n
    ]


def table(counts: Mapping[str, object]) -> str:
    return "\n".join(f"{value:>14}  {name}" for name, value in counts.items())

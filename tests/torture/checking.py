"""What must hold once it is quiet. Each check gives what it found wrong, in words; nothing = it holds."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from tests.torture.adversary import Adversary
from tests.torture.books import Books
from tests.torture.lanes import Lane

_SHOWN: Final = 10
# Beside the faults themselves.
MUST_HAPPEN: Final = ("delivered twice", "rotations in flight", "bisects", "kills with records in flight")


def losses(lane: Lane, books: Books) -> list[str]:
    """Return which records the service has to have and has not."""
    lost = [number for number in range(lane.written) if not lane.has(number) and not lane.make(number).rule]
    return _named("lost", lane, lost)


def letters(lane: Lane) -> list[str]:
    """Return where the dead letters, as a user sees them, are not the planned ones."""
    listed = lane.shipper.run("dead-letters", "list", "--limit", str(10**9), "--format", "json", check=False)
    exported = lane.shipper.run("dead-letters", "export", check=False)
    assert listed.returncode == exported.returncode == 0, listed.stderr + exported.stderr
    state = lane.shipper.read_state()
    found = Counter(letter.raw for letter in state.dead_letters)
    torn = Counter(lane.torn_letters([raw for raw in found if raw not in lane.letters]))
    wrong = [
        f"{lane.name}: dead letter that was not planned: {raw!r}" for raw in found - torn if raw not in lane.letters
    ]
    wrong += [
        f"{lane.name}: dead letter missing ({rule}): {raw!r}" for raw, rule in lane.letters.items() if not found[raw]
    ]
    wrong += [f"{lane.name}: {count} dead letters of one record: {raw!r}" for raw, count in found.items() if count > 1]
    rules = {letter.raw: letter.rule for letter in state.dead_letters}
    wrong += [
        f"{lane.name}: dead letter by the rule {rules[raw]} instead of {rule}: {raw!r}"
        for raw, rule in lane.letters.items()
        if rules.get(raw, rule) != rule
    ]
    if _lines(exported.stdout) != Counter(_shown(raw) for raw in found.elements()):
        wrong.append(f"{lane.name}: `dead-letters export` does not give the dead letters of the state")
    if Counter(json.loads(line)["rule"] for line in listed.stdout.splitlines() if line.startswith("{")) != Counter(
        letter.rule for letter in state.dead_letters
    ):
        wrong.append(f"{lane.name}: `dead-letters list` does not list the dead letters of the state")
    lane.noted["dead letters"] = found.total()
    lane.noted["torn ends of the pipe among them"] = torn.total()
    return wrong


def accounts(lane: Lane) -> list[str]:
    """Return where the accounts of the state store are not what was written; that they add up, each run has shown."""
    state = lane.shipper.read_state()
    wanted = (lane.owed, len(lane.letters) + lane.noted["torn ends of the pipe among them"])
    # No record is written twice, so that a duplicate is one that was read twice.
    if (state.accepted, state.dead_lettered, state.duplicates) == (*wanted, 0) and state.read == sum(wanted):
        return []
    return [
        f"{lane.name}: {state.read} read, {state.accepted} accepted, {state.dead_lettered} dead-lettered, "
        f"{state.duplicates} duplicates; written were {wanted[0]} to accept and {wanted[1]} to refuse, each once"
    ]


def status(lane: Lane) -> list[str]:
    """
    Tell if the user who asks whether everything is delivered is not told that it is.

    What was taken away before it was read stands in the way of that answer; nothing else may.
    """
    asked = lane.shipper.run("status", "--until", "now", "--all", check=False, settings=lane.settings())
    is_yes = asked.returncode == 0
    if lane.removed:
        named = re.findall(r" (/\S+) \(gone before it was read\)", asked.stdout)
        count = re.search(r"(\d+) inputs? stands? in the way", asked.stdout)
        is_all = lane.taken_away <= set(named) <= lane.removed and (int(count[1]) if count else 0) == len(named)
        is_yes = is_all and bool(named) == (not is_yes)
    return [] if is_yes else [f"{lane.name}: `shipper status --until now`: {asked.stdout}"]


OF_LANES: Final = (letters, accounts, status)  # in this order: the torn ends are found by the first


def repeats(lanes: Sequence[Lane], books: Books) -> list[str]:
    """Return which records were delivered again though their delivery was in no doubt."""
    unexplained = books.reasons()[1]
    if not unexplained:
        return []
    some = "; ".join(
        f"{lanes[key >> 40].name} record {key & (1 << 40) - 1} by {processes}"
        for key, processes in unexplained[:_SHOWN]
    )
    return [f"{len(unexplained)} deliveries repeated without need: {some}"]


def unseen(adversary: Adversary, totals: Counter[str]) -> list[str]:
    """Return what was planned and never happened."""
    never = [f"{where}: {name}" for where, deck in adversary.decks.items() for name in deck.missing]
    return [f"never seen: {what}" for what in [*never, *(name for name in MUST_HAPPEN if not totals[name])]]


def totals(lanes: Sequence[Lane], books: Books) -> Counter[str]:
    """Count what there is to tell, of all lanes."""
    found: Counter[str] = Counter(
        {
            "records written": sum(lane.written for lane in lanes),
            "delivered": len(books.first),
            "delivered twice": sum(map(len, books.repeats.values())),
            "bisects": books.bisects,
        }
    )
    found.update({f"delivered twice for: {reason}": count for reason, count in books.reasons()[0].items()})
    for lane in lanes:
        found.update(lane.noted)
    return found


def _named(what: str, lane: Lane, numbers: Sequence[int]) -> list[str]:
    if not numbers:
        return []
    ids = ", ".join(f"{number} ({lane.make(number).event['EventId']})" for number in numbers[:_SHOWN])
    return [f"{lane.name}: {len(numbers)} {what}: {ids}{', …' if len(numbers) > _SHOWN else ''}"]


def _shown(raw: bytes) -> str:
    return raw.decode(errors="backslashreplace")


def _lines(text: str) -> Counter[str]:
    return Counter(text.splitlines())


def table(rows: Iterable[tuple[str, Any]]) -> str:
    return "\n".join(f"{count:>12,}  {name}" for name, count in rows)

"""The checks at the end. Each returns a list of problems."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from tests.campaign import some
from tests.torture.journal import Journal, Producer
from tests.torture.lanes import Lane

# In addition to the faults themselves.
MUST_HAPPEN: Final = ("delivered twice", "rotations in flight", "bisects", "kills with records in flight")
_TORN: Final = "torn ends of the pipe among them"


def losses(producers: Sequence[Producer]) -> list[str]:
    """Name the records that the service must have and does not have."""
    wrong = []
    for producer in producers:
        lost = [number for number in range(producer.written) if producer.is_missing(number)]
        ids = [f"{number} ({producer.make(number).event['EventId']})" for number in lost[:10]]
        if lost:
            wrong.append(f"{producer.name}: {len(lost)} of {producer.owed} lost: {some(ids)}")
    return wrong


def letters(lane: Lane) -> list[str]:
    """Compare the dead letters shown to a user with the planned ones."""
    listed = lane.shipper.run("dead-letters", "list", "--limit", str(10**9), "--format", "json", check=False)
    exported = lane.shipper.run("dead-letters", "export", check=False)
    assert listed.returncode == exported.returncode == 0, listed.stderr + exported.stderr
    state = lane.shipper.read_state()
    found = Counter(letter.raw for letter in state.dead_letters)
    rules = {letter.raw: letter.rule for letter in state.dead_letters}
    torn = Counter(lane.torn_letters([raw for raw in found if raw not in lane.letters]))
    wrong = [f"dead letter that was not planned: {raw!r}" for raw in found - torn if raw not in lane.letters]
    wrong += [f"{count} dead letters of one record: {raw!r}" for raw, count in found.items() if count > 1]
    for raw, rule in lane.letters.items():
        if rules.get(raw) != rule:
            wrong.append(f"dead letter by the rule {rules.get(raw, 'none')} instead of {rule}: {raw!r}")
    shown = Counter(raw.decode(errors="backslashreplace") for raw in found.elements())
    if Counter(exported.stdout.splitlines()) != shown:
        wrong.append("`dead-letters export` does not print the dead letters of the state")
    named = Counter(json.loads(line)["rule"] for line in listed.stdout.splitlines() if line.startswith("{"))
    if named != Counter(state.rules):
        wrong.append("`dead-letters list` does not list the dead letters of the state")
    lane.counts["dead letters"] = found.total()
    lane.counts[_TORN] = torn.total()
    return [f"{lane.name}: {each}" for each in wrong]


def accounts(lane: Lane) -> list[str]:
    """Compare the totals of the state store with what was written; the driver checks that they add up."""
    state = lane.shipper.read_state()
    accepted, refused = lane.owed, len(lane.letters) + lane.counts[_TORN]
    # No record is written twice, so a duplicate is a record that was read twice.
    wanted = (accepted + refused, accepted, refused, 0)
    found = (state.read, state.accepted, state.dead_lettered, state.duplicates)
    names = "read, accepted, dead-lettered and duplicates"
    return [] if found == wanted else [f"{lane.name}: {names} are {found}; by what was written, {wanted}"]


def status(lane: Lane) -> list[str]:
    """
    Check that `status` reports that everything is delivered.

    Only files that were removed before they were read completely may prevent that.
    """
    asked = lane.shipper.run("status", "--until", "now", "--all", check=False, settings=lane.settings())
    is_yes = asked.returncode == 0
    if lane.removed:
        named = re.findall(r" (/\S+) \(gone before it was read\)", asked.stdout)
        count = re.search(r"(\d+) inputs? (?:is|are) not settled", asked.stdout)
        is_all = lane.taken_away <= set(named) <= lane.removed and (int(count[1]) if count else 0) == len(named)
        is_yes = is_all and bool(named) == (not is_yes)
    return [] if is_yes else [f"{lane.name}: `shipper status --until now`: {asked.stdout}"]


OF_LANES: Final = (letters, accounts, status)  # in this order: the first finds the truncated records


def repeats(lanes: Sequence[Lane], journal: Journal) -> list[str]:
    """Name the records that were delivered again without a reason."""
    unexplained = [
        f"{lanes[key >> 40].name} record {key & (1 << 40) - 1} by {processes}"
        for key, processes in journal.reasons()[1]
    ]
    return [f"{len(unexplained)} deliveries repeated without need: {some(unexplained)}"] if unexplained else []


def unseen(happened: Mapping[str, Mapping[str, int]]) -> list[str]:
    """Name the planned events that never happened."""
    return [
        f"never happened: {where}: {name}" for where, counts in happened.items() for name, n in counts.items() if not n
    ]


def totals(lanes: Sequence[Lane], journal: Journal) -> Counter[str]:
    found: Counter[str] = Counter(
        {
            "records written": sum(lane.written for lane in lanes),
            "delivered": len(journal.first),
            "delivered twice": sum(map(len, journal.repeats.values())),
            "bisects": journal.bisects,
        }
    )
    found.update({f"delivered twice for: {reason}": count for reason, count in journal.reasons()[0].items()})
    for lane in lanes:
        found.update(lane.counts)
    return found

"""
Tables of faults. Every fault in them is injected and counted, and must have an effect at least once.

A fault is a function of a target and a random generator; it blocks while active, and returns whether it had an effect.
"""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from email.utils import formatdate
from functools import partial
from random import Random
from typing import Final

from tests.e2e.fake_service import RESET, STORE_AND_RESET, WEB_PAGE, Reply
from tests.e2e.files import COMPRESSIONS
from tests.torture.application import LogFile, RunLane
from tests.torture.exports import BackfillLane
from tests.torture.lanes import Lane
from tests.torture.live import LiveLane
from tests.torture.schedule import Fault
from tests.torture.service import AGAIN, NAMED, VAGUE, Medley, Misbehaviour, Service, Shape

ServiceFault = Callable[[Service, Random], bool]
LaneFault = Callable[[Lane, Random], bool]
FileFault = Callable[[RunLane, LogFile, Random], bool]

_EFFECT_LIMIT_S: Final = 20.0
_CLOSED: Final = Reply(fault="close")
_DENIAL: Final = Reply(status=200, body=b'{"success":false}')


def _error(status: int, message: str = "", **headers: str) -> Reply:
    body = json.dumps({"statusCode": status, "message": message or f"This is a {status}."}).encode()
    return Reply(status=status, body=body, headers={name.replace("_", "-"): value for name, value in headers.items()})


# The service ------------------------------------------------------------------------------------------------------


def _answers(reply: Reply, *, stores: bool = False, hangs: bool = False) -> ServiceFault:
    """Give this answer to a few requests, or to all for a while."""

    def fault(service: Service, rng: Random) -> bool:
        seconds, times = rng.choice([(0.0, rng.randrange(1, 8)), (rng.uniform(0.2, 2), 1)])
        return service.misbehave(Misbehaviour(reply, stores=stores, hangs=hangs), seconds=seconds, times=times)

    return fault


def _medley(service: Service, rng: Random) -> bool:
    """Let every third request fail in one of several ways for a while."""
    several = [
        *(Misbehaviour(reply) for reply in (RESET, WEB_PAGE, _DENIAL, _error(503), _error(429), _error(403))),
        *(Misbehaviour(reply, stores=True) for reply in (STORE_AND_RESET, _error(500))),
        Misbehaviour(_CLOSED, stores=True, loses_answer=False),
    ]
    return service.misbehave(Medley(several, rng), seconds=rng.uniform(1, 3))


def _closes(service: Service, rng: Random) -> bool:
    return service.misbehave(Misbehaviour(_CLOSED, stores=True, loses_answer=False), seconds=rng.uniform(0.2, 1))


def _throttles_until(service: Service, rng: Random) -> bool:
    wait = formatdate(time.time() + 2, usegmt=True)
    return service.misbehave(Misbehaviour(_error(429, Retry_After=wait)), seconds=0.5)


def _too_large(service: Service, rng: Random) -> bool:
    bad = Misbehaviour(_error(413), over_events=rng.randrange(1, 30))
    return service.misbehave(bad, seconds=rng.uniform(0.5, 2))


def _wait_for_more(count: Callable[[], int], before: int) -> None:
    """Wait until a fault has an effect, for a limited time."""
    until = time.monotonic() + _EFFECT_LIMIT_S
    while count() == before and time.monotonic() < until:
        time.sleep(0.02)


def _shaped(shapes: Sequence[Shape]) -> ServiceFault:
    """Refuse poison by a 2xx answer in one of these shapes."""

    def fault(service: Service, rng: Random) -> bool:
        intake, before = service.intake, service.intake.shaped
        intake.shape = rng.choice(shapes)
        _wait_for_more(lambda: intake.shaped, before)
        time.sleep(rng.uniform(0, 1))
        intake.shape = None
        return intake.shaped > before

    return fault


def _success(document: object, *, stores: bool = False) -> ServiceFault:
    """Answer 200 with a body that reports a failure or cannot be understood."""
    return _answers(Reply(status=200, body=json.dumps(document).encode()), stores=stores)


def _revokes_tokens(service: Service, rng: Random) -> bool:
    before = service.tokens.refused
    service.tokens.revoke()
    _wait_for_more(lambda: service.tokens.refused, before)
    return service.tokens.refused > before


def _no_tokens(service: Service, rng: Random) -> bool:
    """Revoke all tokens, and issue no new ones for a while."""
    endpoint = service.tokens
    before = endpoint.failures
    endpoint.is_away = True
    endpoint.revoke()
    _wait_for_more(lambda: endpoint.failures, before)
    time.sleep(rng.uniform(0, 1))
    endpoint.is_away = False
    return endpoint.failures > before


SERVICE: Final[dict[str, ServiceFault]] = {
    "429": _answers(_error(429)),
    "429, Retry-After in seconds": _answers(_error(429, Retry_After="1")),
    "429, Retry-After as a date": _throttles_until,
    "403": _answers(_error(403)),
    "403 for a quota": _answers(_error(403, "Out of call volume quota. Quota will be replenished in 00:00:01.")),
    "401": _answers(_error(401)),
    "401 for the key": _answers(_error(401, "Access denied due to invalid subscription key.")),
    "404": _answers(_error(404)),
    "413": _too_large,
    "500": _answers(_error(500)),
    "503, Retry-After": _answers(_error(503, Retry_After="1")),
    "504 after storing": _answers(_error(504), stores=True),
    "web page": _answers(WEB_PAGE),
    "reset before storing": _answers(RESET),
    "reset after storing": _answers(STORE_AND_RESET, stores=True),
    "closed after the answer": _closes,
    "a third of all requests": _medley,
    "answer cut off after storing": _answers(Reply(fault="truncate"), stores=True),
    "hang before storing": _answers(RESET, hangs=True),
    "hang after storing": _answers(RESET, stores=True, hangs=True),
    "2xx names poison in other shapes": _shaped(NAMED),
    "2xx counts poison, or names rows": _shaped(VAGUE),
    "2xx asks for some events again": _shaped(AGAIN),
    "2xx denies": _success({"success": False, "error": {"code": 17, "message": "no"}}),
    "2xx says 503": _success({"statusCode": 503, "message": "busy"}),
    "2xx denies after storing": _success({"status": "failed"}, stores=True),
    "2xx counts wrongly after storing": _success({"accepted": 0, "duplicates": 0}, stores=True),
    "2xx unknown after storing": _success({"status": "zork"}, stores=True),
    "tokens expire early": _revokes_tokens,
    "token endpoint away": _no_tokens,
    "service restarted": lambda service, rng: service.restart(pause_s=rng.uniform(0, 2)),
}


# A shipper --------------------------------------------------------------------------------------------------------


def _kill(lane: Lane, rng: Random) -> bool:
    """Kill the process while records are in flight, and start the next one at once or later."""
    lane.rest_until(lambda: lane.backlog > 0 and lane.is_alive(), limit_s=_EFFECT_LIMIT_S)
    lane.rest(rng.uniform(0, 0.3))
    lane.counts["kills with records in flight"] += lane.backlog > 0
    has_effect = lane.end_by(signal.SIGKILL)
    time.sleep(rng.choice([0, rng.uniform(0, 1)]))
    lane.tend()
    return has_effect


def _kill_at_start(lane: Lane, rng: Random) -> bool:
    lane.rest_until(lane.is_alive, limit_s=_EFFECT_LIMIT_S)
    lane.end_by(signal.SIGKILL)
    lane.rest_until(lane.is_alive, limit_s=_EFFECT_LIMIT_S)
    time.sleep(rng.uniform(0, 0.5))
    return lane.end_by(signal.SIGKILL)


def _stop(lane: Lane, rng: Random) -> bool:
    lane.rest_until(lane.is_alive, limit_s=_EFFECT_LIMIT_S)
    lane.rest(rng.uniform(0, 0.5))
    has_effect = lane.end_by(signal.SIGTERM)
    time.sleep(rng.choice([0, rng.uniform(0, 1)]))
    return has_effect


def _hold(lane: Lane, rng: Random) -> bool:
    """Stop the process by SIGSTOP, sometimes for longer than the read timeout."""
    lane.rest_until(lane.is_alive, limit_s=_EFFECT_LIMIT_S)
    return lane.hold(rng.choice([rng.uniform(0.1, 1.5), rng.uniform(0.1, 1.5), rng.uniform(4, 6)]))


def _fill_disk(lane: Lane, rng: Random) -> bool:
    """Fill the disk until shipper notices, and free it after a while, sometimes after a kill."""
    lane.rest_until(lane.is_alive, limit_s=_EFFECT_LIMIT_S)
    with lane.full_disk():
        has_effect = lane.rest_until(lane.misses_room, limit_s=_EFFECT_LIMIT_S)
        lane.rest(rng.uniform(0, 2))
        if rng.random() < 0.3:
            lane.end_by(signal.SIGKILL)
    return has_effect


def _fail_fsync(lane: Lane, rng: Random) -> bool:
    """Make fsync fail at least once, sometimes for a while; sometimes kill the process."""
    lane.rest_until(lambda: lane.backlog > 0 and lane.is_alive(), limit_s=_EFFECT_LIMIT_S)
    before = lane.failed_fsyncs
    with lane.failing_fsync():
        has_effect = lane.rest_until(lambda: lane.failed_fsyncs > before, limit_s=_EFFECT_LIMIT_S)
        lane.rest(rng.choice([0, rng.uniform(0, 1)]))
        if rng.random() < 0.3:
            lane.end_by(signal.SIGKILL)
    return has_effect


def _step_clock(lane: Lane, rng: Random, *, direction: int) -> bool:
    """Step the wall clock, and after a while step it back."""
    seconds = direction * rng.choice([rng.randrange(30, 600), rng.randrange(3600, 86_400)])
    lane.step_clock(seconds)

    def is_seen() -> bool:
        at = (lane.status().get("live") or {}).get("at")
        return at is not None and abs(at - time.time() - seconds) < 10

    has_effect = lane.rest_until(is_seen, limit_s=_EFFECT_LIMIT_S)
    lane.rest(rng.uniform(0.5, 2))
    lane.step_clock(0)
    return has_effect


LANE: Final[dict[str, LaneFault]] = {
    "kill -9": _kill,
    "kill -9 at the start": _kill_at_start,
    "SIGTERM": _stop,
    "SIGSTOP": _hold,
    "disk full": _fill_disk,
    "failed fsync": _fail_fsync,
    "clock stepped forward": partial(_step_clock, direction=1),
    "clock stepped back": partial(_step_clock, direction=-1),
}


# The exports ------------------------------------------------------------------------------------------------------

EXPORTS: Final[dict[str, Callable[[BackfillLane, Random], bool]]] = {
    "unlike input": lambda lane, rng: lane.drop_foreign(limit_s=_EFFECT_LIMIT_S),
}


# A shipper of log files -------------------------------------------------------------------------------------------


def _rotate_while_stopped(lane: RunLane, rng: Random) -> bool:
    """End the process, create and rotate files, and start the next process."""
    lane.rest_until(lane.is_alive, limit_s=_EFFECT_LIMIT_S)
    lane.end_by(rng.choice([signal.SIGTERM, signal.SIGKILL]))
    is_done = lane.do_soon(lambda: lane.rotate_while_stopped(rng))
    return not lane.is_alive() and is_done.wait(_EFFECT_LIMIT_S)


RUN: Final[dict[str, Callable[[RunLane, Random], bool]]] = {"generations rotated while stopped": _rotate_while_stopped}


# A log file -------------------------------------------------------------------------------------------------------

FILE: Final[dict[str, FileFault]] = {
    "renamed": RunLane.rename,
    "renamed again and again, unseen": RunLane.rotate_in_a_burst,
    **{f"renamed, then {suffix}": partial(RunLane.rename, suffix=suffix) for suffix in COMPRESSIONS},
    "copied and truncated": RunLane.copy_and_truncate,
    "copied and truncated, then gz": partial(RunLane.copy_and_truncate, suffix="gz"),
    "truncated when all was read": RunLane.truncate_when_read,
}

LIVE: Final[dict[str, Callable[[LiveLane, LogFile, Random], bool]]] = {
    "restored from a copy": LiveLane.restore,
    "folder renamed and back": LiveLane.rename_folder,
    "renamed and written late": LiveLane.write_late,
    "renamed, and nothing after": LiveLane.leave_empty,
}


# By lane ----------------------------------------------------------------------------------------------------------


def of_lane(lane: Lane) -> Mapping[str, Fault]:
    if isinstance(lane, BackfillLane):
        return {**LANE, **EXPORTS}
    return {**LANE, **RUN} if isinstance(lane, RunLane) else LANE


def of_files(lane: Lane) -> Mapping[str, Fault]:
    if isinstance(lane, LiveLane):
        return LIVE
    return FILE if isinstance(lane, RunLane) else {}

"""`shipper run` and `backfill` as members of a Kafka consumer group."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from shipper.cli.common import print_json, reader_may_leave, run_async, say, several
from shipper.cli.shipping import Run, SummaryForm, has_logged_end, in_words
from shipper.config.settings import Settings

if TYPE_CHECKING:
    from shipper.kafka.ranges import Wanted
    from shipper.pipeline import Pipeline


def ship_as_member(
    command: str,
    settings: Settings,
    *,
    listen: str,
    read: Callable[[], Settings] | None = None,
    wanted: Wanted | None = None,
    form: SummaryForm = "text",
) -> int:
    """
    Run a member until a signal stops it or the group has settled what is wanted, and print the summary.

    Args:
        listen: The admin address; empty = none.
        read: Reads the settings again, for SIGHUP.
        wanted: What to read; None = everything, for ever.
    Returns:
        The exit code.
    Raises:
        ConfigError, SourceError, StateError: As for `opened_group`.
    """
    from anyio.from_thread import BlockingPortal

    from shipper.cli.showing import showing
    from shipper.kafka.opening import opened_group

    kafka = settings.input.kafka
    assert kafka is not None
    handed_over = 0
    with (
        opened_group(settings, now=time.monotonic, wall_time=time.time, wanted=wanted) as group,
        showing(listen, None, None, settings.admin) as shown,
    ):

        def apply(settings: Settings) -> None:
            from shipper.status.logs import set_level

            assert settings.input.kafka is not None
            group.member.reconfigure(settings.input.kafka)
            set_level(settings.log.level)

        @asynccontextmanager
        async def attached(pipeline: Pipeline) -> AsyncIterator[None]:
            nonlocal handed_over
            async with BlockingPortal() as portal:
                group.member.attach(portal, pipeline)
                yield
            handed_over = pipeline.handed_over

        run = Run(
            command,
            settings,
            group.member,
            group.store,
            shown,
            is_one_shot=wanted is not None,
            reload=(read, apply) if read else None,
        )
        summary, reasons = run_async(lambda: run.run(attach=attached))
    if form == "json":
        with reader_may_leave():
            print_json(msgspec.json.encode({**msgspec.structs.asdict(summary), "handed_over": handed_over}))
    elif not has_logged_end(command, settings, summary, handed_over=handed_over):
        say(in_words(summary, reasons, f"the topic {kafka.letters}"))
        if handed_over:
            say(f"{several(handed_over, 'record')} handed over to the next owners of their partitions")
        if wanted is not None and summary.outcome == "finished" and not summary.read:
            say("all of it was settled before; to send it once more: --again NAME")
    return summary.exit_code(is_one_shot=wanted is not None)

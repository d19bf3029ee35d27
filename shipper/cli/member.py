"""`shipper run` and `backfill` as members of a Kafka consumer group."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Final

import msgspec

from shipper.cli.common import print_json, run_async, say, several, tolerate_closed_stdout
from shipper.cli.shipping import SummaryForm, has_logged_end, run_pipeline, summary_text
from shipper.config.settings import Settings

if TYPE_CHECKING:
    from shipper.kafka.offsets import Selection
    from shipper.pipeline.pipeline import Pipeline

NO_MESSAGES: Final = "there are no messages in this range"


def ship_as_member(
    command: str,
    settings: Settings,
    *,
    listen: str,
    read: Callable[[], Settings] | None = None,
    selection: Selection | None = None,
    form: SummaryForm = "text",
) -> int:
    """
    Run a member until a signal stops it or the group has settled the selection.

    Print the summary, and return the exit code.

    Args:
        read: Reloads the settings on SIGHUP.
        selection: What to read; None = everything, for ever.
    Raises:
        ConfigError, SourceError, StateError: As for `open_group`.
    """
    from anyio.from_thread import BlockingPortal

    from shipper.cli.publishing import publishing
    from shipper.kafka.store import open_group

    kafka = settings.input.kafka
    assert kafka is not None
    is_one_shot = selection is not None
    handed_over = 0
    with (
        open_group(settings, now=time.monotonic, wall_time=time.time, selection=selection) as (member, store),
        publishing(listen, None, None, settings.admin) as publisher,
    ):

        def apply(settings: Settings) -> None:
            from shipper.status.logs import set_level

            assert settings.input.kafka is not None
            member.reconfigure(settings.input.kafka)
            set_level(settings.log.level)

        @asynccontextmanager
        async def attach(pipeline: Pipeline) -> AsyncIterator[None]:
            nonlocal handed_over
            async with BlockingPortal() as portal:
                member.attach(portal, pipeline)
                yield
            handed_over = pipeline.settlement.handed_over

        summary, reasons = run_async(
            lambda: run_pipeline(
                command,
                settings,
                member,
                store,
                publisher,
                is_one_shot=is_one_shot,
                reload=(read, apply) if read else None,
                attach=attach,
            )
        )
    if form == "json":
        with tolerate_closed_stdout():
            print_json(msgspec.json.encode({**msgspec.structs.asdict(summary), "handed_over": handed_over}))
    elif not has_logged_end(command, settings, summary, handed_over=handed_over):
        say(summary_text(summary, reasons, f"the topic {kafka.letters}"))
        if handed_over:
            say(f"{several(handed_over, 'record')} left to the next owners of their partitions")
        if selection is not None and summary.outcome == "finished" and not summary.read:
            settled = "nothing is left to read in this range; to send it again: --again NAME"
            say(NO_MESSAGES if selection.is_empty else settled)
    return summary.exit_code(is_one_shot=is_one_shot)

"""`shipper run` as a member of a Kafka consumer group."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from shipper.cli.common import run_async, say, several
from shipper.cli.shipping import Run, has_logged_end, in_words
from shipper.config.settings import Settings

if TYPE_CHECKING:
    from shipper.pipeline import Pipeline


def ship_as_member(settings: Settings, read: Callable[[], Settings]) -> int:
    """
    Run a member until a signal stops it, and print the summary.

    Args:
        read: Reads the settings again, for SIGHUP.
    Returns:
        The exit code.
    Raises:
        ConfigError, StateError: As for `opened_group`.
    """
    from anyio.from_thread import BlockingPortal

    from shipper.cli.showing import showing
    from shipper.kafka.opening import opened_group

    kafka = settings.input.kafka
    assert kafka is not None
    handed_over = 0
    with (
        opened_group(settings, now=time.monotonic, wall_time=time.time) as group,
        showing(settings.admin.listen, None, None, settings.admin) as shown,
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

        run = Run("run", settings, group.source, group.store, shown, is_one_shot=False, reload=(read, apply))
        summary, reasons = run_async(lambda: run.run(attach=attached))
    if not has_logged_end("run", settings, summary, handed_over=handed_over):
        say(in_words(summary, reasons, f"the topic {kafka.letters}"))
        if handed_over:
            say(f"{several(handed_over, 'record')} handed over to the next owners of their partitions")
    return summary.exit_code(is_one_shot=False)

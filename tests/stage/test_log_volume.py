"""An outage of an hour in virtual time: the log stays small and says what an operator needs."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import anyio
import pytest
import structlog

from shipper.state.store import Store
from shipper.status.logs import configure_logs, take_left_out
from tests.fakes import answer
from tests.stage import test_pipeline_outage
from tests.stage.loops import in_virtual_time
from tests.stage.test_pipeline_outage import RECORDS, Outage

AWAY_S = 3_600.0


@pytest.fixture
def real_logs():
    before = structlog.get_config()
    take_left_out()
    configure_logs("info", "json", now=anyio.current_time)
    structlog.configure(cache_logger_on_first_use=False)  # otherwise the loggers would keep this after the test
    yield
    take_left_out()
    structlog.configure(**before)


@pytest.mark.usefixtures("real_logs")
@in_virtual_time
async def test_an_outage_is_logged_every_30_s_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(test_pipeline_outage, "BACK_AT", AWAY_S)
    store = Store(tmp_path)
    outage = Outage(store, monkeypatch, answer(503), concurrency=8)
    monkeypatch.setattr("shipper.pipeline.observer.SNAPSHOT_INTERVAL_S", 10.0)  # rarely, so that it is cheap
    assert (await outage.begin().run()).accepted == RECORDS
    store.close()
    assert len(outage.service.requests) > 650, "delivery was not retried throughout"
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    events = Counter(line["event"] for line in lines)
    assert events["self_report"] == pytest.approx(AWAY_S / 30, rel=0.01)
    assert (events["delivery_paused"], events["delivery_resumed"]) == (1, 1)
    assert sum(events.values()) < events["self_report"] + 100, events
    assert {line.get("paused") for line in lines if line["event"] == "self_report"} == {"unavailable"}

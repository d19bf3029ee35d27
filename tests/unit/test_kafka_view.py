"""The temporary copy of a group's state, and writing to its topics with a client that fails."""

from __future__ import annotations

import fcntl
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from shipper.cli.common import private_folder
from shipper.config.settings import KafkaSettings
from shipper.kafka.documents import Document
from shipper.kafka.view import GroupView
from shipper.model.errors import StateInUseError


def test_the_copies_of_killed_commands_are_deleted_but_none_in_use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for name in ("shipper-view-killed", "shipper-view-used", "shipper-view-new", "others"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.db").touch()
        os.utime(tmp_path / name, None if name == "shipper-view-new" else (0, 0))
    (tmp_path / "shipper-view-link").symlink_to(tmp_path / "others")
    used = os.open(tmp_path / "shipper-view-used", os.O_RDONLY)
    fcntl.flock(used, fcntl.LOCK_EX)
    with private_folder() as folder:
        left = {path.name for path in tmp_path.iterdir()} - {folder.name}
        assert left == {"shipper-view-used", "shipper-view-new", "shipper-view-link", "others"}
        os.utime(folder, (0, 0))
        with private_folder():
            assert folder.exists()
    assert not folder.exists()
    os.close(used)


class FencedProducer:
    """A client that another one ends during a transaction: calls fail first, and a callback tells the reason later."""

    def __init__(self, view: GroupView) -> None:
        self._view = view
        self._has_failed = False

    def begin_transaction(self) -> None:
        pass

    def produce(self, *_: Any, **__: Any) -> None:
        self._has_failed = True
        raise KafkaException(KafkaError(KafkaError._FATAL, "Local: Fatal error"))

    def poll(self, _: float) -> None:
        if self._has_failed:
            self._view._note_error(KafkaError(KafkaError._FENCED, "fenced", fatal=True))


def test_a_replay_that_is_ended_while_it_writes_says_that_another_one_has_started(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("shipper.kafka.view.read_table", lambda *_, **__: [])
    monkeypatch.setattr(GroupView, "_copy", lambda *_: None)
    settings = KafkaSettings(brokers=("127.0.0.1:1",), topics=("t",), group_id="g", security="plaintext")
    view = GroupView(settings, None)  # type: ignore[arg-type]  # not used here
    view._producer = FencedProducer(view)  # type: ignore[assignment]
    view._letters = {(1, 2): Document("k", b"v")}

    class Letter:
        stream_id, start_offset = 1, 2

    with pytest.raises(StateInUseError, match="another replay or purge of group g has started"):
        view.delete([Letter()])  # type: ignore[list-item]

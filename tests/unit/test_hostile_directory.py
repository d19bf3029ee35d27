"""A state directory that belongs to somebody else is refused, by name and with the way out."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from shipper.model.errors import ConfigError
from shipper.state.directory import locked_directory

NOBODY = 65_534


def as_nobody(action: Callable[[], str]) -> str:
    """Do something in a process without any rights, and give what it says."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads are not in the child, nor needed there
        child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writing, action().encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as said:
        text = said.read().decode()
    os.waitpid(child, 0)
    return text


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("mode", [0o700, 0o755, 0o777, 0o1777])
def test_a_state_directory_of_somebody_else_is_refused_and_left_as_it_is(mode: int):
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        os.chmod(name, 0o755)
        path = Path(name, "state")
        path.mkdir()
        path.chmod(mode)

        def use() -> str:
            try:
                with locked_directory(path):
                    return "used"
            except ConfigError as error:
                return f"{error.key}: {error.message}"

        said = as_nobody(use)
        assert said.startswith(f"state.directory: {path} cannot be ")
        assert f"it belongs to user 0, group 0 (mode {mode:04o}), and this is user {NOBODY}, group {NOBODY}. " in said
        assert "another directory" not in said, "from which all would be sent again"
        assert path.stat().st_mode & 0o7777 == mode
        assert list(path.iterdir()) == []


def test_a_directory_of_ones_own_that_was_open_to_all_is_closed(tmp_path: Path):
    path = tmp_path / "state"
    path.mkdir()
    path.chmod(0o777)
    with locked_directory(path):
        assert path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("target", ["there", "not there"])
def test_a_link_in_the_place_of_the_lock_is_refused_by_name(tmp_path: Path, target: str):
    outside = tmp_path / "outside"
    if target == "there":
        outside.write_text("precious")
    state = tmp_path / "state"
    state.mkdir()
    (state / "lock").symlink_to(outside)
    with pytest.raises(ConfigError, match=f"{state}/lock is a symbolic link"), locked_directory(state):
        pass
    assert not outside.exists() if target == "not there" else outside.read_text() == "precious"

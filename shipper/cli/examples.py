"""The command `config examples`: the files of config/ at the project's root, which a wheel carries in this package."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated

import typer

from shipper.cli.common import in_columns, reader_may_leave, say, several
from shipper.model.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]


def examples(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="DIR", help="Write them into this folder, below it as listed."),
    ] = None,
) -> None:
    """
    List the examples: settings, systemd units, Kubernetes manifests, alert rules and others.

    The head of each file says how to install it. Everybody can read what it writes (mode 0644), as it contains no
    secrets. A file that is there with other content is never replaced: then nothing is written.

    Example: shipper config examples -o shipper-examples
    """
    folder = _PACKAGE / "examples"
    if not folder.is_dir():
        folder = _PACKAGE.parent / "config"  # a clone
    files = {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    if output is None:
        with reader_may_leave():
            print(in_columns([("EXAMPLE", "WHAT IT IS"), *((str(name), _about(data)) for name, data in files.items())]))
        return
    for name, data in files.items():
        if os.path.lexists(output / name) and not _holds(output / name, data):
            raise ConfigError("is there already, with other content; name another folder", source=str(output / name))
    umask = os.umask(0o022)
    try:
        for name, data in files.items():
            _write(output / name, data)
    finally:
        os.umask(umask)
    say(f"wrote {several(len(files), 'file')} into {output}")


def _about(data: bytes) -> str:
    """Return the beginning of the first sentence of an example's head, or of the description of a JSON document."""
    text = str(json.loads(data)["description"]) if data.startswith(b"{") else data.decode().removeprefix("# ")
    return re.split(r"[.:;]?\s*\n|[.:;] ", text, maxsplit=1)[0]


def _holds(path: Path, data: bytes) -> bool:
    try:
        return path.read_bytes() == data
    except OSError:
        return False


def _write(path: Path, data: bytes) -> None:
    """
    Write a file that is not there yet, and the folders that it needs.

    Raises:
        ConfigError: It cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            with path.open("xb") as file:
                file.write(data)
    except OSError as exc:
        raise ConfigError(f"cannot be written: {exc.strerror or exc}", source=str(path)) from exc

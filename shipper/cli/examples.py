"""The command `config examples`: the files in config/ of the repository; a wheel contains them in this package."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Annotated

from shipper.cli.commands import option
from shipper.cli.common import in_columns, say, several, tolerate_closed_stdout
from shipper.model.errors import ConfigError

_PACKAGE = Path(__file__).parents[1]


def examples(
    output: Annotated[
        Path | None, option("DIR", "Write them into this folder, in the listed subfolders.", "--output", "-o")
    ] = None,
) -> None:
    """
    List the examples: settings, systemd units, Kubernetes manifests, alert rules and others.

    The top of each file says how to install it. Written files are readable by everybody (mode 0644), because they
    contain no secrets. If a file exists with other content, nothing is written.

    Example: shipper config examples -o shipper-examples
    """
    folder = _PACKAGE / "examples"
    if not folder.is_dir():
        folder = _PACKAGE.parent / "config"  # a clone
    files = {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    if output is None:
        with tolerate_closed_stdout():
            print(
                in_columns([("EXAMPLE", "DESCRIPTION"), *((str(name), _about(data)) for name, data in files.items())])
            )
        return
    missing = {output / name: data for name, data in files.items() if not _has_content(output / name, data)}
    umask = os.umask(0o022)
    try:
        for path, data in missing.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.write(data)
    except OSError as exc:
        raise ConfigError(f"cannot be written: {exc.strerror or exc}", source=str(path)) from exc
    finally:
        os.umask(umask)
    say(f"wrote {several(len(files), 'file')} into {output}")


def _about(data: bytes) -> str:
    """Return the beginning of an example's first comment, or of a JSON document's description."""
    text = str(json.loads(data)["description"]) if data.startswith(b"{") else data.decode().removeprefix("# ")
    return re.split(r"[.:;]?\s*\n|[.:;] ", text, maxsplit=1)[0]


def _has_content(path: Path, data: bytes) -> bool:
    """Return whether a file exists with this content; raise ConfigError if it has different content."""
    if not os.path.lexists(path):
        return False
    try:
        if path.read_bytes() == data:
            return True
    except OSError:
        pass
    raise ConfigError("already exists with other content; choose another folder", source=str(path))

"""Every command and option is documented; docs/shipper.1 is generated from them by `make docs`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import typer

from shipper.cli.app import command_line
from shipper.cli.commands import help_record
from shipper.config.load import USUAL_FILES
from shipper.model.version import __version__
from tests.tools import run, tool

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/shipper.1"
README = (ROOT / "README.md").read_text()
COMMON = {"config", "overrides", "log_level", "log_format"}


def words_of(command: Any, name: str) -> Iterator[str]:
    """Yield the command's name and options, then those of the commands below it."""
    if name != "shipper report show":  # typed as `shipper report`
        yield name
    for parameter in command.params:
        yield from (option for option in parameter.opts if option.startswith("--") and not parameter.hidden)
    for each, below in getattr(command, "commands", {}).items():
        yield from words_of(below, f"{name} {each}")


def test_every_command_and_option_is_documented():
    text = " ".join(page.read_text() for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    words = list(words_of(typer.main.get_command(command_line()), "shipper"))
    assert len(words) > 100
    assert [word for word in words if not re.search(rf"(?<![\w-]){word}(?![\w-])", text)] == []


def roff(text: str) -> str:
    """Escape a text on one line, as it would be typed; `words` are bold."""
    return escaped_line(" ".join(text.split()))


def escaped_line(line: str) -> str:
    escaped = line.replace("\\", r"\e").replace("-", r"\-").replace("'", r"\(aq").replace("~", r"\(ti")
    bold = re.sub(r"`([^`]+)`", r"\\fB\1\\fR", escaped)
    return rf"\&{bold}" if bold.startswith(".") else bold


def block(lines: Iterable[str]) -> Iterator[str]:
    yield from (".PP", ".RS 4", ".EX")
    yield from map(escaped_line, lines)  # columns stay aligned
    yield from (".EE", ".RE")


def paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        example = re.fullmatch(r"Example: (.*[^:])", paragraph)
        if paragraph.startswith(("\b\n", "    ")):
            yield from block(paragraph.removeprefix("\b\n").splitlines())
        elif example:
            yield from block([example[1]])
        else:
            yield from (".PP", roff(paragraph))


def described(records: Iterable[tuple[str, str] | None]) -> Iterator[str]:
    for name, text in filter(None, records):
        yield from (".TP", rf"\fB{roff(name)}\fR", roff(text))


def commands(command: Any, name: str) -> Iterator[str]:
    below = getattr(command, "commands", {})
    for each, inner in below.items():
        # `shipper report` alone is what `show` does.
        yield from commands(inner, name if f"{name} {each}" == "shipper report show" else f"{name} {each}")
    if not below:
        context = type(command).context_class(command, info_name=name)
        usage = " ".join([f"`{name}`", *command.collect_usage_pieces(context)])
        yield from (f".SS {name}", roff(usage), *paragraphs(command.help))
        own = [parameter for parameter in command.params if parameter.name not in COMMON]
        yield from described(help_record(parameter, context) for parameter in own)


def common_options(command: Any) -> Iterator[str]:
    (run,) = (inner for name, inner in command.commands.items() if name == "run")
    context = type(run).context_class(run)
    yield from described(help_record(parameter, context) for parameter in run.params if parameter.name in COMMON)
    yield from described([("-h, --help", "Show the help of a command.")])


def exit_codes() -> Iterator[str]:
    for code, meaning in re.findall(r"^\| (\d) \| (.*) \|$", README, re.MULTILINE):
        yield from described([(code, re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", meaning))])


def page() -> str:
    command = typer.main.get_command(command_line())
    context = type(command).context_class(command, info_name="shipper")
    introduction = README.split("\n\n")[1]
    promise = README.partition("\n## The promise\n\n")[2].partition("\n\n```")[0].replace("*", "")
    files = [(str(path), "The settings, unless `--config` or `SHIPPER_CONFIG` names a file.") for path in USUAL_FILES]
    variables = [
        ("SHIPPER_CONFIG", "The settings file."),
        ("SHIPPER__SECTION__KEY", "A setting; overrides the file. Every key: `shipper config init -o -`."),
        ("SHIPPER_NATIVE=0", "Do not use the native extension."),
    ]
    lines = [
        r".\" Generated from the commands by `make docs`.",
        f'.TH SHIPPER 1 "" "shipper {__version__}"',
        ".SH NAME",
        rf"shipper \- {roff(command.help[0].lower() + command.help[1:].rstrip('.'))}",
        ".SH SYNOPSIS",
        roff(" ".join(["`shipper`", *command.collect_usage_pieces(context)])),
        ".SH DESCRIPTION",
        *paragraphs(f"{introduction}\n\n{promise}"),
        ".SH OPTIONS",
        *described(help_record(parameter, context) for parameter in command.params),
        ".SH OPTIONS OF COMMANDS",
        "Every command that reads settings or logs has some of these:",
        *common_options(command),
        ".SH COMMANDS",
        *commands(command, "shipper"),
        ".SH EXIT STATUS",
        *exit_codes(),
        ".SH FILES",
        *described(files),
        ".SH ENVIRONMENT",
        *described(variables),
    ]
    return "\n".join(lines) + "\n"


def test_the_page_describes_every_command():
    assert PAGE.read_text() == page(), "write it anew: make docs"


def test_man_shows_every_command_and_option_without_warnings():
    result = run(
        tool("man"), "--warnings", "-l", PAGE, env={"LC_ALL": "C.UTF-8", "MANWIDTH": "500", "MANROFFOPT": "-c"}
    )
    assert result.returncode == 0
    assert not re.search(r"^(troff|<standard input>|man):", result.stdout, re.MULTILINE), result.stdout
    text = re.sub(r".\x08", "", result.stdout)
    words = list(words_of(typer.main.get_command(command_line()), "shipper"))
    assert [word for word in words if word not in text] == []
    assert "'exports/*.ndjson' --format json" in text, "can be copied"


if __name__ == "__main__":
    PAGE.write_text(page())

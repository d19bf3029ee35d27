"""The status page: self-contained, with a matching policy; its headline, also that of `GET /status`."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import Any

import pytest
from msgspec.structs import replace

from shipper.model.group import GroupState, PartitionState
from shipper.status.admin import page
from shipper.status.headline import Headline
from shipper.status.headline import headline_of as headline_of_snapshot
from shipper.status.live import Live, Pause
from shipper.status.overview import Overview, StreamState
from shipper.status.snapshot import Snapshot
from tests.cases import each

SOURCES = {
    each.name: each.read_text("utf-8")
    for each in files(page).iterdir()
    if each.name.rpartition(".")[2] in {"html", "css", "js"}
}
SCRIPT = "".join(text for name, text in SOURCES.items() if name.endswith(".js"))
STYLES = (files("shipper.report").joinpath("page/base.css").read_text("utf-8"), SOURCES["page.css"])


@pytest.fixture
def document() -> str:
    return page.render()[0].decode()


@pytest.fixture
def policy() -> dict[str, str]:
    return dict(each.split(" ", 1) for each in page.render()[1].split("; "))


def test_policy_allows_only_the_script_and_the_style_of_the_page(document: str, policy: dict[str, str]):
    for element in ("script", "style"):
        (text,) = re.findall(f"<{element}[^>]*>(.*?)</{element}>", document, re.DOTALL)
        assert len(text) > 1000
        digest = b64encode(sha256(text.encode()).digest()).decode()
        assert policy.pop(f"{element}-src") == f"'sha256-{digest}'"
    assert policy == {
        "default-src": "'none'",
        "connect-src": "'self'",
        "img-src": "data:",
        "frame-ancestors": "'none'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "require-trusted-types-for": "'script'",
    }


def test_page_has_all_of_its_parts(document: str):
    assert {name for name in SOURCES if name.endswith(".js")} == set(page._SCRIPTS)
    assert "{script}" not in document
    assert "{style}" not in document
    assert not re.search("</|<!--|]]>", SCRIPT + "".join(STYLES)), "they would end their elements"
    assert len(document.encode()) < 60_000


def test_page_has_no_network_address(document: str):
    assert set(re.findall(r"\w+://[^\"'\s]*", document)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"@import|@font-face|url\(|<iframe|<img|<script \w", document)
    assert all(not each.startswith("/") for each in re.findall(r'(?:href|src)="([^"]*)"', document))


@each("name", SOURCES)
def test_no_source_makes_text_into_markup_or_script(name: str):
    found = re.findall(
        r"innerHTML|outerHTML|insertAdjacent|document\.write|createContextualFragment|DOMParser|srcdoc"
        r"|\beval\b|new Function|javascript:|\son[a-z]+\s*=|\.on[a-z]+ =|style=",
        SOURCES[name],
    )
    assert found == []


def test_page_without_scripts_links_to_the_same_figures(document: str):
    (text,) = re.findall("<noscript>(.*?)</noscript>", document, re.DOTALL)
    assert set(re.findall('href="([^"]*)"', text)) == {"status", "metrics"}


def test_script_fills_only_existing_elements():
    wanted = set(re.findall(r'(?:fill|getElementById)\(\s*"([\w-]+)"', SCRIPT))
    assert len(wanted) > 10
    assert wanted <= set(re.findall(r'id="([\w-]+)"', SOURCES["page.html"]))


@pytest.mark.parametrize(("name", "kind"), [("live", Live), ("pause", Pause)])
def test_script_reads_only_existing_fields(name: str, kind: type[Live | Pause]):
    read = set(re.findall(rf"\b{name}\.([a-z]\w*)", SCRIPT))
    assert len(read) >= 5
    assert read <= set(kind.__struct_fields__)


# Contrast, as WCAG 2 has it: 4.5 for text, 3 for lines and shapes.

TEXT = [
    *[("ink", back) for back in ("page", "card", "track")],
    *[("muted", back) for back in ("page", "card")],
    *[(state, back) for state in ("good", "busy", "warn", "bad", "off") for back in ("page", f"{state}-back")],
    *[("ink", f"{state}-back") for state in ("good", "busy", "warn", "bad", "off")],
    *[("page", "warn"), ("page", "bad"), ("bad", "card"), ("c0", "page")],
    *[("accent", back) for back in ("page", "accent-back")],
]
SHAPES = [(colour, "card") for colour in ("c0", "c1", "c2", "c3")]


def luminance(colour: str) -> float:
    parts = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
    red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_colours_have_enough_contrast(theme: int):
    themes = [style.split("prefers-color-scheme: dark")[theme] for style in STYLES]
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", "".join(themes)))
    for pairs, least in ((TEXT, 4.5), (SHAPES, 3)):
        for front, back in pairs:
            light, dark = sorted((luminance(colours[front]), luminance(colours[back])), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= least, (front, back)


# The headline ---------------------------------------------------------------------------------------------------------


NOW = 1_792_504_800.0  # 2026-10-20T14:00:00Z
LIVE = Live(
    version="1", process_id=7, command="run", phase="running", started_at=NOW - 7200, at=NOW, read=9, accepted=9
)
RATES = {"settled_bytes_per_second": 402_000.0, "accepted_per_second": 1204.4}
BEHIND = replace(LIVE, pending=8000, lag_bytes=96_500_000, oldest_unsettled_seconds=12.0, **RATES)
STALLED = replace(BEHIND, settled_bytes_per_second=0.0)
HALF_DONE = replace(BEHIND, lag_bytes=110_000_000, total_bytes=200_000_000, settled_bytes=90_000_000)
NEARLY_DONE = replace(BEHIND, lag_bytes=500_000, oldest_unsettled_seconds=0.9)
OPEN_LINE = replace(LIVE, lag_bytes=10)
ENDED = replace(LIVE, phase="stopped", outcome="finished")
NO_MATCH = "no file matches /data/*.ndjson"
NO_ENTRY = "/data/app.ndjson cannot be read: permission denied; it belongs to user 0"
TROUBLED = replace(LIVE, unreadable=[NO_ENTRY], unreadable_count=1)
DELIVERED = "Everything written until 14:00:00Z is delivered"
UP_TO_A_LINE = "Everything up to the last complete line is delivered"
BEFORE = "before they were read"
NONE_ACCEPTED = "None of the records read was accepted: "


def headline_of(live: Live, **state: Any) -> Headline:
    """Return the headline of a shipper whose state agrees with it."""
    behind = [StreamState(1, "/data/app.ndjson", live.lag_bytes, 0, live.lag_bytes, "", NOW)] if live.lag_bytes else []
    overview = Overview(at=NOW, streams=behind, **state)
    return headline_of_snapshot(Snapshot(at=live.at, process_id=live.process_id, live=live, state=overview))


@each(
    ("live", "kept", "state", "text"),
    [
        (LIVE, 0, "good", DELIVERED),
        (LIVE, 1561, "warn", f"{DELIVERED}, except 1,561 dead letters"),
        (replace(LIVE, unreachable_bytes=1_200_000), 0, "warn", f"{DELIVERED}, except 1.2 MB that were gone {BEFORE}"),
        (replace(LIVE, has_scanned=False), 0, "busy", "Looking for inputs"),
        (replace(LIVE, phase="starting"), 0, "busy", "Starting"),
        (BEHIND, 0, "busy", "Delivering, 96.5 MB behind, about 4 min to go"),
        (STALLED, 0, "busy", "Delivering, 96.5 MB behind"),
        (replace(STALLED, oldest_unsettled_seconds=200.0), 0, "warn", "No progress for 3 min"),
        (HALF_DONE, 0, "busy", "Delivering, 45 % of 200 MB, about 4 min to go"),
        (NEARLY_DONE, 0, "good", "Up to date, delivering 1,204/s"),
        (NEARLY_DONE, 2, "warn", "Up to date, delivering 1,204/s, except 2 dead letters"),
        (replace(NEARLY_DONE, accepted=0, dead_lettered=9), 0, "warn", "Up to date, delivering 1,204/s"),
        (replace(BEHIND, phase="draining"), 0, "busy", "Draining, 8,000 records to settle"),
        (OPEN_LINE, 0, "good", f"{UP_TO_A_LINE}; 10 B belong to an incomplete line"),
        (OPEN_LINE, 2, "warn", f"{UP_TO_A_LINE}, except 2 dead letters; 10 B belong to an incomplete line"),
        (replace(OPEN_LINE, settled_bytes_per_second=0.9), 0, "busy", "Delivering, 10 B behind, about 11 s to go"),
        (replace(OPEN_LINE, phase="draining"), 0, "busy", "Draining, 0 records to settle"),
        (ENDED, 0, "good", "Stopped: finished"),
        (replace(ENDED, outcome="drained"), 0, "off", "Stopped: drained"),
        (replace(ENDED, outcome="gave_up", pending=8), 1, "bad", "Stopped: gave up; 1 dead letter kept"),
        # Of its own letters, others may have been replayed or purged since.
        (replace(ENDED, dead_lettered=3), 3, "warn", "Stopped: finished, with 3 dead letters"),
        (replace(ENDED, dead_lettered=3), 9, "warn", "Stopped: finished, with 3 dead letters"),
        (replace(ENDED, dead_lettered=3), 1, "warn", "Stopped: finished, with 1 dead letter"),
        (replace(ENDED, dead_lettered=3), 0, "good", "Stopped: finished"),
        (replace(ENDED, read=0, accepted=0), 10, "warn", "Stopped: finished; 10 dead letters kept"),
        (replace(TROUBLED, pauses=[Pause("token", "", "", NOW)]), 0, "paused", "Paused: token"),
        (replace(TROUBLED, phase="draining"), 0, "busy", "Draining, 0 records to settle"),
        (replace(TROUBLED, phase="stopped", outcome="drained"), 0, "off", "Stopped: drained"),
    ],
)
def test_the_headline_names_the_state_with_its_figures(live: Live, kept: int, state: str, text: str):
    headline = headline_of(live, dead_letters={"ip": kept})
    assert (headline.state, headline.text(NOW)) == (state, text)


@each(
    ("changes", "title", "detail", "sub"),
    [
        ({"unmatched": [NO_MATCH], "read": 0}, "No file matches /data/*.ndjson", "", "Nothing has been read yet."),
        ({"unmatched": [NO_MATCH]}, "No file matches /data/*.ndjson", "", "Everything else is delivered."),
        (
            {"unreadable": [NO_ENTRY], "unreadable_count": 3, "unmatched": [NO_MATCH], "lag_bytes": 500},
            *("/data/app.ndjson cannot be read", ": permission denied"),
            "It belongs to user 0. 2 more files cannot be read. No file matches /data/*.ndjson. "
            "Waiting: 0 records and 500 B.",
        ),
        (
            {"unreadable": [NO_ENTRY], "accepted": 0, "dead_lettered": 9},
            *("/data/app.ndjson cannot be read", ": permission denied", "It belongs to user 0."),
        ),
    ],
)
def test_a_missing_or_unreadable_input_is_the_headline(changes: dict[str, Any], title: str, detail: str, sub: str):
    headline = headline_of(replace(LIVE, **changes))
    assert (headline.state, headline.title, headline.detail, headline.sub) == ("warn", title, detail, sub)


def test_bytes_of_an_unreadable_file_are_not_reported_as_an_incomplete_line():
    assert headline_of(OPEN_LINE).is_open_line
    assert not headline_of(replace(TROUBLED, lag_bytes=10)).is_open_line


@each(
    ("live", "counts", "detail"),
    [
        ({"dead_lettered": 9}, {}, "9 dead letters"),
        ({"dead_lettered": 8, "duplicates": 1}, {}, "8 dead letters and 1 duplicate"),
        ({"dead_lettered": 9}, {"read": 99, "accepted": 90, "dead_lettered": 9}, "9 dead letters"),
        ({"read": 0}, {"read": 9, "dead_lettered": 9}, "9 dead letters"),
        ({"dead_lettered": 9, "lag_bytes": 5}, {}, "9 dead letters"),
    ],
)
def test_nothing_is_reported_as_delivered_if_no_record_was_accepted(
    live: dict[str, Any], counts: dict[str, int], detail: str
):
    headline = headline_of(replace(LIVE, accepted=0, **live), **counts)
    assert (headline.state, headline.text(NOW)) == ("warn", NONE_ACCEPTED + detail)


def test_that_all_records_were_duplicates_is_no_fault():
    headline = headline_of(replace(LIVE, accepted=0, duplicates=9, read=9), read=18, accepted=9, duplicates=9)
    assert headline.state == "good"
    assert headline.text(NOW).endswith(" is delivered; all 9 records read were duplicates")


@pytest.mark.parametrize(("count", "why"), [(1, ": forbidden"), (2, " for 2 reasons")])
def test_a_single_pause_is_named(count: int, why: str):
    pauses = [Pause("forbidden", "", "", NOW)] * count
    assert headline_of(replace(BEHIND, pauses=pauses)).text(NOW) == f"Paused{why}"
    assert headline_of(replace(BEHIND, pauses=pauses, phase="draining")).text(NOW) == f"Draining, but paused{why}"


OF_MEMBER, LETTERS_OF_MEMBER = "Everything written to this member's partitions", "2 dead letters of this process"
REFUSING = replace(LIVE, dead_lettered=2)


def member(live: Live, *partitions: tuple[int, float | None]) -> Live:
    """Make a group member; a partition is its lag, and the age of the last query that found everything settled."""
    states = [
        PartitionState(topic="t", partition=number, lag_records=lag, delivered_until=None if age is None else NOW - age)
        for number, (lag, age) in enumerate(partitions)
    ]
    return replace(live, lag_bytes=0, group=GroupState(group="g", protocol="classic", partitions=states))


@each(
    ("live", "state", "text"),
    [
        (member(LIVE, (0, 1), (0, 2)), "good", f"{OF_MEMBER} until 13:59:58Z is delivered"),
        (member(REFUSING, (0, 0)), "warn", f"{OF_MEMBER} until 14:00:00Z is delivered, except {LETTERS_OF_MEMBER}"),
        *((member(LIVE, *partitions), "busy", "Delivering") for partitions in ([(0, 1), (0, None)], [(0, 60)])),
        (member(LIVE), "busy", "No partition is assigned to this member"),
        (member(NEARLY_DONE, (300, 1)), "good", "Up to date, delivering 1,204/s"),
        (member(NEARLY_DONE, (300, 20)), "busy", "Delivering, 300 records behind, about 0 s to go"),
        (member(NEARLY_DONE, (19_000, 1)), "busy", "Delivering, 19,000 records behind, about 15 s to go"),
        (member(replace(NEARLY_DONE, accepted_per_second=0), (19_000, 1)), "busy", "Delivering, 19,000 records behind"),
    ],
)
def test_a_member_is_up_to_date_only_as_of_the_last_known_ends(live: Live, state: str, text: str):
    headline = headline_of(live)
    assert (headline.state, headline.text(NOW)) == (state, text)


def test_a_paused_member_counts_the_records_that_it_has_not_read():
    pauses = [Pause("input_unlike_records", "", "", NOW)]
    shown = headline_of(member(replace(LIVE, pauses=pauses), (40, None), (2, None)))
    assert shown.sub == "Waiting: 42 records. Records are held back until this is corrected."

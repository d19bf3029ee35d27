"""The status page in a browser: what a person reads there, on any screen, whatever the process says or does."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
from msgspec import to_builtins
from msgspec.structs import replace

from shipper.model.group import GroupState, PartitionState
from shipper.status.live import Live, Pause
from tests.e2e.browser import Browser, Page
from tests.status_page_server import (
    BEHIND,
    FORBIDDEN,
    HEALTHY,
    LETTERS,
    NOW,
    OPEN_LINE,
    SCENES,
    STATE,
    StatusServer,
    document,
    history,
)


@pytest.fixture
def serve(browser: Browser) -> Iterator[Callable[..., StatusServer]]:
    """Start servers that end with the test."""
    with ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(StatusServer(*arguments))


@pytest.fixture(scope="module")
def show(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Look at the page over a document, or over a scene that is named; it is only for reading, as it stays open."""
    with StatusServer({}) as server:

        def show(scene: str | dict[str, Any], moments: Sequence[list[Any]] = (), **how: Any) -> Page:
            server.document, server.history = SCENES[scene] if isinstance(scene, str) else (scene, list(moments))
            server.asked.clear()
            return browser.look(server.url, **how)

        yield show


@pytest.fixture
def visit(browser: Browser, serve: Callable[..., StatusServer]) -> Callable[[str], Page]:
    """Open the page over a scene anew, to do something with it."""
    return lambda scene: browser.open(serve(*SCENES[scene]).url)


Show = Callable[..., Page]


def tiles(page: Page) -> dict[str, str]:
    """Read the key figures and the expiries: what stands under each title."""
    titles = [each.removesuffix("!").strip() for each in page.texts(".tile h3")]
    rows = zip(titles, page.texts(".tile .value"), page.texts(".tile .note"), strict=True)
    return {title: f"{value} | {note}" for title, value, note in rows}


# The headline


def test_healthy_shipper_reads_as_one(show: Show):
    page = show("healthy")
    assert page.text("h1") == "Everything that was written until 16:13:20 is delivered"
    assert page.state == "good"
    title = "\N{CHECK MARK} Everything that was written is delivered \N{EN DASH} shipper malta"
    assert page.run("document.title") == title
    assert page.text(".kind") == (
        "shipper run to https://intake.example.com/acquisition, state in /var/lib/shipper/malta"
    )
    assert page.text("#facts") == (
        "Version 0.1.0 Process 4711 Up since 19 September, 12:16 (2 d 3 h) Last acceptance 16:13:18 (1 s ago) "
        "Last pause throttled for 1 min, until 14:14:20"
    )
    assert page.texts(".pause") == []
    assert not page.run("document.querySelector('#notice').offsetHeight")
    assert page.troubles == []


@pytest.mark.parametrize(
    ("directory", "name"), [("", "shipper"), ("/var/lib/shipper", "shipper"), ("/srv/edge/", "shipper edge")]
)
def test_tab_is_named_for_the_state_directory(directory: str, name: str, show: Show):
    page = show(document(replace(HEALTHY, state_directory=directory)))
    assert page.run("document.title").endswith(f"is delivered \N{EN DASH} {name}")
    assert page.text(".kind").endswith(f", state in {directory}" if directory else "/acquisition")


@pytest.mark.parametrize(
    ("live", "state", "headline"),
    [
        (BEHIND, "busy", "Delivering, 96.5 MB behind, about 4 min to go"),
        (replace(BEHIND, settled_bytes_per_second=0.0), "busy", "Delivering, 96.5 MB behind"),
        (
            replace(BEHIND, settled_bytes_per_second=0.0, oldest_unsettled_seconds=200.0),
            "warn",
            "No progress for 3 min",
        ),
        (
            replace(BEHIND, lag_bytes=500_000, oldest_unsettled_seconds=0.9),
            "good",
            "Up to date, delivering 1,204/s",
        ),
        (
            replace(BEHIND, lag_bytes=110_000_000, total_bytes=200_000_000, settled_bytes=90_000_000),
            "busy",
            "Delivering, 45 % of 200 MB, about 4 min to go",
        ),
        (replace(BEHIND, phase="draining"), "busy", "Draining, 8,000 records to settle"),
        (replace(HEALTHY, phase="starting"), "busy", "Starting"),
        (replace(HEALTHY, phase="stopped", outcome="finished"), "good", "Stopped: finished"),
        (replace(HEALTHY, phase="stopped", outcome="drained"), "off", "Stopped: drained"),
        (
            replace(BEHIND, phase="stopped", outcome="gave_up", dead_lettered=1),
            "bad",
            "Stopped: gave up, with 1 dead letter",
        ),
        (
            replace(HEALTHY, phase="stopped", outcome="finished", dead_lettered=2),
            "warn",
            "Stopped: finished, with 2 dead letters",
        ),
        (
            replace(HEALTHY, unreachable_bytes=1_200_000),
            "warn",
            "Everything that was written until 16:13:20 is delivered, but for 1.2 MB that were gone before they were "
            "read",
        ),
        (
            OPEN_LINE,
            "good",
            "Everything up to the last whole line is delivered; 10 B are a line that has no end yet",
        ),
        (replace(OPEN_LINE, started_at=NOW - 9), "busy", "Delivering, 10 B behind"),
        (replace(OPEN_LINE, pending=1, oldest_unsettled_seconds=1.0), "busy", "Delivering, 10 B behind"),
        (replace(OPEN_LINE, settled_bytes_per_second=0.9), "busy", "Delivering, 10 B behind, about 11 s to go"),
        (replace(OPEN_LINE, phase="draining"), "busy", "Draining, 0 records to settle"),
        (replace(OPEN_LINE, unreachable_bytes=5), "busy", "Delivering, 10 B behind"),
    ],
)
def test_headline_says_what_is_going_on(live: Live, state: str, headline: str, show: Show):
    page = show(document(live, dead_letters={"ip": live.dead_lettered}))
    assert (page.state, page.text("h1")) == (state, headline)


@pytest.mark.parametrize(
    ("live", "headline"),
    [
        (HEALTHY, "Everything that was written until 16:13:20 is delivered, but for 1,561 dead letters"),
        (
            OPEN_LINE,
            "Everything up to the last whole line is delivered, but for 1,561 dead letters; 10 B are a line that has "
            "no end yet",
        ),
        (
            replace(BEHIND, lag_bytes=500_000, oldest_unsettled_seconds=0.9),
            "Up to date, delivering 1,204/s, but for 1,561 dead letters",
        ),
    ],
)
def test_nothing_is_green_while_dead_letters_are_kept(live: Live, headline: str, show: Show):
    page = show(document(live, **LETTERS))
    assert (page.state, page.text("h1")) == ("warn", headline)
    assert page.run("document.title").startswith("! ")


def test_an_input_that_is_not_there_or_cannot_be_read_is_the_headline(show: Show):
    page = show("no-match")
    words = "No file matches /var/log/app/acquisitions*.ndjson: there is no folder /var/log/app"
    assert (page.state, page.text("h1"), page.text("#sub")) == ("warn", words, "Nothing was read yet.")
    assert page.run("document.title").startswith("! ")
    page = show("unreadable")
    assert page.state == "warn"
    assert page.text("h1") == "/var/log/app/app.ndjson cannot be read: permission denied"
    assert page.text("#sub") == (
        "It belongs to user 0, group 4 (mode 0640), and this is user 998, group 998. 2 more files cannot be read. "
        "0 records and 48 kB wait."
    )
    assert tiles(page)["Lag"] == "48 kB | of files that cannot be read"
    assert page.troubles == []


def test_where_none_of_the_records_was_accepted_nothing_is_called_delivered(show: Show):
    page = show("none-accepted")
    words = "None of the records that were read was accepted: 1,561 dead letters"
    assert (page.state, page.text("h1")) == ("warn", words)
    assert "is delivered" not in page.text(".headline")


def test_line_without_an_end_has_no_time_to_go(show: Show):
    page = show("open-line")
    found = tiles(page)
    assert found["Lag"] == "10 B | a line that has no end yet"
    assert found["Time to go"] == "none | until the line has its end"
    assert page.text("#sub") == ""


def test_only_the_part_of_the_headline_that_keeps_is_read_aloud(show: Show):
    page = show("behind")
    assert page.texts("[aria-live]") == ["Delivering"]
    assert page.texts("[aria-live] [aria-hidden]") == []
    assert page.run("document.querySelector('[aria-live]').getAttribute('aria-live')") == "polite"
    assert show("healthy").texts("[aria-live] [aria-hidden=true]") == ["until 16:13:20"]


# Pauses


def test_pause_tells_why_what_to_do_and_when_it_is_tried_again(show: Show):
    page = show("paused")
    assert (page.state, page.text("h1")) == ("paused", "Paused: forbidden")
    assert page.texts(".pause") == [
        f"The service denied access (HTTP 403) What to do: {FORBIDDEN.advice} Since 16:10:00 (3 min) Next probe in 12 s"
    ]
    assert page.text().casefold().count("forbidden") == 1, "it is told once"
    assert page.text().count("subscription key are allowed to do") == 1
    assert page.run("document.querySelector('.headline').contains(document.querySelector('.pause'))")
    assert tiles(page)["Time to go"] == "\N{EN DASH} | while it is paused"
    assert page.troubles == []


def test_two_pauses_are_both_told(show: Show):
    page = show("two-pauses")
    assert page.text("h1") == "Paused for 2 reasons"
    assert page.texts(".pause h2") == ["Forbidden", "Dead letters full"]


@pytest.mark.parametrize(("next_probe_at", "told"), [(NOW - 5, "Next probe any moment now"), (None, "(3 min)")])
def test_probe_that_is_due_or_not_known_has_no_countdown(next_probe_at: float | None, told: str, show: Show):
    pause = replace(FORBIDDEN, next_probe_at=next_probe_at)
    assert show(document(replace(HEALTHY, pauses=[pause]))).text(".pause").endswith(told)


# Figures


def test_key_figures_have_units_and_thousands_apart(show: Show):
    page = show("behind")
    assert tiles(page) == {
        "Accepted": "12,340,000 | 1,204/s",
        "Pending": "8,000 | read, not settled yet",
        "Dead letters": "0 | 0 by this process; 0 B kept",
        "Duplicates": "5,678 | known already, not sent again",
        "Lag": "96.5 MB | oldest record waits 12 s",
        "Time to go": "about 4 min | at 402 kB/s",
        "In flight": "3 of 16 | requests, and how many may be",
        "Latency": "12.4 ms p50 | p95 47.1 ms",
        "Access token": "in 42 min | expires 16:55:20",
        "Service certificate": "in 83 d | expires 13 December, 15:13",
        "Newest report fetched": "3 h ago | 13:13:20, account 1001, 1\N{EN DASH}20 September 2026",
    }
    assert page.text("#balance .sum") == (
        "12,353,678 read = 12,340,000 accepted + 0 dead-lettered + 5,678 duplicates + 8,000 pending"
    )
    assert "98,765,432 read = 98,700,000 accepted + 432 dead-lettered + 65,000 duplicates" in page.text("#balance")
    page = show(document(HEALTHY, purged=12))
    assert "+ 432 dead-lettered (12 purged) + " in page.text("#balance")


def test_dead_letters_that_are_kept_are_the_figure_that_leads_to_them(show: Show):
    page = show(document(replace(HEALTHY, dead_lettered=2, read=HEALTHY.read + 2), **LETTERS))
    assert tiles(page)["Dead letters"] == "1,561 | 2 by this process; 612 kB kept"
    assert page.text(".flagged h3") == "Dead letters !"
    assert page.run("document.querySelector(document.querySelector('.flagged a').hash).innerText") == "Dead letters"
    assert show("healthy").texts(".flagged") == []


@pytest.mark.parametrize(("kept", "left"), [(900, 0), (0, 900), (900, 900)])
def test_spool_is_a_key_figure_where_there_is_one(kept: int, left: int, show: Show):
    spool = {"segments": 1, "bytes": kept, "lag_bytes": left}
    page = show(document(replace(HEALTHY, spool_bytes=kept), spool=spool))
    assert tiles(page)["Spool"] == f"{kept} B | of standard input, {left} B to go"


def test_address_without_tls_has_no_certificate_to_expire(show: Show):
    assert tiles(show("settings"))["Service certificate"] == "no TLS | the service is reached over plain HTTP"


def test_settings_that_are_not_in_effect_are_told(show: Show):
    page = show("settings")
    assert page.text("#notice") == (
        "The settings could not be read again, and stay as they were: /etc/shipper/shipper.toml: log.level: expected "
        "debug, info, warning or error. "
        "Settings that changed, and take effect at the next start: intake.base_url, delivery.max_concurrency."
    )
    for fields, words in (({"reload_error": "no"}, "as they were: no."), ({"restart_needed": ["a.b"]}, "start: a.b.")):
        assert show(document(replace(HEALTHY, **fields))).text("#notice").endswith(words)


def test_figures_that_do_not_add_up_are_told(show: Show):
    page = show(document(replace(HEALTHY, read=HEALTHY.read + 1)))
    assert page.text("#balance h3") == "This does not add up: that is a defect"
    assert "\N{NOT EQUAL TO}" in page.text("#balance")


def test_what_is_lost_expired_or_soon_to_expire_is_flagged_in_words(show: Show):
    page = show("worrying")
    found = tiles(page)
    assert found["Unreachable"] == "1.2 MB | gone before it was read"
    assert found["Access token"] == "in 2 min | expires soon: 16:15:00"
    assert found["Service certificate"] == "expired | 1 h ago, 15:13:20"
    assert len(page.texts(".flagged")) == 3
    assert page.text(".lost") == (
        "Gone before they were read to their end /var/log/app/gone.log: 1.2 MB, noticed 16:11:50"
    )


def test_times_are_of_the_readers_zone_with_utc_at_hand(show: Show):
    page = show("paused")
    assert page.run("document.querySelector('.pause time').title") == "2026-09-21 14:10:00 UTC"
    assert page.text("#updated").endswith("Times are in Europe/Berlin; point at one to see it in UTC.")


def test_footer_leads_to_what_machines_read(show: Show):
    page = show("healthy")
    links = page.run("[...document.querySelectorAll('footer a')].map((one) => one.getAttribute('href'))")
    assert links == ["metrics", "status", "healthz", "readyz"]


# Inputs and dead letters


def test_inputs_are_a_table_with_their_progress(show: Show):
    page = show("behind")
    assert page.texts("#streams thead th") == ["Path", "Settled", "Size", "Lag", "Delivered up to"]
    assert page.texts("#streams tbody tr")[0] == "/srv/edge/malta/acquisition/clicks.csv 68 % 310 MB 96.5 MB 16:09:00"
    assert page.run("document.querySelector('#streams progress').position") == pytest.approx(0.6887, abs=0.001)
    assert "gzip" in page.texts("#streams tbody tr")[1]
    assert page.text("#streams .sub") == "3 files, 1 behind by 96.5 MB in all; the one with most lag first."


def test_an_input_names_its_newest_dead_letter_and_leads_to_it_or_to_all_of_them(show: Show):
    newest = LETTERS["newest_dead_letters"][0]
    letters = [
        {"id": newest["id"], "rule": "country", "last_at": NOW - 40},
        {"id": 7, "rule": "ip", "last_at": NOW - 9e4},
    ]
    streams = [
        stream | {"newest_dead_letter": letter} for stream, letter in zip(STATE["streams"], letters, strict=False)
    ]
    page = show(document(**LETTERS, streams=[*streams, STATE["streams"][2]]), width=360)
    assert page.texts("#streams tbody th .note") == [
        "newest dead letter 16:12:40, country",
        "newest dead letter 20 September, 15:13, ip",
    ]
    where = "[...document.querySelectorAll('#streams th a')].map((one) => document.querySelector(one.hash).innerText)"
    assert page.run(where) == ["16:13:20", "Dead letters"]
    assert page.run("document.documentElement.scrollWidth") == 360


def test_a_member_of_a_group_shows_its_partitions_in_place_of_files(show: Show):
    at = {"topic": "events", "offset": 1200, "end": 1500}
    group = GroupState(
        group="shipper",
        protocol="classic",
        partitions=[
            PartitionState(**at, partition=3, lag_records=300, delivered_until=NOW - 60),
            PartitionState(**at, partition=7, state="stopped", message="events/7: records are gone"),
        ],
        handed_over=1840,
        last_rebalance="gave 2",
        last_rebalance_at=NOW - 300,
    )
    page = show(document(replace(HEALTHY, group=group)))
    assert page.texts("#streams thead th") == ["Partition", "Settled to", "End", "Lag", "Delivered up to"]
    assert page.texts("#streams tbody tr")[0] == "events/3reading 1,200 1,500 300 16:12:20"
    assert page.texts("#streams .more") == ["events/7: records are gone"]
    assert page.text("#streams .sub").startswith(
        "Member of the group shipper (classic): 2 partitions, 300 records behind. Last rebalance 16:08:20: gave 2."
    )
    assert tiles(page)["Lag"].startswith("300 |")
    assert page.text("#dead-letters") == "They are in a topic of the group."


def test_inputs_beyond_those_that_are_sent_are_counted(show: Show):
    many = [STATE["streams"][0] | {"stream_id": index, "path": f"/logs/{index}"} for index in range(20)]
    page = show(document(streams=many, stream_count=10_000))
    assert len(page.texts("#streams tbody tr")) == 20
    assert page.text("#streams .more") == "\N{HORIZONTAL ELLIPSIS} and 9,980 more"


def test_dead_letters_are_told_by_rule_and_by_example(show: Show):
    page = show("dead-letters")
    assert page.texts("#dead-letters .bars li") == ["country 1,204", "btag 310", "timestamp 44", "json 3"]
    assert page.run("[...document.querySelectorAll('.bars progress')].map((one) => one.value / one.max)")[:2] == [
        *(1, pytest.approx(310 / 1204))
    ]
    invalid, refused, _ = page.texts("#dead-letters tbody tr")
    assert invalid == (
        "16:13:20 country invalid /var/log/app/registrations.ndjson:84100000 0d9f4c1e-7d3b-4a52-9a10-5f3c2b7a0000 "
        "ConsumerCountry must be two letters A-Z "
        "shipper dead-letters show 1561 --set state.directory=/var/lib/shipper/malta"
    )
    assert "btag answer 400" in refused


@pytest.mark.parametrize(
    "directory", ["", "/var/lib/shipper", "/srv/a b", "/srv/it's $HOME `x`; \\n", '/srv/"#', "/srv/caf\u00e9", "~/x"]
)
def test_command_beside_a_dead_letter_is_one_that_works_in_a_shell(directory: str, show: Show):
    page = show(document(replace(HEALTHY, state_directory=directory), **LETTERS))
    command = page.run("document.querySelector('#dead-letters code').textContent")
    words = ["shipper", "dead-letters", "show", "1561"]
    is_usual = directory in {"", "/var/lib/shipper"}
    expected = words if is_usual else [*words, "--set", f"state.directory={directory}"]
    asked = subprocess.run(["sh", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True, env={})
    assert asked.stdout.decode().split("\0")[:-1] == expected


def test_rules_beyond_the_most_frequent_are_added_up(show: Show):
    page = show(document(dead_letters={f"rule_{index}": 100 - index for index in range(15)}))
    bars = page.texts("#dead-letters .bars li")
    assert len(bars) == 13
    assert bars[-1] == "and 3 more rules 261"


# Charts


def test_charts_have_gaps_pauses_scales_and_names(show: Show):
    page = show("healthy")
    assert page.texts(".chart h3") == ["Throughput", "Latency", "Requests in flight", "Lag"]
    runs = page.run("[...document.querySelectorAll('.line')].map((one) => one.getAttribute('d').split('M').length - 1)")
    assert runs == [2, 3, 3, 2, 2]  # no samples once; no latency while it paused
    assert len(page.run("[...document.querySelectorAll('rect.paused')].map(String)")) == 4
    scale = page.run("[...document.querySelectorAll('.chart')].map((one) => one.querySelectorAll('.left').length)")
    assert all(3 <= labels <= 5 for labels in scale)
    names = page.run("[...document.querySelectorAll('.chart svg')].map((one) => one.getAttribute('aria-label'))")
    assert names[3] == "Lag over the last 30 minutes, at most 30\N{NO-BREAK SPACE}MB"
    assert page.run("[...document.querySelectorAll('.chart svg')].every((one) => one.getAttribute('role') === 'img')")


def test_lone_samples_are_dots(show: Show):
    page = show("settings")
    dots = page.run("[...document.querySelectorAll('circle.dot')].map((one) => one.getBoundingClientRect().width)")
    assert dots == pytest.approx([6] * 5, abs=0.1), "one in each line"
    (alone,) = history(1)[10:11]
    assert page.run("Number(document.querySelector('circle.dot').getAttribute('cx'))") == page.run(
        f"CHARTS[0].x({alone[0]})"
    )
    assert show("healthy").texts("circle.dot") == []


def test_the_axis_grows_with_the_age_of_a_young_shipper(show: Show):
    points = history()
    for count, minutes in ((20, 5), (200, 15), (600, 30)):
        page = show(document(), points[-count:])
        assert page.texts("#minutes") == [f"The last {minutes} minutes"]
        (first, *_) = page.run("[...document.querySelectorAll('.line')].map((one) => one.getBBox().x)")
        assert first > page.run("FRAME.left") - 1
        assert f"over the last {minutes} minutes" in page.run("CHARTS[0].svg.getAttribute('aria-label')")


def test_pointing_at_a_chart_reads_one_moment_in_all(visit: Callable[[str], Page]):
    page = visit("healthy")
    assert page.texts(".readout")[0].startswith("now ")
    page.run("scrollTo(0, 600)")
    box = page.run("CHARTS[1].svg.getBoundingClientRect().toJSON()")
    seen = history()[450]
    page.move_mouse(box["left"] + page.run(f"CHARTS[1].x({seen[0]})"), box["top"] + 50)
    page.until("document.querySelectorAll('.cross circle').length === 5")
    moment = page.run(f"clock({seen[0]})")
    assert all(each.startswith(moment) for each in page.texts(".readout"))
    assert page.texts(".readout b")[0] == page.run(f"CHARTS[0].unit({seen[1]})")
    page.move_mouse(box["left"] + page.run(f"CHARTS[1].x({NOW - 1345})"), box["top"] + 50)
    page.until("document.querySelector('.readout').innerText.includes('no sample')")
    page.move_mouse(2, 2)
    page.until("document.querySelector('.readout').innerText.startsWith('now')")


def test_charts_are_read_with_the_keyboard(visit: Callable[[str], Page]):
    page = visit("healthy")
    page.run("CHARTS[0].svg.focus()")
    page.press("Home", "ArrowRight", "ArrowRight", "ArrowLeft")
    assert page.run("pointedAt") == page.run("moments[1][0]")
    page.ask_again()
    assert page.run("document.activeElement === CHARTS[0].svg")
    assert page.texts(".readout .when") == [page.run("clock(moments[1][0])")] * 4
    page.press("Escape")
    assert page.texts(".readout .when") == ["now"] * 4


def test_history_is_asked_for_from_the_last_point_on_and_kept_for_half_an_hour(browser: Browser, serve: Any):
    server = serve(document(), history())
    page = browser.open(server.url)
    points = len(history())
    assert page.run("moments.length") == points
    server.history = history(32, until=NOW + 120)
    server.document = document(replace(HEALTHY, at=NOW + 120))
    page.ask_again()
    assert [each for each in server.asked if "history" in each][:2] == ["/history?since=0", f"/history?since={NOW:.0f}"]
    assert page.run("moments.length") < points + 60
    assert page.run("moments[0][0]") >= NOW + 120 - 1800


def test_history_begins_anew_when_the_clock_was_put_back(browser: Browser, serve: Any):
    server = serve(document(), history())
    page = browser.open(server.url)
    server.document, server.history = document(replace(HEALTHY, at=NOW - 86_400)), []
    page.ask_again()
    assert page.run("moments.length") == 0


# A process that is away


def test_silence_is_told_and_ends_by_itself(browser: Browser, serve: Any):
    server = serve(*SCENES["paused"])
    page = browser.open(server.url)
    server.is_away = True
    page.until("document.documentElement.dataset.state === 'away'")
    since = page.run("clock(heard.answeredAt)")
    assert page.text("h1") == f"No answer since {since}"
    assert page.text("#sub") == "What it said last: Paused: forbidden."
    assert page.texts(".pause") == [], "a probe that was promised is long over"
    assert page.run("document.documentElement.classList.contains('stale')")
    assert tiles(page)["Pending"] == "8,000 | read, not settled yet"
    server.document, server.is_away = document(), False
    page.until("document.documentElement.dataset.state === 'good'")
    assert not page.run("document.documentElement.classList.contains('stale')")


def test_silence_from_the_beginning_is_told(browser: Browser, serve: Any):
    server = serve(document())
    server.is_away = True
    page = browser.open(server.url)
    assert page.text("h1") == "No answer yet"
    assert not page.run("document.getElementById('main').offsetHeight")
    server.is_away = False
    page.ask_again()
    assert page.state == "good"


def test_silence_after_the_end_is_no_news(browser: Browser, serve: Any):
    server = serve(*SCENES["stopped"])
    page = browser.open(server.url)
    server.is_away = True
    page.until("document.documentElement.classList.contains('stale')")
    assert (page.state, page.text("h1")) == ("off", "Stopped: drained")
    assert page.text("#sub").endswith("The process is gone; these are its last figures.")


def test_error_that_is_answered_is_told(browser: Browser, serve: Any):
    server = serve(*SCENES["healthy"])
    page = browser.open(server.url)
    server.refusal = "the state is of a newer version <b>"
    page.until("document.documentElement.dataset.state === 'warn'")
    assert page.text("h1") == "It answers, but has no figures"
    assert page.text("#sub") == f"It says: {server.refusal}"
    assert page.run("document.documentElement.classList.contains('stale')")


def test_figures_that_stand_still_are_no_sign_of_life(browser: Browser, serve: Any):
    server = serve(document())
    page = browser.open(server.url)
    page.run("heard.newsAt -= 60, heard.at = undefined")
    page.ask_again()
    assert page.state == "good"
    server.is_stuck = True
    page.ask_again()
    page.run("heard.newsAt -= 60")
    page.ask_again()
    assert (page.state, page.text("h1")) == ("warn", f"No sign of life since {page.run('clock(heard.newsAt)')}")


def test_nothing_is_asked_for_while_nobody_looks(visit: Callable[[str], Page]):
    page = visit("healthy")
    page.run("Object.defineProperty(document, 'hidden', { configurable: true, get: () => true })")
    page.run("poll()")
    page.run("new Promise((done) => { const look = () => (isAsking ? setTimeout(look, 5) : done()); look() })")
    page.run("shownBefore = Number(document.documentElement.dataset.shown), set = setTimeout, timers = 0")
    page.run("setTimeout = (...each) => { timers += each[0] === poll; return set(...each) }")
    page.run("poll()")
    page.until("Number(document.documentElement.dataset.shown) > shownBefore && !isAsking")
    assert page.run("timers") == 0
    page.run("Object.defineProperty(document, 'hidden', { get: () => false })")
    page.run("document.dispatchEvent(new Event('visibilitychange'))")
    page.until("timers === 1")


def test_page_works_behind_a_path(browser: Browser, serve: Any):
    server = serve(document())
    assert browser.open(f"{server.url}some/proxy/").state == "good"
    assert "/some/proxy/status" in server.asked


def test_what_is_selected_stays_selected(visit: Callable[[str], Page]):
    page = visit("dead-letters")
    page.run("getSelection().selectAllChildren(document.querySelector('#dead-letters code'))")
    page.ask_again()
    assert page.run("String(getSelection())").startswith("shipper dead-letters show 1561")


# Data that is not what it should be

LONG = "/srv/" + "x" * 4080 + "/end.ndjson"
HOSTILE = (
    "<script>hacked = 1</script>",
    "</script><img src=x onerror='hacked = 1'>",
    "\N{RIGHT-TO-LEFT OVERRIDE}nosjdn.cod",
    "a\x00b\x1bc\nd\N{LINE SEPARATOR}e\ud800f",
    LONG,
)


@pytest.mark.parametrize("text", HOSTILE, ids=["script", "image", "reversed", "control", "long"])
def test_text_from_outside_is_text(text: str, show: Show):
    pause = Pause(text, text, text, NOW, NOW)
    stream = STATE["streams"][0] | {"path": text, "compression": text}
    where = {"destination": text, "state_directory": text, "reload_error": text, "restart_needed": [text]}
    letter = {"id": text, "rule": text, "path": text, "offset": text, "event_id": text, "status": text}
    page = show(
        {
            "live": to_builtins(replace(HEALTHY, version=text, command=text, outcome=text, pauses=[pause, pause]))
            | where,
            "state": STATE
            | {
                "streams": [stream],
                "dead_letters": {text: 1},
                "newest_dead_letters": [letter | {"delivery": text, "message": text, "last_at": NOW}],
                "unreachable": [{"stream_id": 1, "path": text, "bytes": 1, "noticed_at": NOW}],
            },
            "report": {"fetched_at": NOW, "account": text, "start": text, "end": text},
            "headline": {"state": "warn", "title": text, "detail": text, "sub": text},
            "summary": {"notices": [text], "options": text, "expiring": [text]},
        },
        width=360,
    )
    assert page.run("[document.scripts.length, document.images.length, typeof hacked]") == [1, 0, "undefined"]
    assert page.run("document.documentElement.scrollWidth") == 360
    path = page.run("document.querySelector('#streams th bdi').textContent")
    title = page.run("document.querySelector('#streams th bdi').title")
    assert (title or path) == page.run(f"visible({json.dumps(text)})")
    assert not set(page.run("document.body.textContent")) & set("\N{RIGHT-TO-LEFT OVERRIDE}\x00\x1b\N{LINE SEPARATOR}")
    assert page.troubles == []


def test_what_cannot_be_seen_is_written_as_its_code(show: Show):
    page = show("healthy")
    assert page.run("visible('a\\u202eb\\x00c\\u{e0001}d\\ud800e')") == "a\\u202eb\\u0000c\\u{e0001}d\\ud800e"
    assert page.run("visible('caf\\u00e9 \\u0645\\u06cc\\u200c\\u062e')") == "caf\u00e9 \u0645\u06cc\u200c\u062e"


def test_long_path_is_shortened_in_the_middle(show: Show):
    page = show(document(streams=[STATE["streams"][0] | {"path": LONG}]))
    text = page.text("#streams tbody th")
    assert len(text) < 110
    assert text.startswith("/srv/xxx")
    assert text.endswith("/end.ndjson")
    assert page.run("document.querySelector('#streams th bdi').title") == LONG


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"live": None, "state": None, "report": None},
        {"live": {"pauses": {}, "at": "now", "phase": 7}, "state": {"streams": {}, "dead_letters": []}, "report": 1},
        {"live": {"destination": {}, "state_directory": [7], "reload_error": 1, "restart_needed": {}}},
        {"live": {"pauses": [None]}, "state": {"streams": [None], "newest_dead_letters": [7], "unreachable": [[]]}},
        {"live": {}, "headline": {"state": "warn", "title": 7, "detail": {}, "sub": [], "until": "now"}},
        {"live": {}, "headline": {"state": "constructor", "title": "x", "until": 1e300, "is_open_line": 1}},
        {"live": {"at": 1e300, "started_at": -1e300}, "state": {"dead_letters": {"json": None}, "lag_bytes": "1"}},
    ],
)
def test_document_with_gaps_is_shown_as_far_as_it_goes(answer: dict[str, Any], show: Show):
    page = show(answer, [[], [None], [NOW], [NOW + 1, None, "1", {}, -1, 1e300, 1]], width=360)
    assert page.state in {"warn", "paused"}
    assert "NaN" not in page.text()
    assert "undefined" not in page.text()
    assert page.troubles == []


def test_state_that_is_empty_is_told_in_words(show: Show):
    page = show("empty")
    assert page.text("h1") == "Starting"
    assert page.texts("text.empty") == ["no samples yet"] * 4
    assert page.text("#streams") == "No file has been read yet."
    assert page.text("#dead-letters") == "None are kept."
    assert tiles(page)["Service certificate"] == "no expiry | none, or not known yet"
    assert page.troubles == []


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("width", [360, 1000])
def test_page_never_scrolls_sideways(scene: str, width: int, show: Show):
    page = show(scene, width=width, scheme="dark")
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.troubles == []


@pytest.mark.parametrize("scene", SCENES)
def test_on_paper_all_is_there_on_white_within_the_sheet(scene: str, visit: Callable[[str], Page]):
    page = visit(scene)
    on_screen = page.text()
    page.lay_out(width=718, media="print", scheme="dark")  # A4 upright, without its margins
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.run("document.documentElement.scrollWidth") <= 718
    assert page.text("h1") in on_screen
    assert page.troubles == []

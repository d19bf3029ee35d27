"""The status page in a browser, on any screen and for any data from the process."""

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
from shipper.status.live import Pause
from shipper.status.overview import NewestLetter, SpoolState
from tests.e2e.browser import Browser, Page
from tests.status_page_server import (
    FORBIDDEN,
    HEALTHY,
    LETTERS,
    NOW,
    SCENES,
    STREAMS,
    StatusServer,
    document,
    history,
)


@pytest.fixture
def serve(browser: Browser) -> Iterator[Callable[..., StatusServer]]:
    """Return a function that starts servers, which end with the test."""
    with ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(StatusServer(*arguments))


@pytest.fixture(scope="module")
def show(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Return a function that shows a document or a named scene; the page is shared, so only read it."""
    with StatusServer({}) as server:

        def show(scene: str | dict[str, Any], samples: Sequence[list[Any]] = (), **how: Any) -> Page:
            server.document, server.history = SCENES[scene] if isinstance(scene, str) else (scene, list(samples))
            server.asked.clear()
            page = browser.show(server.url, **how)
            assert page.troubles == []
            return page

        yield show


@pytest.fixture
def visit(browser: Browser, serve: Callable[..., StatusServer]) -> Callable[[str], Page]:
    """Return a function that opens a new page with a scene, for interaction."""
    return lambda scene: browser.open(serve(*SCENES[scene]).url)


Show = Callable[..., Page]


def tiles(page: Page) -> dict[str, str]:
    """Return the key figures and expiries by title."""
    titles = [each.removesuffix("!").strip() for each in page.texts(".tile h3")]
    rows = zip(titles, page.texts(".tile .value"), page.texts(".tile .note"), strict=True)
    return {title: f"{value} | {note}" for title, value, note in rows}


# The headline


def test_a_healthy_shipper_is_shown_as_healthy(show: Show):
    page = show("healthy")
    assert page.text("h1") == "Everything written until 16:13:20 is delivered"
    assert page.state == "good"
    title = "\N{CHECK MARK} Everything written is delivered \N{EN DASH} shipper malta"
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


@pytest.mark.parametrize(
    ("directory", "name"), [("", "shipper"), ("/var/lib/shipper", "shipper"), ("/srv/edge/", "shipper edge")]
)
def test_the_tab_is_named_after_the_state_directory(directory: str, name: str, show: Show):
    page = show(document(replace(HEALTHY, state_directory=directory)))
    assert page.run("document.title").endswith(f"is delivered \N{EN DASH} {name}")
    assert page.text(".kind").endswith(f", state in {directory}" if directory else "/acquisition")


def test_figures_follow_the_title(show: Show):
    page = show("behind")
    assert (page.state, page.text("h1")) == ("busy", "Delivering, 96.5 MB behind, about 4 min to go")


def test_nothing_is_green_while_dead_letters_are_kept(show: Show):
    page = show(document(HEALTHY, **LETTERS))
    assert page.state == "warn"
    assert page.text("h1") == "Everything written until 16:13:20 is delivered, except 1,561 dead letters"
    assert page.run("document.title").startswith("! ")


def test_a_missing_or_unreadable_input_is_the_headline(show: Show):
    page = show("no-match")
    words = "No file matches /var/log/app/acquisitions*.ndjson: there is no folder /var/log/app"
    assert (page.state, page.text("h1"), page.text("#sub")) == ("warn", words, "Nothing has been read yet.")
    page = show("unreadable")
    assert page.text("h1") == "/var/log/app/app.ndjson cannot be read: permission denied"
    assert tiles(page)["Lag"] == "48 kB | of files that cannot be read"


def test_an_incomplete_line_has_no_remaining_time(show: Show):
    page = show("open-line")
    found = tiles(page)
    assert found["Lag"] == "10 B | an incomplete line"
    assert found["Time to go"] == "none | until the line is complete"
    assert page.text("#sub") == ""


def test_screen_readers_announce_only_the_stable_part_of_the_headline(show: Show):
    page = show("behind")
    assert page.texts("[aria-live]") == ["Delivering"]
    assert page.texts("[aria-live] [aria-hidden]") == []
    assert page.run("document.querySelector('[aria-live]').getAttribute('aria-live')") == "polite"
    assert show("healthy").texts("[aria-live] [aria-hidden=true]") == ["until 16:13:20"]


# Pauses


def test_a_pause_shows_its_reason_the_remedy_and_the_next_attempt(show: Show):
    page = show("paused")
    assert (page.state, page.text("h1")) == ("paused", "Paused: forbidden")
    assert page.texts(".pause") == [
        f"The service denied access (HTTP 403) What to do: {FORBIDDEN.advice} Since 16:10:00 (3 min) Next probe in 12 s"
    ]
    assert page.text().casefold().count("forbidden") == 1, "it is shown once"
    assert page.text().count("permissions of the token and the subscription key") == 1
    assert page.run("document.querySelector('.headline').contains(document.querySelector('.pause'))")
    assert tiles(page)["Time to go"] == "\N{EN DASH} | while paused"


def test_two_pauses_are_both_shown(show: Show):
    page = show("two-pauses")
    assert page.text("h1") == "Paused for 2 reasons"
    assert page.texts(".pause h2") == ["Forbidden", "Dead letters full"]


@pytest.mark.parametrize(("next_probe_at", "told"), [(NOW - 5, "Next probe any moment now"), (None, "(3 min)")])
def test_a_due_or_unknown_probe_has_no_countdown(next_probe_at: float | None, told: str, show: Show):
    pause = replace(FORBIDDEN, next_probe_at=next_probe_at)
    assert show(document(replace(HEALTHY, pauses=[pause]))).text(".pause").endswith(told)


# Figures


def test_key_figures_have_units_and_thousands_separators(show: Show):
    page = show("behind")
    assert tiles(page) == {
        "Accepted": "12,340,000 | 1,204/s",
        "Pending": "8,000 | read but not settled",
        "Dead letters": "0 | 0 by this process; 0 B kept",
        "Duplicates": "5,678 | accepted before, not sent again",
        "Lag": "96.5 MB | oldest record waiting for 12 s",
        "Time to go": "about 4 min | at 402 kB/s",
        "In flight": "3 of 16 | requests, of the current limit",
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


def test_the_figure_of_dead_letters_links_to_them(show: Show):
    page = show(document(replace(HEALTHY, dead_lettered=2, read=HEALTHY.read + 2), **LETTERS))
    assert tiles(page)["Dead letters"] == "1,561 | 2 by this process; 612 kB kept"
    assert page.text(".flagged h3") == "Dead letters !"
    assert page.run("document.querySelector(document.querySelector('.flagged a').hash).innerText") == "Dead letters"
    assert show("healthy").texts(".flagged") == []


@pytest.mark.parametrize(("kept", "left"), [(900, 0), (0, 900), (900, 900)])
def test_the_spool_is_a_key_figure_if_there_is_one(kept: int, left: int, show: Show):
    page = show(document(replace(HEALTHY, spool_bytes=kept), spool=SpoolState(1, kept, left)))
    assert tiles(page)["Spool"] == f"{kept} B | of standard input, {left} B to go"


def test_an_address_without_tls_has_no_certificate_expiry(show: Show):
    assert tiles(show("settings"))["Service certificate"] == "no TLS | the service uses plain HTTP"


def test_settings_not_in_effect_are_shown(show: Show):
    page = show("settings")
    assert page.text("#notice") == (
        "The settings could not be reloaded, and are unchanged: /etc/shipper/shipper.toml: log.level: expected "
        "debug, info, warning or error. "
        "Changed settings that take effect at the next start: intake.base_url, delivery.max_concurrency."
    )
    for fields, words in (({"reload_error": "no"}, "are unchanged: no."), ({"restart_needed": ["a.b"]}, "start: a.b.")):
        assert show(document(replace(HEALTHY, **fields))).text("#notice").endswith(words)


def test_inconsistent_figures_are_flagged(show: Show):
    page = show(document(replace(HEALTHY, read=HEALTHY.read + 1)))
    assert page.text("#balance h3") == "The counts do not add up: please report this bug"
    assert "\N{NOT EQUAL TO}" in page.text("#balance")


def test_losses_and_past_or_imminent_expiries_are_flagged_in_words(show: Show):
    page = show("worrying")
    found = tiles(page)
    assert found["Unreachable"] == "1.2 MB | gone before it was read"
    assert found["Access token"] == "in 2 min | expires soon: 16:15:00"
    assert found["Service certificate"] == "expired | 1 h ago, 15:13:20"
    assert len(page.texts(".flagged")) == 3
    assert page.text(".lost") == (
        "Gone before they were completely read /var/log/app/gone.log: 1.2 MB, noticed 16:11:50"
    )


def test_times_are_in_the_reader_s_time_zone_and_available_in_utc(show: Show):
    page = show("paused")
    assert page.run("document.querySelector('.pause time').title") == "2026-09-21 14:10:00 UTC"
    assert page.text("#updated").endswith("Times are in Europe/Berlin; hover over a time to see it in UTC.")


def test_the_footer_links_to_the_machine_readable_endpoints(show: Show):
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
    assert page.text("#streams .sub") == "3 files, 1 behind by 96.5 MB in total; largest lag first."


def test_an_input_shows_its_newest_dead_letter_and_links_to_it_or_to_all(show: Show):
    newest = LETTERS["newest_dead_letters"][0].id
    streams = [
        replace(STREAMS[0], newest_dead_letter=NewestLetter(newest, "country", NOW - 40)),
        replace(STREAMS[1], newest_dead_letter=NewestLetter(7, "ip", NOW - 9e4)),
        STREAMS[2],
    ]
    page = show(document(**LETTERS, streams=streams), width=360)
    assert page.texts("#streams tbody th .note") == [
        "newest dead letter 16:12:40, country",
        "newest dead letter 20 September, 15:13, ip",
    ]
    where = "[...document.querySelectorAll('#streams th a')].map((one) => document.querySelector(one.hash).innerText)"
    assert page.run(where) == ["16:13:20", "Dead letters"]
    assert page.run("document.documentElement.scrollWidth") == 360


def test_a_member_of_a_group_shows_partitions_instead_of_files(show: Show):
    at = {"topic": "events", "offset": 1200, "end": 1500}
    group = GroupState(
        group="shipper",
        protocol="classic",
        partitions=[
            PartitionState(**at, partition=3, lag_records=300, delivered_until=NOW - 60),
            PartitionState(**at, partition=7, state="stopped", message="events/7: records are gone"),
        ],
        handed_over=1840,
        last_rebalance="2 partitions revoked",
        last_rebalance_at=NOW - 300,
    )
    page = show(document(replace(HEALTHY, group=group)))
    assert page.texts("#streams thead th") == ["Partition", "Settled to", "End", "Lag", "Delivered up to"]
    assert page.texts("#streams tbody tr")[0] == "events/3reading 1,200 1,500 300 16:12:20"
    assert page.texts("#streams .more") == ["events/7: records are gone"]
    assert page.text("#streams .sub").startswith(
        "Member of the group shipper (classic): 2 partitions, 300 records behind. "
        "Last rebalance 16:08:20: 2 partitions revoked."
    )
    assert tiles(page)["Lag"].startswith("300 |")
    assert tiles(page)["Dead letters"] == "0 | by this process"
    assert tiles(page)["Time to go"] == "about 0 s | at 1,204/s"
    assert "Since the state was created" not in page.text("#balance")
    assert page.text("#dead-letters").startswith("They are stored in a topic of the group; list them with:")


def test_inputs_missing_from_the_document_are_counted(show: Show):
    many = [replace(STREAMS[0], stream_id=index, path=f"/logs/{index}") for index in range(1_020)]
    page = show(document(streams=many))
    assert len(page.texts("#streams tbody tr")) == 20
    assert page.text("#streams .more") == "\N{HORIZONTAL ELLIPSIS} and 1,000 more"


def test_dead_letters_are_shown_by_rule_with_examples(show: Show):
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
def test_the_command_next_to_a_dead_letter_works_in_a_shell(directory: str, show: Show):
    page = show(document(replace(HEALTHY, state_directory=directory), **LETTERS))
    command = page.run("document.querySelector('#dead-letters code').textContent")
    words = ["shipper", "dead-letters", "show", "1561"]
    is_usual = directory in {"", "/var/lib/shipper"}
    expected = words if is_usual else [*words, "--set", f"state.directory={directory}"]
    asked = subprocess.run(["sh", "-c", f"printf '%s\\0' {command}"], capture_output=True, check=True, env={})
    assert asked.stdout.decode().split("\0")[:-1] == expected


def test_all_but_the_most_frequent_rules_are_summed(show: Show):
    page = show(document(dead_letters={f"rule_{index}": 100 - index for index in range(15)}))
    bars = page.texts("#dead-letters .bars li")
    assert len(bars) == 13
    assert bars[-1] == "and 3 more rules 261"


# Charts


def test_charts_have_gaps_pauses_scales_and_names(show: Show):
    page = show("healthy")
    assert page.texts(".chart h3") == ["Throughput", "Latency", "Requests in flight", "Lag"]
    runs = page.run("[...document.querySelectorAll('.line')].map((one) => one.getAttribute('d').split('M').length - 1)")
    assert runs == [2, 3, 3, 2, 2]  # one gap without samples; no latency during the pause
    assert len(page.run("[...document.querySelectorAll('rect.paused')].map(String)")) == 4
    scale = page.run("[...document.querySelectorAll('.chart')].map((one) => one.querySelectorAll('.left').length)")
    assert all(3 <= labels <= 5 for labels in scale)
    names = page.run("[...document.querySelectorAll('.chart svg')].map((one) => one.getAttribute('aria-label'))")
    assert names[3] == "Lag over the last 30 minutes, at most 30\N{NO-BREAK SPACE}MB"
    assert page.run("[...document.querySelectorAll('.chart svg')].every((one) => one.getAttribute('role') === 'img')")


def test_isolated_samples_are_dots(show: Show):
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


def test_pointing_at_a_chart_shows_the_same_moment_in_all_charts(visit: Callable[[str], Page]):
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


def test_charts_can_be_read_with_the_keyboard(visit: Callable[[str], Page]):
    page = visit("healthy")
    page.run("CHARTS[0].svg.focus()")
    page.press("Home", "ArrowRight", "ArrowRight", "ArrowLeft")
    assert page.run("pointedAt") == page.run("samples[1][0]")
    page.ask_again()
    assert page.run("document.activeElement === CHARTS[0].svg")
    assert page.texts(".readout .when") == [page.run("clock(samples[1][0])")] * 4
    page.press("Escape")
    assert page.texts(".readout .when") == ["now"] * 4


def test_history_is_requested_from_the_last_point_on_and_kept_for_half_an_hour(browser: Browser, serve: Any):
    server = serve(document(), history())
    page = browser.open(server.url)
    points = len(history())
    assert page.run("samples.length") == points
    server.history = history(32, until=NOW + 120)
    server.document = document(replace(HEALTHY, at=NOW + 120))
    page.ask_again()
    assert [each for each in server.asked if "history" in each][:2] == ["/history?since=0", f"/history?since={NOW:.0f}"]
    assert page.run("samples.length") < points + 60
    assert page.run("samples[0][0]") >= NOW + 120 - 1800


def test_the_history_restarts_when_the_clock_was_set_back(browser: Browser, serve: Any):
    server = serve(document(), history())
    page = browser.open(server.url)
    server.document, server.history = document(replace(HEALTHY, at=NOW - 86_400)), []
    page.ask_again()
    assert page.run("samples.length") == 0


# A silent process


def test_silence_is_shown_until_the_process_answers_again(browser: Browser, serve: Any):
    server = serve(*SCENES["paused"])
    page = browser.open(server.url)
    server.is_away = True
    page.until("document.documentElement.dataset.state === 'away'")
    since = page.run("clock(latest.answeredAt)")
    assert page.text("h1") == f"No answer since {since}"
    assert page.text("#sub") == "Last report: Paused: forbidden."
    assert page.texts(".pause") == [], "an announced probe is long overdue"
    assert page.run("document.documentElement.classList.contains('stale')")
    assert tiles(page)["Pending"] == "8,000 | read but not settled"
    server.document, server.is_away = document(), False
    page.until("document.documentElement.dataset.state === 'good'")
    assert not page.run("document.documentElement.classList.contains('stale')")


def test_silence_from_the_beginning_is_shown(browser: Browser, serve: Any):
    server = serve(document())
    server.is_away = True
    page = browser.open(server.url)
    assert page.text("h1") == "No answer yet"
    assert not page.run("document.getElementById('main').offsetHeight")
    server.is_away = False
    page.ask_again()
    assert page.state == "good"


def test_silence_after_the_end_is_not_an_error(browser: Browser, serve: Any):
    server = serve(*SCENES["stopped"])
    page = browser.open(server.url)
    server.is_away = True
    page.ask_again()
    assert page.run("document.documentElement.classList.contains('stale')")
    assert (page.state, page.text("h1")) == ("off", "Stopped: drained")
    assert page.text("#sub").endswith("The process has ended; these are its last figures.")


def test_an_error_answer_is_shown(browser: Browser, serve: Any):
    server = serve(*SCENES["healthy"])
    page = browser.open(server.url)
    server.refusal = "the state is of a newer version <b>"
    page.ask_again()
    assert page.state == "warn"
    assert page.text("h1") == "The process answers, but has no figures"
    assert page.text("#sub") == f"Its answer: {server.refusal}"
    assert page.run("document.documentElement.classList.contains('stale')")


def test_the_page_does_not_poll_while_hidden(visit: Callable[[str], Page]):
    page = visit("healthy")
    page.run("Object.defineProperty(document, 'hidden', { configurable: true, get: () => true })")
    page.run("poll()")
    page.run("new Promise((done) => { const look = () => (isPolling ? setTimeout(look, 5) : done()); look() })")
    page.run("shownBefore = Number(document.documentElement.dataset.shown), set = setTimeout, timers = 0")
    page.run("setTimeout = (...each) => { timers += each[0] === poll; return set(...each) }")
    page.run("poll()")
    page.until("Number(document.documentElement.dataset.shown) > shownBefore && !isPolling")
    assert page.run("timers") == 0
    page.run("Object.defineProperty(document, 'hidden', { get: () => false })")
    page.run("document.dispatchEvent(new Event('visibilitychange'))")
    page.until("timers === 1")


def test_the_page_works_below_a_path(browser: Browser, serve: Any):
    server = serve(document())
    assert browser.open(f"{server.url}some/proxy/").state == "good"
    assert "/some/proxy/status" in server.asked


def test_a_text_selection_survives_updates(visit: Callable[[str], Page]):
    page = visit("dead-letters")
    page.run("getSelection().selectAllChildren(document.querySelector('#dead-letters code'))")
    page.ask_again()
    assert page.run("String(getSelection())").startswith("shipper dead-letters show 1561")


# Invalid data

LONG = "/srv/" + "x" * 4080 + "/end.ndjson"
HOSTILE = (
    "<script>hacked = 1</script>",
    "</script><img src=x onerror='hacked = 1'>",
    "\N{RIGHT-TO-LEFT OVERRIDE}nosjdn.cod",
    "a\x00b\x1bc\nd\N{LINE SEPARATOR}e\ud800f",
    LONG,
)


@pytest.mark.parametrize("text", HOSTILE, ids=["script", "image", "reversed", "control", "long"])
def test_text_from_outside_is_not_interpreted_as_markup(text: str, show: Show):
    pause = Pause(text, text, text, NOW, NOW)
    state = document()["state"]
    stream = state["streams"][0] | {"path": text, "compression": text}
    where = {"destination": text, "state_directory": text, "reload_error": text, "restart_needed": [text]}
    letter = {"id": text, "rule": text, "path": text, "offset": text, "event_id": text, "status": text}
    page = show(
        {
            "live": to_builtins(replace(HEALTHY, version=text, command=text, outcome=text, pauses=[pause, pause]))
            | where,
            "state": state
            | {
                "streams": [stream],
                "dead_letters": {text: 1},
                "newest_dead_letters": [letter | {"delivery": text, "message": text, "last_at": NOW}],
                "unreachable": [{"stream_id": 1, "path": text, "bytes": 1, "noticed_at": NOW}],
            },
            "report": {"fetched_at": NOW, "account": text, "days": text},
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


def test_invisible_characters_are_shown_as_codes(show: Show):
    page = show("healthy")
    assert page.run("visible('a\\u202eb\\x00c\\u{e0001}d\\ud800e')") == "a\\u202eb\\u0000c\\u{e0001}d\\ud800e"
    assert page.run("visible('caf\\u00e9 \\u0645\\u06cc\\u200c\\u062e')") == "caf\u00e9 \u0645\u06cc\u200c\u062e"


def test_a_long_path_is_shortened_in_the_middle(show: Show):
    page = show(document(streams=[replace(STREAMS[0], path=LONG)]))
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
def test_an_incomplete_document_is_shown_as_far_as_possible(answer: dict[str, Any], show: Show):
    page = show(answer, [[], [None], [NOW], [NOW + 1, None, "1", {}, -1, 1e300, 1]], width=360)
    assert page.state in {"warn", "paused"}
    assert "NaN" not in page.text()
    assert "undefined" not in page.text()


def test_an_empty_state_is_explained(show: Show):
    page = show("empty")
    assert page.text("h1") == "Starting"
    assert page.texts("text.empty") == ["no samples yet"] * 4
    assert page.text("#streams") == "No file has been read yet."
    assert page.text("#dead-letters") == "None."
    assert tiles(page)["Service certificate"] == "no expiry | none or not known yet"


@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("width", [360, 1000])
def test_the_page_never_scrolls_sideways(scene: str, width: int, show: Show):
    page = show(scene, width=width, scheme="dark")
    assert page.run("document.documentElement.scrollWidth") <= width


@pytest.mark.parametrize("scene", SCENES)
def test_the_printed_page_is_complete_white_and_within_the_sheet(scene: str, visit: Callable[[str], Page]):
    page = visit(scene)
    on_screen = page.text()
    page.lay_out(width=718, media="print", scheme="dark")  # A4 portrait without margins
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.run("document.documentElement.scrollWidth") <= 718
    assert page.text("h1") in on_screen
    assert page.troubles == []

"""The report operation of the sandbox: the document, its period, and when it changes."""

from __future__ import annotations

import json
import re
from datetime import date

import pytest

from shipper.report.client import report_path
from shipper.report.document import read_report
from tests.cases import each
from tests.stage.sandbox.conftest import Start
from tests.stage.sandbox.driver import REPORT, Sandbox, changed, gateway_answer, sample, told

OTHER_MONTH = "start_date and end_date must lie in the same calendar month."
NO_DATES = "start_date and end_date must be dates of the form YYYY-MM-DD."
BACKWARDS = "start_date must not be after end_date."

# Field by field like the document of the service, including the spelling of the account id.
DOCUMENT = """\
{
 "id":"UUID",
 "lastCheckSum":"SUM",
 "source":{"affilaiteAccountId":1001,"affiliateAccountName":"Sandbox Affiliate","operatorName":"Sandbox Operator"},
 "reportingTime":"2026-03-15T12:30:07.2500000Z",
 "reportingPeriod":{"start":"2026-03-01T00:00:00","end":"2026-03-31T23:59:59"},
 "reportingCurrency":"Euro",
 "openingBalance":0.0000,
 "outgoingBalance":0.0000,
 "brands":[
  {
   "id":11,
   "name":"Harbour Lights",
   "marketingSources":[
    {
     "id":50121,
     "name":"",
     "reportingCurrency":"Euro",
     "exchangeRate":1.0000,
     "activeCustomers":{"result":0,"adjustment":0},
     "conversions":{
      "clicks":0,
      "qualifiedConversions":{"result":0,"adjustment":0},
      "registrations":{"result":2,"adjustment":0}
     },
     "deposits":{
      "newDepositingCustomers":{
       "customers":{"result":0,"adjustment":0},
       "amount":{"result":0.0000,"adjustment":0.0000}
      },
      "returningDepositingCustomers":{
       "customers":{"result":0,"adjustment":0},
       "amount":{"result":0.0000,"adjustment":0.0000}
      }
     },
     "netRevenue":{"result":0.0000,"adjustment":0.0000},
     "revShare":{"result":0.0000,"adjustment":0.0000},
     "cpaRevenue":{"result":0.0000,"adjustment":0.0000},
     "fees":{"result":0.0000,"adjustment":0.0000},
     "outgoingBalance":0.0000
    }
   ]
  }
 ]
}
"""


def of_one_source(count: int, **fields: object) -> list[bytes]:
    fixed = {"BrandID": 11, "BTag": f"50121_{'a' * 32}", "Timestamp": "2026-03-05T12:00:00Z"}
    return [changed(event, **{**fixed, **fields}) for event in sample(count)]


def report(sandbox: Sandbox, start: str = "2026-03-01", end: str = "2026-03-31") -> dict:
    return sandbox.ask("GET", f"/dpm/v1/dar/1001/{start}/{end}").raise_for_status().json()


def signature(document: dict) -> tuple[str, str]:
    return document["id"], document["lastCheckSum"]


def pairs(document: dict) -> dict[tuple[int, int], tuple[int, int]]:
    return {
        (brand["id"], source["id"]): tuple(source["conversions"]["registrations"].values())
        for brand in document["brands"]
        for source in brand["marketingSources"]
    }


# The document


def test_report_equals_the_document_of_the_service(sandbox: Sandbox):
    sandbox.post(of_one_source(2))
    answer = sandbox.ask("GET", REPORT)
    assert (answer.status_code, answer.headers["Content-Type"]) == (200, "application/json")
    text = re.sub(r'"id":"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"', '"id":"UUID"', answer.text)
    text = re.sub(r'"lastCheckSum":"[0-9a-f]{64}"', '"lastCheckSum":"SUM"', text)
    assert text == re.sub(r"\n *", "", DOCUMENT)


def test_account_comes_from_the_options(start: Start):
    document = start(account_id=7).ask("GET", "/dpm/v1/dar/7/2026-03-01/2026-03-31").json()
    assert document["source"]["affilaiteAccountId"] == 7


def test_report_counts_registrations_of_the_requested_days(sandbox: Sandbox):
    events = sample(400, days=20)
    sandbox.post(events)
    start, end = date(2026, 3, 1), date(2026, 3, 10)
    answer = sandbox.ask("GET", report_path(1001, start, end))
    made = read_report(answer.content, account_id=1001).report

    expected: dict[tuple[int, int], int] = {}
    for event in map(json.loads, events):
        if start.isoformat() <= event["Timestamp"][:10] <= end.isoformat():
            key = event["BrandID"], int(event["BTag"].split("_")[0])
            expected[key] = expected.get(key, 0) + 1
    assert 0 < sum(expected.values()) < 400
    assert expected == {
        (brand.id, entry.id): int(entry.conversions.registrations.result)
        for brand in made.brands
        for entry in brand.marketing_sources
    }
    assert made.reporting_time == "2026-03-15T12:30:07.2500000Z"


@pytest.mark.parametrize(
    ("second", "day"),
    [
        ("2026-03-04T23:59:59Z", 0),
        ("2026-03-05T00:00:00Z", 1),
        ("2026-03-05T23:59:59Z", 1),
        ("2026-03-06T00:00:00Z", 0),
    ],
)
def test_both_ends_of_the_period_are_included(sandbox: Sandbox, second, day):
    sandbox.post(of_one_source(1, Timestamp=second))
    assert len(report(sandbox, "2026-03-05", "2026-03-05")["brands"]) == day


# What is asked for


@each("profile", ["document", "strict"])
@each(
    ("path", "status", "message"),
    [
        ("1002/2026-03-01/2026-03-31", 404, "Affiliate account not found"),
        ("me/2026-03-01/2026-03-31", 404, "Affiliate account not found"),
        ("01001/2026-03-01/2026-03-31", 404, "Affiliate account not found"),
        ("1002/today/2026-03-31", 404, "Affiliate account not found"),
        ("1001/2026-03-31/2026-03-01", 400, BACKWARDS),
        ("1001/2026-02-30/2026-03-01", 400, NO_DATES),
        ("1001/2026-03-01/2026-03-32", 400, NO_DATES),
        ("1001/20260301/20260302", 400, NO_DATES),
        ("1001/2026-W10-1/2026-W10-2", 400, NO_DATES),
        ("1001/2026-3-1/2026-3-2", 400, NO_DATES),
        ("1001/2026-03-01T00:00:00/2026-03-02", 400, NO_DATES),
        ("1001/0000-01-01/2026-03-02", 400, NO_DATES),
        ("1001/today/2026-03-01", 400, NO_DATES),
        ("1001/%D9%A2026-03-01/2026-03-02", 400, NO_DATES),
    ],
)
def test_unknown_account_and_bad_dates_are_refused(start: Start, profile, path, status, message):
    answer = start(profile=profile).ask("GET", f"/dpm/v1/dar/{path}")
    assert told(answer) == gateway_answer(status, message)


@each(
    ("period", "is_one_month"),
    [
        ("2026-03-01/2026-03-31", True),
        ("2026-03-15/2026-03-15", True),
        ("2024-02-29/2024-02-29", True),
        ("2026-02-28/2026-03-01", False),
        ("2025-03-01/2026-03-31", False),
        ("0001-01-01/9999-12-31", False),
    ],
)
@each("profile", ["document", "strict"])
def test_only_the_strict_profile_refuses_a_period_across_months(start: Start, profile, period, is_one_month):
    answer = start(profile=profile).ask("GET", f"/dpm/v1/dar/1001/{period}")
    if is_one_month or profile == "document":
        first, last = period.split("/")
        expected = {"start": f"{first}T00:00:00", "end": f"{last}T23:59:59"}
        assert (answer.status_code, answer.json()["reportingPeriod"]) == (200, expected)
    else:
        assert told(answer) == gateway_answer(400, OTHER_MONTH)


def test_query_is_ignored(sandbox: Sandbox):
    assert sandbox.ask("GET", f"{REPORT}?brand=11").status_code == 200


# When it changes


def test_reports_of_the_same_data_differ_only_in_the_time(sandbox: Sandbox):
    events = sample(5)
    sandbox.post(events)
    before = report(sandbox)
    sandbox.post(events)  # repeated events are one registration
    sandbox.advance(3600.125)
    after = report(sandbox)
    assert after == {**before, "reportingTime": "2026-03-15T13:30:07.3750000Z"}
    sandbox.post(sample(1, seed=9))
    changed_report = report(sandbox)
    assert not {*signature(changed_report)} & {*signature(before)}


def test_restatement_changes_only_the_reports_of_its_days(sandbox: Sandbox):
    sandbox.post([*of_one_source(3), *[changed(e, Timestamp="2026-03-20T00:00:00Z") for e in of_one_source(5)[3:]]])
    periods = [("2026-03-01", "2026-03-31"), ("2026-03-05", "2026-03-05"), ("2026-03-06", "2026-03-31")]
    whole, inside, outside = (report(sandbox, *period) for period in periods)
    assert pairs(whole) == {(11, 50121): (5, 0)}

    answer = sandbox.control("POST", "restatements", {"start": "2026-03-04", "end": "2026-03-05"})
    assert (answer.status_code, answer.json()) == (200, {"days": 2})
    again = [report(sandbox, *period) for period in periods]
    assert [pairs(document)[11, 50121] for document in again] == [(5, -1), (3, -1), (2, 0)]
    assert signature(again[0]) != signature(whole)
    assert signature(again[1]) != signature(inside)
    assert again[2] == outside
    assert [report(sandbox, *period) for period in periods] == again


def test_restatements_add_up_and_a_reset_ends_them(sandbox: Sandbox):
    sandbox.post(of_one_source(2))
    first = report(sandbox)
    seen = [signature(first)]
    for taken_back in (1, 2, 2):
        sandbox.control("POST", "restatements", {"start": "2026-03-05", "end": "2026-03-05"})
        assert pairs(report(sandbox))[11, 50121] == (2, -taken_back)
        seen.append(signature(report(sandbox)))
    assert len(set(seen)) == 3  # nothing was left for the third one to take back
    sandbox.control("POST", "reset")
    sandbox.post(of_one_source(2))
    assert report(sandbox) == first


@pytest.mark.parametrize("figures", ["received", "seeded"])
def test_invented_figures_exist_without_events_and_depend_on_the_seed(start: Start, figures):
    one, same, other = (report(start(figures=figures, seed=seed)) for seed in (3, 3, 4))
    assert one == same
    assert bool(one["brands"]) == (figures == "seeded")
    assert (one["brands"] != other["brands"]) == (figures == "seeded")

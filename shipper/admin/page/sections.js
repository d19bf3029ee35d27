// The parts of the page, each a rendering of what came last. `now` is the server's clock: the reader's may differ.

const BARS_SHOWN = 12;
const LOST_SHOWN = 10;
const SOON_SECONDS = { token: 300, certificate: 7 * 86400 };

function facts(live, now) {
  const since = (at, words) => (isMoment(at) ? [time(at, now), ` (${words(at)})`] : null);
  const items = [
    ["Version", live.version ? [visible(live.version)] : null],
    ["Process", isNumber(live.process_id) ? [String(live.process_id)] : null],
    ["Up since", since(live.started_at, (at) => duration(now - at))],
    ["Last acceptance", since(live.last_accepted_at, (at) => ago(at, now)) ?? ["none yet"]],
  ];
  fill("facts", ...items.map(([name, value]) => value && fact(name, ...value)));
}

const fact = (name, ...value) => el("div", {}, el("dt", {}, name), el("dd", {}, ...value));

function pauses(live, now) {
  const panels = list(live.pauses).map((each) => pausePanel(fields(each), now));
  fill("pauses", ...panels);
  document.getElementById("pauses").hidden = !panels.length;
}

function pausePanel(pause, now) {
  const left = pause.next_probe_at - now;
  const probe = fact("Next probe", left < 0.5 ? "any moment now" : `in ${duration(left)}`);
  const since = fact("Since", time(pause.since, now), isMoment(pause.since) ? ` (${duration(now - pause.since)})` : "");
  return el(
    "article",
    { class: "pause" },
    el("h2", {}, words(pause.reason)),
    el("p", {}, quoted(pause.message, 600)),
    el("p", {}, el("b", {}, "What to do: "), quoted(pause.advice, 600)),
    el("dl", {}, since, isMoment(pause.next_probe_at) ? probe : null),
  );
}

function tiles(live, state) {
  const oldest = live.oldest_unsettled_seconds;
  const lost = lostBytes(live, state);
  const p50 = [latency(live.latency_p50_seconds), el("small", {}, " p50")];
  const inFlight = [count(live.in_flight), el("small", {}, ` of ${count(live.concurrency_limit)}`)];
  const spoolLeft = bytes(fields(state.spool).lag_bytes ?? 0);
  const kept = `${count(keptLetters(state))} kept, ${bytes(state.dead_letter_bytes ?? 0)}`;
  const wait = isNumber(oldest) ? `oldest record waits ${duration(oldest)}` : "no record waits";
  fill(
    "tiles",
    tile("Accepted", count(live.accepted), rate(live.accepted_per_second)),
    tile("Pending", count(live.pending), "read, not settled yet"),
    tile("Dead letters", count(live.dead_lettered), kept),
    tile("Duplicates", count(live.duplicates), "known already, not sent again"),
    tile("Lag", bytes(live.lag_bytes), wait),
    tile("Time to go", ...timeToGo(live, state)),
    tile("In flight", inFlight, "requests, and how many may be"),
    tile("Latency", p50, `p95 ${latency(live.latency_p95_seconds)}`),
    tile("Spool", bytes(live.spool_bytes), `of standard input, ${spoolLeft} to go`),
    tile("Unreachable", bytes(lost), lost ? "gone before it was read" : "nothing was lost", lost ? "warn" : ""),
  );
}

function timeToGo(live, state) {
  const left = bytesLeft(live);
  const togo = secondsToGo(left, live);
  if (left === 0) return ["none", "nothing is behind"];
  if (togo === null) return ["unknown", "nothing is being settled"];
  return [`about ${duration(togo)}`, `at ${bytes(live.settled_bytes_per_second)}/s`];
}

/** A key figure; `flag` is the state it draws attention to, and then it has a sign, too. */
function tile(title, value, note, flag = "") {
  const sign = flag ? el("span", { class: "sign", "aria-hidden": "true" }, "!") : null;
  return el(
    "div",
    flag ? { class: "tile flagged", "data-state": flag } : { class: "tile" },
    el("h3", {}, title, sign),
    el("p", { class: "value" }, ...[value].flat()),
    el("p", { class: "note" }, ...[note].flat()),
  );
}

/** Show that every record that was read is accounted for. */
function balance(live, state) {
  const isEven = sum([live.accepted, live.dead_lettered, live.duplicates, live.pending]) === live.read;
  const parts = `${count(state.dead_lettered)} dead-lettered + ${count(state.duplicates)} duplicates`;
  const since = `Since the state was made: ${count(state.read)} read = ${count(state.accepted)} accepted + ${parts}.`;
  fill(
    "balance",
    el("h3", {}, isEven ? "Every record that was read is accounted for" : "This does not add up: that is a defect"),
    el(
      "p",
      { class: "sum" },
      term("", live.read, "read"),
      term(isEven ? "=" : "\u2260", live.accepted, "accepted"),
      term("+", live.dead_lettered, "dead-lettered"),
      term("+", live.duplicates, "duplicates"),
      term("+", live.pending, "pending"),
    ),
    isNumber(state.read) ? el("p", { class: "note" }, since) : null,
  );
  document.getElementById("balance").hidden = !isNumber(live.read);
}

function term(sign, value, word) {
  return el("span", { class: "whole" }, sign ? el("i", {}, `${sign} `) : null, el("b", {}, count(value)), ` ${word}`);
}

function streams(state, now) {
  const known = list(state.streams).map(fields);
  const total = isNumber(state.stream_count) ? state.stream_count : known.length;
  const more = total - known.length;
  const lag = `${count(state.streams_behind)} behind by ${bytes(state.lag_bytes)} in all; the one with most lag first`;
  const files = `${several(total, "file")}, ${state.streams_behind ? lag : "none behind"}.`;
  const heads = ["Path", "Settled", "Size", "Lag", "Delivered up to"];
  fill(
    "streams",
    el("p", { class: "sub" }, total ? files : "No file has been read yet."),
    spool(fields(state.spool)),
    known.length ? table(heads, known.map((each) => streamRow(each, now))) : null,
    more > 0 ? el("p", { class: "more" }, `\u2026 and ${count(more)} more`) : null,
    lost(list(state.unreachable).map(fields), now),
  );
}

function spool({ segments, bytes: size, lag_bytes: left }) {
  if (!segments) return null;
  const kept = `${several(segments, "segment")} on disk, ${bytes(size)}, of which ${bytes(left)} to go.`;
  return el("p", { class: "sub" }, `Standard input: ${kept}`);
}

function streamRow(each, now) {
  const [max, value] = each.size > 0 ? [each.size, each.checkpoint ?? 0] : [1, 1];
  const share = el("span", { class: "share" }, percent(value, max));
  return [
    [quoted(each.path), each.compression ? el("span", { class: "tag" }, visible(each.compression)) : null],
    [el("progress", { max, value, "aria-label": "settled" }), share],
    [bytes(each.size)],
    [bytes(each.lag_bytes)],
    [time(each.delivered_until, now)],
  ];
}

function lost(inputs, now) {
  if (!inputs.length) return null;
  const lines = inputs.slice(-LOST_SHOWN).map((each) => {
    return el("li", {}, quoted(each.path), `: ${bytes(each.bytes)}, noticed `, time(each.noticed_at, now));
  });
  const more = inputs.length - LOST_SHOWN;
  return el(
    "div",
    { class: "lost" },
    el("h3", {}, "Gone before they were read to their end"),
    el("ul", {}, ...lines, more > 0 ? el("li", {}, `\u2026 and ${count(more)} more`) : null),
  );
}

/** A table that becomes a list of cards where there is no room; the roles outlive that change. */
function table(heads, rows) {
  const cell = (parts, index) =>
    index
      ? el("td", { role: "cell", "data-head": heads[index] }, ...parts)
      : el("th", { role: "rowheader", scope: "row" }, ...parts);
  const head = heads.map((name) => el("th", { role: "columnheader", scope: "col" }, name));
  return el(
    "table",
    { role: "table" },
    el("thead", { role: "rowgroup" }, el("tr", { role: "row" }, ...head)),
    el("tbody", { role: "rowgroup" }, ...rows.map((row) => el("tr", { role: "row" }, ...row.map(cell)))),
  );
}

function deadLetters(state, now) {
  const rules = Object.entries(fields(state.dead_letters)).filter(([, value]) => isNumber(value));
  const newest = list(state.newest_dead_letters).map(fields);
  const kept = `${several(keptLetters(state), "record")} refused and kept, ${bytes(state.dead_letter_bytes)}, by rule:`;
  const heads = ["Refused", "Rule", "Record", "Show it"];
  fill(
    "dead-letters",
    el("p", { class: "sub" }, rules.length ? kept : "None are kept."),
    rules.length ? ruleBars(rules.sort((one, other) => other[1] - one[1])) : null,
    newest.length ? el("h3", {}, "The newest") : null,
    newest.length ? table(heads, newest.map((each) => letterRow(each, now))) : null,
  );
}

function ruleBars(rules) {
  const bar = (value) => el("progress", { max: rules[0][1], value, "aria-hidden": "true" });
  const line = (name, drawn, value) => el("li", {}, name, drawn, el("b", {}, count(value)));
  const rest = rules.slice(BARS_SHOWN).map(([, value]) => value);
  return el(
    "ul",
    { class: "panel bars" },
    ...rules.slice(0, BARS_SHOWN).map(([rule, value]) => line(quoted(rule, 40), bar(value), value)),
    rest.length ? line(`and ${several(rest.length, "more rule")}`, el("span", {}), sum(rest)) : null,
  );
}

function letterRow(each, now) {
  const answer = each.status ? `answer ${visible(each.status)}` : words(each.delivery);
  return [
    [time(each.last_at, now)],
    [quoted(each.rule, 40), el("span", { class: "note" }, answer)],
    [
      quoted(`${each.path ?? ""}:${each.offset ?? ""}`),
      each.event_id ? el("span", { class: "id" }, quoted(each.event_id, 60)) : null,
      each.message ? el("span", { class: "message" }, quoted(each.message, 300)) : null,
    ],
    [el("code", {}, `shipper dead-letters show ${visible(each.id)}`)],
  ];
}

function expiries(live, report, now) {
  fill(
    "expiries",
    expiry("Access token", live.token_expires_at, SOON_SECONDS.token, now),
    expiry("Service certificate", live.certificate_expires_at, SOON_SECONDS.certificate, now),
    newestReport(report, now),
  );
}

function expiry(title, at, soon, now) {
  if (!isMoment(at)) return tile(title, "no expiry", "none, or not known yet");
  if (at <= now) return tile(title, "expired", [`${ago(at, now)}, `, time(at, now)], "bad");
  const [word, flag] = at - now < soon ? ["expires soon: ", "warn"] : ["expires ", ""];
  return tile(title, `in ${duration(at - now)}`, [word, time(at, now)], flag);
}

function newestReport(report, now) {
  if (!isMoment(report.fetched_at)) return tile("Newest report", "none", "none was fetched yet");
  const span = el("span", { class: "whole" }, quoted(report.start, 12), " to ", quoted(report.end, 12));
  const note = [time(report.fetched_at, now), `, account ${visible(report.account)}, `, span];
  return tile("Newest report fetched", ago(report.fetched_at, now), note);
}

// The parts of the page, each a rendering of what came last. `now` is the server's clock: the reader's may differ.

const BARS_SHOWN = 12;
const LOST_SHOWN = 10;

function tiles(live, state, summary, isOpenLine) {
  const oldest = live.oldest_unsettled_seconds;
  const [kept, lost] = [summary.dead_letters_kept, summary.unreachable_bytes];
  const p50 = [latency(live.latency_p50_seconds), el("small", {}, " p50")];
  const inFlight = [count(live.in_flight), el("small", {}, ` of ${count(live.concurrency_limit)}`)];
  const spoolLeft = fields(state.spool).lag_bytes ?? 0;
  const spooled = `of standard input, ${bytes(spoolLeft)} to go`;
  const refused = `${count(live.dead_lettered)} by this process; ${bytes(state.dead_letter_bytes ?? 0)} kept`;
  const unread = list(live.unreadable).length && live.lag_bytes ? "of files that cannot be read" : "no record waits";
  const nothing = isOpenLine ? "a line that has no end yet" : unread;
  const wait = isNumber(oldest) ? `oldest record waits ${duration(oldest)}` : nothing;
  fill(
    "tiles",
    tile("Accepted", count(live.accepted), rate(live.accepted_per_second)),
    tile("Pending", count(live.pending), "read, not settled yet"),
    tile("Dead letters", kept ? el("a", { href: "#letters" }, count(kept)) : "0", refused, kept ? "warn" : ""),
    tile("Duplicates", count(live.duplicates), "known already, not sent again"),
    tile("Lag", live.group ? count(groupLag(live)) : bytes(live.lag_bytes), wait),
    tile("Time to go", ...timeToGo(live, summary.seconds_to_go, isOpenLine)),
    tile("In flight", inFlight, "requests, and how many may be"),
    tile("Latency", p50, `p95 ${latency(live.latency_p95_seconds)}`),
    live.spool_bytes || spoolLeft ? tile("Spool", bytes(live.spool_bytes), spooled) : null,
    lost ? tile("Unreachable", bytes(lost), "gone before it was read", "warn") : null,
  );
}

function groupLag(live) {
  return sum(list(fields(live.group).partitions).map((each) => fields(each).lag_records ?? 0));
}

function timeToGo(live, seconds, isOpenLine) {
  if (list(live.pauses).length) return [NONE, "while it is paused"];
  if (live.group && groupLag(live)) return [NONE, "records of the partitions that it owns"];
  if (!live.lag_bytes) return ["none", "nothing is behind"];
  if (isOpenLine) return ["none", "until the line has its end"];
  if (!isNumber(seconds)) return ["unknown", "nothing is being settled"];
  return [`about ${duration(seconds)}`, `at ${bytes(live.settled_bytes_per_second)}/s`];
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
function balance(live, state, now) {
  const isEven = sum([live.accepted, live.dead_lettered, live.duplicates, live.pending]) === live.read;
  const purged = state.purged ? ` (${count(state.purged)} purged)` : "";
  const parts = `${count(state.dead_lettered)} dead-lettered${purged} + ${several(state.duplicates, "duplicate")}`;
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
      term("+", live.duplicates, live.duplicates === 1 ? "duplicate" : "duplicates"),
      term("+", live.pending, "pending"),
    ),
    isNumber(state.read) ? el("p", { class: "note" }, since) : null,
    remembered(fields(state.dedupe_window), now),
  );
  document.getElementById("balance").hidden = !isNumber(live.read);
}

function remembered({ event_ids: known, since }, now) {
  if (!isNumber(since)) return null;
  return el("p", { class: "note" }, `The dedupe window has ${several(known, "EventId")}, accepted since `, time(since, now));
}

function term(sign, value, word) {
  return el("span", { class: "whole" }, sign ? el("i", {}, `${sign} `) : null, el("b", {}, count(value)), ` ${word}`);
}

function streams(live, state, now) {
  if (live.group) return partitions(fields(live.group), now);
  const known = list(state.streams).map(fields);
  const total = isNumber(state.stream_count) ? state.stream_count : known.length;
  const more = total - known.length;
  const lag = `${count(state.streams_behind)} behind by ${bytes(state.lag_bytes)} in all; the one with most lag first`;
  const files = `${several(total, "file")}, ${state.streams_behind ? lag : "none behind"}.`;
  const heads = ["Path", "Settled", "Size", "Lag", "Delivered up to"];
  const letters = list(state.newest_dead_letters).map((each) => fields(each).id);
  fill(
    "streams",
    el("p", { class: "sub" }, total ? files : "No file has been read yet."),
    spool(fields(state.spool)),
    known.length ? table(heads, known.map((each) => streamRow(each, letters, now))) : null,
    more > 0 ? el("p", { class: "more" }, `\u2026 and ${count(more)} more`) : null,
    lost(list(state.unreachable).map(fields), now),
  );
}

/** The partitions of a member of a consumer group, in place of files. */
function partitions(group, now) {
  const known = list(group.partitions).map(fields);
  const lag = sum(known.map((each) => each.lag_records ?? 0));
  const owned = `${several(known.length, "partition")}, ${several(lag, "record")} behind`;
  const moved = group.last_rebalance ? [" Last rebalance ", time(group.last_rebalance_at, now), `: ${visible(group.last_rebalance)}.`] : [];
  const left = group.handed_over ? ` ${several(group.handed_over, "record")} handed over to other members.` : "";
  const heads = ["Partition", "Settled to", "End", "Lag", "Delivered up to"];
  const stopped = known.filter((each) => each.message);
  fill(
    "streams",
    el("p", { class: "sub" }, "Member of the group ", quoted(group.group), ` (${visible(group.protocol)}): ${owned}.`, ...moved, left),
    known.length ? table(heads, known.map((each) => partitionRow(each, now))) : null,
    ...stopped.map((each) => el("p", { class: "more" }, quoted(each.message, 600))),
  );
}

function partitionRow(each, now) {
  return [
    [quoted(`${each.topic ?? ""}/${each.partition ?? ""}`), el("span", { class: "tag" }, visible(each.state))],
    [isNumber(each.offset) ? count(each.offset) : NONE],
    [isNumber(each.end) ? count(each.end) : NONE],
    [count(each.lag_records)],
    [time(each.delivered_until, now)],
  ];
}

function spool({ segments, bytes: size, lag_bytes: left }) {
  if (!segments) return null;
  const kept = `${several(segments, "segment")} on disk, ${bytes(size)}, of which ${bytes(left)} to go.`;
  return el("p", { class: "sub" }, `Standard input: ${kept}`);
}

function streamRow(each, letters, now) {
  const [max, value] = each.size > 0 ? [each.size, each.checkpoint ?? 0] : [1, 1];
  const share = el("span", { class: "share" }, percent(value, max));
  return [
    [
      quoted(each.path),
      each.compression ? el("span", { class: "tag" }, visible(each.compression)) : null,
      newestLetter(fields(each.newest_dead_letter), letters, now),
    ],
    [el("progress", { max, value, "aria-label": "settled" }), share],
    [bytes(each.size)],
    [bytes(each.lag_bytes)],
    [time(each.delivered_until, now)],
  ];
}

/** The newest dead letter of an input, with a link to where more is said of it. */
function newestLetter({ id, rule, last_at: at }, letters, now) {
  if (!isMoment(at)) return null;
  const link = el("a", { href: letters.includes(id) ? `#letter-${id}` : "#letters" }, "newest dead letter");
  return el("span", { class: "note" }, link, " ", time(at, now), ", ", quoted(rule, 40));
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

function deadLetters(live, state, summary, now) {
  if (live.group) return fill("dead-letters", el("p", { class: "sub" }, "They are in a topic of the group."));
  const command = (id) => `shipper dead-letters show ${visible(id)} ${visible(summary.options)}`.trim();
  const rules = Object.entries(fields(state.dead_letters)).filter(([, value]) => isNumber(value));
  const newest = list(state.newest_dead_letters).map(fields);
  const kept = `${several(summary.dead_letters_kept, "record")} refused and kept, ${bytes(state.dead_letter_bytes)}, by rule:`;
  const heads = ["Refused", "Rule", "Record", "Show it"];
  fill(
    "dead-letters",
    el("p", { class: "sub" }, rules.length ? kept : "None are kept."),
    rules.length ? ruleBars(rules.sort((one, other) => other[1] - one[1])) : null,
    newest.length ? el("h3", {}, "The newest") : null,
    newest.length ? table(heads, newest.map((each) => letterRow(each, command(each.id), now))) : null,
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

function letterRow(each, command, now) {
  const answer = each.status ? `answer ${visible(each.status)}` : words(each.delivery);
  return [
    [el("span", { id: `letter-${each.id}` }, time(each.last_at, now))],
    [quoted(each.rule, 40), el("span", { class: "note" }, answer)],
    [
      quoted(`${each.path ?? ""}:${each.offset ?? ""}`),
      each.event_id ? el("span", { class: "id" }, quoted(each.event_id, 60)) : null,
      each.message ? el("span", { class: "message" }, quoted(each.message, 300)) : null,
    ],
    [el("code", {}, command)],
  ];
}

function expiries(live, report, expiring, now) {
  fill(
    "expiries",
    expiry("Access token", live.token_expires_at, expiring.includes("token"), now),
    /^http:/.test(live.destination)
      ? tile("Service certificate", "no TLS", "the service is reached over plain HTTP")
      : expiry("Service certificate", live.certificate_expires_at, expiring.includes("certificate"), now),
    newestReport(report, now),
  );
}

function expiry(title, at, isSoon, now) {
  if (!isMoment(at)) return tile(title, "no expiry", "none, or not known yet");
  if (at <= now) return tile(title, "expired", [`${ago(at, now)}, `, time(at, now)], "bad");
  const [word, flag] = isSoon ? ["expires soon: ", "warn"] : ["expires ", ""];
  return tile(title, `in ${duration(at - now)}`, [word, time(at, now)], flag);
}

function newestReport(report, now) {
  if (!isMoment(report.fetched_at)) return tile("Newest report", "none", "none was fetched yet");
  const span = el("span", { class: "whole" }, quoted(days(report.start, report.end), 40));
  const note = [time(report.fetched_at, now), `, account ${visible(report.account)}, `, span];
  return tile("Newest report fetched", ago(report.fetched_at, now), note);
}

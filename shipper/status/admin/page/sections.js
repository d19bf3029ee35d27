// The sections of the page. `now` is the time of the server, as the reader's clock may differ.

const BARS_SHOWN = 12;
const LOST_SHOWN = 10;

function tiles(live, state, summary, isOpenLine) {
  const oldest = live.oldest_unsettled_seconds;
  const [kept, lost] = [summary.dead_letters_kept, summary.unreachable_bytes];
  const p50 = [latency(live.latency_p50_seconds), el("small", {}, " p50")];
  const inFlight = [count(live.in_flight), el("small", {}, ` of ${count(live.concurrency_limit)}`)];
  const spoolLeft = fields(state.spool).lag_bytes ?? 0;
  const spooled = `of standard input, ${bytes(spoolLeft)} to go`;
  const refusals = live.group ? live.dead_lettered : kept;
  const refused = live.group ? "by this process" : `${count(live.dead_lettered)} by this process; ${bytes(state.dead_letter_bytes ?? 0)} kept`;
  const scope = live.group ? "the group's dead letters are in a topic" : "dead letters: all that are stored";
  fill("counted", `Counts are for this process since its start; ${scope}.`);
  const lag = live.group ? groupLag(live) : live.lag_bytes;
  const unsettled = list(live.unreadable).length ? "of files that cannot be read" : "not settled yet";
  const nothing = isOpenLine ? "an incomplete line" : lag ? unsettled : "no records waiting";
  const wait = isNumber(oldest) ? `oldest record waiting for ${duration(oldest)}` : nothing;
  fill(
    "tiles",
    tile("Accepted", count(live.accepted), rate(live.accepted_per_second)),
    tile("Pending", count(live.pending), "read but not settled"),
    tile("Dead letters", refusals ? el("a", { href: "#letters" }, count(refusals)) : "0", refused, refusals ? "warn" : ""),
    tile("Duplicates", count(live.duplicates), "accepted before, not sent again"),
    tile("Lag", live.group ? count(lag) : bytes(lag), wait),
    tile("Time to go", ...timeToGo(live, lag, summary.seconds_to_go, isOpenLine)),
    tile("In flight", inFlight, "requests, of the current limit"),
    tile("Latency", p50, `p95 ${latency(live.latency_p95_seconds)}`),
    live.spool_bytes || spoolLeft ? tile("Spool", bytes(live.spool_bytes), spooled) : null,
    lost ? tile("Unreachable", bytes(lost), "gone before it was read", "warn") : null,
  );
}

function groupLag(live) {
  return sum(list(fields(live.group).partitions).map((partition) => fields(partition).lag_records ?? 0));
}

function timeToGo(live, lag, seconds, isOpenLine) {
  if (list(live.pauses).length) return [NONE, "while paused"];
  if (!lag) return ["none", "no lag"];
  if (isOpenLine) return ["none", "until the line is complete"];
  if (!isNumber(seconds)) return ["unknown", "nothing is settled at the moment"];
  return [`about ${duration(seconds)}`, `at ${live.group ? rate(live.accepted_per_second) : `${bytes(live.settled_bytes_per_second)}/s`}`];
}

/** Build a key figure; `flag` is a state to draw attention to, empty for none. */
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

/** Show that all records read are accounted for. */
function balance(live, state, now) {
  const isEven = sum([live.accepted, live.dead_lettered, live.duplicates, live.pending]) === live.read;
  const purged = state.purged ? ` (${count(state.purged)} purged)` : "";
  const parts = `${count(state.dead_lettered)} dead-lettered${purged} + ${several(state.duplicates, "duplicate")}`;
  const since = `Since the state was created: ${count(state.read)} read = ${count(state.accepted)} accepted + ${parts}.`;
  fill(
    "balance",
    el("h3", {}, isEven ? "Every record read is accounted for" : "The counts do not add up: please report this bug"),
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
    dedupeWindow(fields(state.dedupe_window), now),
  );
  document.getElementById("balance").hidden = !isNumber(live.read);
}

function dedupeWindow({ event_ids: size, since }, now) {
  if (!isNumber(since)) return null;
  return el("p", { class: "note" }, `The dedupe window has ${several(size, "EventId")}, accepted since `, time(since, now));
}

function term(sign, value, word) {
  return el("span", { class: "whole" }, sign ? el("i", {}, `${sign} `) : null, el("b", {}, count(value)), ` ${word}`);
}

function streams(live, state, now) {
  if (live.group) return partitions(fields(live.group), now);
  const listed = list(state.streams).map(fields);
  const total = isNumber(state.stream_count) ? state.stream_count : listed.length;
  const more = total - listed.length;
  const lag = `${count(state.streams_behind)} behind by ${bytes(state.lag_bytes)} in total; largest lag first`;
  const files = `${several(total, "file")}, ${state.streams_behind ? lag : "none behind"}.`;
  const heads = ["Path", "Settled", "Size", "Lag", "Delivered up to"];
  const letters = list(state.newest_dead_letters).map((letter) => fields(letter).id);
  fill(
    "streams",
    el("p", { class: "sub" }, total ? files : "No file has been read yet."),
    spool(fields(state.spool)),
    listed.length ? table(heads, listed.map((stream) => streamRow(stream, letters, now))) : null,
    more > 0 ? el("p", { class: "more" }, `\u2026 and ${count(more)} more`) : null,
    unreachableInputs(list(state.unreachable).map(fields), now),
  );
}

/** Show the partitions of a consumer group member instead of files. */
function partitions(group, now) {
  const owned = list(group.partitions).map(fields);
  const lag = sum(owned.map((partition) => partition.lag_records ?? 0));
  const counts = `${several(owned.length, "partition")}, ${several(lag, "record")} behind`;
  const moved = group.last_rebalance ? [" Last rebalance ", time(group.last_rebalance_at, now), `: ${visible(group.last_rebalance)}.`] : [];
  const left = group.handed_over ? ` ${several(group.handed_over, "record")} left to other members.` : "";
  const heads = ["Partition", "Settled to", "End", "Lag", "Delivered up to"];
  const stopped = owned.filter((partition) => partition.message);
  fill(
    "streams",
    el("p", { class: "sub" }, "Member of the group ", quoted(group.group), ` (${visible(group.protocol)}): ${counts}.`, ...moved, left),
    owned.length ? table(heads, owned.map((partition) => partitionRow(partition, now))) : null,
    ...stopped.map((partition) => el("p", { class: "more" }, quoted(partition.message, 600))),
  );
}

function partitionRow(partition, now) {
  const name = `${partition.topic ?? ""}/${partition.partition ?? ""}`;
  return [
    [quoted(name), el("span", { class: "tag" }, visible(partition.state))],
    [isNumber(partition.offset) ? count(partition.offset) : NONE],
    [isNumber(partition.end) ? count(partition.end) : NONE],
    [count(partition.lag_records)],
    [time(partition.delivered_until, now)],
  ];
}

function spool({ segments, bytes: size, lag_bytes: left }) {
  if (!segments) return null;
  const content = `${several(segments, "segment")} on disk, ${bytes(size)}, ${bytes(left)} to go.`;
  return el("p", { class: "sub" }, `Standard input: ${content}`);
}

function streamRow(stream, letters, now) {
  const [max, value] = stream.size > 0 ? [stream.size, stream.checkpoint ?? 0] : [1, 1];
  const share = el("span", { class: "share" }, percent(value, max));
  return [
    [
      quoted(stream.path),
      stream.compression ? el("span", { class: "tag" }, visible(stream.compression)) : null,
      newestLetter(fields(stream.newest_dead_letter), letters, now),
    ],
    [el("progress", { max, value, "aria-label": "settled" }), share],
    [bytes(stream.size)],
    [bytes(stream.lag_bytes)],
    [time(stream.delivered_until, now)],
  ];
}

/** Build a link to the newest dead letter of an input. */
function newestLetter({ id, rule, last_at: at }, letters, now) {
  if (!isTime(at)) return null;
  const link = el("a", { href: letters.includes(id) ? `#letter-${id}` : "#letters" }, "newest dead letter");
  return el("span", { class: "note" }, link, " ", time(at, now), ", ", quoted(rule, 40));
}

function unreachableInputs(inputs, now) {
  if (!inputs.length) return null;
  const lines = inputs.slice(-LOST_SHOWN).map((input) => {
    return el("li", {}, quoted(input.path), `: ${bytes(input.bytes)}, noticed `, time(input.noticed_at, now));
  });
  const more = inputs.length - LOST_SHOWN;
  return el(
    "div",
    { class: "lost" },
    el("h3", {}, "Gone before they were completely read"),
    el("ul", {}, ...lines, more > 0 ? el("li", {}, `\u2026 and ${count(more)} more`) : null),
  );
}

/** Build a table that becomes a list of cards on narrow screens; the roles keep it accessible then. */
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
  if (live.group) return fill("dead-letters", el("p", { class: "sub" }, "They are stored in a topic of the group; list them with: ", el("code", {}, "shipper dead-letters list")));
  const command = (id) => `shipper dead-letters show ${visible(id)} ${visible(summary.options)}`.trim();
  const rules = Object.entries(fields(state.dead_letters)).filter(([, value]) => isNumber(value));
  const newest = list(state.newest_dead_letters).map(fields);
  const kept = `${several(summary.dead_letters_kept, "record")} refused and stored, ${bytes(state.dead_letter_bytes)}, by rule:`;
  const heads = ["Refused", "Rule", "Record", "Command"];
  fill(
    "dead-letters",
    el("p", { class: "sub" }, rules.length ? kept : "None."),
    rules.length ? ruleBars(rules.sort((one, other) => other[1] - one[1])) : null,
    newest.length ? el("h3", {}, "Newest") : null,
    newest.length ? table(heads, newest.map((letter) => letterRow(letter, command(letter.id), now))) : null,
  );
}

function ruleBars(rules) {
  const bar = (value) => el("progress", { max: rules[0][1], value, "aria-hidden": "true" });
  const line = (name, graphic, value) => el("li", {}, name, graphic, el("b", {}, count(value)));
  const rest = rules.slice(BARS_SHOWN).map(([, value]) => value);
  return el(
    "ul",
    { class: "panel bars" },
    ...rules.slice(0, BARS_SHOWN).map(([rule, value]) => line(quoted(rule, 40), bar(value), value)),
    rest.length ? line(`and ${several(rest.length, "more rule")}`, el("span", {}), sum(rest)) : null,
  );
}

function letterRow(letter, command, now) {
  const answer = letter.status ? `answer ${visible(letter.status)}` : spaced(letter.delivery);
  return [
    [el("span", { id: `letter-${letter.id}` }, time(letter.last_at, now))],
    [quoted(letter.rule, 40), el("span", { class: "note" }, answer)],
    [
      quoted(`${letter.path ?? ""}:${letter.offset ?? ""}`),
      letter.event_id ? el("span", { class: "id" }, quoted(letter.event_id, 60)) : null,
      letter.message ? el("span", { class: "message" }, quoted(letter.message, 300)) : null,
    ],
    [el("code", {}, command)],
  ];
}

function expiries(live, report, expiring, now) {
  fill(
    "expiries",
    expiry("Access token", live.token_expires_at, expiring.includes("token"), now),
    /^http:/.test(live.destination)
      ? tile("Service certificate", "no TLS", "the service uses plain HTTP")
      : expiry("Service certificate", live.certificate_expires_at, expiring.includes("certificate"), now),
    newestReport(report, now),
  );
}

function expiry(title, at, isSoon, now) {
  if (!isTime(at)) return tile(title, "no expiry", "none or not known yet");
  if (at <= now) return tile(title, "expired", [`${ago(at, now)}, `, time(at, now)], "bad");
  const [word, flag] = isSoon ? ["expires soon: ", "warn"] : ["expires ", ""];
  return tile(title, `in ${duration(at - now)}`, [word, time(at, now)], flag);
}

function newestReport(report, now) {
  if (!isTime(report.fetched_at)) return tile("Newest report", "none", "none fetched yet");
  const span = el("span", { class: "whole" }, quoted(report.days, 40));
  const note = [time(report.fetched_at, now), `, account ${visible(report.account)}, `, span];
  return tile("Newest report fetched", ago(report.fetched_at, now), note);
}

// The head of the page: the headline, the identity of the shipper, and its pauses.
// A headline is a sentence and a state, which has a colour and a mark. The server sends it, except for a process that
// does not answer.

const MARKS = { good: "\u2713", busy: "\u2192", warn: "!", bad: "\u2715", paused: "\u2016", off: "\u25a0", away: "?" };

const spaced = (name) => visible(name).replaceAll("_", " ");

/** Validate a headline from the server. */
function headline({ state, title, detail, sub, until }) {
  if (!Object.hasOwn(MARKS, String(state))) return { state: "warn", title: "No report yet" };
  [title, detail, sub] = [title, detail, sub].map(visible);
  return { state, title, detail, sub, until: isTime(until) ? clock(until) : "" };
}

/** Return the headline of a process that does not answer, which is expected after its end. */
function noAnswer(last, live, since) {
  if (!last) return { state: "away", title: "No answer yet", sub: "This page retries every two seconds." };
  if (live.phase === "stopped") return { ...last, sub: `${last.sub} The process has ended; these are its last figures.` };
  const sub = `Last report: ${last.title}${last.detail ?? ""}.`;
  return { state: "away", title: "No answer", detail: ` since ${clock(since, Date.now() / 1000)}`, sub };
}

function errorAnswer(message) {
  return { state: "warn", title: "The process answers, but has no figures", sub: `Its answer: ${message}` };
}

/** Show which shipper this is, as a machine may run several. */
function showShipper(live) {
  fill("kind", live.command ? `shipper ${visible(live.command)}` : "shipper");
  const destination = live.destination ? [" to ", quoted(live.destination)] : [];
  const state = live.state_directory ? [", state in ", quoted(live.state_directory)] : [];
  fill("where", ...destination, ...state);
}

/** Show the result of the last reload of the settings. */
function showNotices(summary) {
  const notices = list(summary.notices);
  fill("notice", ...notices.flatMap((notice) => [quoted(notice, 700), " "]));
  document.getElementById("notice").hidden = !notices.length;
}

function facts(live, now) {
  const since = (at, format) => (isTime(at) ? [time(at, now), ` (${format(at)})`] : null);
  const items = [
    ["Version", live.version ? [visible(live.version)] : null],
    ["Process", isNumber(live.process_id) ? [String(live.process_id)] : null],
    ["Up since", since(live.started_at, (at) => duration(now - at))],
    ["Last acceptance", since(live.last_accepted_at, (at) => ago(at, now)) ?? ["none yet"]],
    ["Last pause", lastPause(fields(live.last_pause), now)],
  ];
  fill("facts", ...items.map(([name, value]) => value && fact(name, ...value)));
}

function lastPause({ reason, since, until }, now) {
  return isTime(until) ? [spaced(reason), ` for ${duration(until - since)}, until `, time(until, now)] : null;
}

const fact = (name, ...value) => el("div", {}, el("dt", {}, name), el("dd", {}, ...value));

/** Build the panels of pauses; the headline names a single one. */
function pausePanels(live, now) {
  const pauses = list(live.pauses).map(fields);
  return pauses.map((pause) => pausePanel(pause, now, pauses.length > 1 || live.phase === "stopped"));
}

function pausePanel(pause, now, isNamed) {
  const left = pause.next_probe_at - now;
  const probe = fact("Next probe", left < 0.5 ? "any moment now" : `in ${duration(left)}`);
  const since = fact("Since", time(pause.since, now), isTime(pause.since) ? ` (${duration(now - pause.since)})` : "");
  return el(
    "article",
    { class: "pause" },
    isNamed ? el("h2", {}, spaced(pause.reason)) : null,
    el("p", {}, quoted(pause.message, 600)),
    el("p", {}, el("b", {}, "What to do: "), quoted(pause.advice, 600)),
    el("dl", {}, since, isTime(pause.next_probe_at) ? probe : null),
  );
}

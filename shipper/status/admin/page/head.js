// The head of the page: which shipper it is, and what a person has to know or to do before all else.

/** Tell shippers apart, of which there may be several on a machine. */
function whichShipper(live) {
  fill("kind", live.command ? `shipper ${visible(live.command)}` : "shipper");
  const to = live.destination ? [" to ", quoted(live.destination)] : [];
  const state = live.state_directory ? [", state in ", quoted(live.state_directory)] : [];
  fill("where", ...to, ...state);
}

/** What became of the last attempt to read the settings again. */
function notice(summary) {
  const notices = list(summary.notices);
  fill("notice", ...notices.flatMap((each) => [quoted(each, 700), " "]));
  document.getElementById("notice").hidden = !notices.length;
}

function facts(live, now) {
  const since = (at, words) => (isMoment(at) ? [time(at, now), ` (${words(at)})`] : null);
  const items = [
    ["Version", live.version ? [visible(live.version)] : null],
    ["Process", isNumber(live.process_id) ? [String(live.process_id)] : null],
    ["Up since", since(live.started_at, (at) => duration(now - at))],
    ["Last acceptance", since(live.last_accepted_at, (at) => ago(at, now)) ?? ["none yet"]],
    ["Last pause", pauseBefore(fields(live.last_pause), now)],
  ];
  fill("facts", ...items.map(([name, value]) => value && fact(name, ...value)));
}

function pauseBefore({ reason, since, until }, now) {
  return isMoment(until) ? [words(reason), ` for ${duration(until - since)}, until `, time(until, now)] : null;
}

const fact = (name, ...value) => el("div", {}, el("dt", {}, name), el("dd", {}, ...value));

/** A pause alone is named by the headline. */
function pausePanels(live, now) {
  const all = list(live.pauses).map(fields);
  return all.map((each) => pausePanel(each, now, all.length > 1 || live.phase === "stopped"));
}

function pausePanel(pause, now, isNamed) {
  const left = pause.next_probe_at - now;
  const probe = fact("Next probe", left < 0.5 ? "any moment now" : `in ${duration(left)}`);
  const since = fact("Since", time(pause.since, now), isMoment(pause.since) ? ` (${duration(now - pause.since)})` : "");
  return el(
    "article",
    { class: "pause" },
    isNamed ? el("h2", {}, words(pause.reason)) : null,
    el("p", {}, quoted(pause.message, 600)),
    el("p", {}, el("b", {}, "What to do: "), quoted(pause.advice, 600)),
    el("dl", {}, since, isMoment(pause.next_probe_at) ? probe : null),
  );
}

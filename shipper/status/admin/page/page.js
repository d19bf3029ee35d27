// Asks, and draws what was answered. Addresses are relative, so that the page works behind a path of a proxy.

const POLL_MS = 2000;
const ANSWER_LIMIT_MS = 10000;

const heard = { status: null, words: null, answeredAt: 0, at: null, newsAt: 0 };
let timer;
let isAsking = false;

/** The process answered, but with an error. */
class Refusal extends Error {}

async function ask(address) {
  const answer = await fetch(address, { cache: "no-store", signal: AbortSignal.timeout(ANSWER_LIMIT_MS) });
  if (!answer.ok) throw new Refusal(visible((await answer.text()).slice(0, 600)));
  return answer.json();
}

async function poll() {
  clearTimeout(timer);
  if (isAsking) return;
  isAsking = true;
  try {
    const since = moments.length ? moments[moments.length - 1][0] : 0;
    const [status, history] = await Promise.allSettled([ask("status"), ask(`history?since=${since}`)]);
    if (status.status === "fulfilled") hear(status.value, history.value);
    show(status.status === "fulfilled", status.reason);
  } finally {
    isAsking = false;
    if (!document.hidden) timer = setTimeout(poll, POLL_MS);
  }
}

function hear(status, history) {
  heard.status = fields(status);
  heard.answeredAt = Date.now() / 1000;
  remember(history, fields(heard.status.live).at);
  const at = endOfAxis(moments, fields(heard.status.live).at);
  if (at !== heard.at) heard.newsAt = heard.answeredAt;
  heard.at = at;
}

function show(isAnswered, problem) {
  const came = fields(heard.status);
  const [live, state, report, said, summary] = ["live", "state", "report", "headline", "summary"].map((name) =>
    fields(came[name]),
  );
  const now = isMoment(live.at) ? live.at : heard.answeredAt;
  if (isAnswered) heard.words = { ...headline(said), causes: pausePanels(live, now) };
  const standsStill = live.phase !== "stopped" && heard.answeredAt - heard.newsAt > LOOP_LIMIT_SECONDS;
  document.getElementById("main").hidden = heard.status === null;
  document.documentElement.classList.toggle("stale", !isAnswered || standsStill);
  if (problem instanceof Refusal) tell(refused(problem.message), live);
  else if (!isAnswered) tell(gone(heard.words, live, heard.answeredAt), live);
  else tell(standsStill ? standingStill(heard.newsAt) : heard.words, live);
  if (isAnswered) sections(live, state, report, summary, said.is_open_line === true, now);
  document.documentElement.dataset.shown = String(Number(document.documentElement.dataset.shown ?? 0) + 1);
}

/** Show a headline; the time in it is hidden from those who hear the page, as they would hear it every two seconds. */
function tell({ state, title, until = "", detail = "", sub = "", causes = [] }, live) {
  document.documentElement.dataset.state = state;
  whichShipper(live);
  const cut = until ? title.lastIndexOf(" is ") : title.length;
  const moment = until ? el("span", { "aria-hidden": "true" }, ` until ${until}`) : null;
  fill("headline", title.slice(0, cut), moment, title.slice(cut));
  fill("detail", detail);
  fill("pauses", ...causes);
  fill("sub", sub);
  const sign = getComputedStyle(document.body).backgroundColor;
  fill("icon", ...shape(state, sign));
  const name = visible(live.state_directory).split("/").filter(Boolean).pop() ?? "";
  const tabTitle = `${MARKS[state]} ${title} \u2013 ${[...new Set(["shipper", name])].join(" ").trim()}`;
  if (document.title !== tabTitle) document.title = tabTitle;
  const colour = getComputedStyle(document.getElementById("icon")).color;
  const icon = svg("svg", { viewBox: "0 0 24 24", fill: colour }, ...shape(state, sign));
  const address = `data:image/svg+xml,${encodeURIComponent(new XMLSerializer().serializeToString(icon))}`;
  const favicon = document.getElementById("favicon");
  if (favicon.href !== address) favicon.href = address;
}

function shape(state, colour) {
  const [outline, sign] = SHAPES[state];
  const line = { d: sign, fill: "none", stroke: colour, "stroke-width": 2.2 };
  const round = { "stroke-linecap": "round", "stroke-linejoin": "round" };
  return [svg("path", { d: outline }), svg("path", { ...line, ...round })];
}

function sections(live, state, report, summary, isOpenLine, now) {
  notice(summary);
  facts(live, now);
  tiles(live, state, summary, isOpenLine);
  balance(live, state, now);
  streams(live, state, now);
  deadLetters(live, state, summary, now);
  expiries(live, report, list(summary.expiring), now);
  drawCharts(now);
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  const utc = zone === "UTC" ? "" : "; point at one to see it in UTC";
  const note = `, asked for every two seconds. Times are in ${zone}${utc}.`;
  fill("updated", "Figures of ", time(now, now), note);
}

makeCharts();
document.getElementById("page").hidden = false;
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : poll()));
window.addEventListener("resize", () => heard.status && drawCharts(fields(heard.status.live).at));
poll();

// Polls the status and shows it. URLs are relative, so that the page works below a path of a proxy.

const POLL_MS = 2000;
const ANSWER_LIMIT_MS = 10000;

const latest = { status: null, headline: null, answeredAt: 0 };
let timer;
let isPolling = false;

/** The process answered with an error. */
class AnswerError extends Error {}

async function request(address) {
  const answer = await fetch(address, { cache: "no-store", signal: AbortSignal.timeout(ANSWER_LIMIT_MS) });
  if (!answer.ok) throw new AnswerError(visible((await answer.text()).slice(0, 600)));
  return answer.json();
}

async function poll() {
  clearTimeout(timer);
  if (isPolling) return;
  isPolling = true;
  try {
    const since = samples.length ? samples[samples.length - 1][0] : 0;
    const [status, history] = await Promise.allSettled([request("status"), request(`history?since=${since}`)]);
    if (status.status === "fulfilled") receive(status.value, history.value);
    show(status.status === "fulfilled", status.reason);
  } finally {
    isPolling = false;
    if (!document.hidden) timer = setTimeout(poll, POLL_MS);
  }
}

function receive(status, history) {
  latest.status = fields(status);
  latest.answeredAt = Date.now() / 1000;
  addSamples(history, fields(latest.status.live).at);
}

function show(isAnswered, problem) {
  const [live, state, report, served, summary] = ["live", "state", "report", "headline", "summary"].map((name) =>
    fields(fields(latest.status)[name]),
  );
  const now = isTime(live.at) ? live.at : latest.answeredAt;
  if (isAnswered) latest.headline = { ...headline(served), causes: pausePanels(live, now) };
  document.getElementById("main").hidden = latest.status === null;
  document.documentElement.classList.toggle("stale", !isAnswered);
  if (problem instanceof AnswerError) showHeadline(errorAnswer(problem.message), live);
  else if (!isAnswered) showHeadline(noAnswer(latest.headline, live, latest.answeredAt), live);
  else showHeadline(latest.headline, live);
  if (isAnswered) sections(live, state, report, summary, served.is_open_line === true, now);
  document.documentElement.dataset.shown = String(Number(document.documentElement.dataset.shown ?? 0) + 1);
}

/** Show a headline; its time is hidden from screen readers, which would read it every two seconds. */
function showHeadline({ state, title, until = "", detail = "", sub = "", causes = [] }, live) {
  document.documentElement.dataset.state = state;
  showShipper(live);
  const cut = until ? title.lastIndexOf(" is ") : title.length;
  const untilPart = until ? el("span", { "aria-hidden": "true" }, ` until ${until}`) : null;
  fill("headline", title.slice(0, cut), untilPart, title.slice(cut));
  fill("detail", detail);
  fill("pauses", ...causes);
  fill("sub", sub);
  fill("icon", MARKS[state]);
  const name = visible(live.state_directory).split("/").filter(Boolean).pop() ?? "";
  const tabTitle = `${MARKS[state]} ${title} \u2013 ${[...new Set(["shipper", name])].join(" ").trim()}`;
  if (document.title !== tabTitle) document.title = tabTitle;
}

function sections(live, state, report, summary, isOpenLine, now) {
  showNotices(summary);
  facts(live, now);
  tiles(live, state, summary, isOpenLine);
  balance(live, state, now);
  streams(live, state, now);
  deadLetters(live, state, summary, now);
  expiries(live, report, list(summary.expiring), now);
  Object.assign(CHARTS[CHARTS.length - 1], live.group ? { unit: short, least: 9 } : { unit: bytes, least: 900 });
  drawCharts(now);
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone;
  const utc = zone === "UTC" ? "" : "; hover over a time to see it in UTC";
  const note = `, updated every two seconds. Times are in ${zone}${utc}.`;
  fill("updated", "Figures of ", time(now, now), note);
}

makeCharts();
document.getElementById("page").hidden = false;
document.addEventListener("visibilitychange", () => (document.hidden ? clearTimeout(timer) : poll()));
window.addEventListener("resize", () => latest.status && drawCharts(fields(latest.status.live).at));
poll();

// The answer to "is everything all right?": a state, which has a colour and a shape, and a sentence. It comes with the
// figures; what is said here is about a process that does not answer.

const SHAPES = {
  good: ["M12 1a11 11 0 1 0 0 22a11 11 0 1 0 0-22z", "M7 12.5l3.5 3.5L17 8.5"],
  busy: ["M12 1a11 11 0 1 0 0 22a11 11 0 1 0 0-22z", "M6.5 12h10.5M12.5 7.5L17 12l-4.5 4.5"],
  warn: ["M12 1.5L23.5 22H.5z", "M12 9v6M12 18.5v.01"],
  bad: ["M7.5 1h9L23 7.5v9L16.5 23h-9L1 16.5v-9z", "M12 6.5v7M12 17.5v.01"],
  paused: ["M7.5 1h9L23 7.5v9L16.5 23h-9L1 16.5v-9z", "M9.5 7.5v9M14.5 7.5v9"],
  off: ["M4 1h16l3 3v16l-3 3H4l-3-3V4z", "M8.5 8.5h7v7h-7z"],
  away: ["M12 1a11 11 0 1 0 0 22a11 11 0 1 0 0-22z", "M8.8 9.5a3.2 3.2 0 1 1 4.6 2.9c-1 .5-1.4 1-1.4 2M12 18v.01"],
};
const MARKS = { good: "\u2713", busy: "\u2192", warn: "!", bad: "!", paused: "\u2016", off: "\u25a0", away: "?" };
const LOOP_LIMIT_SECONDS = 30;

const words = (name) => visible(name).replaceAll("_", " ");

/** Take a headline as it came; one that is not there is said so. */
function headline(came) {
  if (!Object.hasOwn(SHAPES, String(came.state))) return { state: "warn", title: "It answers, but has not reported yet" };
  const [title, detail, sub] = [came.title, came.detail, came.sub].map(visible);
  return { state: came.state, title, detail, sub, until: isMoment(came.until) ? clock(came.until) : "" };
}

/** What is told once the process gives no answer; after its end that is how it should be. */
function gone(last, live, since) {
  if (!last) return { state: "away", title: "No answer yet", sub: "It is asked again every two seconds." };
  if (live.phase === "stopped") return { ...last, sub: `${last.sub} The process is gone; these are its last figures.` };
  const sub = `What it said last: ${last.title}${last.detail ?? ""}.`;
  return { state: "away", title: "No answer", detail: ` since ${clock(since, Date.now() / 1000)}`, sub };
}

function refused(message) {
  return { state: "warn", title: "It answers, but has no figures", sub: `It says: ${message}` };
}

function standingStill(since) {
  const sub = "The process answers, but its figures stand still: its event loop is held up, or the machine is.";
  return { state: "warn", title: "No sign of life", detail: ` since ${clock(since, Date.now() / 1000)}`, sub };
}

// The answer to "is everything all right?": a state, which has a colour and a shape, and a sentence.

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
const SETTLED_IN_SECONDS = 10;

const OUTCOMES = {
  finished: "The input was read to its end.",
  drained: "What had been read is settled; the next start goes on from there.",
  aborted: "It was cut off; the next start reads again what is not settled.",
  gave_up: "The service took nothing for too long; the next start goes on from there.",
};

const words = (name) => visible(name).replaceAll("_", " ");
const keptLetters = (state) => sum(Object.values(fields(state.dead_letters)));
const lostBytes = (live, state) => Math.max(state.unreachable_bytes ?? 0, live.unreachable_bytes ?? 0);
const secondsToGo = (left, live) => (live.settled_bytes_per_second > 0 ? left / live.settled_bytes_per_second : null);

/** Bytes that wait, of all inputs. */
const bytesLeft = (live) => live.lag_bytes ?? 0;

/** Nothing waits but the beginning of a line. A process that has just started may not have looked at its inputs yet. */
function isOpenLine(live, state) {
  const isAtWork = live.pending > 0 || live.settled_bytes_per_second > 0 || isNumber(live.oldest_unsettled_seconds);
  const isSettledIn = live.phase === "running" && live.at - live.started_at >= SETTLED_IN_SECONDS;
  const isHeldUp = list(live.pauses).length > 0 || lostBytes(live, state) > 0;
  return bytesLeft(live) > 0 && isSettledIn && !isAtWork && !isHeldUp;
}

/** What everything is delivered but for. */
function exceptions(live, state) {
  const [lost, kept] = [lostBytes(live, state), keptLetters(state)];
  const gone = lost ? [`${bytes(lost)} that were gone before they were read`] : [];
  const all = [...gone, ...(kept ? [several(kept, "dead letter")] : [])];
  return all.length ? `, but for ${all.join(" and ")}` : "";
}

/** Put a state into words: `title` names it and changes seldom, `detail` goes on with figures, `sub` explains. */
function headline(live, state) {
  const pending = isNumber(live.pending) ? live.pending : 0;
  const paused = list(live.pauses).map((pause) => words(fields(pause).reason));
  if (live.phase === "stopped") return stopped(live, pending);
  const draining = live.phase === "draining" ? "Draining" : "";
  if (paused.length) {
    const sub = `${waiting(live, state, pending)} Delivery goes on by itself once the cause is gone.`;
    const why = paused.length > 1 ? ` for ${paused.length} reasons` : `: ${paused[0]}`;
    return { state: "paused", title: `${draining ? "Draining, but paused" : "Paused"}${why}`, sub };
  }
  if (draining) {
    const sub = "It was asked to stop, reads no more, and settles what it has read.";
    return { state: "busy", title: draining, detail: `, ${several(pending, "record")} to settle`, sub };
  }
  if (live.phase === "starting") return { state: "busy", title: "Starting" };
  if (live.phase !== "running") return { state: "warn", title: "It answers, but says nothing of itself yet" };
  return running(live, state, pending);
}

function running(live, state, pending) {
  const left = bytesLeft(live);
  const togo = secondsToGo(left, live);
  const oldest = live.oldest_unsettled_seconds ?? 0;
  const but = exceptions(live, state);
  const well = but ? "warn" : "good";
  if (left === 0 && pending === 0) {
    return { state: well, title: "Everything that was written is delivered", until: clock(live.at), detail: but };
  }
  if (isOpenLine(live, state)) {
    const detail = `${but}; ${bytes(left)} are a line that has no end yet`;
    return { state: well, title: "Everything up to the last whole line is delivered", detail };
  }
  const sub = waiting(live, state, pending);
  if (togo === null && oldest >= 60) {
    return { state: "warn", title: "No progress", detail: ` for ${duration(oldest)}`, sub };
  }
  if (oldest < 10 && togo !== null && togo < 10) {
    return { state: well, title: "Up to date", detail: `, delivering ${rate(live.accepted_per_second)}${but}`, sub };
  }
  const share = `${percent(live.settled_bytes, live.total_bytes)} of ${bytes(live.total_bytes)}`;
  const behind = isNumber(live.total_bytes) ? share : `${bytes(left)} behind`;
  const wait = togo === null ? "" : `, about ${duration(togo)} to go`;
  return { state: "busy", title: "Delivering", detail: `, ${behind}${wait}`, sub };
}

function stopped(live, pending) {
  const isBad = pending > 0 || ["aborted", "gave_up"].includes(live.outcome);
  const left = pending ? ` Not settled: ${several(pending, "record")}.` : "";
  const end = live.dead_lettered ? "warn" : "good";
  const state = isBad ? "bad" : live.outcome === "finished" ? end : "off";
  const detail = live.dead_lettered ? `, with ${several(live.dead_lettered, "dead letter")}` : "";
  const title = `Stopped: ${words(live.outcome) || "no outcome"}`;
  return { state, title, detail, sub: (OUTCOMES[live.outcome] ?? "") + left };
}

function waiting(live, state, pending) {
  const oldest = live.oldest_unsettled_seconds;
  const since = pending && isNumber(oldest) ? `, the oldest for ${duration(oldest)}` : "";
  return `${several(pending, "record")} and ${bytes(bytesLeft(live))} wait${since}.`;
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

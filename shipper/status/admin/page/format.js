"use strict";

// Input is not trusted: values may be missing or have the wrong type. A missing value becomes a dash, never zero.
const NONE = "\u2013";
const isNumber = Number.isFinite;
const list = (value) => (Array.isArray(value) ? value : []);
const fields = (value) => (value !== null && typeof value === "object" ? value : {});
const sum = (values) => values.filter(isNumber).reduce((total, value) => total + value, 0);

const WHOLE = new Intl.NumberFormat("en-GB", { maximumFractionDigits: 0 });
const count = (value) => (isNumber(value) ? WHOLE.format(value) : NONE);
const several = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
const rate = (value) => (isNumber(value) && value > 0 && value < 10 ? value.toFixed(1) : count(value)) + "/s";
const bytes = (value) => scaled(value, ["\u00a0B", "\u00a0kB", "\u00a0MB", "\u00a0GB", "\u00a0TB", "\u00a0PB"]);
const short = (value) => scaled(value, ["", "k", "M", "G"]);
const isShort = (seconds) => isNumber(seconds) && seconds < 0.9995;
const latency = (value) => (isShort(value) ? scaled(value * 1000, ["\u00a0ms"]) : scaled(value, ["\u00a0s"]));

/** Format a number with three digits, in the unit that keeps it below a thousand. */
function scaled(value, units) {
  if (!isNumber(value)) return NONE;
  let power = 0;
  for (; Math.abs(value) >= 999.5 && power < units.length - 1; power += 1) value /= 1000;
  return count(value).length > 3 ? count(value) + units[power] : Number(value.toPrecision(3)) + units[power];
}

/** Format a share, rounded down, so that only a complete one is 100 %. */
function percent(part, whole) {
  if (!isNumber(part) || !isNumber(whole)) return NONE;
  return `${whole > 0 ? Math.min(100, Math.floor((part / whole) * 100)) : 100}\u00a0%`;
}

/** Format a duration with at most two units: 12 s, 4 min, 2 h 5 min, 3 d 4 h. */
function duration(seconds) {
  if (!isNumber(seconds)) return NONE;
  if (seconds < 59.5) return `${Math.max(0, Math.round(seconds))}\u00a0s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes}\u00a0min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours}\u00a0h${minutes % 60 ? ` ${minutes % 60}\u00a0min` : ""}`;
  return `${count(Math.floor(hours / 24))}\u00a0d${hours % 24 ? ` ${hours % 24}\u00a0h` : ""}`;
}

const isTime = (at) => isNumber(at) && Math.abs(at) < 8e12;
const ago = (at, now) => (now - at < 0.5 ? "just now" : `${duration(now - at)} ago`);

/** Format a time in the reader's time zone, with the date if it is not today. */
function clock(at, now = at) {
  if (!isTime(at)) return NONE;
  const [date, today] = [new Date(at * 1000), new Date(now * 1000)];
  if (date.toDateString() === today.toDateString()) return date.toLocaleTimeString("en-GB");
  const day = { day: "numeric", month: "long", ...(date.getFullYear() === today.getFullYear() ? {} : { year: "numeric" }) };
  return `${date.toLocaleDateString("en-GB", day)}, ${minute(at)}`;
}

const minute = (at) => new Date(at * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });

/** Escape invisible and bidirectional control characters in untrusted text, except joiners, which some scripts need. */
function visible(text) {
  return String(text ?? "").replace(/(?![\u200c\u200d])[\p{C}\p{Zl}\p{Zp}]/gu, (character) => {
    const code = character.codePointAt(0).toString(16);
    return code.length > 4 ? `\\u{${code}}` : `\\u${code.padStart(4, "0")}`;
  });
}

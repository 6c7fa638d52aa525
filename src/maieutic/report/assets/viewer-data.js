// The episodes in memory: derived values, filters, order, and where a quote stands in a text. No DOM in this file.

const DATA = JSON.parse(document.getElementById("data").textContent);
const EPISODES = DATA.episodes;
const PAIRS = DATA.pairs;
const BY_KEY = new Map();
const BY_PAIR = new Map();

EPISODES.forEach((e, order) => {
  e.order = order;
  e.turns = e.dialogue.turns;
  e.value = e.reward ? number(e.reward.reward) : null;
  e.gain = e.reward ? number(e.reward.gain) : null;
  e.gates = Object.values(e.verdicts);
  e.tokens = e.turns.reduce((n, t) => n + (t.speaker === "tutor" ? t.visible_tokens + t.thinking_tokens : 0), 0);
  BY_KEY.set(e.key, e);
  if (!BY_PAIR.has(e.pair)) BY_PAIR.set(e.pair, []);
  BY_PAIR.get(e.pair).push(e);
});

// Floats that JSON has no number for are written as the strings nan, inf, -inf: nothing to plot or sort by.
function number(v) {
  return typeof v === "number" ? v : null;
}

function distinct(values) {
  return [...new Set(values)].sort((a, b) => (typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true })));
}

const SORTS = {
  order: ["as played", (e) => e.order],
  reward: ["reward", (e) => e.value],
  gain: ["gain", (e) => e.gain],
  step: ["step", (e) => e.step],
  problem: ["problem", (e) => e.pair],
  arm: ["arm", (e) => e.arm],
  turns: ["turns", (e) => e.turns.length],
  tokens: ["tutor tokens", (e) => e.tokens],
};

const EMPTY = { q: "", arm: "", phase: "", step: "", problem: "", verdict: "", excl: "", min: "", max: "", sort: "order", dir: "asc" };

function matchesVerdict(e, wanted) {
  if (!wanted) return true;
  if (wanted === "ok") return e.gates.length > 0 && e.gates.every((v) => v.decision === "ok");
  if (wanted === "none") return e.gates.length === 0;
  if (wanted === "reject" || wanted === "unknown") return e.gates.some((v) => v.decision === wanted);
  const cut = wanted.lastIndexOf(":");
  return e.gates.some((v) => v.gate === wanted.slice(0, cut) && v.decision === wanted.slice(cut + 1));
}

function matchesExclusion(e, wanted) {
  if (!wanted) return true;
  if (wanted === "counted") return e.exclusion === null;
  if (wanted === "excluded") return e.exclusion !== null;
  return e.exclusion === wanted.slice("=".length);
}

function haystack(e) {
  // Built at the first search and kept: lower-cased text of everything that a reader sees.
  if (e.hay === undefined) {
    const p = PAIRS[e.pair];
    const parts = [e.id, e.pair, p.source.text, p.transfer ? p.transfer.text : "", e.exclusion || "", e.error || ""];
    for (const t of e.turns) parts.push(t.visible, t.thinking, t.note);
    for (const v of e.gates) parts.push(v.quote, v.criterion, v.reason);
    if (e.post_test) parts.push(...e.post_test.answers);
    e.hay = parts.join("\n").toLowerCase();
  }
  return e.hay;
}

function select(f) {
  const needle = f.q.trim().toLowerCase();
  const min = f.min === "" ? null : Number(f.min);
  const max = f.max === "" ? null : Number(f.max);
  const found = EPISODES.filter(
    (e) =>
      (!f.arm || e.arm === f.arm) &&
      (!f.phase || e.phase === f.phase) &&
      (f.step === "" || e.step === Number(f.step)) &&
      (!f.problem || e.pair === f.problem) &&
      matchesVerdict(e, f.verdict) &&
      matchesExclusion(e, f.excl) &&
      (min === null || (e.value !== null && e.value >= min)) &&
      (max === null || (e.value !== null && e.value <= max)) &&
      (!needle || haystack(e).includes(needle)),
  );
  const value = (SORTS[f.sort] || SORTS.order)[1];
  const sign = f.dir === "desc" ? -1 : 1;
  return found.sort((a, b) => compareValues(value(a), value(b), sign) || a.order - b.order);
}

function compareValues(a, b, sign) {
  // What has no value stands last in both directions.
  if (a === null || b === null) return (a === null) - (b === null);
  if (typeof a === "number") return sign * (a - b);
  return sign * String(a).localeCompare(String(b), "en", { numeric: true });
}

// Other episodes of the same problem, the likeliest to be compared with first: another arm at the same phase, step and index.
function candidates(e) {
  const distance = (o) =>
    (o.arm === e.arm) * 8 + (o.phase !== e.phase) * 4 + (o.step !== e.step && o.arm !== e.arm) * 2 + (o.index !== e.index);
  return BY_PAIR.get(e.pair)
    .filter((o) => o !== e)
    .sort((a, b) => distance(a) - distance(b) || a.order - b.order);
}

const INVISIBLE = /[\u00ad\u200b-\u200f\u202a-\u202e\u2060-\u2064\u2066-\u2069\ufeff]/;

function squeeze(text) {
  // Lower case, white space as one blank, invisible characters dropped; at[i] is the place of squeezed character i in the text.
  let out = "";
  const at = [];
  for (let i = 0; i < text.length; i++) {
    let c = text[i];
    if (INVISIBLE.test(c)) continue;
    if (/\s/.test(c)) {
      if (out.endsWith(" ")) continue;
      c = " ";
    }
    c = c.toLowerCase();
    for (let k = 0; k < c.length; k++) at.push(i);
    out += c;
  }
  return [out, at];
}

// [start, end) of the quote in the text, as written or else up to case, white space and invisible characters; null if absent.
function locate(text, quote) {
  if (!quote.trim()) return null;
  const exact = text.indexOf(quote);
  if (exact >= 0) return [exact, exact + quote.length];
  const needle = squeeze(quote)[0].trim();
  const [flat, at] = squeeze(text);
  const found = needle ? flat.indexOf(needle) : -1;
  return found < 0 ? null : [at[found], at[found + needle.length - 1] + 1];
}

// Which turn a verdict's quote stands in: the cited one, else the first tutor turn that has it.
function quoteRanges(e) {
  const marks = new Map();
  const found = new Map();
  for (const v of e.gates) {
    if (!v.quote) continue;
    const cited = v.turn !== null && e.turns[v.turn] ? [v.turn] : [];
    const order = [...cited, ...e.turns.keys()].filter((n, i) => i < cited.length || e.turns[n].speaker === "tutor");
    for (const n of order) {
      const range = locate(e.turns[n].visible, v.quote);
      if (range) {
        if (!marks.has(n)) marks.set(n, []);
        marks.get(n).push({ start: range[0], end: range[1], cls: "quote", title: `${v.gate}: ${v.criterion || v.decision}` });
        found.set(v.gate, n);
        break;
      }
    }
  }
  return { marks, found };
}

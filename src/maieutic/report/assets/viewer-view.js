// How an episode looks. Every text of the data becomes a text node (textContent): no markup is ever parsed from it.

const SHOWN = 20000; // characters of one text that are laid out before the reader asks for the rest
const HITS = 200; // search hits marked in one text

// Characters that change how text reads without being seen: shown by their code. A joiner inside an emoji is left alone.
const CONTROLS =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u00ad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2064\u2066-\u2069\ufeff\ufff9-\ufffb]|(?<![\p{Extended_Pictographic}\ufe0f\u{1f3fb}-\u{1f3ff}])\u200d|[\u{e0000}-\u{e007f}]/gu;

function el(tag, attrs, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attrs || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") node.textContent = value;
    else if (name === "on") for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((c) => c !== null && c !== undefined));
  return node;
}

function code(c) {
  return "U+" + c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
}

function appendPlain(parent, text) {
  let last = 0;
  for (const m of text.matchAll(CONTROLS)) {
    if (m[0] === "\r" && text[m.index + 1] === "\n") continue;
    if (m.index > last) parent.append(document.createTextNode(text.slice(last, m.index)));
    parent.append(el("span", { class: "ctl", title: "invisible or control character", text: code(m[0]) }));
    last = m.index + m[0].length;
  }
  if (last < text.length) parent.append(document.createTextNode(text.slice(last)));
}

function searchRanges(text, query) {
  const needle = query.trim().toLowerCase();
  const out = [];
  if (!needle) return out;
  const low = text.toLowerCase();
  if (low.length !== text.length) return out; // lower case moved the places: leave unmarked rather than mark the wrong ones
  for (let i = low.indexOf(needle); i >= 0 && out.length < HITS; i = low.indexOf(needle, i + needle.length))
    out.push({ start: i, end: i + needle.length, cls: "hit" });
  return out;
}

// Text with marked ranges (which may overlap): cut at every border, one <mark> a piece.
function appendMarked(parent, text, ranges) {
  const borders = distinct([0, text.length, ...ranges.flatMap((r) => [Math.min(r.start, text.length), Math.min(r.end, text.length)])]);
  for (let i = 0; i + 1 < borders.length; i++) {
    const [from, to] = [borders[i], borders[i + 1]];
    const over = ranges.filter((r) => r.start <= from && r.end >= to);
    const target = over.length
      ? el("mark", { class: distinct(over.map((r) => r.cls)).join(" "), title: over.map((r) => r.title).filter(Boolean).join("; ") || null })
      : parent;
    appendPlain(target, text.slice(from, to));
    if (target !== parent) parent.append(target);
  }
}

function textBlock(text, ranges, query) {
  const box = el("div", { class: "text", dir: "auto" });
  const marks = [...(ranges || []), ...searchRanges(text, query || "")];
  const need = Math.max(SHOWN, ...(ranges || []).map((r) => r.end + 200));
  let cut = text.length > need ? need : text.length;
  if (cut < text.length && /[\ud800-\udbff]/.test(text[cut - 1])) cut -= 1;
  appendMarked(box, text.slice(0, cut), marks.filter((r) => r.start < cut));
  if (cut === text.length) return box;
  const rest = el("button", { type: "button", class: "rest", text: `Show all ${text.length.toLocaleString("en")} characters` });
  const wrap = el("div", {}, box, rest);
  rest.addEventListener("click", () => {
    box.replaceChildren();
    appendMarked(box, text, marks);
    rest.remove();
  });
  return wrap;
}

function signed(v, digits = 2) {
  if (v === null || v === undefined) return "–";
  if (typeof v !== "number") return String(v);
  const text = Math.abs(v).toFixed(digits);
  return Number(text) === 0 ? text : (v > 0 ? "+" : "−") + text;
}

function rewardClass(e) {
  if (e.exclusion !== null || e.value === null) return "none";
  return e.value > 0.005 ? "good" : e.value < -0.005 ? "bad" : "flat";
}

function chip(text, cls, title) {
  return el("span", { class: `chip ${cls || ""}`, title: title || null, dir: "auto", text });
}

const MARKS = { right: "✓", wrong: "✗", no_answer: "∅", error: "!" };
const GRADE_NAMES = { right: "right", wrong: "wrong", no_answer: "no answer", error: "not graded" };
const DECISIONS = { ok: ["good", "✓"], reject: ["bad", "✗"], unknown: ["warn", "?"] };

function verdictChips(e) {
  return e.gates
    .filter((v) => v.decision !== "ok")
    .map((v) => chip(`${DECISIONS[v.decision][1]} ${v.gate} ${v.decision === "unknown" ? "unknown" : "rejected"}`, DECISIONS[v.decision][0]));
}

function turnFlags(t) {
  const flags = [];
  if (t.scripted) flags.push(chip("scripted"));
  if (!t.visible.trim()) flags.push(chip("blank", "warn", "nothing visible reaches the other side"));
  if (t.truncated) flags.push(chip("truncated", "warn", "cut by the token cap of a turn"));
  if (!t.well_formed) flags.push(chip("malformed thinking", "warn"));
  if (t.end_token) flags.push(chip("end token"));
  if (t.attempts > 1) flags.push(chip(`${t.attempts} attempts`, "", "sampled anew for role discipline"));
  return flags;
}

function renderTurn(t, n, prefix, marks, opts) {
  const tutor = t.speaker === "tutor";
  const tokens = t.visible_tokens ? `${t.visible_tokens} tokens` : "";
  const body = t.visible.trim()
    ? textBlock(t.visible, marks.get(n), opts.q)
    : el("p", { class: "blank", text: tutor ? "(no message)" : "(nothing)" });
  let thought = null;
  if (t.thinking) {
    const count = t.thinking_tokens ? ` · ${t.thinking_tokens} tokens` : "";
    thought = el("details", { class: "thought", open: opts.thinking }, el("summary", { text: `Thinking${count}` }));
    // Laid out when it is first opened.
    const fill = () => thought.open && thought.children.length === 1 && thought.append(textBlock(t.thinking, [], opts.q));
    thought.addEventListener("toggle", fill);
    fill();
  }
  const note = t.note ? el("div", { class: "note" }, el("b", { text: "Advice to the tutor" }), textBlock(t.note, [], opts.q)) : null;
  return el(
    "li",
    { class: `turn ${t.speaker}`, id: `${prefix}turn-${n}`, tabindex: "-1" },
    el("div", { class: "who" }, el("b", { text: tutor ? "Tutor" : "Student" }), el("span", { class: "num", text: `${n}` }), ...turnFlags(t),
      el("span", { class: "tokens num", text: tokens })),
    thought,
    body,
    note,
  );
}

function renderVerdicts(e, prefix, found) {
  if (!e.gates.length) return el("p", { class: "muted", text: "No gate was asked." });
  return el("ul", { class: "verdicts" }, ...e.gates.map((v) => {
    const [cls, sign] = DECISIONS[v.decision];
    const where = found.has(v.gate) ? found.get(v.gate) : v.turn;
    const item = el("li", { class: `verdict ${cls}` },
      el("div", { class: "head" }, el("b", { text: `${sign} ${v.gate}` }), el("span", { text: v.decision }),
        v.criterion ? el("code", { text: v.criterion, dir: "auto" }) : null,
        Object.keys(v.votes).length ? el("span", { class: "muted", text: Object.entries(v.votes).map(([k, n]) => `${n} ${k}`).join(", ") }) : null));
    if (v.quote) {
      const quote = el("blockquote", {}, textBlock(v.quote, [], ""));
      item.append(quote);
      if (where !== null && e.turns[where])
        item.append(el("button", { type: "button", class: "link", text: `Show in turn ${where}`, on: { click: () => {
          const target = document.getElementById(`${prefix}turn-${where}`);
          (target.querySelector("mark.quote") || target).scrollIntoView({ block: "center" });
          target.focus({ preventScroll: true });
        } } }));
      if (!found.has(v.gate)) item.append(el("p", { class: "muted", text: "The quote does not occur word for word in a turn." }));
    }
    if (v.reason) item.append(textBlock(v.reason, [], ""));
    return item;
  }));
}

function rail(r) {
  // Cold and final solve rate on a scale from 0 to 1.
  const pre = number(r.pre);
  const post = number(r.post);
  if (pre === null || post === null) return null;
  const span = el("i", { class: post >= pre ? "span up" : "span down" });
  span.style.left = `${100 * Math.min(pre, post)}%`;
  span.style.width = `${100 * Math.abs(post - pre)}%`;
  const from = el("i", { class: "tick" });
  from.style.left = `${100 * pre}%`;
  const end = el("i", { class: "end" });
  end.style.left = `${100 * post}%`;
  return el("div", { class: "rail", role: "img", "aria-label": `solve rate ${pre.toFixed(2)} before, ${post.toFixed(2)} after` }, span, from, end);
}

function renderReward(e) {
  const r = e.reward;
  if (!r) return el("p", { class: "muted", text: e.exclusion === null ? "No reward." : "Excluded: no reward is given." });
  const fixed = (v) => (typeof v === "number" ? v.toFixed(2) : v === null ? "–" : String(v));
  const rows = [["before", fixed(r.pre)], ["after", fixed(r.post)], ["gain", signed(r.gain)]];
  if (r.gated) rows.push(["gated", "yes"]);
  if (r.decay_visible !== 1) rows.push(["× length, visible", fixed(r.decay_visible)]);
  if (r.decay_thinking !== 1) rows.push(["× length, thinking", fixed(r.decay_thinking)]);
  if (r.eoc_bonus) rows.push(["end bonus", signed(r.eoc_bonus)]);
  if (r.think_reward) rows.push(["form of thinking", signed(r.think_reward)]);
  if (r.penalty) rows.push(["penalty", signed(typeof r.penalty === "number" ? -r.penalty : r.penalty)]);
  for (const [k, v] of Object.entries(r.extra)) rows.push([k, fixed(v)]);
  return el("div", {}, rail(r), el("dl", { class: "terms" }, ...rows.flatMap(([k, v]) => [el("dt", { text: k }), el("dd", { class: "num", text: v })])));
}

function renderPostTest(e, opts) {
  const p = e.post_test;
  if (!p) return el("p", { class: "muted", text: "No post-test was taken." });
  const pair = PAIRS[e.pair];
  const tested = p.problem === "transfer" && pair.transfer ? pair.transfer : pair.source;
  const count = (g) => p.grades.filter((x) => x === g).length;
  const graded = p.grades.length - count("error");
  const counts = Object.keys(MARKS).filter((g) => count(g)).map((g) => chip(`${MARKS[g]} ${count(g)} ${GRADE_NAMES[g]}`, { right: "good", wrong: "bad" }[g] || "warn"));
  const answers = p.answers.map((a, i) => {
    const g = p.grades[i];
    const line = a.trim().split("\n").filter((s) => s.trim()).pop() || "(empty)";
    const preview = el("span", { class: "preview", dir: "auto" });
    appendPlain(preview, line.length > 160 ? "…" + line.slice(-160) : line);
    const item = el("details", { class: `answer ${g}` }, el("summary", {}, el("span", { class: "grade", role: "img", "aria-label": GRADE_NAMES[g] || g, title: GRADE_NAMES[g] || g, text: MARKS[g] || g }), preview));
    item.addEventListener("toggle", () => item.open && item.children.length === 1 && item.append(textBlock(a, [], opts.q)));
    return item;
  });
  return el("div", { class: "posttest" },
    el("p", { class: "muted", text: `On the ${p.problem} problem, tutor turns ${p.hide_tutor ? "hidden" : "visible"}. Expected: ${tested.answer}. ${count("right")} of ${graded} graded answers are right.` }),
    el("div", { class: "chips" }, ...counts), el("div", { class: "answers" }, ...answers));
}

function renderProblem(e, opts) {
  const p = PAIRS[e.pair];
  const side = (name, problem) => el("section", { class: "problem" }, el("h4", {}, el("span", { text: name }), el("span", { class: "expected", dir: "auto", text: `= ${problem.answer}` })),
    textBlock(problem.text, [], opts.q), problem.solution ? el("details", {}, el("summary", { text: "Solution" }), textBlock(problem.solution, [], "")) : null);
  return el("div", { class: "pair" }, side("Source (tutored)", p.source), p.transfer ? side("Transfer (tested)", p.transfer) : null);
}

function facts(e) {
  const out = [chip(e.arm, "arm"), chip(e.phase), chip(`step ${e.step}`), chip(`#${e.index}`), chip(`ends: ${e.dialogue.end || "–"}`)];
  if (e.exclusion !== null) out.push(chip(`excluded: ${e.exclusion}`, "warn"));
  return el("div", { class: "chips" }, ...out, ...verdictChips(e));
}

function section(title, ...body) {
  return el("section", { class: "block" }, el("h3", { text: title }), ...body);
}

// One column: head, reward, gates, dialogue, post-test. `prefix` keeps ids apart when two columns stand side by side.
function renderEpisode(e, prefix, opts, chooser) {
  const { marks, found } = quoteRanges(e);
  const more = [["episode", e.id], ["group", e.group_id], ["run", DATA.runs[e.run].name], ["student", e.student], ["seed", e.seed], ["policy version", e.policy_version]];
  if (e.token_record) more.push(["token record", `${e.token_record.tokens} tokens, ${e.token_record.sampled} sampled, ${e.token_record.segments} segment(s)`]);
  for (const [k, v] of Object.entries(e.timing)) more.push([`${k}, seconds`, typeof v === "number" ? v.toFixed(2) : v]);
  return el("article", { class: "episode", "data-key": e.key },
    chooser || null,
    el("div", { class: "title" }, el("h2", { dir: "auto", text: e.pair }), el("span", { class: `reward num ${rewardClass(e)}`, title: "reward", text: signed(e.exclusion === null ? e.value : null) })),
    facts(e),
    e.error ? el("div", { class: "error" }, textBlock(e.error, [], opts.q)) : null,
    el("div", { class: "duo" }, section("Reward", renderReward(e)), section("Gates", renderVerdicts(e, prefix, found))),
    section("Dialogue", el("ol", { class: "turns" }, ...e.turns.map((t, n) => renderTurn(t, n, prefix, marks, opts)))),
    section("Post-test", renderPostTest(e, opts)),
    el("details", { class: "about" }, el("summary", { text: "Ids, seed, timing" }), el("dl", { class: "terms" }, ...more.flatMap(([k, v]) => [el("dt", { text: k }), el("dd", { text: String(v), dir: "auto" })]))));
}

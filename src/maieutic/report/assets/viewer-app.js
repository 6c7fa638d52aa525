// State, list, address, keyboard. State: the filters, the selected episode, the one that it is compared with.

const $ = (id) => document.getElementById(id);
const list = $("list");
const detail = $("detail");
const ROW = 78; // height of a list row in CSS pixels (see .item)

const state = { f: { ...EMPTY }, key: null, other: null, thinking: false };
let shown = [];

// ---- filters ----

function options(node, first, values) {
  node.replaceChildren(el("option", { value: "", text: first }), ...values.map(([value, label]) => el("option", { value, text: label })));
}

function setUpFilters() {
  const plain = (pick) => distinct(EPISODES.map(pick)).map((v) => [String(v), String(v)]);
  options($("arm"), "all", plain((e) => e.arm));
  options($("phase"), "all", plain((e) => e.phase));
  options($("step"), "all", plain((e) => e.step));
  options($("problem"), "all", plain((e) => e.pair));
  const gates = distinct(EPISODES.flatMap((e) => e.gates.map((v) => v.gate)));
  options($("verdict"), "any", [["ok", "all ok"], ["reject", "a rejection"], ["unknown", "an unknown"], ["none", "no verdict"],
    ...gates.flatMap((g) => [[`${g}:reject`, `${g} rejected`], [`${g}:unknown`, `${g} unknown`]])]);
  const reasons = distinct(EPISODES.map((e) => e.exclusion).filter((x) => x !== null));
  options($("excl"), "all", [["counted", "counted"], ["excluded", "excluded"], ...reasons.map((r) => [`=${r}`, r])]);
  $("sort").replaceChildren(...Object.entries(SORTS).map(([value, [label]]) => el("option", { value, text: label })));
}

const FIELDS = ["q", "arm", "phase", "step", "problem", "verdict", "excl", "min", "max", "sort"];

function showFilters() {
  for (const name of FIELDS) $(name).value = state.f[name];
  $("dir").textContent = state.f.dir === "desc" ? "↓" : "↑";
  $("dir").setAttribute("aria-label", state.f.dir === "desc" ? "Descending: reverse the order" : "Ascending: reverse the order");
  $("clear").disabled = FIELDS.every((name) => name === "sort" || state.f[name] === "");
}

function changed() {
  for (const name of FIELDS) state.f[name] = $(name).value;
  refresh();
  writeAddress(false);
}

function refresh() {
  showFilters();
  shown = select(state.f);
  const values = shown.filter((e) => e.exclusion === null && e.value !== null).map((e) => e.value);
  const mean = values.length ? ` · mean reward ${signed(values.reduce((a, b) => a + b, 0) / values.length)}` : "";
  const all = EPISODES.length.toLocaleString("en");
  $("count").textContent = shown.length === EPISODES.length ? `${all} episodes${mean}` : `${shown.length.toLocaleString("en")} of ${all} episodes${mean}`;
  $("spacer").style.height = `${shown.length * ROW}px`;
  drawList();
}

// ---- list: only the rows in sight exist ----

function rowOf(e, at) {
  const selected = e.key === state.key;
  const p = e.post_test;
  const graded = p ? p.grades.filter((g) => g !== "error").length : 0;
  const score = p ? `${p.grades.filter((g) => g === "right").length}/${graded} right` : "no post-test";
  const line = el("div", { class: "problem-line", dir: "auto" });
  appendPlain(line, PAIRS[e.pair].source.text.slice(0, 140).replace(/\s+/g, " "));
  const row = el("div", { class: `item${selected ? " selected" : ""}`, role: "option", id: `row-${at}`, "aria-selected": String(selected),
    "aria-setsize": shown.length, "aria-posinset": at + 1, "data-key": e.key, on: { click: () => open(e.key, true) } },
    el("div", { class: "first" }, el("b", { dir: "auto", text: e.pair }), el("span", { class: "muted", dir: "auto", text: `${e.arm} · ${e.phase} ${e.step} · #${e.index}` }),
      el("span", { class: `reward num ${rewardClass(e)}`, text: signed(e.exclusion === null ? e.value : null) })),
    line,
    el("div", { class: "last" }, ...(e.exclusion !== null ? [chip(`excluded: ${e.exclusion}`, "warn")] : verdictChips(e)),
      el("span", { class: "muted num", text: `${score} · ${e.turns.length} turns` })));
  row.style.top = `${at * ROW}px`;
  return row;
}

function drawList() {
  const first = Math.max(0, Math.floor(list.scrollTop / ROW) - 4);
  const last = Math.min(shown.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW) + 4);
  // Rows that stay the same keep their element: one that is being pressed must not vanish under the pointer.
  const kept = new Map([...$("spacer").children].map((row) => [row.dataset.state, row]));
  const rows = [];
  for (let at = first; at < last; at++) {
    const now = JSON.stringify([shown[at].key, at, shown.length, shown[at].key === state.key]);
    const row = kept.get(now) || rowOf(shown[at], at);
    row.dataset.state = now;
    rows.push(row);
  }
  const same = rows.length === $("spacer").children.length && rows.every((row, n) => row === $("spacer").children[n]);
  if (!same) $("spacer").replaceChildren(...rows);
  if (!shown.length) $("spacer").replaceChildren(el("p", { class: "empty", text: EPISODES.length ? "No episode matches these filters." : "These runs have no transcripts yet." }));
  const at = position();
  if (at >= first && at < last) list.setAttribute("aria-activedescendant", `row-${at}`);
  else list.removeAttribute("aria-activedescendant");
}

function position() {
  return shown.findIndex((e) => e.key === state.key);
}

function reveal(at) {
  const top = at * ROW;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
}

// ---- detail ----

function chooser(e, others) {
  const pick = el("select", { id: "other", "aria-label": "Episode to compare with" },
    ...others.map((o) => el("option", { value: o.key, text: `${o.arm} · ${o.phase} ${o.step} · #${o.index} · reward ${signed(o.exclusion === null ? o.value : null)}` })));
  pick.value = state.other;
  pick.addEventListener("change", () => compareWith(pick.value));
  return el("div", { class: "chooser" }, el("span", { text: "Compared with" }), pick);
}

function drawDetail() {
  const e = BY_KEY.get(state.key);
  const opts = { q: state.f.q, thinking: state.thinking };
  $("compare").setAttribute("aria-pressed", String(state.other !== null));
  $("thinking").setAttribute("aria-pressed", String(state.thinking));
  if (!e) {
    const text = state.key === null ? "Choose an episode on the left, or press j." : `There is no episode ${state.key} in this file.`;
    detail.replaceChildren(el("p", { class: "empty", text }));
    return;
  }
  const others = candidates(e);
  $("compare").disabled = !others.length;
  const other = state.other === null ? null : BY_KEY.get(state.other);
  const back = el("button", { type: "button", class: "back", text: "← Episodes", on: { click: backToList } });
  const columns = [renderEpisode(e, "a-", opts, other ? el("div", { class: "chooser" }, el("span", { text: "Selected" })) : null)];
  if (other) columns.push(renderEpisode(other, "b-", opts, chooser(e, others)));
  detail.replaceChildren(back, renderProblem(e, opts), el("div", { class: other ? "columns two" : "columns" }, ...columns));
}

function open(key, push) {
  if (state.key !== key) {
    const comparing = state.other !== null;
    state.key = key;
    const others = comparing && BY_KEY.has(key) ? candidates(BY_KEY.get(key)) : [];
    state.other = others.length ? others[0].key : null;
    detail.scrollTop = 0;
  }
  document.body.classList.add("reading");
  drawDetail();
  drawList();
  writeAddress(push);
}

function compareWith(key) {
  state.other = key;
  drawDetail();
  writeAddress(false);
}

function toggleCompare() {
  const e = BY_KEY.get(state.key);
  if (!e) return;
  const others = candidates(e);
  compareWith(state.other === null && others.length ? others[0].key : null);
}

function nextCandidate(by) {
  const e = BY_KEY.get(state.key);
  const others = e ? candidates(e) : [];
  if (!others.length) return;
  const at = others.findIndex((o) => o.key === state.other);
  compareWith(others[at < 0 ? 0 : (at + by + others.length) % others.length].key);
}

function toggleThinking() {
  state.thinking = !state.thinking;
  $("thinking").setAttribute("aria-pressed", String(state.thinking));
  for (const fold of detail.querySelectorAll(".thought")) fold.open = state.thinking;
}

function move(to) {
  if (!shown.length) return;
  const at = Math.min(shown.length - 1, Math.max(0, to));
  reveal(at);
  open(shown[at].key, false);
}

function step(by) {
  const at = position();
  move(at < 0 ? 0 : at + by);
}

function backToList() {
  document.body.classList.remove("reading");
  list.focus();
}

// ---- theme ----

function dark() {
  const set = document.documentElement.dataset.theme;
  return set ? set === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

function showTheme() {
  $("theme").textContent = dark() ? "Light" : "Dark";
}

function toggleTheme() {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  showTheme();
}

// ---- address: #episode=…&with=…&<filters> ----

function writeAddress(push) {
  const parts = new URLSearchParams();
  if (state.key !== null) parts.set("episode", state.key);
  if (state.other !== null) parts.set("with", state.other);
  for (const [name, value] of Object.entries(state.f)) if (value !== EMPTY[name]) parts.set(name, value);
  const hash = `#${parts}`;
  if (hash === (location.hash || "#")) return;
  if (push) history.pushState(null, "", hash);
  else history.replaceState(null, "", hash);
}

function readAddress() {
  const parts = new URLSearchParams(location.hash.slice(1));
  for (const name of Object.keys(EMPTY)) state.f[name] = parts.has(name) ? parts.get(name) : EMPTY[name];
  if (!SORTS[state.f.sort]) state.f.sort = EMPTY.sort;
  state.key = parts.get("episode");
  const other = parts.get("with");
  const e = BY_KEY.get(state.key);
  state.other = e && BY_KEY.has(other) && BY_KEY.get(other).pair === e.pair ? other : null;
  refresh();
  // A link to an episode that the filters hide still shows it.
  const at = position();
  if (at >= 0) reveal(at);
  document.body.classList.toggle("reading", state.key !== null);
  drawDetail();
  drawList();
}

// ---- keyboard ----

const KEYS = {
  j: () => step(1), k: () => step(-1), ArrowDown: () => step(1), ArrowUp: () => step(-1), g: () => move(0), G: () => move(shown.length - 1),
  c: toggleCompare, "[": () => nextCandidate(-1), "]": () => nextCandidate(1), t: toggleThinking, d: toggleTheme,
  "/": () => { $("q").focus(); $("q").select(); },
  "?": () => $("help").showModal(),
  Enter: () => { if (position() < 0) step(1); document.body.classList.add("reading"); detail.focus(); },
};

function escape() {
  if (document.activeElement === $("q") && $("q").value) {
    $("q").value = "";
    changed();
  } else if (document.activeElement && document.activeElement.matches("input, select")) list.focus();
  else if (state.other !== null) compareWith(null);
  else backToList();
}

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || $("help").open) return;
  if (event.key === "Escape") {
    escape();
    return event.preventDefault();
  }
  const at = event.target;
  if (at.matches("input, select, textarea")) {
    if (at === $("q") && event.key === "Enter") {
      event.preventDefault();
      list.focus();
      if (shown.length) move(0);
    }
    return undefined;
  }
  if (event.key === "Enter" && at.matches("button, summary, a")) return undefined;
  if (event.key.startsWith("Arrow") && at !== list) return undefined;
  const action = KEYS[event.key];
  if (!action) return undefined;
  event.preventDefault();
  return action();
});

// ---- start ----

let pending = 0;
setUpFilters();
$("filters").addEventListener("submit", (event) => event.preventDefault());
$("filters").addEventListener("change", changed);
$("q").addEventListener("input", () => {
  clearTimeout(pending);
  pending = setTimeout(() => { changed(); drawDetail(); }, 120);
});
$("dir").addEventListener("click", () => { state.f.dir = state.f.dir === "desc" ? "asc" : "desc"; refresh(); writeAddress(false); });
$("clear").addEventListener("click", () => { const { sort, dir } = state.f; state.f = { ...EMPTY, sort, dir }; refresh(); writeAddress(false); });
$("more").addEventListener("click", () => {
  const box = $("more-filters");
  box.hidden = !box.hidden;
  $("more").setAttribute("aria-expanded", String(!box.hidden));
});
$("compare").addEventListener("click", toggleCompare);
$("thinking").addEventListener("click", toggleThinking);
$("theme").addEventListener("click", toggleTheme);
$("help-open").addEventListener("click", () => $("help").showModal());
list.addEventListener("scroll", () => requestAnimationFrame(drawList), { passive: true });
new ResizeObserver(drawList).observe(list);
addEventListener("hashchange", readAddress);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);
showTheme();
if (matchMedia("(max-width: 820px)").matches) $("more").click();
readAddress();

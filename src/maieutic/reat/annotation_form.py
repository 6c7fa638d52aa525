"""The annotation form: one HTML page that needs no network, keeps what was filled in in the browser, and saves it as JSON.

All text of dialogues is put into the page as data and shown as text nodes; nothing of it is markup or script. The inferred
states are shown only once a preference is given, because they belong to one of the two dialogues.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from maieutic.reat.schema import DIMENSIONS, TOP
from maieutic.report.page import embed_json, esc, policy

GUIDE: dict[str, str] = {
    "scaffolding": "The student keeps the thinking. 4: stepwise guidance; 0: the answer is given away.",
    "attribution": "The actual difficulty is found. 4: precisely; 0: not at all, or the wrong one.",
    "empathy": "Feelings are met in a way that helps. 4: specific; 2: formulaic; 0: ignored.",
    "focus": "The turn stays with the present obstacle. 4: entirely; 0: it misses it.",
    "adaptation": "The approach changes when the struggle goes on. 4: clearly; 0: not at all; NA: too early to tell.",
}
STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:70rem;margin:1rem auto;padding:0 1rem;color:#222;background:#fff}
.sides{display:grid;grid-template-columns:1fr 1fr;gap:1.5rem}.turn{border-top:1px solid #ccc;padding:.5rem 0}
.student{color:#555}.tutor{font-weight:600}label{display:inline-block;margin:.1rem .6rem .1rem 0;font-size:13px}
pre{white-space:pre-wrap;font:inherit;margin:.2rem 0}nav{position:sticky;top:0;background:inherit;padding:.5rem 0}
.auto{color:#777;font-size:13px}button,select,input{font:inherit}.states{border-top:2px solid #999;margin-top:1rem}
@media(max-width:50rem){.sides{grid-template-columns:1fr}}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181818}.student{color:#aaa}}"""
SCRIPT = """'use strict';
const data = JSON.parse(document.getElementById('data').textContent);
const store = 'annotation-' + data.id;
let at = 0, unsaved = false, filled = {turns: {}, pairs: {}, name: ''};
const root = document.getElementById('root');
function el(tag, text, cls) { const e = document.createElement(tag); if (text !== undefined) e.textContent = text;
  if (cls) e.className = cls; return e; }
function lost() { document.getElementById('lost').hidden = false; }
let keeps = true;
function plain(x) { return x !== null && typeof x === 'object' && !Array.isArray(x); }
function keep() { unsaved = true;
  if (keeps) { try { localStorage.setItem(store, JSON.stringify(filled)); } catch { lost(); } } }
try { const was = JSON.parse(localStorage.getItem(store));
  if (was !== null) { if (!plain(was) || !plain(was.turns) || !plain(was.pairs)) throw new TypeError('no form'); filled = was; }
} catch { keeps = false; lost(); }
addEventListener('beforeunload', e => { if (unsaved) { e.preventDefault(); e.returnValue = true; } });
function choose(label, options, value, set, hint) {
  const l = el('label', label + ' '); if (hint) l.title = hint; const s = el('select');
  for (const o of ['', ...options]) { const x = el('option', o); x.value = o; s.append(x); }
  s.value = value || ''; s.addEventListener('change', () => { set(s.value); keep(); }); l.append(s); return l; }
function show() {
  root.replaceChildren(); const p = data.pairs[at];
  document.getElementById('where').textContent = p.pair + ' (' + (at + 1) + ' of ' + data.pairs.length + ')';
  root.append(el('h2', 'Problem'), el('pre', p.problem), el('h3', 'Solution'), el('pre', p.solution));
  const sides = el('div', undefined, 'sides');
  for (const side of ['A', 'B']) { const d = p.dialogues[side], box = el('section'); box.append(el('h3', 'Dialogue ' + side));
    for (const t of d.turns) { const key = p.pair + '/' + side + '/' + t.n, turn = el('div', undefined, 'turn');
      filled.turns[key] = filled.turns[key] || {};
      turn.append(el('pre', t.student, 'student'), el('pre', t.tutor, 'tutor'));
      for (const dim of data.dimensions) { const scale = dim === 'adaptation' ? [...data.scale, 'NA'] : data.scale;
        turn.append(choose(dim, scale, filled.turns[key][dim], v => { filled.turns[key][dim] = v; }, data.guide[dim])); }
      const n = el('input'); n.placeholder = 'notes'; n.value = filled.turns[key].notes || '';
      n.addEventListener('input', () => { filled.turns[key].notes = n.value; keep(); }); turn.append(n);
      box.append(turn); }
    if (d.last) box.append(el('pre', d.last, 'student'));
    sides.append(box); }
  const j = filled.pairs[p.pair] = filled.pairs[p.pair] || {}; const end = el('div', undefined, 'states');
  end.append(el('h3', 'When all turns are scored'));
  end.append(choose('Which dialogue is more expert-like?', ['A', 'B', 'uncertain'], j.preference,
    v => { j.preference = v; keep(); show(); }));
  if (j.preference) {
    for (const side of ['A', 'B']) { const d = p.dialogues[side];
      end.append(el('p', 'Automatic scores of ' + side + ': dialogue ' + (d.sample === null ? '-' : d.sample.toFixed(1)) +
        '; turns ' + d.turns.map(t => t.score === null ? '-' : t.score.toFixed(0)).join(', '), 'auto')); }
    end.append(choose('Are the automatic scores reasonable?', data.checks.llm_score, j.llm_score, v => { j.llm_score = v; }));
    end.append(el('h4', 'Inferred states'));
    for (const s of p.states) end.append(el('p', '"' + s.student + '" -> ' + s.state, 'auto'));
    end.append(choose('Are the inferred states plausible?', data.checks.state, j.state, v => { j.state = v; }));
  } else end.append(el('p', 'Automatic scores and inferred states are shown once a preference is given.', 'auto'));
  root.append(sides, end); window.scrollTo(0, 0); }
function rows() {
  const turns = []; for (const p of data.pairs) for (const side of ['A', 'B']) for (const t of p.dialogues[side].turns) {
    const f = filled.turns[p.pair + '/' + side + '/' + t.n] || {}; turns.push({pair: p.pair, dialogue: side, turn: t.n, ...f}); }
  return {annotator: filled.name, turns: turns, pairs: data.pairs.map(p => ({pair: p.pair, ...(filled.pairs[p.pair] || {})}))}; }
document.getElementById('back').addEventListener('click', () => { if (at > 0) { at--; show(); } });
document.getElementById('next').addEventListener('click', () => { if (at < data.pairs.length - 1) { at++; show(); } });
const who = document.getElementById('name'); who.value = filled.name || '';
who.addEventListener('input', () => { filled.name = who.value; keep(); });
document.getElementById('save').addEventListener('click', () => { const a = el('a');
  a.href = URL.createObjectURL(new Blob([JSON.stringify(rows(), null, 1)], {type: 'application/json'}));
  a.download = 'annotation-' + (filled.name || 'anonymous').replace(/[^A-Za-z0-9_-]+/g, '_') + '.json'; a.click();
  unsaved = false; });
if (data.pairs.length) show();
"""


def form(pairs: Sequence[dict[str, Any]]) -> str:
    """The page for exported pairs (as :func:`maieutic.reat.annotation.export_pairs` makes them)."""
    from maieutic.reat.annotation import CHECKS

    data = {
        "id": hashlib.sha256(json.dumps(pairs, sort_keys=True).encode()).hexdigest()[:12],
        "pairs": list(pairs),
        "dimensions": list(DIMENSIONS),
        "scale": [str(n) for n in range(TOP, -1, -1)],
        "guide": GUIDE,
        "checks": {k: list(v) for k, v in CHECKS.items()},
    }
    guide = "".join(f"<li><b>{esc(d)}</b>: {esc(text)}</li>" for d, text in GUIDE.items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{esc(policy(STYLE, SCRIPT))}">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><title>Paired dialogues</title>'
        f"<style>{STYLE}</style></head><body><h1>Paired tutoring dialogues</h1>"
        "<p>Score every tutor turn by itself, from what the student had just said. Judge how the tutor teaches, not whether the "
        f"problem was finished. The two dialogues need not run in parallel.</p><ul>{guide}</ul>"
        '<nav><label>Your name <input id="name"></label> <button id="back">Back</button> <span id="where"></span> '
        '<button id="next">Next</button> <button id="save">Save as a file</button> <strong id="lost" hidden>'
        "What you fill in is not kept in this browser: save as a file before you leave the page.</strong></nav>"
        '<main id="root"></main>'
        f'<script type="application/json" id="data">{embed_json(data)}</script><script>{SCRIPT}</script></body></html>\n'
    )

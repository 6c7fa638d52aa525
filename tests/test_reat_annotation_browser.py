"""The annotation form in a real headless Chromium: hostile text stays text, and what is filled in is what the import reads."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from browser import Browser, find_chromium
from maieutic.reat.annotation import export_pairs, read_annotation
from maieutic.reat.annotation_statistics import summarise
from test_reat_annotation import episode, score

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="NO BROWSER: the form is not tested; install Debian's chromium or set MAIEUTIC_CHROMIUM",
    ),
]
EVIL = (
    "</script><script>window.ran=1</script><img src=x onerror='window.ran=1'><!-- <b>bold</b> {{7*7}} &lt;i&gt; "
    "\u202e\u0000 javascript:window.ran=1 '\"`${window.ran=1}"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    browser = Browser(CHROMIUM, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


CHOOSE = """((label, at, value) => {
  const l = [...document.querySelectorAll('label')].filter((x) => x.firstChild.textContent.trim() === label)[at];
  const s = l.querySelector('select'); s.value = value; s.dispatchEvent(new Event('change')); return s.value; })"""
SAVED = """(async () => { let blob; const make = URL.createObjectURL;
  URL.createObjectURL = (b) => { blob = b; return 'about:blank#saved'; };
  HTMLAnchorElement.prototype.click = function () { window.savedAs = this.download; };
  document.getElementById('save').click(); URL.createObjectURL = make; return await blob.text(); })()"""


# Chromium's own storage on a busy machine now and then shows a page nothing of what the page before it stored: what is tested
# is that the form stores and reads, so the test carries the stored items from one page to the next.
STORE = """Object.defineProperty(window, 'localStorage', {value: {items: %s, getItem(k) { return this.items[k] ?? null; },
  setItem(k, v) { this.items[k] = String(v); }}})"""
DENIED = "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('no', 'SecurityError'); }})"


@contextmanager
def before_the_page(browser: Browser, source: str) -> Iterator[None]:
    """Documents opened meanwhile run ``source`` first."""
    made = browser.call("Page.addScriptToEvaluateOnNewDocument", source=source)
    yield
    browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=made["identifier"])


def test_load_fill_save_import(browser: Browser, tmp_path: Path) -> None:
    base, reat = (
        [episode("base", n, said=EVIL) for n in range(2)],
        [episode("reat", n, said=EVIL) for n in range(2)],
    )
    export_pairs(tmp_path, base, reat, [score(e) for e in base], [score(e) for e in reat])
    page = tmp_path / "form.html"
    with before_the_page(browser, STORE % "{}"):
        browser.open(page)
    assert browser.js("localStorage.items") == {}  # nothing is overwritten before something is filled in
    assert (
        browser.js("window.ran ?? null") is None
        and browser.js("document.querySelectorAll('img,b b,i').length") == 0
    )
    told = browser.js("[...document.querySelectorAll('pre.tutor')].map((x) => x.textContent)")
    assert len(told) == 4 and all(t.startswith(EVIL) for t in told)
    shown = "document.getElementById('root').textContent"
    assert "Inferred states" not in browser.js(shown) and "Automatic scores of" not in browser.js(shown)

    def choose(label: str, value: str, at: int = 0) -> None:
        assert browser.js(f"{CHOOSE}({json.dumps(label)}, {at}, {json.dumps(value)})") == value

    for turn in range(4):
        for n, dimension in enumerate(("scaffolding", "attribution", "empathy", "focus")):
            choose(dimension, str((turn + n) % 5), turn)
        choose("adaptation", "NA" if turn % 2 == 0 else "3", turn)
    choose("Which dialogue is more expert-like?", "B")
    assert browser.js(shown).count("Inferred states") == 1
    choose("Are the automatic scores reasonable?", "uncertain")
    choose("Are the inferred states plausible?", "basically")
    browser.js("document.getElementById('next').click()")
    assert browser.js("document.getElementById('where').textContent") == "p002 (2 of 2)"
    with before_the_page(browser, STORE % json.dumps(browser.js("localStorage.items"))):
        browser.open(page)  # what was filled in is kept
    assert browser.js("document.getElementById('lost').hidden") is True
    browser.js(
        "(() => { const w = document.getElementById('name'); w.value = '../a b'; w.dispatchEvent(new Event('input')); })()"
    )
    text = browser.js(SAVED)
    assert browser.js("window.savedAs") == "annotation-_a_b.json"
    (tmp_path / "annotation-a.json").write_text(text, encoding="utf-8")
    found = read_annotation(tmp_path / "annotation-a.json")
    assert len(found.turns) == 4 and found.judgements == {
        "p001": {"preference": "B", "llm_score": "uncertain", "state": "basically"}
    }
    first = found.turns["p001", "A", 1]
    assert first.model_dump() == {
        "scaffolding": 0,
        "attribution": 1,
        "empathy": 2,
        "focus": 3,
        "adaptation": None,
    }
    assert found.turns["p001", "B", 3].adaptation == 3 and found.turns["p001", "B", 1].scaffolding == 2
    assert summarise(tmp_path / "key.json", [found]).annotators[0].turns == 4
    assert browser.errors == [] and {r.split("#")[0] for r in browser.requests} == {page.resolve().as_uri()}


LEAVE = "(() => { const e = new Event('beforeunload', {cancelable: true}); dispatchEvent(e); return e.defaultPrevented; })()"


@pytest.mark.parametrize(
    "stored", ["not json", "{}", "[]", "5", '{"turns": [], "pairs": {}}', '{"turns": {}}']
)
def test_what_cannot_be_read_stays_and_the_form_works(browser: Browser, tmp_path: Path, stored: str) -> None:
    base, reat = [episode("base", 0)], [episode("reat", 0)]
    export_pairs(tmp_path, base, reat, [score(e) for e in base], [score(e) for e in reat])
    with before_the_page(browser, STORE % "{}"):
        browser.open(tmp_path / "form.html")
    key = browser.js("store")
    with before_the_page(browser, STORE % json.dumps({key: stored})):
        browser.open(tmp_path / "form.html")
    assert browser.js("document.getElementById('lost').hidden") is False
    browser.js("document.querySelector('input[placeholder=notes]').focus()")
    browser.type("typed, and the field not left")
    assert browser.js(LEAVE) is True and browser.js("localStorage.items") == {key: stored}
    assert json.loads(browser.js(SAVED))["turns"][0]["notes"] == "typed, and the field not left"
    assert browser.errors == []


def test_a_browser_that_keeps_nothing_says_so_and_still_saves(browser: Browser, tmp_path: Path) -> None:
    base, reat = [episode("base", 0)], [episode("reat", 0)]
    export_pairs(tmp_path, base, reat, [score(e) for e in base], [score(e) for e in reat])
    with before_the_page(browser, DENIED):
        browser.open(tmp_path / "form.html")
    assert browser.js("document.getElementById('lost').hidden") is False
    assert browser.js(LEAVE) is False
    browser.js(f"{CHOOSE}('focus', 1, '2')")
    assert browser.js(LEAVE) is True
    saved = json.loads(browser.js(SAVED))
    assert [t.get("focus") for t in saved["turns"]] == [None, "2", None, None]
    assert browser.js(LEAVE) is False and browser.errors == []

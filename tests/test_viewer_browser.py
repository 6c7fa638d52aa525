"""The transcript viewer and the report in a real headless Chromium: what a reader sees and does."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import Browser, find_chromium
from episodes import make_episode, write_record, write_run
from maieutic.dialogue import Turn
from maieutic.env.base import Episode
from maieutic.report import write_report, write_viewer
from maieutic.transcripts import TranscriptWriter

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        CHROMIUM is None,
        reason="NO BROWSER: the viewer is not tested; install Debian's chromium or set MAIEUTIC_CHROMIUM",
    ),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert CHROMIUM is not None
    browser = Browser(CHROMIUM, tmp_path_factory.mktemp("profile"))
    browser.size(1360, 860)
    browser.scheme("light")
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two arms on the same problems, and their viewer."""
    root = tmp_path_factory.mktemp("runs")
    dppo = write_run(root / "a", arm="dppo", problems=12, samples=2)
    grpo = write_run(root / "b", arm="grpo", problems=12, samples=2, lift=0.05)
    return {"page": write_viewer([root / "a", root / "b"], root / "view.html"), "dppo": dppo, "grpo": grpo}


@pytest.fixture
def page(browser: Browser, runs: dict[str, Any]) -> Iterator[Browser]:
    """The viewer freshly loaded; afterwards nothing may have failed or have been loaded but the file itself."""
    browser.size(1360, 860)
    browser.scheme("light")
    browser.open(runs["page"])
    yield browser
    assert browser.errors == []
    assert {r.split("#")[0] for r in browser.requests} == {runs["page"].resolve().as_uri()}


def rows(browser: Browser) -> list[str]:
    """Keys of the rows that exist in the list, top to bottom."""
    return browser.js("[...document.querySelectorAll('.item')].map((r) => r.dataset.key)")


def count(browser: Browser) -> int:
    """How many episodes the list says it shows."""
    return int(browser.js("document.getElementById('count').textContent").split()[0].replace(",", ""))


def fragment(browser: Browser) -> dict[str, str]:
    return dict(browser.js("[...new URLSearchParams(location.hash.slice(1))]"))


def selected(browser: Browser) -> str | None:
    return browser.js("document.querySelector('.episode')?.dataset.key ?? null")


def text(browser: Browser, selector: str) -> str:
    return browser.js(f"document.querySelector({json.dumps(selector)}).textContent")


def test_it_loads_from_the_disk(page: Browser, runs: dict[str, Any]) -> None:
    assert count(page) == len(runs["dppo"]) + len(runs["grpo"]) == 96
    assert "Choose an episode" in text(page, "#detail")
    rewards = [e.reward.reward for e in runs["dppo"] + runs["grpo"] if e.counted]
    mean = sum(rewards) / len(rewards)
    assert f"mean reward {'+' if mean > 0 else '−'}{abs(mean):.2f}" in text(page, "#count")


@pytest.mark.parametrize(
    ("control", "value", "keep"),
    [
        ("#arm", "grpo", lambda arm, e: arm == "grpo"),
        ("#step", "4", lambda arm, e: e.step == 4),
        ("#phase", "eval", lambda arm, e: True),
        ("#problem", "p-003", lambda arm, e: e.pair.id == "p-003"),
        ("#verdict", "leakage:reject", lambda arm, e: e.verdicts["leakage"].decision == "reject"),
        ("#verdict", "unknown", lambda arm, e: any(v.decision == "unknown" for v in e.verdicts.values())),
        ("#verdict", "ok", lambda arm, e: all(v.decision == "ok" for v in e.verdicts.values())),
        ("#excl", "excluded", lambda arm, e: e.exclusion is not None),
        ("#excl", "=unknown:correctness", lambda arm, e: e.exclusion == "unknown:correctness"),
        ("#excl", "counted", lambda arm, e: e.exclusion is None),
        ("#min", "0.2", lambda arm, e: e.reward is not None and e.reward.reward >= 0.2),
        ("#min", "-0.2", lambda arm, e: e.reward is not None and e.reward.reward >= -0.2),
        ("#max", "0", lambda arm, e: e.reward is not None and e.reward.reward <= 0),
    ],
)
def test_filters(page: Browser, runs: dict[str, Any], control: str, value: str, keep: Any) -> None:
    expected = [e for arm in ("dppo", "grpo") for e in runs[arm] if keep(arm, e)]
    assert expected, "the factory made no such episode"
    page.choose(control, value)
    assert count(page) == len(expected)
    assert fragment(page)[control[1:]] == value
    page.click("#clear")
    assert count(page) == 96 and fragment(page) == {}


def test_filters_together_and_none_left(page: Browser, runs: dict[str, Any]) -> None:
    page.choose("#arm", "dppo")
    page.choose("#step", "4")
    page.choose("#min", "0.3")
    found = [e for e in runs["dppo"] if e.step == 4 and e.reward and e.reward.reward >= 0.3]
    assert count(page) == len(found) > 0
    page.choose("#min", "1.5")
    assert count(page) == 0 and "No episode matches" in text(page, "#list")


def test_sort_by_reward_both_ways(page: Browser, runs: dict[str, Any]) -> None:
    page.choose("#arm", "dppo")
    page.choose("#sort", "reward")
    rewards = sorted(e.reward.reward for e in runs["dppo"] if e.reward)
    by_id = {e.id: e for e in runs["dppo"]}

    def first() -> list[float]:
        keys = [k.removeprefix("a/") for k in rows(page)][:5]
        return [by_id[k].reward.reward for k in keys]

    assert first() == rewards[:5]
    page.click("#dir")
    assert first() == rewards[::-1][:5]
    # Episodes without a reward stand last in both directions.
    page.js("document.getElementById('list').scrollTop = 1e9")
    page.until("document.querySelector('.item:last-child').getAttribute('aria-posinset') === '48'")
    assert by_id[rows(page)[-1].removeprefix("a/")].reward is None


def test_search_finds_words_of_turns_and_marks_them(page: Browser, runs: dict[str, Any]) -> None:
    page.key("/")
    page.type("WRITE THAT DOWN")
    leaks = [e for e in runs["dppo"] + runs["grpo"] if "write that down" in e.dialogue.turns[-1].visible]
    page.until(f"document.getElementById('count').textContent.startsWith('{len(leaks)} of')")
    page.key("Enter")
    assert text(page, "mark.hit") == "write that down"
    page.key("/")
    page.key("Escape")
    page.until("document.getElementById('q').value === ''")
    assert count(page) == 96


def test_an_episode_shows_the_record(page: Browser, runs: dict[str, Any]) -> None:
    episode = next(e for e in runs["dppo"] if e.verdicts["leakage"].decision == "reject" and e.reward)
    page.js(f"location.hash = '#episode=' + encodeURIComponent('a/{episode.id}')")
    page.until(f"document.querySelector('.episode')?.dataset.key === 'a/{episode.id}'")
    turns = page.js("[...document.querySelectorAll('.turn > .text')].map((t) => t.textContent)")
    assert turns == [t.visible for t in episode.dialogue.turns]
    assert text(page, "mark.quote") == episode.verdicts["leakage"].quote
    where = page.js("document.querySelector('mark.quote').closest('.turn').id")
    assert where == f"a-turn-{episode.verdicts['leakage'].turn}"
    grades = page.js("[...document.querySelectorAll('.grade')].map((g) => g.textContent)")
    assert grades == [{"right": "✓", "wrong": "✗", "no_answer": "∅"}[g] for g in episode.post_test.grades]
    page.click(".answer:nth-child(2) summary")
    page.until("document.querySelector('.answer:nth-child(2) .text')")
    assert text(page, ".answer:nth-child(2) .text") == episode.post_test.answers[1]
    assert text(page, ".title .reward") == "−0.20"
    assert str(episode.seed) in text(page, ".about")  # beyond 2**53, yet exact


def test_thinking_is_folded_until_asked_for(page: Browser) -> None:
    page.key("j")
    assert page.js("document.querySelectorAll('.thought').length") > 0
    assert page.js("document.querySelectorAll('.thought[open]').length") == 0
    assert page.js("document.querySelectorAll('.thought .text').length") == 0
    page.key("t")
    page.until("document.querySelector('.thought[open] .text')")
    assert text(page, ".thought .text") == "The student mixes up the groups.\nI should ask, not tell."
    page.key("t")
    assert page.js("document.querySelectorAll('.thought[open]').length") == 0


def test_compare_two_arms_on_one_problem(page: Browser) -> None:
    page.key("j")
    page.click("#compare")
    shown = page.js(
        "[...document.querySelectorAll('.episode')]"
        ".map((e) => [e.dataset.key, e.querySelector('.chip.arm').textContent])"
    )
    assert shown == [["a/eval-000000-p-000-0", "dppo"], ["b/eval-000000-p-000-0", "grpo"]]
    left, right = page.js(
        "[...document.querySelectorAll('.episode')].map((e) => e.getBoundingClientRect().x)"
    )
    assert left < right
    assert fragment(page)["with"] == "b/eval-000000-p-000-0"
    page.key("]")
    assert page.js("document.querySelectorAll('.episode')[1].querySelector('h2').textContent") == "p-000"
    assert fragment(page)["with"] != "b/eval-000000-p-000-0"
    page.key("j")
    assert fragment(page) == {"episode": "a/eval-000000-p-000-1", "with": "b/eval-000000-p-000-1"}
    assert page.js(
        "(() => { const ids = [...document.querySelectorAll('[id]')].map((n) => n.id); "
        "return new Set(ids).size === ids.length; })()"
    )
    page.key("Escape")
    assert page.js("document.querySelectorAll('.episode').length") == 1


def test_deep_link_restores_everything(browser: Browser, runs: dict[str, Any]) -> None:
    link = "episode=b%2Feval-000004-p-007-1&with=a%2Feval-000004-p-007-1&step=4&sort=reward&dir=desc&q=groups"
    browser.open(runs["page"], link)
    keys = browser.js("[...document.querySelectorAll('.episode')].map((e) => e.dataset.key)")
    assert keys == ["b/eval-000004-p-007-1", "a/eval-000004-p-007-1"]
    values = browser.js("['step','sort','q'].map((n) => document.getElementById(n).value)")
    assert values == ["4", "reward", "groups"] and text(browser, "#dir") == "↓"
    assert browser.js("document.querySelector('.item.selected') !== null")
    browser.open(runs["page"], "episode=nobody&step=nonsense&sort=nothing")
    assert "There is no episode nobody" in text(browser, "#detail") and count(browser) == 0
    assert browser.errors == []


def test_back_returns_to_the_episode_before(page: Browser) -> None:
    page.click(".item:nth-child(2)")
    page.click(".item:nth-child(4)")
    assert selected(page) == "a/eval-000000-p-001-1"
    page.js("history.back()")
    page.until("document.querySelector('.episode')?.dataset.key === 'a/eval-000000-p-000-1'")


def test_keyboard(page: Browser) -> None:
    for key, expected in [
        ("j", "p-000-0"),
        ("j", "p-000-1"),
        ("j", "p-001-0"),
        ("k", "p-000-1"),
        ("g", "p-000-0"),
    ]:
        page.key(key)
        assert selected(page) == f"a/eval-000000-{expected}"
    page.key("G")
    assert selected(page) == "b/eval-000004-p-011-1"
    page.key("j")
    assert selected(page) == "b/eval-000004-p-011-1"
    page.until("document.querySelector('.item.selected') !== null", "the list follows the selection")
    active = page.js("document.getElementById('list').getAttribute('aria-activedescendant')")
    assert page.js(f"document.getElementById('{active}').getAttribute('aria-selected')") == "true"
    page.key("Enter")
    assert page.js("document.activeElement.id") == "detail"
    page.key("?")
    assert page.js("document.getElementById('help').open") is True
    page.key("Escape")
    page.until("!document.getElementById('help').open")
    page.key("/")
    assert page.js("document.activeElement.id") == "q"
    page.type("j")
    assert page.js("document.getElementById('q').value") == "j"  # a letter in the box is text, not a command
    page.key("Escape")
    page.key("Escape")
    assert page.js("document.activeElement.id") == "list"


def test_every_control_has_a_name(page: Browser) -> None:
    page.key("j")
    page.key("c")
    nameless = page.js(
        "[...document.querySelectorAll('button, input, select, summary')].filter((n) => "
        "!n.textContent.trim() && !n.ariaLabel && !n.labels?.length).map((n) => n.outerHTML)"
    )
    assert nameless == []


def _contrast(a: list[float], b: list[float]) -> float:
    def light(rgb: list[float]) -> float:
        parts = [c / 255 for c in rgb]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    high, low = sorted([light(a), light(b)], reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast_in_both_schemes(page: Browser, scheme: str) -> None:
    page.scheme(scheme)
    colours = page.js(
        "(() => { const probe = document.createElement('i'); document.body.append(probe); const out = {};"
        "for (const n of ['bg','surface','raised','ink','soft','accent','accent-soft','tutor','student','thought',"
        "'good','good-soft','bad','bad-soft','warn','warn-soft','mark','hit']) { probe.style.color = `var(--${n})`;"
        "out[n] = getComputedStyle(probe).color.match(/[\\d.]+/g).slice(0, 3).map(Number); } probe.remove(); return out; })()"
    )
    page.scheme("light")
    pairs = [
        ("ink", b) for b in ("bg", "surface", "raised", "tutor", "student", "accent-soft", "mark", "hit")
    ]
    pairs += [("soft", b) for b in ("bg", "surface", "raised", "tutor", "student", "thought", "accent-soft")]
    pairs += [
        ("good", "good-soft"),
        ("bad", "bad-soft"),
        ("warn", "warn-soft"),
        ("accent", "surface"),
        ("accent", "accent-soft"),
    ]
    weak = {p: round(c, 2) for p in pairs if (c := _contrast(colours[p[0]], colours[p[1]])) < 4.5}
    assert weak == {}


def test_theme_follows_the_system_and_the_toggle(page: Browser) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    light = page.js(background)
    page.scheme("dark")
    dark = page.js(background)
    assert dark != light
    page.key("d")
    assert page.js(background) == light
    page.scheme("light")
    page.click("#theme")
    assert page.js(background) == dark


def test_narrow_screens_show_list_or_episode(page: Browser) -> None:
    page.size(390, 800)
    visible = "[document.querySelector('.side'), document.querySelector('.detail')].map((n) => n.offsetParent !== null)"
    page.until(f"{visible}.join() === 'true,false'")
    page.click(".item")
    page.until(f"{visible}.join() === 'false,true'")
    assert page.js("document.documentElement.scrollWidth <= 390")
    page.click(".back")
    page.until(f"{visible}.join() === 'true,false'")
    page.until("document.querySelectorAll('.item').length > 4")
    page.size(1360, 860)


MALICIOUS = (
    "</script ><!--<script ></script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "<!-- <b>bold</b> &lt; {{data}} \u202egnp.exe\u202c \u200bhidden\u200b "
    "עברית العربية 👩‍🚀 \\frac{1}{2} $x^2$ \x00\x1b[31m \ud800 \u2028"
)
SHOWN = (
    MALICIOUS.replace("\u202e", "U+202E").replace("\u202c", "U+202C").replace("\u200b", "U+200B")
    .replace("\x00", "U+0000").replace("\x1b", "U+001B").replace("\u2028", "U+2028")
)  # fmt: skip


def hostile() -> Episode:
    turns = [
        Turn("student", MALICIOUS, scripted=True),
        Turn("tutor", MALICIOUS, thinking=MALICIOUS, note=MALICIOUS),
        Turn("student", "x" * 1_000_000 + MALICIOUS),
        Turn("tutor", "The  Answer\nis\u200b 42 and <b>no</b> more"),
    ]
    episode = make_episode(turns=turns, leak=True, unknown=False)
    episode.id = "<img src=x onerror=document.title='owned'>&\"'"
    episode.exclusion = episode.error = MALICIOUS
    verdict = episode.verdicts["leakage"]
    episode.verdicts = {
        "leakage": type(verdict)("leakage", "reject", MALICIOUS, "the answer is 42", 3, MALICIOUS)
    }
    assert episode.post_test is not None
    episode.post_test.answers[0] = MALICIOUS
    return episode


def test_a_malicious_transcript_shows_as_text(browser: Browser, tmp_path: Path) -> None:
    name = "<script>x<img src=y onerror=z>&amp;\"'"
    TranscriptWriter(tmp_path / name, arm=MALICIOUS).write("eval", 0, [hostile()])
    page = write_viewer([tmp_path / name], tmp_path / "view.html")
    browser.open(page)
    browser.key("j")
    browser.key("t")
    browser.until("document.querySelector('.thought[open] .text')")
    shown = SHOWN.replace("\ud800", "\ufffd")  # DevTools cannot say a lone surrogate

    def well_formed(selector: str) -> str:
        return browser.js(f"document.querySelector({json.dumps(selector)}).textContent.toWellFormed()")

    assert well_formed("#a-turn-0 > .text") == well_formed("#a-turn-1 > .text") == shown
    assert well_formed(".thought .text") == well_formed(".note .text") == well_formed(".error .text") == shown
    # The long turn is laid out in part, and whole on demand.
    assert browser.js("document.querySelector('#a-turn-2 .text').textContent.length") == 20_000
    browser.click("#a-turn-2 .rest")
    utf16 = len(SHOWN.encode("utf-16-le", "surrogatepass")) // 2
    assert browser.js("document.querySelector('#a-turn-2 .text').textContent.length") == 1_000_000 + utf16
    # The quote is found across white space, case and invisible characters.
    marked = browser.js(
        "[...document.querySelectorAll('#a-turn-3 mark.quote')].map((m) => m.textContent).join('')"
    )
    assert marked == "The  Answer\nisU+200B 42"
    assert (
        browser.js(
            "document.querySelectorAll('#detail script, #detail img, #detail b b, #list img, .text b').length"
        )
        == 0
    )
    assert browser.js("document.title") == name
    assert browser.errors == []
    assert len(browser.requests) == 1


def test_a_foreign_inline_script_does_not_run(browser: Browser, runs: dict[str, Any], tmp_path: Path) -> None:
    page = tmp_path / "injected.html"
    html = runs["page"].read_text()
    bad = "<script>document.title='owned'</script><img src='http://127.0.0.1:9/x.png'>"
    page.write_text(html.replace("<noscript>", bad + "<noscript>"))
    browser.open(page)
    assert browser.js("document.title") == "a, b"
    assert sum("Content Security Policy" in e for e in browser.errors) == 2
    assert count(browser) == 96


def test_a_thousand_episodes(browser: Browser, tmp_path: Path) -> None:
    rng = random.Random(1)
    episodes = [make_episode(number=n % 50, index=n // 50, step=2) for n in range(1000)]
    TranscriptWriter(tmp_path / "run", arm="dppo").write("eval", 2, episodes)
    browser.open(write_viewer([tmp_path / "run"], tmp_path / "view.html"))
    assert count(browser) == 1000
    assert len(rows(browser)) < 40
    for _ in range(5):
        at = rng.randrange(1000)
        browser.js(f"document.getElementById('list').scrollTop = {at * 78}")
        browser.until(f"document.querySelector('[aria-posinset=\"{at + 1}\"]')")
        assert (
            browser.js(f"document.querySelector('[aria-posinset=\"{at + 1}\"]').dataset.key")
            == episodes[at].id
        )
        assert len(rows(browser)) < 40
    browser.key("G")
    assert selected(browser) == episodes[-1].id
    browser.choose("#sort", "reward")
    low = min(e.reward.reward for e in episodes if e.reward)
    browser.key("g")
    assert text(browser, ".title .reward") == f"−{abs(low):.2f}"


def test_an_empty_run(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    browser.open(write_viewer([tmp_path / "run"], tmp_path / "view.html"))
    assert count(browser) == 0 and "no transcripts yet" in text(browser, "#list")
    for key in ("j", "c", "Enter", "]", "Escape"):
        browser.key(key)
    assert browser.errors == []


def test_the_report_works_under_its_policy(browser: Browser, tmp_path: Path) -> None:
    write_run(tmp_path / "run", problems=4)
    write_record(tmp_path / "run")
    browser.open(write_report(tmp_path / "run"))
    assert browser.errors == [] and len(browser.requests) == 1
    assert browser.js("getComputedStyle(document.querySelector('.card')).borderRadius") == "12px"
    width, height = browser.js(
        "(() => { const r = document.querySelector('.plot').getBoundingClientRect(); "
        "return [r.width, r.height]; })()"
    )
    assert width > 250 and height > 100
    light = browser.js("getComputedStyle(document.querySelector('.plot .s2')).color")
    browser.scheme("dark")
    assert browser.js("getComputedStyle(document.querySelector('.plot .s2')).color") != light
    browser.scheme("light")
    assert browser.js("document.querySelector('#recipe details').open") is False
    browser.click("#recipe summary")
    assert browser.js("document.querySelector('#recipe pre').offsetHeight") > 50
    browser.size(390, 800)
    assert browser.js("document.documentElement.scrollWidth <= 390")
    browser.size(1360, 860)

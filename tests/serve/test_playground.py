"""The page at `/` in headless Chromium over a real server: the page shows what the API answers."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from browser_helpers import CHROMIUM, DRIVER, ENTER, ESCAPE, HOME, MISSING, SHIFT, TAB, Browser, chromium
from engine_helpers import NGRAM, make_engine, reluctant_engine, shared_engine, toy
from server_helpers import Running, running, slow_down, wait_until

from specjax.cli.flags import ServerSettings
from specjax.serve.errors import State
from specjax.serve.openai_answers import OpenAIAnswer

pytestmark = [pytest.mark.process, pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING)]

PHONE, DESK = (360, 740), (1280, 800)
ASKED = {"return_speculative_tokens": True, "return_speculative_metrics": True}
QUESTION = "the the the the"


@pytest.fixture(scope="module")
def server():
    with running(make_engine(toy(rows=5), NGRAM, trace=True, isolate_ngrams=True)) as served:
        yield served


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    with chromium(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def page(window: Browser, server: Running):
    """A new visit. At its end, checks that nothing was sent to another host, and that the console is empty, except for
    errors of the API, which Chromium lists there."""
    yield visit(window, server)
    asked = window.requests()
    assert f"{server.base}/get_server_info" in asked
    assert all(address.startswith((f"{server.base}/", "data:")) for address in asked)
    problems = [entry["message"] for entry in window.log("browser") if entry["source"] != "network"]
    assert problems == [], "errors, or violations of the page's policy"
    assert window.script("return document.cookie") == ""
    server.wait_idle()


def visit(browser: Browser, server: Running, size: tuple[int, int] = DESK, *, dark: bool = False) -> Browser:
    browser.look(*size, dark=dark)
    browser.open("about:blank")
    browser.requests(), browser.log("browser")
    browser.open(f"{server.base}/")
    browser.wait(lambda: browser.text("#server") != "Asking the server…")
    return browser


def fill(browser: Browser, **values: Any) -> None:
    """Sets inputs by their ids, as typing does."""
    browser.script(
        """for (const [id, value] of Object.entries(arguments[0])) {
            const input = document.getElementById(id);
            input.value = value;
            for (const kind of ["input", "change"]) input.dispatchEvent(new Event(kind, {bubbles: true}));
        }""",
        values,
    )


def say(browser: Browser, text: str) -> None:
    """Types a message and Enter; the focus is in the message's field."""
    assert browser.script("return document.activeElement.id") == "prompt"
    browser.press(text, ENTER)


def answered(browser: Browser, count: int = 1) -> None:
    """Waits for this number of answers or errors."""
    ended = "return document.querySelectorAll('article.assistant footer span, .error').length"
    browser.wait(lambda: browser.script(ended) >= count and not running_now(browser))


def running_now(browser: Browser) -> bool:
    return browser.script("return !document.getElementById('stop').disabled")


def spans(browser: Browser) -> list[tuple[str, bool]]:
    """The tokens of the last answer, and whether they are marked as drafted."""
    tokens = browser.script(
        """const last = [...document.querySelectorAll("article.assistant")].at(-1);
        return [...last.querySelectorAll(":scope > div > span")].map((e) => [e.textContent, e.className]);"""
    )
    assert {kind for _, kind in tokens} <= {"drafted", "own"}
    return [(text, kind == "drafted") for text, kind in tokens]


def expected(server: Running, turns: list[str], **fields: Any) -> tuple[str, list[tuple[str, bool]], dict[str, Any]]:
    """Text, tokens and metrics of the API's answer to a conversation. `turns` begin with the user's."""
    roles = itertools.cycle(("user", "assistant"))
    messages = [{"role": role, "content": content} for role, content in zip(roles, turns, strict=False)]
    if system := fields.pop("system", None):
        messages.insert(0, {"role": "system", "content": system})
    answer = server.post("/v1/chat/completions", {"messages": messages} | fields | ASKED).json()
    (choice,) = answer["choices"]
    tokens = [(token["text"], token["drafted"]) for token in choice["speculative"]["tokens"]]
    return choice["message"]["content"], tokens, answer["metadata"]["speculative"]


def test_conversation_by_keyboard(page: Browser, server: Running):
    fields = {"temperature": 0, "max_tokens": 40, "seed": 5}
    fill(page, temperature=0, most=40, seed=5)
    say(page, QUESTION)
    answered(page)
    text, tokens, metrics = expected(server, [QUESTION], **fields)
    assert spans(page) == tokens and any(drafted for _, drafted in tokens)
    assert page.text("article.user > div") == QUESTION and page.text("article.assistant > div") == text
    bins = metrics["spec_accept_histogram"]
    assert float(page.text("#length")) == round(metrics["spec_accept_length"], 2)
    assert int(page.text("#steps")) == metrics["spec_verify_ct"] and int(page.text("#tokens")) == len(tokens)
    rows = page.texts("#histogram tbody tr")
    assert rows == [f"{drafts}{count}" for drafts, count in enumerate(bins)][: len(rows)] and not any(bins[len(rows) :])
    assert float(page.text("#rate")) > 0
    assert "seed 5" in page.text("article.assistant footer") and "length" in page.text("article.assistant footer")

    page.press("b")
    page.chord(SHIFT, ENTER)
    say(page, "c")
    answered(page, 2)
    turns = [QUESTION, text, "b\nc"]
    text, tokens, _ = expected(server, turns, **fields)
    assert spans(page) == tokens, "the request has the whole conversation"
    page.click("#again")
    answered(page, 2)
    assert spans(page) == tokens and len(page.texts("article")) == 4, "the same seed, the same text"
    page.click("#marked")
    assert page.script("return !document.querySelector('.origins')")
    assert page.texts("article.user > div") == [QUESTION, "b\nc"]
    page.click("#clear")
    assert page.texts("article") == [] and page.text("#tokens") == "0"


def test_draft_limit_of_0(page: Browser, server: Running):
    fill(page, temperature=0, most=40, system="be brief")
    page.script("document.getElementById('limit').focus()")
    assert page.text("#limit-shown") == "all 3"
    page.press(HOME)
    assert page.text("#limit-shown") == "none"
    page.script("document.getElementById('prompt').focus()")
    say(page, QUESTION)
    answered(page)
    text, _, _ = expected(server, [QUESTION], temperature=0, max_tokens=40, system="be brief")
    tokens = spans(page)
    assert "".join(token for token, _ in tokens) == text and not any(drafted for _, drafted in tokens)
    assert page.text("#length") == "1.00" and "draft_limit: 0" in page.text(".why")
    assert page.script("return document.getElementById('always').disabled"), "it would contradict the limit"


def test_reason_for_no_drafts_and_always_draft(window: Browser):
    with running(reluctant_engine(toy(rows=5), NGRAM, isolate_ngrams=True)) as served:
        visit(window, served)
        fill(window, temperature=0, most=40)
        window.script("document.getElementById('prompt').focus()")
        say(window, QUESTION)
        answered(window)
        plain = spans(window)
        assert window.text("#length") == "1.00" and not any(drafted for _, drafted in plain)
        reason = served.chat(QUESTION, temperature=0, max_tokens=40, **ASKED).json()["metadata"]["speculative"]
        assert window.texts(".why") == [f"Not drafted: {reason['not_drafted']}."]
        assert "faster by measurement" in window.text(".why")
        window.click("#always")
        window.click("#again")
        window.wait(lambda: any(drafted for _, drafted in spans(window)))
        answered(window)
        assert "".join(text for text, _ in spans(window)) == "".join(text for text, _ in plain)
        assert float(window.text("#length")) > 1 and window.texts(".why") == []
        window.click("#always")
        window.click("#again")
        window.wait(lambda: window.texts(".why"))
        assert spans(window) == plain, "the switch applies to one request"


def test_default_number_of_tokens(page: Browser, server: Running):
    assert page.script("return document.getElementById('most').value") == "512"
    page.script(
        """window.asked = [];
        const real = window.fetch;
        window.fetch = (path, options) => {
            window.asked.push(JSON.parse(options.body).max_tokens ?? null);
            return real(path, options);
        };"""
    )
    fill(page, temperature=0)
    say(page, QUESTION)
    answered(page)
    assert server.engine.context_length < 512 and page.script("return window.asked") == [512, None]
    assert page.texts(".error") == [] and "ended by length" in page.text("article.assistant footer")
    page.click("#clear")
    fill(page, most=3)
    say(page, "a")
    answered(page)
    assert page.script("return window.asked") == [512, None, 3] and len(spans(page)) == 3
    say(page, "too long " * 100)
    page.wait(lambda: page.texts(".error"))
    assert "the context" in page.text(".error")


EXPLAINED = {
    "length": "on average",
    "rate": "measured in this browser",
    "steps": "Passes of the model",
    "draft": "the drafter has proposed",
    "own": "the model drew itself",
    "limit": "at 0 nothing is drafted",
    "always": "without drafts to be faster",
    "temperature": "the likeliest one",
    "most": "as many as fit",
    "seed": "The same seed",
}


def tips(browser: Browser) -> list[str]:
    return browser.script(
        """const shown = [...document.querySelectorAll(".tip")].filter((tip) => tip.checkVisibility());
        for (const tip of shown) {
            const {left, top, right, bottom} = tip.getBoundingClientRect();
            if (left < 0 || top < 0 || right > innerWidth || bottom > innerHeight) throw new Error(tip.id);
        }
        return shown.map((tip) => tip.textContent);"""
    )


@pytest.mark.parametrize("size", [PHONE, DESK], ids=["phone", "desk"])
def test_explanations_by_pointer_and_keyboard(window: Browser, server: Running, size):
    visit(window, server, size)
    window.script("document.getElementById('settings').open = true")
    names = window.script("return [...document.querySelectorAll('[data-tip]')].map((e) => e.dataset.tip)")
    assert sorted(names) == sorted(f"{name}-tip" for name in EXPLAINED)
    for name, words in EXPLAINED.items():
        window.hover(f"[data-tip={name}-tip]")
        window.wait(lambda words=words: len(shown := tips(window)) == 1 and words in shown[0])
        window.press(ESCAPE)
        assert tips(window) == []
    window.hover("h1")
    window.script("document.querySelector('#settings > summary').focus()")
    seen = {}
    for _ in range(30):
        window.press(TAB)
        if shown := tips(window):
            tip = window.script("return document.activeElement.getAttribute('aria-describedby')")
            (seen[tip],) = shown
            assert window.text(f"#{tip}") == shown[0]
    assert sorted(seen) == sorted(names)
    assert all(EXPLAINED[tip.removesuffix("-tip")] in text for tip, text in seen.items())
    window.script("document.getElementById('prompt').focus()")
    assert tips(window) == []


@pytest.mark.parametrize("way", ["escape", "button"])
def test_stopping_ends_the_request(page: Browser, server: Running, monkeypatch, way):
    slow_down(server.engine, monkeypatch, 0.05)
    say(page, "hello")
    page.wait(lambda: len(spans(page)) > 2)
    assert server.runner.unfinished == 1 and int(page.text("#tokens")) > 2, "the counter is live"
    if way == "escape":
        page.script("document.getElementById('always').focus()")
        assert len(tips(page)) == 1
        page.press(ESCAPE)
        assert tips(page) == [] and running_now(page), "the first Escape closes an explanation"
        page.press(ESCAPE)
    else:
        page.click("#stop")
    wait_until(lambda: not server.runner.unfinished)
    answered(page)
    assert "stopped" in page.text("article.assistant footer") and page.texts(".error") == []
    assert page.script("return document.activeElement.id") == ("always" if way == "escape" else "prompt")
    assert 2 < len(spans(page)) < 60, "the tokens so far stay"


def test_errors_keep_the_message(page: Browser, server: Running):
    fill(page, temperature=99999)
    say(page, "precious words")
    answered(page)
    asked = {"messages": [{"role": "user", "content": "x"}], "temperature": 99999}
    message = server.post("/v1/chat/completions", asked).json()["error"]["message"]
    assert page.text(".error") == f"400: {message}"
    assert page.script("return document.getElementById('prompt').value") == "precious words"
    assert page.texts("article.user") == []
    fill(page, temperature=0, most=5)
    page.press(ENTER)
    answered(page)
    assert page.texts(".error") == [] and page.texts("article.user > div") == ["precious words"]
    first = spans(page)
    fill(page, temperature=99999)
    page.click("#again")
    page.wait(lambda: page.texts(".error"))
    assert spans(page) == first and len(page.texts("article.assistant")) == 1, "the earlier answer stays"

    fill(page, temperature=0)
    server.runner.drain()
    page.click("#again")
    page.wait(lambda: page.texts(".error") and "503" in page.text(".error"))
    assert page.text(".error").endswith("(try again in 30 s)")
    server.runner._state = State.READY


def test_broken_stream(page: Browser, server: Running, monkeypatch):
    fill(page, temperature=0, most=8)
    monkeypatch.setattr(OpenAIAnswer, "last_events", lambda self: [])
    say(page, "hello")
    answered(page)
    assert "broke" in page.text(".error") and len(spans(page)) == 8, "the tokens so far stay"
    monkeypatch.undo()
    slow_down(server.engine, monkeypatch, 0.05)
    fill(page, most="")
    page.click("#again")
    page.wait(lambda: len(spans(page)) > 1 and server.runner.unfinished)
    server.post("/abort_request", {"abort_all": True})
    page.wait(lambda: page.texts(".error") and "aborted" in page.text(".error"))
    assert len(page.texts("article.assistant")) == 1


def test_api_key(window: Browser):
    settings = ServerSettings(api_key=("open-sesame",))
    with running(shared_engine("NONE"), settings) as locked:
        visit(window, locked)
        assert window.text("#server").startswith("401: this server needs its API key")
        window.wait(lambda: window.script("return document.activeElement.id") == "key")
        window.press("open-sesame", TAB)
        window.wait(lambda: window.text("#server").startswith("toy"))
        fill(window, temperature=0, most=4)
        window.script("document.getElementById('prompt').focus()")
        say(window, "hello")
        answered(window)
        assert len(spans(window)) == 4
        assert window.script("return document.getElementById('always').disabled")
        assert window.texts(".why") == ["Not drafted: there is no drafter (the speculative algorithm is NONE)."]
        assert window.texts("article.assistant footer button") == [], "this server keeps no trees"
        assert window.script("return localStorage.length + document.cookie.length") == 0
        window.script("sessionStorage.clear()")


def test_tree_of_the_last_step(page: Browser, server: Running):
    fill(page, temperature=0, most=30)
    say(page, QUESTION)
    answered(page)
    body = {"messages": [{"role": "user", "content": QUESTION}], "temperature": 0, "max_tokens": 30}
    asked = body | ASKED | {"return_speculative_tree": True}
    tree = server.post("/v1/chat/completions", asked).json()["choices"][0]["speculative"]["tree"]
    nodes, emitted = tree["nodes"], tree["emitted"]
    page.click("article.assistant footer button")
    assert page.script("return document.getElementById('tree').open")

    def shown(node: dict[str, Any]) -> str:
        return node["text"].replace(" ", "␣")

    path = [node for node in nodes if node["accepted"]]
    assert page.texts("#nodes .node.root") == [shown(nodes[0])]
    assert page.texts("#nodes .node.drafted") == [shown(node) for node in path[1:]]
    drawn = [shown(path[-1]["drawn"])] if emitted == len(path) else []
    assert page.texts("#nodes .node.drawn") == drawn
    assert len(page.texts("#nodes .node")) == len(nodes) + len(drawn)
    assert len([text for text in page.texts("#nodes li") if "after the end" in text]) <= max(len(path) - emitted, 0)
    page.press(ESCAPE)
    assert not page.script("return document.getElementById('tree').open")


def answer_with(browser: Browser, *answers: tuple[int, dict[str, str], str]) -> None:
    """The page's next requests get these answers (status, headers, body); later requests reach the server."""
    browser.script(
        """const [answers, real] = [arguments[0], window.fetch];
        window.fetch = async (...given) => {
            const [status, headers, body] = answers.shift();
            if (!answers.length) window.fetch = real;
            return new Response(body, {status, headers});
        };""",
        [*answers],
    )


def test_texts_are_not_markup(page: Browser):
    """Also an answer that has only thoughts."""
    evil = "<img src=x onerror=alert(1)><b id=evil>"
    tokens = [{"text": evil, "drafted": False}, {"text": "hm", "drafted": True}, {"text": "\n", "drafted": False}]
    delta = {"delta": {"reasoning_content": "hm"}, "finish_reason": None, "speculative": {"tokens": tokens}}
    choices = ({"index": 0, **delta}, {"index": 0, "delta": {}, "finish_reason": "stop", "seed": 4})
    body = "".join(f"data: {json.dumps({'choices': [choice]})}\n\n" for choice in choices) + "data: [DONE]\n\n"
    answer_with(page, (200, {"Content-Type": "text/event-stream"}, body))
    say(page, evil)
    answered(page)
    assert spans(page) == [(evil, False), ("hm", True), ("\n", False)]
    assert page.texts("article.user > div") == [evil] and page.texts("#evil, article img") == []
    assert page.script("return document.getElementById('prompt').value") == ""


def test_loading_server_is_asked_again(page: Browser):
    problem = json.dumps({"error": {"message": "the model is loading"}})
    answer_with(page, *[(503, {"Retry-After": "0.2"}, problem)] * 2)
    fill(page, key="")
    page.wait(lambda: page.text("#server") == "503: the model is loading (try again in 0.2 s)")
    page.wait(lambda: page.text("#server").startswith("toy"))
    answer_with(page, (502, {}, "<html>a proxy's page</html>"))
    say(page, "hello")
    answered(page)
    assert page.text(".error").startswith("502")


CONTRAST = """
const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
function colour(text) {
  canvas.clearRect(0, 0, 1, 1);
  canvas.fillStyle = text;
  canvas.fillRect(0, 0, 1, 1);
  return canvas.getImageData(0, 0, 1, 1).data;
}
function light([r, g, b]) {
  const part = (v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  return 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
}
function behind(element) {
  for (let each = element; each; each = each.parentElement) {
    const found = colour(getComputedStyle(each).backgroundColor);
    if (found[3] === 255) return found;
  }
  return colour("white");
}
const low = [];
let count = 0;
for (const element of document.querySelectorAll("body *")) {
  const own = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
  if (!own || element.disabled || !element.checkVisibility()) continue;
  const [a, b] = [light(colour(getComputedStyle(element).color)), light(behind(element))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  count += 1;
  if (ratio < 4.5) low.push([element.tagName, element.className, element.textContent.slice(0, 30), ratio]);
}
return [count, low, light(behind(document.body))];
"""


@pytest.mark.parametrize(("size", "dark"), [(PHONE, True), (PHONE, False), (DESK, True)])
def test_layout_and_contrast(window: Browser, server: Running, size, dark, tmp_path):
    visit(window, server, size, dark=dark)
    fill(window, temperature=0, most=40)
    say(window, "W" * 60)
    answered(window)
    fill(window, temperature=99999)
    say(window, "hello")
    window.wait(lambda: window.texts(".error"))
    window.script("for (const each of document.querySelectorAll('details')) each.open = true")
    for step in ("page", "tree"):
        if step == "tree":
            window.click("article.assistant footer button")
        wide, inside = window.script("return [document.documentElement.scrollWidth, innerWidth]")
        assert wide <= inside == size[0], step
        assert window.script(
            """return [...document.querySelectorAll("aside, #log, #live, #composer, dialog")]
                .filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.id || e.tagName)"""
        ) == [], "parts that scroll sideways"  # fmt: skip
        count, low, background = window.script(CONTRAST)
        assert count > 40 and low == []
        assert background < 0.05 if dark else background > 0.8
        window.picture(tmp_path / f"{step}.png")
    window.press(ESCAPE)


def test_controls_have_names_and_a_tab_order(page: Browser):
    unnamed = page.script(
        """return [...document.querySelectorAll("input, textarea, button, summary")]
            .filter((e) => !(e.labels?.length || e.textContent.trim())).map((e) => e.outerHTML)"""
    )
    assert unnamed == []
    page.script("for (const each of document.querySelectorAll('details')) each.open = true")
    reached = set()
    for _ in range(40):
        page.press(TAB)
        reached.add(page.script("return document.activeElement.id || document.activeElement.tagName"))
        outline = "const e = document.activeElement; return e === document.body || getComputedStyle(e).outlineStyle"
        assert page.script(outline) not in ("none", False)
    controls = "prompt send clear system temperature most seed limit key marked always log"
    assert reached >= set(controls.split())
    assert page.script("return document.getElementById('log').getAttribute('aria-live')") == "polite"

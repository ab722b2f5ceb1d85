"""The page at `/` in headless Chromium over a real server: the page shows what the API answers."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from engine_helpers import NGRAM, make_engine, shared_engine, toy
from server_helpers import Running, free_port, running, slow_down, wait_until

from specjax.cli.flags import ServerSettings
from specjax.serve.errors import State

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = "Debian's packages chromium and chromium-driver are not installed"

ENTER, TAB, SHIFT = "\ue007", "\ue004", "\ue008"  # WebDriver's keys
SECONDS = 60.0
"""Time limit of every wait in seconds."""

# Without these flags Chromium connects to its vendor's hosts. Its sandbox does not work for root.
FLAGS = (
    "--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--window-size=1280,800",
)  # fmt: skip


class Browser:
    """One window. CSS selectors name elements."""

    def __init__(self, client: httpx.Client, session: str) -> None:
        self._client, self._session = client, session

    def call(self, method: str, path: str, body: Any = None) -> Any:
        answer = self._client.request(method, f"/session/{self._session}{path}", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["value"]

    def open(self, url: str) -> None:
        self.call("POST", "/url", {"url": url})

    def script(self, code: str, *arguments: Any) -> Any:
        """Runs the body of a function in the page, and returns its result."""
        return self.call("POST", "/execute/sync", {"script": code, "args": [*arguments]})

    def press(self, *keys: str) -> None:
        """Types keys one after another into the focused element."""
        actions = [
            {"type": kind, "value": key} for text in keys for key in text for kind in ("keyDown", "keyUp")
        ]  # fmt: skip
        self._keys(actions)

    def chord(self, *keys: str) -> None:
        """Presses keys together."""
        down = [{"type": "keyDown", "value": key} for key in keys]
        self._keys(down + [{"type": "keyUp", "value": key} for key in reversed(keys)])

    def _keys(self, actions: list[dict[str, str]]) -> None:
        self.call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def click(self, selector: str) -> None:
        element = self.call("POST", "/element", {"using": "css selector", "value": selector})
        self.call("POST", f"/element/{next(iter(element.values()))}/click", {})

    def texts(self, selector: str) -> list[str]:
        return self.script("return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent)", selector)

    def text(self, selector: str) -> str:
        (text,) = self.texts(selector)
        return text

    def log(self, kind: str) -> list[Any]:
        """Entries since the last call: `browser` is the console, `performance` the events of DevTools."""
        return self.call("POST", "/se/log", {"type": kind})

    def requests(self) -> list[str]:
        """Requested addresses since the last call."""
        messages = (json.loads(entry["message"])["message"] for entry in self.log("performance"))
        sent = (message["params"] for message in messages if message["method"] == "Network.requestWillBeSent")
        return [params["request"]["url"] for params in sent]

    def wait(self, condition: Callable[[], Any]) -> None:
        try:
            wait_until(condition, SECONDS)
        except AssertionError as error:
            raise AssertionError(self.script("return document.body.innerText")) from error


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Browser]:
    """A new browser with an empty profile."""
    assert CHROMIUM and DRIVER, MISSING
    port = free_port()
    with open(profile / "driver.log", "wb") as log:
        process = subprocess.Popen([DRIVER, f"--port={port}"], stdout=log, stderr=log)
        try:
            with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SECONDS, trust_env=False) as client:
                wait_until(lambda: _is_ready(client), SECONDS)
                yield from _session(client, profile)
        finally:
            process.terminate()
            process.wait(SECONDS)


def _is_ready(client: httpx.Client) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return client.get("/status").json()["value"]["ready"]
    return False


def _session(client: httpx.Client, profile: Path) -> Iterator[Browser]:
    root = ["--no-sandbox"] if os.geteuid() == 0 else []
    arguments = [*FLAGS, *root, f"--user-data-dir={profile / 'profile'}"]
    wanted = {
        "goog:chromeOptions": {"binary": CHROMIUM, "args": arguments},
        "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
    }
    answer = client.post("/session", json={"capabilities": {"alwaysMatch": wanted}})
    assert answer.status_code == 200, answer.text
    browser = Browser(client, answer.json()["value"]["sessionId"])
    try:
        yield browser
    finally:
        browser.call("DELETE", "")


pytestmark = [pytest.mark.process, pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING)]

ASKED = {"return_speculative_tokens": True, "return_speculative_metrics": True}
QUESTION = "the the the the"


@pytest.fixture(scope="module")
def server():
    with running(make_engine(toy(rows=5), NGRAM, isolate_ngrams=True)) as served:
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


def visit(browser: Browser, server: Running) -> Browser:
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
    return choice["message"]["content"], tokens, answer["speculative"]


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
    entries = "return performance.getEntriesByType('resource').filter((e) => e.name.endsWith('get_server_info')).length"
    page.wait(lambda: page.script(entries) == 1 + 3)  # one at the start, one after each answer
    assert page.script("return document.getElementById('sizes').hidden"), "each step has the same size"
    page.click("#marked")
    assert page.script("return !document.querySelector('.origins')")
    assert page.texts("article.user > div") == [QUESTION, "b\nc"]
    page.click("#clear")
    assert page.texts("article") == [] and page.text("#tokens") == "0"


def test_stopping_ends_the_request(page: Browser, server: Running, monkeypatch):
    slow_down(server.engine, monkeypatch, 0.05)
    say(page, "hello")
    page.wait(lambda: len(spans(page)) > 2)
    assert server.runner.unfinished == 1 and int(page.text("#tokens")) > 2, "the counter is live"
    page.click("#stop")
    wait_until(lambda: not server.runner.unfinished)
    answered(page)
    assert "stopped" in page.text("article.assistant footer") and page.texts(".error") == []
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
        assert window.script("return localStorage.length + document.cookie.length") == 0
        window.script("sessionStorage.clear()")


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


def test_sizes_of_trees(page: Browser):
    stream = {"Content-Type": "text/event-stream"}
    plain = {"batch": 1, "nodes": 1, "seconds": 0.0039, "measured": True, "tokens": 1.0, "steps": 20, "using": False}
    tree = plain | {"nodes": 2, "seconds": 0.0051234, "measured": False, "tokens": 1.581, "steps": 60, "using": True}
    other = plain | {"batch": 4, "seconds": None, "measured": False}

    def shown(*replicas: list[dict[str, Any]]) -> list[str]:
        """The rows after an answer, if the replicas have these sizes; without any, the table must be hidden."""
        info = {"internal_states": [{"speculative_sizes": sizes} for sizes in replicas]}
        answer_with(page, (200, stream, "data: [DONE]\n\n"), (200, {}, json.dumps(info)))
        say(page, "hello")
        page.wait(lambda: page.script("return document.getElementById('sizes').hidden") == (not any(replicas)))
        cells = "(row) => [...row.cells].map((cell) => cell.textContent).join()"
        return page.script(f"return [...document.querySelectorAll('#sizes tr')].map({cells})")

    head, first, second = shown([plain, tree])
    assert (head, first, second) == ("nodes,ms,tokens,steps", "1,3.90,1.00,25%", "2 ✓,≈5.12,1.58,75%")
    assert page.texts("#sizes tr.using th[scope=row]") == ["2 ✓"]
    shown([])
    assert shown([plain, other], [tree]) == [
        "replica,batch,nodes,ms,tokens,steps", "0,1,1,3.90,1.00,20%", "0,4,1,–,1.00,20%",
        "1,1,2 ✓,≈5.12,1.58,60%",
    ]  # fmt: skip

"""Headless Chromium over the WebDriver protocol, without a package from PyPI."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
from server_helpers import free_port, wait_until

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

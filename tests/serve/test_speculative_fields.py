"""Request fields about drafting (limits, origins of tokens), and the playground page."""

from __future__ import annotations

import itertools
import re
from typing import Any

import openai
import pytest
from body_helpers import CHAT, GENERATE, HELLO
from engine_helpers import NGRAM, make_engine, shared_engine, toy
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from server_helpers import Running, running

from specjax.cli.flags import ServerSettings
from specjax.engine import SamplingParams
from specjax.serve import control
from specjax.state import NO_DRAFT_LIMIT

LOOPING = toy(rows=5)  # its texts repeat, so drafts are accepted
ASKED = {"return_speculative_tokens": True, "return_speculative_metrics": True}
REQUESTS: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 1, "seed": 4, "max_tokens": 60},
    "stop": {"temperature": 0, "max_tokens": 60, "stop": ["e", "qqqq"]},
    "choices": {"temperature": 1, "seed": 1, "max_tokens": 20, "n": 2},
    "logprobs": {"temperature": 0, "max_tokens": 20, "logprobs": True},
}


@pytest.fixture(scope="module")
def server():
    """Isolated n-grams: equal requests get equal drafts."""
    with running(make_engine(LOOPING, NGRAM, isolate_ngrams=True)) as served:
        yield served


def histogram(drafted: list[bool], bins: int) -> list[int]:
    """Steps by accepted drafts. A token that was not drafted ends a step; prefill draws the first token."""
    counts, run = [0] * bins, 0
    for is_draft in drafted[1:]:
        if not is_draft:
            counts[run] += 1
        run = run + 1 if is_draft else 0
    assert run == 0 and not any(drafted[:1]), "every step ends with a draw of the target"
    return counts


# Origins of tokens.


@pytest.mark.parametrize("name", REQUESTS)
def test_origins_of_tokens(server: Running, name):
    """The texts of an event's tokens are its delta; a stream has the tokens of the whole answer."""
    body = REQUESTS[name] | ASKED
    answer = server.chat("the the the the", **body).json()
    counts = [0] * len(bins := answer["speculative"]["spec_accept_histogram"])
    for choice in answer["choices"]:
        tokens = choice["speculative"]["tokens"]
        assert "".join(token["text"] for token in tokens) == choice["message"]["content"]
        own = histogram([token["drafted"] for token in tokens], len(bins))
        counts = [a + b for a, b in zip(counts, own, strict=True)]
        if choice["logprobs"]:
            assert [entry["token"] for entry in choice["logprobs"]["content"]] == [token["text"] for token in tokens]
    assert counts == bins
    tokens = [choice["speculative"]["tokens"] for choice in answer["choices"]]
    assert sum(map(len, tokens)) == answer["usage"]["completion_tokens"]
    plain = server.chat("the the the the", **REQUESTS[name]).json()
    for asked, unasked in zip(answer["choices"], plain["choices"], strict=True):
        assert asked["message"] == unasked["message"] and "speculative" not in unasked

    streamed: list[list[Any]] = [[] for _ in tokens]
    stream = {"messages": [HELLO[0] | {"content": "the the the the"}], "stream_options": {"include_usage": True}}
    for event in server.events(CHAT, stream | body):
        for choice in event["choices"]:
            new = choice.get("speculative", {}).get("tokens", [])
            assert "".join(token["text"] for token in new) == choice["delta"].get("content", "")
            streamed[choice["index"]] += new
            if "speculative" in event:
                bins = event["speculative"]["spec_accept_histogram"]
                assert histogram([token["drafted"] for token in streamed[choice["index"]]], len(bins)) == bins
    # Drafts of another run may differ, where entries of the n-gram table are shared.
    texts = [[(token["token"], token["text"]) for token in run] for run in (*tokens, *streamed)]
    assert texts[: len(tokens)] == texts[len(tokens) :]


@pytest.mark.parametrize("stream", [False, True])
def test_openais_sdk_reads_the_fields(server: Running, stream):
    """Without a warning, which would be an error here, about fields of another type than OpenAI's."""
    chat = openai.OpenAI(base_url=f"{server.base}/v1", api_key="none").chat.completions
    answer: Any = chat.create(
        model="default",
        messages=[{"role": "user", "content": "the the"}],
        max_tokens=8,
        extra_body=ASKED,
        stream=stream,
    )
    bodies = [event.to_dict() for event in answer] if stream else [answer.to_dict()]
    tokens = [
        choice["speculative"]["tokens"] for body in bodies for choice in body["choices"] if "speculative" in choice
    ]
    assert bodies[-1]["speculative"]["spec_verify_ct"] > 0 and any(tokens)
    for body in bodies:
        kind = ChatCompletionChunk if stream else ChatCompletion
        kind.model_validate(body)


def test_origins_of_completions_and_draft_limit_of_generate(server: Running):
    answer = server.complete("the the the", max_tokens=30, temperature=0, echo=True, **ASKED).json()
    (choice,) = answer["choices"]
    tokens = choice["speculative"]["tokens"]
    assert choice["text"] == "the the the" + "".join(token["text"] for token in tokens)
    assert any(token["drafted"] for token in tokens)
    body = {"text": "the the the the", "sampling_params": {"temperature": 0, "max_new_tokens": 40}}
    free = server.post(GENERATE, body).json()["meta_info"]
    body["sampling_params"]["draft_limit"] = 0
    none = server.post(GENERATE, body).json()["meta_info"]
    assert none["spec_accept_length"] == 1 < free["spec_accept_length"]


def test_origins_of_retracted_requests():
    engine = make_engine(LOOPING, NGRAM, retract_every=3)
    params = [SamplingParams(max_new_tokens=40, origins=True, temperature=float(i), seed=i) for i in range(2)]
    for done in engine.generate([[70, 71, 72] * 4, "the the the"], params):
        assert done.origins is not None and [one.token for one in done.origins] == done.output_ids
        assert "".join(one.text for one in done.origins) == done.text
        bins = done.spec_accept_histogram
        assert histogram([one.drafted for one in done.origins], len(bins)) == bins
    assert engine.scheduler.retractions > 3


# Limits of drafts.


def test_draft_limits_in_an_answer(server: Running):
    """test_lossless.py compares their texts."""

    def bins(limit: int | None) -> list[int]:
        """Accepted drafts, with an empty n-gram table and a fixed salt, so that equal requests get equal drafts."""
        salts = server.engine.intake.salts
        salts._key, salts._numbers = bytes(16), itertools.count()
        assert server.engine.flush_cache()
        answer = server.chat("the the the the", max_tokens=60, temperature=0, draft_limit=limit, **ASKED).json()
        return answer["speculative"]["spec_accept_histogram"]

    assert server.engine.drafter.width == 4
    assert bins(None) == bins(3) == bins(NO_DRAFT_LIMIT) and any(bins(None)[2:])
    for limit in range(3):
        assert not any(bins(limit)[limit + 1 :])


# The page; test_playground.py opens it in a browser.


def test_page_without_key_and_its_policy():
    with running(shared_engine("NGRAM"), ServerSettings(api_key=("secret-key",))) as server, server.client() as client:
        answer = client.get("/")
        assert answer.status_code == 200 and answer.headers["content-type"] == "text/html; charset=utf-8"
        assert client.post("/").status_code == 405
        assert client.get("/get_server_info").status_code == 401
        server.runner.drain()
        assert client.get("/").status_code == 200, "the page shows the state of the server"
        server.runner._state = type(server.runner.state).READY
    assert "set-cookie" not in answer.headers and "secret-key" not in answer.text
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    text = control.PLAYGROUND.read_text(encoding="utf-8")
    assert set(re.findall(r"https?://[^'\" ]+", text)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|localStorage|cookie", text)
    assert not re.search(r"<(?:script|style|link|img|iframe)\s[^>]*(?:src|href)=[\"'](?!data:)", text)
    assert not re.search(r"\s(?:style|on\w+)=", text)

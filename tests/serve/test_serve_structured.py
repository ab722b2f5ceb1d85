"""Structured output over HTTP: every name for it, what is refused, and the openai client's `parse`."""

from __future__ import annotations

import concurrent.futures
import json
import threading
import time
from typing import Any, Literal

import jsonschema
import openai
import pytest
from body_helpers import CHAT, COMPLETE, GENERATE, LEAST, refusal, task
from engine_helpers import END, byte_ids, make_engine, toy
from grammar_helpers import OBJECT, SCHEMA, follows
from pydantic import BaseModel, Field
from server_helpers import MODEL, SECONDS, Running, running

from specjax.engine.grammar import GRAMMAR_FAILED, MAX_SOURCE, Grammar
from specjax.serve.errors import INVALID
from specjax.serve.tokenising import Tokenising

WHOLE = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server():
    # More tokens than the shared engine's context: a template, and JSON of one token a byte.
    engine = make_engine(toy(), "NONE", eos=(END,), context_length=256)
    with running(engine) as served:
        yield served


REGEX, EBNF, ANY = Grammar("regex", "a+"), Grammar("ebnf", 'root ::= "a"'), Grammar("json_schema")
ASKED: dict[str, tuple[dict[str, Any], Grammar | None]] = {
    "text": ({"response_format": {"type": "text"}}, None),
    "json_object": ({"response_format": {"type": "json_object"}}, ANY),
    "json_schema": ({"response_format": WHOLE}, OBJECT),
    "a schema that is left out": ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, ANY),
    "regex": ({"regex": "a+"}, REGEX),
    "ebnf": ({"ebnf": 'root ::= "a"'}, EBNF),
    "guided_json": ({"guided_json": SCHEMA}, OBJECT),
    "guided_json text": ({"guided_json": json.dumps(SCHEMA)}, OBJECT),
    "guided_regex": ({"guided_regex": "a+"}, REGEX),
    "guided_choice": ({"guided_choice": ["a", "b"]}, Grammar.choice(["a", "b"])),
    "guided_grammar": ({"guided_grammar": 'root ::= "a"'}, EBNF),
    "structured_outputs json": ({"structured_outputs": {"json": SCHEMA}}, OBJECT),
    "structured_outputs choice": ({"structured_outputs": {"choice": ["a"]}}, Grammar.choice(["a"])),
    "structured_outputs any": ({"structured_outputs": {"json_object": True}}, ANY),
    "structured_outputs none": ({"structured_outputs": {"json_object": False, "regex": None}}, None),
    "text beside another": ({"response_format": {"type": "text"}, "regex": "a+", "ebnf": None}, REGEX),
}


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize("case", ASKED)
def test_fields_name_a_grammar(case, path):
    fields, expected = ASKED[case]
    assert task(path, LEAST[path] | fields).sampling[0].grammar == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({"json_schema": json.dumps(SCHEMA)}, OBJECT), ({"json_schema": SCHEMA}, OBJECT), ({"regex": "a+"}, REGEX),
     ({"ebnf": 'root ::= "a"'}, EBNF), ({"regex": None}, None)],
)  # fmt: skip
def test_sampling_params_name_a_grammar(fields, expected):
    assert task(GENERATE, {"text": "x", "sampling_params": fields}).sampling[0].grammar == expected


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "a type": ({"response_format": {"type": "xml"}}, "response_format", "json_object"),
    "no type": ({"response_format": {}}, "response_format", "type is required"),
    "no object": ({"response_format": "json_object"}, "response_format", "json_object"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema is required"),
    "a member": ({"response_format": {"type": "json_object", "schema": {}}}, "response_format", "not supported"),
    "a schema that is a list": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": []}}}, "response_format", "JSON schema"),
    "an unused schema": (
        {"response_format": {"type": "text", "json_schema": {"schema": ""}}}, "response_format", "JSON schema"),
    "an unknown type": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}}, "response_format",
        "foo"),
    "not supported by the library": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format", "not"),
    "regex": ({"regex": "(a"}, "regex", "unclosed"),
    "an empty regex": ({"regex": ""}, "regex", "empty"),
    "a number": ({"regex": 5}, "regex", "string"),
    "a long regex": ({"regex": "a" * (MAX_SOURCE + 1)}, "regex", "at most"),
    "ebnf": ({"ebnf": "root ::= foo"}, "ebnf", "foo"),
    "guided_json": ({"guided_json": "{"}, "guided_json", "valid JSON"),
    "guided_json number": ({"guided_json": 5}, "guided_json", "JSON schema"),
    "a large schema": ({"guided_json": {"enum": ["a" * MAX_SOURCE]}}, "guided_json", "at most"),
    "guided_choice": ({"guided_choice": []}, "guided_choice", "empty"),
    "many choices": ({"guided_choice": ["a"] * 1025}, "guided_choice", "1024"),
    "no texts": ({"guided_choice": [5]}, "guided_choice", "string"),
    "guided_grammar": ({"guided_grammar": "x"}, "guided_grammar", "::="),
    "inside": ({"structured_outputs": {"regex": "(a"}}, "structured_outputs", "unclosed"),
    "several inside": ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs", "one"),
    "several": ({"regex": "a", "response_format": {"type": "json_object"}}, "response_format", "regex"),
    "whitespace": ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern", "not supported"),
}  # fmt: skip


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
@pytest.mark.parametrize("case", WRONG)
def test_refusals_name_the_field(server, path, case):
    fields, param, said = WRONG[case]
    started = time.thread_time()  # of the processor: what else runs does not count
    error = refusal(path, LEAST[path] | fields, server.engine.intake)
    assert time.thread_time() - started < 10
    assert error is not None and (error.status, error.param) == (400, param) and said in str(error), str(error)
    assert param in str(error) and "grammar " not in str(error).split(":")[0].replace("guided_grammar", "")


def test_refusals_over_http_beside_others(server: Running):
    """Also before the first byte of a stream, and while other requests run."""

    def ask(i: int) -> int:
        if i % 2:
            return server.chat(max_tokens=30).status_code
        answer = server.chat(guided_regex="(a" + "b" * i, stream=bool(i % 4))
        assert answer.json()["error"]["param"] == "guided_regex" and answer.json()["error"]["code"] == INVALID
        return answer.status_code

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(8))) == [400, 200] * 4
    several = {"text": ["x", "y"], "sampling_params": [{"regex": "a"}, {"ebnf": "bad"}]}
    assert server.post("/generate", several).json()["error"]["param"] == "ebnf"
    for path, body in (("responses", {"input": "x"}), ("messages", {"messages": HELLO, "max_tokens": 2})):
        answer = server.post(f"/v1/{path}", body | {"regex": "("})
        assert answer.status_code == 400 and "regex" in answer.json()["error"]["message"], answer.text
    error = server.post("/generate", {"text": "x", "sampling_params": {"regex": "(a"}})
    assert error.status_code == 400 and error.json()["error"]["param"] == "regex"


@pytest.mark.parametrize("case", ["json_schema", "guided_json", "structured_outputs json"])
def test_answers_follow_the_schema(server: Running, case):
    fields, _ = ASKED[case]
    for path in (CHAT, COMPLETE):
        answer = server.post(path, LEAST[path] | fields | {"max_tokens": 90, "seed": 1, "n": 2, "temperature": 20})
        assert answer.status_code == 200, answer.text
        texts = [each["message"]["content"] if path == CHAT else each["text"] for each in answer.json()["choices"]]
        assert len(set(texts)) == 2
        for text in texts:
            jsonschema.validate(json.loads(text), SCHEMA)
        events = server.events(path, LEAST[path] | fields | {"max_tokens": 90, "seed": 1, "temperature": 20})
        parts = [choice.get("delta", choice) for each in events for choice in each["choices"]]
        assert "".join(part.get("content") or part.get("text") or "" for part in parts) == texts[0]
        assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_generate_and_a_cut(server: Running):
    body = {"text": "hello", "sampling_params": {"regex": "(ab|cd){3}", "max_new_tokens": 20, "temperature": 0}}
    done = server.post("/generate", body).json()
    assert done["text"] in {a + b + c for a in ("ab", "cd") for b in ("ab", "cd") for c in ("ab", "cd")}
    assert done["meta_info"]["finish_reason"] == {"type": "stop", "matched": END}
    cut = server.chat(response_format=WHOLE, max_tokens=5).json()["choices"][0]
    assert cut["finish_reason"] == "length" and follows(
        OBJECT, byte_ids(cut["message"]["content"].encode()), whole=False
    )


def test_choices_and_a_grammar_of_ones_own(server: Running):
    assert server.complete(guided_choice=["yes", "no"]).json()["choices"][0]["text"] in ("yes", "no")
    assert server.chat(ebnf='root ::= "x" [0-9]\n').json()["choices"][0]["message"]["content"][0] == "x"


WIDE = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(1200)}}
"""A schema that is accepted, and exceeds the library's limits once its text goes among its 1,200 keys."""
AMONG_KEYS = {"logit_bias": {str(byte_ids(b"k")[0]): 90}}
WIDE_FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": WIDE}}
DYING: dict[str, tuple[str, dict[str, Any], str]] = {
    "guided_json": (CHAT, {"guided_json": WIDE}, "guided_json"),
    "response_format": (CHAT, {"response_format": WIDE_FORMAT}, "response_format"),
    "structured_outputs": (COMPLETE, {"structured_outputs": {"json": WIDE}}, "structured_outputs"),
    "a choice": (COMPLETE, {"guided_json": WIDE, "n": 2}, "guided_json"),
    "generate": (
        GENERATE,
        {"sampling_params": {"json_schema": WIDE, "max_new_tokens": 60} | AMONG_KEYS},
        "json_schema",
    ),
    "one prompt of two": (
        GENERATE,
        {
            "text": ["hello", "hello"],
            "sampling_params": [
                {"regex": "(ab|cd){3}", "max_new_tokens": 60},
                {"json_schema": WIDE, "max_new_tokens": 60} | AMONG_KEYS,
            ],
        },
        "json_schema",
    ),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", DYING)
def test_a_grammar_that_dies_is_named_by_its_field(server: Running, case, stream):
    """The text goes where the library cannot follow: a 400 about the field, also within a stream."""
    path, fields, param = DYING[case]
    body = LEAST[path] | ({} if path == GENERATE else {"max_tokens": 60} | AMONG_KEYS) | fields
    if stream:
        answer = server.post(path, body | {"stream": True})
        assert answer.status_code == 200
        error = json.loads(answer.text.strip().rpartition("data: ")[2])["error"]
    else:
        answer = server.post(path, body)
        assert answer.status_code == 400
        error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, INVALID)
    assert error["message"].startswith(f"{param}: {GRAMMAR_FAILED} after ")
    assert server.chat(max_tokens=3).status_code == 200
    server.wait_idle()


class Item(BaseModel):
    ok: bool
    n: int = Field(ge=0, le=99)
    color: Literal["red", "green"] | None


def test_parse_of_the_openai_client(server: Running):
    with openai.OpenAI(base_url=f"{server.base}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Item, seed=4, max_tokens=90)
        parsed = answer.choices[0].message.parsed
        assert isinstance(parsed, Item)
        with client.chat.completions.stream(
            model=MODEL, messages=HELLO, response_format=Item, seed=4, max_tokens=90
        ) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == parsed
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Item, max_tokens=4)


def test_a_grammar_that_takes_long_delays_no_other_request():
    tokenising, let_go = Tokenising(), threading.Event()
    slow = [tokenising.submit(100, lambda: let_go.wait(SECONDS), compiles=True) for _ in range(3)]
    try:
        assert tokenising.submit(100, lambda: 5).result(SECONDS) == 5 and not any(each.done() for each in slow)
    finally:
        let_go.set()
    assert [each.result(SECONDS) for each in slow] == [True] * 3

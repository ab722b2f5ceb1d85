"""Structured output over HTTP: all names of grammars, refusals, and the OpenAI client's `parse`."""

from __future__ import annotations

import concurrent.futures
import json
from typing import Any, Literal

import jsonschema
import openai
import pytest
from body_helpers import CHAT, COMPLETE, GENERATE, HELLO, LEAST, MESSAGES, RESPONSES, task
from engine_helpers import END, byte_ids, make_engine, toy
from grammar_helpers import OBJECT, SCHEMA, follows
from pydantic import BaseModel, Field
from server_helpers import MODEL, Running, check_error, running

from specjax.engine.grammar import GRAMMAR_FAILED, Grammar
from specjax.serve.errors import INVALID

WHOLE = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def server():
    """A longer context than the shared engine's, for a template and JSON with one token a byte."""
    with running(make_engine(toy(), "NONE", eos=(END,), context_length=256)) as served:
        yield served


REGEX, EBNF, ANY = Grammar("regex", "a+"), Grammar("ebnf", 'root ::= "a"'), Grammar("json_schema")
GRAMMARS: list[tuple[dict[str, Any], Grammar | None]] = [
    ({"response_format": {"type": "text"}}, None),
    ({"response_format": {"type": "json_object"}}, ANY),
    ({"response_format": WHOLE}, OBJECT),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, ANY),
    ({"response_format": {"type": "text"}, "regex": "a+", "ebnf": None}, REGEX),
    ({"regex": "a+"}, REGEX),
    ({"ebnf": 'root ::= "a"'}, EBNF),
]


def test_fields_name_a_grammar():
    for fields, expected in GRAMMARS:
        for path in (CHAT, COMPLETE):
            assert task(path, LEAST[path] | fields).sampling[0].grammar == expected, fields
    for fields, expected in (
        ({"json_schema": json.dumps(SCHEMA)}, OBJECT), ({"json_schema": SCHEMA}, OBJECT), ({"regex": "a+"}, REGEX),
        ({"ebnf": 'root ::= "a"'}, EBNF), ({"regex": None}, None),
    ):  # fmt: skip
        assert task(GENERATE, {"text": "x", "sampling_params": fields}).sampling[0].grammar == expected, fields


def form(**members: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": members}


def test_refusals_over_http_while_requests_run(server: Running):
    def ask(i: int) -> int:
        if i % 2:
            return server.chat(max_tokens=30).status_code
        answer = server.chat(regex="(a" + "b" * i, stream=bool(i % 4))
        assert check_error(answer, 400, "regex")["code"] == INVALID
        return answer.status_code

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == [400, 200] * 2
    several = {"text": ["x", "y"], "sampling_params": [{"regex": "a"}, {"ebnf": "bad"}]}
    check_error(server.post(GENERATE, several), 400, "ebnf")
    check_error(server.post(GENERATE, {"text": "x", "sampling_params": {"regex": "(a"}}), 400, "regex")
    for path, body in ((RESPONSES, {"input": "x"}), (MESSAGES, {"messages": HELLO, "max_tokens": 2})):
        answer = server.post(path, body | {"regex": "("})
        assert answer.status_code == 400 and "regex" in answer.json()["error"]["message"], answer.text


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_answers_follow_the_schema(server: Running, path):
    fields = LEAST[path] | {"response_format": WHOLE, "max_tokens": 90, "seed": 1, "temperature": 20}
    choices = server.post(path, fields | {"n": 2}).json()["choices"]
    texts = [choice["message"]["content"] if path == CHAT else choice["text"] for choice in choices]
    assert len(set(texts)) == 2
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    events = server.events(path, fields)
    parts = [choice.get("delta", choice) for event in events for choice in event["choices"]]
    assert "".join(part.get("content") or part.get("text") or "" for part in parts) == texts[0]
    assert events[-1]["choices"][0]["finish_reason"] == "stop"


def test_answers_follow_other_grammars(server: Running):
    body = {"text": "hello", "sampling_params": {"regex": "(ab|cd){3}", "max_new_tokens": 20, "temperature": 0}}
    done = server.post(GENERATE, body).json()
    assert len(done["text"]) == 6 and {done["text"][i : i + 2] for i in (0, 2, 4)} <= {"ab", "cd"}
    assert done["meta_info"]["finish_reason"] == {"type": "stop", "matched": END}
    cut = server.chat(response_format=WHOLE, max_tokens=5).json()["choices"][0]
    ids = byte_ids(cut["message"]["content"].encode())
    assert cut["finish_reason"] == "length" and follows(OBJECT, ids, whole=False)
    assert server.chat(ebnf='root ::= "x" [0-9]\n').json()["choices"][0]["message"]["content"][0] == "x"


WIDE = {
    "type": "object",
    "properties": {"first": {"enum": ["x", "y"]}} | {f"k{i}": {"type": "string"} for i in range(1200)},
    "required": ["first"],
}
"""A schema that is accepted, but exceeds the library's limits when the text has one of its 1,200 further keys."""
KEYS = {"logit_bias": {str(byte_ids(b",")[0]): 90}}
SAMPLING = {"json_schema": WIDE, "max_new_tokens": 60} | KEYS
FAILING: list[tuple[str, dict[str, Any], str]] = [
    (CHAT, {"response_format": form(schema=WIDE)}, "response_format"),
    (COMPLETE, {"response_format": form(schema=WIDE), "n": 2}, "response_format"),
    (GENERATE, {"sampling_params": SAMPLING}, "json_schema"),
    (GENERATE, {"text": ["hello"] * 2, "sampling_params": [{"regex": "(ab|cd){3}"}, SAMPLING]}, "json_schema"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("case", range(len(FAILING)))
def test_grammar_that_fails_is_named_by_its_field(server: Running, case, stream):
    """A 400, also within a stream."""
    path, fields, param = FAILING[case]
    body = LEAST[path] | ({} if path == GENERATE else {"max_tokens": 60} | KEYS) | fields
    answer = server.post(path, body | {"stream": stream})
    if stream:
        assert answer.status_code == 200
        error = json.loads(answer.text.strip().rpartition("data: ")[2])["error"]
        assert error["param"] == param
    else:
        error = check_error(answer, 400, param)
    assert error["code"] == INVALID and error["message"].startswith(f"{param}: {GRAMMAR_FAILED} after ")
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
        fields: Any = {"model": MODEL, "messages": HELLO, "response_format": Item, "seed": 4}
        with client.chat.completions.stream(**fields, max_tokens=90) as stream:
            assert stream.get_final_completion().choices[0].message.parsed == parsed
        with pytest.raises(openai.LengthFinishReasonError):
            client.chat.completions.parse(model=MODEL, messages=HELLO, response_format=Item, max_tokens=4)

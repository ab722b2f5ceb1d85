"""Where stops end an answer, by route: after thoughts, and inside of function calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from server_helpers import Running, running
from tool_helpers import SCRIPTS, TOOLS, ask, tool_engine, tool_tokenizer

from specjax.cli.flags import ServerSettings

CHAT, RESPONSES, MESSAGES, GENERATE = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/generate"
COMPLETE = "/v1/completions"
THOUGHTS = "The Ask: goes easy."
ANSWER = "It is four. Ask: me again."
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
THEIRS = [{"name": each["function"]["name"], "input_schema": {"type": "object"}} for each in TOOLS]


@pytest.fixture(scope="module")
def server():
    with running(tool_engine()) as served:
        yield served


def token(piece: str) -> int:
    found = tool_tokenizer().convert_tokens_to_ids(piece)
    assert isinstance(found, int)
    return found


def answered(server: Running, path: str, body: dict[str, Any], *, stream: bool) -> Any:
    """A whole answer's body, or the parsed events of a stream."""
    with server.client() as client:
        answer = client.post(path, json=body | {"stream": stream})
    assert answer.status_code == 200, answer.text
    if not stream:
        return answer.json()
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def ended(server: Running, path: str, mode: str, stream: bool, **fields: Any) -> tuple[str, str, Any]:
    """Thoughts, content, and what ended the answer to script s: the stop that matched, or the reason.

    `mode`: thoughts begin by the model's own token (own), or by the prompt (template).
    """
    opened = mode == "template"
    body: dict[str, Any] = ask("s") | fields
    messages = body.pop("messages")
    match path:
        case "/v1/chat/completions":
            body |= {"messages": messages, "chat_template_kwargs": {"enable_thinking": opened}}
            found = answered(server, path, body, stream=stream)
            if stream:
                deltas = [each["choices"][0]["delta"] for each in found]
                message = {
                    name: "".join(delta.get(name) or "" for delta in deltas)
                    for name in ("content", "reasoning_content")
                }
                found = {"choices": [found[-1]["choices"][0] | {"message": message}]}
            choice = found["choices"][0]
            message, matched = choice["message"], choice["matched_stop"]
            return message["reasoning_content"], message["content"], matched or choice["finish_reason"]
        case "/v1/responses":
            found = answered(server, path, body | {"input": messages}, stream=stream)
            found = found[-1]["response"] if stream else found
            texts = {item["type"]: item["content"][0]["text"] for item in found["output"]}
            return texts["reasoning"], texts.get("message", ""), found["status"]
        case "/v1/messages":
            body = {"max_tokens": 50} | body | {"messages": messages}
            body |= {
                "stop_sequences": body.pop("stop", None),
                "thinking": {"type": "adaptive" if opened else "disabled"},
            }
            found = answered(server, path, body, stream=stream)
            if stream:
                deltas = [each["delta"] for each in found if each["type"] == "content_block_delta"]
                texts = ["".join(delta.get(name, "") for delta in deltas) for name in ("thinking", "text")]
                end = next(each["delta"] for each in found if each["type"] == "message_delta")
            else:
                texts = ["".join(each.get(name, "") for each in found["content"]) for name in ("thinking", "text")]
                end = found
            return texts[0], texts[1], end["stop_sequence"] or end["stop_reason"]
        case _:
            prompt = "user:Say s<|im_end|><|im_start|>" + "<think>" * opened
            sampling = {name: value for name, value in body.items() if name not in ("model", "max_tokens")}
            sampling["max_new_tokens"] = body.get("max_tokens", 50)
            found = answered(
                server, path, {"text": prompt, "sampling_params": sampling, "require_reasoning": True}, stream=stream
            )
            found = found[-1] if stream else found
            thoughts, _, content = found["text"].removeprefix("<think>").partition("</think>")
            reason = found["meta_info"]["finish_reason"]
            return thoughts.strip(), content.lstrip(), reason.get("matched") or reason["type"]


# The responses route sets no variable of the template.
ROUTES = [(RESPONSES, "own"), *((path, mode) for path in (CHAT, MESSAGES, GENERATE) for mode in ("own", "template"))]
# By name: fields, thoughts, content, what ended the answer.
STOPS: dict[str, tuple[dict[str, Any], str, str, Any]] = {
    "in both": ({"stop": ["Ask:"]}, THOUGHTS, "It is four. ", "Ask:"),
    "in the thoughts alone": ({"stop": ["goes", "The"]}, THOUGHTS, ANSWER, 2),
    "white space after the thoughts": ({"stop": ["\n\n"]}, THOUGHTS, ANSWER, 2),
    "across the end of the thoughts": ({"stop": [">\n\nIt", "</think>", "\nIt"]}, THOUGHTS, ANSWER, 2),
    "the answer's beginning": ({"stop": ["It"]}, THOUGHTS, "", "It"),
    "pattern": ({"stop_regex": ["A[a-z]k:"]}, THOUGHTS, "It is four. ", "A[a-z]k:"),
    "pattern across": ({"stop_regex": [r"easy[^?]*It"]}, THOUGHTS, ANSWER, 2),
    "pattern at the beginning": ({"stop_regex": ["^(It|The)"]}, THOUGHTS, "", "^(It|The)"),
    "kept": ({"stop": ["Ask:"], "no_stop_trim": True}, THOUGHTS, "It is four. Ask:", "Ask:"),
    "token": ({"stop_token_ids": [token("goes easy.\n\n")]}, "The Ask:", "", token("goes easy.\n\n")),
    "thoughts without an end": ({"stop": ["Ask:"], "max_tokens": 2}, "The Ask:", "", "length"),
    "after a grammar": ({"stop": [": ", "s"], "regex": "four: [0-9]{3}"}, THOUGHTS, "four", ": "),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("path", "mode"), ROUTES)
@pytest.mark.parametrize("name", STOPS)
def test_stops_match_after_the_thoughts(server, name, path, mode, stream):
    fields, thoughts, content, end = STOPS[name]
    if path == RESPONSES:
        fields = {("max_output_tokens" if each == "max_tokens" else each): value for each, value in fields.items()}
        end = "incomplete" if end == "length" else "completed"
    if path == MESSAGES and (end == "length" or isinstance(end, int)):
        end = "max_tokens" if end == "length" else "end_turn"
    if name == "thoughts without an end" and mode == "template":  # of the two tokens, none is <think>
        thoughts = THOUGHTS
    assert ended(server, path, mode, stream, **fields) == (thoughts, content, end)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_text_that_no_parser_divides_is_one_text(server, stream):
    """Raw completions, thoughts that the client wants in the content, and a server that does not look for them."""
    prompt = "user:Say s<|im_end|><|im_start|>"
    for path, body in (
        (COMPLETE, {"prompt": prompt, "temperature": 0, "stop": "Ask:"}),
        (GENERATE, {"text": prompt, "sampling_params": {"temperature": 0, "stop": "Ask:"}}),
        (CHAT, ask("s", stop="Ask:", separate_reasoning=False)),
    ):
        assert _text(answered(server, path, body, stream=stream)) == "<think>The ", path


def test_a_server_without_a_reasoning_parser():
    with running(tool_engine(), ServerSettings(reasoning_parser="none")) as server:
        assert _text(answered(server, CHAT, ask("s", stop="Ask:"), stream=False)) == "<think>The "


def _text(found: Any) -> str:
    """The text of a completion, a chat, or `/generate`, whose events hold all text so far."""
    if isinstance(found, dict):
        return found["text"] if "text" in found else _said(found["choices"][0])
    return found[-1]["text"] if "text" in found[-1] else "".join(_said(each["choices"][0]) for each in found)


def _said(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else (choice.get("message") or choice["delta"]).get("content") or ""


def test_choices_and_log_probabilities_end_with_the_text(server):
    raw = "<think>The Ask: goes easy.\n\n</think>\n\nIt is four. "
    body = ask("s", stop=["Ask:"], n=2, logprobs=True)
    whole = answered(server, CHAT, body, stream=False)
    events = answered(server, CHAT, body, stream=True)
    for index, choice in enumerate(whole["choices"]):
        entries = choice["logprobs"]["content"]
        parts = [each["choices"][0] for each in events if each["choices"][0]["index"] == index]
        sent = [entry for part in parts if part["logprobs"] for entry in part["logprobs"]["content"]]
        assert [each["token"] for each in sent] == [each["token"] for each in entries]
        assert "".join(each["token"] for each in entries) == raw
        assert choice["message"]["content"] == "It is four. "
    assert whole["usage"]["completion_tokens"] == 2 * (SCRIPTS["s"].index(" Ask: ") + 1)


# By name: fields, arguments, whether the call is whole.
CUTS: dict[str, tuple[dict[str, Any], str, bool]] = {
    "inside a value": ({"stop": ["Par"]}, '{"city": "', False),
    "before the last bracket": ({"stop": ["}}"]}, '{"city": "Paris"', False),
    "inside a value, by a pattern": ({"stop_regex": ["P[a-z]r"]}, '{"city": "', False),
    "inside a value, by a token": ({"stop_token_ids": [token('is"')]}, '{"city": "Par', False),
    "after the arguments": ({"stop": ["</tool_call>"]}, '{"city": "Paris"}', True),
    "by the end": ({}, '{"city": "Paris"}', True),
}  # fmt: skip


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("name", CUTS)
def test_a_call_that_a_stop_cuts_off_is_not_reported_as_finished(server, name, stream):
    fields, arguments, is_whole = CUTS[name]
    matches = "stop" in fields or "stop_regex" in fields
    chat = answered(server, CHAT, ask("a", tools=TOOLS, **fields), stream=stream)
    choice = (chat[-1] if stream else chat)["choices"][0]
    assert choice["finish_reason"] == ("tool_calls" if is_whole else "stop")
    deltas = [each["choices"][0]["delta"] for each in chat] if stream else [choice["message"]]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(each["arguments"] for each in calls) == arguments

    body = {"input": ask("a")["messages"], "temperature": 0, "tools": FLAT, **fields}
    response = answered(server, RESPONSES, body, stream=stream)
    if stream:
        (done,) = [e for e in response if e["type"] == "response.output_item.done" and "arguments" in e["item"]]
        assert done["item"]["status"] == ("completed" if is_whole else "incomplete")
        response = response[-1]["response"]
    (call,) = [item for item in response["output"] if item["type"] == "function_call"]
    assert (call["arguments"], call["status"]) == (arguments, "completed" if is_whole else "incomplete")
    assert response["status"] == "completed"

    renamed = {("stop_sequences" if key == "stop" else key): value for key, value in fields.items()}
    body = {"messages": ask("a")["messages"], "temperature": 0, "tools": THEIRS, "max_tokens": 50, **renamed}
    message = answered(server, MESSAGES, body, stream=stream)
    end = next(each["delta"] for each in message if each["type"] == "message_delta") if stream else message
    assert end["stop_reason"] == ("stop_sequence" if matches else "tool_use" if is_whole else "end_turn")


def test_the_last_of_several_calls_decides(server):
    for stop, finish in (("Rome", "stop"), ('"get', "stop"), ('ments": {"c', "stop"), ("</tool_call>", "tool_calls")):
        for stream in (False, True):
            chat = answered(server, CHAT, ask("c", tools=TOOLS, stop=stop), stream=stream)
            assert (chat[-1] if stream else chat)["choices"][0]["finish_reason"] == finish, stop

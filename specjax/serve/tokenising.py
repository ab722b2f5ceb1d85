"""A request's prompts on their way to the engine: `Task` describes its sequences, `Tokenising` makes them in threads.

A huge prompt must delay neither streams nor other clients' short prompts. One thread handles short requests, one
requests with a grammar to compile, one all others. `tokenizers` and the compiler of grammars release Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

from specjax.checkpoint.prompts import Prompt
from specjax.engine.chat.message_format import PLAIN, AnswerForm, ReplyOptions
from specjax.engine.intake import Intake
from specjax.engine.sampling_params import SamplingParams, later_seed
from specjax.engine.sequence import Sequence
from specjax.limits import ParameterError
from specjax.serve.errors import INVALID, ApiError, bad_request, shown
from specjax.serve.fields import whole

MAX_SCORES = 2**20
"""Maximum number of log-probabilities of prompts in an answer, including the most likely tokens. The answer is made in
memory, and JSON takes up to 50 bytes for each."""


@dataclass(frozen=True)
class Rules:
    """The served model and the limits that requests are checked against."""

    model: str
    capacity: int  # maximum number of choices that run or wait
    context_length: int
    room: int  # maximum number of tokens after a prompt of one token
    defaults: Mapping[str, Any]  # default values of `SamplingParams`
    form: AnswerForm = PLAIN  # form of the model's answers
    sanitize_control_tokens: bool = False  # of chats whose requests do not say


@dataclass(frozen=True)
class Task:
    """n sequences for each prompt."""

    prompts: list[Prompt]
    sampling: list[SamplingParams]  # one for each prompt
    names: List[Mapping[str, str]]  # for each prompt: names of `SamplingParams` to names of the request
    n: int = 1
    prompt_field: str = "prompt"
    ids: list[str] | None = None  # one for each prompt
    most: int | None = None  # new tokens if the request gives no number; fewer if they do not fit
    reply: ReplyOptions | None = None  # None: the text is not parsed

    def grammar_field(self, choice: int) -> str:
        """The request's field with the grammar of a choice; `choice` counts over all prompts."""
        return self.names[choice // self.n].get("grammar", "grammar")

    def sequences(self, intake: Intake, id: str) -> list[Sequence]:
        """Tokenises, and makes the choices in order: prompt * n + i. Choice i of a prompt has the seed + i. Raises an
        ApiError for prompts and parameters that the engine refuses."""
        sequences: list[Sequence] = []
        scores, names = 0, self.names[0]
        try:
            for index, (prompt, sampling) in enumerate(zip(self.prompts, self.sampling, strict=True)):
                names = self.names[index]
                name = self.ids[index] if self.ids else f"{id}-{index}"
                first = intake.sequence(prompt, sampling, id=name)
                sequences.append(first)
                first_scores = first.output.prompt_logprobs
                for i in range(1, self.n):
                    choice = replace(sampling, seed=later_seed(first.seed, i))
                    sequences.append(intake.sequence(first.prompt, choice, id=f"{name}-{i}"))
                limit = first.limit
                if self.most is not None and sampling.max_new_tokens is None:
                    limit = min(limit, self.most)
                    if sampling.min_new_tokens > limit:
                        problem = f"must be at most the limit of new tokens ({limit}), got {sampling.min_new_tokens}"
                        raise ParameterError("min_new_tokens", problem)
                # The choices share the salt, because they share their prompt.
                for sequence in sequences[-self.n :]:
                    sequence.salt, sequence.limit = first.salt, limit
                if first_scores is not None:
                    scores += (len(first.prompt) - first_scores.start) * first_scores.each * self.n
                    if scores > MAX_SCORES:
                        problem = f"the answer may hold at most {MAX_SCORES} log-probabilities of prompts"
                        raise ValueError(f"{problem}, including the most likely tokens: send fewer prompts")
        except ValueError as error:
            raise refusal(error, names, self.prompt_field) from error
        return sequences


def refusal(error: ValueError, names: Mapping[str, str], prompt_field: str | None = None) -> ApiError:
    """The answer to a `ParameterError`, or to another error of the prompt in `prompt_field`."""
    if isinstance(error, ParameterError):
        is_grammar = error.name == "grammar"
        error = error.renamed(names)
        prompt_field = error.name
        if is_grammar:
            return bad_request(str(error)[:600], prompt_field, INVALID)
    code = "context_length_exceeded" if "the context" in str(error) else None
    return bad_request(str(error)[:400], prompt_field, code)  # a number may have thousands of digits


def check_capacity(choices: int, prompts: int, rules: Rules, field: str) -> None:
    """Raises an ApiError if `prompts` with `choices` for each exceed the server's capacity."""
    if (count := choices * prompts) > rules.capacity:
        problem = f"{count} choices in one request; this server takes {rules.capacity}"
        raise bad_request(problem, "n" if choices > 1 else field)


def read_prompts(prompt: Any, field: str, choices: int, rules: Rules) -> list[Prompt]:
    """Reads a string, a list of strings, token ids, or a list of lists of token ids. Raises an ApiError for other
    values, empty prompts, and more prompts than the server accepts. Lengths are checked before items."""

    def ids(value: Any) -> Any:
        if not isinstance(value, list):
            return value
        if len(value) > rules.context_length:
            problem = f"the prompt has {len(value)} tokens, but the context is {rules.context_length}"
            raise bad_request(problem, field, "context_length_exceeded")
        return [whole(token) for token in value] if float in set(map(type, value)) else value

    single = isinstance(prompt, str) or (isinstance(prompt, list) and prompt and type(prompt[0]) in (int, float))
    prompts: list[Any] = [prompt] if single else prompt if isinstance(prompt, list) else []
    check_capacity(choices, len(prompts), rules, field)
    prompts = list(map(ids, prompts))
    texts = bool(prompts) and all(isinstance(item, str) for item in prompts)
    lists = bool(prompts) and all(isinstance(item, list) for item in prompts)
    if prompt in ("", []) or ((texts or lists) and not all(prompts)):
        raise bad_request(f"{field} is empty: there is nothing to continue", field)
    if not (texts or (lists and all(set(map(type, item)) == {int} for item in prompts))):
        forms = "a string, a list of strings, a list of token ids or a list of such lists"
        raise bad_request(f"{field} must be {forms}, got {shown(prompt)}", field)
    return cast(list[Prompt], prompts)


SHORT = 16_384  # maximum number of bytes of a short request: some 10 ms of work
PER_SEQUENCE = 100  # cost of making a sequence, in bytes

Result = TypeVar("Result")


class Tokenising:
    """Call `submit` from any thread."""

    def __init__(self) -> None:
        names = ("short", "long", "compile")
        self._lanes = {name: ThreadPoolExecutor(1, thread_name_prefix=f"specjax-tokenise-{name}") for name in names}

    def submit(self, size: int, function: Callable[[], Result], *, compiles: bool = False) -> Future[Result]:
        """Calls the function in a thread, unless the future is cancelled before. `size`: bytes of its texts and ids."""
        lane, work = self._lanes["compile" if compiles else "short" if size <= SHORT else "long"], [function]
        future = lane.submit(lambda: work[0]())
        future.add_done_callback(lambda _: work.clear())  # the lane keeps cancelled jobs, which hold their prompts
        return future

"""A model's tokenizer, and the comparison of two models' vocabularies.

Vocabularies are compared by token and id in the tokenizers. Further rows of an embedding are padding, whose number
differs within a family (Qwen2.5: 151936 rows, 152064 from 7B on), and are never proposed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.checkpoint.files import MAX_INTEGER, CheckpointError, Settings, damaged, read_json
from specjax.checkpoint.weights import ModelFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_ID = -1
MAX_SHOWN = 3  # differing ids in a message

_PADDING = re.compile(r"\[PAD(\d+)\]")  # the name of a padding row in GGUF files, with its id
_TAG = re.compile(r"<[^<>\s]+>")  # a token of the vocabulary that a GGUF file does not mark as special
_TURNS = ("user", "ask1"), ("assistant", "say1"), ("user", "ask2"), ("assistant", "say2")  # role, content
_SYSTEM = ("system", "rule")


def load_tokenizer(
    files: ModelFiles, *, folder: str | None = None, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """The model's fast tokenizer, with its chat template if it has one.

    `folder` has a tokenizer that replaces the model's own, `chat_template` a Jinja template that replaces the
    tokenizer's own. Raises CheckpointError if the folder has no fast tokenizer, and as `check_tokenizer_paths`.
    """
    import transformers

    from specjax.checkpoint.template_sandbox import bound_templates

    bound_templates()
    if folder is None and chat_template is None and files.chat_template is not None:
        chat_template = str(files.chat_template)
    template = check_tokenizer_paths(folder, chat_template)
    if folder is not None:
        files = replace(files, folder=Path(folder))
    file = files.folder / "tokenizer_config.json"
    name = read_json(file, files.name).get("tokenizer_class") if file.is_file() else None
    # AutoTokenizer would choose this class. Its import takes seconds, and imports torch if installed.
    is_plain = name in ("PreTrainedTokenizerFast", "TokenizersBackend")
    tokenizer_class: Any = transformers.PreTrainedTokenizerFast if is_plain else transformers.AutoTokenizer
    with damaged(f"the tokenizer in {files.folder} (tokenizer.json and tokenizer_config.json are needed)"):
        tokenizer = tokenizer_class.from_pretrained(str(files.folder), local_files_only=True)
        tokenizer.model_max_length = MAX_INTEGER  # the model's context length counts
        if not tokenizer.is_fast:
            raise CheckpointError(f"the tokenizer in {files.folder} has no tokenizer.json ({type(tokenizer).__name__})")
        _check_ids(tokenizer.get_vocab(), files)
        tokenizer.decode(tokenizer("a")["input_ids"])
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _check_ids(vocabulary: Mapping[str, int], files: ModelFiles) -> None:
    """Compare the largest id, which sizes of tables follow from, with the tokens and the embedding's rows."""
    config = Settings(files.config)
    rows = (section.get("vocab_size") for section in (config, config.section("text_config")))
    limit = max([len(vocabulary), *(count for count in rows if type(count) is int)])
    if (last := max(vocabulary, key=vocabulary.__getitem__, default="")) and (i := vocabulary[last]) >= limit:
        raise CheckpointError(f"tokenizer.json in {files.folder}: {last[:80]!r} has the id {i}; the ids end at {limit}")


def check_tokenizer_paths(folder: str | None, chat_template: str | None) -> str | None:
    """Check the paths for `load_tokenizer` and return the template's text, None without a ``chat_template``. Raises
    CheckpointError if ``folder`` is not a folder, or the template cannot be read or has a syntax error."""
    if folder is not None and not Path(folder).is_dir():
        problem = f"the tokenizer {folder!r} (tokenizer_path, --tokenizer-path) is not a folder"
        raise CheckpointError(f"{problem}; one with tokenizer.json is needed")
    if chat_template is None:
        return None
    import jinja2
    from transformers.utils.chat_template_utils import render_jinja_template

    source = f"the template {chat_template!r} (chat_template, --chat-template)"
    try:
        text = Path(chat_template).read_text(encoding="utf-8")
        render_jinja_template(conversations=[], chat_template=text)  # compiles the template without rendering
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{source} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    except jinja2.TemplateSyntaxError as error:
        raise CheckpointError(f"{source} has a syntax error in line {error.lineno}: {error.message}") from error
    return text


def turn_end(tokenizer: Any) -> int | None:
    """The token that the chat template writes after an assistant's turn; None: there is no template or no such token.

    A chat of two exchanges is rendered. The token must follow both answers, because some templates write another token
    at the end of a text. If a template writes nothing there, the token after the first answer counts. Of several tokens
    the last one counts: earlier ones close a part of the answer. It must not be the header of a turn: a header opens
    the text, or is followed by the name of a role or by the question.

        <|im_start|>assistant\nsay2<|im_end|>\n    <|im_end|>        <|user|>ask2<|assistant|>say2    None
        [/INST] say2</s>                          </s>              say1<|end|>... say2<|return|>    None
        say2\n</response>\n<|im_end|>\n           <|im_end|>
    """
    if not getattr(tokenizer, "chat_template", None):
        return None
    # Some templates need a system message, or contents as parts.
    texts = (_rendered(tokenizer, turns, parts) for turns in (_TURNS, (_SYSTEM, *_TURNS)) for parts in (False, True))
    if (text := next(filter(None, texts), None)) is None:
        return None
    vocabulary, added = tokenizer.get_vocab(), sorted(tokenizer.get_added_vocab(), key=len, reverse=True)

    def first(text: str) -> str:
        """The token that begins a text, or an empty string."""
        tag = _TAG.match(text)
        names = (*added, *([tag[0]] if tag and tag[0] in vocabulary else ()))
        return next((token for token in names if text.startswith(token)), "")

    opening = text.lstrip()
    while token := first(opening):
        opening = opening.removeprefix(token).lstrip()
    headers = text.removesuffix(opening)
    between, last = (text.rpartition(content)[2].lstrip() for _, content in (_TURNS[1], _TURNS[3]))
    between = between.partition(_TURNS[2][1])[0]
    end = None
    while (token := first(between)) and token not in headers:
        after = (last or between).removeprefix(token)
        follows_both = token == first(last) if last else bool(after.strip())
        if not follows_both or after[:1].isalnum():
            break
        end, between, last = vocabulary[token], between.removeprefix(token).lstrip(), after.lstrip() if last else ""
        if not last:
            break
    return end


def _rendered(tokenizer: Any, turns: Sequence[tuple[str, str]], parts: bool) -> str | None:
    """The text of `turns`, with contents as text or as lists of parts; None if it lacks a content of `_TURNS`."""
    messages = [{"role": r, "content": [{"type": "text", "text": c}] if parts else c} for r, c in turns]
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=False)
    except Exception:  # templates may raise any error
        return None
    return text if all(content in text for _, content in _TURNS) else None


def match_vocabularies(target: Any, draft: Any, target_size: int, draft_size: int) -> np.ndarray | None:
    """Match the ids of two fast tokenizers of transformers. Raises CheckpointError if tokens or ids differ.

    Args:
      target_size, draft_size: rows of the models' output layers, with padding.

    Returns the target's id of each row of the draft's output layer, int32 ``[W]``, or ``NO_ID`` for padding; None if
    all rows have equal ids.
    """
    ours, theirs = _tokens(target), _tokens(draft)
    if ours != theirs:
        raise CheckpointError(f"{_differences(ours, theirs)}; a draft model with the target's tokenizer is needed")
    real = np.array(sorted(i for i in ours.values() if i < min(target_size, draft_size)), np.int32)
    if len(real) == draft_size:
        return None
    ids = np.full(draft_size, NO_ID, np.int32)
    ids[real] = real
    return ids


def _tokens(tokenizer: Any) -> dict[str, int]:
    """Token to id, with added tokens, without padding."""
    vocabulary = tokenizer.get_vocab().items()
    return {t: i for t, i in vocabulary if not ((match := _PADDING.fullmatch(t)) and int(match[1]) == i)}


def _differences(ours: Mapping[str, int], theirs: Mapping[str, int]) -> str:
    target, draft = ({i: token for token, i in vocabulary.items()} for vocabulary in (ours, theirs))
    ids = sorted({i for _, i in ours.items() ^ theirs.items()})

    def shown(i: int) -> str:
        mine, other = (repr(tokens[i]) if i in tokens else "no token" for tokens in (target, draft))
        return f"id {i} is {mine} in the target's and {other} in the draft's"

    more = f" ({len(ids)} ids differ)" if len(ids) > MAX_SHOWN else ""
    return f"its tokenizer is not the target's: {', '.join(map(shown, ids[:MAX_SHOWN]))}{more}"

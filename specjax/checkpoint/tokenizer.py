"""A model's tokenizer, and the comparison of two models' vocabularies.

Vocabularies are compared by token and id in the tokenizers. Further rows of an embedding are padding, whose number
differs within a family (Qwen2.5: 151936 rows, 152064 from 7B on), and are never proposed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.checkpoint.files import CheckpointError, read_json
from specjax.checkpoint.weights import ModelFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NO_ID = -1
MAX_SHOWN = 3  # differing ids in a message

_PADDING = re.compile(r"\[PAD(\d+)\]")  # the name of a padding row in GGUF files, with its id


def load_tokenizer(
    files: ModelFiles, *, folder: str | None = None, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """The model's fast tokenizer, with its chat template if it has one.

    `folder` has a tokenizer that replaces the model's own, `chat_template` a Jinja template that replaces the
    tokenizer's own. Raises CheckpointError if the folder has no fast tokenizer, and as `check_tokenizer_paths`.
    """
    import transformers

    template = check_tokenizer_paths(folder, chat_template)
    if folder is not None:
        files = replace(files, folder=Path(folder))
    file = files.folder / "tokenizer_config.json"
    try:
        name = read_json(file, files.name).get("tokenizer_class") if file.is_file() else None
        # AutoTokenizer would choose this class. Its import takes seconds, and imports torch if installed.
        is_plain = name in ("PreTrainedTokenizerFast", "TokenizersBackend")
        tokenizer_class: Any = transformers.PreTrainedTokenizerFast if is_plain else transformers.AutoTokenizer
        tokenizer = tokenizer_class.from_pretrained(str(files.folder), local_files_only=True)
    except Exception as error:  # transformers raises the errors of its backends
        problem = f"no usable tokenizer in {files.folder} ({type(error).__name__}: {error})"
        raise CheckpointError(f"{problem}; tokenizer.json and tokenizer_config.json are needed") from error
    if not tokenizer.is_fast:
        raise CheckpointError(f"the tokenizer in {files.folder} has no tokenizer.json ({type(tokenizer).__name__})")
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


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

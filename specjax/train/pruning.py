"""A byte-level or SentencePiece BPE tokenizer with fewer tokens: what a draft with a small embedding reads and writes.

A token is reached by merging two others, so those stay, too; the rest of the vocabulary is the most frequent. A text
then has more tokens, and every token that is left means what it meant.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from jaxtyping import Int64

NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def pruned_tokenizer(tokenizer: Any, counts: Int64[np.ndarray, "V"], size: int) -> Any:
    """The tokenizer of `size` tokens. Ids keep their order.

    Args:
        tokenizer: a fast one of transformers.
        counts: how often each of its tokens is wanted.

    Raises ValueError: it is no BPE tokenizer, or `size` has no room for the special tokens and the single characters.

    Worked example, merges "a b", "c d", "ab cd": with room for one more than a, b, c, d, and counts of ab 1, cd 2,
    abcd 9, the first by count, abcd, needs ab and cd too and does not fit; cd does.
    """
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    described = json.loads(tokenizer.backend_tokenizer.to_str())
    model = described["model"]
    if model.get("type") != "BPE":
        raise ValueError(f"--draft-vocab-size needs a target with a BPE tokenizer; this one is {model.get('type')}")
    merges = [tuple(each.split(" ")) if isinstance(each, str) else tuple(each) for each in model["merges"]]
    ids: dict[str, int] = model["vocab"]
    special = {each["content"]: each["id"] for each in described["added_tokens"]}
    parts: dict[int, tuple[int, int]] = {}
    for left, right in merges:
        if left + right in ids:
            parts.setdefault(ids[left + right], (ids[left], ids[right]))
    kept = {*special.values(), *(token for token in ids.values() if token not in parts)}
    if len(kept) > size:
        raise ValueError(
            f"--draft-vocab-size {size} has no room for the {len(kept)} special tokens and characters of the tokenizer"
        )

    def needed(token: int) -> set[int]:
        """The token and all that it is merged from, those already kept left out."""
        found: set[int] = set()
        waiting = [token]
        while waiting:
            token = waiting.pop()
            if token not in kept and token not in found:
                found.add(token)
                waiting += parts[token]
        return found

    for token in np.argsort(-counts, kind="stable").tolist():
        if token in parts and len(kept | (more := needed(token))) <= size:
            kept |= more
        if len(kept) == size:
            break
    renamed = {token: i for i, token in enumerate(sorted(kept))}
    model["vocab"] = {name: renamed[token] for name, token in ids.items() if token in renamed}
    model["merges"] = [list(pair) for pair in merges if all(name in model["vocab"] for name in (*pair, "".join(pair)))]
    for each in described["added_tokens"]:
        each["id"] = renamed[each["id"]]
    described["post_processor"] = None  # it may hold ids, and a draft reads the target's tokens, not texts
    named = {name: text for name in NAMED if (text := getattr(tokenizer, name)) is not None}
    core = Tokenizer.from_str(json.dumps(described))
    return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=tokenizer.chat_template, **named)

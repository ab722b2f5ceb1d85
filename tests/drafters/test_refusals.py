"""Refused options, trees, heads and names; the message says what would work. Flags: test_eagle_serving.py."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
from distil import pair_model, small_head
from toy_models import tiny_llama

from specjax.config import BlockConfig, HeadConfig, RopeConfig
from specjax.drafters import Block, Ngram, TreeShape, eagle_drafter, load_drafter, make_speculation
from specjax.load import requested

TARGET = tiny_llama(3, num_layers=7).target
EAGLE3 = HeadConfig("eagle3", 16, 48, 24, 4, 2, 8, 1e-5, RopeConfig(), 11, (1, 2, 3), own_head=True, mapped=True)
BLOCK = BlockConfig(
    hidden_size=16, feature_size=16, intermediate_size=8, num_heads=2, num_kv_heads=1, head_dim=4, norm_epsilon=1e-6,
    rope=RopeConfig(), vocab_size=TARGET.config.vocab_size, aux_layers=(0,), layers=1, block=5, mask_token=0,
    from_anchor=False, windows=(None,), causal=(False,),
)  # fmt: skip


def broken(target: Any) -> int:
    return 7


def eagle3(**changes: Any) -> Callable[[], Any]:
    return lambda: eagle_drafter(TARGET, replace(EAGLE3, **changes), TreeShape(1, 1, 2))


def block(**options: Any) -> Callable[[], Any]:
    return lambda: make_speculation(Block(**options), target=TARGET, head=BLOCK)


def ngram(**options: Any) -> Callable[[], Any]:
    return lambda: Ngram(**options)


def named(name: str) -> Callable[[], Any]:
    return lambda: load_drafter(name)


def made(algorithm: Any, **given: Any) -> Callable[[], Any]:
    return lambda: make_speculation(algorithm, **given)


EAGLE = small_head("eagle", pair_model())

REFUSED: list[tuple[Callable[[], Any], str]] = [
    (ngram(nodes=1), r"^Ngram\.nodes must be an integer from 2 to 64, got 1$"),
    (ngram(nodes=65), r"^Ngram\.nodes"),
    (ngram(min_match=13), r"^Ngram\.min_match must be from 1 to max_match, got 13 and 12$"),
    (ngram(max_match=65), r"^Ngram\.max_match"),
    (ngram(min_breadth=11), r"^Ngram\.min_breadth must be from 1 to max_breadth"),
    (ngram(branch_length=0), r"^Ngram\.branch_length"),
    (ngram(capacity=1023), r"^Ngram\.capacity must be an integer from 1024 to"),
    (ngram(capacity=2**24 + 1), r"^Ngram\.capacity"),
    (block(block=6), "block is 6, and the head was trained on blocks of 5 slots"),
    (block(nodes=6), "which draft 4 tokens; give at most 4 steps, or 5 draft tokens"),
    (block(nodes=5, block=3), "a block has 3 slots, which draft 2 tokens"),
    (eagle3(feature_size=32), "features of width 32, the target gives 48"),
    (eagle3(aux_layers=(1, 2, 7)), "output of layer 7, the target has 7 layers"),
    (eagle3(hidden_size=24), "hidden size is 24, the target's, whose embedding or head it uses, is 16"),
    (eagle3(own_head=False), "needs an output matrix of its own"),
    (eagle3(own_head=False, mapped=False), "vocabulary has 11 tokens, the target's 31"),
    (made("EAGLE", head=EAGLE), "got a head of kind 'eagle' and no target"),
    (made("EAGLE3", target=TARGET), "EAGLE3 needs a target and a draft head of kind 'eagle3', got no head"),
    (made("EAGLE3", target=TARGET, head=BLOCK), "got a head of kind 'block'"),
    (made("MTP", target=TARGET, head=EAGLE), "draft head of kind 'mtp', got a head of kind 'eagle'"),
    (made("STANDALONE", target=TARGET), "STANDALONE needs a target and a draft model; missing: model"),
    (made("AUTO"), r"AUTO chooses a drafter for a model: use Engine\.from_pretrained"),
    (made("EAGLE4"), "no algorithm draft='EAGLE4'; there are: AUTO, NONE, NGRAM, EAGLE, "),
    (made(broken, target=TARGET), r"drafter '.*broken' returned 7; it must return a Drafter or a Speculation"),
    (named("my_drafter:"), "drafter 'my_drafter:': write module:function"),
    (named("./my_drafter.py:lossy"), "write module:function"),
    (named("no_module:make"), r"cannot import no_module \(No module named 'no_module'\).*PYTHONPATH"),
    (named("lookup_drafter:lookup"), "lookup_drafter has no function lookup; it defines: Lookup, lookup_drafter"),
    (named("test_refusals:TARGET"), "test_refusals has a Target, no function, named TARGET"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message.strip("^")[:50] for _, message in REFUSED])
def test_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_drafter_of_another_type():
    """Before the model is looked for. Unwrapped: a caller's types are not checked as those of the tests are."""
    with pytest.raises(TypeError, match=r"^drafter must be a Drafter or a function of the Target .* got 5$"):
        inspect.unwrap(requested)("no such model", "AUTO", cast(Any, 5))

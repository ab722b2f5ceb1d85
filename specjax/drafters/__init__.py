"""Drafters: one file an algorithm; `options` has their options, `table` the algorithms by name, `factories` makes them.

Options load at once; the drafters, and jax with them, on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from specjax.drafters.options import DraftOptions, Eagle, Eagle3, Mtp, Ngram, NoDraft, Standalone
from specjax.drafters.table import DRAFTERS, Auto

if TYPE_CHECKING:
    from specjax.drafters.base import Context, Drafter, DraftState, Observation, Params, none_drafter
    from specjax.drafters.eagle import eagle_drafter
    from specjax.drafters.factories import DrafterFactory, Speculation, load_drafter, make_drafter, make_speculation
    from specjax.drafters.mtp import mtp_drafter
    from specjax.drafters.ngram import ngram_drafter
    from specjax.drafters.standalone import StandaloneParams, standalone_drafter
    from specjax.drafters.tree_shape import TreeShape

_NAMES = {
    "base": "Context DraftState Drafter Observation Params none_drafter",
    "eagle": "eagle_drafter",
    "factories": "DrafterFactory Speculation load_drafter make_drafter make_speculation",
    "mtp": "mtp_drafter",
    "ngram": "ngram_drafter",
    "standalone": "StandaloneParams standalone_drafter",
    "tree_shape": "TreeShape",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'specjax.drafters' has no attribute {name!r}")
    return getattr(importlib.import_module(f"specjax.drafters.{_HOMES[name]}"), name)

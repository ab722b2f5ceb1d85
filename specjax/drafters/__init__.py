"""Drafters: each algorithm is one file that returns a `Drafter`, a NamedTuple of pure functions.

Read in this order:

- `base`: the interface, and no drafts; docs/drafters.md is its guide.
- `options`: options of the algorithms, trees' shapes, and the table of algorithms by name; imports no jax.
- `grow`, `coupling`: EAGLE-2's tree with any draft model, and drafts with the target's noise.
- `eagle`, `mtp`, `block`, `standalone`, `ngram`: the algorithms. `standalone` is the shortest example with a model.
- `factories`: makes drafters from options, or from functions outside of this package.
- `check`: checks that a drafter keeps to the interface.

Options load at once; the drafters, and jax with them, on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from specjax.drafters.options import (
    DRAFTERS,
    Auto,
    Block,
    DraftOptions,
    Eagle,
    Eagle3,
    Mtp,
    Ngram,
    NoDraft,
    Standalone,
    TreeShape,
)

if TYPE_CHECKING:
    from specjax.drafters.base import Context, Drafter, DraftState, Observation, Params, none_drafter
    from specjax.drafters.block import block_drafter
    from specjax.drafters.eagle import eagle_drafter
    from specjax.drafters.factories import DrafterFactory, Speculation, load_drafter, make_drafter, make_speculation
    from specjax.drafters.mtp import mtp_drafter
    from specjax.drafters.ngram import ngram_drafter
    from specjax.drafters.standalone import StandaloneParams, standalone_drafter

_NAMES = {
    "base": "Context DraftState Drafter Observation Params none_drafter",
    "block": "block_drafter",
    "eagle": "eagle_drafter",
    "factories": "DrafterFactory Speculation load_drafter make_drafter make_speculation",
    "mtp": "mtp_drafter",
    "ngram": "ngram_drafter",
    "standalone": "StandaloneParams standalone_drafter",
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'specjax.drafters' has no attribute {name!r}")
    return getattr(importlib.import_module(f"specjax.drafters.{_MODULES[name]}"), name)

"""Drafters: each algorithm is one file with its options and a function that returns a `Drafter`, pure functions.

Read in this order:

- `base`: the interface, and no drafts; docs/drafters.md is its guide.
- `options`: bases of the algorithms' options, and trees' shapes.
- `grow`, `coupling`: EAGLE-2's tree with any draft model, and drafts with the target's noise.
- `eagle`, `mtp`, `assistant`, `block`, `standalone`, `ngram`: the algorithms. `standalone` and `assistant` are the
  shortest examples with a model.
- `factories`: the table of algorithms; makes drafters from options, or from functions outside of this package.
- `check`: checks that a drafter keeps to the interface.
"""

from specjax.drafters.assistant import Assistant, assistant_drafter
from specjax.drafters.base import Context, Drafter, DraftState, Observation, Params, Speculation, none_drafter
from specjax.drafters.block import Block, block_drafter
from specjax.drafters.eagle import Eagle, Eagle3, eagle_drafter
from specjax.drafters.factories import DRAFTERS, Auto, DrafterFactory, load_drafter, make_speculation, options_of
from specjax.drafters.mtp import Mtp, mtp_drafter
from specjax.drafters.ngram import Ngram, ngram_drafter
from specjax.drafters.options import DraftOptions, NoDraft, TreeShape
from specjax.drafters.standalone import Standalone, StandaloneParams, standalone_drafter

__all__ = [
    "DRAFTERS",
    "Assistant",
    "Auto",
    "Block",
    "Context",
    "DraftOptions",
    "DraftState",
    "Drafter",
    "DrafterFactory",
    "Eagle",
    "Eagle3",
    "Mtp",
    "Ngram",
    "NoDraft",
    "Observation",
    "Params",
    "Speculation",
    "Standalone",
    "StandaloneParams",
    "TreeShape",
    "assistant_drafter",
    "block_drafter",
    "eagle_drafter",
    "load_drafter",
    "make_speculation",
    "mtp_drafter",
    "ngram_drafter",
    "none_drafter",
    "options_of",
    "standalone_drafter",
]

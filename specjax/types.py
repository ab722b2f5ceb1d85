"""The glossary of dimension letters, and the array types written with them.

One meaning everywhere: annotations, einsums, comments, tests.

    R  rows of state (``max_running_requests``)      B  requests in the batch bucket
    N  block width: tree nodes, or new tokens per request in one forward
    C  block keys (C >= N)                           D  draft depth
    V  vocabulary     M  model width                 I  MLP width
    H  query heads    K  key/value heads             G  = H / K      E  head width
    L  layers         P  pages in the pool           S  tokens in a page
    T  pages a request may hold                      F  width of the features a drafter reads

Two words: *committed* means that a token's keys and values are in pages; *emitted* means that it is in the
output. Emitted is always committed + 1: the extra token is the *root*, at position ``prefix_length``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from jax import Array
from jaxtyping import Bool, Float, Float32, Int32

Weights: TypeAlias = Mapping[str, Any]  # nested dicts of arrays, one leaf per layer and matrix

Tokens: TypeAlias = Int32[Array, "B N"]
Positions: TypeAlias = Int32[Array, "B N"]
PageTable: TypeAlias = Int32[Array, "B T"]
PerRequest: TypeAlias = Int32[Array, "B"]
Active: TypeAlias = Bool[Array, "B"]
Hidden: TypeAlias = Float[Array, "B N M"]
Logits: TypeAlias = Float32[Array, "B N V"]

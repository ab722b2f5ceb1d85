"""How many nodes of a drafted tree to check: as many as promise the most tokens a second.

The best w nodes of a tree are expected to give 1 + the sum of their path probabilities tokens: an accepted draft is a
node whose whole path is accepted, and a path probability is the exponential of the node's score. Checking w nodes takes
so many milliseconds on this device, the draft's own time included, which is spent whatever w is. One width is chosen
for the whole batch, since all its requests share the forward:

    width w of those that are compiled with the largest    sum over requests of (1 + correction * sum of p) / ms(w)

                  1     2     4     8     16       milliseconds of a step on a CPU    20, 22, 25, 40, 70
    sure head     1.0   1.9   3.4   4.6   5.2      tokens a millisecond   .050, .086, .136, .115, .074:  4 nodes
    unsure head   1.0   1.15  1.25  1.35  1.4                             .050, .052, .050, .034, .020:  2 nodes
    the same on a GPU, all widths at 20 ms                                .050, .058, .063, .068, .070: 16 nodes

Sources: EAGLE-2 (Li et al., 2024, arXiv:2406.16858) found that a head's confidences approximate acceptance rates, and
keeps the nodes with the largest path products. Sizing the tree by measured costs of drafting and verification is done
by CAST (Hong, Tan and Hu, 2025, "Inference-Cost-Aware Dynamic Tree Construction", arXiv:2510.26577) and by EAGLE-4
(github.com/eagle-hq/EAGLE-4). Unlike CAST, the levels and the breadth of the draft are not chosen here: only how much
of what was drafted is checked, among widths that are compiled.

The choice depends on drafts and times, never on the target's draws, and every emitted token is the target's own draw:
the text is the same for every width. Pure functions; nothing here knows models, drafters or requests.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jaxtyping import Float32, Int32

from specjax.tree import DraftTree, ranks
from specjax.types import PerRequest


class Sizing(NamedTuple):
    """What the size of a step's trees is chosen from, for W widths.

    Attributes:
        milliseconds: float32 [W], above 0. Of a whole step of the batch at each width, in any one unit; inf: this
            width is not to be chosen.
        correction: float32 [B]. Accepted drafts of each request for each that the draft promised.
    """

    milliseconds: Float32[Array, "W"]
    correction: Float32[Array, "B"]


def path_probabilities(tree: DraftTree) -> Float32[Array, "B N"]:
    """The draft's probability that a node and all nodes above it are accepted; 0 for the root and where invalid."""
    drafts = tree.valid & (jnp.arange(tree.width) > 0)[None, :]
    return jnp.where(drafts, jnp.exp(jnp.minimum(tree.scores, 0.0)), 0.0)


def expected_tokens(
    tree: DraftTree, count: PerRequest, widths: tuple[int, ...], correction: Float32[Array, "B"]
) -> Float32[Array, "B W"]:
    """Tokens that each request is expected to emit where the best nodes of its tree are checked, as many as each width
    has: 1 + `correction` times their path probabilities, at most as many tokens as nodes.

    Args:
        count: most nodes of each tree, at least 1, as its request's draft limit says.
        widths: in nodes, the root included.
    """
    checked = jnp.minimum(jnp.array(widths, jnp.int32)[None, :], count[:, None])
    within = ranks(tree)[:, None, :] < checked[:, :, None]
    drafts = jnp.sum(jnp.where(within, path_probabilities(tree)[:, None, :], 0.0), axis=2)
    return 1.0 + jnp.minimum(correction[:, None] * drafts, (checked - 1).astype(jnp.float32))


def best_width(tokens: Float32[Array, "W"], milliseconds: Float32[Array, "W"]) -> Int32[Array, ""]:
    """The index of the width with the most tokens a millisecond; of equal ones the first, which is the narrowest."""
    return jnp.argmax(tokens / milliseconds).astype(jnp.int32)

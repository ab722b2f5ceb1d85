"""What the tests of the attention kernels share."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
from specjax_kernels.launch import Launch

# Largest absolute difference to the reference. Values are averages of standard normals, so below about 4; half a unit
# in the last place there is 2**-7 in bfloat16 (8 bits) and 2**-10 in float16 (11 bits), doubled for two roundings.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-6, "float16": 2**-9}


def fixed_pool(args, pages: int):
    """Arguments of `tree_attention` with a pool of `pages` pages, so that one program serves all lengths."""
    used = args[3].shape[0]
    room = ((0, pages - used), (0, 0), (0, 0), (0, 0))
    pool = [None if pages is None else jnp.pad(pages, room, constant_values=np.nan) for pages in args[3:5]]
    return (*args[:3], *pool, jnp.where(args[5] >= used, pages, args[5]), *args[6:])


def launched(rows: int, tokens: int, splits: int):
    """A replacement for `launch_for` with small shares, so that small tests have several."""

    def launch_for(dtype, width, count, heads, context) -> Launch:
        return Launch(rows, tokens, warps=4, stages=2, programs=4, tiles=-(-count // rows), splits=splits)

    return launch_for

"""What the tests of the two GPU kernels share."""

from __future__ import annotations

from specjax_kernels.launch import Launch


def launched(rows: int, tokens: int, splits: int):
    """Stands in for `launch_for`: small shares, so that small tests have many."""

    def launch_for(dtype, width, count, heads, context) -> Launch:
        return Launch(rows, tokens, warps=4, stages=2, programs=4, tiles=-(-count // rows), splits=splits)

    return launch_for

"""Kernels that XLA:CPU calls, compiled by Numba.

A kernel is two functions, the number of its tiles and the work of one tile. Read `runtime` first (how XLA calls a
kernel, and how its threads share the tiles), then a product: `rows` (stored matrices) or `quantised` (4 and 8 bits), or
`attention`. `vectors` is what their inner loops are written in, `object_code` keeps compiled kernels on disk, and
`repacking` has functions that loading calls without XLA.
"""

"""Kernels that XLA:CPU calls, compiled by Numba. In reading order:

runtime            how XLA calls a kernel, and how its threads share the tiles
rows, quantised    products with stored matrices, and with codes of 4 and 8 bits
attention          tree attention of a few float32 tokens
vectors            LLVM vectors for the inner loops
object_code        compiled kernels on disk
repacking          functions that loading calls without XLA
"""

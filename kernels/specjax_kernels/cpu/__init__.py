"""Kernels that XLA:CPU calls, compiled by Numba: products of a few rows and a stored weight.

`runtime` calls a kernel from XLA and shares its tiles among threads, `object_code` keeps compiled kernels on disk,
`rows` is the product.
"""

"""Kernels that XLA:CPU calls, compiled by Numba: products of a few rows and a stored weight."""

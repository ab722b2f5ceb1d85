"""The former name of `specjax.fleet.ray_data`."""

from specjax.fleet.ray_data import Generate

__all__ = ["Generate"]

"""Progress bars on stderr."""

from __future__ import annotations

from tqdm import tqdm


def bar(title: str, size: int, shown: bool) -> tqdm:
    """A bar over ``size`` bytes; silent, and harmless, if not ``shown``."""
    return tqdm(total=size, desc=title, unit="B", unit_scale=True, unit_divisor=1024, disable=not shown, leave=True)

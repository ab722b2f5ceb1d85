"""Progress of a long phase: a bar where stderr is a terminal, else one line at its end."""

from __future__ import annotations

import sys
from typing import Any

from tqdm import tqdm


class _Line(tqdm):
    """Says nothing until it is closed."""

    def display(self, *_: Any, **__: Any) -> None:
        pass

    def clear(self, *_: Any, **__: Any) -> None:
        pass

    def close(self) -> None:
        if self.disable:
            return
        self.leave = False
        super().close()
        done = (
            tqdm.format_sizeof(self.n, "B", 1024) if self.unit_scale else f"{self.n} {self.unit}{'s' * (self.n != 1)}"
        )
        part = "" if self.total in (None, self.n) else f" ({self.n / self.total:.0%})"
        note = f", {self.postfix}" if self.postfix and self.n == self.total else ""
        tqdm.write(f"{self.desc}: {done}{part} in {self.format_dict['elapsed']:.1f} s{note}", file=sys.stderr)


def progress_bar(title: str, total: int | None, unit: str, *, shown: bool = True, initial: int = 0) -> tqdm:
    """A bar over `total` units, of which `initial` were done before; silent if not `shown`.

    Args:
        total: None: unknown.
        unit: in the singular; "B": bytes.
    """
    scale = unit == "B"
    kind = tqdm if sys.stderr.isatty() else _Line
    divisor = 1024 if scale else 1000
    return kind(
        total=total, desc=title, unit=unit, unit_scale=scale, unit_divisor=divisor, initial=initial, disable=not shown
    )

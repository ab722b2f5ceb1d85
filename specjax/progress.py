"""Progress of a long phase: a bar where stderr is a terminal or a notebook's, else one line at its end."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from tqdm import tqdm


class _Line(tqdm):
    """Prints nothing until it is closed."""

    def display(self, *_: Any, **__: Any) -> None:
        pass

    clear = display

    def close(self) -> None:
        if self.disable:
            return
        self.leave = False
        scaled = tqdm.format_sizeof(self.n, "B", 1000)
        done = scaled if self.unit_scale else f"{self.n} {self.unit}{'s' * (self.n != 1)}"
        part = "" if self.total in (None, self.n) else f" ({self.n / self.total:.0%})"
        note = f", {self.postfix}" if self.postfix and self.n == self.total else ""
        with contextlib.suppress(OSError):  # a full disk must not end the work that is reported on
            super().close()
            tqdm.write(f"{self.desc}: {done}{part} in {self.format_dict['elapsed']:.1f} s{note}", file=sys.stderr)


def progress_bar(title: str, total: int | None, unit: str, *, shown: bool = True, initial: int = 0) -> tqdm:
    """A bar over `total` units (None: unknown), silent if not `shown`. `initial` units were done before. `unit` is
    in the singular; "B": bytes, 1 MB being 10^6 of them. `set_postfix_str` sets a note for the last line."""
    kind = tqdm if sys.stderr.isatty() or type(sys.stderr).__module__.startswith("ipykernel.") else _Line
    scale = {"unit_scale": True, "unit_divisor": 1000} if unit == "B" else {}
    return kind(total=total, desc=title, unit=unit, initial=initial, disable=not shown, **scale)

"""Training of draft heads: EAGLE-3, EAGLE-1/2, MTP and block heads (DFlash, DSpark, DFlash2). Read in this order:

    options     flags of `specjax train`
    data        JSONL lines to examples, packed into rows
    losses      forwards and losses: of several rounds, and of blocks
    head        a head's configuration and first weights; `export` writes it
    features    the target's outputs, computed once or in each step; `specjax train features` writes files
    run         optimiser, training step and the loop; `output` writes checkpoints, metrics, model card and curves
    plan        `specjax train --dry-run`: memory and hours, estimated
    generate    `specjax train generate`: the target writes training data
    vocab       `specjax train vocab`: token frequencies for a draft vocabulary

`differences` compares the settings of a resumed run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def differences(earlier: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """The changed settings of a resumed run, by flag; empty if there are none."""
    return "; ".join(
        f"{name if ' ' in name else '--' + name.replace('_', '-')} was {earlier.get(name)!r:.60} and is "
        f"{current.get(name)!r:.60}"
        for name in sorted({*earlier, *current})
        if earlier.get(name) != current.get(name)
    )

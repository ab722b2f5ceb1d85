"""What an engine counts while it works; whoever reports takes differences."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Counters:
    """What an engine has done since it was made."""

    prefilled_sequences: int = 0  # a resumed one counts again
    prefilled_tokens: int = 0
    steps: int = 0  # decode steps dispatched
    verifications: int = 0  # of one sequence in one step
    drafted_steps: int = 0  # those of them that could draft
    verified: int = 0  # tokens that these emitted
    generated: int = 0  # all tokens emitted

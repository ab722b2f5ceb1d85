"""Ray Data: completes the prompts of a dataset, with one engine per actor, as `specjax generate` completes a file.

    rows = ray.data.read_json("prompts.jsonl", lines=True)
    rows.map_batches(
        Generate,
        fn_constructor_kwargs={"settings": {"model": MODEL}, "sampling": {"max_new_tokens": 256}},
        concurrency=8,      # actors, each with an engine
        num_gpus=1,         # per actor
        batch_size=256,     # rows per call of an engine
    ).write_json("answers")

Does not import ray: Ray calls the class, shows the progress bar, and restarts actors that died.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.cli import build
from specjax.cli.generate import BAD_LINE, DEFAULTS, make_line, result
from specjax.cli.lines import parse_object
from specjax.engine import SamplingParams
from specjax.serve.fields import whole
from specjax.settings import from_mapping

ERROR = "error"
"""The column with the reason why a row has no text, or incomplete text."""

logger = logging.getLogger(__name__)


class Generate:
    """For `Dataset.map_batches`: takes rows with a prompt, and returns rows with its completion, in the same order.

    A row has one of the fields `prompt`, `messages` and `input_ids`, and may have an `id` and sampling fields, as in a
    line of `specjax generate`. Null fields count as absent. A result has the fields of an output line of
    `specjax generate`, and `error`: null, or the reason why the row could not be completed.

    A row without `seed` uses the run's seed plus a number computed from its `id`, or from its content if it has no
    `id`: its text does not depend on batches, actors or their order.

    Args:
        settings: the model, the engine and speculation: keys and values of a file for `--config`.
        sampling: default `SamplingParams`, before the model's defaults. The default seed is 0.
        keep: further columns, which are copied to the result.

    Raises:
        ValueError: a setting or a parameter is wrong, or the model cannot be loaded.
    """

    def __init__(
        self,
        settings: Mapping[str, Any] | None = None,
        sampling: Mapping[str, Any] | None = None,
        keep: Sequence[str] = (),
    ) -> None:
        SamplingParams.from_mapping(sampling or {})
        chosen = from_mapping(settings or {}, DEFAULTS, "settings")
        build.claim_gpu(chosen)
        self._engine = build.make_engine(chosen, progress=False)
        self._defaults = {**self._engine.sampling_defaults, "seed": 0, **(sampling or {})}
        self._keep = tuple(keep)

    def __call__(self, batch: Any) -> Any:
        """A batch in Ray's default format: a dict of columns. Returns a pandas DataFrame whose columns hold objects."""
        import pandas  # type: ignore  # comes with Ray Data

        rows = self.complete(list(rows_of(batch)))
        names = dict.fromkeys(name for row in rows for name in row)
        return pandas.DataFrame({name: pandas.Series([row.get(name) for row in rows], dtype=object) for name in names})

    def complete(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """As `__call__`, for a list of rows."""
        intake, answers, waiting = self._engine.intake, {}, []
        for index, row in enumerate(rows):
            fields = {name: value for name, value in row.items() if name not in self._keep or name == "id"}
            try:
                plain = parse_object(json.dumps(fields, default=str))
                line = make_line(index, plain, self._defaults, number_of(fields))
                waiting.append((line, intake.sequence(line.prompt, line.sampling)))
            except BAD_LINE as error:
                logger.warning("a row has no answer: %s", error)
                answers[index] = {"id": row.get("id"), ERROR: str(error)}
        completions = self._engine.complete([sequence for _, sequence in waiting])
        for (line, _), done in zip(waiting, completions, strict=True):
            problem = done.finish_reason.get("message") if done.finish_reason["type"] == "abort" else None
            answers[line.number] = result(line, done) | {ERROR: problem}
        return [answers[index] | {name: rows[index].get(name) for name in self._keep} for index in range(len(rows))]


def rows_of(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a batch of columns, with JSON values only and without null fields."""
    names = list(batch)
    for values in zip(*batch.values(), strict=True):
        row = {name: _plain(value) for name, value in zip(names, values, strict=True)}
        # A column of integers with missing values consists of floats.
        yield {name: whole(value) for name, value in row.items() if value is not None}


def number_of(row: Mapping[str, Any]) -> int:
    """A number from 0 to 2^48 - 1, computed from the id, or from the whole row if there is none."""
    text = json.dumps(row.get("id", row), sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def _plain(value: Any) -> Any:
    """Converts a value to JSON's types. NaN, which means a missing number, becomes None."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, Mapping):
        return {name: inner for name, member in value.items() if (inner := _plain(member)) is not None}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value

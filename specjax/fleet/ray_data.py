"""Ray Data: the prompts of a dataset, completed by one engine on each device as `specjax generate` completes a file's.

    rows = ray.data.read_json("prompts.jsonl", lines=True)
    rows.map_batches(
        Generate,
        fn_constructor_kwargs={"settings": {"model": MODEL}, "sampling": {"max_new_tokens": 256}},
        concurrency=8,      # actors, each with an engine
        num_gpus=1,         # of each actor
        batch_size=256,     # rows that an engine is given at once
    ).write_json("answers")

Does not import ray: Ray calls the class. Ray Data shows the progress bar, and starts an actor again that died.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.cli import build, flags
from specjax.cli.generate import BadLine, parse_line, result
from specjax.engine import SamplingParams
from specjax.engine.generation import complete
from specjax.settings import from_mapping

SETTINGS = flags.Settings(engine=flags.EngineSettings(max_running_requests=8))
ERROR = "error"
"""The column with the reason why a row has no text, or only a part of it."""

logger = logging.getLogger(__name__)


class Generate:
    """For `Dataset.map_batches`: rows with a prompt in, rows with its completion out, in the same order.

    A row has one of the fields `prompt`, `messages` and `input_ids`, and may have an `id` and sampling fields, as a
    line of `specjax generate` has them. Fields that are null count as absent. A row comes out with the fields of an
    output line of `specjax generate`, and with `error`: null, or why the row could not be completed.

    Without an `id` a row gets a number made of its content. A row that has no `seed` gets the run's seed plus that
    number, or plus a number made of its `id`: its text does not depend on batches, actors or their order.

    Args:
        settings: of the model, the engine and speculation: the keys and values of a file for `--config`.
        sampling: `SamplingParams` of rows that do not say; before these, the model's defaults. The seed is 0.
        keep: further columns, which go through as they are.

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
        chosen = from_mapping(settings or {}, SETTINGS, "settings")
        build.claim_gpu(chosen)
        self._engine = build.make_engine(chosen, progress=False)
        self._defaults = {**self._engine.sampling_defaults, "seed": 0, **(sampling or {})}
        self._keep = tuple(keep)

    def __call__(self, batch: Any) -> Any:
        """A batch in Ray's default format: a dict of columns. Returns a pandas DataFrame whose columns hold objects."""
        import pandas  # type: ignore  # comes with Ray Data

        rows = self.complete(list(rows_of(batch)))
        columns = list(dict.fromkeys(name for row in rows for name in row))
        return pandas.DataFrame({name: _objects([row.get(name) for row in rows]) for name in columns})

    def complete(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The same of rows."""
        intake, answers, waiting = self._engine.intake, {}, []
        for index, row in enumerate(rows):
            asked = {name: value for name, value in row.items() if name not in self._keep or name == "id"}
            line = parse_line(index, json.dumps(asked, default=str), self._defaults, number_of(asked))
            if not isinstance(line, BadLine):
                try:
                    waiting.append((line, intake.sequence(line.prompt, line.sampling)))
                    continue
                except ValueError as error:
                    line = BadLine(index, str(error))
            logger.warning("a row has no answer: %s", line.reason)
            answers[index] = {"id": row.get("id"), ERROR: line.reason}
        for (line, _), done in zip(waiting, complete(self._engine, [each for _, each in waiting]), strict=True):
            problem = done.finish_reason.get("message") if done.finish_reason["type"] == "abort" else None
            answers[line.number] = result(line, done) | {ERROR: problem}
        return [answers[index] | {name: rows[index].get(name) for name in self._keep} for index in range(len(rows))]


def rows_of(batch: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows of a batch of columns, as JSON has them: without arrays, and without fields that are null."""
    names = list(batch)
    for values in zip(*batch.values(), strict=True):
        row = {name: _plain(value) for name, value in zip(names, values, strict=True)}
        # A column of integers, some of which are missing, has floats.
        yield {
            name: int(value) if isinstance(value, float) and value.is_integer() else value
            for name, value in row.items()
            if value is not None
        }


def number_of(row: Mapping[str, Any]) -> int:
    """0 to 2^48 - 1, from the id, or where there is none from the prompt and all else."""
    text = json.dumps(row.get("id", row), sort_keys=True, default=str)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big")


def _plain(value: Any) -> Any:
    """A value as JSON has it; NaN, which stands for a missing number, is None."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value != value:
        return None
    if isinstance(value, Mapping):
        return {name: inner for name, each in value.items() if (inner := _plain(each)) is not None}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _objects(values: list[Any]) -> np.ndarray:
    """One object an entry, whatever it is: numpy would make a matrix of lists of one length."""
    column = np.empty(len(values), object)
    for index, value in enumerate(values):
        column[index] = value
    return column

"""A training run: data, models, steps, checkpoints, measurements, export."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from specjax import checkpoint
from specjax.compiling import use_compilation_cache
from specjax.progress import progress_bar
from specjax.train import update
from specjax.train.checkpoints import RunError, RunFolder, read_metrics
from specjax.train.data import Example, Rows, batch_rows
from specjax.train.features import FeatureStore, teach, training_target
from specjax.train.inputs import Inputs, identity, prepare
from specjax.train.options import TrainOptions
from specjax.train.results import Measure, Measured, model_card, plot
from specjax.train.unroll import Teacher
from specjax.train.update import Metrics, TrainState, everywhere, spread
from specjax.types import Weights

logger = logging.getLogger(__name__)


class Trainer:
    """One training run. The target's parameters are in its serving dtype; the model card quotes `command`."""

    def __init__(
        self, options: TrainOptions, inputs: Inputs, target_params: Weights, folder: RunFolder, *, command: str
    ) -> None:  # fmt: skip
        self.options, self.inputs, self.folder, self.command = options, inputs, folder, command
        run, dtype, draft = options.run, options.run.compute_dtype, inputs.draft
        self.mesh = Mesh(np.array(jax.local_devices()), ("data",))  # over which the rows of a batch are spread
        self.target = training_target(inputs.source.config, dtype)
        self.teach = teach(self.target, draft.features)
        self._teach_rows = jax.jit(self.teach)
        self._serving_params = target_params
        place = update.PLACEMENTS[run.target_placement]
        self.target_params = place(self.mesh, jax.tree.map(lambda leaf: leaf.astype(dtype), target_params))
        self.rate = update.schedule(options.optimizer, run.steps)
        optimizer = update.make_optimizer(options.optimizer, self.rate, draft.table)
        self.features = None if run.features == "none" else self._feature_store()
        weights, self.frozen = draft.split(draft.first_params(target_params), self._first_batch)
        weights = everywhere(self.mesh, weights)
        with jax.numpy_dtype_promotion("standard"):
            state = TrainState(jnp.int32(0), weights, jax.jit(optimizer.init)(weights))
        self.state = everywhere(self.mesh, state)
        self.update = update.make_update(
            draft.loss(self.target), optimizer, everywhere(self.mesh, self.frozen), dtype=dtype,
            seed=run.train_seed, teach=None if self.features else self.teach,
        )  # fmt: skip
        self._measure: Measure | None = None

    def _feature_store(self) -> FeatureStore:
        run, source, draft = self.options.run, self.inputs.source, self.inputs.draft
        stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in source.files.weights]
        layers = () if draft.features == "final" else draft.features
        return FeatureStore(
            self._teach_on_host, self.inputs.rows, mode=run.features,
            folder=Path(run.feature_folder or Path(run.output) / "features"),
            widths=(draft.feature_size, source.config.hidden_size), dtype=run.compute_dtype,
            batch=run.batch_size, seed=self.options.data.data_seed,
            identity=f"{self.options.model.model} {stamps} {source.config.dtype} {layers}",
        )  # fmt: skip

    def _teach_on_host(self, rows: Rows) -> Teacher:
        """The target's forward over one batch."""
        batch = jax.tree.map(lambda x: x[0], spread(self.mesh, rows, (1, -1)))
        return jax.device_get(self._teach_rows(self.target_params, batch))

    def _first_batch(self) -> tuple[Teacher, Rows]:
        """The target's outputs for the first batch, which a resumed run finds the same."""
        rows = self.inputs.rows
        numbers = batch_rows(0, len(rows.tokens), self.options.run.batch_size, self.options.data.data_seed)
        first = Rows(*(part[numbers] for part in rows))
        return self.features.get(numbers) if self.features else self._teach_on_host(first), first

    def row_numbers(self, step: int) -> np.ndarray:
        """The rows of the step after `step` steps."""
        size = self.options.run.batch_size * self.options.run.accumulate
        return batch_rows(step, len(self.inputs.rows.tokens), size, self.options.data.data_seed)

    def run(self) -> dict[str, Any]:
        """Start or resume, and train to the last step. Returns the summary."""
        run, folder = self.options.run, self.folder.folder
        if self.folder.latest is not None:
            self.state = self.folder.restore(self.state)
            print(f"Resuming {run.output} at step {int(self.state.step)} of {run.steps}", file=sys.stderr)
            if self.folder.latest > run.steps:
                raise RunError(
                    f"--steps {run.steps} is less than the {self.folder.latest} that the run in --output {run.output} "
                    "has done; give at least as many, or another --output to start anew"
                )
        first, measured = int(self.state.step), None
        self.folder.rewind(first)
        if first and self._to_measure(first):
            # The run may have been killed between the checkpoint and its measurement.
            there = (row for row in read_metrics(folder) if row["step"] == first and "accept_length" in row)
            last = next(there, None)
            measured = self.measure(first) if last is None else Measured(*(last[name] for name in Measured._fields))
        for step in self._steps():
            if self._to_measure(step):
                measured = self.measure(step)
        done, head = int(self.state.step), None
        if done == run.steps:
            head = str(self.export(Path(self.options.export.export or folder / "head"), measured))
        chart, found = plot(folder), {} if measured is None else measured._asdict()
        return {
            "step": done, "steps": run.steps, "output": run.output, "accept_length": found.get("accept_length"),
            "by_depth": found.get("by_depth"), "head": head, "plot": None if chart is None else str(chart),
        }  # fmt: skip

    def _to_measure(self, step: int) -> bool:
        every = self.options.measure.measure_every
        return step == self.options.run.steps or bool(every and step % every == 0)

    def _steps(self) -> Iterator[int]:
        """Train; yields the number of each finished step."""
        run, first = self.options.run, int(self.state.step)
        shape = (run.accumulate, run.batch_size)
        since = started = time.perf_counter()
        pending: list[tuple[Metrics, int]] = []
        sizes = (self.inputs.rows.segments > 0).sum(axis=1)
        total = sum(int(sizes[self.row_numbers(step)].sum()) for step in range(first))
        with progress_bar("Training", run.steps, "step", initial=first) as bar:
            for step in range(first + 1, run.steps + 1):
                numbers = self.row_numbers(step - 1)
                batch = Rows(*(part[numbers] for part in self.inputs.rows))
                stored = self.features.get(numbers) if self.features else None
                batch, stored = spread(self.mesh, (batch, stored), shape)
                self.state, metrics = self.update(self.state, self.target_params, batch, stored)
                tokens = int(sizes[numbers].sum())
                pending.append((metrics, tokens))
                total += tokens
                bar.update()
                stop = run.stop_after and time.perf_counter() - started > run.stop_after * 60
                save = step % run.checkpoint_every == 0 or step == run.steps or stop
                # A line for each checkpoint: a resumed run begins a new one there, as this one does.
                if step % run.log_every == 0 or save:
                    jax.block_until_ready(metrics)
                    now = time.perf_counter()
                    row = {"step": step, "tokens": total, **self._row(step, pending, now - since)}
                    if not np.isfinite([row["loss"], row["gradient_norm"]]).all():
                        raise RunError(
                            f"step {step} has the loss {row['loss']} and a gradient of norm {row['gradient_norm']}: "
                            "give a lower --learning-rate or --clip-norm and another --output. The last checkpoint, "
                            f"of step {self.folder.latest}, is from before"
                        )
                    self.folder.log(row)
                    matched = " ".join(f"{value:.2f}" for value in row["matched"][:5])
                    speed = f"{row['tokens_per_second']:.0f} tok/s"
                    bar.set_postfix_str(f"loss {row['loss']:.3f}, right {matched}, {speed}")
                    pending, since = [], now
                if save:
                    self.folder.save(self.state)
                before = time.perf_counter()
                yield step
                since += time.perf_counter() - before  # measuring is not training
                if stop:
                    return

    def _row(self, step: int, pending: list[tuple[Metrics, int]], seconds: float) -> dict[str, Any]:
        """A line of metrics.jsonl: means over the steps since the last line."""
        found = [jax.device_get(metrics) for metrics, _ in pending]
        sums = jax.tree.map(lambda *parts: np.sum(parts, axis=0), *(metrics.sums for metrics in found))
        return {
            "loss": round(float(np.mean([float(metrics.loss) for metrics in found])), 5),
            "losses": [round(float(x), 4) for x in sums.loss / np.maximum(sums.counted, 1)],
            "matched": [round(float(x), 4) for x in sums.matched / np.maximum(sums.slots, 1)],
            "inside": round(float(sums.counted[0] / max(sums.slots[0], 1)), 4),
            "gradient_norm": round(float(found[-1].gradient_norm), 4),
            "learning_rate": float(np.asarray(self.rate(step - 1))),
            "tokens_per_second": round(sum(tokens for _, tokens in pending) / max(seconds, 1e-9), 1),
        }

    def draft_params(self) -> Weights:
        """The draft's parameters on one device, float32."""
        weights, frozen = jax.tree.map(jnp.asarray, jax.device_get((dict(self.state.params), self.frozen)))
        return self.inputs.draft.exported(weights, frozen)

    def measure(self, step: int) -> Measured | None:
        """Decode held-back prompts, log the accept length, and keep the best head so far in best/."""
        settings, inputs = self.options.measure, self.inputs
        prompts = [found for example in inputs.held_back if (found := prompt_of(example))][: settings.measure_prompts]
        if not prompts:
            return None
        dtypes = self.options.export.export_dtype, inputs.source.config.dtype
        params = inputs.draft.served(self.draft_params(), *dtypes)
        if self._measure is None:
            self._measure = Measure(settings, inputs, self._serving_params, params, prompts)
        found = self._measure(params)
        row = {"step": step, **found._asdict()}
        earlier = [each["accept_length"] for each in read_metrics(self.folder.folder) if "accept_length" in each]
        if found.accept_length > max(earlier, default=0.0):
            self.export(self.folder.folder / "best", found, [row])
        self.folder.log(row)
        shares = " ".join(f"{share:.2f}" for share in found.by_depth)
        tqdm.write(f"step {step}: accept length {found.accept_length:.3f} in the engine, by depth {shares}", sys.stderr)
        return found

    def export(self, folder: Path, measured: Measured | None, unlogged: Sequence[dict[str, Any]] = ()) -> Path:
        """Export the current head, with a model card."""
        draft = self.inputs.draft
        card = model_card(
            target=self.options.model.model, draft=draft, facts=self.inputs.facts, command=self.command,
            step=int(self.state.step), metrics=[*read_metrics(self.folder.folder), *unlogged], measured=measured,
        )  # fmt: skip
        return draft.export(folder, self.draft_params(), card)


def prompt_of(example: Example) -> list[int]:
    """The tokens before the first answer; empty if there are none."""
    return example.tokens[: np.argmax(example.loss)].tolist()


def train(options: TrainOptions, *, command: str) -> dict[str, Any]:
    """Train a head; see `specjax train --help`. Raises ValueError or OSError: an input is wrong."""
    use_compilation_cache()
    inputs = prepare(options)
    if options.measure.measure_prompts and not any(prompt_of(example) for example in inputs.held_back):
        logger.warning(
            "no accept length will be measured: --held-back keeps no example of --data that has a prompt and an answer"
        )
    warmup, steps = options.optimizer.warmup_steps, options.run.steps
    if warmup >= steps:
        logger.warning(
            "--warmup-steps %d is not less than --steps %d: the learning rate only rises, and may not reach its peak; "
            "give --warmup-steps %d, for example", warmup, steps, steps // 10,
        )  # fmt: skip
    with RunFolder(Path(options.run.output), identity(options, inputs), keep=options.run.keep_checkpoints) as folder:
        print(", ".join(f"{name} {value}" for name, value in inputs.facts.items()), file=sys.stderr)
        source = inputs.source
        params = checkpoint.load_params(source.files, source.config, quantization="none", progress=True)
        return Trainer(options, inputs, params, folder, command=command).run()

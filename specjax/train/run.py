"""A training run: data, models, steps, checkpoints, measurements, export."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from specjax.drafters import TreeShape
from specjax.engine.executables import use_compilation_cache
from specjax.models import make_target
from specjax.models.eagle_head import eagle_head
from specjax.progress import progress_bar
from specjax.train import draft
from specjax.train.attention import packed_attention
from specjax.train.card import model_card
from specjax.train.checkpoints import RunError, RunFolder, read_metrics
from specjax.train.data import Example
from specjax.train.export import export_head
from specjax.train.features import FeatureStore, Kept
from specjax.train.inputs import Loaded, identity, load, prepare
from specjax.train.measure import Measure, Measured
from specjax.train.optimizer import make_optimizer, schedule
from specjax.train.options import TrainOptions
from specjax.train.packing import Rows, batch_rows
from specjax.train.plot import plot
from specjax.train.teacher import teach, training_target
from specjax.train.unroll import Batch, Teacher
from specjax.train.update import Metrics, TrainState, data_mesh, everywhere, make_update, split_params, spread

logger = logging.getLogger(__name__)


class Trainer:
    """Steps of a run. `run` does all of it."""

    def __init__(self, options: TrainOptions, loaded: Loaded, folder: RunFolder, *, command: str) -> None:
        self.options, self.loaded, self.folder, self.command = options, loaded, folder, command
        run, kind = options.run, options.draft.draft
        dtype = run.compute_dtype
        self.mesh = data_mesh()
        self.target = training_target(loaded.config, dtype)
        self.head_config = replace(loaded.head, dtype=dtype)
        head = eagle_head(self.head_config, self.target, backend=packed_attention)
        wanted: Any = self.head_config.aux_layers if self.head_config.kind == "eagle3" else "final"
        self.teach = teach(self.target, wanted)
        self._teach_rows = jax.jit(self.teach)
        self.target_params = everywhere(self.mesh, jax.tree.map(lambda leaf: leaf.astype(dtype), loaded.target_params))
        o = options.optimizer
        self.rate = schedule(
            o.schedule, o.learning_rate, steps=run.steps, warmup=o.warmup_steps, final=o.final_learning_rate
        )
        optimizer = make_optimizer(
            o.optimizer, self.rate, beta1=o.beta1, beta2=o.beta2, weight_decay=o.weight_decay, clip_norm=o.clip_norm,
            clip_value=o.clip_value,
        )  # fmt: skip
        self.features: FeatureStore | None = None
        if run.features != "none":
            self.features = self._feature_store()
        self.scale = self._feature_scale()
        weights, self.frozen = split_params(loaded.params)
        if self.scale is not None and loaded.given is not None:
            weights = {**weights, "fc": weights["fc"] / self.scale[:, None]}
        weights = everywhere(self.mesh, weights)
        with jax.numpy_dtype_promotion("standard"):
            state = TrainState(jnp.int32(0), weights, jax.jit(optimizer.init)(weights))
        self.state = everywhere(self.mesh, state)
        self.update = make_update(
            head, self.target, draft.objective(kind, options.loss), optimizer, everywhere(self.mesh, self.frozen),
            seed=run.train_seed, teach=None if self.features else self.teach, scale=self.scale,
        )  # fmt: skip
        self._measure: Measure | None = None
        self.best = 0.0

    def _on_rows(self, rows: Rows) -> Kept:
        """The target's forward over one batch."""
        parts: list[Any] = [part[None] for part in rows]
        parted = spread(self.mesh, Batch(*parts))
        batch = jax.tree.map(lambda x: x[0], parted)
        return Kept(*(np.asarray(part) for part in self._teach_rows(self.target_params, batch)))

    def _feature_store(self) -> FeatureStore:
        run, config = self.options.run, self.loaded.config
        folder = Path(run.feature_folder) if run.feature_folder else Path(run.output) / "features"
        aux_layers, files = self.head_config.aux_layers, [(file, file.stat()) for file in self.loaded.files.weights]
        stamps = [(file.name, found.st_size, found.st_mtime_ns) for file, found in files]
        return FeatureStore(
            self._on_rows, self.loaded.rows, mode=run.features, folder=folder,
            widths=(self.head_config.feature_size, config.hidden_size), dtype=run.compute_dtype,
            batch=run.batch_size, seed=self.options.data.data_seed,
            identity=f"{self.options.model.model} {stamps} {config.dtype} {aux_layers}",
        )  # fmt: skip

    def _feature_scale(self) -> Any:
        """From the first batch; the same in a resumed run. Heads of other kinds read what is normalised already."""
        if self.head_config.kind != "eagle3":
            return None
        run, rows = self.options.run, self.loaded.rows
        numbers = batch_rows(0, len(rows.tokens), run.batch_size, self.options.data.data_seed)
        kept = self.features.get(numbers) if self.features else self._on_rows(Rows(*(part[numbers] for part in rows)))
        return jnp.asarray(draft.feature_scale(kept.features, rows.segments[numbers]))

    # Steps

    def batch(self, step: int) -> tuple[Batch, Teacher | None, int]:
        """[A, B, N] rows of a step, their features if they are kept, and the tokens in them."""
        run, rows = self.options.run, self.loaded.rows
        shape = (run.accumulate, run.batch_size)
        numbers = batch_rows(step, len(rows.tokens), run.batch_size * run.accumulate, self.options.data.data_seed)

        def parted(part: np.ndarray) -> Any:
            return part.reshape(*shape, *part.shape[1:])

        batch = Batch(*(parted(part[numbers]) for part in rows))
        kept = None
        if self.features is not None:
            kept = spread(self.mesh, Teacher(*(parted(part) for part in self.features.get(numbers))))
        return spread(self.mesh, batch), kept, int((rows.segments[numbers] > 0).sum())

    def run(self) -> dict[str, Any]:
        """Resumes or starts, and goes on to the last step. Returns the summary."""
        run = self.options.run
        if self.folder.latest is not None:
            self.state = self.folder.restore(self.state)
            print(f"Resuming {run.output} at step {int(self.state.step)} of {run.steps}", file=sys.stderr)
        first, measured = int(self.state.step), None
        lines = [row for row in read_metrics(self.folder.folder) if "accept_length" in row and row["step"] <= first]
        self.best = max((row["accept_length"] for row in lines), default=0.0)
        with self.folder.metrics(first):
            if first and self._to_measure(first):
                # It may have been killed between the checkpoint and its measurement.
                last = lines[-1] if lines and lines[-1]["step"] == first else None
                measured = self.measure(first) if last is None else Measured(*(last[name] for name in Measured._fields))
            for step in self._steps():
                if self._to_measure(step):
                    measured = self.measure(step)
        done = int(self.state.step)
        folder = self.export(measured) if done == run.steps else None
        chart = plot(self.folder.folder)
        return {
            "step": done, "steps": run.steps, "output": run.output,
            "accept_length": None if measured is None else measured.accept_length,
            "by_depth": None if measured is None else measured.by_depth,
            "head": None if folder is None else str(folder), "plot": None if chart is None else str(chart),
        }  # fmt: skip

    def _to_measure(self, step: int) -> bool:
        every = self.options.measure.measure_every
        return step == self.options.run.steps or bool(every and step % every == 0)

    def _steps(self) -> Iterator[int]:
        """Trains; yields each step that is done."""
        run = self.options.run
        started, deadline = time.perf_counter(), run.stop_after * 60 or float("inf")
        first = int(self.state.step)
        waiting: list[tuple[int, Metrics, int]] = []
        since, total = started, self._tokens_until(first)
        with progress_bar("Training", run.steps, "step", initial=first) as bar:
            for step in range(first + 1, run.steps + 1):
                batch, kept, tokens = self.batch(step - 1)
                self.state, metrics = self.update(self.state, self.target_params, batch, kept)
                waiting.append((step, metrics, tokens))
                total += tokens
                bar.update()
                stop = time.perf_counter() - started > deadline
                save = step % run.checkpoint_every == 0 or step == run.steps or stop
                # A line for each checkpoint: a resumed run begins a new one there, as this one does.
                if step % run.log_every == 0 or save:
                    jax.block_until_ready(metrics)
                    now = time.perf_counter()
                    row = self._row(waiting, total, now - since)
                    self._check_finite(row)
                    self.folder.log(row)
                    matched = " ".join(f"{value:.2f}" for value in row["matched"][:5])
                    bar.set_postfix_str(
                        f"loss {row['loss']:.3f}, right {matched}, {row['tokens_per_second']:.0f} tok/s"
                    )
                    waiting, since = [], now
                if save:
                    self.folder.save(self.state)
                before = time.perf_counter()
                yield step
                since += time.perf_counter() - before  # measuring is not training
                if stop:
                    return

    def _check_finite(self, row: dict[str, Any]) -> None:
        if not np.isfinite([row["loss"], row["gradient_norm"]]).all():
            raise RunError(
                f"step {row['step']} has the loss {row['loss']} and a gradient of norm {row['gradient_norm']}: give a "
                "lower --learning-rate or --clip-norm and another --output. The last checkpoint, of step "
                f"{self.folder.latest}, is from before"
            )

    def _tokens_until(self, step: int) -> int:
        run, rows = self.options.run, self.loaded.rows
        sizes = (rows.segments > 0).sum(axis=1)
        size = run.batch_size * run.accumulate
        seed = self.options.data.data_seed
        return sum(int(sizes[batch_rows(each, len(sizes), size, seed)].sum()) for each in range(step))

    def _row(self, waiting: list[tuple[int, Metrics, int]], total: int, seconds: float) -> dict[str, Any]:
        """A line of the log: means over the steps since the last one."""
        sums = [metrics.sums for _, metrics, _ in waiting]
        asked = np.sum([np.asarray(each.asked) for each in sums], axis=0)
        count = np.sum([np.asarray(each.counted) for each in sums], axis=0)
        matched = np.sum([np.asarray(each.matched) for each in sums], axis=0)
        losses = np.sum([np.asarray(each.loss) for each in sums], axis=0)
        step = waiting[-1][0]
        return {
            "step": step,
            "tokens": total,
            "loss": round(float(np.mean([float(metrics.loss) for _, metrics, _ in waiting])), 5),
            "losses": [round(float(x), 4) for x in losses / np.maximum(count, 1)],
            "matched": [round(float(x), 4) for x in matched / np.maximum(asked, 1)],
            "inside": round(float(count[0] / max(asked[0], 1)), 4),
            "gradient_norm": round(float(waiting[-1][1].gradient_norm), 4),
            "learning_rate": float(np.asarray(self.rate(step - 1))),
            "tokens_per_second": round(sum(tokens for *_, tokens in waiting) / max(seconds, 1e-9), 1),
        }

    # What comes out

    def draft_params(self, cast: Callable[[Any], Any] = lambda leaf: leaf) -> dict[str, Any]:
        """The head's parameters on one device, as float32."""
        weights = {name: jnp.asarray(np.asarray(leaf)) for name, leaf in self.state.params.items()}
        if self.scale is not None:
            weights["fc"] = weights["fc"] * self.scale[:, None]
        return {**{name: cast(leaf) for name, leaf in weights.items()}, **self.loaded_ids()}

    def loaded_ids(self) -> dict[str, Any]:
        return {name: jnp.asarray(np.asarray(leaf)) for name, leaf in self.frozen.items()}

    def measure(self, step: int) -> Measured | None:
        """Decodes held-back prompts, logs it, and keeps the best head so far in best/."""
        settings, loaded = self.options.measure, self.loaded
        prompts = [found for example in loaded.held_back if (found := prompt_of(example))][: settings.measure_prompts]
        if not prompts:
            return None
        serving = replace(loaded.head, dtype=loaded.config.dtype)

        def cast(leaf: Any) -> Any:
            return leaf.astype(self.options.export.export_dtype).astype(loaded.config.dtype)

        params = self.draft_params(cast)
        if self._measure is None:
            self._measure = Measure(
                make_target(loaded.config), loaded.target_params, loaded.tokenizer, serving, params, prompts,
                shape=TreeShape(settings.measure_steps, 1, settings.measure_steps + 1),
                max_new_tokens=settings.measure_tokens, eos_ids=loaded.eos_ids,
            )  # fmt: skip
        found = self._measure(params)
        row = {"step": step, **found._asdict()}
        if found.accept_length > self.best:
            self.best = found.accept_length
            self._export(Path(self.options.run.output) / "best", found, step, [row])
        self.folder.log(row)
        shares = " ".join(f"{share:.2f}" for share in found.by_depth)
        tqdm.write(f"step {step}: accept length {found.accept_length:.3f} in the engine, by depth {shares}", sys.stderr)
        return found

    def export(self, measured: Measured | None) -> Path:
        """The head as it is, for engines."""
        folder = Path(self.options.export.export or Path(self.options.run.output) / "head")
        return self._export(folder, measured, int(self.state.step))

    def _export(self, folder: Path, measured: Measured | None, step: int, more: Sequence[dict[str, Any]] = ()) -> Path:
        loaded, name = self.loaded, self.options.model.model
        card = model_card(
            target=name, kind=self.options.draft.draft, facts=loaded.facts, command=self.command,
            step=step, metrics=[*read_metrics(self.folder.folder), *more], measured=measured, head=loaded.head,
        )  # fmt: skip
        return export_head(
            folder, loaded.head, self.draft_params(), loaded.config, target_name=name, card=card,
            dtype=self.options.export.export_dtype, license=self.options.export.license,
        )  # fmt: skip


def prompt_of(example: Example) -> list[int]:
    """The tokens before the first answer; empty if there are none."""
    first = int(np.argmax(example.loss)) if example.loss.any() else 0
    return [int(token) for token in example.tokens[:first]]


def train(options: TrainOptions, *, command: str) -> dict[str, Any]:
    """A whole run; see `python -m specjax.train --help`.

    Raises:
        ValueError (CheckpointError, RunError, FeatureError, ExportError among them), OSError: says what is wrong.
    """
    use_compilation_cache()
    inputs = prepare(options)
    if options.measure.measure_prompts and not any(prompt_of(example) for example in inputs.held_back):
        logger.warning(
            "no accept length will be measured: --held-back keeps no example of --data that has a prompt and an answer"
        )
    with RunFolder(Path(options.run.output), identity(options, inputs), keep=options.run.keep_checkpoints) as folder:
        print(", ".join(f"{name} {value}" for name, value in inputs.facts.items()), file=sys.stderr)
        return Trainer(options, load(options, inputs), folder, command=command).run()

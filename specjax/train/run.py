"""A training run: inputs, steps, checkpoints, measurements, export.

A step computes gradients of the head in low precision, for float32 weights. A batch is split into A parts whose
gradients are summed, so that a batch may exceed the memory; each part is spread over the devices of a mesh. Loss and
gradient equal those of the whole batch.
"""

from __future__ import annotations

import hashlib
import signal
import sys
import threading
import time
from collections import ChainMap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Float32, Int32
from tqdm import tqdm

from specjax import checkpoint
from specjax.cache import Weights
from specjax.cli.flags import ModelSettings
from specjax.config import ModelConfig
from specjax.drafters import Params, TreeShape
from specjax.engine import Engine, SamplingParams
from specjax.engine.config import EngineConfig
from specjax.engine.sequence import accept_histogram
from specjax.load import use_compilation_cache
from specjax.models import make_target
from specjax.progress import progress_bar
from specjax.train.data import Example, Rows, batch_rows, load_data, pack, split
from specjax.train.export import export_head
from specjax.train.features import FeatureStore, teach, training_target
from specjax.train.head import HeadDraft, TargetSource
from specjax.train.losses import Loss, Sums, Teacher, with_dtype
from specjax.train.options import RESUMABLE, MeasureSettings, OptimizerSettings, TrainOptions
from specjax.train.output import RunError, RunFolder, model_card, plot, read_metrics

DEFAULT_HELD_BACK = 64  # examples, at most a tenth of --data


class Inputs(NamedTuple):
    """Inputs of a run, except the target's weights."""

    source: TargetSource
    rows: Rows
    held_back: list[Example]
    draft: HeadDraft
    facts: dict[str, Any]  # counts of the data, for the log and the card


def read_config(
    model: ModelSettings, *, platform: str | None = None, outline: bool = False
) -> tuple[checkpoint.ModelFiles, ModelConfig]:
    """The target's files and config. `platform`: see `checkpoint.model_config`; `outline`: without its weights. Raises
    CheckpointError, or ValueError for quantised weights."""
    if model.quantization not in ("auto", "none"):
        raise ValueError(
            f"--quantization {model.quantization} does not apply to training, which uses the checkpoint's own weights; "
            "leave the flag out"
        )
    files = checkpoint.resolve(model.model, revision=model.revision, progress=True, outline=outline)
    config = checkpoint.model_config(files.config, dtype=model.dtype, platform=platform)
    return files, config


def prepare(options: TrainOptions) -> Inputs:
    """Read everything but the target's weights. Raises CheckpointError, ValueError or OSError for a wrong input."""
    model, batch = options.model, options.run.batch_size
    devices = jax.local_device_count()
    if batch % devices:
        raise ValueError(f"--batch-size {batch} cannot be spread over {devices} devices; give a multiple")
    files, config = read_config(model)
    tokenizer = checkpoint.load_tokenizer(files, folder=model.tokenizer_path, chat_template=model.chat_template)
    eos = checkpoint.stop_token_ids(files, tokenizer, config.vocab_size)
    source = TargetSource(files, tokenizer, config, eos)
    draft = HeadDraft(options, source)
    rows, held_back, facts = read_data(options, tokenizer, config)
    return Inputs(source, rows, held_back, draft, facts)


def read_data(options: TrainOptions, tokenizer: Any, target: ModelConfig) -> tuple[Rows, list[Example], dict[str, Any]]:
    """Packed rows, held-back examples, and counts. Raises ValueError or OSError if there is no example."""
    settings, seed = options.data, options.data.data_seed
    answers, texts = load_data(settings, tokenizer, target, max_length=settings.row_length)
    count, reserved, chosen = len(answers.examples), settings.held_back, texts.examples
    if reserved and reserved >= count:
        raise ValueError(f"--held-back {reserved} must be less than the {count} usable examples of --data")
    if reserved is None:
        reserved = min(DEFAULT_HELD_BACK, -(-count // 10)) if count > 1 else 0
    train, held_back = split(answers.examples, reserved, seed)
    if settings.text_skip:
        if settings.text_skip >= len(chosen):
            raise ValueError(
                f"--text-skip {settings.text_skip} leaves none of the {len(chosen)} examples of --text-data"
            )
        chosen, _ = split(chosen, settings.text_skip, seed)
    if 0 < settings.text_examples < len(chosen):
        _, chosen = split(chosen, settings.text_examples, seed)
    rows = pack([*train, *chosen], settings.row_length, seed)
    facts = {
        "files": [Path(path).name for path in (*settings.data, *settings.text_data)],
        "examples": len(train) + len(chosen),
        "texts": len(chosen),
        "held_back": len(held_back),
        "bad_lines": len(answers.skipped) + len(texts.skipped),
        "truncated": answers.truncated + texts.truncated,
        "turns_without_loss": answers.turns_without_loss,
        "rows": len(rows.tokens),
        "tokens": int((rows.segments > 0).sum()),
        "loss_tokens": int(rows.loss.sum()),
    }
    return rows, held_back, facts


def identity(options: TrainOptions, inputs: Inputs) -> dict[str, Any]:
    """The settings that a resumed run must repeat."""
    values = ChainMap(*asdict(options).values())
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(part).tobytes() for part in inputs.rows)).hexdigest()
    return {name.replace("_", "-"): value for name, value in values.items() if name not in RESUMABLE} | {
        "held-back": len(inputs.held_back),
        "content of the data": digest[:16],
        "devices": jax.local_device_count(),
    }


def schedule(settings: OptimizerSettings, steps: int) -> optax.Schedule:
    """Linear warm-up from 0, then down to `final_learning_rate` times the peak at `steps`."""
    peak, final, warmup = settings.learning_rate, settings.final_learning_rate, settings.warmup_steps
    rest = max(steps - warmup, 1)
    decay = {
        "cosine": optax.cosine_decay_schedule(peak, rest, alpha=final),
        "constant": optax.constant_schedule(peak),
    }[settings.schedule]
    # The first update has rate / warm-up: a rate of 0 would change nothing.
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, decay], [warmup])


def make_optimizer(settings: OptimizerSettings, rate: optax.Schedule) -> optax.GradientTransformation:
    """Adam after clipping by global norm (0: no clipping)."""
    clip = optax.clip_by_global_norm(settings.clip_norm) if settings.clip_norm else optax.identity()
    return optax.chain(clip, optax.adam(rate, b1=0.9, b2=0.95))


class TrainState(NamedTuple):
    """The state of a checkpoint; the step determines the data."""

    step: Int32[Array, ""]  # updates done
    params: Weights  # float32 master weights
    optimizer: Any


class Metrics(NamedTuple):
    loss: Float32[Array, ""]  # weighted sum of the rounds' losses, divided by the slots of round 0
    sums: Sums
    gradient_norm: Float32[Array, ""]


def make_update(
    loss: Loss, optimizer: optax.GradientTransformation, *, seed: int
) -> Callable[..., tuple[TrainState, Metrics]]:
    """(state, target parameters, batch [A, B, N], teacher [A, B, N, ...] or None) -> (state, metrics), jitted; donates
    state. `seed` is of noise and anchors."""

    @jax.numpy_dtype_promotion("standard")  # optax counts in int32 and multiplies by floats
    def update(
        state: TrainState, target_params: Weights, batch: Rows, teacher: Teacher | None
    ) -> tuple[TrainState, Metrics]:
        parts = batch.tokens.shape[0]
        keys = jax.random.split(jax.random.fold_in(jax.random.key(seed), state.step), parts)
        part = partial(jax.value_and_grad(loss, has_aux=True), state.params, target_params)

        def add(carry: Any, inputs: Any) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, carry, part(*inputs)), None

        # The first part is outside of the scan: it defines the shapes of the sums, and most batches have a single part.
        inputs = (batch, teacher, keys)
        result = part(*jax.tree.map(lambda x: x[0], inputs))
        if parts > 1:
            result, _ = jax.lax.scan(add, result, jax.tree.map(lambda x: x[1:], inputs))
        (total, sums), gradient = result
        slots = jnp.maximum(sums.counted[0], 1.0)
        gradient = jax.tree.map(lambda g: g / slots, gradient)
        change, optimizer_state = optimizer.update(gradient, state.optimizer, state.params)
        params = cast(Weights, optax.apply_updates(dict(state.params), change))
        metrics = Metrics(total / slots, sums, optax.tree.norm(gradient))
        return TrainState(state.step + 1, params, optimizer_state), metrics

    return jax.jit(update, donate_argnums=0)


def spread(mesh: Mesh, parts: Any, shape: tuple[int, int]) -> Any:
    """Host arrays [A x B, ...] on devices as [A, B, ...], axis 1 over the mesh; `shape` is (A, B)."""
    parts = jax.tree.map(lambda part: part.reshape(*shape, *part.shape[1:]), parts)
    return jax.device_put(parts, NamedSharding(mesh, PartitionSpec(None, "data")))


def everywhere(mesh: Mesh, tree: Any) -> Any:
    """Copy each leaf to each device."""
    return jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))


def shard(mesh: Mesh, tree: Any) -> Any:
    """Split each leaf along its longest axis that is a multiple of the devices, or copy it.

    The compiler gathers weights where a product needs them.
    """

    def place(leaf: Array) -> Array:
        axes = [axis for axis, size in enumerate(leaf.shape) if size % mesh.size == 0 and size]
        longest = max(axes, key=lambda axis: leaf.shape[axis], default=None)
        names = ["data" if axis == longest else None for axis in range(leaf.ndim)]
        return jax.device_put(leaf, NamedSharding(mesh, PartitionSpec(*names)))

    return jax.tree.map(place, tree)


class Measure:
    """Measures the accept length of heads with one engine; each call passes another head, in the serving dtype.

    A measurement has `accept_length` (emitted tokens / verification forwards, the bonus included), `by_depth` (the
    accepted share, at each depth, of drafts whose parent was accepted), `tokens` and `steps`.
    """

    def __init__(
        self, settings: MeasureSettings, inputs: Inputs, target_params: Weights, draft: Any,
        prompts: list[list[int]],
    ) -> None:  # fmt: skip
        shape = TreeShape(settings.measure_steps, 1, settings.measure_steps + 1)
        rows, longest = min(16, len(prompts)), max(map(len, prompts)) + settings.measure_tokens
        config = EngineConfig(
            max_running_requests=rows,
            context_length=min(longest, inputs.source.config.max_positions),
            max_total_tokens=rows * (longest + 64 + 4 * shape.nodes),
            random_seed=0,
        )
        target = make_target(inputs.source.config)
        drafter = inputs.draft.drafter(target, shape)
        self._target_params, self._prompts = target_params, prompts
        self._engine = Engine(
            target, Params(target_params, draft), inputs.source.tokenizer, drafter, config=config,
            eos_ids=inputs.source.eos_ids,
        )  # fmt: skip
        self._sampling = SamplingParams(max_new_tokens=settings.measure_tokens, temperature=0.0)

    def __call__(self, draft: Any) -> dict[str, Any]:
        self._engine.params = Params(self._target_params, jax.block_until_ready(draft))
        completions = self._engine.generate(self._prompts, self._sampling)
        # Steps that accepted this number of drafts, and at least this number.
        histogram = accept_histogram(completions)
        reached = [sum(histogram[depth:]) for depth in range(len(histogram))]
        by_depth = [round(deeper / before, 4) for before, deeper in pairwise(reached) if before]
        steps, emitted = sum(histogram), sum(reached)
        length = round(emitted / max(steps, 1), 4)
        return {"accept_length": length, "by_depth": by_depth, "tokens": emitted, "steps": steps}


class Trainer:
    """A training run. `target_params` have the target's serving dtype; the model card quotes `command`."""

    def __init__(
        self, options: TrainOptions, inputs: Inputs, target_params: Weights, folder: RunFolder, *, command: str
    ) -> None:  # fmt: skip
        self.options, self.inputs, self.folder, self.command = options, inputs, folder, command
        run, dtype, draft = options.run, options.run.compute_dtype, inputs.draft
        self.mesh = Mesh(np.array(jax.local_devices()), ("data",))  # the rows of a batch are spread over it
        target = training_target(inputs.source.config, dtype)
        teach_batch = teach(target, draft.config.features)
        self._teach = jax.jit(teach_batch)
        self._serving_params = target_params
        place = shard if run.target_placement == "split" else everywhere
        self.target_params = place(self.mesh, jax.tree.map(lambda leaf: leaf.astype(dtype), target_params))
        self.rate = schedule(options.optimizer, run.steps)
        optimizer = make_optimizer(options.optimizer, self.rate)
        self.features = self._feature_store(inputs.rows)
        first = draft.first_weights(target_params, inputs.rows, self._first_batch)
        weights, self.frozen = everywhere(self.mesh, first)
        with jax.numpy_dtype_promotion("standard"):
            state = TrainState(jnp.int32(0), weights, jax.jit(optimizer.init)(weights))
        self.state = everywhere(self.mesh, state)
        loss = draft.loss(target, self.frozen, teach=teach_batch if run.features == "none" else None)
        self.update = make_update(loss, optimizer, seed=run.train_seed)
        self._measure: Measure | None = None
        # The examples of the measured prompts, in whole batches of rows.
        self._examples = [each for each in inputs.held_back if prompt_of(each)][: options.measure.measure_prompts]
        rows = pack(self._examples, options.data.row_length, 0)
        self._held_back = Rows(*(np.pad(part, ((0, -len(part) % run.batch_size), (0, 0))) for part in rows))
        self._held_back_features = self._feature_store(self._held_back)
        self._evaluate = jax.jit(draft.loss(target, self.frozen, rounds=options.measure.measure_steps))

    def _feature_store(self, rows: Rows) -> FeatureStore:
        run, source, draft = self.options.run, self.inputs.source, self.inputs.draft
        stamps = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in source.files.weights]
        stored = len(rows.tokens) and run.features == "disk"
        return FeatureStore(
            lambda batch: jax.device_get(self._teach(self.target_params, self._placed(batch))), rows,
            folder=Path(run.feature_folder or Path(run.output) / "features") if stored else None,
            widths=(draft.config.feature_size, source.config.hidden_size), dtype=run.compute_dtype,
            batch=run.batch_size, seed=self.options.data.data_seed,
            identity=f"{self.options.model.model} {stamps} {source.config.dtype} {draft.config.aux_layers}",
        )  # fmt: skip

    def _placed(self, batch: Any) -> Any:
        return jax.tree.map(lambda x: x[0], spread(self.mesh, batch, (1, -1)))

    def _first_batch(self) -> tuple[Teacher, Rows]:
        """The target's outputs for the first batch, equal in a resumed run."""
        numbers = self.row_numbers(0)[: self.options.run.batch_size]
        return self.features.get(numbers), self.inputs.rows.at(numbers)

    def row_numbers(self, step: int) -> np.ndarray:
        """The rows of the step that follows `step` steps."""
        size = self.options.run.batch_size * self.options.run.accumulate
        return batch_rows(step, len(self.inputs.rows.tokens), size, self.options.data.data_seed)

    def run(self) -> dict[str, Any]:
        """Train from the last checkpoint, or from the start, to the last step. Returns the summary."""
        run, folder = self.options.run, self.folder.folder
        if self.folder.latest is not None:
            self.state = self.folder.restore(self.state)
            print(f"Resuming {run.output} at step {int(self.state.step)} of {run.steps}", file=sys.stderr)
            if self.folder.latest > run.steps:
                raise RunError(
                    f"--steps {run.steps} is less than the {self.folder.latest} steps that the run in --output "
                    f"{run.output} has done; give at least as many, or another --output to start a new run"
                )
        first = int(self.state.step)
        self.folder.rewind(first)
        # A kill may have come between the last checkpoint and its measurement.
        measured = self.measure(first) if first and self._to_measure(first) else None
        measured = self._train(first) or measured
        head = self.export(folder / "head")
        curves = plot(folder)
        return {
            "step": run.steps, "steps": run.steps, "output": run.output, "head": str(head),
            "accept_length": measured and measured["accept_length"], "by_depth": measured and measured["by_depth"],
            "plot": curves and str(curves),
        }  # fmt: skip

    def _to_measure(self, step: int) -> bool:
        every = self.options.measure.measure_every
        return step == self.options.run.steps or bool(every and step % every == 0)

    def _train(self, first: int) -> dict[str, Any] | None:
        """Train from step `first` to the last one. Returns the last measurement."""
        run, measured = self.options.run, None
        since, pending = time.perf_counter(), list[Metrics]()
        sizes = (self.inputs.rows.segments > 0).sum(axis=1)
        logged = total = sum(int(sizes[self.row_numbers(step)].sum()) for step in range(first))
        with progress_bar("Training", run.steps, "step", initial=first) as bar, first_interrupt() as interrupted:
            for step in range(first + 1, run.steps + 1):
                numbers = self.row_numbers(step - 1)
                stored = None if run.features == "none" else self.features.get(numbers)
                inputs = self.inputs.rows.at(numbers), stored
                batch, stored = spread(self.mesh, inputs, (run.accumulate, run.batch_size))
                self.state, metrics = self.update(self.state, self.target_params, batch, stored)
                pending.append(metrics)
                total += int(sizes[numbers].sum())
                bar.update()
                stops = interrupted.is_set()
                save = step % run.checkpoint_every == 0 or step == run.steps or stops
                # Each checkpoint has a line of metrics, so that a resumed run logs equal lines.
                if step % run.log_every == 0 or save:
                    jax.block_until_ready(metrics)
                    now = time.perf_counter()
                    speed = round((total - logged) / max(now - since, 1e-9), 1)
                    row = {"step": step, "tokens": total, **self._row(step, pending), "tokens_per_second": speed}
                    if not np.isfinite([row["loss"], row["gradient_norm"]]).all():
                        raise RunError(
                            f"step {step} has the loss {row['loss']} and a gradient of norm {row['gradient_norm']}: "
                            "give a lower --learning-rate or --clip-norm and another --output. The last checkpoint is "
                            f"of step {self.folder.latest}"
                        )
                    self.folder.log(row)
                    matched = " ".join(f"{value:.2f}" for value in row["matched"][:5])
                    bar.set_postfix_str(f"loss {row['loss']:.3f}, right {matched}, {speed:.0f} tok/s")
                    pending, since, logged = [], now, total
                if save:
                    self.folder.save(step, self.state)
                if stops:
                    raise KeyboardInterrupt
                if self._to_measure(step):
                    before = time.perf_counter()
                    measured = self.measure(step)
                    since += time.perf_counter() - before
        return measured

    def _row(self, step: int, pending: list[Metrics]) -> dict[str, Any]:
        """Means over the steps since the last line of metrics.jsonl."""
        steps = jax.device_get(pending)
        sums = jax.tree.map(lambda *parts: np.sum(parts, axis=0), *(metrics.sums for metrics in steps))
        matched, simulated = right_shares(sums)
        return {
            "loss": round(float(np.mean([float(metrics.loss) for metrics in steps])), 5),
            "losses": [round(float(x), 4) for x in sums.loss / np.maximum(sums.counted, 1)],
            "matched": matched,
            "simulated": simulated,
            "inside": round(float(sums.counted[0] / max(sums.slots[0], 1)), 4),
            "gradient_norm": round(float(steps[-1].gradient_norm), 4),
            "learning_rate": float(np.asarray(self.rate(step - 1))),
        }

    def draft_params(self) -> Weights:
        """The head's parameters on one device, float32."""
        weights, frozen = jax.tree.map(jnp.asarray, jax.device_get((dict(self.state.params), self.frozen)))
        return self.inputs.draft.exported(weights, frozen)

    def measure(self, step: int) -> dict[str, Any] | None:
        """Decode held-back prompts, log the accept length, and export the best head so far to best/.

        Returns the line of metrics.jsonl, also if this step is already logged, and None if there is no prompt.
        """
        settings, inputs = self.options.measure, self.inputs
        earlier = [row for row in read_metrics(self.folder.folder) if "accept_length" in row]
        if (logged := next((row for row in earlier if row["step"] == step), None)) is not None or not self._examples:
            return logged
        params = with_dtype(self.draft_params(), self.options.export.export_dtype)
        params = with_dtype(params, inputs.source.config.dtype)
        if self._measure is None:
            prompts = [prompt_of(example) for example in self._examples]
            self._measure = Measure(settings, inputs, self._serving_params, params, prompts)
        shares, length = right_shares(self._held_back_sums(), settings.measure_steps)
        row = {"step": step, **self._measure(params), "simulated": length, "simulated_by_depth": shares}
        if row["accept_length"] > max((row["accept_length"] for row in earlier), default=0.0):
            self.export(self.folder.folder / "best", row)
        self.folder.log(row)
        engine, text = (" ".join(f"{share:.2f}" for share in row[name]) for name in ("by_depth", "simulated_by_depth"))
        line = f"accept length {row['accept_length']:.3f} in the engine, by depth {engine}"
        tqdm.write(f"step {step}: {line}; {length:.3f} simulated on the answers, by depth {text}", sys.stderr)
        return row

    def _held_back_sums(self) -> Sums:
        """Sums over the answers to the measured prompts."""
        size, key, parts = self.options.run.batch_size, jax.random.key(0), list[Sums]()
        for start in range(0, len(self._held_back.tokens), size):
            numbers = np.arange(start, start + size)
            batch, teacher = self._placed((self._held_back.at(numbers), self._held_back_features.get(numbers)))
            parts.append(self._evaluate(self.state.params, self.target_params, batch, teacher, key)[1])
        return jax.tree.map(lambda *sums: np.sum(sums, axis=0), *jax.device_get(parts))

    def export(self, folder: Path, *unlogged: dict[str, Any]) -> Path:
        draft, options = self.inputs.draft, self.options
        card = model_card(
            title=f"{options.draft.draft} draft head for {options.model.model}", target=options.model.model,
            description=draft.description, facts=self.inputs.facts, command=self.command, step=int(self.state.step),
            metrics=[*read_metrics(self.folder.folder), *unlogged],
        )  # fmt: skip
        return export_head(
            folder, draft.config, self.draft_params(), self.inputs.source.config, target_name=options.model.model,
            card=card, dtype=options.export.export_dtype, license=options.export.license,
        )  # fmt: skip


@contextmanager
def first_interrupt() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second one raises KeyboardInterrupt, as does the first one where signals
    are handled otherwise."""
    interrupted = threading.Event()

    def handle(*_: object) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()
        print("\nA checkpoint is written after this step; Ctrl-C again ends at once", file=sys.stderr)

    usual = signal.getsignal(signal.SIGINT)
    if usual is not signal.default_int_handler or threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, usual)


def right_shares(sums: Sums, depth: int | None = None) -> tuple[list[float], float]:
    """Shares of right drafts in the first rounds or slots, and the accept length of a chain at these shares."""
    shares = (sums.matched / np.maximum(sums.slots, 1))[:depth]
    return [round(float(share), 4) for share in shares], round(1 + float(np.cumprod(shares).sum()), 4)


def prompt_of(example: Example) -> list[int]:
    """The tokens before the first answer."""
    return example.tokens[: np.argmax(example.loss)].tolist()


def train(options: TrainOptions, *, command: str) -> dict[str, Any]:
    """Train a head; see `specjax train --help`. Raises ValueError or OSError for a wrong input."""
    use_compilation_cache()
    inputs = prepare(options)
    with RunFolder(Path(options.run.output), identity(options, inputs)) as folder:
        print(", ".join(f"{name} {value}" for name, value in inputs.facts.items()), file=sys.stderr)
        source = inputs.source
        params = checkpoint.load_params(source.files, source.config, quantization="none", progress=True)
        return Trainer(options, inputs, params, folder, command=command).run()

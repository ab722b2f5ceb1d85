"""Options of a training run: the flags of `specjax train` and the keys of its TOML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specjax.cli.flags import ModelSettings
from specjax.models.head_spec import ALGORITHMS, default_aux_layers
from specjax.settings import setting
from specjax.train.losses import BLOCKS, LOSSES

PLACEMENTS = ("replicated", "split")
ALL_TOKENS = 0


@dataclass(frozen=True)
class DataSettings:
    """Training data."""

    data: tuple[str, ...] = setting(
        (), "JSONL (.gz) or a folder of such files: answers of specjax train generate, messages, prompt + response, "
        "text", metavar="FILE",
    )  # fmt: skip
    text_data: tuple[str, ...] = setting((), "JSONL of prompts or text; every token has a loss", metavar="FILE")
    text_examples: int = setting(0, "number of examples of --text-data, drawn by the seed; 0 = all", minimum=0)
    text_skip: int = setting(0, "skip the first N drawn examples of --text-data", minimum=0)
    row_length: int = setting(512, "tokens in a packed row; longer examples are cut", minimum=8)
    held_back: int | None = setting(
        None, "examples of --data reserved for measuring; default: 64, at most a tenth", minimum=0
    )
    data_seed: int = setting(0, "seed of packing, order and the held-back examples", minimum=0)


@dataclass(frozen=True)
class DraftSettings:
    """The draft head."""

    draft: str = setting("EAGLE3", "algorithm of the head", choices=(*ALGORITHMS, *BLOCKS), parse=str.upper)
    init_from: str | None = setting(None, "a head's folder or hub id; default: a new head", metavar="MODEL")
    draft_vocab_size: int = setting(
        ALL_TOKENS,
        "EAGLE3 and blocks: size of the draft vocabulary, the most frequent tokens in the data; 0 = all",
        minimum=0,
    )
    aux_layers: tuple[str, ...] = setting(
        (), "target layers, from 0, that the head reads; default: EAGLE3 1, L // 2 - 1 and L - 4; blocks z-lab's, as "
        "many as --draft-layers", metavar="LAYER",
    )  # fmt: skip
    norm_before_fc: bool = setting(False, "EAGLE3: normalise the features of all layers together before fc")
    fc_norm: bool = setting(False, "EAGLE3: normalise the features of each layer before fc (EAGLE-3.1)")
    norm_output: bool | None = setting(
        None, "EAGLE3: each round reads the normalised output of the round before (EAGLE-3.1); default: as in "
        "--init-from, else not",
    )  # fmt: skip


@dataclass(frozen=True)
class BlockSettings:
    """Heads that draft a block in one forward: DFLASH, DSPARK with a Markov head, DFLASH2 with convolutions and a
    selector. Their loss is weighted by D-PACE, of DSPARK by exp(-slot / 4)."""

    block_size: int | None = setting(None, "tokens of a block, the anchor included; default: 16", minimum=2, maximum=65)
    draft_layers: int | None = setting(None, "decoder layers of the head; default: 5", minimum=1)
    mask_token: int | None = setting(
        None, "id in the places of a block after the anchor; default: the first id that no token has", minimum=0
    )
    anchors: int | None = setting(None, "blocks in a row, drawn in each step; default: row-length / 4", minimum=1)
    walk_rank: int | None = setting(
        None, "channels of DSPARK's Markov head or DFLASH2's selector; default: 256", minimum=1
    )


def aux_layers_of(chosen: Sequence[str], layers: int, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """The layers of --aux-layers for a target of `layers` layers. Default: EAGLE-3's; of a target with fewer than
    7 layers layer 1, the middle and the last one. Raises ValueError."""
    if default is not None and not chosen:
        chosen = tuple(map(str, default))
    if chosen:
        if not all(text.isdecimal() and int(text) < layers for text in chosen) or len(set(chosen)) < len(chosen):
            raise ValueError(f"--aux-layers must be different layers from 0 to {layers - 1}, got {' '.join(chosen)}")
        return tuple(map(int, chosen))
    if layers < 3:
        raise ValueError(f"the target has {layers} layers, and --aux-layers are three by default; give --aux-layers")
    return default_aux_layers(layers) if layers >= 7 else (1, layers // 2 if layers > 3 else 0, layers - 1)


@dataclass(frozen=True)
class LossSettings:
    """The loss. Defaults by kind: EAGLE3 cross_entropy in 7 rounds of weight 0.8^j; EAGLE 0.1 cross_entropy +
    1.0 regression in one round, noise 0.2; MTP token in 3 rounds of weight 0.51, 0.31, 0.18."""

    loss: str | None = setting(None, "loss of each round; defaults: see above", choices=tuple(LOSSES), metavar="NAME")
    rounds: int | None = setting(None, "times that the head reads its own output (training-time test)", minimum=1)


@dataclass(frozen=True)
class OptimizerSettings:
    """The optimizer, Adam, and its schedule."""

    learning_rate: float = setting(1e-4, "peak of the learning rate", above=0)
    schedule: str = setting("cosine", "of the learning rate after the warm-up", choices=("cosine", "constant"))
    final_learning_rate: float = setting(
        0.0, "learning rate at the last step, as a share of the peak", minimum=0, maximum=1
    )
    warmup_steps: int = setting(100, "steps in which the learning rate rises from 0", minimum=0)
    clip_norm: float = setting(0.5, "maximum norm of the gradient; 0 = unlimited", minimum=0)


@dataclass(frozen=True)
class RunSettings:
    """Length, output folder, and intervals of logging and checkpoints."""

    output: str = setting("runs/draft", "folder of the run; a run with the same settings is resumed", metavar="FOLDER")
    steps: int = setting(1000, "updates; a larger number extends an earlier run", minimum=1)
    batch_size: int = setting(8, "rows of a forward, over all devices", minimum=1)
    accumulate: int = setting(1, "forwards per update", minimum=1)
    target_placement: str = setting(
        "replicated", "on several devices: a copy of the target on each, or its weights split over them",
        choices=PLACEMENTS,
    )  # fmt: skip
    compute_dtype: str = setting("bfloat16", "dtype of products; weights are float32", choices=("bfloat16", "float32"))
    features: str = setting(
        "none", "where the target's features are stored; none = computed in each step", choices=("none", "disk")
    )
    feature_folder: str | None = setting(None, "folder for --features disk; default: in --output", metavar="FOLDER")
    train_seed: int = setting(0, "seed of new weights and of the noise", minimum=0)
    checkpoint_every: int = setting(200, "steps between two checkpoints", minimum=1)
    log_every: int = setting(10, "steps between two lines of metrics.jsonl", minimum=1)


@dataclass(frozen=True)
class MeasureSettings:
    """Accept length on held-back prompts, decoded by the engine with the current draft."""

    measure_every: int = setting(500, "steps between two measurements; 0 = only at the end", minimum=0)
    measure_prompts: int = setting(16, "held-back prompts; 0 = never measure", minimum=0)
    measure_tokens: int = setting(96, "tokens generated for each prompt, greedily", minimum=2)
    measure_steps: int = setting(5, "length of the draft chain", minimum=1, maximum=64)


@dataclass(frozen=True)
class ExportSettings:
    """The head, written to head/ in --output in the Hugging Face layout."""

    export_dtype: str = setting("bfloat16", "dtype of its tensors", choices=("bfloat16", "float16", "float32"))
    license: str | None = setting(None, "licence that the model card names; default: none", metavar="NAME")


@dataclass(frozen=True)
class TrainOptions:
    """The tables of a file."""

    model: ModelSettings = ModelSettings()  # noqa: RUF009 - frozen
    data: DataSettings = DataSettings()
    draft: DraftSettings = DraftSettings()
    block: BlockSettings = BlockSettings()
    loss: LossSettings = LossSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    run: RunSettings = RunSettings()
    measure: MeasureSettings = MeasureSettings()
    export: ExportSettings = ExportSettings()


RESUMABLE = frozenset(
    {"output", "feature_folder", "checkpoint_every", "log_every", "measure_every", "measure_prompts",
     "measure_tokens", "measure_steps", "export_dtype", "license", "steps"}
)  # fmt: skip
"""Settings that a resumed run may change. Only `steps` affects training: from the resumed step on, the learning rate
follows the schedule of the new length."""

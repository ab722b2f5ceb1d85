"""Draft heads: EAGLE, EAGLE-2, EAGLE-3, MTP and block heads in folders of their own, and MTP layers in a target's
shards.

The tensors decide the description. Everything is checked against the target before weights are read, because a head of
another target would only be slow, without an error. In order: loading, a head's description, its checks, the published
layouts of tensors and of config.json, MTP layers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.checkpoint.block_head import block_config, not_read
from specjax.checkpoint.files import CheckpointError, Settings, listed, prefixed, read_json
from specjax.checkpoint.hf_config import NO_WINDOW, ROPE_SECTIONS, SILU, read_rope, refuse_unsupported, scaled_positions
from specjax.checkpoint.hub import resolve_head
from specjax.checkpoint.parameters import ArrayEntry, fill_parameters, misfits
from specjax.checkpoint.quantised import QuantisedEntry, matrices
from specjax.checkpoint.token_map import checked_ids
from specjax.checkpoint.torch_files import read_torch_file
from specjax.checkpoint.weights import (
    DTYPES,
    LAYOUTS,
    ModelFiles,
    find_weights,
    read_headers,
    read_shards,
    same_content,
)
from specjax.config import BlockConfig, HeadConfig, ModelConfig, MtpConfig
from specjax.models import head_spec as heads_of
from specjax.models import mtp_spec
from specjax.models.head_spec import EMBED, FC, HEAD, LAYER, MASK, OFFSETS, HeadSpec, head_sizes, head_spec, head_table
from specjax.models.mtp_spec import STYLES, mtp_sizes, mtp_table, mtp_tensors
from specjax.models.params import EMBED_TENSOR, HEAD_TENSOR, placements

if TYPE_CHECKING:
    from jax.sharding import Mesh

Q, K, V, O = (f"{LAYER}self_attn.{part}_proj" for part in "qkvo")
GATE, UP, DOWN = (f"{LAYER}mlp.{part}_proj" for part in ("gate", "up", "down"))

# Prefixes of published tensors and their common form. speculators' converter renames EAGLE-1's fc and layers.0. EAGLE-3
# heads of speculators and NeMo have layers.0. MiMo has the projection and the decoder layer under one prefix.
_RENAMED = (
    (r"model\.", ""), (r"layers\.0\.", LAYER), (r"transformer\.", LAYER), (r"fusion_fc\.", "fc."),
    (r"mtp_layers\.0\.input_proj\.", "fc."), (r"mtp_layers\.0\.", LAYER),
)  # fmt: skip
AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
# EAGLE-3.1 and NVIDIA's variants. norm_output has no tensor: the head reads normed outputs.
_UNSUPPORTED = ("fc_norm", "norm_before_fc", "norm_output")


def load_head(
    name: str, target: ModelConfig, *, kind: str, revision: str | None = None, progress: bool = True,
    quantization: str = "none", target_embedding: Callable[[], np.ndarray] | None = None, mesh: Mesh | None = None,
    sample_from_anchor: bool | None = None,
) -> tuple[HeadConfig, dict[str, Any]]:  # fmt: skip
    """Read a draft head of any published layout: safetensors or torch's ``.bin``, single or sharded.

    Args:
      name: a folder or a hub id; ``revision`` is for the latter.
      target: the model that it drafts for; parameters are cast to ``target.dtype``.
      kind: ``eagle`` for EAGLE-1 and EAGLE-2, ``eagle3``, ``mtp`` for a layer such as MiMo's in a folder of its own, or
        ``block`` (DFlash, DSpark, DFlash2, JetSpec).
      sample_from_anchor: for ``block``, see `specjax.Block`.
      target_embedding: returns the target's embedding ``[V, M]``, which replaces an equal embedding of the head.

    Returns the head's description, and the parameters that ``specjax.models.head_spec.head_table`` declares for it.
    Raises CheckpointError if there is no such head, or a head that is unsupported or of another kind or target.
    """
    import jax

    with prefixed(name):
        folder = resolve_head(name, revision=revision, progress=progress)
        tensors, config, ids = _describe(name, folder, target, kind, sample_from_anchor)
        # The tolerances exceed the difference between roundings of one number to half precision.
        if config.own_embedding and (
            target_embedding and same_content(tensors.arrays[EMBED], target_embedding(), rtol=1e-2, atol=1e-4)
        ):
            config = replace(config, own_embedding=False)
        entries = {tensor: ArrayEntry(array) for tensor, array in tensors.arrays.items()}
        sizes = head_sizes(config, target.vocab_size)
        params = fill_parameters(
            name, head_table(config), sizes, entries, config, target.dtype, quantization, mesh=mesh, progress=progress
        )  # fmt: skip
        if ids is not None:
            params["ids"] = jax.device_put(ids)
    return config, params


def describe_head(
    name: str, target: ModelConfig, *, kind: str, revision: str | None = None, progress: bool = True,
    sample_from_anchor: bool | None = None,
) -> HeadConfig:  # fmt: skip
    """The description that `load_head` returns, from config.json and the headers of weights if present. An embedding in
    the files is not compared with the target's."""
    with prefixed(name):
        folder = resolve_head(name, revision=revision, progress=progress, outline=True)
        if any((folder / file).is_file() for layout in LAYOUTS for file in layout):
            return _describe(name, folder, target, kind, sample_from_anchor)[1]
        settings = read_json(folder / "config.json", name)
        if kind == BlockConfig.kind:
            return block_config(settings, target, sample_from_anchor=sample_from_anchor)
        return _published(layer_config(settings), target, head_spec(kind))


def _describe_block(
    name: str, folder: Path, target: ModelConfig, sample_from_anchor: bool | None
) -> tuple[HeadTensors, BlockConfig, np.ndarray | None]:
    """`_describe` of a block head."""
    settings, stored = read_json(folder / "config.json", name), _read(find_weights(name, folder, torch_too=True))
    names = {file_name.removeprefix("model."): file_name for file_name in stored}
    tensors = HeadTensors({name: stored[file_name] for name, file_name in names.items()}, names)
    config = block_config(settings, target, names.keys(), sample_from_anchor=sample_from_anchor)
    vocab_size = tensors.matrix(HEAD).shape[0] if config.own_head else config.vocab_size
    ids = _ids(tensors, vocab_size, target.vocab_size)
    config = replace(config, vocab_size=vocab_size, mapped=ids is not None)
    shapes = {name: array.shape for name, array in tensors.arrays.items()}
    rules = list(placements(head_table(config), head_sizes(config, target.vocab_size)))
    problems = misfits(shapes, rules, "block heads", not_read(settings))
    read = {rule.tensor for rule in rules} & shapes.keys()
    if integers := listed(name for name in read if tensors.arrays[name].dtype not in DTYPES.values()):
        problems += f"; parameters that are no floats (quantised heads are not supported): {integers}"
    if problems:
        raise CheckpointError(f"unsupported block head; {problems.removeprefix('; ')}")
    return tensors, config, ids


def _describe(
    name: str, folder: Path, target: ModelConfig, kind: str, sample_from_anchor: bool | None
) -> tuple[HeadTensors, HeadConfig, np.ndarray | None]:
    """The head's tensors, its description, and the target's ids of its vocabulary; None: the target's vocabulary."""
    if kind == BlockConfig.kind:
        return _describe_block(name, folder, target, sample_from_anchor)
    spec = head_spec(kind)
    settings = layer_config(read_json(folder / "config.json", name))
    tensors = common_names(_read(find_weights(name, folder, torch_too=True)))
    _check_kind(tensors, spec)
    heads = settings.integer("num_attention_heads")
    head_dim, kv_heads = _attention_sizes(tensors, heads, settings)
    own_head = tensors.has(HEAD)
    vocab_size = tensors.matrix(HEAD).shape[0] if own_head else target.vocab_size
    fields = _config_fields(settings, target, spec, head_dim)
    _check_target(tensors, settings, target, fields["aux_layers"])
    ids = _ids(tensors, vocab_size, target.vocab_size) if spec.own_ends else None
    config = HeadConfig(
        hidden_size=tensors.arrays[FC].shape[0],
        intermediate_size=tensors.matrix(f"{DOWN}.weight").shape[1],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        own_embedding=spec.own_ends and tensors.has(EMBED),
        own_head=own_head,
        mapped=ids is not None,
        fc_bias=tensors.has("fc.bias"),
        attention_bias=tensors.has(*(f"{part}.bias" for part in (Q, K, V))),
        output_bias=tensors.has(f"{O}.bias"),
        mlp_bias=tensors.has(*(f"{part}.bias" for part in (GATE, UP, DOWN))),
        **fields,
    )
    _check_tensors(tensors, config, target)
    return tensors, config, ids


def _published(settings: Settings, target: ModelConfig, spec: HeadSpec) -> HeadConfig:
    """The description of a head without weights, with the tensors of published heads."""
    heads, width = settings.integer("num_attention_heads"), settings.integer("hidden_size", target.hidden_size)
    vocab_size = settings.integer("draft_vocab_size", target.vocab_size) if spec.own_ends else target.vocab_size
    head_dim = settings.integer("head_dim", width // heads)
    return HeadConfig(
        hidden_size=width,
        intermediate_size=settings.integer("intermediate_size"),
        num_heads=heads,
        num_kv_heads=settings.integer("num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        own_head=spec.own_ends,
        mapped=vocab_size != target.vocab_size,
        fc_bias=bool(settings.optional("bias", spec.absent_bias)),
        attention_bias=settings.boolean("attention_bias") or "attention_bias" in spec.biases,
        mlp_bias=settings.boolean("mlp_bias"),
        **_config_fields(settings, target, spec, head_dim),
    )


def _config_fields(settings: Settings, target: ModelConfig, spec: HeadSpec, head_dim: int) -> dict[str, Any]:
    """The fields of `HeadConfig` that depend on config.json and the target alone."""
    aux_layers = aux_layer_ids(settings, target.num_layers) if spec.reads_layers else ()
    positions = settings.integer("max_position_embeddings", 2048)
    # An absent theta is 10000, independent of the target's.
    rope = read_rope(settings, positions, head_dim=head_dim, partial=True)
    longest = scaled_positions(rope, positions) if "max_position_embeddings" in settings else target.max_positions
    return {
        "kind": spec.kind,
        "feature_size": (len(aux_layers) or 1) * target.hidden_size,
        "norm_epsilon": settings.number("rms_norm_eps", 1e-6),
        "rope": rope,
        "max_positions": longest if longest < target.max_positions else None,
        "aux_layers": aux_layers,
        # Absent means false, as in speculators' schema and in the authors' heads.
        "norm_before_residual": spec.reads_layers and settings.boolean("norm_before_residual"),
        "dtype": target.dtype,
    }


def _read(files: tuple[Path, ...]) -> dict[str, np.ndarray]:
    if files[0].suffix == ".safetensors":
        return {name: entry.read(integers=True) for name, entry in read_headers(files).items()}

    def state_dict(file: Path) -> dict[str, np.ndarray]:
        match read_torch_file(file):
            case dict() as state if all(isinstance(k, str) and isinstance(v, np.ndarray) for k, v in state.items()):
                return state
        raise CheckpointError(f"{file} does not hold a state dict, names with a tensor each; save one there")

    return read_shards(files, state_dict)


def _attention_sizes(tensors: HeadTensors, heads: int, settings: Settings) -> tuple[int, int]:
    """E and K. K follows from the weights: EAGLE-Qwen2-7B's config says 4, and its weights have 28."""
    output, source = f"{O}.weight", f"{K}.weight"
    columns = tensors.matrix(output).shape[1]
    size = settings.integer("head_dim", columns // heads or 1)
    if size * heads != columns:
        width = f"{heads} heads (num_attention_heads) of {size} (head_dim)"
        raise CheckpointError(f"{tensors.label(output)} reads {columns} numbers, and config.json has {width}")
    kv_heads, rest = divmod(tensors.matrix(source).shape[0], size)
    if kv_heads < 1 or rest or heads % kv_heads:
        raise CheckpointError(f"{tensors.label(source)} does not hold a divisor of {heads} heads of {size}")
    return size, kv_heads


def _ids(tensors: HeadTensors, vocab_size: int, target_size: int) -> np.ndarray | None:
    """The target's id of each of the head's tokens, int32 ``[W]``; None if they are equal. ``d2t`` holds offsets:
    target id = draft id + d2t[draft id]. ``t2d``, the mask of these target ids, is not read."""
    offsets, draft_ids = tensors.arrays.get(OFFSETS), np.arange(vocab_size)
    if offsets is None:
        if vocab_size != target_size:
            raise CheckpointError(f"{tensors.label(HEAD)} is for {vocab_size} of {target_size} tokens, without d2t")
        return None
    if not tensors.has(HEAD) or offsets.shape != (vocab_size,) or offsets.dtype.kind not in "iu":
        label = f"{tensors.label(OFFSETS)} ({offsets.dtype})"
        raise CheckpointError(f"{label} must have an integer for each row of {HEAD}: {vocab_size}")
    try:
        ids = checked_ids(draft_ids + offsets.astype(np.int64), target_size)
    except CheckpointError as error:
        raise CheckpointError(f"d2t must hold target id - draft id; of the target ids, {error}") from error
    return None if vocab_size == target_size and np.array_equal(ids, draft_ids) else ids


def _check_kind(tensors: HeadTensors, spec: HeadSpec) -> None:
    """The kind follows from the input width of attention, and from a tensor that only one kind has."""
    query = f"{Q}.weight"
    width, read = tensors.matrix(FC).shape[0], tensors.matrix(query).shape[1]
    marked_first = sorted(heads_of.HEAD_SPECS.values(), key=lambda row: row.mark is None)
    matching = (
        row for row in marked_first if read == row.query_parts * width and (not row.mark or tensors.has(row.mark))
    )
    if (actual := next(matching, None)) is not spec:
        kind = f"a head for {actual.algorithm}" if actual else "of no kind that is supported"
        widths = ", ".join(f"{row.query_parts * width} ({row.algorithm})" for row in heads_of.HEAD_SPECS.values())
        sizes = f"{tensors.label(query)} reads {read} numbers, {tensors.label(FC)} gives {width}; supported: {widths}"
        raise CheckpointError(f"this is {kind}, not {spec.algorithm} ({sizes})")


def _check_target(tensors: HeadTensors, settings: Settings, target: ModelConfig, aux_layers: tuple[int, ...]) -> None:
    width, vocab_size, hidden_size = tensors.arrays[FC].shape[0], target.vocab_size, target.hidden_size
    fc = (width, len(aux_layers) * hidden_size) if aux_layers else (hidden_size, 2 * hidden_size)
    if tensors.arrays[FC].shape != fc:
        layers = f", for the auxiliary layers {listed(aux_layers)}" if aux_layers else ""
        raise CheckpointError(f"{tensors.label(FC)} is for another target; {list(fc)} is needed{layers}")
    for key, needed, source in (
        ("hidden_size", width, f"{tensors.label(FC)} has {width} rows"),
        ("vocab_size", vocab_size, f"the target's is {vocab_size}; a head drafts only for the model of its training"),
    ):
        if (size := settings.optional(key, needed)) != needed:
            raise CheckpointError(f"config.json: {key} is {size}, and {source}")
    for name in (EMBED, HEAD):
        if not aux_layers and tensors.has(name) and tensors.arrays[name].shape != (vocab_size, hidden_size):
            raise CheckpointError(f"{tensors.label(name)} is not of the target's size: {[vocab_size, hidden_size]}")
        if aux_layers and width != hidden_size and not tensors.has(name):
            raise CheckpointError(f"it has no {name}, and the target's is {hidden_size} wide, the draft head {width}")


def _check_tensors(tensors: HeadTensors, config: HeadConfig, target: ModelConfig) -> None:
    """Refuse missing, misshapen and unknown tensors, and parameters that are not floats, under the file's names."""
    spec, arrays = head_spec(config.kind), tensors.arrays
    rules = list(placements(head_table(config), head_sizes(config, target.vocab_size)))
    optional = {tensors.names.get(name, name) for name in ((MASK, OFFSETS) if spec.own_ends else (EMBED,))}
    names = {rule.tensor: tensors.names.get(rule.tensor, published_name(spec, rule.tensor)) for rule in rules}
    shapes = {tensors.names[name]: array.shape for name, array in arrays.items()}
    expected = [replace(rule, tensor=names[rule.tensor]) for rule in rules]
    problems = misfits(shapes, expected, f"{spec.algorithm} heads", optional)
    if any(name.startswith(("fc_norm", "norm_output", "input_norm")) for name in arrays):
        problems += " (EAGLE-3.1, whose extra norms are not supported)"
    integers = {name for name in names.keys() & arrays.keys() if arrays[name].dtype not in DTYPES.values()}
    if integers:
        labels = listed(f"{tensors.label(name)} is of {arrays[name].dtype}" for name in integers)
        problems += f"; parameters that are no floats (quantised heads are not supported): {labels}"
    if problems:
        raise CheckpointError(f"unsupported draft head; {problems.removeprefix('; ')}")


@dataclass(frozen=True)
class HeadTensors:
    """The tensors of a head under the names of ``specjax.models.head_spec``."""

    arrays: Mapping[str, np.ndarray]  # read-only views of the files
    names: Mapping[str, str]  # common name -> name in the file, for messages

    def label(self, name: str) -> str:
        return f"{self.names.get(name, name)} {list(self.arrays[name].shape)}"

    def has(self, *names: str) -> bool:
        return any(name in self.arrays for name in names)

    def matrix(self, name: str) -> np.ndarray:
        """The tensor ``name``, which must be present and have two dimensions."""
        if name not in self.arrays:
            raise CheckpointError(f"missing tensors: {name}; the files hold {listed(self.names.values()) or 'none'}")
        if self.arrays[name].ndim != 2 or 0 in self.arrays[name].shape:
            raise CheckpointError(f"{self.label(name)} must have two dimensions")
        return self.arrays[name]


def common_names(tensors: Mapping[str, np.ndarray]) -> HeadTensors:
    layers = {int(match[1]) for name in tensors if (match := re.match(r"(?:model\.)?(?:mtp_)?layers\.(\d+)\.", name))}
    if len(layers) > 1:
        raise CheckpointError(f"it has {len(layers)} decoder layers; heads of 1 layer are supported")
    arrays: dict[str, np.ndarray] = {}
    names: dict[str, str] = {}
    for file_name, array in tensors.items():
        name = file_name
        for pattern, replacement in _RENAMED:
            name = re.sub(f"^{pattern}", replacement, name)
        if name in names:
            raise CheckpointError(f"tensors {names[name]} and {file_name} mean the same; keep one of them")
        arrays[name], names[name] = array, file_name
    return HeadTensors(arrays, names)


def published_name(spec: HeadSpec, name: str) -> str:
    """The published name of a common name, the inverse of ``common_names``."""
    for common, published in spec.published:
        if name.startswith(common):
            return published + name.removeprefix(common)
    return name


def layer_config(config: Settings) -> Settings:
    """Settings of the head and of its layer without nulls. speculators and NeMo nest the layer's settings in
    ``transformer_layer_config``, whose rotary embedding replaces the head's as a whole."""
    nested = config.section("transformer_layer_config")
    ropes = {"rope_theta", *ROPE_SECTIONS}
    hidden = ropes if any(nested.get(key) is not None for key in ropes) else set()
    outer = {key: value for key, value in config.items() if key not in hidden}
    settings = Settings((key, value) for part in (outer, nested) for key, value in part.items() if value is not None)
    # Qwen2 configs have a window that is disabled.
    if not settings.get("use_sliding_window", True):
        settings.pop("sliding_window", None)
    refuse_unsupported(settings, SILU | NO_WINDOW | {"quantization_config": ({}, "none")})
    for key in _UNSUPPORTED:
        if value := settings.get(key) or settings.section("eagle_config").get(key):
            raise CheckpointError(f"config.json: {key} is {value!r}; such heads (EAGLE-3.1) are not supported")
    return settings


def aux_layer_ids(settings: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """The target's layers, 0-based, whose outputs the head reads. ``settings`` is from ``layer_config``.

    In ``eagle_config``, id j is the output of layer j. At the top level, where speculators writes ids for vLLM, id j is
    the input of layer j, the output of j - 1. However, speculators' converter copies ids of older heads unchanged
    ([1, 46, 90] for 94 layers: speculators#142). As in sglang#25454, ids that begin with 1 are outputs, because no head
    reads the output of layer 0.
    """
    section = Settings(settings).section("eagle_config")
    refuse_unsupported(section, {"use_aux_hidden_state": (True, "true (an EAGLE-3 head reads several layers)")})
    nested = section.get(AUX_LAYERS_KEY)
    key = f"eagle_config.{AUX_LAYERS_KEY}" if nested else AUX_LAYERS_KEY
    if ids := nested or settings.get(AUX_LAYERS_KEY):
        if not isinstance(ids, Sequence) or not all(type(value) is int for value in ids):
            raise CheckpointError(f"config.json: {key} is {ids!r}; a list of integers is needed")
        shift = 0 if nested or ids[0] == 1 else 1
        aux_layers = tuple(value - shift for value in ids)
        problem = f"{list(ids)}, read as the outputs of layers {list(aux_layers)}"
    else:
        aux_layers = heads_of.default_aux_layers(num_layers)
        problem = f"absent, and its default for a target of {num_layers} layers is {list(aux_layers)}"
    if len(set(aux_layers)) != len(aux_layers) or not all(0 <= layer < num_layers for layer in aux_layers):
        raise CheckpointError(f"config.json: {key} is {problem}; different layers in 0..{num_layers - 1} are needed")
    return aux_layers


def mtp_config(files: ModelFiles, config: ModelConfig) -> MtpConfig | None:
    """The MTP layers of a model; None if it has none. Reads headers, or only config.json if there are no weights."""
    if files.weights:
        return mtp_spec.mtp_config(matrices(files).keys(), config)
    settings = Settings({**files.config.get("text_config", {}), **files.config})

    def count(key: str, default: int) -> int:
        return settings.integer(key, default) if settings.optional(key, default) else 0

    return mtp_spec.published_mtp_config(settings["architectures"][0], config, count)


def mtp_method(files: ModelFiles, config: ModelConfig) -> str | None:
    """The `quant_method` of a model's MTP layers, or without weights of the model; None if their weights are float."""
    method = Settings(files.config).section("quantization_config").get("quant_method")
    if not files.weights or method is None:
        return method
    tensors = matrices(files)
    names = mtp_tensors(tensors.keys(), config)
    return method if any(isinstance(tensors[name], QuantisedEntry) for name in names) else None


def load_mtp(
    files: ModelFiles, target: ModelConfig, config: MtpConfig, *, quantization: str = "auto", progress: bool = True,
    mesh: Mesh | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The parameters that ``specjax.models.mtp_spec.mtp_table`` declares. Arguments and errors: see ``load_params``; a
    copy of the target's embedding or output matrix must equal it."""
    tensors, style = matrices(files), STYLES[config.style]
    names = mtp_tensors(tensors.keys(), target)
    declared, sizes = mtp_table(config), mtp_sizes(config)
    prefixes = [style.layer_prefix(i, target.num_layers) for i in range(config.count)]
    copies = {prefix + name: original for prefix in prefixes for name, original in style.copies.items()}
    shapes = {name: tensors[name].shape for name in names}
    if problems := misfits(shapes, placements(declared, sizes), f"{config.style} MTP layers", copies.keys()):
        raise CheckpointError(f"the MTP layers in {files.folder} do not fit their model; {problems}")
    for copy in names & copies.keys():
        original = copies[copy]
        if original == HEAD_TENSOR and HEAD_TENSOR not in tensors:
            original = EMBED_TENSOR
        if not same_content(tensors[copy].read(), tensors[original].read()):
            raise CheckpointError(f"{copy} in {files.folder} differs from {original}; supported: equal ones")
    return fill_parameters(
        f"MTP layers of {files.name}", declared, sizes, tensors, config, target.dtype, quantization, mesh=mesh,
        progress=progress,
    )  # fmt: skip

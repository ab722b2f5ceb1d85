"""EAGLE, EAGLE-2, EAGLE-3 and MTP draft heads: a name to a ``HeadConfig`` and the head's parameters.

What the tensors show decides, and everything is checked against the target before anything large is read: a head
that does not belong to the target would only be slow, never wrong, and so nobody would notice. Knows nothing of how a
head is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specjax.checkpoint import draft_format as names
from specjax.checkpoint.draft_format import HeadTensors, aux_layer_ids, common_names, layer_config, unfused
from specjax.checkpoint.files import CheckpointError, listed
from specjax.checkpoint.hub import resolve_head
from specjax.checkpoint.load import fill, misfits, spread_over
from specjax.checkpoint.rope_config import longest, rope
from specjax.checkpoint.stored import quantised_leaf
from specjax.checkpoint.token_map import checked_ids
from specjax.checkpoint.unpickle import read_torch_zip
from specjax.checkpoint.values import flag, given, number, require
from specjax.checkpoint.weights import DTYPES, LAYOUTS, find_weights, read_headers, read_json, read_shards, same_content
from specjax.config import HeadConfig, ModelConfig
from specjax.models import head_spec as specs
from specjax.models.head_spec import EMBED, FC, HEAD, HeadSpec, head_spec
from specjax.models.params import Leaf, Placement, Scope, is_product, placements

if TYPE_CHECKING:
    from jax.sharding import Mesh


def load_head(
    name: str, target: ModelConfig, *, kind: str, revision: str | None = None, progress: bool = True,
    put: Callable[[np.ndarray], Any] | None = None, quantization: str = "none",
    target_embedding: Callable[[], np.ndarray] | None = None, mesh: Mesh | None = None,
) -> tuple[HeadConfig, dict[str, Any]]:  # fmt: skip
    """Read a draft head: safetensors or torch's ``.bin``, single or sharded, in any of the published dialects.

    Args:
      name: a folder or a hub id; ``revision`` is for the latter.
      target: the model that it drafts for; parameters are cast to ``target.dtype``.
      kind: what the head must be; ``eagle`` is EAGLE-1 and EAGLE-2, ``mtp`` a layer as MiMo has it, in its own folder.
      put: as in ``load_params``.
      quantization: of its matrices: none, or fp8, int8 or int4. The text is the target's either way.
      mesh: as in ``load_params``.
      target_embedding: gives the target's embedding ``[V, M]``, so that an equal one is not kept twice; it is called
        only for a head that has an embedding of its own.

    Returns:
      The head's description, and the parameters that ``specjax.models.head_spec.head_table`` declares for it.

    Raises:
      CheckpointError: no such head, not of that kind or for that target, or not supported; begins with the name.
    """
    import jax

    try:
        folder = resolve_head(name, revision=revision, progress=progress)
        tensors, config, ids = _described(name, folder, target, head_spec(kind))
        sizes = specs.head_sizes(config, target.vocab_size)
        _check(tensors, list(placements(specs.head_table(config), sizes)), config)
        # Two roundings to half precision of one number differ by less than the tolerances.
        if config.own_embedding and (
            target_embedding and same_content(tensors.arrays[EMBED], target_embedding(), rtol=1e-2, atol=1e-4)
        ):
            config = replace(config, own_embedding=False)
        declared = specs.head_table(config)

        def few_bits(scope: Scope, leaf: Leaf, parts: list[Placement]) -> Any:
            if quantization == "none" or not is_product(leaf) or leaf.name == "embed":
                return None
            arrays = [tensors.arrays[part.tensor] for part in parts]
            return quantised_leaf(arrays, scope, leaf, sizes, quantization)

        params = fill(
            name, declared, sizes, tensors.arrays.__getitem__, target.dtype, put, progress, few_bits,
            stored=lambda name: tensors.arrays[name].nbytes, spread=spread_over(mesh, config),
        )  # fmt: skip
        if ids is not None:
            params["ids"] = jax.block_until_ready((put or jax.device_put)(ids))
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error
    return config, params


def describe_head(
    name: str, target: ModelConfig, *, kind: str, revision: str | None = None, progress: bool = True
) -> HeadConfig:
    """The description that `load_head` gives, from config.json and the headers of the weights, or from config.json
    alone. An embedding in the files counts as the head's own: whether it equals the target's takes reading both."""
    try:
        folder, spec = resolve_head(name, revision=revision, progress=progress, outline=True), head_spec(kind)
        if not any((folder / file).is_file() for layout in LAYOUTS for file in layout):
            return _published(layer_config(read_json(folder / "config.json", name)), target, spec)
        tensors, config, _ = _described(name, folder, target, spec)
        _check(tensors, [*placements(specs.head_table(config), specs.head_sizes(config, target.vocab_size))], config)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error
    return config


def _published(merged: Mapping[str, Any], target: ModelConfig, spec: HeadSpec) -> HeadConfig:
    """A head of which only config.json is there: its tensors are taken to be those of published heads."""
    heads, width = require(merged, "num_attention_heads"), require(merged, "hidden_size", target.hidden_size)
    vocab_size = require(merged, "draft_vocab_size", target.vocab_size) if spec.own_ends else target.vocab_size
    head_dim = require(merged, "head_dim", width // heads)
    return HeadConfig(
        hidden_size=width,
        intermediate_size=require(merged, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=require(merged, "num_key_value_heads", heads),
        head_dim=head_dim,
        vocab_size=vocab_size,
        own_head=spec.own_ends,
        mapped=vocab_size != target.vocab_size,
        fc_bias=bool(given(merged, "bias", spec.absent_bias)),
        attention_bias=flag(merged, "attention_bias") or "attention_bias" in spec.biases,
        mlp_bias=flag(merged, "mlp_bias"),
        **_settings(merged, target, spec, head_dim),
    )


def _settings(merged: Mapping[str, Any], target: ModelConfig, spec: HeadSpec, head_dim: int) -> dict[str, Any]:
    """The fields of `HeadConfig` that config.json and the target decide."""
    aux_layers = aux_layer_ids(merged, target.num_layers) if spec.reads_layers else ()
    positions = require(merged, "max_position_embeddings", 2048)
    # The head's own: an absent theta is 10000 whatever the target's.
    own_rope = rope(merged, positions, head_dim=head_dim, partial=True)
    reach = longest(own_rope, positions) if given(merged, "max_position_embeddings", None) else target.max_positions
    return {
        "kind": spec.kind,
        "feature_size": (len(aux_layers) or 1) * target.hidden_size,
        "norm_epsilon": number(merged, "rms_norm_eps", 1e-6),
        "rope": own_rope,
        "max_positions": reach if reach < target.max_positions else None,
        "aux_layers": aux_layers,
        # Absent means false, as in speculators' own schema and in the published heads of the authors.
        "norm_before_residual": spec.reads_layers and flag(merged, "norm_before_residual"),
        "dtype": target.dtype,
    }


def _described(
    name: str, folder: Path, target: ModelConfig, spec: HeadSpec
) -> tuple[HeadTensors, HeadConfig, np.ndarray | None]:
    """The head's tensors, its description, and the ids of its vocabulary unless they are the target's."""
    merged = layer_config(read_json(folder / "config.json", name))
    tensors = common_names(_read(find_weights(name, folder, torch_too=True)))
    _check_kind(tensors, spec)
    heads = require(merged, "num_attention_heads")
    head_dim, kv_heads = _attention_sizes(tensors, heads, merged)
    tensors = unfused(tensors, heads * head_dim, kv_heads * head_dim)
    own_head = tensors.has(HEAD)
    vocab_size = tensors.matrix(HEAD).shape[0] if own_head else target.vocab_size
    settings = _settings(merged, target, spec, head_dim)
    _check_target(tensors, merged, target, settings["aux_layers"])
    ids = _ids(tensors, vocab_size, target.vocab_size) if spec.own_ends else None
    config = HeadConfig(
        hidden_size=tensors.arrays[FC].shape[0],
        intermediate_size=tensors.matrix(f"{names.DOWN}.weight").shape[1],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        own_embedding=spec.own_ends and tensors.has(EMBED),
        own_head=own_head,
        mapped=ids is not None,
        fc_bias=tensors.has("fc.bias"),
        attention_bias=tensors.has(*(f"{part}.bias" for part in (names.Q, names.K, names.V))),
        output_bias=tensors.has(f"{names.O}.bias"),
        mlp_bias=tensors.has(*(f"{part}.bias" for part in (names.GATE, names.UP, names.DOWN))),
        **settings,
    )
    return tensors, config, ids


def _read(files: tuple[Path, ...]) -> dict[str, np.ndarray]:
    """All tensors of ``files`` as views of them."""
    if files[0].suffix == ".safetensors":
        return {name: entry.read(integers=True) for name, entry in read_headers(files).items()}

    def state_dict(file: Path) -> dict[str, np.ndarray]:
        match read_torch_zip(file):
            case dict() as state if all(isinstance(k, str) and isinstance(v, np.ndarray) for k, v in state.items()):
                return state
        raise CheckpointError(f"{file} does not hold a state dict, names with a tensor each; save one there")

    return read_shards(files, state_dict)


def _check_kind(tensors: HeadTensors, spec: HeadSpec) -> None:
    """The width that attention reads tells the kinds apart, and for those of one width a tensor that only one has."""
    query = f"{names.QKV if tensors.has(f'{names.QKV}.weight') else names.Q}.weight"
    tensors.need(FC, query)
    width, read = tensors.matrix(FC).shape[0], tensors.matrix(query).shape[1]
    marked = sorted(specs.HEAD_SPECS.values(), key=lambda row: row.mark is None)
    fitting = (row for row in marked if read == row.query_parts * width and (not row.mark or tensors.has(row.mark)))
    if (found := next(fitting, None)) is not spec:
        kind = f"a head for {found.algorithm}" if found else "of no kind that is supported"
        known = ", ".join(f"{row.query_parts * width} ({row.algorithm})" for row in specs.HEAD_SPECS.values())
        raise CheckpointError(
            f"this is {kind}, not {spec.algorithm} ({tensors.said(query)} reads {read} numbers, and {tensors.said(FC)} "
            f"gives {width}; draft heads read there: {known})"
        )


def _attention_sizes(tensors: HeadTensors, heads: int, merged: Mapping[str, Any]) -> tuple[int, int]:
    """E and K. K is what the weights have: EAGLE-Qwen2-7B's config says 4, and they have 28."""
    output, fused = f"{names.O}.weight", f"{names.QKV}.weight"
    columns = tensors.matrix(output).shape[1]
    size = require(merged, "head_dim", columns // heads or 1)
    if size * heads != columns:
        raise CheckpointError(
            f"{tensors.said(output)} reads {columns} numbers, and config.json has num_attention_heads {heads}"
            + (f" and head_dim {size}" if "head_dim" in merged else "")
        )
    source, queries, parts = (fused, columns, 2) if tensors.has(fused) else (f"{names.K}.weight", 0, 1)
    kv_heads, rest = divmod(tensors.matrix(source).shape[0] - queries, parts * size)
    if kv_heads < 1 or rest or heads % kv_heads:
        raise CheckpointError(
            f"{tensors.said(source)} does not hold a divisor of {heads} (num_attention_heads) key/value heads of {size}"
        )
    return size, kv_heads


def _check_target(
    tensors: HeadTensors, merged: Mapping[str, Any], target: ModelConfig, aux_layers: tuple[int, ...]
) -> None:
    width, vocab_size, hidden_size = tensors.arrays[FC].shape[0], target.vocab_size, target.hidden_size
    fc = (width, len(aux_layers) * hidden_size) if aux_layers else (hidden_size, 2 * hidden_size)
    if tensors.arrays[FC].shape != fc:
        layers = f"{len(aux_layers)} auxiliary layers ({listed(aux_layers)}) of " if aux_layers else ""
        raise CheckpointError(
            f"{tensors.said(FC)} is for another target; {list(fc)} is needed, for {layers}hidden_size {hidden_size}"
        )
    for key, needed, source in (
        ("hidden_size", width, f"{tensors.said(FC)} has {width} rows"),
        ("vocab_size", vocab_size, f"the target's is {vocab_size}; a head drafts only for the model of its training"),
    ):
        if (size := given(merged, key, needed)) != needed:
            raise CheckpointError(f"config.json: {key} is {size}, and {source}")
    for name in (EMBED, HEAD):
        if not aux_layers and tensors.has(name) and tensors.arrays[name].shape != (vocab_size, hidden_size):
            raise CheckpointError(
                f"{tensors.said(name)} is not of the target's size: {[vocab_size, hidden_size]}, its vocabulary and "
                "hidden_size, is needed"
            )
        if aux_layers and width != hidden_size and not tensors.has(name):
            raise CheckpointError(f"it has no {name}, and the target's is {hidden_size} wide, the draft head {width}")


def _ids(tensors: HeadTensors, vocab_size: int, target_size: int) -> np.ndarray | None:
    """The target's id of each of the head's, int32 ``[W]``; None if they are the same.

    ``d2t`` holds offsets: target id = draft id + d2t[draft id].
    """
    mask, offsets = tensors.arrays.get(specs.MASK), tensors.arrays.get(specs.OFFSETS)
    if mask is not None and mask.shape != (target_size,):
        raise CheckpointError(f"{tensors.said(specs.MASK)} must have an element for each of the target's {target_size}")
    if not tensors.has(HEAD) and offsets is not None:
        raise CheckpointError(f"{tensors.said(specs.OFFSETS)} is there and lm_head.weight, which it maps, is not")
    # An integer t2d, as some trainers have in memory, is a map and not a mask.
    marked = np.flatnonzero(mask) if mask is not None and mask.dtype in (np.bool_, np.uint8) else np.empty(0, np.int64)
    if offsets is None:
        if vocab_size == target_size:
            return None
        if len(marked) != vocab_size:
            raise CheckpointError(
                f"{tensors.said(HEAD)} is for {vocab_size} tokens and the target has {target_size}; there is no d2t to "
                f"say which they are, and no t2d of bools that marks as many (it marks {len(marked)})"
            )
        return marked.astype(np.int32)
    if offsets.shape != (vocab_size,) or offsets.dtype.kind not in "iu":
        raise CheckpointError(
            f"{tensors.said(specs.OFFSETS)} ({offsets.dtype}) must have an integer for each row of {tensors.said(HEAD)}"
        )
    own = np.arange(vocab_size)
    try:
        ids = checked_ids(own + offsets.astype(np.int64), target_size)
        # Zeros of the right size, which some trainers leave in t2d, say nothing.
        if len(marked) and len(unmarked := np.flatnonzero(~np.isin(ids, marked))):
            raise CheckpointError(f"entry {unmarked[0]} is {ids[unmarked[0]]}, which t2d does not mark")
    except CheckpointError as error:
        raise CheckpointError(f"d2t must hold target id - draft id; of the target ids, {error}") from error
    return None if vocab_size == target_size and np.array_equal(ids, own) else ids


def _check(tensors: HeadTensors, rules: list[Placement], config: HeadConfig) -> None:
    """Refuse missing and misshapen tensors, those with no place, and those that are no floats; names as in the file."""
    spec = head_spec(config.kind)
    optional = {tensors.names.get(name, name) for name in ((specs.MASK, specs.OFFSETS) if spec.own_ends else (EMBED,))}
    said = {rule.tensor: tensors.names.get(rule.tensor, names.file_name(spec, rule.tensor)) for rule in rules}
    found = {tensors.names[name]: array.shape for name, array in tensors.arrays.items()}
    wanted = [replace(rule, tensor=said[rule.tensor]) for rule in rules]
    problems = misfits(found, wanted, f"{spec.algorithm} heads", optional)
    integers = {
        f"{tensors.said(name)} is of {array.dtype}"
        for name, array in tensors.arrays.items()
        if name in said and array.dtype not in DTYPES.values()
    }
    if any(name.startswith(("fc_norm", "norm_output", "input_norm")) for name in tensors.arrays):
        problems += " (EAGLE-3.1, whose extra norms are not supported)"
    if integers:
        problems += f"; parameters that are no floats (quantised heads are not supported): {listed(integers)}"
    if problems:
        raise CheckpointError(f"unsupported draft head; {problems.removeprefix('; ')}")

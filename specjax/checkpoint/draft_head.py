"""EAGLE, EAGLE-2, EAGLE-3 and MTP draft heads: a name to a ``HeadConfig`` and the head's parameters.

What the tensors show decides, and everything is checked against the target before anything large is read: a head
that does not belong to the target would only be slow, never wrong, and so nobody would notice. Knows nothing of how a
head is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specjax.checkpoint import draft_names as names
from specjax.checkpoint.draft_config import aux_layer_ids, layer_config, norm_before_residual
from specjax.checkpoint.draft_names import HeadTensors, common_names, unfused
from specjax.checkpoint.errors import CheckpointError, listed
from specjax.checkpoint.folder import find_weights, read_json
from specjax.checkpoint.hf_config import given, number, require, rope
from specjax.checkpoint.hub import resolve_head
from specjax.checkpoint.load import HOST_DTYPES, fill, misfits
from specjax.checkpoint.unpickle import read_torch_zip
from specjax.checkpoint.weights import DTYPES, read_headers
from specjax.config import HeadConfig, ModelConfig
from specjax.models.head_spec import (
    EMBED,
    FC,
    HEAD,
    HEAD_SPECS,
    MASK,
    OFFSETS,
    HeadSpec,
    head_sizes,
    head_spec,
    head_table,
)
from specjax.models.params import Placement, placements
from specjax.progress import progress_bar

_PARAMETER_DTYPES = frozenset(DTYPES.values())
# Two roundings to half precision of one number differ by less.
_RELATIVE, _ABSOLUTE = 1e-2, 1e-4


def load_head(
    name: str,
    target: ModelConfig,
    *,
    kind: str,
    revision: str | None = None,
    progress: bool = True,
    put: Callable[[np.ndarray], Any] | None = None,
    target_embedding: Callable[[], np.ndarray] | None = None,
) -> tuple[HeadConfig, dict[str, Any]]:
    """Read a draft head: safetensors or torch's ``.bin``, single or sharded, in any of the published dialects.

    Args:
      name: a folder or a hub id.
      target: the model that it drafts for; parameters are cast to ``target.dtype``.
      kind: what the head must be; ``eagle`` is EAGLE-1 and EAGLE-2, ``mtp`` a layer as MiMo has it, in a folder of its
        own.
      revision: branch, tag or commit of a hub id.
      progress: show bars on stderr.
      put: moves one finished leaf to the device; ``jax.device_put`` if None.
      target_embedding: gives the target's embedding ``[V, M]``, so that an equal one is not kept twice; it is called
        only for a head that has an embedding of its own.

    Returns:
      The head's description, and the parameters that ``specjax.models.head_spec.head_table`` declares for it.

    Raises:
      CheckpointError: no such head, not of that kind, not for that target, or not supported; the message begins with
        the flag and the name.
    """
    import jax

    put = put or jax.device_put
    try:
        folder = resolve_head(name, revision=revision, progress=progress)
        tensors, config, ids = _described(name, folder, target, head_spec(kind))
        rules = _rules(config, target)
        _check(tensors, rules, config)
        if config.own_embedding and _is_targets(tensors.arrays[EMBED], target_embedding):
            config = replace(config, own_embedding=False)
            rules = _rules(config, target)
        size = sum(tensors.arrays[rule.tensor].nbytes for rule in rules)
        with progress_bar(f"Loading {name}", size, "B", shown=progress) as loaded:
            params = fill(rules, tensors.arrays.__getitem__, HOST_DTYPES[target.dtype], put, loaded.update)
        if ids is not None:
            params["ids"] = jax.block_until_ready(put(ids))
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from error
    return config, params


def _rules(config: HeadConfig, target: ModelConfig) -> list[Placement]:
    return list(placements(head_table(config), head_sizes(config, target.vocab_size)))


def _described(
    name: str, folder: Path, target: ModelConfig, spec: HeadSpec
) -> tuple[HeadTensors, HeadConfig, np.ndarray | None]:
    """The head's tensors, its description, and the ids of its vocabulary unless they are the target's."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has no config.json; a draft head needs it beside its weights")
    merged = layer_config(read_json(folder / "config.json", name))
    tensors = common_names(_read(find_weights(name, folder, torch_too=True)))
    _check_kind(tensors, spec)
    width = tensors.arrays[FC].shape[0]
    heads = require(merged, "num_attention_heads")
    said = require(merged, "head_dim") if "head_dim" in merged else None
    head_dim, kv_heads = _attention_sizes(tensors, heads, said)
    tensors = unfused(tensors, heads * head_dim, kv_heads * head_dim)
    own_head = tensors.has(HEAD)
    vocab_size = tensors.matrix(HEAD).shape[0] if own_head else target.vocab_size
    aux_layers = aux_layer_ids(merged, target.num_layers) if spec.reads_layers else ()
    _check_target(tensors, merged, target, aux_layers)
    ids = _ids(tensors, vocab_size, target.vocab_size) if spec.own_ends else None
    max_positions = require(merged, "max_position_embeddings", 2048)
    config = HeadConfig(
        kind=spec.kind,
        hidden_size=width,
        feature_size=(len(aux_layers) or 1) * target.hidden_size,
        intermediate_size=tensors.matrix(f"{names.DOWN}.weight").shape[1],
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_epsilon=number(merged, "rms_norm_eps", 1e-6),
        rope=rope(merged, max_positions),  # the head's own: an absent theta is 10000 whatever the target's
        vocab_size=vocab_size,
        aux_layers=aux_layers,
        own_embedding=spec.own_ends and tensors.has(EMBED),
        own_head=own_head,
        mapped=ids is not None,
        fc_bias=tensors.has("fc.bias"),
        attention_bias=tensors.has(*(f"{part}.bias" for part in (names.Q, names.K, names.V))),
        output_bias=tensors.has(f"{names.O}.bias"),
        mlp_bias=tensors.has(*(f"{part}.bias" for part in (names.GATE, names.UP, names.DOWN))),
        norm_before_residual=spec.reads_layers and norm_before_residual(merged),
        dtype=target.dtype,
    )
    return tensors, config, ids


def _read(files: tuple[Path, ...]) -> dict[str, np.ndarray]:
    """All tensors of ``files`` as views of them."""
    if files[0].suffix == ".safetensors":
        return {name: entry.read(integers=True) for name, entry in read_headers(files).items()}
    tensors: dict[str, np.ndarray] = {}
    for file in files:
        state = read_torch_zip(file)
        if not isinstance(state, dict) or not all(
            isinstance(name, str) and isinstance(value, np.ndarray) for name, value in state.items()
        ):
            raise CheckpointError(f"{file} does not hold a state dict, names with a tensor each; save one there")
        if twice := state.keys() & tensors.keys():
            raise CheckpointError(f"tensors {listed(twice)} are in {file} and in another shard; keep one of the two")
        tensors |= state
    return tensors


def _check_kind(tensors: HeadTensors, spec: HeadSpec) -> None:
    """The width that attention reads tells the kinds apart, and for those of one width a tensor that only one has."""
    query = f"{names.QKV if tensors.has(f'{names.QKV}.weight') else names.Q}.weight"
    tensors.need(FC, query)
    width, read = tensors.matrix(FC).shape[0], tensors.matrix(query).shape[1]
    marked = sorted(HEAD_SPECS.values(), key=lambda row: row.mark is None)
    fitting = (row for row in marked if read == row.query_parts * width and (not row.mark or tensors.has(row.mark)))
    found = next(fitting, None)
    if found is None:
        known = ", ".join(f"{row.query_parts * width} ({row.algorithm})" for row in HEAD_SPECS.values())
        raise CheckpointError(
            f"{tensors.said(query)} reads {read} numbers, and {tensors.said(FC)} gives {width}; draft heads "
            f"read there: {known}"
        )
    if found is not spec:
        raise CheckpointError(
            f"this is a head for draft='{found.algorithm}', not {spec.algorithm} "
            f"({tensors.said(query)} reads {read // width} x {width}); change that, or give a head of the other kind"
        )


def _attention_sizes(tensors: HeadTensors, heads: int, head_dim: int | None) -> tuple[int, int]:
    """E and K. K is what the weights have: EAGLE-Qwen2-7B's config says 4, and they have 28."""
    columns = tensors.matrix(f"{names.O}.weight").shape[1]
    size = head_dim or columns // heads
    if size * heads != columns:
        raise CheckpointError(
            f"{tensors.said(f'{names.O}.weight')} reads {columns} numbers, and config.json has num_attention_heads "
            f"{heads}" + (f" and head_dim {head_dim}" if head_dim else "")
        )
    if tensors.has(f"{names.QKV}.weight"):
        source = f"{names.QKV}.weight"
        rows, parts = tensors.arrays[source].shape[0] - columns, 2
    else:
        source = f"{names.K}.weight"
        rows, parts = tensors.matrix(source).shape[0], 1
    kv_heads = rows // (parts * size)
    if kv_heads < 1 or kv_heads * parts * size != rows or heads % kv_heads:
        raise CheckpointError(
            f"{tensors.said(source)} does not hold a divisor of {heads} (num_attention_heads) key/value heads of {size}"
        )
    return size, kv_heads


def _check_target(
    tensors: HeadTensors, merged: Mapping[str, Any], target: ModelConfig, aux_layers: tuple[int, ...]
) -> None:
    width, read = tensors.arrays[FC].shape
    fc = tensors.said(FC)
    if aux_layers:
        if read != len(aux_layers) * target.hidden_size:
            raise CheckpointError(
                f"{fc} reads {read} features, and the target gives {len(aux_layers) * target.hidden_size}: "
                f"{len(aux_layers)} auxiliary layers ({listed(aux_layers)}) of hidden_size {target.hidden_size}"
            )
    elif (width, read) != (target.hidden_size, 2 * target.hidden_size):
        raise CheckpointError(
            f"{fc} is for a target of hidden_size {width}, and the target has {target.hidden_size}: "
            f"[{target.hidden_size}, {2 * target.hidden_size}] is needed"
        )
    if (size := given(merged, "hidden_size", width)) != width:
        raise CheckpointError(f"config.json: hidden_size is {size}, and {fc} has {width} rows")
    if (size := given(merged, "vocab_size", target.vocab_size)) != target.vocab_size:
        raise CheckpointError(
            f"config.json: vocab_size is {size}, and the target's is {target.vocab_size}; a head drafts only for the "
            "model that it was trained with"
        )
    if not aux_layers and tensors.has(EMBED):  # a copy of the target's, and the only sign of its vocabulary
        wanted = (target.vocab_size, target.hidden_size)
        if tensors.arrays[EMBED].shape != wanted:
            raise CheckpointError(
                f"{tensors.said(EMBED)} is not of the target's size: {list(wanted)}, its vocabulary and "
                "hidden_size, is needed"
            )
    if aux_layers and width != target.hidden_size:
        for name, what in ((EMBED, "embedding"), (HEAD, "head")):
            if not tensors.has(name):
                raise CheckpointError(
                    f"it has no {name}, and the target's {what} is {target.hidden_size} wide, the draft head {width}"
                )
    if not aux_layers and tensors.has(HEAD) and tensors.arrays[HEAD].shape[0] != target.vocab_size:
        raise CheckpointError(
            f"{tensors.said(HEAD)} is for {tensors.arrays[HEAD].shape[0]} tokens, and the target has "
            f"{target.vocab_size}"
        )


def _ids(tensors: HeadTensors, vocab_size: int, target_size: int) -> np.ndarray | None:
    """The target's id of each of the head's, int32 ``[W]``; None if they are the same.

    ``d2t`` holds offsets: target id = draft id + d2t[draft id].
    """
    mask, offsets = tensors.arrays.get(MASK), tensors.arrays.get(OFFSETS)
    if mask is not None and mask.shape != (target_size,):
        raise CheckpointError(f"{tensors.said(MASK)} must have an element for each of the target's {target_size}")
    if not tensors.has(HEAD) and offsets is not None:
        raise CheckpointError(f"{tensors.said(OFFSETS)} is there and lm_head.weight, which it maps, is not")
    own = np.arange(vocab_size)
    # An integer t2d, as some trainers have in memory, is a map and not a mask.
    marked = np.flatnonzero(mask) if mask is not None and mask.dtype in (np.bool_, np.uint8) else None
    if offsets is None:
        if vocab_size == target_size:
            return None
        if marked is None or len(marked) != vocab_size:
            mapped = f"and t2d marks {len(marked)}" if marked is not None else "and there is no t2d of bools"
            raise CheckpointError(
                f"{tensors.said(HEAD)} is for {vocab_size} tokens and the target has {target_size}; there is no "
                f"d2t to say which they are, {mapped}"
            )
        return marked.astype(np.int32)
    if offsets.shape != (vocab_size,) or offsets.dtype.kind not in "iu":
        raise CheckpointError(
            f"{tensors.said(OFFSETS)} ({offsets.dtype}) must have an integer for each row of {tensors.said(HEAD)}"
        )
    ids = own + offsets.astype(np.int64)
    if len(outside := np.flatnonzero((ids < 0) | (ids >= target_size))):
        raise CheckpointError(
            f"d2t leads draft id {outside[0]} to target id {ids[outside[0]]}, outside 0..{target_size - 1}; it must "
            "hold target id - draft id"
        )
    first = np.unique(ids, return_index=True)[1]
    if len(first) != len(ids):
        again = np.setdiff1d(own, first)[0]
        before = np.flatnonzero(ids == ids[again])[0]
        raise CheckpointError(
            f"d2t leads draft ids {before} and {again} both to target id {ids[again]}; siblings of a tree must differ"
        )
    # Zeros of the right size, which some trainers leave in t2d, say nothing.
    unmarked = own[~np.isin(ids, marked)] if marked is not None and len(marked) else own[:0]
    if len(unmarked):
        raise CheckpointError(
            f"d2t leads draft id {unmarked[0]} to target id {ids[unmarked[0]]}, which t2d does not mark; d2t must "
            "hold target id - draft id"
        )
    return None if vocab_size == target_size and np.array_equal(ids, own) else ids.astype(np.int32)


def _check(tensors: HeadTensors, rules: list[Placement], config: HeadConfig) -> None:
    """Refuse missing and misshapen tensors, those with no place, and those that are no floats; names as in the file."""
    spec = head_spec(config.kind)
    said = {rule.tensor: tensors.names.get(rule.tensor, names.file_name(spec, rule.tensor)) for rule in rules}
    renamed = [replace(rule, tensor=said[rule.tensor]) for rule in rules]
    shapes = {tensors.names[name]: array.shape for name, array in tensors.arrays.items()}
    missing, wrong = misfits(shapes, renamed)
    extra = tensors.arrays.keys() - said.keys() - ({MASK, OFFSETS} if spec.own_ends else {EMBED})
    integers = {
        f"{tensors.said(name)} is of {tensors.arrays[name].dtype}"
        for name in said.keys() & tensors.arrays.keys()
        if tensors.arrays[name].dtype not in _PARAMETER_DTYPES
    }
    problems = []
    if missing:
        problems.append(f"missing tensors: {listed(missing)}")
    if extra:
        place = f"tensors with no place in {spec.algorithm} heads: {listed(tensors.said(name) for name in extra)}"
        if any(name.startswith(("fc_norm", "norm_output", "input_norm")) for name in extra):
            place += " (EAGLE-3.1, whose extra norms are not supported)"
        problems.append(place)
    if wrong:
        problems.append(f"wrong shapes: {listed(wrong)}")
    if integers:
        problems.append(f"parameters that are no floats (quantised heads are not supported): {listed(integers)}")
    if problems:
        raise CheckpointError("unsupported draft head; " + "; ".join(problems))


def _is_targets(embedding: np.ndarray, target_embedding: Callable[[], np.ndarray] | None) -> bool:
    """Whether ``embedding [V, M]`` is the target's, but for rounding; compared a few rows at a time."""
    if target_embedding is None:
        return False
    theirs = target_embedding()
    if theirs.shape != embedding.shape:
        return False
    blocks = (slice(start, start + 4096) for start in range(0, len(embedding), 4096))
    return all(
        np.allclose(np.float32(embedding[rows]), np.float32(theirs[rows]), rtol=_RELATIVE, atol=_ABSOLUTE)
        for rows in blocks
    )

"""Draft heads: EAGLE, EAGLE-2, EAGLE-3, MTP and block heads in folders of their own, and MTP layers in a target's
shards.

The tensors decide the description. Everything is checked against the target before weights are read, because a head of
another target would only be slow, without an error. In order: loading, a head's description, its checks, the published
layouts of tensors and of config.json, MTP layers.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from specjax.checkpoint import assistant
from specjax.checkpoint.block_head import (
    DEEPSPEC,
    agree,
    architecture_of,
    are_layers,
    block_config,
    copies,
    embedding_scale,
    layer_fields,
    layer_names,
    not_read,
    read_layers,
    typed_windows,
)
from specjax.checkpoint.files import CheckpointError, Settings, listed, prefixed, read_json, unsupported
from specjax.checkpoint.hf_config import NO_WINDOW, SILU, flattened, read_heads, refuse_unsupported
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
from specjax.limits import ParameterError
from specjax.models import head_spec as heads_of
from specjax.models import mtp_spec
from specjax.models.head_spec import (
    EMBED,
    FC,
    HEAD,
    LAYER,
    MASK,
    MASK_FEATURE,
    OFFSETS,
    HeadSpec,
    head_sizes,
    head_spec,
    head_table,
)
from specjax.models.mtp_spec import STYLES, mtp_sizes, mtp_table, mtp_tensors
from specjax.models.params import EMBED_TENSOR, HEAD_TENSOR, placements

if TYPE_CHECKING:
    from jax.sharding import Mesh

logger = logging.getLogger(__name__)

Q, K, V, O = (f"{LAYER}self_attn.{part}_proj" for part in "qkvo")
GATE, UP, DOWN = (f"{LAYER}mlp.{part}_proj" for part in ("gate", "up", "down"))

# Prefixes of published tensors and their common form. speculators' converter renames EAGLE-1's fc and layers.0. EAGLE-3
# heads of speculators and NeMo have layers.0. MiMo has the projection and the decoder layer under one prefix.
_RENAMED = (
    (r"model\.", ""), (r"layers\.0\.", LAYER), (r"transformer\.", LAYER), (r"fusion_fc\.", "fc."),
    (r"mtp_layers\.0\.input_proj\.", "fc."), (r"mtp_layers\.0\.", LAYER),
)  # fmt: skip
AUX_LAYERS_KEY = "eagle_aux_hidden_state_layer_ids"
_OWNER = "Eagle3"  # the options with `aux_layers`
_OVERRIDE = "EAGLE3's option aux_layers sets the layers, whatever config.json says"
# Of P-EAGLE: keys that only its files have, and keys of the mask token in the order in which vLLM reads them.
_P_EAGLE_KEYS = ("parallel_drafting", "ptd_token_id")
_MASK_TOKENS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
# EAGLE-3.1: SGLang's older name and TensorRT-LLM's of a key, and prefixes of the norms' tensors.
_OTHER_NAMES = {"fc_norm": "use_aux_norm", "norm_output": "return_hidden_post_norm"}
_NORM_TENSORS = {"norm_before_fc": "input_norm.", "fc_norm": "fc_norm."}
# Keys of variants that are not supported, at the top level or in `eagle_config`.
_UNSUPPORTED = {
    "eh_proj_before_attn": "the embedding projected before attention", "layernorms": "norms of EAGLE-1's inputs",
}  # fmt: skip


class _Given(NamedTuple):
    """Options of drafters that override a head's config.json."""

    sample_from_anchor: bool | None = None
    aux_layers: Sequence[int] | None = None
    norm_output: bool | None = None
    mask_token: int | None = None


def load_head(
    name: str, target: ModelConfig, *, kind: str, revision: str | None = None, progress: bool = True,
    quantization: str = "none", target_embedding: Callable[[], np.ndarray] | None = None, mesh: Mesh | None = None,
    sample_from_anchor: bool | None = None, aux_layers: Sequence[int] | None = None, norm_output: bool | None = None,
    mask_token: int | None = None,
) -> tuple[HeadConfig | MtpConfig, dict[str, Any]]:  # fmt: skip
    """Read a draft head of any published layout: safetensors or torch's ``.bin``, single or sharded.

    Args:
      name: a folder or a hub id; ``revision`` is for the latter.
      target: the model that it drafts for; parameters are cast to ``target.dtype``.
      kind: ``eagle`` for EAGLE-1 and EAGLE-2, ``eagle3``, ``mtp`` for a layer such as MiMo's in a folder of its own, or
        ``block`` (DFlash, DSpark, DFlash2, JetSpec), or ``assistant`` for Gemma 4's.
      sample_from_anchor: for ``block``, see `specjax.Block`.
      aux_layers, norm_output, mask_token: for ``eagle3``, see `specjax.Eagle3`.
      target_embedding: returns the target's embedding ``[V, M]``, which replaces an equal embedding of the head.

    Returns the head's description, and the parameters that ``specjax.models.head_spec.head_table`` declares for it.
    Raises CheckpointError if there is no such head, or a head that is unsupported or of another kind or target.
    """
    import jax

    with prefixed(name):
        folder = resolve_head(name, revision=revision, progress=progress)
        if assistant.wanted(kind, name, folder):
            options: Any = {"quantization": quantization, "mesh": mesh, "progress": progress}
            return assistant.load_assistant(name, folder, target, **options)
        given = _Given(sample_from_anchor, aux_layers, norm_output, mask_token)
        tensors, config, ids = _describe(name, folder, target, kind, given, _read(name, folder))
        # The tolerances exceed the difference between roundings of one number to half precision.
        if config.own_embedding and (
            target_embedding and same_content(tensors.arrays[EMBED], target_embedding(), rtol=1e-2, atol=1e-4)
        ):
            config = replace(config, own_embedding=False)
        sources = {tensor: f"tensor {own} in {folder}" for tensor, own in tensors.names.items()}
        entries = {tensor: ArrayEntry(array, sources[tensor]) for tensor, array in tensors.arrays.items()}
        sizes = head_sizes(config, target.vocab_size)
        params = fill_parameters(
            name, head_table(config), sizes, entries, config, target.dtype, quantization, mesh=mesh, progress=progress
        )  # fmt: skip
        if ids is not None:
            params["ids"] = jax.device_put(ids)
    if config.aux_layers:
        before = " (before the final norm)" if target.num_layers - 1 in config.aux_layers else ""
        layers = ", ".join(map(str, config.aux_layers))
        logger.info("%s reads the outputs of layers %s%s of 0..%d", name, layers, before, target.num_layers - 1)
    return config, params


def describe_head(
    name: str, target: ModelConfig, *, kind: str, revision: str | None = None, progress: bool = True,
    sample_from_anchor: bool | None = None, aux_layers: Sequence[int] | None = None, norm_output: bool | None = None,
    mask_token: int | None = None,
) -> HeadConfig | MtpConfig:  # fmt: skip
    """The description that `load_head` returns, from config.json and the headers of weights if present. An embedding in
    the files is not compared with the target's."""
    with prefixed(name):
        folder = resolve_head(name, revision=revision, progress=progress, outline=True)
        if assistant.wanted(kind, name, folder):
            return assistant.describe_assistant(name, folder, target)
        given = _Given(sample_from_anchor, aux_layers, norm_output, mask_token)
        has_weights = any((folder / file).is_file() for layout in LAYOUTS for file in layout)
        return _describe(name, folder, target, kind, given, _read(name, folder) if has_weights else None)[1]


def _describe(
    name: str, folder: Path, target: ModelConfig, kind: str, given: _Given, stored: Mapping[str, np.ndarray] | None
) -> tuple[HeadTensors, HeadConfig, np.ndarray | None]:
    """The head's tensors, its description, and the target's ids of its vocabulary; None: the target's vocabulary.
    ``stored``: the tensors; None: there are no weights, and the description is that of published heads."""
    settings = read_json(folder / "config.json", name)
    if kind == BlockConfig.kind:
        return _describe_block(settings, target, given, stored)
    spec, settings = head_spec(kind), layer_config(settings)
    tensors = common_names(stored or {}, skipped=copies(settings))
    masks = tensors.has(MASK_FEATURE) or _is_p_eagle(settings)
    if stored is None:
        fields = _published_fields(settings, target, spec)
        fields |= _config_fields(settings, target, spec, given, fields, masks)
        return tensors, HeadConfig(**fields), None
    fields = _stored_fields(tensors, settings, target, spec)
    fields |= _config_fields(settings, target, spec, given, fields, masks)
    _check_target(tensors, settings, target, fields["aux_layers"], given)
    ids = _ids(tensors, fields["vocab_size"], target.vocab_size) if spec.own_ends else None
    config = HeadConfig(**fields, mapped=ids is not None)
    _check_tensors(tensors, config, target, (MASK, OFFSETS) if spec.own_ends else (EMBED,), spec)
    return tensors, config, ids


def _describe_block(
    settings: Settings, target: ModelConfig, given: _Given, stored: Mapping[str, np.ndarray] | None
) -> tuple[HeadTensors, BlockConfig, np.ndarray | None]:
    """`_describe` of a block head."""
    arrays = {file_name.removeprefix("model."): array for file_name, array in (stored or {}).items()}
    tensors = HeadTensors(arrays, dict(zip(arrays, stored or {}, strict=True)))
    config = block_config(settings, target, arrays.keys(), sample_from_anchor=given.sample_from_anchor)
    if stored is None:
        return tensors, config, None
    vocab_size = tensors.matrix(HEAD).shape[0] if config.own_head else config.vocab_size
    ids = _ids(tensors, vocab_size, target.vocab_size)
    config = replace(config, vocab_size=vocab_size, mapped=ids is not None)
    _check_tensors(tensors, config, target, not_read(settings))
    return tensors, config, ids


def _stored_fields(tensors: HeadTensors, settings: Settings, target: ModelConfig, spec: HeadSpec) -> dict[str, Any]:
    """The fields of `HeadConfig` that follow from tensors."""
    layers = len(_layers(tensors.arrays)) or 1
    if layers > 1 and not tensors.has(MASK_FEATURE):
        raise CheckpointError(f"it has {layers} decoder layers; heads of 1 layer are supported, and P-EAGLE heads")
    _check_kind(tensors, spec)
    heads = settings.integer("num_attention_heads")
    head_dim, kv_heads = _attention_sizes(tensors, heads, settings)
    own_head = tensors.has(HEAD)
    return {
        "hidden_size": tensors.arrays[FC].shape[0],
        "intermediate_size": tensors.matrix(f"{DOWN}.weight").shape[1],
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": tensors.matrix(HEAD).shape[0] if own_head else target.vocab_size,
        "own_embedding": spec.own_ends and tensors.has(EMBED),
        "own_head": own_head,
        "fc_bias": tensors.has("fc.bias"),
        "attention_bias": tensors.has(*(f"{part}.bias" for part in (Q, K, V))),
        "output_bias": tensors.has(f"{O}.bias"),
        "mlp_bias": tensors.has(*(f"{part}.bias" for part in (GATE, UP, DOWN))),
        "head_norms": all(tensors.has(f"{LAYER}self_attn.{part}_norm.weight") for part in "qk"),
        "layers": layers,
    }


def _published_fields(settings: Settings, target: ModelConfig, spec: HeadSpec) -> dict[str, Any]:
    """`_stored_fields` without weights, with the tensors of published heads."""
    (heads, kv_heads), width = read_heads(settings), settings.integer("hidden_size", target.hidden_size)
    vocab_size = settings.integer("draft_vocab_size", target.vocab_size) if spec.own_ends else target.vocab_size
    return {
        "hidden_size": width,
        "intermediate_size": settings.integer("intermediate_size"),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": settings.integer("head_dim", width // heads),
        "vocab_size": vocab_size,
        "own_head": spec.own_ends and not copies(settings),
        "mapped": vocab_size != target.vocab_size,
        "fc_bias": bool(settings.optional("bias", spec.absent_bias)),
        "attention_bias": settings.boolean("attention_bias") or "attention_bias" in spec.biases,
        "mlp_bias": settings.boolean("mlp_bias"),
        "layers": settings.count("num_hidden_layers", 1) if _is_p_eagle(settings) else 1,
    }


def _config_fields(
    settings: Settings, target: ModelConfig, spec: HeadSpec, given: _Given, fields: Mapping[str, Any], masks: bool
) -> dict[str, Any]:
    """The fields of `HeadConfig` that depend on config.json, the target and the options, besides ``fields``. ``masks``:
    the head drafts with masks alone."""
    aux_layers: tuple[int, ...] = ()
    if spec.reads_layers:
        aux_layers = aux_layer_ids(settings, target.num_layers, target.family, given.aux_layers)
    # Absent means false, as in speculators' schema and in the authors' heads.
    norms = {key: _flag(settings, key) for key in ("norm_before_residual", "norm_before_fc")}
    norms["fc_norm"] = _agreed_flag(settings, "fc_norm")
    stated = given.norm_output
    norms["norm_output"] = _agreed_flag(settings, "norm_output") if stated is None else stated
    if not spec.reads_layers and any(norms.values()):
        key = next(key for key, value in norms.items() if value)
        raise unsupported(key, True, f"false ({spec.algorithm} heads lack this norm, EAGLE3 heads may have it)")
    layers = fields["layers"]
    return {
        "kind": spec.kind,
        "feature_size": (len(aux_layers) or 1) * target.hidden_size,
        "aux_layers": aux_layers,
        **norms,
        **layer_fields(settings, target, fields["head_dim"], 2048),
        "input_scale": embedding_scale(settings, target) if architecture_of(settings) in DEEPSPEC else 1.0,
        # A file that states a window without `layer_types` is refused by `layer_config`.
        "windows": typed_windows(settings, layers) if settings.get("layer_types") else (None,) * layers,
        "mask_token": _mask_token(settings, target, given) if masks else None,
        "slots": _trained_slots(settings) if masks else None,
    }


def _is_p_eagle(settings: Settings) -> bool:
    names = f"{settings.get('speculators_model_type')} {settings.get('architectures')}".lower()
    values = [_either(settings, key) for key in _P_EAGLE_KEYS]
    return "peagle" in names or any(value is not None and value is not False for value in values)


def _mask_token(settings: Settings, target: ModelConfig, given: _Given) -> int:
    """The token of P-EAGLE's masks: the option, else the first key that the file has. SpecForge's files have none."""
    stated = {"dflash_config.mask_token_id": settings.section("dflash_config").get("mask_token_id")}
    stated |= {key: _either(settings, key) for key in _MASK_TOKENS}
    if (token := given.mask_token) is not None:
        if token >= target.vocab_size:
            problem = f"is {token}; it must be a token of the target, from 0 to {target.vocab_size - 1}"
            raise ParameterError("mask_token", problem, _OWNER)
        return token
    if (key := next((key for key, value in stated.items() if value is not None), None)) is None:
        problem = f"is needed for a P-EAGLE head whose config.json has none of: {', '.join(stated)}"
        raise ParameterError("mask_token", problem, _OWNER)
    return Settings(stated).token(key, target.vocab_size)


def _trained_slots(settings: Settings) -> int | None:
    """Tokens that a P-EAGLE head drafted in one forward of its training; None: not stated."""
    if settings.get("num_depths") is not None:
        return settings.integer("num_depths")
    methods = settings.section("speculators_config").get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    key = "speculative_tokens"
    return Settings(first).integer(key) if isinstance(first, dict) and first.get(key) is not None else None


def _read(name: str, folder: Path) -> dict[str, np.ndarray]:
    files = find_weights(name, folder, torch_too=True)
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


def _check_target(
    tensors: HeadTensors, settings: Settings, target: ModelConfig, aux_layers: tuple[int, ...], given: _Given
) -> None:
    (width, inputs), vocab_size, hidden_size = tensors.arrays[FC].shape, target.vocab_size, target.hidden_size
    if given.aux_layers is not None and inputs != (read := len(given.aux_layers) * hidden_size):
        problem = f"has {len(given.aux_layers)} layers, {read} channels of the target"
        raise ParameterError("aux_layers", f"{problem}; {tensors.label(FC)} is for another number", _OWNER)
    fc = (width, len(aux_layers) * hidden_size) if aux_layers else (hidden_size, 2 * hidden_size)
    if tensors.arrays[FC].shape != fc:
        layers = f", for the auxiliary layers {listed(aux_layers)}" if aux_layers else ""
        raise CheckpointError(f"{tensors.label(FC)} is for another target; {list(fc)} is needed{layers}")
    agree(settings, "hidden_size", width, f"{tensors.label(FC)} has {width} rows")
    reason = f"the target's is {vocab_size}; a head drafts only for the model of its training"
    agree(settings, "vocab_size", vocab_size, reason)
    for name in (EMBED, HEAD):
        if not aux_layers and tensors.has(name) and tensors.arrays[name].shape != (vocab_size, hidden_size):
            raise CheckpointError(f"{tensors.label(name)} is not of the target's size: {[vocab_size, hidden_size]}")
        if aux_layers and width != hidden_size and not tensors.has(name):
            raise CheckpointError(f"it has no {name}, and the target's is {hidden_size} wide, the draft head {width}")


def _check_tensors(
    tensors: HeadTensors, config: HeadConfig, target: ModelConfig, optional: Collection[str],
    spec: HeadSpec | None = None,
) -> None:  # fmt: skip
    """Refuse missing, misshapen and unknown tensors, and parameters that are not floats, under the file's names. A
    block head has no ``spec``."""
    arrays, names = tensors.arrays, tensors.names
    rules = list(placements(head_table(config), head_sizes(config, target.vocab_size)))
    expected = [replace(rule, tensor=names.get(rule.tensor, published_name(spec, rule.tensor))) for rule in rules]
    named, kind = {names[name]: array for name, array in arrays.items()}, spec.algorithm if spec else "block"
    problems = misfits(named, expected, f"{kind} heads", {names.get(name, name) for name in optional})
    for key, prefix in _NORM_TENSORS.items():
        if spec and getattr(config, key) != any(name.startswith(prefix) for name in arrays):
            problems += f" (a head has {prefix}* if and only if its config.json has {key} true)"
    read = {rule.tensor for rule in rules} & arrays.keys()
    integers = [name for name in read if arrays[name].dtype not in DTYPES.values()]
    if integers:
        labels = listed(f"{tensors.label(name)} is of {arrays[name].dtype}" for name in integers)
        problems += f"; parameters that are no floats (quantised heads are not supported): {labels}"
    if problems:
        raise CheckpointError(f"unsupported {'draft' if spec else 'block'} head; {problems.removeprefix('; ')}")


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


def common_names(tensors: Mapping[str, np.ndarray], skipped: Collection[str] = ()) -> HeadTensors:
    arrays: dict[str, np.ndarray] = {}
    names: dict[str, str] = {}
    for file_name, array in tensors.items():
        name = file_name
        for pattern, replacement in _RENAMED:
            name = re.sub(f"^{pattern}", replacement, name)
        if name in skipped:
            continue
        if name in names:
            raise CheckpointError(f"tensors {names[name]} and {file_name} mean the same; keep one of them")
        # P-EAGLE's feature is published as [1, 1, F].
        arrays[name], names[name] = array.reshape(-1) if name == MASK_FEATURE else array, file_name
    return HeadTensors(arrays, names)


def _layers(names: Iterable[str]) -> set[str]:
    return {match[0] for name in names if (match := re.match(rf"{LAYER}|(mtp_)?layers\.\d+\.", name))}


def published_name(spec: HeadSpec | None, name: str) -> str:
    """The published name of a common name, the inverse of ``common_names``."""
    for common, published in spec.published if spec else ():
        if name.startswith(common):
            return published + name.removeprefix(common)
    return name


def layer_config(config: Settings) -> Settings:
    """Settings of an EAGLE or MTP head and of its layers, with `sliding_window` only if ``layer_types`` says which
    layers have a window. Unsupported ones are refused by name."""
    settings = layer_names(flattened(config))
    # Qwen2 configs have a window that is disabled, speculators' have one also if the layer has none.
    types, used = settings.get("layer_types"), settings.boolean("use_sliding_window", True)
    window = settings.pop("sliding_window", None) if types or not used else None
    refuse_unsupported(settings, SILU | NO_WINDOW | {"quantization_config": ({}, "none")})
    if types and window is not None:
        settings["sliding_window"] = window
    for key, variant in _UNSUPPORTED.items():
        if (value := _either(settings, key)) is not None and value is not False:
            raise _refused(key, value, variant)
    for key in ("speculators_model_type", "architectures"):
        if "deepseek" in str(value := settings.get(key)).lower():
            raise _refused(key, value, "latent attention")
    return settings


def _refused(key: str, value: object, variant: str) -> CheckpointError:
    return CheckpointError(f"config.json: {key} is {value!r:.80}; such heads ({variant}) are not supported")


def _either(settings: Settings, key: str) -> Any:
    """A key's value in ``eagle_config``, else at the top level; None: absent."""
    return settings.section("eagle_config").optional(key, settings.get(key))


def _flag(settings: Settings, key: str) -> bool:
    return Settings({key: _either(settings, key)}).boolean(key)


def _agreed_flag(settings: Settings, key: str) -> bool:
    """A key of `_OTHER_NAMES` under any name, at the top level or in ``eagle_config``: engines read different ones."""
    sections = {"": settings, "eagle_config.": settings.section("eagle_config")}
    names = [(at, name) for name in (key, _OTHER_NAMES[key]) for at in sections if sections[at].get(name) is not None]
    stated = {at + name: sections[at].boolean(name) for at, name in names}
    if len({*stated.values()}) > 1:
        values = " and ".join(f"{name} is {value}" for name, value in stated.items())
        raise CheckpointError(f"config.json: {values}, which differ; keep the one that the head was trained with")
    return any(stated.values())


def aux_layer_ids(
    settings: Mapping[str, Any], num_layers: int, family: str = "", given: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The target's layers, 0-based, whose outputs the head reads. ``settings`` is from ``layer_config``; ``given``, the
    option `aux_layers`, overrides it. A file without ids has the authors' default.

    Files count in two ways. Outputs: id j is the output of layer j. Boundaries: id j is the input of layer j, which is
    the output of layer j - 1; the last boundary precedes the final norm. As in SGLang (sglang#25454, #32334), ids are
    outputs if the first is 1, in ``eagle_config`` and at the top level, else boundaries; for gpt-oss always boundaries.
    """
    refuse_unsupported(
        Settings({"use_aux_hidden_state": _either(Settings(settings), "use_aux_hidden_state")}),
        {"use_aux_hidden_state": (True, "true (an EAGLE-3 head reads several layers)")},
    )
    if given is not None:
        if not are_layers(given, num_layers):
            problem = f"must be different layers from 0 to {num_layers - 1}, got {list(given)}"
            raise ParameterError("aux_layers", problem, _OWNER)
        return tuple(given)
    is_deepspec = architecture_of(Settings(settings)) in DEEPSPEC  # has outputs, under block heads' name
    name = "target_layer_ids" if is_deepspec else AUX_LAYERS_KEY
    places = {f"eagle_config.{name}": Settings(settings).section("eagle_config"), name: settings}
    written = {key: ids for key, place in places.items() if (ids := place.get(name)) not in (None, [])}

    def outputs(ids: Sequence[int]) -> bool:
        return is_deepspec or (ids[0] == 1 and family != "gpt_oss")

    read = read_layers(written, lambda key, ids: not outputs(ids))
    for key, ids in written.items():
        if not are_layers(read[key], num_layers):
            words = f"{list(ids)}, {'outputs' if outputs(ids) else 'boundaries'}: the outputs of layers {[*read[key]]}"
            raise _other_layers(f"{key} is {words}", num_layers)
    if len(set(read.values())) > 1:
        meanings = " and ".join(f"{key} {written[key]}, the outputs of layers {list(read[key])}" for key in read)
        raise CheckpointError(f"config.json has {meanings}, which differ; {_OVERRIDE}")
    if read:
        return next(iter(read.values()))
    layers = heads_of.default_aux_layers(num_layers)
    if not are_layers(layers, num_layers):
        default = f"absent, and its default for a target of {num_layers} layers is {list(layers)}"
        raise _other_layers(f"{AUX_LAYERS_KEY} is {default}", num_layers)
    return layers


def _other_layers(problem: str, num_layers: int) -> CheckpointError:
    return CheckpointError(f"config.json: {problem}; different layers in 0..{num_layers - 1} are needed; {_OVERRIDE}")


def mtp_config(files: ModelFiles, config: ModelConfig) -> MtpConfig | None:
    """The MTP layers of a model; None if it has none. Reads headers, or only config.json if there are no weights."""
    if files.weights:
        return mtp_spec.mtp_config(matrices(files).keys(), config)
    settings = Settings({**Settings(files.config).section("text_config"), **files.config})

    def count(key: str, default: int) -> int:
        return settings.count(key, default) if settings.optional(key, default) else 0

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
    inside = {name: tensors[name] for name in names}
    if problems := misfits(inside, placements(declared, sizes), f"{config.style} MTP layers", copies.keys()):
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

"""Makes drafters from options, or from functions outside of this package (docs/drafters.md)."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias, cast

import jax

from specjax.config import BlockConfig, HeadConfig, MtpConfig
from specjax.drafters.base import Drafter, none_drafter
from specjax.drafters.block import block_drafter
from specjax.drafters.eagle import eagle_drafter
from specjax.drafters.mtp import mtp_drafter
from specjax.drafters.ngram import ngram_drafter
from specjax.drafters.options import Block, DraftOptions, ModelOptions, Ngram, NoDraft, TreeShape, options_of
from specjax.drafters.standalone import standalone_drafter
from specjax.models.target import Target
from specjax.verify import Verifier, verify_tree

logger = logging.getLogger(__name__)


def make_drafter(
    draft: DraftOptions | str, *, target: Target | None = None, head: HeadConfig | MtpConfig | None = None,
    model: Target | None = None, backend: str | None = None, automatic: TreeShape | None = None,
    platform: str | None = None,
) -> Drafter:  # fmt: skip
    """Makes the drafter of an algorithm.

    Args:
        draft: options, or an algorithm's name for the defaults; not AUTO, which needs a model to choose for.
        target, head: for algorithms with a draft head, whose parameters go into `Params.draft`.
        model: for STANDALONE, with `target`; its `StandaloneParams` go into `Params.draft`.
        backend: attention implementation of the head.
        automatic: the tree if the options give no number; None: it depends on the algorithm and the target's family.
        platform: "cpu" or "gpu"; None: this process's.

    Raises:
        ValueError: the algorithm does not exist, or its head or model is missing.
    """
    options, platform = options_of(draft), platform or jax.default_backend()
    if isinstance(options, NoDraft):
        return none_drafter()
    if isinstance(options, Ngram):
        if options.nodes is None and platform == "cpu":
            # On a CPU each node costs time, which four nodes mostly gain back after two matched tokens. A GPU verifies
            # twelve tokens in the time of one.
            least = max(options.min_match, min(2, options.max_match))
            drafter = ngram_drafter(replace(options, nodes=4, min_match=least))
        else:
            drafter = ngram_drafter(options)
        # Where nothing matches, a step with drafts would compute its nodes for nothing.
        return drafter._replace(explicit_width=options.nodes is not None, every_step=False)
    if not isinstance(options, ModelOptions):
        raise ValueError(f"{options.algorithm} chooses a drafter for a model: use Engine.from_pretrained")
    if options.kind is None:
        if target is None or model is None:
            missing = " and ".join(name for name, value in (("target", target), ("model", model)) if value is None)
            raise ValueError(f"{options.algorithm} needs a target and {options.needs}; missing: {missing}")
        return standalone_drafter(target, model, **_tree_arguments(options, target, automatic))
    if target is None or head is None or options.kind != head.kind:
        stated = "no head" if head is None else f"a head of kind {head.kind!r}"
        stated += " and no target" if target is None else ""
        needed = f"a target and a draft head of kind {options.kind!r}"
        raise ValueError(f"{options.algorithm} needs {needed}, got {stated}")
    if isinstance(options, Block) and isinstance(head, BlockConfig):
        drafts = head.drafts_of(min(options.block or head.block, head.block))
        arguments = _tree_arguments(options, target, automatic or TreeShape(drafts, 1, drafts + 1))
        arguments |= {"block": options.block, "window": options.window}
        return block_drafter(target, head, backend=backend, **arguments)
    arguments = _tree_arguments(options, target, automatic)
    if isinstance(head, MtpConfig):
        return mtp_drafter(target, head, backend=backend, **arguments)
    return eagle_drafter(target, head, backend=backend, **arguments)


def _tree_arguments(options: ModelOptions, target: Target, automatic: TreeShape | None) -> dict[str, Any]:
    """The arguments that all drafters with a draft model share."""
    shape = options.shape(automatic or options.automatic(target.config.family))
    if options.nodes not in (None, shape.nodes):
        words = "%d draft tokens, not %d: with top-k 1 the draft is a chain of steps + 1 tokens"
        logger.warning(words, shape.nodes, options.nodes)
    explicit = [number is not None for number in (options.steps, options.topk, options.nodes)]
    origin = "set by options" if all(explicit) else "partly automatic" if any(explicit) else "automatic"
    return {
        "shape": shape,
        "explicit_width": any(explicit),
        "note": f"{shape} ({origin})",
        "positions": options.positions,
        "coupling": options.coupling,
    }


class Speculation(NamedTuple):
    """A drafter with its parameters and a verifier.

    Attributes:
        drafter: proposes draft trees.
        params: `Params.draft` of its functions; None: it has no parameters.
        verify: decides which drafts are accepted; the default is lossless.
    """

    drafter: Drafter
    params: Any = None
    verify: Verifier = verify_tree


DrafterFactory: TypeAlias = Callable[[Target], Drafter | Speculation]
"""Makes a drafter for a target."""


def load_drafter(name: str) -> DrafterFactory:
    """Imports the factory ``module:function``; the module must be on Python's path.

    Raises:
        ValueError: the name has another form, or the module or the function does not exist.
    """
    module, colon, attribute = name.partition(":")
    if not (colon and attribute and all(part.isidentifier() for part in module.split("."))):
        raise ValueError(f"drafter {name!r}: write module:function, such as my_drafter:make")
    try:
        imported = importlib.import_module(module)
    except SyntaxError as error:
        raise ValueError(f"drafter {name!r}: cannot import {module}: {error}") from error
    except ImportError as error:
        raise ValueError(f"drafter {name!r}: cannot import {module} ({error}); is its folder in PYTHONPATH?") from error
    factory = getattr(imported, attribute, None)
    if not callable(factory):
        problem = "has no function" if factory is None else f"has a {type(factory).__name__}, no function, named"
        defined = [key for key, value in vars(imported).items() if getattr(value, "__module__", None) == module]
        raise ValueError(
            f"drafter {name!r}: {module} {problem} {attribute}; it defines: {', '.join(defined) or 'none'}"
        )
    return cast(DrafterFactory, factory)


def make_speculation(given: Drafter | DrafterFactory | str, target: Target) -> Speculation:
    """Makes the speculation of a drafter, a factory or a factory's name.

    Raises:
        ValueError: see `load_drafter`, or the factory returned another type.
    """
    if isinstance(given, Drafter):
        return Speculation(given)
    result = (load_drafter(given) if isinstance(given, str) else given)(target)
    if isinstance(result, Drafter):
        return Speculation(result)
    if not isinstance(result, Speculation):
        module, name = (getattr(given, key, None) for key in ("__module__", "__qualname__"))
        name = given if isinstance(given, str) else f"{module}:{name}" if module and name else repr(given)
        raise ValueError(f"drafter {name!r} returned {result!r:.80}; it must return a Drafter or a Speculation")
    return result

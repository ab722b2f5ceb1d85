"""Makes drafters: from options, or from outside, as docs/drafters.md explains."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, cast

import jax

from specjax.config import HeadConfig, MtpConfig
from specjax.drafters.base import Drafter, none_drafter
from specjax.drafters.eagle import eagle_drafter
from specjax.drafters.mtp import mtp_drafter
from specjax.drafters.ngram import ngram_drafter
from specjax.drafters.options import Coupling, DraftOptions, ModelOptions, Ngram, NoDraft, TreeShape, options_of
from specjax.drafters.standalone import standalone_drafter
from specjax.models.target import Target
from specjax.verify import Verifier, verify_tree

logger = logging.getLogger(__name__)


def make_drafter(
    draft: DraftOptions | str, *, target: Target | None = None, head: HeadConfig | MtpConfig | None = None,
    model: Target | None = None, backend: str | None = None, automatic: TreeShape | None = None,
    platform: str | None = None,
) -> Drafter:  # fmt: skip
    """The drafter of an algorithm.

    Args:
        draft: its options, or its name in any case for the defaults; not AUTO, which needs a model to choose for.
        target, head: for algorithms with a draft head; the head's parameters go into `Params.draft`.
        model: for STANDALONE, with `target`; its `StandaloneParams` go into `Params.draft`.
        backend: the head's attention implementation; a model has its own.
        automatic: the tree where the options give no number of it; None: the algorithm and the target's family decide.
        platform: that it will run on, "cpu" or "gpu"; None: this process's.

    Raises:
        ValueError: no such algorithm, or not the head or model that it needs.
    """
    options, platform = options_of(draft), platform or jax.default_backend()
    if isinstance(options, NoDraft):
        return none_drafter()
    if isinstance(options, Ngram):
        return ngram_drafter(options.on(platform))._replace(explicit_width=options.nodes is not None)
    if not isinstance(options, ModelOptions):
        raise ValueError(f"{options.algorithm} chooses a drafter for a model: use Engine.from_pretrained")
    if options.kind is None:
        return _standalone(options, target, model, automatic)
    if target is None or head is None or options.kind != head.kind:
        given = "no head" if head is None else f"a head of kind {head.kind!r}"
        given += " and no target" if target is None else ""
        needed = f"a target and a draft head of kind {options.kind!r}"
        raise ValueError(f"{options.algorithm} needs {needed}; what is given is {given}")
    tree = _tree(options, target, automatic)._asdict()
    if isinstance(head, MtpConfig):
        return mtp_drafter(target, head, backend=backend, **tree)
    return eagle_drafter(target, head, backend=backend, **tree)


def _standalone(
    options: ModelOptions, target: Target | None, model: Target | None, automatic: TreeShape | None
) -> Drafter:
    if target is None or model is None:
        missing = " and ".join(name for name, given in (("target", target), ("model", model)) if given is None)
        raise ValueError(f"{options.algorithm} needs a target and {options.needs}; what is missing is {missing}")
    return standalone_drafter(target, model, **_tree(options, target, automatic)._asdict())


class _Tree(NamedTuple):
    """The arguments that drafters with trees share."""

    shape: TreeShape
    explicit_width: bool
    note: str
    positions: int | None
    coupling: Coupling


def _tree(options: ModelOptions, target: Target, automatic: TreeShape | None) -> _Tree:
    shape = options.shape(automatic or options.automatic(target.config.family))
    if options.nodes not in (None, shape.nodes):
        words = "%d draft tokens, not %d: with top-k 1 the draft is a chain of steps + 1 tokens"
        logger.warning(words, shape.nodes, options.nodes)
    given = [number is not None for number in (options.steps, options.topk, options.nodes)]
    how = "given" if all(given) else "what was not given was chosen" if any(given) else "automatic"
    return _Tree(shape, any(given), f"{shape} ({how})", options.positions, options.coupling)


class Speculation(NamedTuple):
    """A drafter and what belongs to it.

    Attributes:
        drafter: the algorithm, which proposes trees.
        params: its parameters, which its functions get as `Params.draft`; None: it has none.
        verify: decides which drafts are accepted; the default keeps the text the target's own.
    """

    drafter: Drafter
    params: Any = None
    verify: Verifier = verify_tree


DrafterFactory: TypeAlias = Callable[[Target], Drafter | Speculation]
"""Makes a drafter for a target, whose configuration it may look at."""


class DrafterTypeError(TypeError, ValueError):
    """A factory returned something else. A ValueError, too, since a command line names the factory."""


def load_drafter(name: str) -> DrafterFactory:
    """The factory that ``module:function`` names. Imports the module, which must be on Python's path.

    Raises:
        ValueError: the name has another form, or there is no such module or function.
    """
    module, colon, attribute = name.partition(":")
    if not (colon and attribute and all(part.isidentifier() for part in module.split("."))):
        raise ValueError(f"drafter {name!r}: write module:function, such as my_drafter:make")
    try:
        found = importlib.import_module(module)
    except SyntaxError as error:
        raise ValueError(f"drafter {name!r}: cannot import {module}: {error}") from error
    except ImportError as error:
        raise ValueError(f"drafter {name!r}: cannot import {module} ({error}); is its folder in PYTHONPATH?") from error
    factory = getattr(found, attribute, None)
    if not callable(factory):
        problem = "has no function" if factory is None else f"has a {type(factory).__name__}, no function, named"
        own = [key for key, value in vars(found).items() if getattr(value, "__module__", None) == module]
        raise ValueError(f"drafter {name!r}: {module} {problem} {attribute}; it defines: {', '.join(own) or 'none'}")
    return cast(DrafterFactory, factory)


def _name_of(factory: DrafterFactory) -> str:
    module, name = (getattr(factory, each, None) for each in ("__module__", "__qualname__"))
    return f"{module}:{name}" if module and name else repr(factory)


def make_speculation(given: Drafter | DrafterFactory | str, target: Target) -> Speculation:
    """What a ready drafter, a factory or its name gives for a target.

    Raises:
        ValueError: see `load_drafter`. DrafterTypeError: the factory returns something else.
    """
    if isinstance(given, Drafter):
        return Speculation(given)
    made = (load_drafter(given) if isinstance(given, str) else given)(target)
    if isinstance(made, Drafter):
        return Speculation(made)
    if not isinstance(made, Speculation):
        name = given if isinstance(given, str) else _name_of(given)
        raise DrafterTypeError(f"drafter {name!r} returned {made!r:.80}; it must return a Drafter or a Speculation")
    return made

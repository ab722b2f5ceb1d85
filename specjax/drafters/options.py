"""Shared bases of the algorithms' options, which are frozen dataclasses, and the shapes of trees.

The options of an algorithm stand in its file, and `specjax.drafters.factories` has the table of all. A field declares
its default, help, range and flag once. Ranges are checked when options are created.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from specjax.config import HeadConfig, ModelConfig, MtpConfig
from specjax.drafters.base import Drafter, Speculation, none_drafter
from specjax.limits import ParameterError, check, documented, setting, setting_of
from specjax.models.target import Target

logger = logging.getLogger(__name__)

DraftConfig: TypeAlias = HeadConfig | MtpConfig | ModelConfig
Coupling: TypeAlias = Literal["noise", "none"]
"""Whether drafts of sampling requests use the target's noise; see `specjax.drafters.coupling`."""

MAX_STEPS = 64
"""Maximum depth of a tree: deeper trees take minutes to compile."""
MAX_AUTOMATIC_NODES = 64
"""Maximum default of `nodes`."""


@documented
@dataclass(frozen=True)
class TreeShape:
    """Shape of a tree that a draft model grows: D levels of k nodes; the N - 1 best of all candidates are kept.

    Raises:
        ParameterError: a number is out of range, or there are more nodes than candidates.
    """

    steps: int = setting(MISSING, "D, levels of the tree", minimum=1, maximum=MAX_STEPS)
    topk: int = setting(
        MISSING, "k, nodes of a level that are expanded, and children of each node", minimum=1, maximum=64
    )
    nodes: int = setting(MISSING, "N, nodes that are kept, including the root", minimum=2, maximum=512)

    def __post_init__(self) -> None:
        check(self)
        most = candidates(self.steps, self.topk)
        if self.nodes - 1 > most:
            problem = (
                f"is {self.nodes}, but {self.steps} steps of top-k {self.topk} give {most} candidates, so a tree of at "
                f"most {most + 1} tokens; set fewer draft tokens, more steps or a larger top-k"
            )
            raise ParameterError("nodes", problem, "TreeShape")

    @property
    def depth(self) -> int:
        """Maximum depth of a node, at most that of a chain of all nodes."""
        return min(self.steps, self.nodes - 1)

    def within(self, nodes: int) -> TreeShape:
        """The shape reduced to `nodes` nodes, at least 2. Steps are limited to a chain's; top-k shrinks in proportion,
        but leaves enough candidates.

            7, 1, 8 within 4 -> 3, 1, 4        5, 8, 32 within 10 -> 5, 2, 10        3, 8, 32 within 7 -> 3, 2, 7
        """
        if nodes >= self.nodes:
            return self
        steps, topk = min(self.steps, nodes - 1), max(self.topk * nodes // self.nodes, 1)
        enough = (k for k in range(topk, self.topk + 1) if candidates(steps, k) >= nodes - 1)
        return TreeShape(steps, next(enough), nodes)

    def __str__(self) -> str:
        return f"{self.steps} steps, top-k {self.topk}, {self.nodes} draft tokens"


def candidates(steps: int, topk: int) -> int:
    """Number of candidates below the root: k in the first level, k² in each further level."""
    return topk + (steps - 1) * topk * topk


class Loaded(NamedTuple):
    """What a drafter is made for, and what has been loaded for it.

    Attributes:
        target: the model that it drafts for; None: unknown, which n-grams allow.
        head: config of the draft head, or of the target's MTP layers.
        model: the draft model.
        tree: the tree if the options give no number; None: `ModelOptions.automatic`.
        backend: attention implementation of the draft.
        platform: "cpu" or "gpu".
    """

    target: Target | None = None
    head: HeadConfig | MtpConfig | None = None
    model: Target | None = None
    tree: TreeShape | None = None
    backend: str | None = None
    platform: str = "cpu"


@dataclass(frozen=True)
class DraftOptions:
    """Base class of all options.

    Attributes:
        algorithm: name of the algorithm, its key in the table.
        needs: draft head or model that the algorithm loads, for messages; None: nothing.
        kind: kind of the draft head that it loads; None: it loads no head.
        reads_mtp_layers: whether the target's MTP layers draft if there is no head.
    """

    algorithm: ClassVar[str]
    needs: ClassVar[str | None] = None
    kind: ClassVar[str | None] = None
    reads_mtp_layers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def names(cls) -> tuple[str, ...]:
        return tuple(field.name for field in fields(cls))

    def choose(self, kind: str | None) -> tuple[DraftOptions, list[str]]:
        """The options of the algorithm that runs, and the names of options without effect on it.

        Args:
            kind: kind of the draft head that ships for the model, or is part of it; None: there is none.
        """
        return self, []

    def speculation(self, loaded: Loaded) -> Speculation:
        """Makes the drafter. Raises ValueError if its head or model is missing."""
        raise NotImplementedError


@dataclass(frozen=True)
class NoDraft(DraftOptions):
    """Plain decoding, without drafts."""

    algorithm: ClassVar[str] = "NONE"

    def speculation(self, loaded: Loaded) -> Speculation:
        return Speculation(none_drafter(), explicit_width=False, every_step=False)


@documented
@dataclass(frozen=True)
class ModelOptions(DraftOptions):
    """Base class of the options of algorithms with a draft head or a draft model."""

    trees: ClassVar[Mapping[str, TreeShape]] = {}  # default by the target's family; for others `TreeShape(3, 1, 4)`
    head_options: ClassVar[tuple[str, ...]] = ()  # options that override the config of the head
    passes: ClassVar[int | None] = None  # see `Speculation`
    costly_observe: ClassVar[bool] = False  # see `Speculation`

    path: str | None = setting(
        None,
        "folder or hub id of the draft head or model; default: the head that comes with specjax for the model, else "
        "the model's own MTP layers (EAGLE, MTP)",
        flag="speculative_draft_model_path",
        metavar="MODEL",
    )
    revision: str | None = setting(None, "branch, tag or commit of a hub id", flag="speculative_draft_model_revision")
    steps: int | None = setting(
        None,
        "levels D of the draft tree, each a forward of the draft; defaults of steps, top-k and draft tokens if none is "
        "set: measured values of a shipped head, else 5, 4, 8 for heads of Llama, 3, 1, 4 for other heads, MTP and "
        "STANDALONE",
        range=setting_of(TreeShape, "steps").range,
        flag="speculative_num_steps",
    )
    topk: int | None = setting(
        None,
        "nodes of a level that are expanded, and children of each node; default: 1, if another number is given",
        range=setting_of(TreeShape, "topk").range,
        flag="speculative_eagle_topk",
    )
    nodes: int | None = setting(
        None,
        "nodes N of the tree, including the root; default: steps + 1, with a top-k the smaller of 1 + steps * top-k "
        "and 64; if steps, top-k and this are unset, large batches have smaller trees on a GPU, or do not draft",
        range=setting_of(TreeShape, "nodes").range,
        flag="speculative_num_draft_tokens",
    )
    _: KW_ONLY
    positions: int | None = setting(
        None,
        "longest text that is drafted for, in tokens; default: the limit in the draft's config, if it is below the "
        "target's",
        minimum=1,
        flag="speculative_draft_context_length",
    )
    quantization: Literal["int8", "fp8", "int4", "none"] | None = setting(
        None,
        "quantisation of the draft's own matrices: int8, fp8 (a scale for each output), int4 (for each 32 inputs) or "
        "none; changes the speed, not the text; default: int8 for 16-bit matrices on a GPU; else as in the checkpoint, "
        "int8 for the head of a quantised target, and as the target for MTP layers",
        flag="speculative_draft_quantization",
        parse=str.lower,
    )
    coupling: Coupling = setting(
        "noise",
        "drafts of sampling requests (temperature above 0): noise = the likeliest tokens after adding the noise of the "
        "target's draw, which are accepted more often; none = the likeliest tokens. The text does not change. No "
        "effect with NGRAM",
        flag="speculative_coupling",
        parse=str.lower,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shape()  # raises errors that hold for every target

    def drafter(self, target: Target, draft: Any, shape: TreeShape, largest: TreeShape, **shared: Any) -> Drafter:
        """Makes the drafter for trees of a shape.

        Args:
            draft: config of the draft head or the MTP layers, or the draft model.
            largest: shape of the largest tree, with whose drafter this one shares its state.
            shared: positions and coupling; for a head also backend.
        """
        raise NotImplementedError

    def speculation(self, loaded: Loaded) -> Speculation:
        target, draft = self._check(loaded)
        config = draft.config if isinstance(draft, Target) else draft
        shape = self.shape(loaded.tree or self.automatic(target.config.family, config))
        if self.nodes not in (None, shape.nodes):
            words = "%d draft tokens, not %d: with top-k 1 the draft is a chain of steps + 1 tokens"
            logger.warning(words, shape.nodes, self.nodes)
        explicit = [number is not None for number in (self.steps, self.topk, self.nodes)]
        origin = "set by options" if all(explicit) else "partly automatic" if any(explicit) else "automatic"
        limit = position_limit(target, config, self.positions)
        shared = {"positions": self.positions, "coupling": self.coupling}
        if self.kind is not None:
            shared["backend"] = loaded.backend
        return Speculation(
            self.drafter(target, draft, shape, shape, **shared),
            explicit_width=any(explicit),
            every_step=any(explicit),
            resize=lambda nodes: self.drafter(target, draft, shape.within(nodes), shape, **shared),
            costly_observe=self.costly_observe,
            passes=self.passes,
            coupling=self.coupling,
            note=f"{shape} ({origin})" + ("" if limit is None else f"; within the first {limit} tokens of a text"),
        )

    def _check(self, loaded: Loaded) -> tuple[Target, HeadConfig | MtpConfig | Target]:
        """Returns the target, and the head or the model that this algorithm needs. Raises ValueError without them."""
        target, head, model = loaded.target, loaded.head, loaded.model
        if self.kind is None:
            if target is not None and model is not None:
                return target, model
            missing = " and ".join(name for name, value in (("target", target), ("model", model)) if value is None)
            raise ValueError(f"{self.algorithm} needs a target and {self.needs}; missing: {missing}")
        if target is not None and head is not None and head.kind == self.kind:
            return target, head
        stated = "no head" if head is None else f"a head of kind {head.kind!r}"
        stated += " and no target" if target is None else ""
        raise ValueError(f"{self.algorithm} needs a target and a draft head of kind {self.kind!r}, got {stated}")

    def weights(self, name: str, dtype: str, platform: str, *, otherwise: str, stored: str | None = None) -> str:
        """Quantisation of the draft's weights, as an argument of `specjax.checkpoint.load_params`.

        Args:
            name: name of their checkpoint, for messages.
            dtype: their dtype without quantisation.
            platform: "cpu" or "gpu". On a GPU, a level's time is the time to read the weights.
            otherwise: the default if neither `quantization` nor the platform decides.
            stored: quantisation method of the checkpoint; None: it holds float weights.

        Raises:
            ValueError: the checkpoint is quantised by another method.
        """
        if self.quantization is None:
            in_few_bits = stored is not None or otherwise not in ("auto", "none")
            return otherwise if in_few_bits or platform == "cpu" or dtype == "float32" else "int8"
        if stored is None or self.quantization == "none":
            return self.quantization
        if stored == self.quantization:
            return "auto"
        problem = (
            f"{self.quantization} is for float weights, and {name} is quantised already ({stored}); without the option "
            "it stays as it is, none dequantises it"
        )
        raise ParameterError("quantization", problem, type(self).__name__)

    def automatic(self, family: str = "llama", head: Any = None) -> TreeShape:
        """The tree if no number is given: SGLang's. `family`: the target's; `head`: config of the draft."""
        return self.trees.get(family, TreeShape(3, 1, 4))

    def shape(self, automatic: TreeShape | None = None) -> TreeShape:
        """The tree of these options. `automatic`, by default a Llama target's, is used if no number is given.

        Otherwise a missing top-k is 1. Missing nodes are steps + 1 for top-k 1, else 1 + steps * topk, at most the
        candidates and 64. Missing steps are nodes - 1 for top-k 1, else the automatic ones. Top-k 1 is a chain, which
        has steps + 1 nodes for any `nodes` (SGLang overwrites it, too).

        Raises:
            ValueError: more nodes than candidates, or than the longest chain.
        """
        automatic = automatic or self.automatic()
        if (self.steps, self.topk, self.nodes) == (None, None, None):
            return automatic
        steps, topk = self.steps or automatic.steps, self.topk or 1
        if topk == 1:
            if self.steps is None and self.nodes is not None:
                steps = self.nodes - 1
                if steps > MAX_STEPS:
                    problem = f"must be from 2 to {MAX_STEPS + 1} for a chain (top-k 1), got {self.nodes}"
                    raise ParameterError("nodes", problem, type(self).__name__)
            return TreeShape(steps, 1, steps + 1)
        most = min(1 + steps * topk, 1 + candidates(steps, topk), MAX_AUTOMATIC_NODES)
        return TreeShape(steps, topk, self.nodes or most)


def position_limit(target: Target, draft: DraftConfig, positions: int | None) -> int | None:
    """Maximum position of drafts: `positions`, by default that of the draft's config; None: the target's."""
    limit = positions or draft.max_positions
    return limit if limit and limit < target.config.max_positions else None

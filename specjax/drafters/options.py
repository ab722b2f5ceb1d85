"""Options of the algorithms, one frozen dataclass each, and the table of algorithms by name.

Ranges are checked when options are created. Nothing here imports jax.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from typing import Any, ClassVar, Literal, TypeAlias, cast

from specjax.limits import ParameterError, check, documented, setting, setting_of, shown
from specjax.models.head_spec import ALGORITHMS

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


def _layers(given: object) -> tuple[int, ...]:
    """`Eagle3.aux_layers`, which a flag or a file gives as text. Raises ParameterError unless they are different."""
    texts = [str(layer) for layer in given if not isinstance(layer, bool)] if isinstance(given, tuple | list) else []
    if not texts or not all(text.isdecimal() for text in texts) or len({*map(int, texts)}) < len(cast(Any, given)):
        problem = f"must be different layers of the target, counted from 0, got {shown(given)}"
        raise ParameterError("aux_layers", problem, "Eagle3")
    return tuple(map(int, texts))


def candidates(steps: int, topk: int) -> int:
    """Number of candidates below the root: k in the first level, k² in each further level."""
    return topk + (steps - 1) * topk * topk


@dataclass(frozen=True)
class DraftOptions:
    """Base class of all options.

    Attributes:
        algorithm: name of the algorithm, a key of `DRAFTERS`.
        needs: draft head or model that the algorithm loads, for messages; None: nothing.
        kind: kind of the draft head that it loads; None: it loads no head.
    """

    algorithm: ClassVar[str]
    needs: ClassVar[str | None] = None
    kind: ClassVar[str | None] = None

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


@dataclass(frozen=True)
class NoDraft(DraftOptions):
    """Plain decoding, without drafts."""

    algorithm: ClassVar[str] = "NONE"


@documented
@dataclass(frozen=True)
class Ngram(DraftOptions):
    """Drafts from n-grams of earlier text; needs no draft head. Defaults are SGLang's."""

    algorithm: ClassVar[str] = "NGRAM"

    nodes: int | None = setting(
        None,
        "nodes N of a tree, including the root; default: 12; on a CPU 8 after long matches, else fewer",
        minimum=2,
        maximum=64,
    )
    min_match: int = setting(1, "fewest tokens of a match; at most `max_match`", minimum=1, maximum=64)
    max_match: int = setting(12, "most tokens of a match", minimum=1, maximum=64)
    min_breadth: int = setting(1, "fewest children of a node; at most `max_breadth`", minimum=1, maximum=64)
    max_breadth: int = setting(
        10, "most children of a node; fewer for longer matches and deeper nodes", minimum=1, maximum=64
    )
    branch_length: int = setting(18, "tokens of the longest continuation", minimum=1, maximum=64)
    capacity: int = setting(1_000_000, "tokens to remember, of all requests", minimum=1024, maximum=2**24)
    match_type: Literal["BFS", "PROB"] = setting(
        "BFS",
        "order of continuations: the most recent first (BFS), or the most frequent first (PROB)",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for low, high in (("min_match", "max_match"), ("min_breadth", "max_breadth")):
            least, most = getattr(self, low), getattr(self, high)
            if least > most:
                raise ParameterError(low, f"must be from 1 to {high}, got {least} and {most}", "Ngram")

    @property
    def width(self) -> int:
        """N; on a CPU `make_drafter` has another default."""
        return self.nodes or 12

    @property
    def depth(self) -> int:
        """D: the depth of a chain of all nodes, or of a whole branch."""
        return min(self.width - 1, self.branch_length)

    @property
    def branches(self) -> int:
        """Number of continuations that a proposal merges."""
        return max(16, self.max_breadth)


@documented
@dataclass(frozen=True)
class ModelOptions(DraftOptions):
    """Base class of the options of algorithms with a draft head or a draft model."""

    path: str | None = setting(
        None,
        "folder or hub id of the draft head or model; default: the head that comes with specjax for the model, else "
        "the model's own MTP layers (EAGLE, MTP)",
    )
    revision: str | None = setting(None, "branch, tag or commit of a hub id")
    steps: int | None = setting(
        None,
        "levels D of the draft tree, each a forward of the draft; default: see `shape`",
        range=setting_of(TreeShape, "steps").range,
    )
    topk: int | None = setting(
        None,
        "nodes of a level that are expanded, and children of each node; default: 1, if another number is given",
        range=setting_of(TreeShape, "topk").range,
    )
    nodes: int | None = setting(
        None,
        "nodes N of the tree, including the root; default: see `shape`",
        range=setting_of(TreeShape, "nodes").range,
    )
    _: KW_ONLY
    positions: int | None = setting(
        None,
        "longest text that is drafted for, in tokens; default: the limit in the draft's config, if it is below the "
        "target's",
        minimum=1,
    )
    quantization: Literal["int8", "fp8", "int4", "none"] | None = setting(
        None,
        "quantisation of the draft's own matrices: int8, fp8 (a scale for each output), int4 (for each 32 inputs) or "
        "none; changes the speed, not the text; default: int8 for 16-bit matrices on a GPU; else as in the checkpoint, "
        "int8 for the head of a quantised target, and as the target for MTP layers",
    )
    coupling: Coupling = setting(
        "noise",
        "drafts of sampling requests (temperature above 0): noise = the likeliest tokens after adding the noise of the "
        "target's draw, which are accepted more often; none = the likeliest tokens. The text does not change. No "
        "effect with NGRAM",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shape()  # raises errors that hold for every target

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

    @classmethod
    def automatic(cls, family: str = "llama") -> TreeShape:
        """The tree if no number is given: SGLang's, by the target's family."""
        return TreeShape(5, 4, 8) if family == "llama" and cls in (Eagle, Eagle3) else TreeShape(3, 1, 4)

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


@documented
@dataclass(frozen=True)
class Eagle3(ModelOptions):
    """EAGLE-3: a draft head that reads hidden states of three of the target's layers."""

    algorithm: ClassVar[str] = "EAGLE3"
    needs: ClassVar[str | None] = "a draft head"
    kind: ClassVar[str | None] = ALGORITHMS[algorithm].kind

    _: KW_ONLY
    aux_layers: tuple[int, ...] | tuple[str, ...] | None = setting(
        None, "layers of the target whose outputs the head reads, counted from 0, in the order of training; overrides "
        "the ids in the head's config, which some files count from the layers' inputs: the output of layer 1 is then 2",
    )  # fmt: skip

    def __post_init__(self) -> None:
        if self.aux_layers is not None:
            object.__setattr__(self, "aux_layers", _layers(self.aux_layers))
        super().__post_init__()


@documented
@dataclass(frozen=True)
class Eagle(ModelOptions):
    """EAGLE-1 and EAGLE-2: a draft head that reads the target's final hidden states. Without a head, the model's own
    MTP layers draft, which are such heads."""

    algorithm: ClassVar[str] = "EAGLE"
    needs: ClassVar[str | None] = "a draft head"
    kind: ClassVar[str | None] = ALGORITHMS[algorithm].kind

    token_map: str | int | None = setting(
        None,
        "tokens that the draft may propose (FR-Spec): a .pt or .json file, repo/file on the hub, "
        "or a number of tokens of the map that comes with specjax for the model; default: all",
    )

    def as_mtp(self) -> Mtp:
        """The options for the model's MTP layers."""
        return Mtp(**{name: getattr(self, name) for name in self.names()})


@documented
@dataclass(frozen=True)
class Mtp(Eagle):
    """Multi-token prediction layers of the model's own checkpoint, or a head such as MiMo's in a folder."""

    algorithm: ClassVar[str] = "MTP"
    needs: ClassVar[str | None] = "MTP layers in the model, or a draft head"
    kind: ClassVar[str | None] = ALGORITHMS[algorithm].kind


@documented
@dataclass(frozen=True)
class Block(ModelOptions):
    """A head that drafts a block of tokens in one forward: DFlash, DSpark, DFlash2 or JetSpec, as its files say.
    `steps` is the number of the block's tokens that a tree uses. By default the draft is a chain of the whole block."""

    algorithm: ClassVar[str] = "DFLASH"
    needs: ClassVar[str | None] = "a draft head"
    kind: ClassVar[str | None] = "block"

    _: KW_ONLY
    block: int | None = setting(
        None, "slots of the block that the head runs on, including the root, at most as many as in its training; "
        "default: as many as the tree's levels need", minimum=2, maximum=MAX_STEPS,
    )  # fmt: skip
    window: int | None = setting(
        None, "most tokens that a slot of the block attends to, itself included, in all layers of the head; default: "
        "the windows in the head's config", minimum=1,
    )  # fmt: skip
    sample_from_anchor: bool | None = setting(
        None, "whether the block's first slot, the root, drafts the next token; overrides the head's config; required "
        "if that does not say. A wrong value gives an accept length of about 1",
    )  # fmt: skip

    @classmethod
    def automatic(cls, family: str = "llama") -> TreeShape:
        """Replaced by a chain of the head's block."""
        return TreeShape(MAX_STEPS, 1, MAX_STEPS + 1)


@documented
@dataclass(frozen=True)
class Standalone(ModelOptions):
    """A smaller model drafts."""

    algorithm: ClassVar[str] = "STANDALONE"
    needs: ClassVar[str | None] = "a draft model"


CHOICES: tuple[type[DraftOptions], ...] = (Eagle, Eagle3, Mtp, Ngram)
"""Algorithms that `Auto` chooses from; the last if the model has no draft head."""


@dataclass(frozen=True, init=False)
class Auto(DraftOptions):
    """The draft head that ships for the model, else the model's MTP layers, else n-grams.

    Takes the options of these algorithms, except for `path` and `revision`: `Auto(steps=3)`. A warning names options
    that the chosen algorithm does not have.

    Attributes:
        given: values of options by name.

    Raises:
        TypeError: no algorithm has the option.
        ValueError: the values are wrong for every algorithm that has one of the options.
    """

    algorithm: ClassVar[str] = "AUTO"

    given: Mapping[str, str | int | float | tuple[int, ...] | tuple[str, ...]]

    def __init__(self, **given: str | int | float | tuple[int, ...] | tuple[str, ...] | None) -> None:
        object.__setattr__(self, "given", {name: value for name, value in given.items() if value is not None})
        if unknown := self.given.keys() - self.names():
            raise TypeError(f"Auto has no option {min(unknown)!r}; it has: {', '.join(sorted(self.names()))}")
        affected = [options for options in CHOICES if self._given_of(options)]
        problems: list[ValueError] = []
        for options in affected:
            try:
                options(**self._given_of(options))
            except ValueError as error:
                problems.append(error)
        if problems and len(problems) == len(affected):
            raise problems[-1]

    def __hash__(self) -> int:
        return hash(frozenset(self.given.items()))

    @classmethod
    def names(cls) -> tuple[str, ...]:
        names = dict.fromkeys(name for options in CHOICES for name in options.names())
        return tuple(name for name in names if name not in ("path", "revision"))

    def choose(self, kind: str | None) -> tuple[DraftOptions, list[str]]:
        chosen = {options.kind: options for options in CHOICES}.get(kind, CHOICES[-1])
        effective = self._given_of(chosen)
        return chosen(**effective), [name for name in self.given if name not in effective]

    def _given_of(self, options: type[DraftOptions]) -> dict[str, Any]:
        return {name: value for name, value in self.given.items() if name in options.names()}


DRAFTERS: dict[str, type[DraftOptions]] = {
    options.algorithm: options for options in (NoDraft, Ngram, Eagle, Eagle3, Mtp, Block, Standalone)
}
"""The options of each algorithm by name; `specjax.drafters.factories` makes the drafters."""
ALIASES = {"NEXTN": Mtp.algorithm, "DSPARK": Block.algorithm}
"""SGLang's other names of algorithms."""


def algorithm(name: str) -> str | None:
    """The key of `DRAFTERS`, or AUTO, for a name or alias in any case; None: there is no such algorithm."""
    name = name.upper()
    name = ALIASES.get(name, name)
    return name if name in (Auto.algorithm, *DRAFTERS) else None


def algorithms() -> str:
    """All names and aliases, for messages."""
    return ", ".join((Auto.algorithm, *DRAFTERS, *ALIASES))


def options_of(draft: object, **given: Any) -> DraftOptions:
    """Returns options unchanged, or creates the options of an algorithm from its name.

    Args:
        draft: options, or a name or alias in any case, including AUTO.
        given: with a name, options that differ from the defaults.

    Raises:
        ValueError: no algorithm has the name; lists all names.
        TypeError: neither options nor a name.
    """
    if isinstance(draft, DraftOptions):
        return draft
    if not isinstance(draft, str):
        raise TypeError(f"draft must be options such as Eagle(steps=5) or an algorithm's name, got {shown(draft)}")
    if (name := algorithm(draft)) is None:
        raise ValueError(f"no algorithm draft={shown(draft)}; there are: {algorithms()}")
    return {Auto.algorithm: Auto, **DRAFTERS}[name](**given)

"""Options of the algorithms, in Python's names: one frozen dataclass each, whose ranges are checked when it is made."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import ClassVar, Literal, TypeAlias

from specjax.drafters.tree_shape import MAX_STEPS, TreeShape, candidates
from specjax.limits import ParameterError, check, documented, range_of, setting
from specjax.models.head_spec import ALGORITHMS

Coupling: TypeAlias = Literal["noise", "none"]
"""Whether requests that sample draft with the target's noise; see `specjax.drafters.coupling`."""

MAX_AUTOMATIC_NODES = 64  # of a tree whose number of nodes is not given


@dataclass(frozen=True)
class DraftOptions:
    """What all options have in common.

    Attributes:
        algorithm: name of the algorithm, a key of `DRAFTERS`.
        needs: what the algorithm loads beside the target, for messages; None: nothing.
        kind: the kind of draft head that it loads; None: it loads no head.
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
        """The options of the algorithm that runs, given the kind of the draft head that ships for the model or lies in
        it, and the names of given options that the algorithm does not have."""
        return self, []

    def on(self, platform: str) -> DraftOptions:
        """The options with the defaults of a platform ("cpu", "gpu").

        Raises:
            ValueError: options contradict these defaults.
        """
        return self


@dataclass(frozen=True)
class NoDraft(DraftOptions):
    """No drafts: plain decoding."""

    algorithm: ClassVar[str] = "NONE"


@documented
@dataclass(frozen=True)
class Ngram(DraftOptions):
    """Drafts from n-grams of earlier text; needs no draft head. Defaults are SGLang's."""

    algorithm: ClassVar[str] = "NGRAM"

    nodes: int | None = setting(
        None,
        "nodes N of a tree, the root included; default: 12, on a CPU 8 where the match is strong, else fewer",
        minimum=2,
        maximum=64,
    )
    min_match: int = setting(1, "fewest tokens of a match; at most `max_match`", minimum=1, maximum=64)
    max_match: int = setting(12, "most tokens of a match", minimum=1, maximum=64)
    min_breadth: int = setting(1, "fewest children of a node; at most `max_breadth`", minimum=1, maximum=64)
    max_breadth: int = setting(
        10, "most children of a node; fewer where the match is longer or the node deeper", minimum=1, maximum=64
    )
    branch_length: int = setting(18, "tokens of the longest continuation", minimum=1, maximum=64)
    capacity: int = setting(1_000_000, "tokens remembered, over all requests", minimum=1024, maximum=2**24)
    match_type: Literal["BFS", "PROB"] = setting(
        "BFS",
        "which continuations come first: the most recent (BFS), or those that most matches agree on (PROB)",
    )
    weak_nodes: int | None = setting(
        None,
        "nodes of a tree while the longest match is weak, from 1 (no drafts) to `nodes`; default: as `nodes`, or on a "
        "CPU, where `nodes` is not given, 4 after two matched tokens",
        minimum=1,
        maximum=64,
    )
    strong_match: int | None = setting(
        None,
        "fewest tokens of a strong match; default: 3, or 8 on a CPU where neither `nodes` nor `weak_nodes` is given",
        minimum=1,
        maximum=64,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for low, high in (("min_match", "max_match"), ("min_breadth", "max_breadth")):
            least, most = getattr(self, low), getattr(self, high)
            if least > most:
                raise ParameterError(low, f"must be from 1 to {high}, got {least} and {most}", "Ngram")
        if self.weak_width > self.width:
            problem = f"must be from 1 to the {self.width} draft tokens, got {self.weak_width}"
            raise ParameterError("weak_nodes", problem, "Ngram")

    def on(self, platform: str) -> Ngram:
        """On a CPU, and if `nodes` is not given: trees of 8 nodes after a strong match. After a weak one `weak_nodes`,
        or none if `strong_match` alone is given; if neither is, 4 nodes from two matched tokens on.

        On a GPU verifying twelve tokens costs what one costs. On a CPU each node costs, so a tree pays where it has
        more drafts accepted than it takes longer: one of four nodes mostly after two matched tokens, one of eight
        after about eight.
        """
        if platform != "cpu" or self.nodes is not None:
            return self
        if self.weak_nodes is None and self.strong_match is None:
            least, strong = (max(self.min_match, min(size, self.max_match)) for size in (2, 8))
            return replace(self, nodes=8, weak_nodes=4, min_match=least, strong_match=strong)
        return replace(self, nodes=8, weak_nodes=1 if self.weak_nodes is None else self.weak_nodes)

    def within(self, nodes: int) -> Ngram:
        """The same options with trees of at most `nodes` nodes, at least 2."""
        nodes = min(nodes, self.width)
        return replace(self, nodes=nodes, weak_nodes=None if self.weak_nodes is None else min(self.weak_nodes, nodes))

    @property
    def width(self) -> int:
        """N, where no platform has chosen another: see `on`."""
        return self.nodes or 12

    @property
    def weak_width(self) -> int:
        return self.weak_nodes or self.width

    @property
    def strong(self) -> int:
        """`strong_match`, where no platform has chosen another."""
        return self.strong_match or 3

    @property
    def depth(self) -> int:
        """D: a chain of all nodes, or a whole branch."""
        return min(self.width - 1, self.branch_length)

    @property
    def branches(self) -> int:
        """Continuations that a proposal merges."""
        return max(16, self.max_breadth)


@documented
@dataclass(frozen=True)
class ModelOptions(DraftOptions):
    """What the algorithms that draft with a head or a model have in common."""

    path: str | None = setting(
        None,
        "the draft head or model, a folder or hub id; default: the head that comes with specjax for the model, else "
        "the model's own MTP layers (EAGLE, MTP)",
    )
    revision: str | None = setting(None, "branch, tag or commit of a hub id")
    steps: int | None = setting(
        None,
        "levels D of the draft tree, each a forward of the draft; default: see `shape`",
        range=range_of(TreeShape, "steps"),
    )
    topk: int | None = setting(
        None,
        "nodes of a level that are expanded, and children of each; default: 1, if another number is given",
        range=range_of(TreeShape, "topk"),
    )
    nodes: int | None = setting(
        None, "nodes N of the tree, the root included; default: see `shape`", range=range_of(TreeShape, "nodes")
    )
    _: KW_ONLY
    positions: int | None = setting(
        None,
        "tokens of a text beyond which the draft proposes nothing; default: what its config says, if that is less than "
        "the target's",
        minimum=1,
    )
    quantization: Literal["int8", "fp8", "none"] | None = setting(
        None,
        "of the draft's own matrices: int8, fp8 (a scale for each output) or none; changes the speed, not the text; "
        "default: int8 on a GPU where they would have 16 bits; else as in the checkpoint, int8 for a head of a target "
        "in few bits, and as the target for MTP layers",
    )
    coupling: Coupling = setting(
        "noise",
        "drafts of requests that sample (temperature above 0): noise = the likeliest after the noise that the target "
        "will draw with, which are accepted more often; none = the likeliest. The text is the same. NGRAM has no "
        "probabilities to add noise to: no effect there",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shape()  # refuses what is wrong for every target; others have fewer steps

    def weights(self, name: str, dtype: str, platform: str, *, otherwise: str, stored: str | None = None) -> str:
        """How `specjax.checkpoint` should quantise the draft's weights, in the words of `load_params`.

        Args:
            name: of their checkpoint, for messages.
            dtype: that they would have.
            platform: that they are read on, "cpu" or "gpu". On a GPU a level of a draft costs what it reads.
            otherwise: how they are quantised where neither `quantization` nor the platform says.
            stored: the method by which the checkpoint holds them in few bits; None: it holds float weights.

        Raises:
            ValueError: weights that are stored in few bits are to be quantised in another way.
        """
        if self.quantization is None:
            in_few_bits = stored is not None or otherwise not in ("auto", "none")
            return otherwise if in_few_bits or platform == "cpu" or dtype == "float32" else "int8"
        if stored is None or self.quantization == "none":
            return self.quantization
        if stored == self.quantization:
            return "auto"
        problem = (
            f"{self.quantization} is for float weights, and those of {name} are quantised already ({stored}); without "
            "it they stay as they are, none dequantises them"
        )
        raise ParameterError("quantization", problem, type(self).__name__)

    @classmethod
    def automatic(cls, family: str = "llama") -> TreeShape:
        """The tree where no number is given: SGLang's, by the target's family."""
        return TreeShape(5, 4, 8) if family == "llama" else TreeShape(3, 1, 4)

    @property
    def explicit_tree(self) -> bool:
        return (self.steps, self.topk, self.nodes) != (None, None, None)

    def shape(self, automatic: TreeShape | None = None) -> TreeShape:
        """The tree that the options mean. `automatic`, by default a Llama target's, is used where no number is given.

        Otherwise a missing top-k is 1. Missing nodes are steps + 1 for top-k 1, else 1 + steps * topk, at most the
        candidates and 64. Missing steps are nodes - 1 for top-k 1, else the automatic ones. Top-k 1 is a chain, which
        has steps + 1 nodes whatever `nodes` is (SGLang warns and overwrites, too).

        Raises:
            ValueError: more nodes than candidates, or than the longest chain.
        """
        automatic = automatic or self.automatic()
        if not self.explicit_tree:
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
class HeadOptions(ModelOptions):
    """What the algorithms with a draft head have in common."""

    needs: ClassVar[str | None] = "a draft head"


@documented
@dataclass(frozen=True)
class Eagle3(HeadOptions):
    """EAGLE-3: a draft head that reads hidden states of three of the target's layers."""

    algorithm: ClassVar[str] = "EAGLE3"
    kind: ClassVar[str | None] = ALGORITHMS[algorithm].kind


@documented
@dataclass(frozen=True)
class Eagle(HeadOptions):
    """EAGLE-1 and EAGLE-2: a draft head that reads the target's final hidden states. MTP layers are such heads: without
    a head, the model's own MTP layers draft."""

    algorithm: ClassVar[str] = "EAGLE"
    kind: ClassVar[str | None] = ALGORITHMS[algorithm].kind

    token_map: str | int | None = setting(
        None,
        "the tokens that the draft may propose (FR-Spec): a .pt, .safetensors, .npy or .json file, repo/file on the "
        "hub, or a number: that many of the map that comes with specjax for the model; default: all",
    )

    def as_mtp(self) -> Mtp:
        """The same options for the model's MTP layers."""
        return Mtp(**{name: getattr(self, name) for name in self.names()})


@documented
@dataclass(frozen=True)
class Mtp(Eagle):
    """Multi-token prediction layers: those in the model's own checkpoint, or a head such as MiMo's in a folder of its
    own."""

    algorithm: ClassVar[str] = "MTP"
    needs: ClassVar[str | None] = "MTP layers in the model, or a draft head"
    kind: ClassVar[str | None] = ALGORITHMS[algorithm].kind

    @classmethod
    def automatic(cls, family: str = "llama") -> TreeShape:
        del family
        return TreeShape(3, 1, 4)


@documented
@dataclass(frozen=True)
class Standalone(ModelOptions):
    """Another, smaller model drafts."""

    algorithm: ClassVar[str] = "STANDALONE"
    needs: ClassVar[str | None] = "a draft model"

    vocabulary: Literal["same", "intersection"] = setting(
        "same",
        "same = the draft's tokenizer must have the target's tokens and ids; intersection = the draft proposes the "
        "tokens that both tokenizers have, and reads others as the last of its own tokens for them",
    )

    @classmethod
    def automatic(cls, family: str = "llama") -> TreeShape:
        del family
        return TreeShape(3, 1, 4)

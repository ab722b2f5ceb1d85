"""Drafters defined here, in the step and in the engine; and rules of imports between packages."""

import ast
import re
from collections.abc import Sequence as List
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from engine_helpers import VOCABULARY, byte_ids, check_idle, make_engine, toy
from oracle import Sampling
from toy_models import as_arrays, random_tree

import specjax
from specjax.drafters.base import Drafter
from specjax.engine import SamplingParams
from specjax.tree import DraftTree, chain
from specjax.viz.drawing import draw_steps

DEPTH = 5
LENGTH = 64
PROMPT = [70, 71, 72, 9]


def replay(text, *, offset: int = 0) -> Drafter:
    """Proposes the next tokens of `text` (prompt and continuation), each plus `offset`."""

    def init(params, rows, pool):
        known = np.pad(np.asarray(text, np.int32), (0, LENGTH - len(text)))
        return jnp.asarray((known + offset) % VOCABULARY)  # as state: all of these compile to one program

    def propose(params, state, context):
        at = context.prefix_length[:, None] + 1 + jnp.arange(DEPTH, dtype=jnp.int32)[None, :]
        tokens = state[jnp.minimum(at, LENGTH - 1)]
        length = jnp.where(context.active, DEPTH, 0)
        return chain(context.root, tokens, length, jnp.zeros(tokens.shape, jnp.float32)), state

    def observe(params, state, context, observation):
        return state

    return Drafter(f"REPLAY+{offset}", None, DEPTH + 1, DEPTH, init, propose, observe)


def random_trees(text, width: int = 8, depth: int = 3) -> Drafter:
    """Random trees; on some levels one node has the right token."""
    trees = [random_tree(0, width, VOCABULARY, np.random.default_rng(seed), depth) for seed in range(16)]
    listed = as_arrays([tree for tree in trees if len(tree.tokens) == width], width)
    first = jnp.argmax(listed.depth[:, None, :] == listed.depth[:, :, None], axis=2) == jnp.arange(width)[None, :]
    lucky = first & (jnp.arange(width) % 3 != 0)[None, :]

    def init(params, rows, pool):
        return jnp.asarray(np.pad(np.asarray(text, np.int32), (0, LENGTH - len(text))))

    def propose(params, state, context):
        which = context.prefix_length % lucky.shape[0]
        tree = jax.tree.map(lambda leaf: leaf[which], listed)
        right = state[jnp.minimum(context.prefix_length[:, None] + tree.depth, LENGTH - 1)]
        # Wrong tokens differ from the right one and from one another, so siblings do too.
        wrong = (right + 1 + jnp.arange(width, dtype=jnp.int32)[None, :]) % VOCABULARY
        tokens = jnp.where(lucky[which], right, wrong)
        return tree._replace(tokens=tokens.at[:, 0].set(context.root)), state

    def observe(params, state, context, observation):
        return state

    return Drafter("RANDOM TREES", None, width, depth, init, propose, observe)


def absurd_trees(
    vocab: int, likely: List[int] = (), width: int = 16, depth: int = 4, topk: int | None = None
) -> Drafter:
    """Random trees of siblings that repeat, with faults in a third of the steps and nodes: a root that lies, parents
    that point forward or nowhere, wrong depths, tokens outside of the vocabulary, scores that grow or are not numbers,
    invalid nodes between valid ones. `likely`: tokens to propose; default: all. `Params.draft` is a seed."""
    proposed = jnp.array(likely or range(vocab), jnp.int32)
    wild = jnp.array([-(2**31), -2, -1, 0, 1, width, vocab, 2**31 - 1], jnp.int32)
    scores = jnp.array([jnp.nan, jnp.inf, -jnp.inf, 0.0, 3.0], jnp.float32)

    def some(key, otherwise, values, share=0.12):
        chosen, which = jax.random.split(key)
        drawn = values[jax.random.randint(which, otherwise.shape, 0, len(values))]
        return jnp.where(jax.random.bernoulli(chosen, share, otherwise.shape), drawn, otherwise)

    def tree(key):
        keys = jax.random.split(key, 9)
        index = jnp.arange(width, dtype=jnp.int32)
        parents = jax.random.randint(keys[0], (width,), 0, jnp.clip(index, 1, 5), jnp.int32)
        if topk == 1:
            parents = index - 1
        level = jnp.zeros(width, jnp.int32)
        for node in range(1, width):
            level = level.at[node].set(level[parents[node]] + 1)
        tokens = proposed[jax.random.randint(keys[1], (width,), 0, len(proposed))]
        honest = DraftTree(
            tokens, parents, level, index < jax.random.randint(keys[2], (), 0, width + 1), -level.astype(jnp.float32)
        )
        lying = DraftTree(
            some(keys[3], tokens, wild), some(keys[4], parents, jnp.concatenate([index, wild])),
            some(keys[5], level, wild), jax.random.bernoulli(keys[6], 0.8, (width,)),
            some(keys[7], honest.scores, scores, 0.5),
        )  # fmt: skip
        return jax.tree.map(lambda *pair: jnp.where(jax.random.bernoulli(keys[8], 0.7), *pair), lying, honest)

    def propose(params, state, context):
        key = jax.random.key(params.draft)
        keys = jax.vmap(jax.random.fold_in, (None, 0))(key, context.prefix_length * 8191 + context.root)
        return jax.vmap(tree)(keys), state

    def observe(params, state, context, observation):
        return state

    return Drafter("ABSURD", None, width, depth, lambda params, rows, pool: (), propose, observe, topk=topk)


def known_text(count: int, **sampling) -> list[int]:
    return PROMPT + oracle.generate_plain(toy().logits, PROMPT, Sampling(max_tokens=count, **sampling)).tokens


# In the engine.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_perfect_drafter_in_the_engine(temperature):
    sampling = {"temperature": temperature, "seed": 5}
    text = known_text(60, **sampling)
    engine = make_engine(toy(), replay(text), max_running_requests=1)
    for steps in (1, 2, 7):
        params = SamplingParams(max_new_tokens=1 + steps * (DEPTH + 1), **sampling)
        done = engine.generate(PROMPT, params)
        assert done.output_ids == text[len(PROMPT) :][: params.max_new_tokens]
        assert done.spec_accept_length == DEPTH + 1
        assert done.spec_verify_ct == steps
        assert done.spec_accept_histogram == [0] * DEPTH + [steps]
    check_idle(engine)


def test_traces_of_absurd_trees():
    """A trace has the nodes below the root that could be accepted, and can be drawn."""
    drafter = absurd_trees(VOCABULARY, byte_ids(b"aeinorst"))
    engine = make_engine(toy(), drafter, draft=jnp.uint32(0), trace=True)
    for seed in range(6):
        engine.params = engine.params._replace(draft=jnp.uint32(seed))
        done = engine.generate(PROMPT, SamplingParams(max_new_tokens=50, temperature=1.0, seed=seed))
        assert len(done.trees) == done.spec_verify_ct
        for tree in done.trees:
            count = len(tree.tokens)
            assert tree.parents[0] == -1 and all(0 <= tree.parents[node] < node for node in range(1, count))
            assert tree.depth.tolist() == [0, *(tree.depth[tree.parents[1:]] + 1)]
            assert all(0 <= token < VOCABULARY for token in tree.tokens)
            assert tree.tokens[tree.path[1:]].tolist() == tree.emitted[: tree.accepted].tolist()
        assert draw_steps(done.trees).count('class="root"') == len(done.trees)


# Rules of the code.

ROOT = Path(specjax.__file__).parent
FILES = {path: path.relative_to(ROOT).as_posix() for path in sorted(ROOT.rglob("*.py"))}
OURS = Path(__file__).parents[2] / "kernels" / "specjax_kernels"

ASKS = re.compile(
    r"""algorithm\w*\s*(==|!=|\bin\b)|(==|!=)\s*["'](NGRAM|EAGLE\w*|MTP|NONE|STANDALONE)\b"""
    r"""|isinstance\([^)]*[Dd]rafter|is_(eagle|ngram|mtp|none|standalone)\b|drafter\.name\s*(==|!=|\bin\b)"""
)


def test_only_the_table_asks_which_algorithm_runs():
    for line in ('if algorithm == "X":', "isinstance(x, Drafter)", "if x.is_eagle():", 'name == "NGRAM"'):
        assert ASKS.search(line), line
    matches = [
        f"{name}:{number}: {line.strip()}"
        for path, name in FILES.items()
        if not name.startswith("drafters/")
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if ASKS.search(line)
    ]
    assert not matches, "\n".join(matches)


def imports(path: Path, package: str) -> set[str]:
    """Full names of a file's imports; `from a import b` gives a and a.b."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, base]).rstrip(".")
            names |= {base, *(f"{base}.{alias.name}" for alias in node.names)}
    return names


LAYERS = [  # a module may import those of its own row and of the rows below
    {"__main__", "generate", "serve", "cli", "bench", "fleet", "hardware", "viz"},
    {"engine"},
    {"costs"},
    {"load"},
    {"step"},
    {"state"},
    {"drafters", "verify", "acceptance", "tree", "sampling", "logprobs"},
    {"models", "parallel"},
    {"cache"},
    {"settings"},
    {"config", "limits", "progress", "gpu"},
]


def part(module: str) -> str | None:
    """`specjax.engine.plan` -> engine. None: not ours, or the package itself."""
    pieces = module.split(".")
    return pieces[1] if pieces[0] == "specjax" and len(pieces) > 1 else None


def our_imports() -> list[tuple[str, str]]:
    pairs = []
    for path, name in FILES.items():
        package = ".".join(["specjax", *name.split("/")[:-1]])
        source = name.split("/")[0].removesuffix(".py")
        if source != "__init__":
            pairs += [(source, target) for module in imports(path, package) if (target := part(module))]
    assert ("engine", "step") in pairs and ("step", "models") in pairs, "the parser finds what is there"
    return pairs


def test_imports_go_one_way():
    level = {name: row for row, names in enumerate(LAYERS) for name in names}
    public = {"checkpoint", "train", "__init__", "__version__", "py"}
    for source, target in our_imports():
        if source in level and target in level:
            assert level[target] >= level[source], f"{source} imports {target}"
        else:
            assert source in level or source in public, f"which layer is {source}?"


WINGS = ("cli", "fleet", "hardware", "train", "bench", "viz", "serve/dialects")
"""Folders that the rest of the package, the trunk, does not import."""
ENTRIES = {"__main__.py", "generate.py", "serve/__main__.py"}  # run a command


def test_the_trunk_imports_no_wing():
    folders = tuple(f"specjax/{wing}/" for wing in WINGS)
    for path, name in FILES.items():
        if name not in ENTRIES and not f"specjax/{name}".startswith(folders):
            modules = imports(path, ".".join(["specjax", *name.split("/")[:-1]]))
            used = [module for module in modules if f"{module.replace('.', '/')}/".startswith(folders)]
            assert not used, f"{name} imports {used}"


def test_further_import_rules():
    for source, target in our_imports():
        if source in ("config", "limits", "settings"):
            assert target == source or target == "limits", f"{source} imports {target}"
        if source == "checkpoint":
            assert target in ("checkpoint", "models", "parallel", "config", "limits", "packages", "progress"), (
                f"checkpoint imports {target}"
            )
        if target == "checkpoint":
            sources = {"checkpoint", "load", "engine", "fleet", "hardware", "train", "cli", "serve"}
            sources |= {"bench", "viz"}
            assert source in sources, f"{source} imports it"
        if target == "serve":
            assert source in ("serve", "fleet", "cli"), f"{source} imports {target}"
        if target == "train":
            assert source == target, f"{source} imports {target}"


def test_kernels_do_not_import_specjax():
    for path in OURS.rglob("*.py"):
        names = imports(path, "specjax_kernels")
        assert not any(name.split(".")[0] == "specjax" for name in names), path


def test_torch_and_web_frameworks():
    for path in [*FILES, *OURS.rglob("*.py")]:
        top = {name.split(".")[0] for name in imports(path, "specjax")}
        if FILES.get(path, "") != "bench/methods.py":  # which imports it when transformers is a method
            assert not top & {"torch", "torchvision", "tensorflow"}, path
        if not FILES.get(path, "").startswith(("serve/", "fleet/", "cli/serve.py")):
            assert not top & {"fastapi", "uvicorn", "starlette", "pydantic", "aiohttp", "flask"}, path

"""Runs methods on sets of prompts in turns, and logs each measured part, so that a stopped run can resume.

A block is one batch size, set, temperature and repeat: every method completes every group of conversations. The order
of the methods rotates, so that other load on the machine affects all of them. Drafters forget earlier texts before each
block.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias
from zlib import crc32

from specjax.bench.methods import Method, Run, Source
from specjax.bench.results import VERDICTS, Sample, add_histograms, row
from specjax.bench.sets import ALL, Conversation, PromptSet
from specjax.checkpoint.files import write_text
from specjax.checkpoint.prompts import encode
from specjax.engine import Engine, SamplingParams
from specjax.engine.config import EngineConfig
from specjax.progress import progress_bar
from specjax.state import StepTree
from specjax.tree import NO_TOKEN

NEAR = 1e-3
"""Largest difference of two float32 logits that counts as a tie: the last bits of a matrix product depend on its shape
(docs/design.md)."""

WARM_UP_TOKENS = 8
Turn: TypeAlias = tuple[list[int], list[int]]  # tokens of a prompt and of its answer


class Log:
    """Measured parts of a comparison: `runs.jsonl` in its folder. The first line is `identity`, JSON values on which
    the measurements depend. Raises ValueError if the folder holds runs with another identity, or other files."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self._folder, self._file = folder, folder / "runs.jsonl"
        self._identity: dict[str, Any] = json.loads(json.dumps(identity))
        self._entries: dict[str, Any] = {}  # by the key as JSON
        if not self._file.exists():
            if folder.exists() and any(folder.iterdir()):
                raise ValueError(f"--output {folder} is not empty, and holds no runs.jsonl; name another folder")
            return
        text = self._file.read_bytes()
        complete = text[: text.rfind(b"\n") + 1]  # a killed run may leave a part of a line
        if len(complete) < len(text):
            self._file.write_bytes(complete)
        before, *entries = map(json.loads, complete.splitlines() or [json.dumps(self._identity)])
        self._check(before)
        self._entries = {json.dumps(key): value for key, value in entries}

    def _check(self, before: Mapping[str, Any]) -> None:
        for name in dict.fromkeys([*before, *self._identity]):
            old, new = before.get(name), self._identity.get(name)
            if old == new:
                continue
            if isinstance(old, dict) and isinstance(new, dict):
                differing = [key for key in [*old, *new] if old.get(key) != new.get(key)]
                old, new = ({key: values[key] for key in differing if key in values} for values in (old, new))
            raise ValueError(
                f"--output {self._folder} holds runs with another {name}: {old!r:.200}, not {new!r:.200}; name "
                "another folder, or remove this one"
            )

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        return json.dumps(key) in self._entries

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        return self._entries[json.dumps(key)]

    def __setitem__(self, key: tuple[Any, ...], value: Any) -> None:
        """Writes a part. The first part creates the folder, so that a failed start leaves no files."""
        self._folder.mkdir(parents=True, exist_ok=True)
        lines = [[key, value]] if self._entries else [self._identity, [key, value]]
        with self._file.open("a", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(line)}\n" for line in lines)
        self._entries[json.dumps(key)] = json.loads(json.dumps(value))


@dataclass(frozen=True)
class Plan:
    """Methods, prompts and conditions of a comparison."""

    methods: tuple[Method, ...]
    sets: tuple[PromptSet, ...]
    temperatures: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    baseline: str  # name of a method
    max_new_tokens: int
    repeats: int = 1
    seed: int = 0
    ignore_eos: bool = False
    trees: bool = False  # keep the draft trees


class Experiment:
    """Measures the parts of a plan that the log lacks. `trees`: folder for the draft trees, if the plan keeps them."""

    def __init__(
        self, plan: Plan, source: Source, log: Log | dict[tuple[Any, ...], Any], trees: Path = Path("trees"), *,
        progress: bool = True,
    ) -> None:  # fmt: skip
        self.plan, self.source, self.log, self._progress = plan, source, log, progress
        self._trees = trees
        for method in plan.methods:
            source.load(method)
        self._tokenizer, self._target = source.first.tokenizer, source.first.target.config
        self.left_out: dict[str, list[str]] = {}  # ids of conversations that exceed the model's context, by set
        self.sets = {prompts.name: self._fitting(prompts) for prompts in plan.sets}

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        text = "\n\n".join(message["content"] for message in messages)
        prompt = messages if self._tokenizer.chat_template else text
        return encode(prompt, self._tokenizer, self._target.vocab_size)

    def max_tokens(self, conversation: Conversation) -> int:
        """Upper bound of a conversation's tokens with all its answers."""
        answer = {"role": "assistant", "content": "."}
        messages = [message for turn in conversation.turns for message in ({"role": "user", "content": turn}, answer)]
        # Tokenising an answer's text again may give more tokens.
        return len(self.encode(messages[:-1])) + len(conversation.turns) * (self.plan.max_new_tokens + 16)

    def _fitting(self, prompts: PromptSet) -> list[Conversation]:
        positions = self._target.max_positions
        lengths = {conversation: self.max_tokens(conversation) for conversation in prompts.conversations}
        fitting = [conversation for conversation, length in lengths.items() if length <= positions]
        if left_out := [conversation.id for conversation in lengths if conversation not in fitting]:
            self.left_out[prompts.name] = left_out
        if not fitting:
            raise ValueError(
                f"--sets {prompts.name}: no conversation fits the model's {positions} positions with --max-new-tokens "
                f"{self.plan.max_new_tokens} (the shortest may have {min(lengths.values())} tokens)"
            )
        if max(self.plan.batch_sizes) > len(fitting):
            raise ValueError(
                f"--batch-sizes {max(self.plan.batch_sizes)}: {prompts.name} has {len(fitting)} conversations that "
                "fit; give more (--limit), or smaller batches"
            )
        return fitting

    def config(self, batch: int) -> EngineConfig:
        longest = max(self.max_tokens(conversation) for part in self.sets.values() for conversation in part)
        room = batch * (longest + 256)  # steps in flight commit past the end
        return EngineConfig(
            max_running_requests=batch, max_total_tokens=room, prefix_cache=False, random_seed=self.plan.seed,
            trace=self.plan.trees,
        )  # fmt: skip

    def run(self) -> None:
        for batch in self.plan.batch_sizes:
            if missing := [key for key in self._blocks(batch) if key not in self.log]:
                self._run_blocks(batch, missing)

    def _blocks(self, batch: int) -> Iterator[tuple[Any, ...]]:
        for repeat in range(self.plan.repeats):
            for name in self.sets:
                for temperature in self.plan.temperatures:
                    yield "block", batch, name, temperature, repeat

    def _run_blocks(self, batch: int, missing: Sequence[tuple[Any, ...]]) -> None:
        engines: dict[str, Engine] = {}
        with progress_bar("Compiling", len(self.plan.methods), "method", shown=self._progress) as bar:
            for method in self.plan.methods:
                engines[method.name] = self.source.engine(method, self.config(batch))
                self._warm_up(engines[method.name], batch)
                bar.update()
        for key in missing:
            self.log[key] = self._block(engines, *key[1:])

    def _warm_up(self, engine: Engine, batch: int) -> None:
        """Compiles the remaining programs by an unmeasured run."""
        group = groups(next(iter(self.sets.values())), batch)[0]
        prompts = [self.encode([{"role": "user", "content": conversation.turns[0]}]) for conversation in group]
        sampling = SamplingParams(max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
        self.source.complete(engine, prompts, [sampling] * len(prompts))

    def _block(
        self, engines: Mapping[str, Engine], batch: int, name: str, temperature: float, repeat: int
    ) -> list[dict[str, Any]]:
        """The samples of all methods."""
        methods = [method.name for method in self.plan.methods]
        for method in methods:  # drafters forget earlier texts
            if not engines[method].flush_cache():
                raise RuntimeError("requests still run")
        parts = groups(self.sets[name], batch)
        title = f"{name}, T={temperature:g}" + (f", batch {batch}" if batch > 1 else "")
        title += f", repeat {repeat + 1} of {self.plan.repeats}" if self.plan.repeats > 1 else ""
        runs: dict[str, list[tuple[Sample, list[Turn]]]] = {method: [] for method in methods}
        answers: list[dict[str, Any]] = []
        with progress_bar(title, len(parts) * len(methods), "run", shown=self._progress) as bar:
            for index, group in enumerate(parts):
                first = (index + repeat) % len(methods)
                for method in methods[first:] + methods[:first]:
                    sample, turns, done = self._complete(engines[method], group, temperature)
                    runs[method].append((sample, turns))
                    answers += [{"method": method, **answer} for answer in done]
                    bar.update()
        if self.plan.trees:
            self._trees.mkdir(parents=True, exist_ok=True)
            file = f"{name.replace('/', '-')}-T{temperature:g}-batch{batch}-repeat{repeat}.jsonl"
            write_text(self._trees / file, "".join(f"{json.dumps(answer)}\n" for answer in answers))
        gap = partial(logit_gap, engines[self.plan.baseline]) if temperature == 0 else None
        return [
            asdict(replace(sample, method=method, repeat=repeat, texts=compare_texts(turns, baseline_turns, gap)))
            for method in methods
            for (sample, turns), (_, baseline_turns) in zip(runs[method], runs[self.plan.baseline], strict=True)
        ]

    def _complete(
        self, engine: Engine, group: Sequence[Conversation], temperature: float
    ) -> tuple[Sample, list[Turn], list[dict[str, Any]]]:
        """Completes all turns of a group. The sample lacks method, repeat and verdicts. The last result has the trees
        of each answer, if they are kept."""
        messages: list[list[dict[str, str]]] = [[] for _ in group]
        sampling = SamplingParams(
            max_new_tokens=self.plan.max_new_tokens, temperature=temperature, ignore_eos=self.plan.ignore_eos
        )
        turns: list[Turn] = []
        runs: list[Run] = []
        answers: list[dict[str, Any]] = []
        for turn in range(max(len(conversation.turns) for conversation in group)):
            rows = [i for i, conversation in enumerate(group) if turn < len(conversation.turns)]
            for i in rows:
                messages[i].append({"role": "user", "content": group[i].turns[turn]})
            prompts = [self.encode(messages[i]) for i in rows]
            # Requests with one seed would share their noise.
            seeds = [self.plan.seed + crc32(group[i].id.encode()) + turn for i in rows]
            runs.append(self.source.complete(engine, prompts, [replace(sampling, seed=seed) for seed in seeds]))
            for i, prompt, answer in zip(rows, prompts, runs[-1].completions, strict=True):
                messages[i].append({"role": "assistant", "content": self._text(answer.output_ids)})
                turns.append((prompt, answer.output_ids))
                answers.append({"conversation": group[i].id, "turn": turn + 1, **self._described(answer.trees)})
        done = [answer for run in runs for answer in run.completions]
        nodes = sum((run.nodes for run in runs), Counter[int]())
        sample = Sample(
            method="", repeat=0, texts={}, conversations=len(group),
            group="+".join(conversation.id for conversation in group),
            seconds=round(sum(run.seconds for run in runs), 6), tokens=sum(len(answer.output_ids) for answer in done),
            decode_seconds=round(sum(run.decode_seconds for run in runs), 6), decoded=sum(run.decoded for run in runs),
            histogram=add_histograms(answer.spec_accept_histogram for answer in done),
            drafted_steps=sum(answer.drafted_steps for answer in done),
            nodes={str(n): count for n, count in sorted(nodes.items())},
        )  # fmt: skip
        return sample, turns, answers

    def _described(self, trees: Sequence[StepTree]) -> dict[str, Any]:
        """Trees as JSON-like values, with the texts of their tokens."""
        tokens = {token for tree in trees for leaf in (tree.tokens, tree.drawn) for token in leaf.tolist()} - {NO_TOKEN}
        return {
            "texts": {token: self._tokenizer.decode([token]) for token in sorted(tokens)},
            "trees": [{name: leaf.tolist() for name, leaf in vars(tree).items()} for tree in trees],
        }

    def _text(self, tokens: list[int]) -> str:
        """An answer's text for the next turn's prompt."""
        tokens = tokens[:-1] if tokens and tokens[-1] in self.source.first.eos_ids else tokens
        return self._tokenizer.decode(tokens, skip_special_tokens=True).strip()

    def rows(self) -> list[dict[str, Any]]:
        """A row for each batch size, temperature, set and method, then for all sets together."""
        parts = {name: [name] for name in self.sets}
        if len(parts) > 1:
            parts[ALL] = [*self.sets]
        return [
            row(
                [sample for sample in samples if sample.method == method.name],
                [sample for sample in samples if sample.method == self.plan.baseline],
                where={"set": title, "temperature": temperature, "batch": batch, "method": method.name},
            )
            for batch in self.plan.batch_sizes
            for temperature in self.plan.temperatures
            for title, names in parts.items()
            for samples in [[sample for name in names for sample in self._samples(batch, name, temperature)]]
            for method in self.plan.methods
        ]

    def _samples(self, batch: int, name: str, temperature: float) -> list[Sample]:
        return [
            Sample(**sample | {"group": f"{name}: {sample['group']}"})
            for repeat in range(self.plan.repeats)
            for sample in self.log["block", batch, name, temperature, repeat]
        ]


def groups(conversations: Sequence[Conversation], batch: int) -> list[list[Conversation]]:
    """Full batches of conversations; the remainder is left out."""
    return [list(conversations[i : i + batch]) for i in range(0, len(conversations) - batch + 1, batch)]


def compare_texts(
    turns: Sequence[Turn], baseline: Sequence[Turn], gap: Callable[[list[int], set[int]], float] | None
) -> dict[str, int]:
    """Number of turns by verdict. `gap`: see `logit_gap`; None: no near ties."""
    counts: dict[str, int] = dict.fromkeys(VERDICTS, 0)
    for (prompt, answer), (other_prompt, other) in zip(turns, baseline, strict=True):
        verdict = "equal" if answer == other else "different"
        if prompt != other_prompt:
            verdict = "other prompt"
        elif verdict == "different" and gap is not None:
            pairs = enumerate(zip(answer, other, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), None)
            if at is not None and gap(prompt + answer[:at], {answer[at], other[at]}) < NEAR:
                verdict = "near tie"
        counts[verdict] += 1
    return counts


def logit_gap(baseline: Engine, context: list[int], tokens: set[int]) -> float:
    """Difference of the two largest logits after a context; infinite unless their tokens are `tokens`."""
    sampling = SamplingParams(max_new_tokens=1, logprobs=2, ignore_eos=True)
    logprobs = baseline.generate(context, sampling).logprobs
    assert logprobs is not None
    (first, best), (second, next_best) = logprobs[0].top
    return best - next_best if {first, second} == tokens else float("inf")

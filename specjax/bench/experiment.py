"""Runs methods on sets of prompts, in turns, and keeps what was measured in a log.

For each batch size: for each set, temperature and repeat, one block. In a block every method completes every group of
conversations, one method after another in an order that rotates from group to group, so that whatever else the machine
does hits all of them. Before a block drafters forget what they have seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

from specjax.bench import results
from specjax.bench.contenders import Answer, Contender, EngineContender, Source, answer_text, make
from specjax.bench.log import Log
from specjax.bench.methods import Method
from specjax.bench.results import Sample
from specjax.bench.sets import Conversation, PromptSet
from specjax.checkpoint.prompts import encode
from specjax.engine import SamplingParams
from specjax.engine.config import EngineConfig
from specjax.progress import progress_bar

NEAR = 1e-3
"""Of two logits in float32: a matrix product's last bits depend on its shape, so texts may part where the two best are
closer (docs/design.md)."""

WARM_UP_TOKENS = 8
CURVE_POINTS = 32  # of a turn, in the log


@dataclass(frozen=True)
class Plan:
    """What is compared."""

    methods: tuple[Method, ...]
    sets: tuple[PromptSet, ...]
    temperatures: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    baseline: str
    max_new_tokens: int
    repeats: int
    seed: int
    ignore_eos: bool
    timed: int  # conversations of each set whose steps are timed in parts


def applies(method: Method, temperature: float, batch: int) -> bool:
    """Whether a method is measured there: transformers complete one prompt at a time, greedily."""
    return method.outside is None or (temperature == 0 and batch == 1)


class Experiment:
    """Measures what the log lacks.

    Attributes:
        left_out: conversations that do not fit the model's context, by set.
        sets: those that do.
    """

    def __init__(self, plan: Plan, source: Source, log: Log, *, progress: bool = True) -> None:
        self.plan, self.source, self.log, self._progress = plan, source, log, progress
        for method in plan.methods:
            if method.outside is None:
                source.load(method)
        first = source.first
        self._tokenizer, self._stops = first.tokenizer, first.eos_ids
        self._vocab, self._positions = first.target.config.vocab_size, first.target.config.max_positions
        self.left_out: dict[str, list[str]] = {}
        self.sets = {each.name: self._fitting(each) for each in plan.sets}

    # Prompts

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        if self._tokenizer.chat_template:
            return encode(messages, self._tokenizer, self._vocab)
        return encode("\n\n".join(message["content"] for message in messages), self._tokenizer, self._vocab)

    def most_tokens(self, one: Conversation) -> int:
        """That a conversation may have with all its answers."""
        messages: list[dict[str, str]] = []
        for turn in one.turns:
            messages += [{"role": "user", "content": turn}, {"role": "assistant", "content": "."}]
        # An answer's text may be tokenised anew to a few tokens more.
        return len(self.encode(messages[:-1])) + len(one.turns) * (self.plan.max_new_tokens + 16)

    def _fitting(self, each: PromptSet) -> list[Conversation]:
        lengths = {one: self.most_tokens(one) for one in each.conversations}
        fitting = [one for one, length in lengths.items() if length <= self._positions]
        if left := [one.id for one in each.conversations if one not in fitting]:
            self.left_out[each.name] = left
        if not fitting:
            raise ValueError(
                f"--sets {each.name}: no conversation fits the model's {self._positions} positions with "
                f"--max-new-tokens {self.plan.max_new_tokens} (the shortest may have {min(lengths.values())} tokens)"
            )
        if max(self.plan.batch_sizes) > len(fitting):
            raise ValueError(
                f"--batch-sizes {max(self.plan.batch_sizes)}: {each.name} has {len(fitting)} conversations that fit; "
                "give more (--limit), or smaller batches"
            )
        return fitting

    def config(self, batch: int) -> EngineConfig:
        longest = max(self.most_tokens(one) for each in self.sets.values() for one in each)
        room = batch * (longest + 256)  # what steps in flight may commit
        return EngineConfig(
            max_running_requests=batch, max_total_tokens=room, prefix_cache=False, random_seed=self.plan.seed
        )

    # The runs

    def blocks(self, batch: int) -> Iterator[tuple[Any, ...]]:
        for repeat in range(self.plan.repeats):
            for name in self.sets:
                for temperature in self.plan.temperatures:
                    yield "block", batch, name, temperature, repeat

    def run(self) -> None:
        for batch in self.plan.batch_sizes:
            if missing := [key for key in self.blocks(batch) if key not in self.log]:
                self._run_batch(batch, missing)
            if self.plan.timed:
                self._time_batch(batch)

    def _run_batch(self, batch: int, missing: Sequence[tuple[Any, ...]]) -> None:
        contenders: dict[str, Contender] = {}
        wanted = [one for one in self.plan.methods if any(applies(one, key[3], batch) for key in missing)]
        with progress_bar("Compiling", len(wanted), "method", shown=self._progress) as bar:
            for method in wanted:
                contenders[method.name] = make(self.source, method, self.config(batch), self._stops)
                self.warm_up(contenders[method.name], batch)
                bar.update()
        for key in missing:
            self.log.add(key, self._block(contenders, batch, key[2], key[3], key[4]))

    def warm_up(self, contender: Contender, batch: int) -> None:
        """A run that does not count, in which the last programs are compiled."""
        group = groups(next(iter(self.sets.values())), batch)[0]
        sampling = SamplingParams(max_new_tokens=WARM_UP_TOKENS, ignore_eos=True)
        prompts = [self.encode([{"role": "user", "content": one.turns[0]}]) for one in group]
        contender.run(prompts, [sampling] * len(prompts))

    def _block(
        self, contenders: dict[str, Contender], batch: int, name: str, temperature: float, repeat: int
    ) -> dict[str, Any]:
        methods = [one.name for one in self.plan.methods if applies(one, temperature, batch)]
        for method in methods:
            contenders[method].forget()
        parts = groups(self.sets[name], batch)
        title = f"{name}, T={temperature:g}" + (f", batch {batch}" if batch > 1 else "")
        title += f", repeat {repeat + 1} of {self.plan.repeats}" if self.plan.repeats > 1 else ""
        runs: dict[str, list[GroupRun]] = {method: [] for method in methods}
        with progress_bar(title, len(parts) * len(methods), "run", shown=self._progress) as bar:
            for index, group in enumerate(parts):
                turn = (index + repeat) % len(methods)
                for method in methods[turn:] + methods[:turn]:
                    runs[method].append(self.complete(contenders[method], group, temperature))
                    bar.update()
        base = contenders.get(self.plan.baseline)
        gap = partial(_gap, base) if isinstance(base, EngineContender) and temperature == 0 else None
        samples = [
            asdict(run.sample(method, repeat, _verdicts(run, other, gap)))
            for method in methods
            for run, other in zip(runs[method], runs.get(self.plan.baseline) or runs[method], strict=True)
        ]
        return {"samples": samples, "notes": {method: contenders[method].note() for method in methods}}

    def complete(self, contender: Contender, group: Sequence[Conversation], temperature: float) -> GroupRun:
        """All turns of a group: those that have a turn run together."""
        messages: list[list[dict[str, str]]] = [[] for _ in group]
        found = GroupRun("+".join(one.id for one in group), len(group))
        for turn in range(max(len(one.turns) for one in group)):
            rows = [i for i, one in enumerate(group) if turn < len(one.turns)]
            for i in rows:
                messages[i].append({"role": "user", "content": group[i].turns[turn]})
            prompts = [self.encode(messages[i]) for i in rows]
            sampling = SamplingParams(
                max_new_tokens=self.plan.max_new_tokens, temperature=temperature, ignore_eos=self.plan.ignore_eos
            )
            # Requests of one seed would share their noise.
            seeds = [self.plan.seed + crc32(group[i].id.encode()) + turn for i in rows]
            run = contender.run(prompts, [replace(sampling, seed=seed) for seed in seeds])
            for i, prompt, answer in zip(rows, prompts, run.answers, strict=True):
                text = answer_text(self._tokenizer, answer.tokens, self._stops)
                messages[i].append({"role": "assistant", "content": text})
                found.turns.append((prompt, answer))
            found.seconds += run.seconds
            found.drafted_steps = results.total([found.drafted_steps, run.drafted_steps])
            found.windows.append(full_window(run.answers))
        return found

    # Steps timed in parts

    def _time_batch(self, batch: int) -> None:
        """Milliseconds of drafting, verifying and committing in a step. Each part is waited for, which is slower, so
        engines of their own do it."""
        missing = {
            method: [key for key in self._phase_keys(batch, method) if key not in self.log]
            for method in self.plan.methods
            if method.outside is None
        }
        with progress_bar("Timing phases", sum(map(len, missing.values())), "run", shown=self._progress) as bar:
            for method, keys in missing.items():
                if not keys:
                    continue
                engine = self.source.engine(method, self.config(batch), time_phases=True)
                contender = EngineContender(engine)
                self.warm_up(contender, batch)
                for key in keys:
                    before = contender.phases()
                    contender.forget()
                    parts = groups(self.sets[key[2]], batch)
                    for group in parts[: max(self.plan.timed // batch, 1)]:
                        self.complete(contender, group, key[3])
                    self.log.add(key, contender.phases().since(before))
                    bar.update()

    def _phase_keys(self, batch: int, method: Method) -> list[tuple[Any, ...]]:
        return [("phases", batch, name, t, method.name) for name in self.sets for t in self.plan.temperatures]

    def _phases(self, batch: int, name: str, temperature: float) -> dict[str, Any]:
        """By method; those of transformers have none."""
        found = {}
        for method in self.plan.methods:
            if (key := ("phases", batch, name, temperature, method.name)) in self.log:
                found[method.name] = self.log[key]
        return found

    # Results

    def rows(self) -> tuple[list[dict[str, Any]], dict[str, list[Sample]]]:
        """The table's rows, and the samples of each by its title."""
        rows: list[dict[str, Any]] = []
        by_row: dict[str, list[Sample]] = {}
        for batch in self.plan.batch_sizes:
            for temperature in self.plan.temperatures:
                every: list[Sample] = []
                phases: list[dict[str, Any]] = []
                for name in self.sets:
                    samples = self._samples(batch, name, temperature)
                    timed = self._phases(batch, name, temperature)
                    where = {"set": name, "temperature": temperature, "batch": batch}
                    rows += self._rows(samples, where, timed, by_row)
                    every += samples
                    phases.append(timed)
                if len(self.sets) > 1:
                    where = {"set": results.ALL, "temperature": temperature, "batch": batch}
                    rows += self._rows(every, where, _mean(phases), by_row)
        return rows, by_row

    def notes(self, rows: Sequence[dict[str, Any]]) -> list[str]:
        """Why methods did not draft in each step."""
        keys = [key for batch in self.plan.batch_sizes for key in self.blocks(batch)]
        reasons = {(method, key[1]): note for key in keys for method, note in self.log[key]["notes"].items()}
        return results.undrafted(reasons, rows)

    def _samples(self, batch: int, name: str, temperature: float) -> list[Sample]:
        found = []
        for repeat in range(self.plan.repeats):
            for one in self.log[("block", batch, name, temperature, repeat)]["samples"]:
                found.append(Sample(**one | {"group": f"{name}: {one['group']}"}))
        return found

    def _rows(
        self, samples: list[Sample], where: dict[str, Any], phases: dict[str, Any], by_row: dict[str, list[Sample]]
    ) -> list[dict[str, Any]]:
        baseline = [sample for sample in samples if sample.method == self.plan.baseline]
        found = []
        for method in self.plan.methods:
            own = [sample for sample in samples if sample.method == method.name]
            if own:
                title = where | {"method": method.name}
                found.append(results.row(own, baseline, where=title, phases=phases.get(method.name)))
                by_row[" ".join(map(str, title.values()))] = own
        return found


class GroupRun:
    """What a group's conversations gave."""

    def __init__(self, group: str, conversations: int = 1) -> None:
        self.group, self.conversations, self.seconds = group, conversations, 0.0
        self.drafted_steps: int | None = 0
        self.turns: list[tuple[list[int], Answer]] = []  # (prompt, answer)
        self.windows: list[Window] = []  # of each turn

    def sample(self, method: str, repeat: int, texts: dict[str, int]) -> Sample:
        answers = [answer for _, answer in self.turns]
        spans = [(one.arrivals[0], one.arrivals[-1]) for one in answers if one.arrivals]
        return Sample(
            method, self.group, repeat, round(self.seconds, 6),
            tokens=sum(len(one.tokens) for one in answers),
            decode_seconds=round(sum(last[0] - first[0] for first, last in spans), 6),
            decode_tokens=sum(last[1] - first[1] for first, last in spans),
            histogram=results.add_histograms(one.histogram for one in answers),
            drafted_steps=self.drafted_steps,
            texts=texts,
            full_seconds=round(sum(window.seconds for window in self.windows), 6),
            full_tokens=sum(window.tokens for window in self.windows),
            conversations=self.conversations,
            curve=[point for one in answers for point in _thinned(one)],
        )  # fmt: skip


class Window(NamedTuple):
    """The part of a run in which all of its requests decode."""

    seconds: float
    tokens: int  # of all requests
    steps: int


def full_window(answers: Sequence[Answer]) -> Window:
    """From when the last request has its first tokens until the first one has its last; empty where one has ended
    before another has begun."""
    if any(not one.arrivals for one in answers):
        return Window(0.0, 0, 0)
    begin = max(one.arrivals[0][0] for one in answers)
    end = min(one.arrivals[-1][0] for one in answers)

    def tokens(one: Answer, when: float) -> int:
        return max((count for seconds, count in one.arrivals if seconds <= when), default=0)

    steps = {seconds for one in answers for seconds, _ in one.arrivals if begin < seconds <= end}
    if not steps:
        return Window(0.0, 0, 0)
    return Window(end - begin, sum(tokens(one, end) - tokens(one, begin) for one in answers), len(steps))


def groups(conversations: Sequence[Conversation], batch: int) -> list[list[Conversation]]:
    """Of `batch` each; the last ones that make no full batch are left out."""
    return [list(conversations[i : i + batch]) for i in range(0, len(conversations) - batch + 1, batch)]


def _thinned(answer: Answer) -> list[list[float | int]]:
    every = max(len(answer.tokens) // CURVE_POINTS, 1)
    found: list[list[float | int]] = []
    for seconds, tokens in answer.arrivals:
        if not found or tokens - found[-1][0] >= every:
            found.append([tokens, round(seconds, 5)])
    return found


def _verdicts(ours: GroupRun, theirs: GroupRun, gap: Callable[[list[int], set[int]], float] | None) -> dict[str, int]:
    """Turns by how their text compares with the baseline's."""
    found = {"equal": 0, "near tie": 0, "different": 0, "other prompt": 0}
    for (prompt, mine), (other_prompt, other) in zip(ours.turns, theirs.turns, strict=True):
        if prompt != other_prompt:
            found["other prompt"] += 1
        elif mine.tokens == other.tokens:
            found["equal"] += 1
        else:
            pairs = enumerate(zip(mine.tokens, other.tokens, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), None)
            near = False
            if at is not None and gap is not None:
                near = gap(prompt + mine.tokens[:at], {mine.tokens[at], other.tokens[at]}) < NEAR
            found["near tie" if near else "different"] += 1
    return found


def _gap(baseline: EngineContender, context: list[int], tokens: set[int]) -> float:
    """Between the two best logits after a context; infinite if they are not those of `tokens`."""
    sampling = SamplingParams(max_new_tokens=1, logprobs=2, ignore_eos=True)
    found = baseline.engine.generate(context, sampling).logprobs
    assert found is not None
    (first, best), (second, next_best) = found[0].top
    return best - next_best if {first, second} == tokens else float("inf")


def _mean(phases: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the sets' phases, by method."""
    found: dict[str, Any] = {}
    for method in dict.fromkeys(name for each in phases for name in each):
        each = [one[method] for one in phases if method in one]
        found[method] = {name: sum(one[name] for one in each) / len(each) for name in each[0]}
    return found

"""Records the texts of an experiment with all variants of a grid, through the experiment's own conversations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specjax.bench.contenders import Answer, Run, shaped
from specjax.bench.experiment import Experiment, groups
from specjax.bench.grid import Grid, Variant
from specjax.bench.log import Log
from specjax.bench.prediction import Texts
from specjax.bench.replay import PAGE_SIZE, Recorder, Recording
from specjax.drafters import Ngram
from specjax.engine import SamplingParams
from specjax.load import LoadedModel
from specjax.progress import progress_bar
from specjax.sampling import STOP_IDS

SLACK = 256  # tokens of room beyond what a conversation should have: an answer may be tokenised anew to more


class RecordingContender:
    """Completes prompts one after another, and keeps what each variant would have drafted."""

    def __init__(self, recorder: Recorder, stops: Sequence[int]) -> None:
        self._recorder, self._stops = recorder, tuple(stops[:STOP_IDS])
        self.found: list[tuple[int, Recording]] = []  # tokens of the prompt, and its text

    def run(self, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]) -> Run:
        answers = []
        for prompt, params in zip(prompts, sampling, strict=True):
            stops = () if params.ignore_eos else self._stops
            how = {"temperature": params.temperature, "seed": params.seed, "stop_ids": stops}
            assert params.max_new_tokens is not None, "a plan gives it"
            text = self._recorder(prompt, params.max_new_tokens, **how)
            self.found.append((len(prompt), text))
            answers.append(Answer(text.tokens, [], []))
        return Run(answers, 0.0, 0)

    def forget(self) -> None:
        self._recorder.forget()

    def note(self) -> str:
        return ""


class Recorded:
    """The recorded texts of an experiment's conversations; those that the log lacks are recorded.

    Attributes:
        texts: what `specjax.bench.prediction` replays.
        context: mean tokens that a step has behind it.
    """

    def __init__(
        self, experiment: Experiment, loaded: LoadedModel, grid: Grid, log: Log, *, progress: bool = True
    ) -> None:
        self._experiment, self._loaded, self._log, self._progress = experiment, loaded, log, progress
        self._index: dict[tuple[str, str], list[int]] = {}  # (set, conversation) -> texts of its turns
        known: dict[str, list[tuple[Recording, int]]] = {}
        lengths: list[float] = []
        for part, variants in enumerate(_sharing(grid.variants)):
            entries = self._entries(part, variants)
            texts = [Recording.unpacked(text) for entry in entries for _, _, _, text in entry]
            for place, one in enumerate(variants):
                known[one.name] = [(text, place) for text in texts]
            if not part:
                flat = [row for entry in entries for row in entry]
                for i, (name, conversation, prompt, _) in enumerate(flat):
                    self._index.setdefault((name, conversation), []).append(i)
                    lengths.append(prompt + len(texts[i].tokens) / 2)
        self.texts = Texts(known)
        self.context = round(sum(lengths) / len(lengths))

    def groups(self, batch: int, most: int = 0) -> list[list[int]]:
        """Texts that run together in batches of this size: in each set and group, those of each turn.

        Args:
            most: groups of conversations of each set, the first ones; 0: all.
        """
        found = []
        for name, conversations in self._experiment.sets.items():
            for group in groups(conversations, batch)[: most or None]:
                turns = [self._index[name, one.id] for one in group]
                found += [[t[turn] for t in turns if turn < len(t)] for turn in range(max(map(len, turns)))]
        return found

    def _entries(self, part: int, variants: Sequence[Variant]) -> list[list[list[Any]]]:
        """[set, conversation, tokens of the prompt, packed text] of each text, by set."""
        experiment, log = self._experiment, self._log
        keys = {name: ("recorded", part, name) for name in experiment.sets}
        if missing := [name for name, key in keys.items() if key not in log]:
            longest = max(experiment.most_tokens(one) for each in experiment.sets.values() for one in each)
            drafters = [shaped(one.draft, self._loaded) for one in variants]
            recorder = Recorder(
                self._loaded.target, self._loaded.params, drafters, pages=-(-(longest + SLACK) // PAGE_SIZE)
            )  # fmt: skip
            contender = RecordingContender(recorder, self._loaded.eos_ids)
            temperature = experiment.plan.temperatures[0]
            for name in missing:
                contender.forget()  # as before a block of runs
                rows: list[list[Any]] = []
                conversations = experiment.sets[name]
                title = f"Recording {name}, {len(variants)} drafter{'s' if len(variants) > 1 else ''}"
                with progress_bar(title, len(conversations), "conversation", shown=self._progress) as bar:
                    for one in conversations:
                        contender.found.clear()
                        experiment.complete(contender, [one], temperature)
                        rows += [[name, one.id, prompt, text.packed()] for prompt, text in contender.found]
                        bar.update()
                log.add(keys[name], rows)
        return [log[key] for key in keys.values()]


def _sharing(variants: Sequence[Variant]) -> list[list[Variant]]:
    """Variants by those that can be recorded in one run, as their state is the same: n-grams of one memory."""
    found: dict[Any, list[Variant]] = {}
    for one in variants:
        draft = one.draft
        memory = (draft.min_match, draft.max_match, draft.capacity) if isinstance(draft, Ngram) else None
        found.setdefault(memory, []).append(one)
    return [*found.values()]

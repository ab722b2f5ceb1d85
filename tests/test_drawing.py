"""Trees as pictures: which boxes and lines there are, what they say, and that they keep out of one another's way."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.patches import PathPatch

from specjax.drawing import LONGEST, draw_steps, draw_tree, label, layout
from specjax.inspection import StepTree

WORDS = (" cat", " sat", " is", " on", " by", " a", "\n", "$x$ $", "né", "", "internationalisation", "�")


def words(ids: list[int]) -> str:
    return "".join(WORDS[i] for i in ids)


def tree_of(tokens, parents, drawn, path, scores=None) -> StepTree:
    depth = [0]
    for parent in parents[1:]:
        depth.append(depth[parent] + 1)
    scores = [-float(d) for d in depth] if scores is None else scores
    ints = [np.array(values, np.int32) for values in (tokens, parents, depth, drawn, path)]
    emitted = ints[3][ints[4]]
    return StepTree(*ints[:3], np.array(scores, np.float32), *ints[3:], emitted)


SMALL = tree_of([0, 1, 2, 3, 4], [-1, 0, 0, 1, 1], [1, 3, -1, 5, -1], [0, 1, 3], [0.0, -0.48, -2.21, -0.89, -6.0])


@pytest.fixture(autouse=True)
def close():
    yield
    plt.close("all")


def tagged(artists) -> dict[str, int]:
    tags = [artist.get_gid() for artist in artists if artist.get_gid()]
    return {tag: tags.count(tag) for tag in tags}


def boxes(ax) -> list[str]:
    return [text.get_text() for text in ax.texts if text.get_gid()]


def test_a_box_for_each_node_and_one_for_the_token_that_was_not_proposed():
    ax = draw_tree(SMALL, words)
    assert boxes(ax) == ["␣cat", "␣sat", "␣is", "␣on", "␣by", "␣a"]
    assert tagged(ax.texts) == {"root": 1, "accepted": 2, "proposed": 2, "drawn": 1}
    lines = [patch for patch in ax.patches if isinstance(patch, PathPatch)]
    assert tagged(lines) == {"accepted": 2, "proposed": 2, "drawn": 1}
    assert [text.get_text() for text in ax.texts if not text.get_gid()] == ["62%", "11%", "41%", "<1%"]
    assert len(ax.get_legend().get_texts()) == 3


def test_a_line_leads_from_the_parent_to_the_child():
    ax = draw_tree(SMALL, words)
    place = layout(SMALL, words)
    for patch, node in zip(ax.patches, range(1, 6), strict=True):
        start, *_, end = patch.get_path().vertices
        parent = place.parents[node]
        np.testing.assert_allclose(start, [place.x[parent] + place.half[parent], place.y[parent]])
        np.testing.assert_allclose(end, [place.x[node] - place.half[node], place.y[node]])


def test_what_was_accepted_is_bold_and_what_was_only_drawn_is_dashed():
    ax = draw_tree(SMALL, words)
    width, dashed = {}, {}
    for patch in ax.patches:
        width[patch.get_gid()], dashed[patch.get_gid()] = patch.get_linewidth(), patch.get_linestyle() != "solid"
    assert width["accepted"] > width["drawn"] > width["proposed"]
    assert dashed == {"accepted": False, "proposed": False, "drawn": True}


def test_likelier_nodes_are_darker():
    ax = draw_tree(SMALL, words)
    light = {text.get_text(): sum(text.get_bbox_patch().get_facecolor()[:3]) for text in ax.texts if text.get_gid()}
    assert light["␣sat"] < light["␣on"] < light["␣is"] < light["␣by"] < light["␣a"] == 3


def test_ranks_are_shown_as_their_order():
    tree = tree_of([0, 1, 2, 3], [-1, 0, 0, 1], [5, 5, 5, 5], [0], [0.0, -272.0, -593.0, -288.0])
    ax = draw_tree(tree, words, shade="order", legend=False)
    assert [text.get_text() for text in ax.texts if not text.get_gid()] == ["#1", "#3", "#2"]
    assert ax.get_legend() is None


def test_labels():
    assert [label(token, words) for token in (0, 6, 7, 8, 9, 11)] == ["␣cat", "↵", "$x$␣$", "né", "∅", "�"]
    assert label(10, words) == "internationalisation"[: LONGEST - 1] + "…"
    assert label(0, lambda ids: "\t\x00 ") == "⇥�␣"
    assert label(17, None) == "17"


def test_tokens_that_look_like_formulas_are_drawn_as_they_are():
    tree = tree_of([7, 7, 7], [-1, 0, 1], [7, 1, -1], [0, 1])
    draw_tree(tree, words, title="$ 1").figure.canvas.draw()


def overlaps(ax) -> int:
    ax.figure.canvas.draw()
    found = [text.get_bbox_patch().get_window_extent() for text in ax.texts if text.get_gid()]
    return sum(a.overlaps(b) for i, a in enumerate(found) for b in found[:i])


WIDE = tree_of([0, *[i % 5 for i in range(1, 40)]], [-1, *[0] * 39], [5] * 40, [0])
DEEP = tree_of([10] * 15, [-1, *range(14)], [10] * 14 + [1], list(range(15)))
BUSHY = tree_of([0, *[i % 5 for i in range(1, 31)]], [-1, *[(i - 1) // 2 for i in range(1, 31)]], [-1] * 31, [0])


@pytest.mark.parametrize("size", [None, (4.0, 3.0), (12.0, 12.0)])
@pytest.mark.parametrize("tree", [SMALL, WIDE, DEEP, BUSHY], ids=["small", "wide", "deep", "bushy"])
def test_boxes_keep_apart_and_inside(tree, size):
    ax = None if size is None else plt.subplots(figsize=size)[1]
    ax = draw_tree(tree, words, ax, legend=size is None)
    assert overlaps(ax) == 0
    room = ax.get_window_extent().padded(1)
    for text in ax.texts:
        box = (text.get_bbox_patch() or text).get_window_extent()
        assert room.x0 <= box.x0 and box.x1 <= room.x1 and room.y0 <= box.y0 and box.y1 <= room.y1, text.get_text()


def test_a_tree_without_a_draw_has_no_box_for_it():
    ax = draw_tree(tree_of([0, 1], [-1, 0], [-1, -1], [0]), words)
    assert boxes(ax) == ["␣cat", "␣sat"]


def test_the_root_alone():
    assert boxes(draw_tree(tree_of([0], [-1], [3], [0]), words)) == ["␣cat", "␣on"]


def test_chains_far_deeper_than_pythons_stack_are_laid_out():
    count = 3000
    place = layout(tree_of([1] * count, [-1, *range(count - 1)], [2] * count, list(range(count))), words)
    assert len(place.x) == count + 1 and np.all(np.diff(place.x) > 0) and set(place.y) == {0.0}


def test_steps_below_one_another():
    figure = draw_steps([SMALL, tree_of([5], [-1], [3], [0]), WIDE], words, first=4)
    assert [ax.get_title(loc="left").split(",")[0] for ax in figure.axes] == [
        "step 4: 2 of 4 drafts accepted", "step 5: 0 of 0 drafts accepted", "step 6: 0 of 39 drafts accepted",
    ]  # fmt: skip
    assert [ax.get_legend() is not None for ax in figure.axes] == [False, False, True]
    assert sum(overlaps(ax) for ax in figure.axes) == 0
    assert len({ax.get_xlim() for ax in figure.axes}) == 1, "one scale"
    assert len({text.get_fontsize() for ax in figure.axes for text in ax.texts if text.get_gid()}) == 1

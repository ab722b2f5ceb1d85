"""SVG pictures of trees: boxes, lines, labels and layout."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import jax.numpy as jnp
import numpy as np
import pytest
from generate_helpers import saved_model

from specjax import chain
from specjax.drafters import none_drafter
from specjax.state import StepTree
from specjax.viz.__main__ import main, most_telling
from specjax.viz.drawing import HEIGHT, LONGEST, draw_steps, draw_tree, label, layout

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


def groups(drawing: str) -> list[ET.Element]:
    """The groups of boxes, in order of nodes."""
    return [g for g in ET.fromstring(drawing).iter(NAME + "g") if g.find(NAME + "rect") is not None]


NAME = "{http://www.w3.org/2000/svg}"


def texts(drawing: str, kind: str) -> list[str]:
    return [t.text or "" for t in ET.fromstring(drawing).iter(NAME + "text") if t.get("class") == kind]


def test_boxes_labels_and_shades():
    drawing = draw_tree(SMALL, words)
    assert texts(drawing, "token") == ["␣cat", "␣sat", "␣is", "␣on", "␣by", "␣a"]
    kinds = ["root", "accepted", "proposed", "accepted", "proposed", "drawn"]
    assert [g.get("class") for g in groups(drawing)] == kinds
    assert [g.find(NAME + "path") is not None for g in groups(drawing)] == [False, True, True, True, True, True]
    assert texts(drawing, "note") == ["62%", "11%", "41%", "<1%"] and len(texts(drawing, "legend")) == 3

    shade = [g.find(NAME + "rect").get("fill-opacity") for g in groups(draw_tree(SMALL, words))]
    assert shade[0] is shade[5] is None and shade[1] > shade[3] > shade[2] > shade[4]


def test_ranks_and_markup():
    tree = tree_of([0, 1, 2, 3], [-1, 0, 0, 1], [5, 5, 5, 5], [0], [0.0, -272.0, -593.0, -288.0])
    assert texts(draw_tree(tree, words), "note") == ["#1", "#3", "#2"]

    drawing = draw_tree(SMALL, lambda ids: '<b>&"', title="<i>")
    assert set(texts(drawing, "token")) == {'<b>&"'} and texts(drawing, "heading") == ["<i>"]


def test_labels():
    assert [label(token, words) for token in (0, 6, 7, 8, 9, 11)] == ["␣cat", "↵", "$x$␣$", "né", "∅", "�"]
    assert label(10, words) == "internationalisation"[: LONGEST - 1] + "…"
    assert label(0, lambda ids: "\t\x00 ") == "⇥�␣"
    assert label(17, None) == "17"


WIDE = tree_of([0, *[i % 5 for i in range(1, 40)]], [-1, *[0] * 39], [5] * 40, [0])
DEEP = tree_of([10] * 15, [-1, *range(14)], [10] * 14 + [1], list(range(15)))
BUSHY = tree_of([0, *[i % 5 for i in range(1, 31)]], [-1, *[(i - 1) // 2 for i in range(1, 31)]], [-1] * 31, [0])


@pytest.mark.parametrize("tree", [SMALL, WIDE, DEEP, BUSHY], ids=["small", "wide", "deep", "bushy"])
def test_boxes_do_not_overlap(tree):
    drawing = draw_tree(tree, words)
    width, height = (float(ET.fromstring(drawing).get(name)) for name in ("width", "height"))
    place = layout(tree, words)
    assert place.size[0] <= width and place.size[1] <= height
    boxes = list(zip(place.x, place.y, place.half, strict=True))
    for i, (x, y, half) in enumerate(boxes):
        assert x - half >= 0 and x + half <= place.size[0] + 0.1
        assert all(abs(x - a) >= half + b or abs(y - c) > HEIGHT for a, c, b in boxes[:i])


@pytest.mark.parametrize(("drawn", "shown"), [(3, ["␣cat", "␣on"]), (-1, ["␣cat"])])
def test_root_only(drawn, shown):
    assert texts(draw_tree(tree_of([0], [-1], [drawn], [0]), words), "token") == shown


def test_deep_chains():
    count = 3000
    place = layout(tree_of([1] * count, [-1, *range(count - 1)], [2] * count, list(range(count))), words)
    assert len(place.x) == count + 1 and np.all(np.diff(place.x) > 0) and set(place.y) == {0.0}


def test_several_steps():
    drawing = draw_steps([SMALL, tree_of([5], [-1], [3], [0]), WIDE], words, first=4)
    assert [text.split(",")[0] for text in texts(drawing, "heading")] == [
        "step 4: 2 of 4 drafts accepted", "step 5: 0 of 0 drafts accepted", "step 6: 0 of 39 drafts accepted",
    ]  # fmt: skip
    assert len(texts(drawing, "legend")) == 3 and drawing._repr_svg_() == drawing


def test_default_step():
    assert most_telling([WIDE, DEEP, SMALL, BUSHY]) == 2


def repeated(target):
    """A drafter of one's own: chains that repeat the root."""

    def propose(params, state, context):
        tokens = jnp.broadcast_to(context.root[:, None], (context.root.shape[0], 2))
        length = jnp.where(context.active, 2, 0)
        return chain(context.root, tokens, length, jnp.zeros(tokens.shape, jnp.float32)), state

    return none_drafter()._replace(name="REPEATED", width=3, depth=2, propose=propose, topk=1)


def test_command_draws_trees_of_any_drafter(tmp_path, capsys):
    model, picture = saved_model(tmp_path / "model", max_position_embeddings=256), tmp_path / "tree.svg"
    command = ["--model", model, "--prompt", "hello", "--output", str(picture), "--max-new-tokens", "12"]
    assert main([*command, "--draft", "test_viz_drawing:repeated"]) == 0
    assert len(texts(picture.read_text(encoding="utf-8"), "token")) >= 3 and "wrote step" in capsys.readouterr().out
    for draft in ("test_viz_drawing:repeated", "ngram"):
        with pytest.raises(SystemExit):
            main([*command, "--draft", draft, "--tree", "1", "1", "2"])
        assert "--tree is for algorithms with steps, top-k and nodes" in capsys.readouterr().err

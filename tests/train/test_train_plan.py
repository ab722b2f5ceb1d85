"""`specjax train --dry-run`: bytes against those of a run, recorded temporaries, and the files for targets of 8B."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from config_tables import described
from train_helpers import arguments

from specjax import checkpoint, settings
from specjax.gpu import DEVICES
from specjax.train import plan, run
from specjax.train.__main__ import main
from specjax.train.options import TrainOptions
from specjax.train.output import RunFolder

FOLDER = Path(__file__).parents[2] / "configs/train"
FILES = sorted(FOLDER.glob("*.toml"))
LARGE = [file for file in FILES if "8b" in file.stem]


def options(argv: list[Any]) -> TrainOptions:
    parser = settings.Parser()
    settings.add_flags(parser, TrainOptions())
    return settings.parse(parser, [*map(str, argv)], TrainOptions())[1]


def rows(document: dict[str, Any]) -> dict[str, int]:
    return {row["name"]: row["bytes"] for row in document["memory"]}


@pytest.fixture
def dry_run(capsys):
    """dry_run(*flags) -> status, the printed document, stdout or stderr."""

    def call(*argv: Any):
        status = main(["--dry-run", *map(str, argv)])
        printed = capsys.readouterr()
        return status, json.loads(printed.out.splitlines()[-1]) if printed.out else None, printed.out or printed.err

    return call


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_file_is_read(file):
    chosen = options(["--config", file])
    assert chosen.model.model and chosen.run.output == f"runs/{file.stem}"


@pytest.mark.parametrize("file", LARGE, ids=lambda file: file.stem)
def test_files_for_8b_on_an_h200(file, tmp_path, dry_run):
    chosen = options(["--config", file])
    folder = described(chosen.model.model, tmp_path)
    status, document, text = dry_run("--config", file, "--model", folder, "--assume-device", "h200")
    sizes = rows(document)
    assert status == 0 and "fits: " in text and f" hours: {document['tokens'] / 1e6:,.1f} million tokens" in text
    assert 16.0e9 < sizes["target weights"] < 16.5e9  # 8.0 and 8.2 billion weights
    assert sizes["gradients"] == 2 * sizes["head weights"]  # of a part, and their sum
    assert sizes["optimizer state"] == pytest.approx(2 * sizes["head weights"], rel=1e-6)
    assert document["total"] == sum(sizes.values()) and [*tmp_path.iterdir()] == [folder]
    # A token takes two products for each weight of the target, and six for each of the head in each round or block.
    forwards = 7 if "eagle3" in file.stem else 1
    weights = sizes["target weights"] / 2, forwards * sizes["head weights"] / 4
    products = document["products"] / document["tokens"] / (2 * weights[0] + 6 * weights[1])
    assert 0.8 < products < 2.0
    rate = document["products"] / document["hours"] / 3600
    assert rate == pytest.approx(DEVICES["H200"].flops * plan.PEAK_SHARE, rel=0.01)


def test_a_device_without_room(tmp_path, dry_run):
    folder = described("Qwen/Qwen3-8B", tmp_path)
    status, document, text = dry_run("--config", LARGE[-1], "--model", folder, "--assume-device", "L4")
    assert status == 1 and document["missing"] > 0 and "give a smaller --batch-size" in text


def test_this_device_and_refusals(model, dry_run, capsys):
    status, document, text = dry_run("--model", model)
    assert status == 0 and document["device"] is None and "--assume-device with one of" in text
    for flags, message in (
        (("--model", model, "--draft-vocab-size", 10**6), "--draft-vocab-size 1000000 is more than"),
        (("--model", model, "--quantization", "int8"), "--quantization int8 does not apply to training"),
        (("--model", model / "none"), "there is no such file or folder"),
    ):
        status, _, text = dry_run(*flags)
        assert status == 2 and message in text
    with pytest.raises(SystemExit):
        main(["--model", str(model), "--assume-device", "H200"])
    assert "--assume-device needs --dry-run" in capsys.readouterr().err


BLOCK = {
    "rounds": None, "measure_steps": 3, "block_size": 4, "draft_layers": 2, "mask_token": 1, "aux_layers": ("1", "2"),
}  # fmt: skip
DRAFTS: dict[str, dict[str, Any]] = {
    "EAGLE3": {"draft_vocab_size": 40, "accumulate": 2}, "EAGLE": {"rounds": None}, "MTP": {}, "DFLASH": BLOCK,
    "DSPARK": BLOCK, "DFLASH2": BLOCK | {"draft_vocab_size": 40},
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("draft", DRAFTS)
def test_bytes_of_a_run(model, data, tmp_path, draft, dtype):
    chosen = options(arguments(model, data, tmp_path / "run", draft=draft, compute_dtype=dtype, **DRAFTS[draft]))
    sizes = rows(plan.make_plan(chosen, None))
    inputs = run.prepare(chosen)
    params = checkpoint.load_params(inputs.source.files, inputs.source.config, quantization="none", progress=False)
    with RunFolder(tmp_path / "run", run.identity(chosen, inputs)) as folder:
        trainer = run.Trainer(chosen, inputs, params, folder, command="")
        teacher = trainer.features.get(trainer.row_numbers(0)[: chosen.run.batch_size])
    held = {
        "target weights": trainer.target_params, "head weights": trainer.state.params,
        "optimizer state": trainer.state.optimizer, "features": teacher,
    }  # fmt: skip
    assert {name: sizes[name] for name in held} == {
        name: sum(leaf.nbytes for leaf in jax.tree.leaves(tree)) for name, tree in held.items()
    }
    assert sizes["serving weights"] == (0 if dtype == "float32" else plan.tree_bytes(params))


EAGLE3 = ["--draft", "EAGLE3", "--aux-layers", 1, 0, 2, "--draft-vocab-size", 4096, "--rounds", 3]
DFLASH = [
    "--draft", "DFLASH", "--aux-layers", 1, 0, 2, "--draft-vocab-size", 4096, "--draft-layers", 2, "--block-size", 8,
    "--anchors", 16,
]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "megabytes"),
    [
        (EAGLE3, 108), ([*EAGLE3, "--rounds", 6], 194), ([*EAGLE3, "--batch-size", 8], 204),
        ([*EAGLE3, "--row-length", 256], 240), ([*EAGLE3, "--draft-vocab-size", 8000], 144), (DFLASH, 69),
        ([*DFLASH, "--anchors", 32], 128), ([*DFLASH, "--block-size", 16], 132), ([*DFLASH, "--draft-layers", 4], 118),
    ],
)  # fmt: skip
def test_activations(tmp_path, flags, megabytes):
    """Against temporaries of steps compiled for a CPU, in float32 (`memory_analysis`, jax 0.10.2, 2026-11-30)."""
    sizes = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **sizes}))
    given = ["--model", tmp_path, "--batch-size", 4, "--row-length", 128, "--compute-dtype", "float32"]
    found = rows(plan.make_plan(options([*given, "--measure-steps", 3, *flags]), None))["activations"] / 1e6
    assert megabytes / 2 < found < megabytes * 2


def test_sizes_of_an_earlier_head(model, data, tmp_path):
    first = arguments(model, data, tmp_path / "run", draft_vocab_size=40, steps=2)
    assert main(first) == 0
    given = arguments(model, data, tmp_path / "next", init_from=tmp_path / "run/head")
    name = "head weights"
    assert rows(plan.make_plan(options(given), None))[name] == rows(plan.make_plan(options(first), None))[name]


def test_products():
    def work(x: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda carry, _: (carry @ carry, None), x, None, length=5)
        return jax.lax.cond(x.sum() > 0, lambda y: y @ y @ y, lambda y: y @ y, x)

    assert plan.count_products(jax.make_jaxpr(work)(jnp.ones((8, 8))).jaxpr) == 7 * 2 * 8**3

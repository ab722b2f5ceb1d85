"""`benchmarks/coupling.py` on a tiny model that drafts for itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from generate_helpers import saved_model


def test_a_model_that_drafts_for_itself(tmp_path, monkeypatch, capsys):
    """With the target's noise all is accepted, in chains whatever the request cuts off; without it, at T = 0 alone."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import coupling

    model = saved_model(tmp_path / "model", max_position_embeddings=256)
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(i), "prompt": f"{i} 1 2 {i}"}) + "\n" for i in range(2)))
    flags = ["--model", model, "--algorithm", "STANDALONE", "--draft", model, "--options", "quantization=none"]
    flags += ["--trees", "2,1,3", "2,2,5"]
    flags += ["--sets", str(prompts), "--settings", "0", "1", "0.9/0.8/9", "--max-new-tokens", "25"]
    monkeypatch.setattr(sys, "argv", ["coupling.py", *flags])
    coupling.main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
    histograms = {(row["setting"], row["method"]): row["histogram"] for row in rows}
    assert len(histograms) == 3 * 4
    for setting in ("0", "1", "0.9/0.8/9"):
        for tree in ("2/1/3", "2/2/5")[: 1 if "/" in setting else 2]:
            steps = histograms[setting, f"{tree} noise"]
            assert sum(steps) >= 8 and sum(steps[:2]) <= 2, "all but the last step of each text accept all"
    assert histograms["0", "2/1/3 none"] == histograms["0", "2/1/3 noise"]
    assert histograms["0.9/0.8/9", "2/2/5 none"] == histograms["0.9/0.8/9", "2/2/5 noise"], (
        "trees of rows that truncate"
    )
    assert sum(histograms["1", "2/1/3 none"]) > sum(histograms["1", "2/1/3 noise"])

"""The tables of docs/scale.md, written from records of `scale.py` and `router_cache.py`. No figure is computed here but
ratios of two in one record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from full_table import put, table

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"


def mark(name: str) -> str:
    """What stands before a table on the page."""
    return f"<!-- scale: {name} -->"


def fill(sections: Mapping[str, str], page: Path = PAGE) -> None:
    text = page.read_text(encoding="utf-8")
    for name, section in sections.items():
        text = put(text, section, mark(name))
    page.write_text(text, encoding="utf-8")


def write_page(record: str, document: Mapping[str, Any], page: Path = PAGE) -> None:
    """Fills the page from a record of either script; `record`: the file's name under results/."""
    fill(sections(record, document), page)


def source(record: str, document: Mapping[str, Any]) -> str:
    return f"[Record](../benchmarks/results/{record}) of commit {document['commit'][:7]}: `{document['command']}`.\n"


def sections(record: str, document: Mapping[str, Any]) -> dict[str, str]:
    """By the names of their marks. Tables of speed and cost are of the record's first device."""
    if "log" in document:
        return {f"router, {document['log']['name']}": router(record, document)}
    if document["fabric"]["direct"] is not None:
        return {"one kernel": "\n".join([one_kernel(document["rows"]), source(record, document)])}
    first = document["devices"][0]["name"]
    found = {
        "record": source(record, document),
        "constants": constants(document),
        "all-reduce": all_reduce(document["all_reduce"]),
        "drafts": drafts(document["models"]),
        "memory": memory(document["rows"]),
        "experts": experts(document["experts"]),
        "replicas": replicas([row for row in document["arrangements"] if row["device"] == first]),
    }
    for model in document["models"]:
        rows = [row for row in document["rows"] if row["model"] == model["name"] and row["device"] == first]
        found[model["name"]] = "\n".join(
            [
                grid(rows, "tokens/s", "tokens_per_second", "{:,.0f}"),
                grid(rows, "$ a million", "dollars_per_million", "{:.2f}"),
            ]
        )
    return found


def constants(document: Mapping[str, Any]) -> str:
    rows = [
        [device["name"], f"{device['memory'] / 1e9:.0f} GB", f"{device['bandwidth'] / 1e12:g} TB/s",
         f"{device['flops'] / 1e12:g} TFLOP/s", f"${document['prices'][device['name']]:g}"]
        for device in document["devices"]
    ]  # fmt: skip
    fabric = document["fabric"]
    return "\n".join([
        table(["GPU", "memory", "its bandwidth", "products in bfloat16", "price of an hour"], rows),
        table(
            ["exchange", "value"],
            [["NVLink, each way, reached", f"{fabric['link'] / 1e9:g} GB/s"],
             ["InfiniBand, each way, of each GPU's adapter", f"{fabric['network'] / 1e9:g} GB/s"],
             ["GPUs of a host", str(fabric["per_host"])],
             *([f"NCCL {name}: start; step over NVLink; between hosts; share of the bandwidth",
                f"{1e6 * start:g}; {1e6 * link:g}; {1e6 * network:g} us; {share:.2g}"]
               for name, _, start, link, network, share, *_ in fabric["protocols"])],
        ),
    ])  # fmt: skip


def all_reduce(rows: Iterable[Mapping[str, Any]]) -> str:
    return table(
        ["published by", "GPUs", "bytes", "published", "estimated"],
        [[row["source"], str(row["devices"]), f"{row['bytes']:,}", f"{row['measured_us']:,.1f} us",
          f"{row['estimated_us']:,.1f} us"] for row in rows],
    )  # fmt: skip


def drafts(models: Iterable[Mapping[str, Any]]) -> str:
    return table(
        ["model", "weights", "draft", "first draft accepted", "each further one", "source", "exchanges a plain step"],
        [[row["name"], row["weights"], row["draft"], f"{row['first']:.2f}", f"{row['later']:.2f}", row["source"],
          f"{row['exchanges_tp8']} (L = {row['layers']})"] for row in models],
    )  # fmt: skip


def one_kernel(rows: Iterable[Mapping[str, Any]], batches: tuple[int, ...] = (1, 32, 256)) -> str:
    """Tokens/s without drafts where several devices are one host."""
    cells: dict[tuple[str, int], dict[int, str]] = {}
    for row in rows:
        if row["batch"] in batches and row["tp"] in (2, 4, 8):
            rate = f"{row['plain']['tokens_per_second']:,.0f}" if "plain" in row else "-"
            cells.setdefault((row["model"], row["batch"]), {})[row["tp"]] = rate
    degrees = list(dict.fromkeys(tp for found in cells.values() for tp in found))
    return table(
        ["tokens/s, exchanges in one kernel", "batch", *(f"tp {tp}" for tp in degrees)],
        [[model, str(batch), *(found[tp] for tp in degrees)] for (model, batch), found in cells.items()],
    )


def memory(rows: Iterable[Mapping[str, Any]]) -> str:
    cells: dict[tuple[str, str], dict[int, str]] = {}
    for row in rows:
        fits = "do not fit" if row["fits"] < 0 else f"{row['fits']:,}"
        cells.setdefault((row["model"], row["device"]), {})[row["tp"]] = f"{row['weights_gb']:.1f} GB: {fits}"
    degrees = list(dict.fromkeys(tp for found in cells.values() for tp in found))
    return table(
        ["weights on a GPU: requests that fit", *(f"tp {tp}" for tp in degrees)],
        [[f"{model}, {device}", *(found[tp] for tp in degrees)] for (model, device), found in cells.items()],
    )


def experts(rows: Iterable[Mapping[str, Any]]) -> str:
    return table(
        ["batch", "experts of a layer that are read", "weights that a step reads on each of 8 GPUs"],
        [[str(row["batch"]), f"{row['experts']:.0f} of {row['of']}", f"{row['weights_gb']:.1f} GB"] for row in rows],
    )


def grid(rows: Iterable[Mapping[str, Any]], title: str, key: str, form: str) -> str:
    """Batches by devices: without drafts, with them, and in brackets how many."""
    cells = {(row["batch"], row["tp"]): row for row in rows}
    batches, degrees = (list(dict.fromkeys(pair[i] for pair in cells)) for i in range(2))

    def cell(row: Mapping[str, Any]) -> str:
        if "plain" not in row:
            return "-"
        plain, drafted = (form.format(row[name][key]) for name in ("plain", "drafted"))
        return f"{plain} → {drafted} ({row['drafted']['drafts']})" if row["drafted"]["drafts"] else f"{plain} (0)"

    return table(
        [f"{title}, batch", *(f"tp {tp}" for tp in degrees)],
        [[str(batch), *(cell(cells[batch, tp]) for tp in degrees)] for batch in batches],
    )


def replicas(rows: Iterable[Mapping[str, Any]]) -> str:
    """The fastest arrangement for each batch, and how much faster than all GPUs as one."""
    cells: dict[int, dict[str, str]] = {}
    for row in rows:
        known = {int(tp): rate for tp, rate in row["tokens_per_second"].items() if rate}
        text = "-"
        if known:
            best = max(known, key=lambda tp: known[tp])
            whole = known.get(row["gpus"])
            lead = f" ({known[best] / whole:.2f}x)" if whole and best != row["gpus"] else ""
            text = f"{row['gpus'] // best} x tp {best}{lead}"
        cells.setdefault(row["batch"], {})[f"{row['model']}, {row['gpus']} GPUs"] = text
    columns = list(dict.fromkeys(name for found in cells.values() for name in found))
    return table(
        ["requests over all", *columns],
        [[str(batch), *(found[name] for name in columns)] for batch, found in cells.items()],
    )


def router(record: str, document: Mapping[str, Any]) -> str:
    """Policies side by side: the share of prompts' tokens that came from a cache, and the time to the first token."""
    cells = {(row["workers"], row["cache_tokens"], row["policy"]): row for row in document["rows"]}
    names = list(dict.fromkeys(policy for _, _, policy in cells))

    def cell(row: Mapping[str, Any]) -> str:
        return f"{row['cached_share']:.1%}, {row['first_token_p50']:.3g} / {row['first_token_p90']:.3g} s"

    def fewer(workers: int, tokens: int) -> str:
        computed = [cells[workers, tokens, name]["computed_tokens"] for name in ("round_robin", "cache_aware")]
        return f"{computed[1] / computed[0]:.2f}"

    rows = [
        [str(workers), f"{tokens:,}", *(cell(cells[workers, tokens, name]) for name in names), fewer(workers, tokens),
         f"{cells[workers, tokens, 'cache_aware']['busiest_over_mean']:.2f}"]
        for workers, tokens in dict.fromkeys((w, t) for w, t, _ in cells)
    ]  # fmt: skip
    log = document["log"]
    head = (
        f"{log['requests']:,} requests, {log['prompt_tokens']:,} tokens of prompts, of which one endless cache would "
        f"hold {document['most_reuse']:.1%}.\n"
    )
    titles = ["workers", "tokens of a pool", *names, "tokens computed, cache_aware / round_robin",
              "busiest worker / mean, cache_aware"]  # fmt: skip
    return "\n".join([head, table(titles, rows), source(record, document)])

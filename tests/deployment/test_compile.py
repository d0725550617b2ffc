"""Deployed models under torch.compile: one graph, with the outputs of the model as it is."""

import json
import os
import subprocess
import sys
from pathlib import Path

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


def test_a_deployed_model_is_one_graph() -> None:
    """Traced by dynamo, which refuses what breaks a graph; what compiles it then is torch's."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    for name, (graphs, error, nodes) in json.loads(done.stdout).items():
        assert graphs == 1 and error < 1e-5 and nodes > 8, name

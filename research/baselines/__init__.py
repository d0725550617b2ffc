"""Rivals of flexrank, each in one file written from its paper, behind one interface.

A rank method (`method.RankMethod`) replaces a layer's weight W (m × n) by k = min(m, n) ordered rank-one components, so
that a prefix of them is the layer at that rank. It consists of two functions and a rule:

    collect(model, batches, layers, loss) -> one statistic for each layer, from the calibration data alone
    factors(weight, statistic) -> Factors(u (k × m), v (k × n), energies), W ≈ uᵀ v, in float64
    ranks(model, energies, budgets, measures) -> the ranks the paper gives each size; uniform if the paper gives none

The rule may evaluate the model with `measures`: the task's loss and the distance from the base model, on the samples of
flexrank's probe.

`method.decompose_(model, …)` applies a method to a whole model, whose layers become flexrank's elastic layers: probing,
allocation, sizes and scores are then the same for every method, ours included. `loss(output, batch)` is the task's
loss, summed over the samples of the batch.

| name | weights minimise, at rank r | statistic | ranks |
|---|---|---|---|
| svd | ‖W − W_r‖ | none | uniform |
| fwsvd | ‖(W − W_r) I^{1/2}‖, I the inputs' Fisher information | squared gradients | uniform |
| asvd | ‖(W − W_r) S‖, S the inputs' mean magnitude to the power of 1/2 | mean magnitudes | a bound on losses |
| drone | ‖(W − W_r) X‖, by the SVDs of W and X | second moment | layer after layer, parts of an allowed loss |
| svd-llm | the same, by the Cholesky factor of X Xᵀ | second moment | uniform |
| svd-llm-v2 | the same, by the SVD of X Xᵀ | second moment | by the logarithm of layers' losses |
| lems | ‖G^{1/2} (W − W_r) X‖, G the outputs' gradients' moment | both moments, shrunk | integer program |

DRONE, both SVD-LLMs and flexrank's DataSVD share one optimum; they differ by rounding and in what they do where X Xᵀ is
singular. LEMS's factors are those of flexrank's `fisher` except for how the moments are regularised. What the papers
add by training, such as LoRA, and by updates between layers is left out.

A size method (`method.SizeMethod`) makes a separate model for each budget with `make(model, batches, layers, loss,
budget)` and counts the parameters it stores; no size is a part of another. `obstacle(model, layers)` says why it does
not apply. A method whose sizes are ranks also has `make_at(model, batches, layers, loss, ranks)`.

What a paper leaves free, such as ASVD's α, is in `trials`: four settings, of which the one that is best on the tuning
half is compared. A rule that gives each layer a share of its parameters loses some by rounding down to whole ranks;
`method.filled_ranks`, which is ours, spends what is left of the budget.

| name | what is smaller | how |
|---|---|---|
| pifa | every layer's rank | factors refitted layer after layer, to inputs from the model compressed so far |
| slicegpt | the residual stream | its principal components; residual connections become matrices |
| a3 | dimensions of heads, channels of feed-forwards | scores, values and outputs, each approximated separately |
"""

from research.baselines.a3 import A3
from research.baselines.asvd import ASVD
from research.baselines.drone import DRONE
from research.baselines.fwsvd import FWSVD
from research.baselines.lems import LEMS
from research.baselines.method import RankMethod, SizeMethod
from research.baselines.pifa import PIFA
from research.baselines.plain import SVD
from research.baselines.slicegpt import SLICEGPT
from research.baselines.svd_llm import SVD_LLM
from research.baselines.svd_llm_v2 import SVD_LLM_V2

RANK_METHODS: dict[str, RankMethod] = {
    method.name: method for method in (SVD, FWSVD, ASVD, DRONE, SVD_LLM, SVD_LLM_V2, LEMS)
}  # fmt: skip
SIZE_METHODS: dict[str, SizeMethod] = {method.name: method for method in (PIFA, SLICEGPT, A3)}
RIVALS: dict[str, RankMethod | SizeMethod] = {**RANK_METHODS, **SIZE_METHODS}

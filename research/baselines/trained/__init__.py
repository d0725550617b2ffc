"""Rivals that train, each in one file written from its paper, behind one interface.

A trained method is one function: `sizes(task, settings)` yields at each budget, largest first, a model and the
parameters of its deployed form, or None if the method has no size that small. The task is the same for all: the base
model, calibration, training batches, and the number of steps of all sizes together. A method that trains each size
separately has `steps_per_size` for each.

Each method has four rates. They are tried on the tuning half, with more while a best one is the smallest or the
largest. The best one is compared, and for sizes that are trained separately the best one of each. All methods distil
the base model, as ours does, also those whose papers train on labels.

| name | what it trains | one artefact |
|---|---|---|
| flexrank | all sizes of factors weighted by gradients too, joint ranks, `balanced` | yes |
| flexrank, printed | all sizes of DataSVD's factors, ranks and steps as the paper prints them | yes |
| independent | the same factors and ranks as flexrank, each size separately | no |
| svd-llm + lora | adapters on U, then on V, of SVD-LLM's factors at uniform ranks, each size separately | no |
| svd-llm + lora, joint | the same at joint ranks | no |
| acip | scores of singular values, then adapters that all sizes share | yes |
| llm-pruner | adapters on the remaining heads and channels, each size separately | no |
| matformer | all weights, at nested widths | yes |
| layerskip | all weights, at every depth | yes |
"""

from research.baselines.trained.acip import ACIP
from research.baselines.trained.layerskip import LAYERSKIP
from research.baselines.trained.llm_pruner import LLM_PRUNER
from research.baselines.trained.lora import SVD_LLM_LORA, SVD_LLM_LORA_JOINT
from research.baselines.trained.matformer import MATFORMER
from research.baselines.trained.ranks import INDEPENDENT, OURS, PRINTED
from research.baselines.trained.task import TrainedMethod

_METHODS = (OURS, PRINTED, INDEPENDENT, SVD_LLM_LORA, SVD_LLM_LORA_JOINT, ACIP, LLM_PRUNER, MATFORMER, LAYERSKIP)
TRAINED_METHODS: dict[str, TrainedMethod] = {method.name: method for method in _METHODS}

"""flexrank: one pretrained network becomes one elastic network, and every size is cut from its one set of weights.

The names below are the public interface; anything else is private, or a module one names on purpose. Importing this
package also teaches transformers, without importing it, to load what `deploy` made.
"""

from flexrank import hf
from flexrank.allocation import allocate_ranks
from flexrank.artefacts import load_deployed, save_deployed
from flexrank.calibration import collect_moments, collect_rows, load_moments, save_moments
from flexrank.checkpoint import inspect_artefact, load_elastic, save_elastic
from flexrank.decomposition import decompose_
from flexrank.deployment import deploy, export, fit_profile
from flexrank.distillation import distill_, distillation_evaluator
from flexrank.errors import FlexrankError
from flexrank.layers import GaugeAlignedConv2d, GaugeAlignedLinear, NestedConv2d, NestedLinear
from flexrank.objectives import EmbeddingObjective, FeatureObjective, LogitObjective, objective_for
from flexrank.profiles import ProfileChain, RankProfile, SensitivityTable
from flexrank.sensitivity import curvature_sensitivity, probe_sensitivity
from flexrank.surgery import nested_layers, select_layers, set_profile, use_profile

__all__ = [
    "EmbeddingObjective",
    "FeatureObjective",
    "FlexrankError",
    "GaugeAlignedConv2d",
    "GaugeAlignedLinear",
    "LogitObjective",
    "NestedConv2d",
    "NestedLinear",
    "ProfileChain",
    "RankProfile",
    "SensitivityTable",
    "allocate_ranks",
    "collect_moments",
    "collect_rows",
    "curvature_sensitivity",
    "decompose_",
    "deploy",
    "distill_",
    "distillation_evaluator",
    "export",
    "fit_profile",
    "hf",
    "inspect_artefact",
    "load_deployed",
    "load_elastic",
    "load_moments",
    "nested_layers",
    "objective_for",
    "probe_sensitivity",
    "save_deployed",
    "save_elastic",
    "save_moments",
    "select_layers",
    "set_profile",
    "use_profile",
]

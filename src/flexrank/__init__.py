"""flexrank: one pretrained network becomes one elastic network, and every size is cut from its one set of weights."""

from flexrank.calibration import collect_moments, collect_rows, load_moments, save_moments
from flexrank.decomposition import decompose_
from flexrank.distillation import distill_, distillation_evaluator
from flexrank.errors import FlexrankError
from flexrank.layers import GaugeAlignedConv2d, GaugeAlignedLinear, NestedConv2d, NestedLinear
from flexrank.objectives import EmbeddingObjective, FeatureObjective, LogitObjective, objective_for
from flexrank.profiles import Candidate, ProfileChain, RankProfile, SensitivityTable
from flexrank.sensitivity import probe_sensitivity
from flexrank.surgery import nested_layers, select_layers, set_profile, use_profile

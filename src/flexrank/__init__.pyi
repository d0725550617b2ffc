# What each public name is and where it lives; `__init__.py` reads this file, and imports a name when it is first used.
from . import hf as hf
from .allocate import allocate_ranks as allocate_ranks
from .artefacts.deployed import load_deployed as load_deployed
from .artefacts.deployed import save_deployed as save_deployed
from .artefacts.elastic import inspect_artefact as inspect_artefact
from .artefacts.elastic import load_elastic as load_elastic
from .artefacts.elastic import save_elastic as save_elastic
from .calibrate import (
    collect_moments as collect_moments,
)
from .calibrate import (
    collect_rows as collect_rows,
)
from .calibrate import (
    load_moments as load_moments,
)
from .calibrate import (
    save_moments as save_moments,
)
from .decompose import decompose_ as decompose_
from .deployment import deploy as deploy
from .deployment import export as export
from .deployment.fitting import fit_plans as fit_plans
from .deployment.fitting import fit_profile as fit_profile
from .deployment.latency import (
    observe_load as observe_load,
)
from .deployment.latency import (
    time_chain as time_chain,
)
from .deployment.timing import (
    Load as Load,
)
from .deployment.timing import (
    TimeTable as TimeTable,
)
from .distill import distill_ as distill_
from .distill import distillation_evaluator as distillation_evaluator
from .distill.objectives import (
    EmbeddingObjective as EmbeddingObjective,
)
from .distill.objectives import (
    FeatureObjective as FeatureObjective,
)
from .distill.objectives import (
    LogitObjective as LogitObjective,
)
from .distill.objectives import (
    objective_for as objective_for,
)
from .errors import FlexrankError as FlexrankError
from .nn.elastic import NestedConv2d as NestedConv2d
from .nn.elastic import NestedLinear as NestedLinear
from .nn.gauge_aligned import GaugeAlignedConv2d as GaugeAlignedConv2d
from .nn.gauge_aligned import GaugeAlignedLinear as GaugeAlignedLinear
from .nn.select import select_layers as select_layers
from .nn.switch import nested_layers as nested_layers
from .nn.switch import set_profile as set_profile
from .nn.switch import use_profile as use_profile
from .probe import curvature_sensitivity as curvature_sensitivity
from .probe import probe_sensitivity as probe_sensitivity
from .profiles import ProfileChain as ProfileChain
from .profiles import RankProfile as RankProfile
from .profiles import SensitivityTable as SensitivityTable

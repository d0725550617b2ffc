# What each public name is and where it lives; `__init__.py` reads this file, and imports a name when it is first used.
from . import hf as hf
from .allocation import allocate_ranks as allocate_ranks
from .artefacts import load_deployed as load_deployed
from .artefacts import save_deployed as save_deployed
from .calibration import (
    collect_moments as collect_moments,
)
from .calibration import (
    collect_rows as collect_rows,
)
from .calibration import (
    load_moments as load_moments,
)
from .calibration import (
    save_moments as save_moments,
)
from .checkpoint import inspect_artefact as inspect_artefact
from .checkpoint import load_elastic as load_elastic
from .checkpoint import save_elastic as save_elastic
from .decomposition import decompose_ as decompose_
from .deployment import deploy as deploy
from .deployment import export as export
from .distillation import distill_ as distill_
from .distillation import distillation_evaluator as distillation_evaluator
from .errors import FlexrankError as FlexrankError
from .fitting import fit_plans as fit_plans
from .fitting import fit_profile as fit_profile
from .latency import (
    observe_load as observe_load,
)
from .latency import (
    time_chain as time_chain,
)
from .layers import (
    GaugeAlignedConv2d as GaugeAlignedConv2d,
)
from .layers import (
    GaugeAlignedLinear as GaugeAlignedLinear,
)
from .layers import (
    NestedConv2d as NestedConv2d,
)
from .layers import (
    NestedLinear as NestedLinear,
)
from .objectives import (
    EmbeddingObjective as EmbeddingObjective,
)
from .objectives import (
    FeatureObjective as FeatureObjective,
)
from .objectives import (
    LogitObjective as LogitObjective,
)
from .objectives import (
    objective_for as objective_for,
)
from .profiles import ProfileChain as ProfileChain
from .profiles import RankProfile as RankProfile
from .profiles import SensitivityTable as SensitivityTable
from .sensitivity import curvature_sensitivity as curvature_sensitivity
from .sensitivity import probe_sensitivity as probe_sensitivity
from .surgery import (
    nested_layers as nested_layers,
)
from .surgery import (
    select_layers as select_layers,
)
from .surgery import (
    set_profile as set_profile,
)
from .surgery import (
    use_profile as use_profile,
)
from .timing import (
    Load as Load,
)
from .timing import (
    TimeTable as TimeTable,
)

"""Second moments of activations and gradients: their widths, and the bytes that they and a decomposition take."""

from flexrank.profiles.costs import Shape
from flexrank.run.config import RunConfig
from flexrank.run.dry_run.architecture import Architecture
from flexrank.run.tables import split_block

#: Bytes of a number in a second moment, which is summed in float64.
MOMENT_BYTES = 8


def moment_bytes(architecture: Architecture, config: RunConfig) -> dict[str, int]:
    """Bytes of the second moments in each block of the model: 8·d² each, and 8·m² more per layer for gradients."""
    widths, sizes = moment_widths(architecture, config), {split_block(name)[0]: 0 for name in architecture.shapes}
    for name, (m, _) in architecture.shapes.items():
        numbers = widths.get(name, 0) ** 2 + (m**2 if config.keeps_gradient_moments else 0)
        sizes[split_block(name)[0]] += MOMENT_BYTES * numbers
    return sizes


def moment_widths(architecture: Architecture, config: RunConfig) -> dict[str, int]:
    """The width d of each moment (d x d) by layer; layers that share their input share one, under the first's name."""
    outputs = layers_by_output(architecture, config)
    owners = [name for group in architecture.groups for name in group if name in outputs or name == group[0]]
    return {name: architecture.shapes[name][0 if name in outputs else 1] for name in owners}


def layers_by_output(architecture: Architecture, config: RunConfig) -> set[str]:
    """Layers whose moment is that of their output, which `collect_moments` chooses where that is less work."""
    names: set[str] = set()
    for group in () if config.keeps_input_moments else architecture.groups:
        shapes = [architecture.shapes[name] for name in group]
        if all(m <= n for m, n in shapes) and sum(m * m for m, _ in shapes) < shapes[0][1] ** 2:
            names.update(group)
    return names


def factor_bytes(shape: Shape, method: str, from_inputs: bool) -> int:
    """The most bytes that decomposing a layer takes, all in float64.

    DataSVD holds W, its vectors, and U twice, m·n numbers each, and seven k × k matrices; also a ridged copy of Σ where
    the input's moment is kept. The roots of Σ (`paper`) take four matrices of its width, including eigenvectors and
    LAPACK's workspace. `fisher` also holds Lᵀ W, the gradients' shrunk moment and its root L.
    """
    (m, n), k = shape, min(shape)
    roots = 4 * n * n + m * n if method == "paper" else 0
    ridged = 3 * m * n + n * n + 5 * k * k if from_inputs else 0
    weighted = m * n + 2 * m * m if method == "fisher" else 0
    return 8 * (max(4 * m * n + 7 * k * k, ridged, roots) + weighted)

"""Reads, deploys and exports a size of an elastic artefact that comes without its run."""

from pathlib import Path
from typing import Any

import torch

from flexrank.artefacts.elastic import read_elastic_document, read_shapes
from flexrank.deployment import export
from flexrank.deployment.limits import deploy_within_limits
from flexrank.deployment.runtimes import sample_inputs
from flexrank.errors import FlexrankError
from flexrank.files import directory_bytes, dtype_name
from flexrank.hf.companions import local_directory
from flexrank.run.sizes import count_parameters


def cut(directory: str | Path, output: str | Path, **limits: Any) -> dict[str, Any]:
    """Exports the largest size within the limits, verified in a fresh process on random inputs.

    It has the dtype that the artefact names, or else the elastic weights' own.

    Args:
        directory: what `save_elastic` wrote for a transformers model.
        output: an export there is replaced, only on success; a directory of other files is refused.
        limits: `budget`, `max_params`, `max_bytes`, as `load_elastic` takes them.

    Returns:
        The limits, the export's directory, what `count_parameters` counts, bytes on disk, and the dtype.

    Raises:
        FlexrankError: no size is within the limits, or the artefact is damaged or not of a transformers model.
    """
    local = local_directory(directory)
    document = read_elastic_document(local)
    if document["library"] != "transformers":
        mend = "read it with fr.load_elastic, and write a size with fr.deploy and fr.export"
        raise FlexrankError(f"{directory}: holds a {document['class']} of torch, not a transformers model; {mend}")
    named = document.get("deployed_dtype")  # earlier versions did not record it
    small, entry = deploy_within_limits(local, limits, dtype=named and getattr(torch, named))
    export(small, output, sample_inputs(small, 2, 16))
    sizes = count_parameters(small, entry.profile, read_shapes(local)[0])
    own = dtype_name(next(small.parameters()).dtype)
    return {**limits, "directory": str(output), **sizes, "bytes": directory_bytes(output), "dtype": own}

"""The fresh process of an export: loads the artefact, runs the inputs, writes outputs and the loader's report.

Run as `python -m flexrank.deployment.verification ARTEFACT SCRATCH`. SCRATCH holds `inputs.safetensors` and
`request.json` (library, device, threads), and receives `outputs.safetensors` and `report.json`.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from flexrank.artefacts.deployed import load_deployed, read_batch
from flexrank.data.batches import call_model, output_tensor
from flexrank.errors import FlexrankError
from flexrank.files import read_json, write_json
from flexrank.hf import models


def verify(artefact: Path, scratch: Path) -> None:
    """Does what the module says.

    Raises:
        FlexrankError: the artefact does not load.
    """
    request = read_json(scratch / "request.json")
    torch.set_num_threads(request["threads"])
    report: dict[str, list[str]] = {}
    model: Any
    if request["library"] == "transformers":
        models.verify_export(artefact)
        model, found = models.load_by_architecture(artefact)
        report = {key: sorted(map(str, value)) for key, value in found.items() if value}
    else:
        model = load_deployed(artefact)
    device = torch.device(request["device"])
    with torch.no_grad():
        output = output_tensor(call_model(model.to(device), read_batch(scratch / "inputs.safetensors", device)))
    save_file({"output": output.cpu().contiguous()}, scratch / "outputs.safetensors")
    write_json(scratch / "report.json", report)


def main(arguments: list[str]) -> int:
    """Runs `verify`; a `FlexrankError` is one line on standard error and exit status 2."""
    try:
        verify(Path(arguments[0]), Path(arguments[1]))
    except FlexrankError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

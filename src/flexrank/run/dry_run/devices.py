"""Devices that a dry run plans for: GPUs by name, and what `flexrank measure --calibrate-plan` has measured."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import pydantic
from pydantic import Field

from flexrank.errors import FlexrankError
from flexrank.files import read_json
from flexrank.run.data_config import Section

Positive = Annotated[float, Field(gt=0)]
#: What `--gpu local` reads, and what `flexrank measure --calibrate-plan` writes by default.
LOCAL = Path("plan.json")


class ByDtype(Section):
    """A number for each dtype that a stage computes in."""

    float64: Positive
    float32: Positive
    bfloat16: Positive


class Device(Section):
    """The properties of one device that a run's time and money depend on; a device's file is this as a JSON object.

    A stage sustains `products` x `share` operations per second: `products` is the rate of large matrix products alone,
    `share` is the part of it that a training step or, in float64, the factorisation of a matrix reaches.
    """

    name: str
    memory: Annotated[int, Field(gt=0)]  # bytes
    products: ByDtype  # operations per second
    share: ByDtype
    link: Positive | None = None  # bytes per second to another device and, at the same time, from one
    disk: Positive  # bytes per second
    price: Annotated[float, Field(ge=0)] | None = None  # per hour
    auto: Literal["off", "bfloat16"] = "bfloat16"  # what `distillation.autocast: auto` means there

    def rate(self, dtype: str) -> float:
        """Operations per second that a stage sustains in a dtype; float16 counts as bfloat16."""
        key = "bfloat16" if dtype == "float16" else dtype
        return getattr(self.products, key) * getattr(self.share, key)


#: Shares of peak rates: a large Llama in bfloat16 trains at about two fifths; that of factorisations is a guess.
SHARE = ByDtype(float64=0.05, float32=0.4, bfloat16=0.4)
#: Bytes per second of an unknown disk.
DISK = 1e9


def _gpu(
    name: str, gigabytes: int, float64: float, float32: float, bfloat16: float, link: float, price: float
) -> Device:
    """A GPU by its products in 10¹² operations per second, and its link in 10⁹ bytes per second each way."""
    products = ByDtype(float64=1e12 * float64, float32=1e12 * float32, bfloat16=1e12 * bfloat16)
    memory = gigabytes * 10**9
    return Device(name=name, memory=memory, products=products, share=SHARE, link=1e9 * link, disk=DISK, price=price)


#: Peak dense rates from the vendor's data sheets: NVIDIA's for the H200, H100, A100 (SXM) and L4, which states bfloat16
#: with sparsity, twice the rate without; and "NVIDIA Ada GPU Architecture" for the RTX 4090 (bfloat16 accumulated in
#: float32). float32 is without TF32, as torch multiplies by default; float64 is that of tensor cores, and on Ada 1/64
#: of float32. Links are half of NVLink's 900 and 600 GB/s, which count both ways, and PCIe 4.0 x16. Memory above a
#: card's round number is left for workspaces. Prices are round US dollars, not those of any provider.
GPUS: Mapping[str, Device] = {
    device.name: device
    for device in (
        _gpu("h200", 141, 67, 67, 989.5, 450, 3.5),
        _gpu("h100", 80, 67, 67, 989.5, 450, 2.5),
        _gpu("a100-80gb", 80, 19.5, 19.5, 312, 300, 1.5),
        _gpu("a100-40gb", 40, 19.5, 19.5, 312, 300, 1.0),
        _gpu("rtx4090", 24, 1.29, 82.6, 165.2, 32, 0.5),
        _gpu("l4", 24, 0.47, 30.3, 121, 32, 0.5),
    )
}


def find_device(name: str, price: float | None = None) -> Device:
    """The GPU of this name, the measured device (`local`), or that of a file that ends in .json.

    `price` replaces its own price.

    Raises:
        FlexrankError: there is no such name or file, or a key or value in the file is wrong; one line.
    """
    if name in GPUS:
        device = GPUS[name]
    elif name == "local" or name.endswith(".json"):
        device = read_device(LOCAL if name == "local" else Path(name))
    else:
        raise FlexrankError(f"--gpu {name!r} is unknown; it is {', '.join(GPUS)}, local, or a file that ends in .json")
    return device if price is None else device.model_copy(update={"price": price})


def is_device(path: Path) -> bool:
    """Whether this file describes a device."""
    try:
        read_device(path)
    except FlexrankError:
        return False
    return True


def read_device(path: Path) -> Device:
    """The device in a file; raises FlexrankError as `find_device`."""
    mend = "flexrank measure --calibrate-plan writes it"
    if not path.is_file():
        raise FlexrankError(f"{path}: no such file; {mend}")
    try:
        return Device.model_validate(read_json(path))
    except pydantic.ValidationError as error:
        problem = error.errors()[0]
        where = ".".join(map(str, problem["loc"]))
        raise FlexrankError(f"{path}: {where}: {problem['msg'].lower()}; {mend}") from error

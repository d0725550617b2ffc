"""Reads images from one file, and normalises them for a model."""

import dataclasses
import io
import itertools
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flexrank.errors import FlexrankError, short_repr
from flexrank.files import read_json

#: What numpy raises for a file that is not an archive, is damaged, or holds pickled objects.
UNREADABLE = (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error)
WANTED = "an .npz file with arrays x and y, or jpg, offsets and y"


def read_images(path: str | Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Reads images, uint8 (N, H, W, C) or (N, H, W), and their classes (N,).

    The .npz file holds classes `y` and either `x`, the images themselves, or `jpg`, concatenated JPEG files as uint8
    (bytes,), with `offsets` (N + 1,): image i is jpg[offsets[i]:offsets[i + 1]], decoded to RGB with pillow.
    """
    arrays = _read_arrays(Path(path))
    images, labels = arrays["x"] if "x" in arrays else _decode(path, arrays["jpg"], arrays["offsets"]), arrays["y"]
    if images.dtype != np.uint8 or images.ndim not in (3, 4) or not len(images):
        raise FlexrankError(f"{path}: x is {_kind(images)}; expected uint8 (N, H, W[, C])")
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1]:
        raise FlexrankError(f"{path}: y is {_kind(labels)}; expected one whole number for each of {len(images)} images")
    return images, labels.astype(np.int64)


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Normalises images to (byte · factor − mean) / deviation, with a mean and a deviation for each channel.

    The channels keep the order that they have in the images, or are reversed (`is_flipped`).
    """

    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    factor: float = 1 / 255
    is_flipped: bool = False

    @classmethod
    def read(cls, path: Path) -> "Scaling":
        """Reads a preprocessor_config.json; raises FlexrankError if the file or a key is missing or wrong."""
        if not path.is_file():
            raise FlexrankError(f"{path}: no such file; write one with image_mean and image_std, those of each channel")
        if not isinstance(config := read_json(path), dict):
            raise FlexrankError(f"{path}: expected a JSON object, with image_mean and image_std")
        kind = config.get("image_processor_type") or config.get("feature_extractor_type")
        is_mobilevit = str(kind).startswith("MobileViT")  # which turns channels, and never normalises
        normalises = config.get("do_normalize", True) and not is_mobilevit
        factor, mean, deviation = 1.0, [0.0], [1.0]  # for steps that are switched off, with any number of channels
        if config.get("do_rescale", True) and not _is_number(factor := config.get("rescale_factor", 1 / 255)):
            raise FlexrankError(f"{path}: key 'rescale_factor' is {short_repr(factor)}; expected a finite number")
        if normalises:
            mean, deviation = (_numbers(path, key, config.get(key)) for key in ("image_mean", "image_std"))
        if len(mean) != len(deviation) or not torch.tensor(deviation).min() > 0:
            found = f"image_mean is {short_repr(mean)} and image_std {short_repr(deviation)}"
            raise FlexrankError(f"{path}: {found}; expected as many of each, and deviations above 0")
        # EfficientNet's processor also subtracts 1 after rescaling and, for classifiers, divides a second time.
        if config.get("do_rescale", True) and config.get("rescale_offset"):
            mean = [one + 1 for one in mean]
        if normalises and config.get("include_top"):
            deviation = [one * one for one in deviation]
        return cls(tuple(mean), tuple(deviation), factor, bool(config.get("do_flip_channel_order", is_mobilevit)))

    def to_json(self) -> dict[str, Any]:
        """The content of a preprocessor_config.json."""
        own = {"image_mean": list(self.mean), "image_std": list(self.deviation), "rescale_factor": self.factor}
        return own | ({"do_flip_channel_order": True} if self.is_flipped else {})

    def __call__(self, images: Tensor) -> Tensor:
        """Maps bytes (N, C, H, W) to float32 values (N, C, H, W); a single mean applies to all channels."""
        if len(self.mean) not in (1, images.shape[1]):
            found = f"images are {tuple(images.shape[1:])} (channels, height, width)"
            raise FlexrankError(f"{found}; image_mean of preprocessor_config.json is of {len(self.mean)} channels")
        mean, deviation = (torch.tensor(values).view(1, -1, 1, 1) for values in (self.mean, self.deviation))
        images = images.flip(1) if self.is_flipped else images
        return images.float().mul_(self.factor).sub_(mean).div_(deviation)


class ImageBatches(Sequence[dict[str, Tensor]]):
    """Batches of the images at the given indices (N,); bytes (…, C, H, W) are normalised when a batch is read."""

    def __init__(self, images: Tensor, scaling: Scaling, indices: Tensor, batch_size: int):
        self._images, self._scaling, self._indices = images, scaling, indices.split(batch_size)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(len(self))[index]]
        return {"pixel_values": self._scaling(self._images[self._indices[index]])}


def channels_first(images: NDArray[np.uint8]) -> Tensor:
    """Images (N, H, W, C) or (N, H, W) as a uint8 tensor (N, C, H, W); C is 1 if there is no channel axis."""
    tensor = torch.from_numpy(images)
    return (tensor.unsqueeze(1) if tensor.ndim == 3 else tensor.permute(0, 3, 1, 2)).contiguous()


def _numbers(path: Path, key: str, values: Any) -> list[float]:
    if not isinstance(values, list) or not values or not all(map(_is_number, values)):
        found = "missing" if values is None else short_repr(values)
        raise FlexrankError(f"{path}: key {key!r} is {found}; expected a list of finite numbers, one for each channel")
    return [float(one) for one in values]  # torch would make whole numbers int64, which large ones overflow


def _is_number(value: Any) -> bool:
    """Whether this is a number, not a boolean, that is finite in float32."""
    return type(value) in (int, float) and abs(value) <= torch.finfo(torch.float32).max


def _read_arrays(path: Path) -> dict[str, NDArray[Any]]:
    if not path.is_file():
        raise FlexrankError(f"{path}: no such file of images (.npz)")
    try:
        with zipfile.ZipFile(path):
            pass  # numpy would read any other file as a single array, or as a pickle
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("x", "jpg", "offsets", "y") if name in file}
    except UNREADABLE as error:
        raise FlexrankError(f"{path}: expected {WANTED} ({error})") from error
    if "y" not in arrays or not ("x" in arrays or {"jpg", "offsets"} <= arrays.keys()):
        raise FlexrankError(f"{path}: expected {WANTED}; it has {', '.join(arrays) or 'none of them'}")
    return arrays


def _decode(path: str | Path, encoded: NDArray[Any], offsets: NDArray[Any]) -> NDArray[np.uint8]:
    """Decodes JPEG files to RGB images (N, H, W, 3), turned as their EXIF says, which must all have one size."""
    from PIL import Image, ImageOps

    if encoded.dtype != np.uint8 or encoded.ndim != 1:
        raise FlexrankError(f"{path}: jpg is {_kind(encoded)}; expected uint8 (bytes,)")
    if offsets.dtype.kind not in "iu" or offsets.ndim != 1 or len(offsets) < 2:
        raise FlexrankError(f"{path}: offsets is {_kind(offsets)}; expected whole numbers (N + 1,)")
    ends = offsets.tolist()
    if ends[0] < 0 or ends[-1] > len(encoded) or any(b <= a for a, b in itertools.pairwise(ends)):
        raise FlexrankError(f"{path}: offsets must rise, from 0 at the least to the {len(encoded)} bytes of jpg")
    content, images = encoded.tobytes(), np.empty((0, 0, 0, 3), np.uint8)
    for index, (start, end) in enumerate(itertools.pairwise(ends)):
        try:
            upright = ImageOps.exif_transpose(Image.open(io.BytesIO(content[start:end])))
            image = np.asarray(upright.convert("RGB"))
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            reason = str(error).partition("\n")[0]
            raise FlexrankError(f"{path}: image {index} of {len(ends) - 1} is not a whole JPEG ({reason})") from error
        if index == 0:
            images = np.empty((len(ends) - 1, *image.shape), np.uint8)
        if image.shape != images.shape[1:]:
            sizes = f"{image.shape[1]} × {image.shape[0]}, the first {images.shape[2]} × {images.shape[1]}"
            raise FlexrankError(f"{path}: image {index} is {sizes}; expected one size for all, so resize them")
        images[index] = image
    return images


def _kind(array: NDArray[Any]) -> str:
    return f"{array.dtype} {array.shape}"

"""Images are what the file holds, scaled by the plain formula."""

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flexrank.cli.exits import EXTRAS
from flexrank.data.images import ImageBatches, Scaling, channels_first, read_images
from flexrank.errors import FlexrankError
from flexrank.run.config import parse_config
from flexrank.run.samples import load_samples


def random_images(count: int, size: int = 8) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (count, size, size, 3), dtype=np.uint8)


def encode(images: Any, mode: str = "RGB") -> dict[str, Any]:
    """The arrays of a file of JPEGs."""
    files = []
    for image in images:
        with io.BytesIO() as buffer:
            Image.fromarray(image).convert(mode).save(buffer, "JPEG", quality=90)
            files.append(buffer.getvalue())
    offsets = np.cumsum([0, *map(len, files)])
    return {"jpg": np.frombuffer(b"".join(files), np.uint8), "offsets": offsets, "y": np.arange(len(files)) % 5}


def write(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize("shape", [(6, 8, 8, 3), (6, 8, 8)])
def test_images_come_as_they_are(tmp_path: Path, shape: tuple[int, ...]) -> None:
    wanted = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
    images, labels = read_images(write(tmp_path / "a.npz", x=wanted, y=np.array([0, 1, 2, 0, 1, 9], np.uint8)))
    assert (images == wanted).all()
    assert (labels.dtype, labels.tolist()) == (np.int64, [0, 1, 2, 0, 1, 9])
    tensor = channels_first(images)
    for index, channel in ((5, 0), (2, tensor.shape[1] - 1)):
        plane = wanted[index] if len(shape) == 3 else wanted[index, :, :, channel]
        assert (tensor[index, channel].numpy() == plane).all()


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_jpegs_are_decoded_to_rgb_each_in_its_place(tmp_path: Path, mode: str) -> None:
    arrays = encode(random_images(7), mode)
    arrays["offsets"] = arrays["offsets"].astype(np.uint32)
    images, labels = read_images(write(tmp_path / "a.npz", **arrays))
    content, offsets = arrays["jpg"].tobytes(), arrays["offsets"].tolist()
    for index in range(7):
        one = Image.open(io.BytesIO(content[offsets[index] : offsets[index + 1]])).convert("RGB")
        assert (images[index] == np.asarray(one)).all()
    assert labels.tolist() == [0, 1, 2, 3, 4, 0, 1]


def test_jpegs_are_turned_as_their_exif_says(tmp_path: Path) -> None:
    """Orientation 6: the camera was turned, so the picture is turned back by a quarter, clockwise."""
    pictures = []
    for orientation in (1, 6):
        exif = Image.Exif()
        exif[274] = orientation
        with io.BytesIO() as buffer:
            Image.fromarray(random_images(1)[0]).save(buffer, "JPEG", quality=90, exif=exif)
            pictures.append(np.frombuffer(buffer.getvalue(), np.uint8))
    offsets = np.cumsum([0, *map(len, pictures)])
    images, _ = read_images(write(tmp_path / "a.npz", jpg=np.concatenate(pictures), offsets=offsets, y=np.arange(2)))
    assert (images[1] == np.rot90(images[0], -1)).all() and (images[1] != images[0]).any()


def test_jpegs_of_a_run_are_scaled_by_the_plain_formula(tmp_path: Path) -> None:
    path = write(tmp_path / "a.npz", **encode(random_images(40)))
    scaling = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.25, 0.3], "rescale_factor": 1 / 255}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(scaling))
    (tmp_path / "config.json").write_text("{}")
    data = {"source": "images", "path": str(path), "calibration": 4, "probe": 4, "batch_size": 4, "evaluation": 4}
    config = parse_config({"name": "n", "task": "classification", "model": str(tmp_path), "data": data})
    example: Any = load_samples(config, None).example
    wanted = (read_images(path)[0] / 255 - scaling["image_mean"]) / scaling["image_std"]
    images = example["pixel_values"].permute(0, 2, 3, 1)
    distances = [np.abs(images[0].double().numpy() - one).max() for one in wanted]
    assert min(distances) < 1e-5 < sorted(distances)[1]


def test_batches_have_the_bits_of_all_images_scaled_together() -> None:
    images, scaling = channels_first(random_images(7)), Scaling((0.48, 0.45, 0.4), (0.2, 0.25, 0.3))
    indices = torch.tensor([6, 0, 3, 1, 5])
    batches = ImageBatches(images, scaling, indices, 2)
    values: list[Any] = [batch["pixel_values"] for batch in batches]
    assert len(batches) == 3 and torch.equal(torch.cat(values), scaling(images)[indices])
    assert torch.equal(batches[1:][0]["pixel_values"], values[1])


def test_wrong_files_are_refused_in_one_line(tmp_path: Path) -> None:
    good, encoded = random_images(4), encode(random_images(4))
    cut = encoded["offsets"].copy()
    torn = encoded["jpg"].copy()
    torn[cut[2] : cut[3]] = 0
    mixed = encode([*random_images(2), *random_images(1, 12)])
    y = np.arange(4)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"x": good}, "expected an .npz file with arrays x and y, or jpg, offsets and y; it has x"),
        ({"y": y}, "expected an .npz"),
        ({"jpg": encoded["jpg"], "y": y}, "it has jpg, y"),
        ({"z": y}, "it has none of them"),
        ({"x": good.astype(np.float32), "y": y}, r"x is float32 \(4, 8, 8, 3\)"),
        ({"x": good.reshape(4, -1), "y": y}, r"x is uint8 \(4, 192\)"),
        ({"x": good[:0], "y": y[:0]}, "x is uint8"),
        ({"x": good, "y": y[:3]}, r"y is int64 \(3,\); expected one whole number for each of 4 images"),
        ({"x": good, "y": y / 2}, "y is float64"),
        ({**encoded, "jpg": encoded["jpg"].astype(np.int16)}, "jpg is int16"),
        ({**encoded, "offsets": cut / 2}, "offsets is float64"),
        ({**encoded, "offsets": cut[::-1].astype(np.uint32)}, "offsets must rise"),
        ({**encoded, "offsets": cut + 1}, "offsets must rise, from 0 at the least to the"),
        ({**encoded, "jpg": torn}, "image 2 of 4 is not a whole JPEG"),
        ({**encoded, "offsets": np.array([0, *(cut[1:] - 9)])}, "image 0 of 4 is not a whole JPEG"),
        (mixed, "image 2 is 12 × 12, the first 8 × 8; expected one size for all"),
        ({"x": np.array([{}]), "y": y[:1]}, "expected an .npz"),
    ]
    for arrays, message in cases:
        with pytest.raises(FlexrankError, match=message) as error:
            read_images(write(tmp_path / "a.npz", **arrays))
        assert "\n" not in str(error.value) and str(tmp_path / "a.npz") in str(error.value)


def test_files_that_are_no_archives_are_refused(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole.npz", x=random_images(4), y=np.arange(4)).read_bytes()
    np.save(tmp_path / "single.npy", random_images(4))
    (tmp_path / "text.npz").write_text("no archive")
    (tmp_path / "torn.npz").write_bytes(whole[:-40])
    (tmp_path / "edited.npz").write_bytes(whole.replace(random_images(4).tobytes()[:64], b"\0" * 64))
    for name, message in (
        ("absent.npz", "no such file of images"),
        ("single.npy", "expected an .npz file"),
        ("text.npz", "expected an .npz file"),
        ("torn.npz", "expected an .npz file"),
        ("edited.npz", "expected an .npz file"),
    ):
        with pytest.raises(FlexrankError, match=message):
            read_images(tmp_path / name)


def test_without_pillow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.npz", **encode(random_images(2)))
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(ModuleNotFoundError) as error:
        read_images(path)
    assert EXTRAS[error.value.name or ""] == "images"


def test_scaling_is_what_its_file_says(tmp_path: Path) -> None:
    path = tmp_path / "preprocessor_config.json"
    scaling = Scaling((0.1, 0.2, 0.3), (0.5, 0.6, 0.7), 1 / 128)
    path.write_text(json.dumps(scaling.to_json()))
    assert Scaling.read(path) == scaling


@pytest.mark.parametrize(
    "changes",
    [{}, {"do_rescale": False}, {"do_normalize": False}, {"do_normalize": None}, {"rescale_factor": 1 / 128}],
)
def test_images_are_scaled_as_transformers_does(changes: dict[str, Any], tmp_path: Path) -> None:
    from transformers import ViTImageProcessorPil

    images, own = random_images(2), {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.25, 0.3]}
    processor = ViTImageProcessorPil(do_resize=False, **own | changes)
    processor.save_pretrained(tmp_path)
    path = tmp_path / "preprocessor_config.json"
    expected = torch.from_numpy(np.stack(processor(list(images))["pixel_values"])).float()
    torch.testing.assert_close(Scaling.read(path)(channels_first(images)), expected)
    if "do_normalize" in changes:
        path.write_text(json.dumps(changes))  # which needs no mean
        torch.testing.assert_close(Scaling.read(path)(channels_first(images)), expected)


@pytest.mark.parametrize(
    "changes",
    [
        {"include_top": False},
        {"include_top": True},
        {"rescale_offset": True, "rescale_factor": 1 / 127.5},
        {"rescale_offset": True, "do_rescale": False},
        {"rescale_offset": True, "do_normalize": False, "include_top": False},
    ],
)
def test_images_are_scaled_as_for_efficientnet(changes: dict[str, Any], tmp_path: Path) -> None:
    from transformers import EfficientNetImageProcessorPil

    images, own = random_images(2), {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.25, 0.3]}
    processor = EfficientNetImageProcessorPil(do_resize=False, do_center_crop=False, **own | changes)
    processor.save_pretrained(tmp_path)
    expected = torch.from_numpy(np.stack(processor(list(images))["pixel_values"])).float()
    scaling = Scaling.read(tmp_path / "preprocessor_config.json")
    torch.testing.assert_close(scaling(channels_first(images)), expected)


@pytest.mark.parametrize("changes", [{}, {"do_normalize": False}, {"do_normalize": True}])
def test_channels_are_turned_as_for_mobilevit(changes: dict[str, bool], tmp_path: Path) -> None:
    """By default it does not normalise, though its file has a mean and a deviation."""
    from transformers import MobileViTImageProcessorPil

    images = random_images(2)
    processor = MobileViTImageProcessorPil(do_resize=False, do_center_crop=False, **changes)
    processor.save_pretrained(tmp_path)
    expected = torch.from_numpy(np.stack(processor(list(images))["pixel_values"])).float()
    scaling = Scaling.read(tmp_path / "preprocessor_config.json")
    torch.testing.assert_close(scaling(channels_first(images)), expected)
    (tmp_path / "again.json").write_text(json.dumps(scaling.to_json()))
    assert Scaling.read(tmp_path / "again.json") == scaling


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_std": None}, "key 'image_std' is missing; expected a list of finite numbers, one for each channel"),
        ({"image_mean": 0.5}, "key 'image_mean' is 0.5; expected a list"),
        ({"image_mean": []}, "key 'image_mean' is []; expected a list"),
        ({"image_mean": ["a", "b", "c"]}, "key 'image_mean' is ['a', 'b', 'c']; expected a list of finite numbers"),
        ({"image_std": [0.5, True, 0.5]}, "key 'image_std' is [0.5, True, 0.5]; expected"),
        ({"image_mean": [0.5, 0.5, 10**400]}, "; expected a list of finite numbers"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std [0.5, 0.0, 0.5]; expected as many of each, and deviations above 0"),
        ({"image_std": [0.5, 0.5, 1e-60]}, "deviations above 0"),  # 0 in float32
        ({"image_std": [0.5]}, "image_mean is [0.5, 0.5, 0.5] and image_std [0.5]; expected as many of each"),
        ({"image_mean": [10**30] * 3, "image_std": [0]}, "is [1e+30, 1e+30, 1e+30] and image_std [0.0]; expected"),
        ({"rescale_factor": None}, "key 'rescale_factor' is None; expected a finite number"),
        ({"rescale_factor": "1/255"}, "key 'rescale_factor' is '1/255'; expected a finite number"),
    ],
)
def test_a_wrong_scaling_is_one_line(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.5] * 3} | changes))
    with pytest.raises(FlexrankError, match=re.escape(message)) as error:
        Scaling.read(path)
    assert str(error.value).startswith(f"{path}: ") and "\n" not in str(error.value)


def test_a_scaling_is_a_json_object(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text("[0.5]")
    with pytest.raises(FlexrankError, match="preprocessor_config.json: expected a JSON object, with image_mean"):
        Scaling.read(tmp_path / "preprocessor_config.json")

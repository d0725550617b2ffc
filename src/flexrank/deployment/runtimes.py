"""Deployed transformers models as programs of other runtimes: how each runtime's program is written, and read to run.

A program takes a batch's tensors by name and returns one tensor, the logits or the last hidden state. A causal model's
cache is off: a program reads the whole text at every call.
"""

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flexrank.data.batches import output_tensor
from flexrank.errors import FlexrankError
from flexrank.files import read_json
from flexrank.nn.gauge_aligned import GaugeAlignedLayer

Inputs = dict[str, Tensor]
#: A program that has been read: maps a batch to the output tensor.
Run = Callable[[Mapping[str, Tensor]], Tensor]
#: Rows and tokens of the batch that is traced.
TRACED = (2, 8)
#: The maximum rows and tokens of a program whose memory is planned in advance, as only ExecuTorch's is.
MOST_ROWS, MOST_TOKENS = 8, 128
#: A protobuf file is limited to 2 GB: above this size ONNX keeps the weights in a separate file.
ONE_FILE_BYTES = 3 * 2**29


class Runtime(NamedTuple):
    """How one runtime's program is written into a directory, and read from it."""

    write: Callable[[nn.Module, Inputs, Path], None]
    read: Callable[[Path], Run]
    packages: tuple[str, ...] = ()  #: beyond the core; the extra that installs them has the runtime's name
    keeps_dtype: bool = False  #: whether every dtype is kept; otherwise all become float32


class TokenProgram(nn.Module):
    """Maps tokens (B, T) to the model's output tensor."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:  # noqa: D102
        return output_tensor(self.model(input_ids=input_ids, attention_mask=attention_mask))


class ImageProgram(nn.Module):
    """Maps images (B, C, H, W) to the model's output tensor."""

    def __init__(self, model: Any):
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:  # noqa: D102
        return output_tensor(self.model(pixel_values=pixel_values))


def program_of(model: Any) -> nn.Module:
    """Makes a model a program, changing it in place: its cache is off, and its state has no empty tensors.

    torch's archive of a program fails on some of those; they become attributes, because models ask a deployed layer for
    its `weight.dtype`. Raises FlexrankError for an encoder-decoder.
    """
    if model.config.is_encoder_decoder:
        raise FlexrankError(f"{type(model).__name__} is an encoder-decoder, which can be exported only `--to dense`")
    model.config.get_text_config().use_cache = False
    for layer in model.modules():
        if isinstance(layer, GaugeAlignedLayer) and "weight" in layer._buffers:
            vars(layer)["weight"] = layer._buffers.pop("weight")
    return (ImageProgram if model.main_input_name == "pixel_values" else TokenProgram)(model).eval()


def sample_inputs(model: Any, rows: int, tokens: int, seed: int = 0) -> Inputs:
    """A random batch: ids of the model's vocabulary, the last row's last quarter padded, or images in its dtype.

    An encoder-decoder also gets decoder ids, half as many; a model of texts and images that generates nothing, an image
    for each text. A classifier of texts without a padding token gets one text, because many find the last token to
    classify by it, and one with a decoder the same ids there, with one end of text in each. Raises FlexrankError for a
    model with other inputs.
    """
    generator = torch.Generator().manual_seed(seed)
    if model.main_input_name not in ("input_ids", "pixel_values"):
        kinds = f"a model of {model.main_input_name}; exports are of models of input_ids or pixel_values"
        raise FlexrankError(f"{type(model).__name__} is {kinds}")
    if model.main_input_name == "pixel_values":
        return _sample_images(model, rows, generator)
    text = model.config.get_text_config()
    if not isinstance(getattr(text, "vocab_size", None), int):
        raise FlexrankError(f"{type(model).__name__}: its configuration has no vocab_size, by which inputs are made")
    limit = getattr(text, "max_position_embeddings", None) or tokens
    tokens = min(tokens, limit) if limit > 0 else tokens  # XLNet's is -1
    is_classifier = type(model).__name__.endswith("ForSequenceClassification")
    if is_classifier and text.pad_token_id is None:
        rows = 1
    ids = torch.randint(text.vocab_size, (rows, tokens), generator=generator, device="cpu")
    mask = torch.ones_like(ids)
    mask[-1, tokens - tokens // 4 :] = 0
    inputs = {"input_ids": ids, "attention_mask": mask}
    if model.config.is_encoder_decoder and is_classifier:
        ids[ids == text.eos_token_id] = (text.eos_token_id + 1) % text.vocab_size
        ids[:, tokens // 2] = text.eos_token_id
        inputs["decoder_input_ids"] = ids.clone()
    elif model.config.is_encoder_decoder:
        shape = (rows, (tokens + 1) // 2)
        inputs["decoder_input_ids"] = torch.randint(text.vocab_size, shape, generator=generator, device="cpu")
    if "pixel_values" in inspect.signature(model.forward).parameters and not model.can_generate():
        inputs |= _sample_images(model, rows, generator)
    return inputs


def _sample_images(model: Any, rows: int, generator: torch.Generator) -> Inputs:
    config = getattr(model.config, "vision_config", model.config)
    channels = getattr(config, "num_channels", 3)
    size = getattr(config, "image_size", None) or _processed_size(Path(model.name_or_path)) or 224
    height, width = (size, size) if isinstance(size, int) else size
    images = torch.randn(rows, channels, height, width, generator=generator, device="cpu")
    return {"pixel_values": images.to(model.dtype)}


def _processed_size(source: Path) -> Any:
    """The size to which the image processor beside a model crops or resizes, if there is one."""
    path = source / "preprocessor_config.json"
    values = read_json(path) if path.is_file() else {}
    size = values.get("crop_size") or values.get("size")
    if isinstance(size, Mapping):
        whole = size.get("height"), size.get("width")
        return whole if all(whole) else size.get("shortest_edge")
    return size if isinstance(size, int) else None


def _traced(program: nn.Module, inputs: Inputs, is_bounded: bool = False) -> torch.export.ExportedProgram:
    """The program as a torch graph for any number of rows and tokens, or with `is_bounded` up to the maximum.

    It keeps no stack traces, which are longer than a small graph and hold this machine's paths.
    """
    dynamic: Any = torch.export.Dim.DYNAMIC
    axes = [dynamic(min=1, max=most) for most in (MOST_ROWS, MOST_TOKENS)] if is_bounded else [dynamic, dynamic]
    shapes = {name: dict(enumerate(axes if value.ndim == 2 else axes[:1])) for name, value in inputs.items()}
    with torch.no_grad():
        traced = torch.export.export(program, (), dict(inputs), dynamic_shapes=shapes)
    for module in traced.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return traced


def _write_torch(program: nn.Module, inputs: Inputs, directory: Path) -> None:
    torch.export.save(_traced(program, inputs), directory / "model.pt2")


def _read_torch(directory: Path) -> Run:
    program = torch.export.load(directory / "model.pt2").module()
    return torch.no_grad()(lambda inputs: program(**inputs))


def _write_onnx(program: nn.Module, inputs: Inputs, directory: Path) -> None:
    weights = sum(value.nbytes for value in program.state_dict().values())
    names = {2: {0: "batch", 1: "sequence"}, 4: {0: "batch"}}
    axes = {name: names[value.ndim] for name, value in inputs.items()}
    with torch.no_grad():
        exported: Any = torch.onnx.export(
            program, (), kwargs=dict(inputs), input_names=list(inputs), dynamic_shapes=axes, output_names=["output"],
            verbose=False, dynamo=True,
        )  # fmt: skip
    for node in exported.model.graph.all_nodes():
        node.metadata_props.clear()  # stack traces, which hold this machine's paths
    exported.save(directory / "model.onnx", external_data=weights > ONE_FILE_BYTES)


def _read_onnx(directory: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    path = str(directory / "model.onnx")
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(inputs: Mapping[str, Tensor]) -> Tensor:
        return torch.from_numpy(session.run(None, {name: value.numpy() for name, value in inputs.items()})[0])

    return run


def _write_openvino(program: nn.Module, inputs: Inputs, directory: Path) -> None:
    import openvino

    model = openvino.convert_model(_traced(program, inputs))
    openvino.save_model(model, directory / "model.xml", compress_to_fp16=False)


def _read_openvino(directory: Path) -> Run:
    import openvino

    # If the processor has bfloat16 products, OpenVINO would use them in place of float32 ones.
    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads()}
    model = openvino.Core().compile_model(directory / "model.xml", "CPU", options)
    return lambda inputs: torch.from_numpy(model({name: value.numpy() for name, value in inputs.items()})[0].copy())


def _write_executorch(program: nn.Module, inputs: Inputs, directory: Path) -> None:
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    edge = to_edge_transform_and_lower(_traced(program, inputs, is_bounded=True), partitioner=[XnnpackPartitioner()])
    (directory / "model.pte").write_bytes(edge.to_executorch().buffer)


def _read_executorch(directory: Path) -> Run:
    from executorch.runtime import Runtime as Executorch

    program = Executorch.get().load_program(directory / "model.pte")
    method = program.load_method("forward")

    def run(inputs: Mapping[str, Tensor]) -> Tensor:
        assert program is not None and method is not None  # the method reads the program's memory
        return method.execute(list(inputs.values()))[0].clone()

    return run


RUNTIMES: dict[str, Runtime] = {
    "torch": Runtime(_write_torch, _read_torch, keeps_dtype=True),
    "onnx": Runtime(_write_onnx, _read_onnx, ("onnx", "onnxscript", "onnxruntime")),
    "openvino": Runtime(_write_openvino, _read_openvino, ("openvino",)),
    "executorch": Runtime(_write_executorch, _read_executorch, ("executorch",)),
}

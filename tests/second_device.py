"""A second device without hardware: its tensors compute on the CPU, and refuse to meet tensors that are there.

`python tests/second_device.py CONFIG` takes a run through all stages with its models on that device, and then tunes one
size and refits one. What forgets to move a tensor fails as it would on a GPU. It says nothing of kernels, of autocast,
or of time.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import safetensors.torch
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode


class Backend(backend_registration._DummyBackendModule):
    """What torch asks a backend's module for. There are two such devices, as on a machine with two GPUs."""

    restored: ClassVar[set[object]] = set()  # the devices whose random states were set

    def device_count(self) -> int:
        return 2

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return []

    def synchronize(self, device: object = None) -> None: ...

    def get_rng_state(self, device: object = None) -> Tensor:
        return torch.random.get_rng_state()

    def set_rng_state(self, state: Tensor, device: object = None) -> None:
        self.restored.add(device)


backend_registration._setup_privateuseone_for_python_backend("second", Backend())
DEVICE = torch.device("second", 0)


class There(Tensor):
    """A tensor on the second device; `here` has its values, on the CPU."""

    here: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, here: Tensor) -> "There":
        made = torch.Tensor._make_wrapper_subclass(
            cls, here.size(), here.stride(), here.storage_offset(), dtype=here.dtype, device=DEVICE
        )
        made.here = here
        return cast(There, made)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        return computed(function, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"There({self.here})"


def computed(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an operator gives on the device that its arguments, or else its keyword, name."""
    if function is torch.ops.aten.copy_.default:
        function(*map(on_cpu, args), **kwargs)
        return args[0]
    given = [*leaves(args), *kwargs.values()]
    refuse_mixture(function, [one for one in given if isinstance(one, Tensor)], args)
    result = function(*mapped(on_cpu, args), **{name: on_cpu(one) for name, one in kwargs.items()})
    device = next((one for one in given if isinstance(one, torch.device)), None)
    if device.type != DEVICE.type if device else not any(isinstance(one, There) for one in given):
        return result
    known = {id(one.here): one for one in given if isinstance(one, There)}  # what is changed in place stays itself
    return mapped(lambda one: known.get(id(one), There(one)) if isinstance(one, Tensor) else one, result)


def leaves(values: Any) -> Iterator[Any]:
    """The values of nested tuples and lists; pytrees take three times as long."""
    for one in values:
        yield from leaves(one) if isinstance(one, (tuple, list)) else (one,)


def mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Nested tuples and lists with each of their values changed."""
    return type(value)(mapped(change, one) for one in value) if isinstance(value, (tuple, list)) else change(value)


def on_cpu(value: Any) -> Any:
    """The CPU's tensor or device for the second one's; any other is returned as it is."""
    if isinstance(value, torch.device):
        return torch.device("cpu") if value.type == DEVICE.type else value
    return value.here if isinstance(value, There) else value


def refuse_mixture(function: Any, tensors: list[Tensor], args: tuple[Any, ...]) -> None:
    """Raises RuntimeError if CUDA would: numbers may be on the CPU, and so may the indices of a tensor elsewhere."""
    wrong = [tuple(one.shape) for one in tensors if not isinstance(one, There) and one.ndim]
    if not wrong or not any(isinstance(one, There) for one in tensors):
        return
    if not ("index" in str(function) and isinstance(args[0], There)):
        raise RuntimeError(f"{function}: tensors of shapes {wrong} are on the CPU, and others on the second device")


class Dispatch(TorchDispatchMode):
    """Makes the tensors that are created on the device."""

    def __torch_dispatch__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        return computed(function, args, kwargs or {})


class Functions(TorchFunctionMode):
    """What torch does before an operator is dispatched."""

    def __torch_function__(self, function: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is torch.tensor and kwargs.get("device") is not None:
            return torch.tensor(*args, **{**kwargs, "device": "cpu"}).to(kwargs["device"])
        if function in (Tensor.data_ptr, Tensor.untyped_storage, Tensor.storage):
            return function(on_cpu(args[0].data))  # a parameter's data
        return function(*args, **kwargs)


def reading_from_cpu(save: Callable[..., Any]) -> Callable[..., Any]:
    """A function of safetensors, which copies from a device by itself."""

    def saved(tensors: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> Any:
        return save({name: on_cpu(one.data) for name, one in tensors.items()}, *args, **kwargs)

    return saved


def prepare() -> None:
    """Has torch and safetensors take such tensors: no inference mode, no casts of autocast, no addresses."""
    torch.inference_mode = lambda mode=True: torch.no_grad()  # type: ignore[misc, assignment]
    safetensors.torch.save_file = reading_from_cpu(safetensors.torch.save_file)
    safetensors.torch.save = reading_from_cpu(safetensors.torch.save)


def main(config: Path) -> None:
    from flexrank.deployment import exports
    from flexrank.run import measure, run_stages, sizes, stages, workspace
    from flexrank.run.config import load_config
    from tiny_runs import here, invoke

    workspace.Workspace.device = DEVICE  # type: ignore[assignment, misc]
    measure.RATIO_SECONDS = 0.0
    stages.in_fresh_process = sizes.in_fresh_process = exports.in_fresh_process = here
    settings = load_config(config)
    with Functions(), Dispatch():
        check_moments_of_a_file_are_moved(config.with_suffix(".safetensors"))
        run_stages(settings)
        for number, options in enumerate((["--tune", "2"], ["--refit"])):
            place = f"{settings.output}-{number}"
            result = invoke("deploy", settings.output, "--budget", "0.6", *options, "--output", place)
            assert result.exit_code == 0, result.output


def check_an_update_restores_all_random_states() -> None:
    """A step that rounds at random seeds both devices; AdamW's own does not round."""
    from flexrank.distill.optimizer import update

    Backend.restored.clear()
    update(torch.optim.SGD([torch.nn.Parameter(There(torch.zeros(1)))]), seed=0)
    assert Backend.restored == {0, 1}


def check_moments_of_a_file_are_moved(file: Path) -> None:
    """They are read on the CPU."""
    import flexrank as fr

    model = torch.nn.Sequential(torch.nn.Linear(4, 6))
    moments = fr.collect_moments(
        model, [torch.randn(9, 4)], fr.select_layers(model), gradient_loss=fr.FeatureObjective().fisher_loss
    )
    fr.save_moments(moments, file)
    fr.decompose_(model.to(DEVICE), fr.load_moments(file))


if __name__ == "__main__":
    torch.set_num_threads(1)
    prepare()
    check_an_update_restores_all_random_states()
    main(Path(sys.argv[1]))

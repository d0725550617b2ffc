"""Runs a model one block of its stack at a time over all batches, so memory holds the work of one block."""

import contextlib
import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import torch
from torch import Tensor, nn

from flexrank.data.batches import Batch, call_model, model_device, output_tensor
from flexrank.errors import FlexrankError
from flexrank.nn.blocks import replaced_forwards

#: Most bytes of hidden states kept in memory; the rest goes to a temporary file.
STATE_BYTES = 2**32


class Placement:
    """Where a model's blocks compute: each is moved there while it runs, and restored afterwards.

    A model that transformers loads on the CPU in the dtype of its files is memory-mapped from them: only the block
    that runs takes memory, and the system may drop even that.
    """

    def __init__(self, model: nn.Module, device: torch.device | None = None, dtype: torch.dtype | None = None):
        self.device, self._dtype = device or model_device(model), dtype

    @contextlib.contextmanager
    def placed(self, module: nn.Module, without: Iterable[nn.Module] = ()) -> Iterator[None]:
        """Inside the block, a module's parameters and buffers are placed here, except those of modules `without`.

        Layers that are put into the module meanwhile stay where they are.
        """
        moved: list[tuple[dict[str, Any], str, Tensor]] = []
        try:
            self._move(module, set(without), moved)
            yield
        finally:
            for place, name, tensor in moved:
                place[name] = tensor

    def _move(
        self, module: nn.Module, without: set[nn.Module], moved: list[tuple[dict[str, Any], str, Tensor]]
    ) -> None:
        """Moves tensors, and adds the originals to `moved`. A function, so no local keeps a module alive."""
        new: dict[int, Tensor] = {}  # by identity, so tied tensors stay tied
        for _, owner in module.named_modules(memo=without):  # which it does not enter
            places: list[dict[str, Any]] = [owner._parameters, owner._buffers]
            for place in places:
                for name, tensor in place.items():
                    # Non-persistent buffers, such as rotary frequencies, keep the precision that they need.
                    dtype = None if name in owner._non_persistent_buffers_set else self._dtype
                    if tensor is not None and not self._is_here(tensor, dtype):
                        if id(tensor) not in new:
                            new[id(tensor)] = self._moved(tensor, dtype)
                        moved.append((place, name, tensor))
                        place[name] = new[id(tensor)]

    def _is_here(self, tensor: Tensor, dtype: torch.dtype | None) -> bool:
        return tensor.device == self.device and (not tensor.is_floating_point() or dtype in (None, tensor.dtype))

    def _moved(self, tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
        value = tensor.detach().to(self.device, dtype if tensor.is_floating_point() else None)
        return nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


class States(contextlib.ExitStack):
    """Tensors by key on the CPU: up to `max_bytes` in memory, the rest in an unnamed temporary file."""

    def __init__(self, max_bytes: int):
        super().__init__()
        self._remaining_bytes, self._end = max_bytes, 0
        self._kept: dict[Any, Tensor] = {}
        self._places: dict[Any, tuple[int, torch.Size, torch.dtype]] = {}
        self._file: IO[bytes] | None = None

    def __setitem__(self, key: Any, tensor: Tensor) -> None:
        tensor = tensor.detach().cpu().contiguous()
        place = self._places.get(key)
        if key in self._kept or (place is None and tensor.nbytes <= self._remaining_bytes):
            self._remaining_bytes -= tensor.nbytes - (self._kept[key].nbytes if key in self._kept else 0)
            self._kept[key] = tensor
            return
        if place is None or place[1:] != (tensor.shape, tensor.dtype):
            place = self._end, tensor.shape, tensor.dtype
            self._end += tensor.nbytes
        self._places[key] = place
        self._open.seek(place[0])
        self._open.write(tensor.reshape(-1).view(torch.uint8).numpy().data)

    def __getitem__(self, key: Any) -> Tensor:
        if key in self._kept:
            return self._kept[key]
        place, shape, dtype = self._places[key]
        octets = torch.empty(shape.numel() * dtype.itemsize, dtype=torch.uint8)
        self._open.seek(place)
        read = self._open.readinto(octets.numpy().data)  # type: ignore[attr-defined]
        assert read == len(octets)
        return octets.view(dtype).reshape(shape)

    @property
    def _open(self) -> IO[bytes]:
        if self._file is None:
            self._file = self.enter_context(tempfile.TemporaryFile())
        return self._file


class Stream:
    """Runs a model's blocks b_0 … b_{L-1} one at a time: b_i reads h_i and returns h_{i+1}.

    The model's own forward runs around the block, with all other blocks passing their input on unchanged, so each
    block gets the masks, positions and whatever else the model gives it. `obstacle` says why a model does not allow it.
    """

    def __init__(self, model: nn.Module, blocks: Sequence[nn.Module]):
        self.model, self._blocks = model, list(blocks)
        self._rest: tuple[Any, ...] | None = None  # what a block returns after hidden states; None if no tuple

    def first_input(self, batch: Batch) -> Tensor:
        """h_0 of a batch: what the first block reads."""
        return self._up_to(0, batch, lambda *args, **kwargs: _split(args, kwargs)[0])

    def run_block(self, index: int, batch: Batch, hidden: Tensor) -> Tensor:
        """h_{index+1} of a batch: what block `index` returns for `hidden`, which is h_index."""
        own = self._blocks[index].forward
        return self._up_to(index, batch, lambda *args, **kwargs: self._hidden_of(_call(own, args, kwargs, hidden)))

    def run_outside(self, batch: Batch, end: Callable[[Tensor], Tensor]) -> Any:
        """The model's output if its last block returns `end(h_0)`."""
        last = self._blocks[-1]

        def finish(*args: Any, **kwargs: Any) -> Any:
            return self._returned(end(_split(args, kwargs)[0]))

        return self._run(batch, dict.fromkeys(self._blocks[:-1], self._pass) | {last: finish})

    def obstacle(self, batch: Batch, with_gradients: bool = False) -> str | None:
        """Returns why blocks cannot run one at a time, or None if they can; the first one's weights must be in memory.

        With gradients, hidden states must be the only input of the blocks that gradients flow back through.
        """
        if reason := self._shared():
            return reason
        with torch.no_grad():
            output = self._up_to(0, batch, self._blocks[0].forward)
        rest = output[1:] if isinstance(output, tuple) else ()
        if not isinstance(_hidden(output), Tensor) or any(isinstance(part, Tensor) for part in rest):
            return "its blocks return more than hidden states"
        self._rest = rest if isinstance(output, tuple) else None
        with torch.set_grad_enabled(with_gradients):
            (first, one), (second, other) = (self._calls(batch, scale) for scale in (1.0, 0.5))
        if any([call[0] for call in calls] != list(range(len(self._blocks))) for calls in (first, second)):
            return "its blocks do not run once and in order"
        if not all(is_linked for _, is_linked, _ in first):
            return "something runs between its blocks"
        if any(not _same(call[2], again[2]) for call, again in zip(first, second, strict=True)):
            return "its blocks read more of the blocks before than hidden states"
        if with_gradients and any(_requires_gradient(call[2]) for call in first):
            return "its blocks read more than hidden states that depends on weights"
        if one is None or other is None or not _same(one, other):
            return "what follows its blocks reads more than the last one returns"
        return None

    def _shared(self) -> str | None:
        """Says what the blocks share with each other, or with the rest of the model; None if nothing."""
        outside = {module for _, module in self.model.named_modules(memo=set(self._blocks))}  # it stops at blocks
        parts = [outside, *(set(block.modules()) for block in self._blocks)]
        if len(set.union(*parts)) < sum(map(len, parts)):
            return "its blocks share modules"
        config = getattr(self.model, "config", None)
        return "its blocks share keys and values" if getattr(config, "num_kv_shared_layers", 0) else None

    def _up_to(self, index: int, batch: Batch, compute: Callable[..., Any]) -> Any:
        """Returns `compute` of block `index`'s call, where the forward ends; None if the block does not run."""
        found: list[Any] = []

        def capture(*args: Any, **kwargs: Any) -> Any:
            found.append(compute(*args, **kwargs))
            raise Reached

        self._run(batch, dict.fromkeys(self._blocks[:index], self._pass) | {self._blocks[index]: capture})
        return found[0] if found else None

    def _calls(self, batch: Batch, scale: float) -> tuple[list[tuple[int, bool, Any]], Tensor | None]:
        """Runs a forward whose blocks only scale, and the last returns ones; returns its calls and any output.

        A call is a block's index, whether it reads what the previous block returned, and its other arguments.
        """
        calls: list[tuple[int, bool, Any]] = []
        returned: list[Tensor] = []  # only the latest: all of them would take more memory than a block

        def note(index: int, *args: Any, **kwargs: Any) -> Any:
            hidden, others = _split(args, kwargs)
            calls.append((index, not returned or hidden is returned[0], others))
            is_last = index == len(self._blocks) - 1
            returned[:] = [torch.ones_like(hidden) if is_last else hidden.detach() * scale]
            return self._returned(returned[0])

        forwards = {block: functools.partial(note, index) for index, block in enumerate(self._blocks)}
        # Hidden states that skipped their blocks may not fit what follows: any failure there counts as an obstacle.
        with contextlib.suppress(Exception):
            return calls, output_tensor(self._run(batch, forwards)).detach()
        return calls, None

    def _run(self, batch: Batch, forwards: Mapping[nn.Module, Callable[..., Any]]) -> Any:
        with replaced_forwards(forwards), contextlib.suppress(Reached):
            return call_model(self.model, batch)
        return None

    def _pass(self, *args: Any, **kwargs: Any) -> Any:
        return self._returned(_split(args, kwargs)[0])

    def _returned(self, hidden: Tensor) -> Any:
        """Wraps hidden states as a block returns them."""
        return hidden if self._rest is None else (hidden, *self._rest)

    def _hidden_of(self, output: Any) -> Tensor:
        hidden = _hidden(output)
        if isinstance(output, tuple) != (self._rest is not None) or not isinstance(hidden, Tensor):
            kind = type(self.model).__name__
            raise FlexrankError(f"a block of {kind} returns something other than the first block; use collect_moments")
        return hidden


class Reached(Exception):
    """Ends a forward when the rest of it is not needed."""


def _hidden(output: Any) -> Any:
    return output[0] if isinstance(output, tuple) else output


def _split(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Splits the arguments of a block's call into the first, which is the hidden states, and the others."""
    if args:
        return args[0], (args[1:], kwargs)
    (_, hidden), *others = kwargs.items()
    return hidden, ((), dict(others))


def _call(own: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], hidden: Tensor) -> Any:
    """Calls a block's forward with other hidden states as its first argument."""
    return own(hidden, *args[1:], **kwargs) if args else own(**{**kwargs, next(iter(kwargs)): hidden})


def _requires_gradient(value: Any) -> bool:
    """Whether any tensor among these arguments requires a gradient."""
    if isinstance(value, Tensor):
        return value.requires_grad
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
    return any(map(_requires_gradient, parts))


def _same(one: Any, other: Any) -> bool:
    """Whether two calls' arguments agree; values other than tensors, numbers, strings and containers by type."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and (not isinstance(one, int | float | str) or one == other)

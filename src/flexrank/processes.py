"""The processes of one run, as torchrun starts them: who does what, sums over all of them, and how they end together.

Without torchrun, or outside `joined`, there is one process: then nothing here costs anything, or imports torch.
Sums and messages go through torch.distributed, with gloo for CPU tensors and nccl for GPU tensors. Work that process 0
does alone, and the end of a run, go through torchrun's store, so no time-out limits them.
"""

import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import signal
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from flexrank.errors import FlexrankError, first_line

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")
#: Seconds to wait for a process, unless the environment variable FLEXRANK_TIMEOUT sets another number.
TIMEOUT = 600.0
#: Seconds in which all processes must sign off when a run ends; torchrun stops processes, and kills them after 30.
GRACE = 10.0
#: Seconds between two polls of the store, and between two heartbeats of a process.
POLL, HEARTBEAT = 0.05, 1.0
#: Most bytes of small tensors that are summed together.
BUCKET = 2**25


class ProcessLost(RuntimeError):
    """Another process has ended, or did not answer in time."""


@dataclasses.dataclass
class _Group:
    """The processes that torchrun has started."""

    number: int
    count: int
    store: Any
    timeout: float
    turns: int = 0  # calls of `on_first_process` and `gather_merged` so far
    is_alone: bool = False
    is_ending: bool = False

    def wait_for(self, key: str, number: int = 0) -> None:
        """Waits until a process sets the key, however long that takes, while the process sends heartbeats."""
        beat, deadline = -1, 0.0
        while not self.store.check([key]):
            now, last, beat = time.monotonic(), beat, self._beats(number)
            deadline = deadline if beat == last else now + self.timeout
            if self.store.check(["end"]) or now > deadline:
                raise ProcessLost(f"process {number} has ended, or does not answer")
            time.sleep(POLL)

    def send_heartbeats(self, is_over: threading.Event) -> None:
        """Sends heartbeats to the store until `is_over` is set, or torchrun is gone."""
        with contextlib.suppress(RuntimeError):
            while not is_over.wait(min(HEARTBEAT, self.timeout / 4)):
                self.store.add(f"beat/{self.number}", 1)

    def sign_off(self, may_be_late: bool) -> list[int]:
        """Signs off, waits for the others until time is up or one has said why all end; returns who is not there.

        With `may_be_late`, who has not signed but sends heartbeats is there.
        """
        import torch.distributed as dist

        if dist.is_initialized():  # else it was lost while the processes connected
            dist.destroy_process_group()  # releases processes that wait for this one's tensors
        self.store.set(f"signed/{self.number}", "")
        beats = [self._beats(other) for other in range(self.count)]
        deadline = time.monotonic() + min(GRACE, self.timeout)
        while absent := [other for other in range(self.count) if not self.store.check([f"signed/{other}"])]:
            if self.store.check(["end"]) or time.monotonic() > deadline:
                break
            time.sleep(POLL)
        return [other for other in absent if not may_be_late or self._beats(other) == beats[other]]

    def _beats(self, number: int) -> int:
        return self.store.add(f"beat/{number}", 0)


_group: _Group | None = None
#: Numbers the uses of `joined`: torchrun's store keeps the values of the earlier ones.
_uses = itertools.count()


def count() -> int:
    """How many processes share the work; 1 inside `on_first_process`."""
    return 1 if _group is None or _group.is_alone else _group.count


def is_first() -> bool:
    """Whether this is process 0, which alone writes and prints."""
    return number() == 0


def number() -> int:
    """This process's number, from 0 to `count() - 1`."""
    return 0 if _group is None else _group.number


def share(total: int) -> range:
    """The indices of this process's share of `total` items."""
    return range(number(), total, count())


def assign_by_cost(costs: Mapping[str, float], among: int | None = None) -> dict[str, int]:
    """Assigns each item to a process: the most expensive first, each to the process with the least load so far.

    `among` is the number of processes, by default those that run.
    """
    loads, owners = [0.0] * (among or count()), dict[str, int]()
    for name in sorted(costs, key=lambda name: -costs[name]):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += costs[name]
    return owners


def sums(*values: float) -> list[float]:
    """Each value summed over all processes, in float64."""
    if count() == 1 or not values:
        return list(values)
    import torch

    total = torch.tensor(values, dtype=torch.float64)
    sum_([total])
    return total.tolist()


def any_process(value: bool) -> bool:
    """Whether `value` is true in any process; all processes must call this."""
    return sums(float(value))[0] > 0


def same_everywhere(value: Any) -> bool:
    """Whether the value's `repr` is the same in all processes; all processes must call this."""
    if count() == 1:
        return True
    own = zlib.crc32(repr(value).encode())
    return not any_process(sums(own)[0] != own * count())


def sum_(tensors: Iterable["Tensor"]) -> None:
    """Sums each tensor over all processes, in place; all processes pass tensors of the same shapes in the same order.

    Half precision is summed in float32.
    """
    if count() == 1:
        return
    import torch
    import torch.distributed as dist

    with torch.no_grad(), raising_process_lost():
        for bucket in _buckets(tensors):
            dtype = bucket[0].dtype
            wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
            if len(bucket) == 1 and bucket[0].is_contiguous() and bucket[0].dtype == wide:
                dist.all_reduce(bucket[0])
                continue
            flat = torch.cat([tensor.reshape(-1).to(wide) for tensor in bucket])
            dist.all_reduce(flat)
            for tensor, part in zip(bucket, flat.split([tensor.numel() for tensor in bucket]), strict=True):
                tensor.copy_(part.view_as(tensor))


def _buckets(tensors: Iterable["Tensor"]) -> Iterator[list["Tensor"]]:
    """Groups consecutive tensors of the same dtype and device, up to BUCKET bytes, and keeps their order."""
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        is_same_kind = bucket and (bucket[0].dtype, bucket[0].device) == (tensor.dtype, tensor.device)
        if bucket and (not is_same_kind or size + tensor.nbytes > BUCKET):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.nbytes
    if bucket:
        yield bucket


def to_first_(tensors: Sequence["Tensor"], owner: int) -> None:
    """Fills process 0's tensors with the owner's; the other processes do nothing."""
    if owner == 0 or number() not in (0, owner):
        return
    import torch.distributed as dist

    with raising_process_lost():
        for tensor in tensors:
            if is_first():
                dist.recv(tensor, owner)
            else:
                dist.send(tensor.contiguous(), 0)


def on_first_process(work: Callable[[], T]) -> T:
    """Returns what `work` returns in process 0, which runs it alone; the others wait, however long it takes.

    The value must be JSON-serialisable. Inside `work`, there is one process.
    """
    if _group is None or _group.is_alone:
        return work()
    _group.turns += 1
    key = f"turn/{_group.turns}"
    if _group.number > 0:
        _group.wait_for(key)
        return json.loads(_group.store.get(key))
    _group.is_alone = True
    try:
        value = work()
    finally:
        _group.is_alone = False
    _group.store.set(key, json.dumps(value))
    return value


def gather_merged(own: Mapping[int, Any]) -> dict[int, Any]:
    """Merges all processes' JSON values by number; all processes must call this, and wait for the last."""
    if _group is None or _group.is_alone:
        return dict(sorted(own.items()))
    _group.turns += 1
    keys = [f"turn/{_group.turns}/{number}" for number in range(_group.count)]
    _group.store.set(keys[_group.number], json.dumps(list(own.items())))
    everything = dict[int, Any]()
    for number, key in enumerate(keys):
        _group.wait_for(key, number)
        everything |= dict(json.loads(_group.store.get(key)))
    return dict(sorted(everything.items()))


def agree_on_exit(line: str, status: int, is_certain: bool = True, *, is_signal: bool = False) -> tuple[str, int]:
    """The line that this process prints when all end, empty if another has spoken, and the exit status of all.

    If it is not certain that the cause is this process, as after a signal or a lost connection, the line instead names
    the processes that do not answer, if any. After a signal a process that sends heartbeats answers: its step, or its
    save, may take longer than one waits here.
    """
    if _group is None:
        return line, status
    _group.is_ending = True
    for kind in (signal.SIGTERM, signal.SIGINT):  # with which torchrun ends all when one has ended
        signal.signal(kind, signal.SIG_IGN)
    if not is_certain and (missing := _group.sign_off(is_signal)):
        names = f"process {missing[0]} does" if len(missing) == 1 else f"processes {str(missing)[1:-1]} do"
        line, status = f"error: {names} not answer; the others end, and the same command continues from here", 1
    end = _group.store.compare_set("end", "", json.dumps([_group.number, status]))
    speaker, status = json.loads(end)
    return (line if speaker == _group.number else ""), status


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Inside the block, the processes that torchrun started form one group; without torchrun nothing happens.

    A process that ends with an error must call `agree_on_exit` first, even if the block could not be entered.

    Raises:
        FlexrankError: torch.distributed has a process group already, FLEXRANK_TIMEOUT is not a number of seconds, there
            are more processes than GPUs, or the environment has the WORLD_SIZE of another launcher.
    """
    global _group
    size, is_started = os.environ.get("WORLD_SIZE") or "1", "TORCHELASTIC_RUN_ID" in os.environ
    if size != "1" and not is_started:  # each would be the only process, and all would write the same files
        right = "start the processes with torchrun, or unset WORLD_SIZE to run one alone"
        raise FlexrankError(f"WORLD_SIZE is {size}, but torchrun did not start this process: {right}")
    if size == "1":
        yield
        return
    import torch

    dist: Any = torch.distributed
    if dist.is_initialized():
        raise FlexrankError("torch.distributed has a process group already; joined() makes its own, so enter it first")
    before, is_over = signal.signal(signal.SIGTERM, signal.default_int_handler), threading.Event()
    store, number, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"use {next(_uses)}", store)
    _group = _Group(number, size, dist.PrefixStore("flexrank", store), TIMEOUT)
    _connect(_group, store)
    threading.Thread(target=_group.send_heartbeats, args=(is_over,), daemon=True).start()
    try:
        yield
        if not _group.is_ending:
            _group.store.set(f"signed/{number}", "")
            dist.destroy_process_group()
            signal.signal(signal.SIGTERM, before)
    finally:
        is_over.set()
        _group = None


def _connect(group: _Group, store: Any) -> None:
    """Opens the connections for tensors, with the time-out that the environment sets."""
    import torch
    import torch.distributed as dist

    group.timeout, place, has_gpu = _timeout(), int(os.environ["LOCAL_RANK"]), torch.cuda.is_available()
    if has_gpu:
        if place >= torch.cuda.device_count():
            raise FlexrankError(f"{torch.cuda.device_count()} GPUs are too few; --nproc-per-node is at most that")
        torch.cuda.set_device(place)
    backend, limit = "cpu:gloo,cuda:nccl" if has_gpu else "gloo", datetime.timedelta(seconds=group.timeout)
    with raising_process_lost():
        dist.init_process_group(backend, store=store, rank=group.number, world_size=group.count, timeout=limit)


def _timeout() -> float:
    text = os.environ.get("FLEXRANK_TIMEOUT", str(TIMEOUT))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e9:
        raise FlexrankError(f"FLEXRANK_TIMEOUT is {text!r}; it is a number of seconds above 0")
    return seconds


@contextlib.contextmanager
def raising_process_lost() -> Iterator[None]:
    """Inside the block, raises ProcessLost for torch.distributed's errors when a process is gone or late."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError:  # also a RuntimeError, but this process's own
        raise
    except RuntimeError as error:
        raise ProcessLost(f"another process does not answer ({first_line(error)})") from error

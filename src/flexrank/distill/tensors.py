"""The tensors of a checkpoint as safetensors: complete, or each process's part, by torch.distributed.checkpoint.

Its own format is a pickle, so only its safetensors writer and reader are used. They are imported where they are called,
because the import takes a second.
"""

import itertools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor

from flexrank import processes
from flexrank.files import clear_write_errors, digest_file

#: Approximate size of each file in which a process writes its parts; the writer holds a second copy of a file's bytes.
FILE_BYTES = 2**26
WHOLE = "state.safetensors"


def write_whole(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes all tensors to one file."""
    with clear_write_errors(directory / WHOLE):
        safetensors.torch.save_file({name: one.contiguous() for name, one in tensors.items()}, directory / WHOLE)


def write_parts(directory: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Writes each process's part of `sharding.as_global` tensors; one of the processes writes any other tensor.

    Returns the digests of this process's files by name.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    writer = HuggingFaceStorageWriter(str(directory), file_numbers(tensors), save_distributed=True)
    try:
        with processes.raising_process_lost():
            save(dict(tensors), storage_writer=writer)
    except CheckpointException as error:  # it collects the failures of all processes: raise one of them
        raise next(failure for failure, _ in error.failures.values()) from error
    own = sorted(directory.glob(f"shard-{processes.number() + 1:05}-*"))
    return {file.name: digest_file(file) for file in own}


def file_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number, from 1, of the file in which each process writes its part of a tensor, by the tensor's name."""
    total = itertools.accumulate(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    room = FILE_BYTES * processes.count()
    return {name: 1 + size // room for name, size in zip(tensors, total, strict=True)}


def stored_tensors(directory: Path) -> dict[str, Any]:
    """`size` and `properties.dtype` of each full tensor that the directory's files hold, complete or in parts."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    stored: dict[str, Any] = HuggingFaceStorageReader(str(directory)).read_metadata().state_dict_metadata
    return stored


def read_tensors(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fills tensors in place, complete or `sharding.as_global`, however many processes wrote the files."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it is in one process
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(directory)), no_dist=processes.count() == 1)

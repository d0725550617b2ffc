"""How much of the teacher's output the probe keeps."""

from flexrank.errors import FlexrankError
from flexrank.run.config import RunConfig


def probe_top_k(config: RunConfig, rows: int, row_bytes: int) -> int | None:
    """How many of the teacher's likeliest classes the probe distinguishes in each row; None is all of them.

    All if they fit into `probe.target_bytes`, otherwise the largest power of two k that fits, at 4·(2k+1) bytes a row.
    The paper's allocation as printed takes the loss as printed, with all; embeddings have no classes, and are small.

    Args:
        rows: rows of the loss, in all of the probe's samples.
        row_bytes: bytes of a whole row of the teacher's output.

    Raises:
        FlexrankError: not even one class fits; the message names the setting and the least that would suffice.
    """
    limit = config.probe.target_bytes
    if config.allocation.method == "paper" or config.task == "embedding" or rows * row_bytes <= limit:
        return None
    most = (limit // (4 * rows) - 1) // 2
    if most < 1:
        least = top_k_bytes(rows, 1)
        raise FlexrankError(f"probe.target_bytes is {limit}; the targets of {rows} rows take {least} at least")
    return int(2 ** (most.bit_length() - 1))


def top_k_bytes(rows: int, top_k: int) -> int:
    """Bytes of the targets of `LogitObjective(top_k=...)`."""
    return 4 * (2 * top_k + 1) * rows

"""A unit of an experiment in a process of its own, which imports what the unit needs and no more."""

import multiprocessing
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from flexrank.errors import FlexrankError


def start(compute: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[Connection, BaseProcess]:
    """Starts `compute(*arguments)` in a fresh process; returns what receives its value, and the process."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send_value, args=(sender, compute, arguments))
    process.start()
    sender.close()  # the process has its own: when that is closed, the receiver ends
    return receiver, process


def _send_value(sender: Connection, compute: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    try:
        sender.send(compute(*arguments))
    except Exception as error:
        error.add_note(traceback.format_exc())
        sender.send(error)


def value_of(receiver: Connection, process: BaseProcess) -> Any:
    """Returns the value that a process sends, or raises its error; FlexrankError if the process is killed before."""
    try:
        value = receiver.recv()
    except EOFError as error:
        process.join()
        raise FlexrankError(f"a part's process ended with status {process.exitcode}, perhaps out of memory") from error
    process.join()
    if isinstance(value, Exception):
        raise value
    return value

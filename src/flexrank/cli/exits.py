"""How a command ends: with an exit status, and one line for a wrong input; only one of several processes prints it."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup

from flexrank import processes
from flexrank.errors import FlexrankError, first_line, is_out_of_memory

LOST, WRONG_INPUT, INTERRUPTED = 1, 2, 130

#: Packages that a verb may need beyond the core, and the extra that installs each.
EXTRAS = {
    "transformers": "hf", "huggingface_hub": "hf", "tokenizers": "hf", "matplotlib": "report", "peft": "peft",
    "PIL": "images", "datasets": "data", "lm_eval": "eval", "torchao": "quant", "onnx": "onnx", "onnxscript": "onnx",
    "onnxruntime": "onnx", "openvino": "openvino", "executorch": "executorch", "tensorboard": "tracking",
}  # fmt: skip


class OneLineErrors(TyperGroup):
    """A group of commands that reports a wrong input as one line on standard error, with exit status 2."""

    def main(self, *args: Any, standalone_mode: bool = True, **options: Any) -> Any:
        """Runs the command line as click does, and exits."""
        options["standalone_mode"] = False  # click then raises its errors
        if not standalone_mode:
            return super().main(*args, **options)
        with contextlib.ExitStack() as group:
            try:
                group.enter_context(_terminated_as_interrupted())
                group.enter_context(processes.joined())
                with _only_first_prints():
                    status = super().main(*args, **options) or 0
                if status == INTERRUPTED:  # Ctrl-C outside `resumable`, of which typer returns only the status
                    raise _Interrupted
            except FlexrankError as error:
                status = _report_error(str(error))
            except OSError as error:
                # A full disk, or a file that may not be read: the system's message, and the file that it is about.
                status = _report_error(
                    f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror or error)
                )
            except ModuleNotFoundError as error:
                package = (error.name or "").partition(".")[0]
                if package not in EXTRAS:
                    raise
                status = _report_error(f"{package} is not installed: pip install 'flexrank[{EXTRAS[package]}]'")
            except processes.ProcessLost as error:
                status = _report_error(str(error), LOST, is_certain=False)
            except (_Interrupted, KeyboardInterrupt) as error:  # the latter while the processes connect
                status = _agreed_status(str(error) or "interrupted", INTERRUPTED, is_certain=False)
            except _USAGE_ERROR as error:
                if type(error).__name__ == "NoArgsIsHelpError":  # its message is the whole help
                    if processes.is_first():
                        error.show()
                    status = error.exit_code
                else:
                    status = _report_error(error.format_message())
            except Exception as error:
                status = _report_or_raise(error)
        sys.exit(status)


class _Interrupted(Exception):
    """A Ctrl-C or SIGTERM; with the message to print, if "interrupted" does not say it all."""


# Newer versions of typer vendor click; a base class of typer's public exception is from the copy that typer uses.
_USAGE_ERROR: Any = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def _out_of_memory_message(error: Exception) -> str:
    """The message: remedies, after the error's first sentences; torch's later ones are about its own settings."""
    words = ". ".join(first_line(error).split(". ")[:3]).rstrip(".")
    right = (
        "`flexrank run CONFIG --dry-run` counts what each stage takes; these take less: dtype bfloat16, a smaller "
        "data.batch_size, and of distillation gradient_checkpointing, optimizer adamw_8bit, a smaller batch_size with "
        "more accumulation, and on several GPUs sharded"
    )
    return f"out of memory ({words}); {right}"


def _report_or_raise(error: Exception) -> int:
    """Reports a lack of memory, or a lost process that explains the error; raises any other error.

    Nor is an error raised that another process has reported. Other libraries raise a RuntimeError when a process is
    lost, but also for their other faults. Returns the exit status.
    """
    if is_out_of_memory(error):
        return _report_error(_out_of_memory_message(error), LOST)
    fault = "a fault of the program"
    word, _ = processes.agree_on_exit(fault, LOST, is_certain=not isinstance(error, RuntimeError))
    if word == fault:
        raise error
    print(word, end="\n" if word else "", file=sys.stderr)
    return LOST


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """Makes SIGTERM, as a preempted job gets it, raise KeyboardInterrupt in the block: what is half-written goes."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is signal.default_int_handler:  # `agree_on_exit` may ignore it by now
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def resumable() -> Iterator[None]:
    """Ends on Ctrl-C or SIGTERM with one line that says how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        raise _Interrupted("\ninterrupted; the same command continues from here") from None


@contextlib.contextmanager
def _only_first_prints() -> Iterator[None]:
    """Inside the block only process 0 prints."""
    if processes.is_first():
        yield
        return
    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing), contextlib.redirect_stderr(nothing):
        yield


def _report_error(message: str, status: int = WRONG_INPUT, is_certain: bool = True) -> int:
    """Prints the message as one line; returns the exit status."""
    return _agreed_status(f"error: {' '.join(message.split())}", status, is_certain)


def _agreed_status(line: str, status: int, is_certain: bool = True) -> int:
    """Prints the line if this process is the one to print it; returns the exit status."""
    line, status = processes.agree_on_exit(line, status, is_certain, is_signal=status == INTERRUPTED)
    if line:
        print(line, file=sys.stderr)
    return status

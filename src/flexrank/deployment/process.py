"""Runs a function in a fresh interpreter, where a model is loaded, run or timed as its user will do it.

A process that has trained allocates memory differently: a small model took .70 of its base model's time there, and .55
in a process that had done nothing else (docs/log.md).
"""

import atexit
import gc
import importlib
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from flexrank import progress
from flexrank.errors import FlexrankError
from flexrank.files import read_json, write_json

WRONG_INPUT = 2


def in_fresh_process(
    function: Callable[..., Any], *arguments: Any, timeout: float | None = None, environment: Mapping[str, str] = {}
) -> Any:
    """Returns `function(*arguments)` from a new interpreter with the same modules, threads, logging and progress.

    The new process ends when this one does. Its standard output and standard error both go to this process's standard
    error. The function is at the top level of a module; its arguments and its value are JSON. `timeout` is in seconds.

    Raises:
        FlexrankError: the function raised one, or an error about a file or a missing package, whose message this has;
            or the process failed or took too long.
    """
    modules = os.pathsep.join(path or os.getcwd() for path in sys.path)
    with tempfile.TemporaryDirectory() as scratch:
        request = Path(scratch, "request.json")
        name = f"{function.__module__}:{function.__qualname__}"
        shown = {"level": logging.getLogger("flexrank").getEffectiveLevel(), "progress": progress.is_shown()}
        write_json(request, {"function": name, "arguments": arguments, "threads": torch.get_num_threads(), **shown})
        # With -m, Python warns that the package has imported the module already.
        quiet = "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN)"  # the parent reports a Ctrl-C
        code = f"{quiet}; from {__name__} import main; sys.exit(main(sys.argv[1]))"
        command = [sys.executable, "-c", code, str(request)]
        variables = {**os.environ, **environment, "PYTHONPATH": modules}
        # The child's standard input closes when this process ends, which ends the child.
        with subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=2) as child:
            try:
                status = child.wait(timeout)
            except subprocess.TimeoutExpired as error:
                child.kill()
                limit = f"{timeout:g} s; give a larger timeout"
                raise FlexrankError(f"a fresh process did not finish {name} within {limit}") from error
            except BaseException:
                child.kill()
                raise
        answer = read_json(request) if status in (0, WRONG_INPUT) else {}
    if "error" in answer:
        raise FlexrankError(answer["error"])
    if status:
        hint = "; it was killed, perhaps for lack of memory" if status < 0 else "; its own message is above"
        raise FlexrankError(f"a fresh process that ran {name} ended with status {status}{hint}")
    return answer["value"]


def main(path: str) -> int:
    """Replaces the request in the file `path` by the answer, which may be a wrong input's or the system's error."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    atexit.register(gc.freeze)  # or the interpreter, as it ends, looks for cycles in all of torch: about a second
    request = read_json(path)
    torch.set_num_threads(request["threads"])
    progress.show(request["progress"])
    logging.basicConfig(format="%(message)s")
    logging.getLogger("flexrank").setLevel(request["level"])
    module, _, name = request["function"].partition(":")
    try:
        value = getattr(importlib.import_module(module), name)(*request["arguments"])
    except (FlexrankError, OSError, ModuleNotFoundError) as error:
        write_json(path, {"error": str(error)})
        return WRONG_INPUT
    write_json(path, {"value": value})
    return 0


def _end_with_parent() -> None:
    os.read(0, 1)
    os._exit(1)

"""Calls a function on several processes, and takes what each rank saw from it to the tests."""

import gc
import json
import logging
import multiprocessing
import os
import socket
import tempfile
import time
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed

from guardbit import LayoutUnavailable

#: Of the ranks: gloo on the CPU, and NCCL on a GPU for each.
ACCELERATORS = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))

#: Imported once, in a process that every rank is a fork of: seconds a rank otherwise.
IMPORTED = ["lightning.pytorch", "guardbit.callbacks.monitoring"]


def launch(function, ranks, *arguments, **environment):
    """Calls a function of a module once a rank; fails with what it printed if it fails.

    With "cuda" among the arguments each rank needs a GPU, without which the test is skipped.
    The environment is that of `torch.distributed.run`, whose own process would import it all again.
    """
    if "cuda" in arguments and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    of_all = {
        **os.environ, **environment,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests",
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # else cuBLAS need not repeat itself
    }  # fmt: skip
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with tempfile.NamedTemporaryFile("w+") as log:
        processes = []
        for rank in range(ranks):
            of_one = {**of_all, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            given = (function, arguments, of_one, log.name)
            processes.append(context.Process(target=run, args=given))
        codes = exit_codes(processes, seconds=240)
        assert codes == [0] * ranks, (codes, log.read()[-6000:])


def of_ranks(function, ranks):
    """A fixture: the folder in which so many ranks have kept what the function returns."""

    @pytest.fixture(scope="module", params=ACCELERATORS)
    def folder(request, tmp_path_factory):
        made = tmp_path_factory.mktemp("ranks")
        launch(function, ranks, made, request.param)
        return made

    return folder


def begin(accelerator):
    """Makes the group of the ranks; a rank's GPU is its default one."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if accelerator == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.use_deterministic_algorithms(True, warn_only=True)
    torch.distributed.init_process_group("nccl" if accelerator == "cuda" else "gloo")


def keep(folder, ways, train):
    """Calls `train(path, way)` for each way, on a rank of a group, and keeps what it returns."""
    for way in ways:
        path = folder / way
        path.mkdir(exist_ok=True)
        found = train(path, way)
        (path / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def seen(folder):
    """What each rank has returned."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


def refusal(function, *arguments, **named):
    """Why a call is refused, or None."""
    try:
        function(*arguments, **named)
    except (ValueError, LayoutUnavailable) as error:
        return str(error)


@contextmanager
def logged():
    """Level and text of each line that GuardBit logs, from INFO on."""
    lines, logger, handler = [], logging.getLogger("guardbit"), logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)


def exit_codes(processes, seconds):
    """Waits for all, or for the first that fails: the others would wait for it."""
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + seconds
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                break
            time.sleep(0.05)
        return [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()


def run(function, arguments, environment, log):
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(environment)
    gc.freeze()  # else each collection would visit, and so copy, all that comes from the fork
    function(*arguments)

"""Runs a script on several processes, and takes what each rank saw from one to the tests."""

import json
import logging
import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

#: Imported once, in a process that every rank is a fork of: seconds a rank otherwise.
IMPORTED = ["lightning.pytorch", "guardbit.callbacks.monitoring", "guardbit.callbacks.stabilizing"]


def launch(script, ranks, *arguments, **environment):
    """Runs a script once a rank, with arguments; fails with what it printed if it fails.

    The environment is that of `torch.distributed.run`, whose own process would import it all again.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    of_all = {
        **os.environ, **environment,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "tests",
    }  # fmt: skip
    command = [str(x) for x in (script, *arguments)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    with tempfile.NamedTemporaryFile("w+") as log:
        processes = []
        for rank in range(ranks):
            of_one = {**of_all, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            processes.append(context.Process(target=run, args=(command, of_one, log.name)))
        codes = exit_codes(processes, seconds=240)
        assert codes == [0] * ranks, (codes, log.read()[-6000:])


def on_gloo(folder, ways, train):
    """Calls `train(way)` for each way, on a rank of a group, and keeps what it returns."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("gloo")
    for way in ways:
        path = Path(folder) / way
        path.mkdir(exist_ok=True)
        found = train(path, way)
        (path / f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


def seen(folder):
    """What each rank has returned."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]


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


def run(command, environment, log):
    """What one rank does."""
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")

"""Runs a script on several processes."""

import multiprocessing
import os
import runpy
import socket
import sys
import tempfile
import time

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

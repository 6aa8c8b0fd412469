"""Runs a script of this folder on several processes."""

import multiprocessing
import os
import runpy
import socket
import sys
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
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    log = os.path.join(str(arguments[-1]), "printed.txt")  # the folder that the script writes to
    processes = []
    for rank in range(ranks):
        of_one = {**of_all, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [str(x) for x in (script, *arguments)]
        processes.append(context.Process(target=run, args=(command, of_one, log)))
    try:
        for process in processes:
            process.start()
        deadline = time.monotonic() + 240
        while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
            if any(process.exitcode for process in processes):
                break  # the others would wait for it
            time.sleep(0.05)
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
    with open(log) as printed:
        assert codes == [0] * ranks, (codes, printed.read()[-6000:])


def run(command, environment, log):
    """What one rank does."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")

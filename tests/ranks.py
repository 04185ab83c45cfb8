"""Processes of one process group, started once, that run many checks."""

from __future__ import annotations

import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist


def _serve(rank: int, world: int, backend: str, store: str, jobs: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(1)
    # Loaders may start workers, and a fork takes less time than torch's import in a new process.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method("fork", force=True)
    device = torch.device("cuda", rank) if backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(minutes=5),
        device_id=device,
    )
    while (job := jobs.recv()) is not None:
        check, args, kwargs = job
        try:
            check(*args, **kwargs)
            jobs.send("")
        except BaseException:
            jobs.send(f"rank {rank}:\n{traceback.format_exc()}")
    dist.destroy_process_group()


class RankPool:
    """Pool of ranks. ``pool(check, ...)`` calls a function of a module on all ranks, and raises the error of a rank.

    Args:
        world: number of ranks.
        folder: empty folder.
        backend: of the process group. With "nccl" each rank has a GPU.
        method: start of the processes. A forked process cannot use CUDA, because its server may have queried devices.
    """

    def __init__(self, world: int, folder: Path, backend: str = "gloo", method: str = "forkserver") -> None:
        self._context = multiprocessing.get_context(method)
        self._world = world
        self._folder = folder
        self._backend = backend
        self._ends: list[Any] = []
        self._processes: list[Any] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        store = str(self._folder / f"store{len(list(self._folder.iterdir()))}")
        for rank in range(self._world):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(rank, self._world, self._backend, store, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def __call__(self, check: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        if not self._processes:
            self._start()
        for end in self._ends:
            end.send((check, args, kwargs))
        waiting = list(self._ends)
        while waiting:
            for end in multiprocessing.connection.wait(waiting):
                waiting.remove(end)
                try:
                    failure = end.recv()
                except EOFError:
                    failure = "a rank died"
                if failure:
                    self._kill()  # other ranks may wait forever, so the next check gets new ranks
                    pytest.fail(failure, pytrace=False)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
        self._end()

    def close(self) -> None:
        for end in self._ends:
            end.send(None)
        self._end()

    def _end(self) -> None:
        for process in self._processes:
            process.join()
        for end in self._ends:
            end.close()
        self._ends, self._processes = [], []


def on_ranks(fixture: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that runs a test on all ranks of a pool.

    Args:
        fixture: name of the fixture that returns the pool.
    """

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        @wraps(body)
        def test(**arguments: Any) -> None:
            arguments.pop(fixture)(_run, body.__module__, body.__name__, **arguments)

        of_pool = inspect.Parameter(fixture, inspect.Parameter.KEYWORD_ONLY)
        parameters = (*inspect.signature(body).parameters.values(), of_pool)
        test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return test

    return decorate


def _run(module: str, name: str, /, **arguments: Any) -> None:
    getattr(importlib.import_module(module), name).__wrapped__(**arguments)

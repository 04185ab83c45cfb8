"""Kind H: trainings under profilers, tracers, pickles, patches and settings of others."""

from __future__ import annotations

import contextlib
import copy
import cProfile
import gc
import inspect
import io
import logging
import os
import pickle
import pstats
import signal
import sys
import threading
import tracemalloc
import warnings

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from tests.situations.harness import Start, Table, check, mlp, points, sgd, weights
from tests.situations.test_a_state import classified

KIND = Table()


class Net(nn.Module):
    """Model at the top of a module, which pickles."""

    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.body(x) * scale


def train(start: Start, model, between=None, optimizer=None, epochs=12, loader=None):
    """Train, and call ``between(epoch)`` after each epoch."""
    optimizer = optimizer or sgd(model)
    loader = loader or DataLoader(points(), batch_size=16)
    model, loader, step = start(model, loader, optimizer, classified)
    losses = []
    for epoch in range(epochs):
        losses += [step(batch) for batch in loader]
        if between:
            between(epoch)
    return {"weights": [*weights(model), torch.stack(losses)]}


@KIND.add()
def profiler_with_a_schedule(start: Start):
    ready = []
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=schedule,
        on_trace_ready=lambda p: ready.append(len(p.key_averages()) > 0),
        record_shapes=True,
        profile_memory=True,
        with_stack=True,
        with_modules=True,
    ) as profile:
        seen = train(start, Net(), lambda epoch: profile.step())
    return seen | {"ready": ready}


@KIND.add()
def calls_counted_by_cprofile(start: Start):
    """From the second epoch on, so that the profile holds no work of ``optimize`` itself."""
    profile = cProfile.Profile()
    model = Net()
    seen = train(start, model, lambda epoch: profile.enable() if epoch == 0 else None)
    profile.disable()
    calls = [
        count
        for (file, _, name), (count, *_) in pstats.Stats(profile).stats.items()
        if file == __file__ and name == "forward"
    ]
    return seen | {"calls": calls}


@KIND.add()
def coverage_by_settrace(start: Start):
    lines = []

    def trace(frame, event, arg):
        if frame.f_code is not Net.forward.__code__:
            return None
        if event == "line":
            lines.append(frame.f_lineno)
        return trace

    before = sys.gettrace()
    try:
        seen = train(start, Net(), lambda epoch: sys.settrace(trace) if epoch == 0 else None)
        mine = sys.gettrace() is trace
    finally:
        sys.settrace(before)
    return seen | {"lines": len(lines), "kept": mine}


@KIND.add()
def calls_seen_by_setprofile(start: Start):
    calls = [0]

    def note(frame, event, arg):
        if event == "call" and frame.f_code is Net.forward.__code__:
            calls[0] += 1

    try:
        seen = train(start, Net(), lambda epoch: sys.setprofile(note) if epoch == 0 else None)
        mine = sys.getprofile() is note
    finally:
        sys.setprofile(None)
    return seen | {"calls": calls[0], "kept": mine}


@KIND.add()
def memory_traced_by_tracemalloc(start: Start):
    tracemalloc.start(5)
    try:
        model, firsts = Net(), []

        def between(epoch):
            if epoch in (5, 11):
                firsts.append(tracemalloc.take_snapshot())

        seen = train(start, model, between)
        added = sum(one.size_diff for one in firsts[1].compare_to(firsts[0], "filename") if one.size_diff > 0)
        return seen | {"tracing": tracemalloc.is_tracing(), "large": added > 30_000_000}
    finally:
        tracemalloc.stop()


@KIND.add(forced={"compile": True})
def model_inspected_while_it_trains(start: Start):
    model, found = Net(), []

    def between(epoch):
        found.append(
            (
                str(inspect.signature(model.forward)),
                [str(one.kind) for one in inspect.signature(model).parameters.values()],
                inspect.getsource(model.forward).strip()[:12],
                inspect.getsource(type(model)).split("\n")[0],
                type(model).__name__,
                type(model).__module__ == __name__,
                isinstance(model, Net),
                repr(model),
                [name for name, _ in model.named_modules()],
                sorted(model.state_dict()),
            )
        )

    return train(start, model, between) | {"found": found}


@KIND.add(forced={"compile": True})
def copies_and_pickles_in_the_middle(start: Start):
    """The copy of each epoch is a separate model, which trains like the first."""
    model = Net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    copies, kinds = [], []

    def between(epoch):
        if epoch in (3, 10):
            file = io.BytesIO()
            torch.save({"model": model, "optimizer": optimizer}, file)
            file.seek(0)
            saved = torch.load(file, weights_only=False)
            both = [(copy.deepcopy(model), None), (pickle.loads(pickle.dumps(model)), None)]
            for one, its in [*both, (saved["model"], saved["optimizer"])]:
                kinds.append((type(one) is Net, type(its) is torch.optim.Adam or its is None))
                again = its or sgd(one, lr=1e-3)
                again.zero_grad()
                classified(one, points().tensors).backward()
                again.step()
                copies.extend(weights(one))

    seen = train(start, model, between, optimizer)
    return {
        "weights": [*seen["weights"], *copies],
        "kinds": kinds,
        "optimizer": isinstance(optimizer, torch.optim.Adam),
    }


@KIND.add()
def module_calls_patched_before(start: Start):
    """Summaries and debuggers replace ``__call__`` of a class and restore it at the end."""
    calls, original = [0], nn.Module.__call__

    def counted(self, *args, **kwargs):
        calls[0] += isinstance(self, Net)
        return original(self, *args, **kwargs)

    nn.Module.__call__ = counted
    try:
        seen = train(start, Net())
        kept = nn.Module.__call__ is counted or start.form == "run"
    finally:
        nn.Module.__call__ = original
    return seen | {"calls": calls[0], "kept": kept}


@KIND.add()
def backward_patched_in_the_middle(start: Start):
    """A library wraps ``Tensor.backward`` when it is imported, in the middle of the training."""
    calls, original = [0], torch.Tensor.backward

    def between(epoch):
        if epoch == 7:

            def counted(self, *args, **kwargs):
                calls[0] += 1
                return original(self, *args, **kwargs)

            torch.Tensor.backward = counted

    try:
        seen = train(start, Net(), between)
    finally:
        torch.Tensor.backward = original
    return seen | {"backwards": calls[0]}


@KIND.add()
def optimizer_step_wrapped_by_the_script(start: Start):
    model = Net()
    optimizer = sgd(model)
    steps, original = [0], optimizer.step

    def counted(*args, **kwargs):
        steps[0] += 1
        return original(*args, **kwargs)

    optimizer.step = counted
    seen = train(start, model, optimizer=optimizer)
    return seen | {"steps": steps[0], "mine": optimizer.step is counted}


@KIND.add(forced={"compile": True})
def global_hooks_of_a_debugger(start: Start):
    counts = {"forward": 0, "steps": 0}

    def forward(module, args, output):
        counts["forward"] += isinstance(module, Net)

    def step(optimizer, args, kwargs):
        counts["steps"] += 1

    handles = [
        nn.modules.module.register_module_forward_hook(forward),
        register_optimizer_step_post_hook(step),
    ]
    try:
        seen = train(start, Net())
    finally:
        for handle in handles:
            handle.remove()
    return seen | {"counts": counts}


@KIND.add()
def warnings_that_are_errors(start: Start):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return train(start, Net())


@KIND.add(forms=("run",))
def log_of_the_script_at_debug(start: Start):
    lines = io.StringIO()
    handler, root = logging.StreamHandler(lines), logging.getLogger()
    handler.setFormatter(logging.Formatter("%(name)s %(message)s"))
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.DEBUG)
    try:
        seen = train(start, Net(), lambda epoch: logging.getLogger("train").info("epoch %d", epoch), epochs=20)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
    return seen | {"lines": lines.getvalue().splitlines()}


@KIND.add(forced={"in_memory": True})
def loader_of_a_class_of_its_own(start: Start):
    """Moves batches in its own ``__iter__``, and counts them."""

    class Counting(DataLoader):
        passed, note = 0, "mine"

        def __iter__(self):
            for x, y in super().__iter__():
                self.passed += 1
                yield x * 0.5, y

    loader = Counting(points(), batch_size=16)
    seen = train(start, Net(), loader=loader)
    return seen | {"passed": loader.passed, "note": loader.note, "length": len(loader)}


@KIND.add()
def operations_counted_by_a_mode(start: Start):
    class Count(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.calls += func is torch.nn.functional.linear
            return func(*args, **(kwargs or {}))

    with contextlib.ExitStack() as stack:
        count = Count()
        seen = train(start, Net(), lambda epoch: stack.enter_context(count) if epoch == 0 else None)
    return seen | {"calls": count.calls}


@KIND.add()
def anomaly_that_is_caught(start: Start):
    """The script looks for the NaN of one step with anomaly detection, and continues."""
    model, errors = Net(), []

    def between(epoch):
        if epoch == 8:
            torch.autograd.set_detect_anomaly(True)
            with torch.enable_grad():
                try:
                    (model(points().tensors[0]).sum() * float("nan")).sqrt().backward()
                except RuntimeError as error:
                    errors.append("returned nan values" in str(error))
            torch.autograd.set_detect_anomaly(False)
            model.zero_grad()

    return train(start, model, between) | {"errors": errors, "off": torch.is_anomaly_enabled()}


@KIND.add()
def deterministic_algorithms(start: Start):
    torch.use_deterministic_algorithms(True, warn_only=False)
    modes = []
    seen = train(start, Net(), lambda epoch: modes.append(torch.are_deterministic_algorithms_enabled()))
    return seen | {"modes": modes}


@KIND.add()
def signals_that_the_script_handles(start: Start):
    """A cluster's notice makes the script note a checkpoint at the end of the epoch."""
    asked, saved = [], []
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))

    def between(epoch):
        if epoch % 3 == 0:
            os.kill(os.getpid(), signal.SIGUSR1)
        if asked:
            saved.append(epoch)
            asked.clear()

    try:
        seen = train(start, Net(), between)
        same = all(signal.getsignal(n) is before[n] for n in (signal.SIGINT, signal.SIGTERM))
    finally:
        signal.signal(signal.SIGUSR1, before[signal.SIGUSR1])
    return seen | {"saved": saved, "same": same}


@KIND.add()
def fork_that_evaluates(start: Start):
    """Every few epochs, a forked child computes a value with the model and ends."""
    model, values = Net(), []

    def between(epoch):
        if epoch % 5 == 4:
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                status = 1
                try:
                    with torch.no_grad():
                        os.write(write, f"{model(points().tensors[0]).abs().sum() > 0}".encode())
                    status = 0
                finally:
                    os._exit(status)
            os.close(write)
            values.append((os.read(read, 100).decode(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
            os.close(read)

    return train(start, model, between) | {"values": values}


@KIND.add()
def thread_that_evaluates_a_copy(start: Start):
    """A thread computes with copies of the model while the training goes on."""
    model, sums, errors = Net(), [], []

    def evaluate(copied):
        try:
            with torch.no_grad():
                for _ in range(20):
                    value = copied(points().tensors[0]).sum()
            sums.append(bool(value.isfinite()))
        except Exception as error:
            errors.append(repr(error))

    threads = []

    def between(epoch):
        threads.append(threading.Thread(target=evaluate, args=(copy.deepcopy(model),)))
        threads[-1].start()

    seen = train(start, model, between)
    for thread in threads:
        thread.join()
    return seen | {"sums": sums, "errors": errors}


@KIND.add()
def garbage_collection_set_by_the_script(start: Start):
    before, found = gc.get_threshold(), []
    gc.disable()
    gc.set_threshold(500, 8, 8)
    try:
        model = Net()
        seen = train(start, model, lambda epoch: gc.collect())
        start.undo(model)
        found = [gc.isenabled(), gc.get_threshold()]
    finally:
        gc.set_threshold(*before)
        gc.enable()
    return seen | {"found": found}


@KIND.add()
def loss_function_patched_by_a_library(start: Start):
    """Loggers patch functions of torch on the module that scripts call them from."""
    calls, original = [0], torch.nn.functional.cross_entropy

    def counted(*args, **kwargs):
        calls[0] += 1
        return original(*args, **kwargs)

    def loss(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    torch.nn.functional.cross_entropy = counted
    try:
        model = Net()
        model, loader, step = start(model, DataLoader(points(), batch_size=16), sgd(model), loss)
        for _ in range(12):
            for batch in loader:
                step(batch)
    finally:
        torch.nn.functional.cross_entropy = original
    return {"weights": weights(model), "calls": calls[0]}


@KIND.cases()
def test_other_tools(situation, form, way):
    check(situation, form, way)

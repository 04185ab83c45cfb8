"""Neighbour: the whole step, from forward to update, replayed as one CUDA graph."""

from __future__ import annotations

import contextlib
import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from flatout import _dtensor, words
from flatout.data import map_tensors
from flatout.data.generators import RandomState
from flatout.mfu.ranges import range as named_range
from flatout.optim.base import NativeStep, is_patched
from flatout.techniques.base import NotApplicable, NothingBetter, StepTechnique, Switch
from flatout.techniques.calls import RoutedCall

if TYPE_CHECKING:
    from flatout.job import Job, PhaseOf

Result = TypeVar("Result")

WARM_UP = 3
"""Eager steps of a signature before it is captured, as torch's own ``make_graphed_callables`` takes: libraries are
loaded, algorithms searched for and code compiled in the first two, all of which a capture forbids."""

MOST_GRAPHS = 4
"""Signatures that are captured; a graph keeps gradients and inputs of its own."""

MOST_SIGNATURES = 256
"""Signatures whose eager steps are counted: of unpadded text there are more than ever come again."""

PAYS_AFTER = 50
"""Replays that pay for a capture."""

MOST_CHANGES = 8
"""Changes of an optimizer's constants that came before their capture had paid, after which nothing is captured."""


class Recorder(Protocol):
    """Records what a step does to the device, to be done again."""

    def aside(self, work: Callable[[], Result]) -> Result:
        """Do the work where recordings are made, in order with what is queued before and behind it."""

    def strictly(self, work: Callable[[], Result]) -> Result:
        """The same, and raise where a recording of it could not be made or would do something else."""

    def record(self, work: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """Record the work without doing it.

        Returns:
            What does it, as often as wanted, and what the work returned: tensors that each time are written anew.
        """

    def wait(self) -> None:
        """Called before all recordings are let go of: none is under way any more."""

    def give_back(self) -> None:
        """Called after that, when none is to follow soon: give memory back to the device."""


_side_streams: dict[int, torch.cuda.Stream] = {}


class CudaRecorder:
    """Records CUDA graphs, on a side stream that all of a device share.

    Warm-up and capture run on one and the same stream: the autograd nodes that accumulate gradients then belong to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def aside(self, work: Callable[[], Result]) -> Result:
        """On the side stream. What is allocated there is safe to free anywhere: only fenced work allocates there."""
        current, side = torch.cuda.current_stream(self._device), self._stream()
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                return work()
        finally:
            current.wait_stream(side)

    def strictly(self, work: Callable[[], Result]) -> Result:
        """Refuses work that waits for the device, and work that draws random numbers on the host.

        torch leaves a capture that failed half undone (its memory stays reserved: pytorch #190308), so what is known
        to fail is found out without one.
        """
        generators = RandomState.capture()
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            result = self.aside(work)
        except RuntimeError as error:
            if "synchronizing CUDA operation" in str(error):
                raise NothingBetter("a step waits for the device (.item(), say), which a replay cannot") from error
            raise
        finally:
            torch.cuda.set_sync_debug_mode(mode)
        drawn = generators.moved()
        if drawn not in (None, "a CUDA generator"):  # torch moves that one along with the replays
            raise NothingBetter(f"a step draws random numbers from {drawn}, which a replay would repeat")
        return result

    def record(self, work: Callable[[], Result]) -> tuple[Callable[[], None], Result]:
        """A CUDA graph. All of this recorder's share memory: nothing in one is wanted once another has run."""
        failures: list[BaseException] = []
        results: list[Result] = []
        fresh = self._pool is None
        if fresh:
            self._pool = torch.cuda.graph_pool_handle()
        graph, side = torch.cuda.CUDAGraph(), self._stream()
        collecting = gc.isenabled()
        gc.disable()  # a finalizer that frees pinned memory, say, would break the capture
        # A graph gets workspaces of its own, in its own memory, and they are forgotten with it: torch keeps them per
        # stream, frees them when somebody clears them, and would hand a graph's to others.
        torch._C._cuda_clearCublasWorkspaces()
        try:
            # "thread_local": what a loader's threads do meanwhile is allowed. The outer stream context restores the
            # stream when torch's own exit fails half way.
            with (
                torch.cuda.stream(side),
                torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"),
            ):
                try:
                    results.append(work())
                except BaseException as error:
                    failures.append(error)
                    raise
        except BaseException as error:
            with contextlib.suppress(RuntimeError):
                graph.reset()
            self._mend()
            if fresh:
                self._pool = None
            raise (failures[0] if failures else error) from None
        finally:
            torch._C._cuda_clearCublasWorkspaces()
            if collecting:
                gc.enable()
        return graph.replay, results[0]

    def _mend(self) -> None:
        """Undo what torch leaves behind of a capture that failed.

        Its allocator goes on as if the capture were under way, and its random generator refuses to draw ("Offset
        increment outside graph capture"), until a capture with it has ended well.
        """
        index = self._stream().device.index
        with contextlib.suppress(RuntimeError, AttributeError):
            torch._C._cuda_endAllocateToPool(index, self._pool)  # raises where torch has done so itself
            torch._C._cuda_releasePool(index, self._pool)
        with contextlib.suppress(RuntimeError):
            nothing = torch.zeros((), device=self._device)
            with (
                torch.cuda.stream(self._stream()),
                torch.cuda.graph(torch.cuda.CUDAGraph(), stream=self._stream(), capture_error_mode="thread_local"),
            ):
                nothing.add_(1)

    def wait(self) -> None:
        """Waits for replays under way. What shares their memory has to be recorded before they are gone."""
        torch.cuda.synchronize(self._device)
        self._pool = None  # one that no graph uses any more cannot be used again

    def give_back(self) -> None:
        """The allocator would keep the graphs' memory, and give none of it to anybody else."""
        torch.cuda.empty_cache()

    def _stream(self) -> torch.cuda.Stream:
        index = torch.cuda.current_device() if self._device.index is None else self._device.index
        if index not in _side_streams:
            _side_streams[index] = torch.cuda.Stream(index)
        return _side_streams[index]


@dataclass(frozen=True)
class _Graph:
    """A recorded step.

    Attributes:
        replay: does it again.
        inputs: the tensors that it reads its batch from.
        loss: where it leaves the loss.
        grads: where it leaves the gradients, in the order of ``_Baked.trained``. They are kept also while ``p.grad``
            is another tensor or None: replays write there.
        skipped: where it leaves whether the loss scaler skipped the update.
    """

    replay: Callable[[], None]
    inputs: list[Tensor]
    loss: Tensor
    grads: list[Tensor | None]
    skipped: Tensor | None


class WholeStep:
    """Stands in the place of a job's step: replays the batches' signatures that it has captured, steps others eagerly.

    A signature is everything about a batch but the numbers in its tensors. ``WARM_UP`` real steps of one come before
    its capture, which runs nothing, so the replay of the same batch follows at once. While ``learning`` all that
    happens in one call, and what it raises is raised to the caller; later an error means eager steps for good.

    What a graph has as constants is compared before every replay, at C speed: 10 us for a few layers, 0.1 ms for 600
    tensors of parameters and state, while the device is busy with the replay before, which takes longer the more
    there are. Where something has changed, all graphs are dropped, and the next step, an eager one, shows what holds
    from then on.

    ``p.grad`` shows the gradients of the latest step, whichever way it went. Eager steps begin with gradients of None,
    so that they write over no graph's; a graph's own are put back after its replay.

    Batches come from the prefetcher on the device already, in memory that torch's allocator hands out anew. They are
    copied into the graph's inputs from there: a launch per dtype, and microseconds for megabytes, where a GPU copies
    hundreds of gigabytes a second and more. A graph for each place that a batch may lie in would save that copy, and
    take a capture and gradients for each; nor are those places a few where a caller holds on to batches.

    Attributes:
        learning: whether every signature is captured when it comes.
        why_off: why all steps are eager for good; empty while they need not be.
        replays: steps replayed so far.
        eager_steps: steps that were not.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.learning = True
        self.why_off = ""
        self.replays = 0
        self.eager_steps = 0
        self._recorder = recorder
        self._graphs: dict[Hashable, _Graph] = {}
        self._seen: Counter[Hashable] = Counter()
        self._baked: _Baked | None = None
        self._replays_before = 0
        self._changes = 0

    def __call__(self, job: Job, batch: Any, phase: PhaseOf) -> Tensor:
        """One step, in the way that serves; arguments and result as of ``Job.step``."""
        signed = None if self.why_off or _is_under_a_mode(job.device) else sign(batch, job.device)
        if signed is None:
            self.eager_steps += 1
            return job.eager_step(batch, phase)
        self._compare(job)
        key, tensors = signed
        if self._baked is not None and self._baked.written():
            return self._eager(job, key, batch, phase)
        if key in self._graphs or (self._is_ready(key) and not self.learning):
            return self._graphed(job, key, batch, tensors, phase)
        return self._learn(job, key, batch, tensors, phase) if self.learning else self._eager(job, key, batch, phase)

    def release(self) -> None:
        """Free the memory of all graphs; gradients that lie in it are copied out."""
        if not self._graphs:
            return
        if self._baked is not None:
            mine = {id(grad) for graph in self._graphs.values() for grad in graph.grads}
            for p in self._baked.trained:
                if p.grad is not None and id(p.grad) in mine:
                    p.grad = p.grad.clone()
        self._drop()
        self._recorder.give_back()

    def _compare(self, job: Job) -> None:
        """Drop the graphs whose constants are no longer true."""
        changed = "" if self._baked is None else self._baked.changed(job)
        if not changed:
            return
        if not self.learning and changed == _Baked.NUMBERS:
            paid = self.replays - self._replays_before >= PAYS_AFTER
            self._changes = 0 if paid else self._changes + 1
        self._drop()
        if self._changes == MOST_CHANGES:
            self._give_up(f"{changed} change again and again, and a graph has them as constants")

    def _drop(self) -> None:
        if self._graphs:
            self._recorder.wait()
        self._graphs.clear()
        self._baked = None

    def _is_ready(self, key: Hashable) -> bool:
        """Whether a signature may be captured: warm, and the step before has shown what its constants are."""
        return (
            not self.why_off
            and self._seen[key] >= WARM_UP
            and self._baked is not None
            and not self._baked.hooked
            and len(self._graphs) < MOST_GRAPHS
        )

    def _eager(self, job: Job, key: Hashable, batch: Any, phase: PhaseOf) -> Tensor:
        """A real step, which warms up its signature."""
        if key in self._seen or len(self._seen) < MOST_SIGNATURES:
            self._seen[key] += 1
        self.eager_steps += 1
        loss = self._recorder.aside(lambda: job.eager_step(batch, phase))
        self._note(job)
        return loss

    def _note(self, job: Job) -> None:
        if self._baked is None:
            self._baked = _Baked(job)
        self._baked.note_writes()

    def _learn(self, job: Job, key: Hashable, batch: Any, tensors: list[Tensor], phase: PhaseOf) -> Tensor:
        """Warm up and capture at once. Training state moves by several steps: only trials learn, and they put it back.

        Raises:
            NothingBetter: the step cannot be replayed.
        """
        for _ in range(WARM_UP - 1):
            self._eager(job, key, batch, phase)
        self._seen[key] += 1
        loss = self._recorder.strictly(lambda: job.eager_step(batch, phase))
        self._compare(job)
        self._note(job)
        return self._graphed(job, key, batch, tensors, phase) if self._is_ready(key) else loss

    def _graphed(self, job: Job, key: Hashable, batch: Any, tensors: list[Tensor], phase: PhaseOf) -> Tensor:
        """Replay, after a capture where there is none; an eager step where either fails."""
        try:
            graph = self._graphs.get(key) or self._capture(job, key, batch)
            return self._replayed(job, graph, tensors)
        except Exception as error:
            if self.learning:
                raise
            reason = words.first_line(error)
        loss = self._eager(job, key, batch, phase)  # what is wrong with the step itself raises here as well
        self._give_up(reason)
        return loss

    def _capture(self, job: Job, key: Hashable, batch: Any) -> _Graph:
        baked, optimizer, scaler = self._baked, job.optimizer, job.scaler
        assert baked is not None
        assert optimizer is not None
        with torch.no_grad():
            inputs = map_tensors(torch.clone, batch)
        signed = sign(inputs, job.device)
        assert signed is not None
        baked.rates.write(optimizer)
        job.zero_grad()  # the memory of the last gradients is the graph's to take

        def work() -> tuple[Tensor, list[Tensor | None], Tensor | None]:
            with baked.rates.lent(optimizer):
                loss = job.eager_step(inputs, _unheard)
            return loss, [p.grad for p in baked.trained], None if scaler is None else scaler.last_step_skipped

        state = {p: (entry, dict(entry)) for p, entry in optimizer.state.items()}
        try:
            replay, (loss, grads, skipped) = self._recorder.record(work)
            if baked.changed(job):  # state that nothing has begun: each replay would begin it again
                raise NothingBetter(f"{baked.changed(job)} within a step")
        except BaseException:
            job.abandon()
            optimizer.state.clear()
            for p, (entry, saved) in state.items():
                entry.clear()
                entry.update(saved)
                optimizer.state[p] = entry
            job.zero_grad()
            raise
        self._replays_before = self.replays
        self._graphs[key] = graph = _Graph(replay, signed[1], loss, grads, skipped)
        return graph

    def _replayed(self, job: Job, graph: _Graph, tensors: list[Tensor]) -> Tensor:
        baked, scaler = self._baked, job.scaler
        assert baked is not None
        assert job.optimizer is not None
        with named_range("flatout.replay"), torch.no_grad():
            loss = torch.empty_like(graph.loss)  # before the replay: what fails behind it would be done twice
            torch._foreach_copy_(graph.inputs, tensors)
            baked.rates.write(job.optimizer)
            graph.replay()
            loss.copy_(graph.loss)
        baked.show(graph.grads)
        if scaler is not None:
            scaler._last_step_skipped = graph.skipped
        baked.note_replay()
        self.replays += 1
        return loss

    def _give_up(self, reason: str) -> None:
        """Step eagerly from here on, and say so once."""
        self._drop()
        self.why_off = reason
        warnings.warn(f"whole-step CUDA graphs are off from here on: {reason}", RuntimeWarning, stacklevel=5)


class _Baked:
    """What a graph has as constants: every address and every choice that the host made while it was captured.

    Attributes:
        trained: every parameter that may get a gradient.
        rates: the learning rates, the one number that schedules change, in device memory.
        hooked: whether somebody listens, whom a replay would not tell.
    """

    NUMBERS = "numbers in the optimizer's param_groups"

    def __init__(self, job: Job) -> None:
        optimizer = job.optimizer
        assert optimizer is not None
        self._modules = [m for root in job.modules for m in root.modules()]
        self._slots: list[Any] = [s for m in self._modules for s in (m._parameters, m._buffers, m._modules)]
        values = [list(group.values()) for group in optimizer.param_groups]
        self._numbers = list(chain.from_iterable(values))  # held, so that ids stay theirs
        self._members = self._now(job)
        stepped = [p for group in optimizer.param_groups for p in group["params"]]
        self._tensors = list({id(t): t for t in self._members if _is_plain(t)}.values())
        leaves = (*(t for t in self._members if isinstance(t, nn.Parameter)), *stepped)
        self._leaves = list({id(p): p for p in leaves}.values())
        self.trained = [p for p in self._leaves if p.requires_grad]
        begun = set(map(id, stepped))
        self._growing = [p for p in self.trained if id(p) not in begun]  # steps add to the gradients that they have
        self._grown = list(map(_grad, self._growing))
        self._stepped = [p for p in stepped if p.grad is not None]
        self._copies = [entry["copy"] for entry in optimizer.state.values() if "copy" in entry]
        self._masters = [p for p, entry in optimizer.state.items() if "master" in entry]
        self._versions: list[int] = []
        self._hooks: list[Any] = [
            hooks
            for m in self._modules
            for hooks in (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
        ]
        self._hooks += _GLOBAL_HOOKS
        self._hooks += [optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks]
        self.rates = _Rates(optimizer, job.device)
        self.hooked = self._is_hooked(job)
        reads: tuple[tuple[str, Callable[[Job], Any]], ...] = (
            ("parts of the model, parameters of the optimizer or its state", self._has_others),
            ("places of tensors in memory", lambda _: list(map(Tensor.data_ptr, self._tensors))),
            ("modes (train or eval)", lambda _: list(map(_training, self._modules))),
            ("parameters that require gradients", lambda _: list(map(_requires_grad, self._leaves))),
            ("gradients that no update uses up", self._has_other_gradients),
            ("hooks", self._is_hooked),
            (self.NUMBERS, _numbers),
            ("settings of the step", _settings),
        )
        self._facts = [(what, read, read(job)) for what, read in reads]

    def changed(self, job: Job) -> str:
        """What is no longer as it was; empty when everything is."""
        return next((what for what, read, then in self._facts if read(job) != then), "")

    def written(self) -> bool:
        """Whether somebody wrote a parameter that has a master weight, which only an eager step has follow."""
        return bool(self._masters) and list(map(_version, self._masters)) != self._versions

    def note_writes(self) -> None:
        """All masters follow what has been written so far."""
        self._versions = list(map(_version, self._masters))

    def note_replay(self) -> None:
        """A replay has written parameters and copies, which shows nowhere."""
        torch.autograd.graph.increment_version(self._stepped + self._copies)
        self.note_writes()

    def show(self, grads: Sequence[Tensor | None]) -> None:
        """Make these the gradients of ``trained``."""
        if not all(map(is_, map(_grad, self.trained), grads)):
            for p, grad in zip(self.trained, grads, strict=True):
                p.grad = grad

    def _now(self, job: Job) -> list[Any]:
        """Every part of the model, every parameter of the optimizer, and everything in its state."""
        assert job.optimizer is not None
        of_groups = map(_params, job.optimizer.param_groups)
        of_state = map(dict.values, job.optimizer.state.values())
        return list(chain.from_iterable(chain(map(dict.values, self._slots), of_groups, of_state)))

    def _has_others(self, job: Job) -> bool:
        now = self._now(job)
        return len(now) != len(self._members) or not all(map(is_, now, self._members))

    def _has_other_gradients(self, job: Job) -> bool:
        return not all(map(is_, map(_grad, self._growing), self._grown))

    def _is_hooked(self, job: Job) -> bool:
        assert job.optimizer is not None
        return (
            any(self._hooks)
            or any(map(_tensor_hooks, self.trained))
            or any(map(_accumulated_hooks, self.trained))
            or is_patched(job.optimizer)
            or "_swapped" in vars(job.optimizer)  # inside optimizer.ema.swap(), where steps are refused
        )


class _Rates:
    """Learning rates in device memory, where a captured update reads them.

    They are written in stream order, as arguments of launches, and only when they have changed: no pinned buffer has
    to outlive its copy. A rate that is on the device already stays where it is.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        groups = optimizer.param_groups
        # float64, as a number in Python is: the update computes the same either way.
        self._slots = list(torch.zeros(len(groups), dtype=torch.float64, device=device).unbind())
        self._written: list[float | None] = [None] * len(groups)

    def write(self, optimizer: torch.optim.Optimizer) -> None:
        """Bring the rates of the moment to the device."""
        for i, group in enumerate(optimizer.param_groups):
            rate = group["lr"]
            if _is_on_device(rate):
                continue
            rate = float(rate)
            if rate != self._written[i]:
                self._slots[i].fill_(rate)
                self._written[i] = rate

    @contextlib.contextmanager
    def lent(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Inside, the optimizer takes its rates from the device."""
        groups = optimizer.param_groups
        own = [group["lr"] for group in groups]
        try:
            for group, slot in zip(groups, self._slots, strict=True):
                if not _is_on_device(group["lr"]):
                    group["lr"] = slot
            yield
        finally:
            for group, rate in zip(groups, own, strict=True):
                group["lr"] = rate


_params = itemgetter("params")
_training = attrgetter("training")
_requires_grad = attrgetter("requires_grad")
_version = attrgetter("_version")
_grad = attrgetter("grad")
_tensor_hooks = attrgetter("_backward_hooks")
_accumulated_hooks = attrgetter("_post_accumulate_grad_hooks")

_GLOBAL_HOOKS = (
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
    nn.modules.module._global_backward_hooks,
    nn.modules.module._global_backward_pre_hooks,
    torch_optimizer._global_optimizer_pre_hooks,
    torch_optimizer._global_optimizer_post_hooks,
)


def _numbers(job: Job) -> list[Any]:
    """Every option of every group; of the learning rate, which is no constant, only whether it is on the device."""
    assert job.optimizer is not None
    return [
        (name, id(value)) if isinstance(value, Tensor) and (name != "lr" or _is_on_device(value)) else (name, value)
        for group in job.optimizer.param_groups
        for name, value in group.items()
        if name != "params" and (name != "lr" or _is_on_device(value))
    ]


def _settings(job: Job) -> list[Any]:
    scaler = job.scaler
    scaling = None if scaler is None else (scaler, scaler.is_enabled(), id(scaler._scale), _schedule_of(scaler))
    return [type(job.model), job.model._compiled_call_impl, type(job.optimizer), job.max_grad_norm, scaling]


def _schedule_of(scaler: torch.amp.GradScaler) -> tuple[float, float, int]:
    return scaler.get_growth_factor(), scaler.get_backoff_factor(), scaler.get_growth_interval()


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided


def _is_on_device(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _is_under_a_mode(device: torch.device) -> bool:
    """No backward can follow; or the user's own autocast may hold weights that were cast before a capture."""
    return not torch.is_grad_enabled() or torch.is_autocast_enabled(device.type)


@contextlib.contextmanager
def _unheard(phase: str) -> Iterator[None]:
    """A capture is no step: whoever times phases would record events into it."""
    yield


class _Unsuited(Exception):
    """Something in a batch that a graph cannot be fed with."""


def sign(batch: Any, device: torch.device) -> tuple[Hashable, list[Tensor]] | None:
    """What a graph has as constants of a batch, and the tensors that it is fed with, in ``map_tensors``'s order.

    None where it cannot be fed: no tensors, tensors elsewhere, of subclasses or with gradients, objects of other kinds.
    """
    tensors: list[Tensor] = []
    try:
        key = _signed(batch, device.type, tensors)
    except _Unsuited:
        return None
    return (key, tensors) if tensors else None


_VALUES = frozenset((bool, int, float, complex, str, bytes, type(None)))


def _signed(value: Any, device: str, tensors: list[Tensor]) -> Hashable:
    kind = type(value)
    if kind is Tensor:
        if value.device.type != device or value.requires_grad or value.layout is not torch.strided:
            raise _Unsuited
        tensors.append(value)
        return value.shape, value.stride(), value.dtype
    if kind in _VALUES:
        return kind, value
    if isinstance(value, (tuple, list)):
        return kind, tuple([_signed(part, device, tensors) for part in value])
    if isinstance(value, Mapping):
        return kind, tuple([(key, _signed(part, device, tensors)) for key, part in value.items()])
    raise _Unsuited


class GraphSwitch(Switch):
    """Puts a :class:`WholeStep` in the place of a job's step, and takes it out.

    It holds that only while it is out of the job, so that nothing here keeps the model alive.
    """

    label = "whole step"
    value = True
    settling = 2  # what restores the optimizer's state drops graphs: one eager step, and a capture
    hides_memory = True

    def __init__(self, job: Job, recorder: Recorder) -> None:
        self._job = weakref.ref(job)
        self._parked: WholeStep | None = WholeStep(recorder)

    @property
    def whole_step(self) -> WholeStep | None:
        """Wherever it is; None when it has gone with its job."""
        job = self._job()
        return self._parked or (None if job is None else job.whole_step)

    @property
    def why_off(self) -> str:  # type: ignore[override]
        """Why all steps are eager for good."""
        return "" if self.whole_step is None else self.whole_step.why_off

    def _turn_on(self) -> None:
        job = self._job()
        if job is not None:
            job.whole_step, self._parked = self._parked, None

    def _turn_off(self) -> None:
        job = self._job()
        if job is not None:
            self._parked, job.whole_step = job.whole_step, None

    def freeze(self) -> None:
        """From here on steps are real ones."""
        if self.whole_step is not None:
            self.whole_step.learning = False

    def release(self) -> None:
        """Free the graphs' memory."""
        if self.whole_step is not None:
            self.whole_step.release()


class CudaGraph(StepTechnique):
    """Replays forward, backward and update as one CUDA graph: one launch instead of hundreds.

    When it helps: the GPU waits for kernels to be launched, as it does in steps of many small kernels. When it hurts:
    a graph keeps the memory of a step for itself, and copies each batch; large kernels gain nothing. Learning rates
    lie in device memory, so that schedules go on; another change of what a graph has as constants (weight decay,
    dropout's p, train or eval mode, tensors that were moved) is met by a new capture where it can be seen. Python runs
    in no replay: a forward that counts its calls or prints does so only when it is captured, and a tensor that it
    reads from elsewhere has to stay where it is. So hooks, and steps that wait for the device or draw random numbers
    on the host, keep the technique away.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs; "often 1.2-3x" is what
    https://docs.nvidia.com/dl-cuda-graph/torch-cuda-graph/torch-integration.html says.
    """

    name = "cuda_graph"
    title = "whole-step CUDA graph"
    kept_because = "a step is one launch, where launching its kernels one by one took the time"
    expected = "1.2 to 3×"
    tolerance = 0.005
    draws_other_numbers = True
    optimistic_gain = 3.0

    def check(self, job: Job) -> None:
        """A training step on a CUDA device, all of it on the device, with nobody listening."""
        if job.device.type != "cuda":
            raise NotApplicable("there is no CUDA device")
        reason = why_not_captured(job)
        if reason:
            raise NotApplicable(reason)

    def candidates(self, job: Job) -> Sequence[Switch]:
        """The one switch."""
        return [GraphSwitch(job, CudaRecorder(job.device))]

    def forced(self, job: Job, value: Any) -> Switch:
        """True is the only value."""
        if value is not True:
            raise ValueError(f"techniques['{self.name}'] must be True or False, got {value!r}")
        return self.candidates(job)[0]


def why_not_captured(job: Job) -> str:
    """What keeps a job's step from being captured on any device; empty when nothing is known to."""
    if job.optimizer is None:
        return "no optimizer was given to optimize(): in a loop of one's own nobody can tell where a step ends"
    if job.accumulate > 1:
        return "accumulate > 1: gradients would have to outlive the graph of one batch in the memory of another's"
    reason = _why_not_this_optimizer(job.optimizer)
    if reason:
        return reason
    modules = [m for root in job.modules for m in root.modules()]
    if any(isinstance(m, torch.jit.ScriptModule) for m in modules):
        return "the model comes as a ScriptModule, of which nobody can tell when its parts are replaced"
    if any(isinstance(m, (nn.parallel.DistributedDataParallel, nn.DataParallel)) for m in modules):
        return "the model is spread over several devices or processes"
    call = job.model._compiled_call_impl
    if isinstance(call, RoutedCall) and getattr(call, "_reuses_outputs", False):
        return "torch.compile replays the model as CUDA graphs already"
    if any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in modules):
        return "the model has hooks, and a replay runs no Python"
    signatures = [sign(batch, job.device) for batch in job.batches]
    if any(signed is None for signed in signatures):
        return "the batches hold more than tensors and plain values: a graph cannot be fed with that"
    if len(signatures) > 2 and len({signed[0] for signed in signatures if signed is not None}) == len(signatures):
        return "no two batches are of the same shapes: a graph replays one"
    return ""


def _why_not_this_optimizer(optimizer: torch.optim.Optimizer) -> str:
    if not isinstance(optimizer, NativeStep):
        return (
            "the optimizer is not flatout's fused one, which takes its learning rate from the device: "
            "a graph would have that as a constant"
        )
    if is_patched(optimizer) or optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "the optimizer has hooks or a step of its own, and a replay runs no Python"
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if any(map(_dtensor.is_distributed, parameters)):
        return "the parameters are spread over several processes"
    if any("base_momentum" in group for group in optimizer.param_groups):
        return "the schedule changes momentum with each step, which a graph has as a constant"
    return ""

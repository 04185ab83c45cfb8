"""Types of the torch-free native module (csrc/python.cpp)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from flatout.mfu.flop_count import FlopCount

built_with_cuda: bool

def cuda_versions() -> tuple[int, int]:
    """Return the newest CUDA version that the driver supports, and the version of flatout's CUDA runtime.

    A version is 1000 x major + 10 x minor. It is 0 without a driver, and for a build without CUDA kernels.
    """

def needed_driver(runtime: int) -> int:
    """Return the oldest driver for kernels of a CUDA runtime, as the newest CUDA version that the driver supports."""

# Values of Address, Extent and Handle cannot be checked. Wrong values of other arguments raise.
Address = int
"""Address of memory that the caller keeps valid, such as ``tensor.data_ptr()``."""
Extent = int
"""Size of the memory at an address, in bytes, rows or indices."""
Handle = int
"""A ``cudaStream_t`` or ``cudaEvent_t``; 0 on the host."""
Transfer = tuple[Address, Address, Extent]
"""Source address, target address, number of bytes."""
Column = tuple[list[tuple[Address, Extent, Extent]], Extent, int, int, Sequence[int]]
"""Address, rows and row stride (bytes) of each tensor; bytes of a row, DLPack type code, bits, shape of a row."""

# -- counting (csrc/mfu) --

class StepReading:
    @property
    def steps(self) -> int: ...
    @property
    def samples(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def seconds(self) -> float: ...
    @property
    def step_seconds(self) -> float | None: ...
    @property
    def samples_per_second(self) -> float | None: ...
    @property
    def tokens_per_second(self) -> float | None: ...
    @property
    def flops_per_second(self) -> float | None: ...
    @property
    def hardware_flops_per_second(self) -> float | None: ...
    @property
    def stall_fraction(self) -> float | None: ...
    @property
    def phase_steps(self) -> int: ...
    @property
    def phases(self) -> list[float]: ...

PHASES: tuple[str, ...]
"""Names of the phases, by their numbers."""

class StepTimer:
    """Base class of timers that are written in Python."""

class Phase:
    """Context manager that measures the time of one phase of a step."""

    def __enter__(self) -> None: ...
    def __exit__(self, *exception: object) -> None: ...

class Step:
    """The running step, as returned by ``with counter.step(...) as step``."""

    def phase(self, name: str, /) -> Phase:
        """Return a context for a phase of the step. Profilers show the phase as a range. Phases do not nest.

        Args:
            name: one of ``PHASES``, such as ``"forward"``.

        Raises:
            ValueError: ``name`` is not in ``PHASES``.
        """

    def __enter__(self) -> Step: ...
    def __exit__(self, *exception: object) -> None: ...

class StepCounter:
    """Counter of steps. A token identifies a step from its begin to its end. Unknown FLOPs are None.

    Token 0 is the step that begins next.
    """

    def __init__(self, window: int) -> None: ...
    def use_events(self, device: int, current_stream: Callable[[int], int]) -> None: ...
    def use_timer(self, timer: StepTimer) -> None: ...
    def measure_phases_every(self, steps: int) -> None: ...
    def step(self, samples: int, tokens: int, flops: float | FlopCount | None, /) -> Step: ...
    def phase(self, token: int, name: str, /) -> Phase: ...
    def begin(self) -> int: ...
    def mark(self, token: int, phase: int) -> None: ...
    def touch(self, token: int) -> None: ...
    def finish(
        self, token: int, samples: int, tokens: int, flops: float | None, hardware_flops: float | None
    ) -> None: ...
    def drop(self, token: int) -> None: ...
    def waited(self, seconds: float) -> None: ...
    def pause(self) -> None: ...
    def add(
        self,
        seconds: float,
        gap: float | None = None,
        waited: float = 0.0,
        samples: int = 0,
        tokens: int = 0,
        flops: float | None = None,
        hardware_flops: float | None = None,
        phases: Sequence[float] | None = None,
    ) -> None: ...
    def reset(self) -> None: ...
    def window(self) -> StepReading: ...
    def total(self) -> StepReading: ...

def signature(value: object, Tensor: type[Tensor], tensors_of: Callable[[Any], list[Tensor]], /) -> bytes:
    """Return the shape, dtype and requires_grad of every tensor in ``value``, as bytes.

    Args:
        value: tensors in tuples, lists, dicts and other objects.
        Tensor: ``torch.Tensor``.
        tensors_of: lists the tensors of parts that are neither tensors nor tuples, lists, dicts, strings or numbers.
    """

def optimizer_signature(
    params: list[Tensor], tensors: list[Tensor], state: dict[Any, Any], Tensor: type[Tensor]
) -> bytes:
    """Return bytes that differ after a change of an optimizer.

    Args:
        params: parameters, which count as objects.
        tensors: memory of the parameters, whose address, dtype, shape and strides count.
        state: state of each parameter, whose values count as objects.
        Tensor: ``torch.Tensor``.
    """

def show_ranges(profiler: dict[str, Any], range: Callable[[str], AbstractContextManager[object]]) -> None:
    """Show steps and phases as ranges while an NVTX tool or torch's profiler listens.

    Args:
        profiler: namespace of ``torch.autograd.profiler``.
        range: returns a range with a name.
    """

def range_push(name: str) -> None: ...
def range_pop() -> None: ...
def nvtx_listens() -> bool: ...

# -- moving batches (csrc/prefetch) --

def cuda_usable() -> bool: ...
def create_stream(device: int) -> int: ...

class Ring:
    def __init__(self, device: int, max_idle: int = ...) -> None: ...
    def clear(self) -> None: ...
    @property
    def device(self) -> int: ...
    @property
    def idle(self) -> int: ...
    @property
    def allocations(self) -> int: ...

class Columns:
    def __init__(self, specs: Sequence[Column], owner: Any) -> None: ...

class Batches:
    def start(self, ahead: int) -> None: ...
    def take(self, ahead: int) -> list[Any]: ...

class Copied:
    def wait(self) -> None: ...
    def block(self, stream: Handle) -> None: ...
    def finished(self) -> bool: ...

class Stager:
    def __init__(
        self, ring: Ring, threads: int = 1, device: int = -1, max_in_flight: int = 4, helpers: int = 0
    ) -> None: ...
    def gather(
        self, columns: Columns, indices: Address, first: int, count: Extent, batches: Extent, owner: Any
    ) -> Batches: ...
    def copy(
        self, transfers: Sequence[Transfer], pinned_direct: bool, stream: Handle, fence: Handle, owner: Any
    ) -> Copied: ...
    def close(self) -> None: ...

# -- the cache of samples (csrc/cache) --

class RowStates:
    def __init__(self, address: Address, rows: Extent, owner: Any) -> None: ...
    def claim(self, row: int) -> bool: ...
    def complete(self, row: int) -> None: ...
    def give_up(self, row: int) -> None: ...
    def is_complete(self, row: int) -> bool: ...

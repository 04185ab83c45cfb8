"""Hand-made Chrome-trace events of a GPU training."""

from __future__ import annotations

from typing import Any

from flatout.profile import Profile
from flatout.profile.summary import summarise
from flatout.profile.trace import BOUNDARY, Trace

MAIN, AUTOGRAD = 1, 2
STREAM, COPY_STREAM = 7, 20


def marked(trace: Trace) -> set[str]:
    """Return the phases that contain a marker, which is a call of ``time.sleep(0)``."""
    return {trace.phase_of(event) for event in trace.within(trace.host) if event.name == "<built-in function sleep>"}


def summary_of(recording: ProfileRecording, **about: Any) -> Profile:
    """Return the profile of a trace, as if its steps had taken the same time without the profiler."""
    trace = Trace(recording.events)
    steps = trace.parts.steps(trace.boundaries)
    return summarise(steps, trace, profiled=steps, **about)


def step(length: float = 1000, **phases: tuple[float, float]) -> ProfileRecording:
    """Return a recording of one step, with start and end of its phases."""
    recording = ProfileRecording()
    recording.boundary(0)
    for name, (start, end) in phases.items():
        recording.phase(name, start, end)
    recording.boundary(length)
    return recording


class ProfileRecording:
    """Recording of events in the format of torch's profiler. Times are in microseconds."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._correlation = 0

    def host(self, name: str, start: float, end: float, kind: str = "cpu_op", thread: int = MAIN, **args: Any) -> None:
        self._add(name, start, end, kind, 1, thread, args)

    def boundary(self, at: float) -> None:
        self.host(BOUNDARY, at, at, "user_annotation")

    def phase(self, name: str, start: float, end: float) -> None:
        self.host(f"flatout.{name}", start, end, "user_annotation")

    def function(self, name: str, start: float, end: float, called_from: str = "") -> None:
        self.host(name, start, end, "python_function", **({"CallFrom": called_from} if called_from else {}))

    def kernel(
        self,
        launched: float,
        start: float,
        end: float,
        name: str = "void gemm<float>(float*)",
        stream: int = STREAM,
        thread: int = MAIN,
        call: str = "cudaLaunchKernel",
        takes: float = 2,
    ) -> None:
        """Add a launch on the host at ``launched``, and the work on the device from ``start`` to ``end``."""
        self._correlation += 1
        kind = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        self.host(call, launched, launched + takes, "cuda_runtime", thread, correlation=self._correlation)
        self._add(name, start, end, kind, 0, stream, {"correlation": self._correlation, "stream": stream})

    def wait(self, start: float, end: float, call: str = "cudaStreamSynchronize") -> None:
        self.host(call, start, end, "cuda_runtime")

    def memory(self, at: float, args: dict[str, int]) -> None:
        self.events.append({"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "ts": at, "args": args})

    def arrow(self, end: str, at: float, thread: int = MAIN) -> None:
        """Add one end of the arrow from a forward operator ("s") to its backward ("f")."""
        self.events.append({"ph": end, "cat": "fwdbwd", "id": 1, "pid": 1, "tid": thread, "ts": at, "name": "fwdbwd"})

    def _add(
        self, name: str, start: float, end: float, kind: str, process: int, thread: int, args: dict[str, Any]
    ) -> None:
        self.events.append(
            {
                "ph": "X",
                "cat": kind,
                "name": name,
                "pid": process,
                "tid": thread,
                "ts": start,
                "dur": end - start,
                "args": args,
            }
        )

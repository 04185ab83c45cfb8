"""View of samples in a terminal: a panel for each GPU, a panel for the host, and the processes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import Console, ConsoleOptions, Group, OverflowMethod, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from flatout.core.formatting import clean, size_of, visible
from flatout.monitor.sample import GpuSample, HostSample, ProcessSample, Sample
from flatout.monitor.sampler import KEPT

_BAR, _ASCII_BAR = ("━", "─"), ("#", ".")
_SPARKS, _ASCII_SPARKS = "▁▂▃▄▅▆▇", "_.-=+*#"
_ASCII = str.maketrans({"·": "|", "°": " ", "–": "-", "└": "-", "…": "~"})
_SPARKLINE_WIDTH = 96
"""Smallest width inside a panel, in columns, for a sparkline of the last minute beside the bars."""

_NARROW = 52
"""Smallest width inside a panel, in columns, for bars. Narrower panels show figures alone."""

_GPU_LINES, _OTHER_LINES = 12, 14
"""Lines of a GPU's panel, and of everything else. If a terminal has fewer lines, each GPU is one line of a table."""

_HOT = 85  # °C. Most data-center GPUs slow down from 85 to 90


class View:
    """View of the last sample and of the minute before. rich prints the view at any width of 40 columns or more."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        """Keep the samples, oldest first. There is at least one."""
        self._samples = samples

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        pen = _Pen(options.ascii_only, options.max_width - 4)
        now = self._samples[-1]
        yield pen.text(_headline(now), "bold")
        crowded = console.is_terminal and len(now.gpus) * _GPU_LINES + _OTHER_LINES > console.height
        if crowded and len(now.gpus) > 1:
            yield pen.panel("GPUs", _gpu_table(pen, now.gpus), iter(()))
        for gpu in () if crowded and len(now.gpus) > 1 else now.gpus:
            before = [_same(sample, gpu) for sample in self._samples]
            yield pen.panel(_gpu_title(gpu), _gpu(pen, gpu, before), _gpu_notes(gpu))
        if now.no_gpu:
            yield pen.text(f"No GPU is shown: {now.no_gpu}", "yellow")
        minute = [sample.host for sample in self._samples]
        yield pen.panel("Host", _host(pen, now.host, minute), _host_notes(now.host))
        if now.pid_ended:
            yield pen.text(f"Process {now.pid} has ended.", "yellow")
        elif now.processes:
            yield _processes(pen, now)


class _Pen:
    """Pen that draws with the terminal's characters, within ``width`` columns of a panel."""

    def __init__(self, plain: bool, width: int) -> None:
        self.plain, self.width = plain, width

    def text(self, said: str, style: str = "") -> Text:
        said = visible(said)
        if self.plain:
            said = said.translate(_ASCII).encode("ascii", "replace").decode()
        return Text(said, style=style)

    def panel(self, title: str, meters: Table, notes: Iterator[tuple[str, str]]) -> Panel:
        return Panel(
            Group(meters, *(self.text(*note) for note in notes)),
            title=self.text(title, "bold not dim"),
            title_align="left",
            box=box.ASCII if self.plain else box.ROUNDED,
            border_style="dim",
            padding=(0, 1),
        )

    def bar(self, percent: float | None, style: str, columns: int) -> Text:
        full, empty = _ASCII_BAR if self.plain else _BAR
        if percent is None:
            return Text(empty * columns, style="dim")
        filled = round(min(100.0, max(0.0, percent)) / 100 * columns)
        return Text.assemble((full * filled, style), (empty * (columns - filled), "dim"))

    def sparkline(self, percents: Sequence[float | None], style: str, columns: int) -> Text:
        """Return a sparkline of means of a few samples each, the newest at the right. Unknown values leave a gap."""
        levels = _ASCII_SPARKS if self.plain else _SPARKS
        each = KEPT // columns
        known = [
            [percent for percent in percents[max(0, end - each) : end] if percent is not None]
            for end in range(len(percents), 0, -each)
        ]
        means = [sum(some) / len(some) if some else None for some in reversed(known)]
        drawn = "".join(
            " " if percent is None else levels[min(len(levels) - 1, int(max(0.0, percent) / 100 * len(levels)))]
            for percent in means[-columns:]
        )
        return Text(drawn.rjust(columns), style=style)

    def meters(self) -> Table:
        """Return a table for ``meter``."""
        table = Table.grid(padding=(0, 1), expand=True)
        table.add_column(width=12, no_wrap=True)
        if not self.narrow:
            table.add_column(width=self._bar_columns, no_wrap=True)
        table.add_column(ratio=1, no_wrap=True, overflow=self.overflow)
        if self.width >= _SPARKLINE_WIDTH:
            table.add_column(width=self._spark_columns, no_wrap=True)
        return table

    @property
    def narrow(self) -> bool:
        """True if there is no room for bars."""
        return self.width < _NARROW

    @property
    def overflow(self) -> OverflowMethod:
        """Treatment of words that are too long for their column."""
        return "crop" if self.plain else "ellipsis"

    @property
    def _bar_columns(self) -> int:
        return min(40, self.width // 5)

    @property
    def _spark_columns(self) -> int:
        return 30 if self.width >= 120 else 20  # divisors of KEPT

    def meter(
        self, table: Table, label: str, percents: Sequence[float | None], value: str | None, style: str = "green"
    ) -> None:
        """Add a line with label, bar of the last value, text, and sparkline of the last minute."""
        known = value is not None
        cells = [self.text(label)]
        if not self.narrow:
            cells.append(self.bar(percents[-1] if known else None, style, self._bar_columns))
        cells.append(self.text(value if value is not None else "–", "" if known else "dim"))
        if self.width >= _SPARKLINE_WIDTH:
            cells.append(self.sparkline(percents, style, self._spark_columns))
        table.add_row(*cells)


def _headline(sample: Sample) -> str:
    watched = "the whole machine" if sample.pid is None else f"process {sample.pid}"
    return f"flatout monitor · {watched} · {time.strftime('%H:%M:%S', time.localtime(sample.time))}"


def _gpu_title(gpu: GpuSample) -> str:
    number = f"GPU {gpu.index}" if gpu.cuda_index is None else f"cuda:{gpu.cuda_index}"
    return " · ".join([number, clean(gpu.name or gpu.uuid or "unknown")])


def _same(sample: Sample, gpu: GpuSample) -> GpuSample | None:
    """Return the same GPU in another sample."""
    return next((one for one in sample.gpus if (one.index, one.uuid) == (gpu.index, gpu.uuid)), None)


def _gpu(pen: _Pen, gpu: GpuSample, minute: Sequence[GpuSample | None]) -> Table:
    def over_time(percent: Callable[[GpuSample], float | None]) -> list[float | None]:
        return [None if one is None else percent(one) for one in minute]

    table = pen.meters()
    if "handle" in gpu.missing:
        return table
    pen.meter(table, "busy", over_time(lambda one: one.util_percent), _percent(gpu.util_percent))
    if gpu.sm_active_percent is not None:
        occupancy = "" if gpu.sm_occupancy_percent is None else f" · occupancy {gpu.sm_occupancy_percent:.0f} %"
        said = f"{_percent(gpu.sm_active_percent)}{occupancy}"
        pen.meter(table, "SMs active", over_time(lambda one: one.sm_active_percent), said)
    pen.meter(
        table, "tensor cores", over_time(lambda one: one.tensor_active_percent), _percent(gpu.tensor_active_percent)
    )
    if gpu.dram_active_percent is not None:
        traffic = over_time(lambda one: one.dram_active_percent)
        pen.meter(table, "DRAM traffic", traffic, _percent(gpu.dram_active_percent))
    pen.meter(
        table,
        "memory",
        over_time(lambda one: _share(one.memory_used_bytes, one.memory_total_bytes)),
        _of(gpu.memory_used_bytes, gpu.memory_total_bytes),
        "blue",
    )
    limit = "" if gpu.power_limit_watts is None else f" of {gpu.power_limit_watts:.0f}"
    pen.meter(
        table,
        "power",
        over_time(lambda one: _share(one.power_watts, one.power_limit_watts)),
        None if gpu.power_watts is None else f"{gpu.power_watts:.0f}{limit} W",
        "yellow",
    )
    heat = gpu.temperature_celsius
    pen.meter(
        table,
        "temperature",
        over_time(lambda one: one.temperature_celsius),
        None if heat is None else f"{heat} °C",
        "red" if heat is not None and heat >= _HOT else "yellow",
    )
    pen.meter(
        table,
        "SM clock",
        over_time(lambda one: _share(one.sm_clock_mhz, one.sm_clock_max_mhz)),
        None if gpu.sm_clock_mhz is None else f"{gpu.sm_clock_mhz} of {gpu.sm_clock_max_mhz or '?'} MHz",
        "blue",
    )
    return table


def _gpu_table(pen: _Pen, gpus: Sequence[GpuSample]) -> Table:
    """Return one line per GPU, for many GPUs or a low terminal."""
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(ratio=1, no_wrap=True)
    for _ in range(5):
        table.add_column(justify="right", no_wrap=True)
    table.add_row("", *(pen.text(name, "dim") for name in ("busy", "tensor", "memory", "power", "heat")))
    for gpu in gpus:
        held = gpu.throttle is not None and bool({*gpu.throttle} - {"idle"})
        values = (
            _percent(gpu.util_percent),
            _percent(gpu.tensor_active_percent),
            _percent(_share(gpu.memory_used_bytes, gpu.memory_total_bytes)),
            None if gpu.power_watts is None else f"{gpu.power_watts:.0f} W",
            None if gpu.temperature_celsius is None else f"{gpu.temperature_celsius} °C",
        )
        table.add_row(
            pen.text(_gpu_title(gpu), "yellow" if held or "handle" in gpu.missing else ""),
            *(pen.text("–" if value is None else value) for value in values),
        )
    return table


def _gpu_notes(gpu: GpuSample) -> Iterator[tuple[str, str]]:
    """Yield the values that no bar shows, each with its style."""
    if "handle" in gpu.missing:
        yield gpu.missing["handle"], "red"
        return
    if gpu.throttle is not None:
        held = [word for word in gpu.throttle if word != "idle"]
        yield (f"clocks held down by: {', '.join(held)}", "yellow") if held else ("clocks are free", "dim")
    if gpu.pcie_rx_bytes_per_second is not None and gpu.pcie_tx_bytes_per_second is not None:
        received, sent = size_of(gpu.pcie_rx_bytes_per_second), size_of(gpu.pcie_tx_bytes_per_second)
        yield f"PCIe {received}/s in, {sent}/s out", "dim"
    if gpu.mig:
        yield "MIG is on", "dim"
    if gpu.cuda_index is None:
        yield f"cuda:? {gpu.missing['cuda_index']}", "dim"
    if gpu.tensor_active_percent is None:
        yield f"tensor cores: {gpu.gpm}", "dim"


def _host(pen: _Pen, host: HostSample, minute: Sequence[HostSample]) -> Table:
    table = pen.meters()
    cores = f"{host.cores} core{'s' if host.cores > 1 else ''}"
    load = "" if host.load is None else f" · load {host.load:.1f}"
    said = f"{_percent(host.cpu_percent) or '–'} of {cores}{load}"
    pen.meter(table, "CPU", [one.cpu_percent for one in minute], said)
    for label, used, total, shares in (
        (
            "RAM",
            host.ram_used_bytes,
            host.ram_total_bytes,
            [_share(one.ram_used_bytes, one.ram_total_bytes) for one in minute],
        ),
        (
            "/dev/shm",
            host.shm_used_bytes,
            host.shm_total_bytes,
            [_share(one.shm_used_bytes, one.shm_total_bytes) for one in minute],
        ),
    ):
        pen.meter(table, label, shares, _of(used, total), "blue")
    return table


def _host_notes(host: HostSample) -> Iterator[tuple[str, str]]:
    for name, way_in, way_out, words in (
        ("disks", host.disk_read_bytes_per_second, host.disk_write_bytes_per_second, ("read", "written")),
        (
            "network",
            host.network_received_bytes_per_second,
            host.network_sent_bytes_per_second,
            ("received", "sent"),
        ),
    ):
        if way_in is not None and way_out is not None:
            yield f"{name}: {size_of(way_in)}/s {words[0]}, {size_of(way_out)}/s {words[1]}", "dim"
    if host.swap_used_bytes:
        yield f"swap: {size_of(host.swap_used_bytes)} used", "yellow"
    for why in dict.fromkeys(host.missing.values()):
        fields = ", ".join(field.split("_")[0] for field in host.missing if host.missing[field] == why)
        yield f"not known: {fields}: {why}", "dim"


def _processes(pen: _Pen, sample: Sample) -> Table:
    table = Table(
        box=None if pen.plain else box.SIMPLE_HEAD,
        expand=True,
        padding=(0, 1 if pen.narrow else 2, 0, 0),
        pad_edge=False,
        show_edge=False,
        header_style="bold",
    )
    table.add_column("process", ratio=1, no_wrap=True, overflow=pen.overflow)
    private = not pen.narrow and any(process.uss_bytes is not None for process in sample.processes)
    columns = ("pid", "CPU", "resident", "private") if private else ("pid", "CPU", "resident")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for depth, process in _nested(sample.processes, sample.pid):
        branch = "  " * (depth - 1) + "└ " if depth else ""
        cells = (
            str(process.pid),
            "–" if process.cpu_percent is None else f"{process.cpu_percent:.0f} %",
            *("–" if size is None else size_of(size) for size in (process.rss_bytes, process.uss_bytes)),
        )
        table.add_row(pen.text(f"{branch}{clean(process.name)}"), *map(pen.text, cells[: len(columns)]))
    return table


def _nested(processes: Sequence[ProcessSample], root: int | None) -> Iterator[tuple[int, ProcessSample]]:
    """Yield the processes with their depth. Each process follows its parent, and siblings keep their order."""
    if root is None:
        yield from ((0, process) for process in processes)
        return
    below: dict[int | None, list[ProcessSample]] = {}
    known = {process.pid for process in processes}
    for process in processes:
        if process.pid != root:
            below.setdefault(process.parent_pid if process.parent_pid in known else root, []).append(process)

    def walk(process: ProcessSample, depth: int) -> Iterator[tuple[int, ProcessSample]]:
        yield depth, process
        for child in below.get(process.pid, []):
            yield from walk(child, depth + 1)

    for process in processes:
        if process.pid == root:
            yield from walk(process, 0)


def _percent(value: float | None) -> str | None:
    return None if value is None else f"{value:.0f} %"


def _share(part: float | None, whole: float | None) -> float | None:
    return 100 * part / whole if part is not None and whole else None


def _of(used: int | None, total: int | None) -> str | None:
    return None if used is None or total is None else f"{size_of(used)} of {size_of(total)}"

"""Tables of figures, from benchmarks/results: ``python tools/figures.py`` writes those of README.md and of docs."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "docs/benchmarks.md")
PLACE = re.compile(r"(?P<begin><!-- figures: (?P<name>\w+) -->\n).*?(?P<end><!-- /figures -->)", re.S)

Results = dict[str, dict[str, Any]]
"""Figures of a benchmark by the name of the test."""

Row = Sequence[str]

JOBS = {
    "seed_mlp": "perceptron 1024-2048-1024",
    "digits_cnn": "digits CNN",
    "byte_gpt": "byte-level GPT",
    "resnet": "ResNet-18, 64×64 bytes",
    "resnet_files": "ResNet-18, JPEG files",
    "bert_tiny": "BERT-tiny",
    "tabular": "tabular perceptron",
    "digits": "digits CNN",
    "gpt": "byte-level GPT",
    "mlp": "perceptron",
    "cnn": "convolutional net",
    "nanogpt": "nanoGPT",
    "mnist": "MNIST",
    "word_lstm": "word-level LSTM",
    "imagenet": "ResNet-18",
    "siamese": "siamese network",
    "vae": "VAE",
    "dcgan": "DCGAN",
    "unet": "U-Net",
    "hf_trainer": "transformers' Trainer",
    "lightning_module": "Lightning",
    "ddpm": "DDPM",
    "gcn": "GCN",
}
"""Titles of jobs and scripts."""


@dataclass(frozen=True)
class Measured:
    """Results of a benchmark on one machine.

    Attributes:
        machine: cores, processor and GPU.
        command: command that measured them.
        results: figures by the name of the test.
    """

    machine: str
    command: str
    results: Results

    @property
    def dates(self) -> list[str]:
        """Dates of the measurements, in order."""
        return sorted({each["date"] for each in self.results.values()})

    @property
    def origin(self) -> str:
        """Machine, dates, versions and command in one line."""
        versions = sorted({f"torch {each['torch']}" for each in self.results.values()})
        commits = sorted({f"commit {each['commit']}" for each in self.results.values() if "commit" in each})
        dates = self.dates if len(self.dates) == 1 else [f"{self.dates[0]} to {self.dates[-1]}"]
        return f"{self.machine}. {', '.join([*dates, *versions, *commits])}. `{self.command}`"


@dataclass(frozen=True)
class Bar:
    """Ratio to draw in a chart, with its interval if there is one."""

    label: str
    ratio: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Table:
    """Table of a benchmark.

    Attributes:
        benchmark: name of the benchmark's file.
        columns: titles of the columns.
        rows: returns the rows for the results of one machine.
        bars: returns the bars of the chart; None without a chart.
        against: the speed that is 1 in the chart.
    """

    benchmark: str
    columns: Row
    rows: Callable[[Results], Iterator[Row]]
    bars: Callable[[Results], Iterator[Bar]] | None = None
    against: str = ""


def measured(benchmark: str, folder: Path | None = None) -> list[Measured]:
    """Return the results of a benchmark from all machines with files in a folder, the newest first."""
    found = []
    for path in sorted((folder or RESULTS).glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        entry = content.get("benchmarks", {}).get(benchmark)
        if entry is not None:
            found.append(Measured(content["machine"], entry["command"], entry["results"]))
    return sorted(found, key=lambda each: each.dates[-1], reverse=True)


# ---- numbers as text ---------------------------------------------------------------------------------------


def three_digits(value: float) -> str:
    """Return a number with three significant digits, or with all digits before the point: 0.412, 35.0, 1,234."""
    return f"{value:,.0f}" if value >= 100 else f"{value:#.3g}".rstrip(".")


def times(ratio: float) -> str:
    """Return a ratio with two decimals, or with fewer if it is large."""
    return f"{ratio:.0f}×" if ratio >= 10 else f"{ratio:.1f}×" if ratio >= 4 else f"{ratio:.2f}×"


def between(ratio: float, low: float, high: float) -> str:
    """Return a ratio with its interval."""
    return f"{times(ratio)} ({low:.2f} to {high:.2f})"


def title(test: str) -> str:
    """Return the title of the job that is the parameter of a test."""
    name = parameter(test)
    return JOBS.get(name, name)


def parameter(test: str) -> str:
    """Return the parameter of a test."""
    return test.partition("[")[2].rstrip("]")


def of(results: Results, test: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the results of all parameters of a test."""
    return ((name, each) for name, each in results.items() if name.partition("[")[0] == test)


def mean(ratios: Sequence[float]) -> str:
    """Return the geometric mean as text."""
    return times(statistics.geometric_mean(ratios))


# ---- benchmarks --------------------------------------------------------------------------------------------


def _optimize_rows(results: Results) -> Iterator[Row]:
    naive, best = [], []
    for test, each in of(results, "test_job"):
        ratios, other = each["times as fast as"], each["best other"]
        naive.append(ratios["naive"])
        best.append(ratios[other])
        setup = each["setup seconds"]
        ready = f"{setup['flatout']:.0f} s, {setup[other]:.0f} s"
        yield title(test), times(naive[-1]), f"{times(best[-1])} {other}", ready
    yield "geometric mean", mean(naive), mean(best), ""


def _optimize_bars(results: Results) -> Iterator[Bar]:
    for test, each in of(results, "test_job"):
        yield Bar(title(test), each["times as fast as"][each["best other"]])


def _scripts_rows(results: Results) -> Iterator[Row]:
    ratios = []
    for test, each in of(results, "test_script"):
        ratio, low, high = each["times as fast"]
        ratios.append(ratio)
        first, whole = each["first gain"], each["seconds with tuning"]
        gained = f"{first['seconds']:.0f} s, {first['updates']:,} updates" if first else "none shown"
        kept = sorted({name for names in each["kept"].values() for name in names})
        took = f"{whole['python']:.0f} s → {whole['flatout']:.0f} s"
        yield title(test), between(ratio, low, high), gained, took, ", ".join(kept)
    yield "geometric mean", mean(ratios), "", "", ""


def _scripts_bars(results: Results) -> Iterator[Bar]:
    for test, each in of(results, "test_script"):
        yield Bar(title(test), *each["times as fast"])


CASES = {
    "fp32_in_1": ("float32, one tensor", "torch fused", "flatout lazy"),
    "fp32_in_100": ("float32, 100 tensors", "torch fused", "flatout lazy"),
    "fp32_in_gpt2": ("float32, GPT-2's 148 tensors", "torch fused", "flatout lazy"),
    "fp32_in_2000_small": ("float32, 2,000 tensors of 512", "torch fused", "flatout lazy"),
    "plain_in_1": ("float32, one tensor, without clipping", "torch fused", "flatout plain"),
    "plain_in_100": ("float32, 100 tensors, without clipping", "torch fused", "flatout plain"),
    "plain_in_2000_small": ("float32, 2,000 tensors of 512, without clipping", "torch fused", "flatout plain"),
    "bf16_in_100": ("bfloat16 with float32 masters, 100 tensors", "torch fused + cast", "flatout, float32 masters"),
    "bf16_in_100-cuda": ("bfloat16 with 16-bit remainders, 100 tensors", "torch fused + cast", "flatout, remainder"),
    "pure_bf16_in_100": ("bfloat16 alone, 100 tensors, without clipping", "torch fused", "flatout"),
    "pure_bf16_clipped_in_100": ("bfloat16 alone, 100 tensors", "torch fused", "flatout lazy"),
}
"""Title, the contender of torch and ours, by the case of benchmarks/update_path.py, or by case and device."""


def _updates(results: Results) -> Iterator[tuple[str, dict[str, Any], dict[str, Any], float]]:
    for test, each in of(results, "test_update"):
        name, _, device = parameter(test.partition(",")[0]).rpartition("-")
        text, theirs, ours = CASES.get(f"{name}-{device}", CASES[name])
        where = "" if device == "cpu" else f", {device}"
        again = test.partition("],")[2]
        label = f"{text}{where}{',' if again else ''}{again}"
        yield label, each[theirs], each[ours], each["copy_GB/s"]


def _update_path_rows(results: Results) -> Iterator[Row]:
    for label, theirs, ours, copy in _updates(results):
        speed = f"{ours['GB/s']:.0f} of {copy:.0f} GB/s"
        ratio = between(ours["ratio_median"], *ours["ratio_quartiles"])
        yield label, f"{three_digits(theirs['ms_median'])} ms", f"{three_digits(ours['ms_median'])} ms", ratio, speed


def _update_path_bars(results: Results) -> Iterator[Bar]:
    for label, _, ours, _ in _updates(results):
        yield Bar(label, ours["ratio_median"], *ours["ratio_quartiles"])


def _host_time_rows(results: Results) -> Iterator[Row]:
    for test, each in of(results, "test_host_time_on_cuda"):
        for name in ("torch fused", "flatout lazy", "flatout lazy, replayed"):
            row = each[name]
            seconds = (f"{1e3 * row[clock]:.0f} µs" for clock in ("host_ms_median", "device_ms_median"))
            yield f"{parameter(test)} tensors, {name}", *seconds, times(row["ratio"])


def _kernel_rows(results: Results) -> Iterator[Row]:
    for name, each in results["test_kernels"].items():
        if not isinstance(each, dict):
            continue
        update = f"{each['ms']:.3f} ms, {each['of_copy']:.0%}"
        for kernel in each.get("kernels", []) or [None]:
            found = ("", "", "", "") if kernel is None else _kernel_cells(kernel)
            yield name, update, *found


def _kernel_cells(kernel: dict[str, Any]) -> Row:
    shares = ("" if kernel[share] is None else f"{kernel[share]:.0%}" for share in ("of_dram", "warps"))
    return kernel["name"].partition("<")[0], f"{1e3 * kernel['seconds']:.3f} ms", *shares


def _step_variants_rows(results: Results) -> Iterator[Row]:
    for variant, each in results["test_variants"].items():
        if isinstance(each, dict):
            yield variant, *(f"{each[name]['ms']:.3f} ms, {each[name]['of_copy']:.0%}" for name in STORAGES)


STORAGES = ("float32", "bfloat16", "bfloat16, float32 moments", "bfloat16, remainder")
"""Storages of a step that benchmarks/step_variants.py times."""

GPU_JOBS = {
    "test_seed_mlp": "perceptron 1024-2048-1024",
    "test_gpt2": "GPT-2, 124 M parameters",
    "test_wide_gpt": "GPT as wide as 7B",
    "test_resnet50": "ResNet-50",
}


def _optimize_gpu_rows(results: Results) -> Iterator[Row]:
    for test, text in GPU_JOBS.items():
        each = results.get(test, {})
        if "samples_per_second" in each:  # a run that was cut has the figures of torch's loop only
            rate = f"{each['samples_per_second'] * each['units_per_sample']:,.0f} {each['unit']}/s"
            measured_shares = (each["mfu"], each["alone"]["utilization"], each["alone"]["tensor_active"])
            shares = ("" if share is None else f"{share:.1%}" for share in measured_shares)
            yield text, rate, *shares, times(each["times_amp_loop"]) if "times_amp_loop" in each else ""


def _data_path_gpu_rows(results: Results) -> Iterator[Row]:
    copies = results.get("test_copies_to_the_device")
    if copies:
        rates = copies["gigabytes_per_second"]
        others = ", ".join(f"{name}: {rate:.1f} GB/s" for name, rate in rates.items() if name != "flatout")
        yield "copies to the device", f"{rates['flatout']:.1f} GB/s", others
    training = results.get("test_resnet50_from_memory")
    if training:
        yield (
            "ResNet-50 from memory",
            f"{training['images_per_second']:,.0f} images/s",
            f"stall {training['stall']:.1%}",
        )
    resident = results.get("test_data_on_the_device")
    if resident:
        yield "images on the device", times(resident["ratio"]), "DataLoader: 1×"


def _normalize_rows(results: Results) -> Iterator[Row]:
    for test, each in of(results, "test_normalize"):
        low, high = each["ratio_quartiles"]
        of_peak = "" if each["of_peak"] is None else f"{each['of_peak']:.0%}"
        yield parameter(test), between(each["ratio_median"], low, high), f"{each['of_copy']:.0%}", of_peak


EPOCHS = {
    "f32_32": "rows of 32 floats, batch 1,024",
    "u8_3x32x32": "images of 3×32×32 bytes, batch 256",
    "u8_3x224x224": "images of 3×224×224 bytes, batch 128",
}


def _epochs_rows(results: Results) -> Iterator[Row]:
    for test, each in of(results, "test_epochs"):
        speeds = each["samples_per_second"]
        theirs, ours = speeds[each["best_dataloader"]], speeds["flatout"]
        ratios = times(each["ratio_to_best_dataloader"]), times(each["ratio_to_index_select"])
        yield EPOCHS[parameter(test)], f"{theirs:,} /s", f"{ours:,} /s", *ratios


WAITS = {
    "test_first_batch": ("first batch, images of 3×32×32 bytes", "flatout", "DataLoader nw=2, forked"),
    "test_restart": ("first batch of a later epoch", "flatout", "persistent workers"),
    "test_resume": ("resume within a million samples", "flatout, DataLoader", "StatefulDataLoader"),
}


def _waits_rows(results: Results) -> Iterator[Row]:
    for test, (text, ours, theirs) in WAITS.items():
        if test in results:
            seconds = results[test]["seconds"]
            taken = (f"{three_digits(1e3 * seconds[side])} ms" for side in (theirs, ours))
            yield text, f"{theirs}", *taken, times(results[test]["ratio"])


def _tuner_rows(results: Results) -> Iterator[Row]:
    for test, each in of(results, "test_grid"):
        chosen = each["tuned"].get("num_workers", 0)
        best = each["ratio_to_best"], each["ratio_to_no_workers"]
        yield parameter(test), f"{chosen}", f"{each['best'][0]}", *map(times, best), f"{each['seconds']:.1f} s"


def _starved_rows(results: Results) -> Iterator[Row]:
    each = results["test_starved_step"]
    yield f"{each['stall_before']:.0%}", f"{each['stall_after']:.1%}", each["chosen"], f"{each['seconds']:.0f} s"


def _decisions_rows(results: Results) -> Iterator[Row]:
    for test, each in of(results, "test_choice"):
        shares = times(each["share of the best"]), times(each["times nothing"])
        yield title(test), f"{each['combinations']}", *shares, each["chosen"]


def _decisions_noise_rows(results: Results) -> Iterator[Row]:
    for test, each in of(results, "test_operating_curve"):
        step, found = parameter(test), each["now"]
        kinds = [kind for name, kind in results[f"test_headline[{step}]"].items() if name.startswith("random order")]
        headline = min(kind["interval true, worst %"] for kind in kinds)
        gains = (
            f"{found[f'+5 % {where}, %']:.0f} %, {found[f'+5 % {where}, s']:.2g} s" for where in ("quiet", "4 busy")
        )
        kept = max(each[rule]["kept at -2 % or less, worst %"] for rule in ("now", "now, wall time"))
        errors = kept, found["interval true, worst %"], headline
        yield step, *(f"{error:.1f} %" for error in errors), *gains, f"{found['2x, most median pairs']:.0f}"


PEERS = ("torch DDP", "accelerate", "Lightning Fabric", "flatout", "flatout tuned")


def _data_parallel_rows(results: Results) -> Iterator[Row]:
    for test, each in of(results, "test_job"):
        speeds = (f"{each['samples/s'][name]:,.0f}" for name in PEERS)
        ratios = (between(*each["times as fast"][f"{ours} / {each['best peer']}"]) for ours in PEERS[3:])
        yield title(test), *speeds, *ratios


def _data_parallel_bars(results: Results) -> Iterator[Bar]:
    for test, each in of(results, "test_job"):
        yield Bar(title(test), *each["times as fast"][f"flatout / {each['best peer']}"])


def _warm_start_rows(results: Results) -> Iterator[Row]:
    for test, each in of(results, "test_second_start"):
        seconds = (f"{each['medians'][side]:.1f} s" for side in ("flatout", "torch"))
        yield title(test), f"{each['cold']['flatout']:.1f} s", *seconds


def _batch_size_rows(results: Results) -> Iterator[Row]:
    for test, each in of(results, "test_choice"):
        name = parameter(test).rpartition("-")[0]
        sizes = (f"{each[size]:,}" for size in ("start", "chosen", "best"))
        yield JOBS[name], *sizes, times(each["share of the best"]), f"{each['steps']}"


def _checkpoints_rows(results: Results) -> Iterator[Row]:
    for test, each in of(results, "test_cost"):
        cost = (f"{100 * (each['times as long'][kind] - 1):+.2f} %" for kind in ("asynchronous", "waited for"))
        yield title(test), f"{each['bytes'] / 2**20:.1f} MiB", f"{each['seconds of these steps']:.2f} s", *cost


def _counting_rows(results: Results) -> Iterator[Row]:
    for name, each in results.get("test_host_time_within_training", {}).items():
        if isinstance(each, dict):
            yield name, f"{each['us']:.1f} µs", f"{100 * each['share of 5 ms']:.2f} %"


def _script_overhead_rows(results: Results) -> Iterator[Row]:
    for each in results.values():
        yield f"{statistics.median(each['microseconds']['python']):.0f} µs", f"{each['added']:.1f} µs"


def _perceptron_rows(results: Results) -> Iterator[Row]:
    each = results["test_perceptron"]
    seconds = next(values for name, values in each.items() if name.startswith("seconds of"))
    for name, value in seconds.items():
        ratio = each.get("times as fast", {}).get(f"{name} / float32")
        yield name, f"{three_digits(value)} s", between(*ratio) if ratio else ""


def _torchscript_rows(results: Results) -> Iterator[Row]:
    for test, each in of(results, "test_torchscript"):
        yield parameter(test), *(between(*each["times as fast"][kind]) for kind in ("forward", "training"))


def _workers_rows(results: Results) -> Iterator[Row]:
    rates = results.get("test_loader", {}).get("batches per second", {})
    for name, rate in rates.items():
        yield name, f"{rate:.1f} /s", times(rate / rates["0 workers"])


def _case_study_rows(results: Results) -> Iterator[Row]:
    for name, each in results["test_case_study"]["route"].items():
        shares = ("" if each[share] is None else f"{each[share]:.1%}" for share in ("busy", "mfu"))
        seconds = f"{3600 * each['hours of an epoch']:,.0f} s"
        yield name, f"{each['samples/s']:,.1f} /s", times(each["times as fast"]), *shares, seconds


def _techniques_rows(results: Results) -> Iterator[Row]:
    for test, each in of(results, "test_technique"):
        jobs = []
        for kind in ("helps", "other"):
            found = each[kind]
            speed = between(*found["times as fast"]) if "times as fast" in found else "does not apply"
            jobs += [found["job"], speed]
        yield f"`{parameter(test)}`: {each['value']}", *jobs


TABLES = {
    "optimize": Table(
        "optimize",
        ("job", "against the loop as first written", "against the best other loop", "ready in: flatout, the other"),
        _optimize_rows,
        _optimize_bars,
        "the best loop of an expert, Lightning Fabric and accelerate",
    ),
    "scripts": Table(
        "scripts",
        ("script", "after tuning", "first gain after", "its first updates, tuning included", "in use"),
        _scripts_rows,
        _scripts_bars,
        "python",
    ),
    "update_path": Table(
        "update_path",
        ("parameters", "torch", "flatout", "ratio (quartiles)", "bandwidth, copy"),
        _update_path_rows,
        _update_path_bars,
        "torch's fused AdamW with unscale and clip",
    ),
    "host_time": Table(
        "update_path", ("tensors of 512", "host", "device", "speed on the host against torch fused"), _host_time_rows
    ),
    "kernel_times": Table(
        "kernel_times",
        ("clipped update", "time, share of copy", "kernel", "time", "peak of memory", "warps"),
        _kernel_rows,
    ),
    "step_variants": Table("step_variants", ("step", *STORAGES), _step_variants_rows),
    "optimize_gpu": Table(
        "optimize_gpu",
        ("job", "flatout", "MFU", "GPU busy", "tensor cores", "against the AMP loop"),
        _optimize_gpu_rows,
    ),
    "data_path_gpu": Table("data_path_gpu", ("path", "flatout", "beside it"), _data_path_gpu_rows),
    "normalize": Table(
        "normalize_images", ("images", "speed against torch", "of copy", "of the peak of memory"), _normalize_rows
    ),
    "epochs": Table(
        "data_path",
        ("data", "best DataLoader setting", "flatout", "ratio", "against bare `index_select`"),
        _epochs_rows,
    ),
    "waits": Table("data_path", ("wait for", "peer", "peer's time", "flatout", "ratio"), _waits_rows),
    "tuner": Table(
        "tuner",
        ("loader", "workers chosen", "best of the grid", "speed against it", "against no workers", "tuned in"),
        _tuner_rows,
    ),
    "starved": Table("tuner", ("waiting before", "after", "chosen", "tuned in"), _starved_rows),
    "perceptron": Table("checklist", ("loop", "1,000 steps", "speed against float32"), _perceptron_rows),
    "torchscript": Table("checklist", ("model", "forward", "training step"), _torchscript_rows),
    "workers": Table("checklist", ("loader", "batches", "speed against no workers"), _workers_rows),
    "case_study": Table(
        "case_study", ("loop", "samples", "speed", "cores or GPU busy", "MFU", "an epoch"), _case_study_rows
    ),
    "techniques": Table(
        "techniques",
        ("technique: value", "job in its favor", "speed", "another job", "speed"),
        _techniques_rows,
    ),
    "decisions": Table(
        "decisions", ("job", "combinations", "speed against the best", "against none", "chosen"), _decisions_rows
    ),
    "decisions_noise": Table(
        "decisions_noise",
        (
            "step",
            "kept although 2 % slower",
            "trial's interval true",
            "headline's interval true",
            "gain of 5 % found, quiet",
            "beside 4 busy programs",
            "pairs that show a factor of two",
        ),
        _decisions_noise_rows,
    ),
    "data_parallel": Table(
        "data_parallel",
        ("job", *PEERS, "flatout against the fastest peer", "tuned against it"),
        _data_parallel_rows,
        _data_parallel_bars,
        "the fastest of torch DDP, accelerate and Lightning Fabric",
    ),
    "warm_start": Table(
        "warm_start", ("job", "first start", "second start", "torch's own second start"), _warm_start_rows
    ),
    "batch_size": Table(
        "batch_size", ("job", "start", "chosen", "best of the scan", "speed against it", "steps"), _batch_size_rows
    ),
    "checkpoints": Table(
        "checkpoints",
        ("job", "size", "time to a save", "asynchronous save", "save that is waited for"),
        _checkpoints_rows,
    ),
    "counting": Table("counting_overhead", ("counter", "host time of a step", "of a step of 5 ms"), _counting_rows),
    "script_overhead": Table("script_overhead", ("step by python", "added by flatout run"), _script_overhead_rows),
}


def markdown(columns: Row, rows: Sequence[Row]) -> str:
    """Return a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def table(name: str, folder: Path | None = None) -> str:
    """Return a table for each machine that has measured the benchmark, with its origin above."""
    found = TABLES[name]
    made = [(each.origin, list(found.rows(each.results))) for each in measured(found.benchmark, folder)]
    return "\n".join(f"{origin}\n\n{markdown(found.columns, rows)}" for origin, rows in made if rows)


def files() -> str:
    """Return the table of all files of results."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        content = json.loads(path.read_text(encoding="utf-8"))
        if "benchmarks" in content:
            rows.append((f"[{path.name}](results/{path.name})", content["machine"], ", ".join(content["benchmarks"])))
        else:
            rows.append((f"[{path.name}](results/{path.name})", content["runs"][0]["machine"]["processor"], path.stem))
    return markdown(("file", "machine", "benchmarks"), rows)


def highlights() -> str:
    """Return the results of the README."""
    rows = []

    def add(claim: str, benchmark: str, result: Callable[[Results], str], test: str = "") -> None:
        newest = next(each for each in measured(benchmark) if not test or test in each.results)
        rows.append((claim, result(newest.results), f"{newest.machine}, `pytest benchmarks/{benchmark}.py --full`"))

    def of_scripts(results: Results) -> str:
        ratios = [each["times as fast"][0] for _, each in of(results, "test_script")]
        return f"{mean(ratios)} ({times(min(ratios))} to {times(max(ratios))})"

    def of_optimize(results: Results) -> str:
        ratios = [bar.ratio for bar in _optimize_bars(results)]
        return f"{mean(ratios)} ({times(min(ratios))} to {times(max(ratios))})"

    cpu_update = "test_update[fp32_in_1-cpu]"

    def of_update(results: Results) -> str:
        ours = results[cpu_update]["flatout lazy"]
        return between(ours["ratio_median"], *ours["ratio_quartiles"])

    def of_epochs(results: Results) -> str:
        return times(results["test_epochs[u8_3x32x32]"]["ratio_to_best_dataloader"])

    add("twelve unchanged scripts after tuning by `flatout run`, geometric mean", "scripts", of_scripts)
    add(
        "`optimize` against the best of an expert's loop, Lightning Fabric and accelerate, geometric mean of six jobs",
        "optimize",
        of_optimize,
    )
    claim = "unscale + clip + AdamW against torch's fused, 32 M parameters in one tensor"
    add(claim, "update_path", of_update, cpu_update)
    add("shuffled images of 3×32×32 bytes in memory, against the best DataLoader setting", "data_path", of_epochs)
    return markdown(("claim", "result", "machine, command"), rows)


def rewritten(text: str) -> str:
    """Return the text with new tables between its marks."""
    made = {"files": files, "highlights": highlights}

    def fresh(place: re.Match[str]) -> str:
        name = place["name"]
        return f"{place['begin']}{made[name]() if name in made else table(name)}{place['end']}"

    return PLACE.sub(fresh, text)


def main() -> None:
    """Rewrite the tables of all pages."""
    for page in PAGES:
        path = ROOT / page
        path.write_text(rewritten(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()

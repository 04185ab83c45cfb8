"""Invented report with every status, every kind of trial, and hostile text."""

from flatout.report import Gain, Pace, Row, Summary, Trial

HOSTILE = "<script>alert('x')</script> & [red]not markup[/red] \x1b[31m"


def compile_row() -> Row:
    gain = Gain(1.41, 1.38, 1.44)
    trials = (
        Trial("default", 4.1, 2.9, gain, 24, setup_seconds=31.2, break_even_steps=26_000, loss_difference=3e-6),
        Trial("max-autotune", 4.1, float("nan"), None, 0, failure="no time left: a cold compile takes about 30 s"),
    )
    why = "PyTorch fuses the model's small operations into a few large ones: 41 % more steps per second."
    return Row("compile", 9, "torch.compile", "kept", why, "default", gain, trials)


def one_pair_row() -> Row:
    gain = Gain(2.02)
    trials = (Trial("bf16", 1450.0, 718.0, gain, 1),)
    return Row("precision", 10, "Mixed precision", "rejected", "No time was left.", gain=gain, trials=trials)


def sample() -> Summary:
    rows = (
        Row(
            "pinned",
            1,
            "Pinned memory",
            "not applicable",
            "Page-locked memory speeds up copies to a GPU; here is none.",
        ),
        Row(
            "workers",
            2,
            "Loader workers",
            "rejected",
            "Loading in other processes was slower: batches arrive faster than they cross from one process to another.",
            gain=Gain(0.71, 0.69, 0.74),
            trials=(
                Trial("1 worker", 4.1, 5.8, Gain(0.71, 0.69, 0.74), 20),
                Trial("2 workers", 4.1, 7.9, Gain(0.52, 0.47, 0.55), 20),
            ),
        ),
        Row(
            "batch_size",
            3,
            "Batch size",
            "not applicable",
            "The model comes without an optimizer.",
        ),
        Row(
            "cudnn_benchmark",
            4,
            "cudnn.benchmark",
            "not applicable",
            "Chooses GPU convolution kernels; there is no GPU here.",
        ),
        Row("criterion", 5, "Loss on the device", "kept", "The model, its buffers and the loss live on one device."),
        Row(
            "no_grad", 6, "No gradients in evaluation", "kept", "run.evaluate does not record what only training needs."
        ),
        Row("profiler", 7, "Profiler", "kept", "run.profile() shows where a step takes its time."),
        Row(
            "prefetch",
            8,
            "Prefetch",
            "not applicable",
            "The data sits in memory already; there is nothing to fetch ahead.",
        ),
        compile_row(),
        Row(
            "precision",
            10,
            "Mixed precision",
            "rejected",
            "This processor has no fast bf16 arithmetic, so 16-bit numbers cost more than they save.",
            gain=Gain(0.96, 0.945, 0.981),
            trials=(
                Trial(
                    "bf16",
                    4.1,
                    4.3,
                    Gain(0.96, 0.945, 0.981),
                    16,
                    baseline_bytes=2_000_000,
                    candidate_bytes=1_240_000,
                    loss_difference=0.004,
                ),
            ),
            memory=0.62,
            expected="up to 2×",
            purpose="multiplies matrices in numbers of 16 bits",
        ),
        Row("torchscript", 11, "TorchScript", "not applicable", "Deprecated in PyTorch; torch.compile does its work."),
        Row("monitor", 12, "Live monitoring", "not tried", "You forbade it."),
        Row(
            "in_memory",
            13,
            "Data in memory",
            "kept",
            "Your dataset gives the same sample each time, so each is transformed once and then taken from memory.",
            "cached tensors",
            Gain(1.52, 1.47, 1.58),
            (Trial("cached tensors", 6.2, 4.1, Gain(1.52, 1.47, 1.58), 30, setup_seconds=0.2, break_even_steps=95.0),),
        ),
        Row(
            "fused_optimizer",
            None,
            "Fused optimizer",
            "kept",
            "One pass over memory updates all parameters, instead of a dozen.",
            "flatout AdamW",
            Gain(1.08, 1.052, 1.11),
            (Trial("flatout AdamW", 4.4, 4.1, Gain(1.08, 1.052, 1.11), 30),),
        ),
        Row("advice", None, "Synchronisation", "advice", f"train.py:12 waits for the device each step. {HOSTILE}"),
    )
    environment = {"device": "cpu", "processor": "AMD EPYC, 2 cores", "torch": "2.14.1", "python": "3.11.7"}
    return Summary(
        rows,
        environment,
        Pace(4.1, 2.1, 5161.3, 0.021, 2_000_000, {"forward": 0.3, "backward": 0.5, "update": 0.15}, 15_238.0),
        Pace(1.9, 0.08, 16161.6, 0.066, 1_240_000, {"forward": 0.3, "backward": 0.5, "update": 0.15}, 400_000.0),
        44.6,
        (f"one note {HOSTILE}",),
        won=("fused_optimizer", "compile", "in_memory"),
        epoch_samples=1_281_167,
    )

"""Reason codes of reports: the one file of the tests that knows how a report words its rows."""

from __future__ import annotations

import re
from typing import Any

# code: what the sentence contains, as a regular expression
PATTERNS: dict[str, str] = {
    "accumulated-gradients-lost": "before it are lost",
    "accumulates": "accumulate > 1",
    "adam-needs-sqrt-rule": "lr_rule='sqrt'",
    "allocator-retries": "the allocator ran out of fitting memory",
    "already-on": "is on already",
    "asked-for": "asks for it",
    "assumes-mean-over-samples": "if the loss is a mean over samples",
    "batch-exceeds-memory": "do not fit into memory",
    "batch-not-splittable": "cannot be taken apart",
    "batch-times-vary": "because batch times vary",
    "batches-on-device": "already: another process could not make them there",
    "batchnorm-sees-parts": r"BatchNorm (would normalise|normalises) each part",
    "begins-state": "state within a step",
    "budget-spent": "budget",
    "cache-ended": "not cached any more",
    "clocks-throttled": "clocks are held down",
    "comes-as-graphs": "replays the model as CUDA graphs already",
    "comes-compiled": "comes compiled already|comes as a ScriptModule: it is compiled already",
    "compile-disabled": r"torch\.compile is switched off",
    "computed-in-parts": "computed in parts",
    "cores-bound": "of a core busy, and there are",
    "cudnn-deterministic": r"cudnn\.deterministic is on",
    "cudnn-disabled": r"cudnn\.enabled is off",
    "dataset-empty": "the dataset is empty",
    "deprecated": "is deprecated",
    "deterministic": "deterministic=True: (it may change|which algorithm)",
    "differs-in-eval-mode": "differ by .* in eval mode",
    "differs-when-negated": "differ by .* for inputs negated",
    "differs-when-resized": "differ by .* for inputs resized",
    "differs-when-shuffled": "differ by .* for inputs shuffled",
    "enlarge-layer": "make the layer larger",
    "exceeds-host-memory": "the samples take .* bytes, the budget is",
    "for-inference": "for inference",
    "forbidden": "does without it",
    "fragmentation": "GPU memory may fragment",
    "has-hooks": "the model has hooks",
    "hooks-see-parts": "hooks see the gradients of each part",
    "hooks-use-gradients": "hooks use the gradients",
    "host-bound": "the loop's own Python code",
    "in-16-bits": "multiplies in b?float16",
    "is-a-rule": "is a rule",
    "iterable-dataset": "IterableDataset",
    "keeps-python-state": "the forward keeps something in Python",
    "keeps-recompiling": r"it was compiled \d+ times more since its trial",
    "large-batch-warning": "Keskar",
    "launch-bound": "waits for kernels to be launched",
    "loader-bound": "goes to waiting for the loader",
    "loader-keeps-up": "as a step needs",
    "loader-limited": "where a step needs more",
    "loader-not-resizable": r"not exactly a DataLoader|a batch_sampler of its own",
    "loading-negligible": r"there is nothing to hide|loading a batch takes .* beside a step",
    "log-instead": r"run\.log\(",
    "loss-not-finite": "output is finite, but the loss is not",
    "loss-unknown-in-16-bits": "in 16 bits a trial cannot tell",
    "lr-kept": "the learning rate stays",
    "lr-scaled": "learning rate .* →",
    "lr-warmup": "warmed up over",
    "mask-instead": "all elements and a mask",
    "measured-cost": "a step takes .* ms with it and .* without",
    "memory-bound": "of memory are free",
    "memory-of-parameters": "Parameters that are trained take .*, gradients as much",
    "more-workers-than-needed": "workers? (is|are) more than that takes",
    "more-workers-than-supported": "more than this machine can serve",
    "no-attention": "no step calls torch's fused attention",
    "no-compiler": r"needs a C(\+\+)? compiler, and there is no",
    "no-convolutions": r"no (2-d )?convolutions?\b",
    "no-float32": "no float32 parameters",
    "no-limit-found": "[Nn]othing stands out",
    "no-optimizer": "no optimizer was given to optimize",
    "no-room-for-workers": "cannot serve one worker",
    "no-shape-twice": "no two batches are of the same shapes",
    "no-tensor-cores": "has no tensor cores",
    "no-waits": "no line of the model or the loss makes Python wait",
    "not-a-dataloader": "not (exactly )?a DataLoader",
    "not-faster": "^a step takes .* ms with it and .* ms without",
    "not-fused": "not flatout's fused one",
    "not-map-style": "not map-style",
    "not-on-device": "cannot be kept on the device",
    "not-only-tensors": "the batches hold more than tensors",
    "not-rewindable": "cannot be rewound",
    "not-surely-faster": "not surely more than",
    "nothing-measured": "nothing is (measured|evaluated)",
    "nothing-raced": "no time left to race it",
    "nothing-timed": "nothing was timed",
    "nothing-to-move": "no torch operation that could run on whole batches",
    "numerics-differ": r"(outputs|gradients|losses) differ by",
    "old-gpu": "older than Ampere",
    "on-cpu": "runs on the CPU",
    "on-gpu": "runs on the GPU",
    "once-per-step": "once in a step",
    "one-core": "only one core",
    "one-kernel": "no other kernel can be trusted",
    "one-shape": "batches come in one shape",
    "optimizer-has-hooks": "the optimizer has hooks or a step of its own",
    "other-allocator": "not torch's allocator",
    "other-sizes-fail": "other sizes fail",
    "out-of-memory": "ran out of memory",
    "out-of-time": r"there are \S+ s for this",
    "own-loop": r"serves run\.step alone",
    "pays-together-only": "it pays in the company of",
    "random-numbers-per-part": "random numbers .* are drawn for each part",
    "random-samples": "a sample draws|dataset is random",
    "ranks-apart": r"synchronized between \d+ ranks",
    "sample-failed": r"raised \w+",
    "sample-fails-here": "cannot load a sample itself",
    "samples-change": "samples may change from epoch to epoch",
    "samples-empty": "holds no tensor",
    "samples-in-memory": "samples are in memory",
    "samples-not-repeatable": "two different results",
    "saves-memory": "a step takes .* less memory",
    "schedules-momentum": "changes momentum with each step",
    "script-module": "comes as a ScriptModule",
    "see-workers": "row 2",
    "set-by-user": "set by hand|says already whether|is tuned for this process already",
    "settings-keep-changing": "change again and again",
    "setup-exceeds-budget": "a trial takes about",
    "setup-not-worth-it": "could save .* at the very most",
    "several-devices": "spread over several devices",
    "shapes-differ": "samples differ in shape",
    "shapes-vary": "come in several shapes",
    "shared-memory-bound": "of /dev/shm are free",
    "single-sample-too-large": "a single sample does not fit",
    "sizes-suit": "has sizes that tensor cores can use",
    "slower-together": "everything kept together ran at",
    "small-or-memory-bound-kernels": "[Tt]he step computes all the time",
    "start-method-changed": "workers are started by",
    "superseded-by-compile": r"torch\.compile is to be had here|torch\.compile runs the model already",
    "too-few-pairs": "of the .* pairs that a verdict needs",
    "transfer-bound": "copying batches to the device",
    "tried-as-pair": "tried together with",
    "try-8-bit-moments": "moments of 8 bits",
    "try-bf16": "precision='bf16'",
    "try-checkpointing": r"torch\.utils\.checkpoint",
    "try-smaller-batches": "smaller batches from the loader",
    "type-not-cacheable": r"holds (an? |strings)",
    "types-differ": "is made of other types",
    "unknown-cost": "what it costs is not known",
    "update-left-out": "was left out",
    "update-resized": "an update has .* samples instead of",
    "update-retried": "an update ran out of memory, and went well",
    "waits-for-device": "a step waits for the device",
    "waits-for-gpu": r"(makes|would make) Python wait for (the|a) GPU (\d|once)",
    "worker-init-fn": "worker_init_fn",
    "worker-killed": "was killed by SIG",
    "worker-timed-out": "timed out",
    "workers-failed": r"workers? failed with",
    "workers-not-faster": "no number of workers tried does better",
    "workers-pay": "as many worker processes as pay",
}


def reasons(told: Any, patterns: dict[str, str] = PATTERNS) -> set[str]:
    """Return the codes of a row, or of its sentence."""
    text = told if isinstance(told, str) else told.why
    return {code for code, pattern in patterns.items() if re.search(pattern, text)}


# code: what a sentence of a profile's advice says, as a regular expression
ADVICE: dict[str, str] = {
    "can-be-fused": r"flatout\.optim\.fuse\(optimizer\)",
    "copies": "^Copying batches",
    "data-wait": "^Waiting for data takes",
    "is-fused": "only fewer of them help",
    "launch-bound": "faster than Python launches them",
    "no-kernels": "^The trace has no kernels",
    "nothing": "^Nothing sticks out",
    "operator": "^The costliest operator",
    "own-code": "^The loop's own code",
    "sync": "^The wait for the GPU at",
    "syncs-cost-nothing": "^The syncs below cost nothing",
    "update": "^The optimizer's update",
    "would-wait": "On a GPU these would make Python wait",
}


def advice(sentence: str) -> set[str]:
    """Return the codes of a sentence of a profile's advice."""
    return reasons(sentence, ADVICE)


# code: why an optimizer cannot be fused, as a regular expression
FUSING: dict[str, str] = {
    "differentiable": "differentiable=True",
    "is-native": "is native already",
    "no-kernels": "kernels for parameters on",
    "no-native-form": "no native form",
    "step-is-wrapped": "not by an LR scheduler",
    "unknown-tensors": r"\ba \w+ of torch\.float32",
}


# code: why the monitor lacks a figure, as a regular expression
MISSING: dict[str, str] = {
    "before-hopper": "^needs Hopper or later",
    "container-silent": "^the container does not tell",
    "cuda-hidden": "^CUDA_VISIBLE_DEVICES=.* leaves no GPU$",
    "cuda-order-unknown": "CUDA_DEVICE_ORDER=PCI_BUS_ID$",
    "dcgm-elsewhere": "DCGM is connected in the process",
    "dcgm-failed": "DCGM failed: ",
    "dcgm-lacks-gpu": "DCGM does not know this GPU",
    "dcgm-not-asked": r"Sampler\(dcgm=True\)",
    "dcgm-not-importable": "DcgmReader.* not on sys.path",
    "dcgm-silent": "DCGM's host engine does not answer",
    "driver-not-loaded": "driver is not loaded",
    "first-sample": "^from the second sample on$",
    "gpu-lost": "fallen off the bus",
    "gpu-unreachable": "^the GPU cannot be reached$",
    "no-driver-library": "no NVIDIA driver library",
    "no-gpu": "^NVML finds no GPU$",
    "not-supported": "^not supported by this GPU",
    "nvml-cannot-count": "^NVML cannot count",
    "nvml-not-installed": "^nvidia-ml-py is not installed",
    "nvml-reopened": "it is opened again$",
    "nvml-unusable": "^NVML cannot be used: ",
    "psutil-not-installed": "^psutil is not installed",
    "versions-differ": "differ in version",
    "whole-mig": "where MIG is on, name a MIG device",
}


def missing(text: str) -> set[str]:
    """Return the codes of a sentence of the monitor."""
    return reasons(text, MISSING)


# code: what a finding of the doctor says, as a regular expression of its name, what was found and what to do
FINDINGS: dict[str, str] = {
    "anomaly-detection": "^anomaly detection",
    "clocks-held-down": r"^cuda:\d+ clocks",
    "could-not-look": "could not be looked at",
    "cpu-build": "^torch .* for the CPU alone, on a machine with an NVIDIA GPU",
    "cudnn-deterministic": "^cuDNN .*deterministic on",
    "cudnn-mismatch": "^cuDNN .*LD_LIBRARY_PATH",
    "cudnn-missing": "^cuDNN not available",
    "cudnn-off": "^cuDNN .*switched off",
    "debug-variable": "^environment",
    "driver-unusable": "^driver torch cannot use",
    "extras-missing": "^extras without",
    "few-open-files": "^open files",
    "few-threads": "^threads .*OMP_NUM_THREADS=.*unset",
    "governor": "^governor",
    "gpu-hidden": "^device hidden by",
    "gpu-unusable": r"^cuda:\d+ cannot be used",
    "huge-pages-off": "^huge pages",
    "kernels-cannot-run": r"^cuda:\d+ kernels",
    "kernels-missing": "^flatout .*without CUDA kernels",
    "load": r"^load \d",
    "low-memory": "^RAM",
    "memory-errors": r"^cuda:\d+ memory",
    "no-bfloat16": r"^cuda:\d+ .*no bfloat16",
    "no-compiler": r"^torch\.compile no C\+\+ compiler",
    "no-gpu": "^device none",
    "no-profilers": "^profilers neither",
    "no-python-headers": r"^torch\.compile no Python\.h",
    "no-triton": r"^torch\.compile no Triton",
    "numa": "^NUMA",
    "pcie-lanes": r"^cuda:\d+ PCIe",
    "peak-unknown": r"^cuda:\d+ peak",
    "persistence-off": r"^cuda:\d+ start",
    "small-shared-memory": "^/dev/shm",
    "swap-used": "^swap",
    "tf32-off": "^TF32 off",
    "too-many-threads": "^threads .*more threads than cores",
    "torch-lacks-architecture": r"^cuda:\d+ torch",
    "tracing": "^tracing",
}


def finding_code(finding: Any) -> str:
    """Return the one code of a finding of the doctor."""
    text = f"{finding.name} {finding.found} {finding.fix}"
    (code,) = (code for code, pattern in FINDINGS.items() if re.search(pattern, text, re.DOTALL))
    return code


# code: what bounds a batch size that was searched for, as a regular expression
BOUNDS: dict[str, str] = {
    "larger-does-not-fit": "memory holds no more",
    "larger-gains-little": "more gain less than",
    "larger-is-slower": "more are slower",
    "larger-not-allowed": "more are not allowed",
    "larger-untried": "more may be faster, but were not tried",
    "nothing-fits": "none of the sizes tried fits",
    "size-did-not-fit": "did not fit",
}


def bounds(text: str) -> set[str]:
    """Return the codes of the reason for a batch size."""
    return reasons(text, BOUNDS)

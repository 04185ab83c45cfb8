"""Session: one call of ``optimize``, from its arguments to a training that is ready for trials."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.utils.data import DataLoader

from flatout import mfu
from flatout.core import formatting
from flatout.core.batches import batch_size_of, cloned, objects_of, tensors_of, to_device
from flatout.core.errors import add_note, run_all
from flatout.core.machine import load_average, usable_cores
from flatout.core.snapshot import Snapshot
from flatout.data import is_rewindable
from flatout.data.feedback import why_not_ahead
from flatout.data.loaders import TRIAL_BATCHES, UNKNOWN_LENGTH, first_batches, known_length, loader_position
from flatout.data.replay_buffer import ReplayBuffer
from flatout.data.seeding import seeded_if_random
from flatout.data.slices import shards_of, sliced, why_not_sliced
from flatout.plan import Plan, fingerprint
from flatout.report.model import Gain, Row
from flatout.techniques import REGISTRY, Measured, NotApplicable, Rule
from flatout.techniques.batch_size import size_of
from flatout.training.attachments import attach, detach
from flatout.training.first_step import check_step
from flatout.training.job import Job, JobData
from flatout.training.loader import TrainingLoader
from flatout.training.spec import Spec
from flatout.tuning import stopwatch
from flatout.tuning.arguments import Choices
from flatout.tuning.bench import Bench
from flatout.tuning.budget import MOST_SECONDS, Budget, affordable, too_few, why_nothing
from flatout.tuning.ledger import Decision, Ledger
from flatout.tuning.progress import Progress, gain_of, log, logged, own_progress
from flatout.tuning.ranks import (
    applies_on_all,
    is_first_rank,
    why_apart,
    why_not_measured,
)
from flatout.tuning.trials import settle
from flatout.tuning.tuner import Tuner

EARLIER = "in an earlier start: "
"""Beginning of a reason that a cached plan holds, for the report."""

_MEASURED = {technique.name for technique in REGISTRY if isinstance(technique, Measured)}

DEFAULT_EPOCHS = 10
"""Epochs of a training without ``expected_steps``."""

TRIAL_BATCH_SECONDS = 0.5
"""Seconds of loading after which two batches are enough for trials."""

LONGEST_EPOCH = 10**7
"""Number of batches above which a loader's length counts as unknown.

``RandomSampler(num_samples=10**10)`` stands for a training without epochs.
"""


class Session:
    """State of one call of ``optimize``.

    Args:
        spec: the arguments, as ``resolved`` returns them.
        choices: techniques that are forbidden or forced.
        why_untried: why steps cannot be tried; empty if they can. Then nothing is measured, and no step runs.
        why_not_read: why an earlier session could not read samples out of turn; empty if it could.
        unread: batches that an earlier session has read for the training, or None.

    Attributes:
        loader: the user's loader, with a seed for each sample if requested. On several ranks, it yields slices.
        job: the training.
        ledger: the decisions so far.
        own_size: samples per batch of ``loader``.
        load_average: load average of the machine of rank 0 before the session.
        cores: usable cores of the machine of rank 0.
        repeated: plan of the user or of the cache that the decisions repeat; None if trials decide.
        retried: names of techniques that an earlier start left undecided and that this start tries again.
        apart: warning that nothing synchronizes the ranks; empty otherwise.
        expected_steps: batches of ``loader`` that the training will take.
        notes: sentences for the report.
        progress: shows the current stage.
        bench: measures the steps of the job. ``prepare`` sets this and all following attributes.
        taken: the batches for trials, from ``loader``.
        fingerprint: fingerprint of model, optimizer, device and first batch, for the plan.
        first_step_fits: result of the first step.
        tuner: runs the trials.
    """

    def __init__(
        self,
        spec: Spec,
        choices: Choices,
        *,
        why_untried: str = "",
        why_not_read: str = "",
        unread: ReplayBuffer | None = None,
    ) -> None:
        self.choices = choices
        self._unread = unread
        ranks = spec.ranks
        loader = spec.loader.original if isinstance(spec.loader, TrainingLoader) else spec.loader
        loader = seeded_if_random(loader) if spec.deterministic and spec.seed is not None else loader
        self._shards = shards_of(loader) if ranks.size > 1 else 1
        self.loader = loader if self._shards > 1 or spec.is_recorded else sliced(loader, ranks)
        self.apart = "" if ranks.size > 1 else why_apart(spec.modules, spec.optimizer, self.loader)
        self.notes = [self.apart] if self.apart else []
        reason = why_untried or ("" if ranks.size > 1 else why_not_measured(spec.modules, spec.optimizer))
        if reason:
            self.notes.append(reason)
            spec = replace(spec, budget=0)
        if self._shards > 1:
            self.notes.append(f"{why_not_sliced(loader)}: its batch size is that of one rank")
        self.expected_steps = int(ranks.largest([spec.expected_steps or self._default_steps()])[0])
        self.job = Job(spec, JobData(self.loader, self.loader, self.expected_steps, why_not_read=why_not_read))
        self.job.objective.why_untried = why_untried
        self.ledger = Ledger()
        self.progress = Progress()
        self._told = ""
        self.logs = not spec.is_recorded  # a script's log has its own records
        self.own_size = size_of(self.job)
        self.load_average, self.cores = ranks.first((load_average(), usable_cores()))
        self.repeated = choices.plan
        self.retried: frozenset[str] = frozenset()
        self._rewindable, self._fails_to_read = True, False
        self._undo: list[Callable[[], object]] = []
        self._guard = contextlib.ExitStack()

    @property
    def rows(self) -> list[Row]:
        """One row for each technique decided so far, with what the choices leave out."""
        return [replace(row, left_out=self.choices.values.get(row.technique) is False) for row in self.ledger.rows]

    def prepare(self) -> None:
        """Apply the rules, take batches for trials, and run a first step.

        Raises:
            TypeError: a batch has an unsupported type.
            ValueError: the plan does not fit, a forced technique cannot apply, or the loader is empty.
        """
        job, spec, plan = self.job, self.job.spec, self.choices.plan
        if self.apart and is_first_rank():
            warnings.warn(self.apart, RuntimeWarning, stacklevel=3)
        if not spec.is_recorded:  # a script prints while it is tuned, which would break the live line
            self.progress = own_progress()
            self._guard.callback(lambda: self.progress.close(self._told))
        earlier = detach(spec.model)
        if earlier is not None:
            self._undo.append(partial(attach, spec.model, earlier))
        if plan is not None:
            plan.check(fingerprint(spec.model, spec.optimizer, spec.device))
        self.choices.check(job)
        if spec.ranks.rank and not spec.is_recorded:  # the weights of rank 0 replace those of the others
            own = Snapshot.capture(spec.modules, spec.optimizer, on=torch.device("cpu"))
            self._undo.append(own.restore)
        with self.stage("applying rules"):
            self._apply_rules(after_first_step=False)
        self._wait_for_all()
        ranks = spec.ranks
        self._rewindable = ranks.all_hold(not job.data.why_not_read and is_rewindable(self.loader))
        if not self._rewindable:
            self._read_ahead()
        snapshot = self._capture()
        budget = Budget(MOST_SECONDS if spec.budget is None else spec.budget, ranks)
        self.bench = Bench(job, snapshot, budget, self._rewindable, self.ledger, self.progress)
        self._undo.append(self._restore_training)
        with self.stage("taking batches"):
            self.taken = self._take_batches()
        job.data.batches = [to_device(cloned(batch), spec.device) for batch in self.taken]
        self.fingerprint = fingerprint(spec.model, spec.optimizer, spec.device, job.data.batches[0])
        if plan is not None:
            plan.check(self.fingerprint)
        if job.objective.why_untried:
            self.first_step_fits, job.objective.draws, job.objective.writes_batches = True, True, True
            self._apply_rules(after_first_step=True)
        else:
            self._run_first_step(snapshot)
        self.tuner = Tuner(self.bench, self.choices)

    def _run_first_step(self, snapshot: Snapshot) -> None:
        job, ranks = self.job, self.job.spec.ranks
        with self.stage("running a first step"):
            needs_loss = bool(job.spec.run_step_arguments)
            fits = check_step(job, snapshot, job.data.batches[0], needs_loss=needs_loss)
            self.first_step_fits = ranks.all_hold(fits)
            job.objective.draws = not ranks.all_hold(not job.objective.draws)
            if not job.objective.has_loss:
                self.choices.check(job)
            settle(self.bench)
            self._apply_rules(after_first_step=True)
        with self.stage("counting FLOPs"):
            job.work(job.data.batches[0])

    def pause(self) -> None:
        """Restore the training with the kept candidates on, for its next steps. ``resume`` continues the trials."""
        self.bench.rewind(to_train=False)
        self.bench.state.restore_versions()
        self.close()
        self.bench.state = Snapshot()  # frees the copies

    def resume(self, budget: Budget) -> None:
        """Continue trials after ``pause``, from the present state of the training."""
        for candidate in reversed(self.ledger.candidates):
            candidate.disable()
        self._wait_for_all()
        self.bench.begin(self._capture(), budget)

    def _wait_for_all(self) -> None:
        """Let each step begin on all ranks or on none, until ``close``."""
        self.job.stepper.waits_for_all = True
        self._guard.callback(setattr, self.job.stepper, "waits_for_all", False)

    def _capture(self) -> Snapshot:
        """Return the present state. Until ``close``, optimizers that the state does not contain must not step."""
        spec = self.job.spec
        # Recorded calls hold the script's own objects where these cannot be copied.
        code = [*spec.code, self.loader] if spec.is_recorded and isinstance(self.loader, list) else spec.code
        if self.job.objective.why_untried:  # no step runs, so nothing is put back that threads may use meanwhile
            code = []
        # Batches of a loader that cannot be rewound are read once, for the training.
        loader = self.loader if self._rewindable else None
        state = Snapshot.capture(spec.modules, spec.optimizer, loader, code, also=[loader_position(loader)])
        if not self.job.objective.why_untried:
            self._guard.enter_context(state.guarded())
        return state

    def after(self, why: str) -> Session:
        """Return a new session, which leaves out what this session could not undo.

        Args:
            why: the reason of ``Unrepeatable``.
        """
        spec, data = self.job.spec, self.job.data
        if self._fails_to_read:
            return Session(spec, self.choices, why_not_read=why)
        return Session(
            spec,
            self.choices,
            why_untried=why,
            why_not_read=data.why_not_read,
            unread=data.source if isinstance(data.source, ReplayBuffer) else None,
        )

    def _read_ahead(self) -> None:
        """Read the first batches of a loader that cannot be rewound. The training gets these batches from a buffer.

        Only one batch is read if later ones may depend on the training, or on how many were read before.
        """
        data = self.job.data
        count = 1 if data.why_not_read or why_not_ahead(self.loader) else TRIAL_BATCHES
        data.source = ReplayBuffer(self.loader, count) if self._unread is None else self._unread

    @contextlib.contextmanager
    def stage(self, what: str) -> Iterator[None]:
        """Show a stage to the user and to profilers, and log the decisions inside the block."""
        with logged(self.ledger, self.logs), self.progress.stage(what), mfu.nvtx_range(f"flatout: {what}"):
            yield

    @property
    def measures(self) -> bool:
        """True if trials decide."""
        return self.bench.budget.seconds > 0 and self.job.spec.measures and self.repeated is None

    def settle_budget(self) -> None:
        """Set the default budget from the pace of the training. Steps must fit in memory."""
        if self.job.spec.budget is not None or not self.measures:
            return
        data, steps = self.job.data, self.expected_steps
        scale = steps / data.expected_steps  # batches of the user's loader in one of the job's
        per_update = scale * self.job.spec.accumulate
        # The pace takes ten steps, which may be the whole training.
        seconds = self._step_seconds() if too_few(steps, per_update) else self.bench.pace.total_ms / 1e3
        self.bench.budget.seconds = affordable(seconds / scale, steps, per_update)
        if not self.measures:
            self.notes.append(why_nothing(seconds / scale, steps, per_update))

    def plan(self) -> Plan:
        """Return the decisions as a plan, with the conditions under which trials made them."""
        if self.repeated is not None:
            return replace(self.repeated, decisions=self.ledger.values, fingerprint=self.fingerprint)
        return Plan(
            decisions=self.ledger.values,
            fingerprint=self.fingerprint,
            noise=self.bench.known_noise,
            load_average=self.load_average if self.measures else None,
            cores=self.cores,
            undecided=[name for name in self.ledger.undecided if name not in self.retried],
            left_out={
                row.technique: (row.status, row.why.removeprefix(EARLIER))
                for row in self.rows
                if row.status in ("rejected", "not tried") and row.technique in _MEASURED and not row.left_out
            },
        )

    def end_tuning(self, gain: Gain | None) -> None:
        """Report the end of all trials, with the gain of the race if there was one."""
        told = f"tuned in {formatting.seconds(self.bench.budget.spent)}"
        log(", ".join([told, *gain_of(gain)]), self.logs)
        self._told = f"flatout: {told}"

    def restore(self, error: BaseException) -> None:
        """Restore everything after an error. The error gets a note if something could not be restored."""
        try:
            run_all(reversed(self._undo))
        except BaseException as failure:
            add_note(error, f"Not everything could be restored: {formatting.first_line(failure)}")

    @property
    def epoch_samples(self) -> int | None:
        """Samples of all ranks in an epoch; None if the loader is no ``DataLoader`` of known length."""
        length = known_length(self.loader) if isinstance(self.loader, DataLoader) else None
        return None if length is None else length * self.own_size * self._shards

    def close(self) -> None:
        """Remove the live line, and allow all optimizers to step again."""
        self._guard.close()

    def _default_steps(self) -> int:
        """Return the batches of ``DEFAULT_EPOCHS`` epochs."""
        length = known_length(self.loader)
        if length is not None and length <= LONGEST_EPOCH:
            return DEFAULT_EPOCHS * length
        steps = DEFAULT_EPOCHS * UNKNOWN_LENGTH
        self.notes.append(
            f"the loader has no length of up to {LONGEST_EPOCH:,} batches: {steps:,} steps are expected. "
            "Pass expected_steps= for another number"
        )
        return steps

    def _step_seconds(self) -> float:
        """Return the seconds of a step, without its loading."""
        self.bench.rewind()
        job = self.job
        took = stopwatch.seconds(lambda: job.stepper.step(job.data.batches[0]), job.spec.device, job.spec.ranks)
        self.bench.rewind()
        return took

    def _restore_training(self) -> None:
        disable = (candidate.disable for candidate in reversed(self.ledger.candidates))
        run_all([self.job.stepper.reset, *disable, self.bench.state.restore])

    def _apply_rules(self, *, after_first_step: bool) -> None:
        """Turn on every rule that applies and is not forbidden, of those before or after the first step."""
        for rule in REGISTRY:
            if not isinstance(rule, Rule) or rule.depends_on_loop is not after_first_step:
                continue
            if self.choices.of(rule) is False:
                self.choices.check_forbidden(rule, self.job)
                self.ledger.add(Decision(rule.row("not tried", "techniques= does without it")))
                continue
            try:
                with applies_on_all(self.job.spec.ranks):
                    rule.check(self.job)
            except NotApplicable as reason:
                self.ledger.add(Decision(rule.row("not applicable", str(reason))))
                continue
            candidate = rule.candidate(self.job)
            if candidate is not None:
                self._undo.append(candidate.disable)
                candidate.enable()
            self.ledger.add(Decision(rule.row("kept", rule.rationale), "rule", candidate=candidate))

    def _take_batches(self) -> list[Any]:
        """Return the first batches, equally many on all ranks.

        Raises:
            ValueError: the loader yields no batch, no tensor, or an empty batch.
            Unrepeatable: samples cannot be read out of turn.
        """
        source = self.job.data.source
        if isinstance(source, ReplayBuffer):
            taken = source.read
        else:
            self._fails_to_read = True
            taken = first_batches(self.loader, TRIAL_BATCHES, TRIAL_BATCH_SECONDS)
            self._fails_to_read = False
        taken = taken[: int(self.job.spec.ranks.smallest([len(taken)])[0])]
        if not taken:
            raise ValueError("the loader is empty: it yielded no batch")
        for i, batch in enumerate(taken):
            if not tensors_of(batch) and not objects_of(batch):
                raise ValueError(
                    f"loader must yield tensors, or objects with a to(device) method, got no tensor in a "
                    f"{type(batch).__name__}. Define to(device) in the class of your batches"
                )
            if batch_size_of(batch) == 0:
                raise ValueError(
                    f"loader must yield batches of at least one sample, got none in batch {i}. "
                    "Skip empty batches, or check how the sampler and collate_fn treat the last samples"
                )
        return taken

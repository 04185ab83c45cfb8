"""Engine that watches the updates of a script, and tunes its modules between these updates."""

from __future__ import annotations

import atexit
import gc
import logging
import math
import os
import statistics
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from flatout.autotune.loaders import Drawn, Loaders
from flatout.autotune.module_tuning import ModuleTuning, Options
from flatout.autotune.recorder import RecordedUpdate, Recorder, with_gradients_of_update
from flatout.autotune.script_ranks import PATIENCE, TURN_PATIENCE, Replica, connected, ddp_of, why_not_together
from flatout.core import formatting
from flatout.core.effects import Unrepeatable
from flatout.core.errors import parameters_of
from flatout.core.step_hooks import without_users_hooks
from flatout.distributed.agreement import ALONE, PARTED, Agreement, OutOfStep, RanksApart
from flatout.training.attachments import detach
from flatout.tuning.budget import Allowance
from flatout.tuning.ranks import is_first_rank, world_size

LEAST_SHARE = 0.05
"""Smallest share of an update's time that the calls of a tuned module take."""

MOST_MODULES = 4
"""Largest number of modules of one optimizer that are tuned. The modules with the longest calls are chosen."""

MOST_RECORDED = 10
"""Recorded updates per optimizer, of which two must have the same calls. An optimizer without two is not tuned."""

MOST_OPTIMIZERS = 4
"""Optimizers that are recorded at the same time. A script with inner loops may make a new one in every step."""

FEWEST_STEPS = 10
"""Number of steps after which a later optimizer is recorded. Optimizers of inner loops take fewer."""

IDLE_STEPS = 100
"""Steps of other optimizers after which the tuning of an optimizer that does not step any more ends."""

MOST_REPORTS = 16
"""Limit of reports on models that are no longer tuned. The oldest reports are dropped."""

USUAL_UPDATES = 3
"""Updates after the recorded ones, whose median time gives the cost of a first turn. Recorded updates are slower."""

MOST_UPDATES_APART = 1000
"""Limit of the updates between two meetings of the ranks, because the estimate of their time may be wrong."""

_log = logging.getLogger("flatout.autotune")
_log.propagate = False  # the root logger is the script's


class Engine:
    """Tuning of a script's modules and optimizers while the script trains. The script does not change.

    Two updates of each optimizer are recorded. Tuning then takes turns with the script's updates, within an
    :class:`Allowance`. An error of flatout in a module's tuning ends this tuning, undoes its changes, and is reported
    once.

    Several ranks record as one process does. They meet after an agreed update of their first optimizer, where rank 0
    decides about a turn of all, and agree on the update of the next meeting. The updates between have no communication
    of flatout. One module of the first optimizer is tuned. If a rank does not come, all tuning ends. Rank 0 speaks.

    At most one engine works at a time, because trials of two engines would disturb each other. A new engine undoes the
    earlier one.

    Args:
        options: options of the tuning.
        say: receives each message for the user.

    Attributes:
        tunings: one for each tuned module.
        allowance: time for tuning, or None before the first update.
        updates: number of updates of the optimizer that stepped first.
        why_nothing: reason why nothing is tuned, which the user knows already. Empty before the first update, and if
            tuning may begin.
        why_untuned: reason why the latest optimizer or module without a tuning has none; empty without one.
    """

    _latest: ClassVar[Engine | None] = None

    def __init__(self, options: Options, say: Callable[[str], object]) -> None:
        if (earlier := Engine._latest) is not None:
            earlier.undo()
            if earlier.allowance is None:
                earlier.why_nothing = earlier.why_nothing or "a later call of flatout.auto() tunes the training"
        Engine._latest = self
        self.tunings: list[ModuleTuning] = []
        self.allowance: Allowance | None = None
        self.updates = 0
        self.why_nothing: str = ""
        self.why_untuned = ""
        self._options = options
        self._say = say
        self._process, self._thread = os.getpid(), 0
        self._is_in_hook = self._is_closed = False
        self._leader: weakref.ref[Optimizer] | None = None
        self._last_update, self._update_seconds = 0.0, 0.0
        self._usual_seconds: list[float] = []
        self._recorded_steps = 0
        self._due = math.inf
        # Values do not refer to their key, which would keep the optimizer alive.
        self._recorded: weakref.WeakKeyDictionary[Optimizer, RecordedUpdate | None] = weakref.WeakKeyDictionary()
        self._steps = 0
        self._taken: weakref.WeakKeyDictionary[Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()
        """Number of an optimizer's steps, and the number of all steps at its last one."""
        self._known: weakref.WeakKeyDictionary[Optimizer, list[ModuleTuning]] = weakref.WeakKeyDictionary()
        self._drawn: Drawn | None = None
        self._loaders = Loaders()
        self._hook: Any = register_optimizer_step_post_hook(self._stepped)
        self._recorder: Recorder | None = None
        self._is_one_of_several = False
        self._ranks: Agreement = ALONE
        self._found: tuple[RecordedUpdate, RecordedUpdate] | None = None  # recorded on this rank, and not yet tuned
        self._next_meeting: float = 0
        self._start_recording()

    def close(self) -> None:
        """Stop tuning. Kept techniques stay on. Replaced loaders finish the epoch that has begun."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._is_in_hook:  # torch iterates over its hooks, so none may be removed
            self._hook.remove()
        self._stop_recording()
        self._loaders.close()
        for tuning in self.tunings:
            tuning.end()
        self._part()

    def undo(self) -> None:
        """Stop tuning, and turn off all kept techniques."""
        self.close()
        if Engine._latest is not self:  # a newer engine may have tuned the modules again
            return
        Engine._latest = None
        for tuning in reversed(self.tunings):
            if tuning.module is not None:
                detach(tuning.module)

    def _start_recording(self) -> None:
        self._recorder = Recorder(self._note, self._stop_recording, self._give_up)
        self._recorded_steps = 0
        self._usual_seconds.clear()
        self._loaders.start_counting()

    def _stop_recording(self) -> None:
        """Stop recording. Optimizers without two updates that have the same calls are not tuned."""
        for optimizer, update in self._recorded.items():
            if optimizer not in self._known:
                self._known[optimizer] = []
                self.why_untuned = _why_not_comparable(optimizer, update)
        self._recorded.clear()
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
            self._loaders.stop_counting()

    # Updates of the script

    def _stepped(self, optimizer: Optimizer, *_: object) -> None:
        """Count an update, and take a turn if one is due. An error ends all tuning, but not the script."""
        if self._is_in_hook or self._is_closed or torch.compiler.is_compiling() or os.getpid() != self._process:
            return
        self._is_in_hook = True
        try:
            self._count(optimizer)
        except OutOfStep:  # the collectives of this rank no longer match those of the others
            raise
        except Exception as error:
            self._give_up(error)
        finally:
            self._is_in_hook = False

    def _count(self, optimizer: Optimizer) -> None:
        now = time.perf_counter()
        self._steps += 1
        taken = self._taken.get(optimizer, (0, 0))[0] + 1
        self._taken[optimizer] = taken, self._steps
        if self._steps % IDLE_STEPS == 0:
            self._release_idle()
        if self._leader is None:
            self._begin(optimizer)
        if self._leader is None:
            return
        if self._leader() is None:  # the script has dropped the first optimizer
            if self._is_one_of_several:  # other ranks may drop theirs later
                self.close()
                return
            self._leader = weakref.ref(optimizer)
        if (
            self._is_one_of_several and getattr(optimizer, "optim", None) is self._leader()
        ):  # a ZeroRedundancyOptimizer's part of this rank
            self._leader = weakref.ref(optimizer)
        if optimizer is self._leader():
            self.updates += 1
            self._update_seconds, self._last_update = now - self._last_update, now
            if self._recorder is not None:
                self._drawn = self._loaders.drawn()
        if self._recorder is not None:
            if not _is_busy():
                self._end_recorded(optimizer)
        elif optimizer not in self._known:
            if taken >= FEWEST_STEPS and not self._is_one_of_several:
                self._start_recording()
        elif optimizer is self._leader() and len(self._usual_seconds) < USUAL_UPDATES:
            self._note_usual_update()
        elif now >= self._due and not (self._is_one_of_several or self._is_disturbed()):
            assert self.allowance is not None
            self._take_turn(optimizer, self.allowance.left)
        if self._is_one_of_several and self.updates >= self._next_meeting and optimizer is self._leader():
            self._meet(optimizer)

    def _is_disturbed(self) -> bool:
        """Return True if no turn may begin now."""
        return threading.get_ident() != self._thread or _is_busy()

    def _end_recorded(self, optimizer: Optimizer) -> None:
        """Record the end of an update, and stop after ``MOST_RECORDED`` of them."""
        assert self._recorder is not None
        self._recorded.setdefault(optimizer, None)
        self._recorder.end_update(optimizer)
        self._recorded_steps += 1
        if self._recorded_steps > MOST_RECORDED * min(len(self._recorded), MOST_OPTIMIZERS):
            self._stop_recording()

    def _begin(self, leader: Optimizer) -> None:
        """Begin with the optimizer that steps first."""
        self.why_nothing = self._options.why_nothing
        if self.why_nothing:
            self._refuse(self.why_nothing)
            return
        self._is_one_of_several = world_size() > 1
        self._leader, self._thread = weakref.ref(leader), threading.get_ident()
        self.allowance = Allowance(math.inf if self._options.budget is None else self._options.budget)
        self._last_update = time.perf_counter()

    def _note(self, optimizer: Optimizer, update: RecordedUpdate) -> None:
        """Handle a recorded update. Tune the modules of an optimizer after two updates with the same calls."""
        if optimizer in self._known:
            return
        earlier, self._recorded[optimizer] = self._recorded.get(optimizer), update
        if earlier is None or not update.batches or _form(earlier) != _form(update):
            return
        if not self._is_one_of_several:
            assert self._recorder is not None
            with self._recorder.suspended(), _in_default_modes():
                self._known[optimizer] = self._tunings_of(optimizer, earlier, update)
            self._schedule()
        elif self._leader is not None and optimizer is self._leader():
            self._found = earlier, update
            for each in self._recorded:
                self._known[each] = []
        if all(optimizer in self._known for optimizer in self._recorded):
            self._stop_recording()

    def _tunings_of(self, optimizer: Optimizer, *updates: RecordedUpdate) -> list[ModuleTuning]:
        """Return a tuning for each module of an optimizer whose calls take long enough."""
        seconds = updates[-1].seconds
        longest = sorted(seconds, key=lambda module: -seconds[module])[:MOST_MODULES]
        modules = [m for i, m in enumerate(longest) if i == 0 or seconds[m] >= LEAST_SHARE * self._update_seconds]
        tuned = {tuning.module for tuning in self.tunings}
        made: list[ModuleTuning] = []
        for module in modules:
            if module in tuned or any(p._post_accumulate_grad_hooks for p in module.parameters()):
                continue  # such hooks may step optimizers inside a backward
            drawn = None if self.tunings or made else self._drawn
            try:
                batches = [each.batches[module] for each in updates]
                # Trials of the optimizer's first module call its step.
                made.append(self._tuning_of(module, optimizer, batches, is_stepped=not made, drawn=drawn))
            except Exception as error:
                self._fail(type(module).__name__, error)
        self.tunings += made
        return made

    def _tuning_of(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        updates: Sequence[Sequence[dict[str, Any]]],
        replica: Replica | None = None,
        *,
        is_stepped: bool = True,
        drawn: Drawn | None = None,
    ) -> ModuleTuning:
        """Return the tuning of a module on recorded updates. Arguments are those of ``ModuleTuning``."""
        how = () if replica is None else (replica.loss, replica.sync)
        updates = [with_gradients_of_update(module, optimizer, each, *how) for each in updates]
        is_stepped = is_stepped and not isinstance(optimizer, torch.optim.LBFGS)  # which cannot step without a closure
        seconds, serve = self._update_seconds, self._loaders.serve
        return ModuleTuning(module, optimizer, is_stepped, updates, self._options, seconds, drawn, serve, replica)

    # Several ranks

    def _meet(self, optimizer: Optimizer) -> None:
        """Meet the other ranks after an agreed update: compare what they have recorded, or take a turn together."""
        try:
            if self._ranks.size == 1 and not self._connect(optimizer):
                return
            ranks, seconds = self._ranks, self._affordable(optimizer)
            ranks.limit(PATIENCE)
            met = ranks.every((self.updates, self._form_on_this_rank(), self._is_disturbed(), seconds))
            if any(each[:2] != met[0][:2] for each in met):
                raise RanksApart("the ranks have recorded different calls or updates")
            if self._recorder is not None:
                self._next_meeting = self.updates + 1
                return
            ranks.limit(TURN_PATIENCE)
            if self._found is not None:
                self._begin_together(optimizer, self._found)
            elif met[0][-1] and not any(is_disturbed for *_, is_disturbed, _ in met):
                self._take_turn(optimizer, met[0][-1])
            self._next_meeting = ranks.first(self._next_turn())
            if self._next_meeting == math.inf:
                self._part()
        except OutOfStep:
            self.close()
            raise
        except Exception as error:
            self.close()
            self.why_untuned = f"the tuning has ended: {formatting.first_line(error)}"
            self._tell(self.why_untuned)
        except BaseException:  # the script may continue, but must not let the other ranks wait
            self.close()
            raise

    def _connect(self, optimizer: Optimizer) -> bool:
        """Connect the ranks if they train a module together. Return False if they do not."""
        update = self._found[1] if self._found else self._recorded.get(optimizer)
        if update is None:
            return False
        if reason := why_not_together(update):
            self._refuse(f"nothing is tuned on several ranks: {reason}")
            return False
        self._ranks = connected()
        atexit.register(self._part)  # a thread of gloo that is at work when Python ends aborts the process
        return True

    def _form_on_this_rank(self) -> Any:
        """Return the form of the recorded calls, which must be equal on all ranks.

        False while this rank records, and True if it has no form to compare.
        """
        if self._found is None or self._recorder is not None:
            return self._recorder is None
        recorded = [batches for update in self._found for batches in update.batches.values()]
        return [[len(batch["args"]) for batch in batches] for batches in recorded]

    def _begin_together(self, optimizer: Optimizer, updates: Sequence[RecordedUpdate]) -> None:
        """Make the tuning of the module that all ranks train together."""
        self._found = None
        ddp = ddp_of(updates[-1])
        assert ddp is not None
        try:
            with _in_default_modes(), self._ranks.attempt():
                replica = Replica(ddp, self._ranks)
                tuning = self._tuning_of(replica.module, optimizer, [each.batches[ddp] for each in updates], replica)
        except PARTED:
            raise
        except Exception as error:
            self._fail(type(ddp.module).__name__, error)
            return
        self.tunings.append(tuning)
        self._known[optimizer] = [tuning]
        self._schedule()

    def _affordable(self, optimizer: Optimizer) -> float:
        """Return the seconds of a turn that may begin now, or 0."""
        assert self.allowance is not None
        left = self.allowance.left
        return left if any(tuning.needs <= left for tuning in self._known.get(optimizer, ())) else 0.0

    def _next_turn(self) -> float:
        """Return the number of the update after which the next turn may be due; infinity without one."""
        assert self.allowance is not None
        if self._due == math.inf:
            return math.inf
        seconds = self._due - time.perf_counter()
        later = math.ceil(seconds * self.updates / max(self.allowance.trained, 1e-9))
        return self.updates + max(1, USUAL_UPDATES - len(self._usual_seconds), min(later, MOST_UPDATES_APART))

    def _part(self) -> None:
        """Leave the other ranks, so that none waits for this one."""
        atexit.unregister(self._part)
        ranks, self._ranks, self._next_meeting = self._ranks, ALONE, math.inf
        ranks.close()

    def _release_idle(self) -> None:
        """End the tuning of optimizers that no longer step, which frees recorded calls. Bound the reports."""
        for optimizer, tunings in list(self._known.items()):
            if tunings and self._steps - self._taken.get(optimizer, (0, 0))[1] > IDLE_STEPS:
                for tuning in tunings:
                    tuning.end()
                self._known[optimizer] = []
        ended = [tuning for tuning in self.tunings if tuning.is_done]
        for tuning in ended[:-MOST_REPORTS]:
            self.tunings.remove(tuning)

    def _note_usual_update(self) -> None:
        """Note the time of an update that was not recorded. The last of them corrects the costs of first turns."""
        self._usual_seconds.append(self._update_seconds)
        if len(self._usual_seconds) == USUAL_UPDATES:
            for tuning in self.tunings:
                tuning.expect(statistics.median(self._usual_seconds))
            self._schedule()

    # Turns

    def _schedule(self) -> None:
        """Compute the time of the next turn."""
        needs = min((tuning.needs for tuning in self.tunings if not tuning.is_done), default=math.inf)
        self._due = math.inf if self.allowance is None else self.allowance.due(needs)

    def _take_turn(self, optimizer: Optimizer, seconds: float) -> None:
        """Run a turn of the tuning of one of the optimizer's modules, if there are enough seconds."""
        allowance = self.allowance
        assert allowance is not None
        several = self._is_one_of_several
        ready = [tuning for tuning in self._known.get(optimizer, ()) if several or tuning.needs <= seconds]
        if not ready:
            return
        tuning, begun = min(ready, key=lambda tuning: tuning.spent), time.perf_counter()
        try:
            with without_users_hooks(optimizer), _in_default_modes(), self._ranks.attempt():
                tuning.turn(seconds)
        except PARTED:
            tuning.drop()
            raise
        except Exception as error:
            tuning.drop()
            self._fail(tuning.name, error)
        finally:
            allowance.spent += time.perf_counter() - begun
            self._last_update = time.perf_counter()
            self._schedule()

    def _give_up(self, error: Exception) -> None:
        """End and undo all tuning, after an error that belongs to no module."""
        self.undo()
        self.why_nothing = (
            f"an error of flatout ended the tuning, and everything is undone: {formatting.first_line(error)}"
        )
        self._tell(self.why_nothing)
        _log.debug("an error ended the tuning", exc_info=error)

    def _fail(self, name: str, error: Exception) -> None:
        if isinstance(error, Unrepeatable):
            self.why_untuned = f"{name} is not tuned: {error}"
        else:
            self.why_untuned = f"tuning of {name} failed and is undone: {formatting.first_line(error)}"
            _log.debug("tuning of %s failed", name, exc_info=error)
        self._tell(self.why_untuned)

    def _refuse(self, reason: str) -> None:
        """Tune nothing in this process."""
        self.why_nothing = reason
        self._tell(reason)
        self.close()

    def _tell(self, text: str) -> None:
        if is_first_rank():
            self._say(text)


def _is_busy() -> bool:
    """Return True inside a backward, and while torch captures or profiles. A trial would disturb them."""
    return (
        torch._C._current_graph_task_id() != -1
        or torch.autograd.profiler._is_profiler_enabled
        or (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())
    )


@contextmanager
def _in_default_modes() -> Iterator[None]:
    """Turn off autocast, ``no_grad`` and inference mode of the code that called ``optimizer.step``."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
            stack.enter_context(torch.autocast(device, enabled=False))
        yield


def _why_not_comparable(optimizer: Optimizer, update: RecordedUpdate | None) -> str:
    """Return why an optimizer is not tuned.

    Args:
        optimizer: the optimizer.
        update: its last recorded update, or None without one.
    """
    if update is not None and update.batches:
        return f"no two successive updates of the first {MOST_RECORDED} called the same modules equally often"
    held = parameters_of(optimizer)
    ids = set(map(id, held))
    modules = [each for each in gc.get_objects() if issubclass(type(each), nn.Module)]  # isinstance asks weak proxies
    owners = {
        type(each).__name__
        for each in modules
        if not ids.isdisjoint(map(id, vars(each).get("_parameters", {}).values()))
    }
    return (
        f"no module in train mode was called before the step of {type(optimizer).__name__}, which has "
        f"{formatting.counted(len(held), 'parameter')} of {', '.join(sorted(owners)) or 'no module'}, or a "
        "gradient was differentiated again"
    )


def _form(update: RecordedUpdate) -> dict[int, int]:
    """Return the number of backwards of each module."""
    return {id(module): len(batches) for module, batches in update.batches.items()}

"""Base class of flatout's optimizers: a step with native operators, or with torch's where these cannot run."""

from __future__ import annotations

import copyreg
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from flatout.core import gradients
from flatout.core.errors import ran_out_of_memory
from flatout.core.step_hooks import unhooked_step
from flatout.core.torch_state import uncompiled
from flatout.optim import options
from flatout.optim.atomic_update import AtomicUpdate, PartialUpdateError
from flatout.optim.bucket import Bucket, Kind, is_capturing, keep_moment
from flatout.optim.bucket_plan import BucketPlan
from flatout.optim.dynamic8 import absmax_name, check_codes, coded
from flatout.optim.ema import Averages

before_fuse: weakref.WeakKeyDictionary[torch.optim.Optimizer, Any] = weakref.WeakKeyDictionary()
"""Optimizers that ``fuse`` converted, with the ``step`` that an LR scheduler had put on the instance, or None."""


class NativeStep(torch.optim.Optimizer):
    """Mixin in front of a torch optimizer: same options, same state, one native pass.

    Param groups that differ in ``lr`` and ``weight_decay`` only share this pass. Other groups have a separate pass.

    ``step`` does not change ``p.grad``: the factor of a lazy update is applied in registers. With a ``grad_scale``,
    which torch's GradScaler sets, ``step`` leaves unscaled gradients, as torch's fused optimizers do. Addresses of
    tensors are kept from step to step. :meth:`release` drops them.
    """

    _torch_class: ClassVar[type[torch.optim.Optimizer]]
    _rule: ClassVar[str]
    # torch.amp.GradScaler then passes `grad_scale` and `found_inf` as tensors, without .item().
    _step_supports_amp_scaling = True
    _detects_writes = False
    """True while flatout captures the step, and itself detects writes to parameters between replays."""

    def __init__(
        self,
        params: Any,
        *args: Any,
        master_weights: str | None = None,
        moment_dtype: torch.dtype | None = None,
        stochastic_rounding: bool = False,
        seed: int = 0,
        ema_decay: float | None = None,
        low_precision_copy: torch.dtype | None = None,
        **kwargs: Any,
    ) -> None:
        # torch's constructor makes `defaults` and adds the groups at once, so `add_param_group` reads these options.
        self._additions = {
            "master_weights": master_weights,
            "moment_dtype": moment_dtype,
            "stochastic_rounding": stochastic_rounding,
            "seed": seed,
            "ema_decay": ema_decay,
            "low_precision_copy": low_precision_copy,
        }
        super().__init__(params, *args, **kwargs)

    # Defined by each rule

    def _streams(self, group: dict[str, Any]) -> tuple[str, ...]:
        """Return the state entries that the rule updates with the parameter, in the operator's order."""
        raise NotImplementedError

    def _counts(self, group: dict[str, Any]) -> bool:
        """Return True if the rule needs step counts."""
        raise NotImplementedError

    def _options(self, group: dict[str, Any]) -> list[float | Tensor]:
        """Return the numbers of the rule as ``group`` has them, in the operator's order.

        A number may be a tensor on a device. This method does not read the tensor, so that no step waits for a device.
        """
        raise NotImplementedError

    # Groups and the step

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group as in torch. ``differentiable=True`` is refused, because native steps have no gradient."""
        if "_additions" in self.__dict__:
            self.defaults.update(self.__dict__.pop("_additions"))
            options.normalize(self.defaults)
        self._refuse_differentiable({**self.defaults, **param_group})
        super().add_param_group(param_group)
        try:
            options.normalize(param_group)
        except ValueError:
            self.param_groups.pop()
            raise

    def _refuse_differentiable(self, group: dict[str, Any]) -> None:
        if group.get("differentiable"):
            raise ValueError(
                f"differentiable must be False for flatout.optim.{type(self).__name__}, got True: "
                f"use torch.optim.{self._torch_class.__name__}"
            )

    def release(self) -> None:
        """Release the references to the memory of parameters and state. The next step finds this memory again.

        Between steps, the optimizer keeps the memory of the last step alive. Call this after parameters or state were
        moved to another place (offloaded), so that their old memory is freed at once.
        """
        self.__dict__.pop("_plan", None)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient.

        Inside a function under ``torch.compile``, the step is one graph break. A new learning rate or scale does not
        recompile. ``fullgraph=True`` accepts neither this step nor one of ``torch.optim``. Compile the model or the
        loss instead.

        Args:
            closure: reevaluates the model and returns the loss, as in torch.

        Returns:
            The result of ``closure``, else None.

        Raises:
            ValueError: a parameter overlaps itself (``expand``), or the options do not fit a parameter.
            RuntimeError: an additional option is set, and the native kernels do not accept a parameter, a gradient or
                an option. Or the parameters hold their averages (:meth:`flatout.optim.Averages.swap`). Or a CUDA graph
                is captured without ``capturable=True``.
            torch.OutOfMemoryError: memory ran out before the first change, so ``step`` can be called again.
            PartialUpdateError: memory ran out after some parameters, state or gradients had changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._update()
        return loss

    @uncompiled
    def _update(self) -> None:
        found_inf = getattr(self, "found_inf", None)
        factor: Any = getattr(self, "_grad_factor", None)
        grad_scale = getattr(self, "grad_scale", None)
        unscales = getattr(self, "_unscales_grads", False)
        if grad_scale is not None:
            unscales |= factor is None
            inverse = grad_scale.double().reciprocal().float()
            factor = inverse if factor is None else factor * inverse
        unscales = unscales and factor is not None
        ready = self.__dict__.pop("_ready", None)
        if ready is None:
            ready = self._prepare()
        if unscales and ready and not self._plan.can_unscale():
            for bucket in ready:
                bucket.forget_grads()
            gradients.scale_(gradients.of_optimizer(self), factor)
            factor, unscales, ready = None, False, self._prepare()
        if ready is None:
            self._torch_update(factor, found_inf, unscales)
            return
        try:
            self._step_buckets(ready, factor, found_inf, unscales)
        finally:
            for bucket in ready:
                bucket.forget_grads()

    def _step_buckets(
        self, ready: list[Bucket], factor: Tensor | None, found_inf: Tensor | None, unscales: bool
    ) -> None:
        numbers = [self._numbers(bucket, factor, found_inf, unscales) for bucket in ready]
        in_captures = not self._detects_writes
        for bucket in ready:
            bucket.refresh_masters(in_captures)
        # All memory is allocated now, except for the tables of CUDA launches, which are small and made once.
        for i, bucket in enumerate(ready):
            try:
                bucket.step(*numbers[i])
            except RuntimeError as error:
                if i and ran_out_of_memory(error):
                    raise PartialUpdateError(self) from error
                raise

    def _numbers(
        self, bucket: Bucket, factor: Tensor | None, found_inf: Tensor | None, unscales: bool
    ) -> tuple[Any, ...]:
        """Return the arguments of the step of a bucket, in the operator's order."""
        groups, device = [self.param_groups[i] for i in bucket.groups], bucket.device
        group = groups[0]
        rates = [_learning_rate(each["lr"], device) for each in groups]
        return (
            list(map(float, self._options(group))),
            [0.0 if isinstance(rate, Tensor) else rate for rate in rates],
            [rate if isinstance(rate, Tensor) else None for rate in rates],
            [float(each["weight_decay"]) for each in groups],
            group["maximize"],
            group.get("ema_decay") or 0.0,
            bucket.seed(group.get("seed") or 0) if bucket.kind.seeded else None,
            gradients.on_device(factor, device),
            None if found_inf is None else gradients.move(found_inf, device, torch.float32),
            unscales,
        )

    def _prepare(self) -> list[Bucket] | None:
        """Return the buckets with work to do, with their gradients set; None if torch's own step must run."""
        if self.__dict__.get("_swapped"):
            raise RuntimeError("step() inside optimizer.ema.swap(): the parameters hold their averages")
        if any(map(self._only_the_device_knows, self.param_groups)):
            return None
        if is_capturing():
            self._check_capture()
        if "_plan" not in self.__dict__:
            self._plan = BucketPlan()
        return self._plan.ready(self)

    def _check_capture(self) -> None:
        """Reject a capture in which the learning rate is a number, as torch does without ``capturable=True``.

        torch captures SGD, which has no such option, without a word. So SGD warns.
        """
        for group in self.param_groups:
            lr = group["lr"]
            if group.get("capturable") or (isinstance(lr, Tensor) and lr.device.type != "cpu"):
                continue
            constants = f"Each replay repeats lr={float(lr)}. If lr changes between replays, pass lr as a CUDA tensor"
            name = type(self).__name__
            if "capturable" in group:
                raise RuntimeError(
                    f"Attempting CUDA graph capture of step() for an instance of {name} but param_groups' capturable "
                    f"is False. {constants}, else capturable=True"
                )
            warnings.warn(f"CUDA graph capture of {name}.step(). {constants}", RuntimeWarning, stacklevel=2)

    def _only_the_device_knows(self, group: dict[str, Any]) -> bool:
        """Return True if a number that the kernels take from the host lies on a device."""
        for number in (group["weight_decay"], *self._options(group)):
            if isinstance(number, Tensor) and number.device.type != "cpu":
                return True
        return False

    def _kind(self, group: dict[str, Any], dtype: torch.dtype, in_8_bits: bool) -> Kind:
        """Return the kind of the parameters of ``dtype`` in a group, with moments in 8 bits or without."""
        layout, streams = options.layout(group, dtype, in_8_bits), self._streams(group)
        rounded = ([layout.moments] if streams else []) + ([] if layout.has_master else [dtype])
        seeded = bool(group.get("stochastic_rounding")) and torch.bfloat16 in rounded
        counted = seeded or self._counts(group)
        return Kind(self._rule, streams, options.count_dtype(group) if counted else None, seeded, layout)

    def _torch_update(self, factor: Tensor | None, found_inf: Tensor | None, unscales: bool = False) -> None:
        """Run the same update by torch's class, which waits for the device to decide about a skip."""
        added = {name for group in self.param_groups for name in options.additions_of(group)}
        if added:
            raise RuntimeError(
                f"{', '.join(sorted(added))}: only for parameters, gradients and options that the native kernels "
                "take (plain dense gradients, betas on the CPU, a device with kernels)"
            )
        if found_inf is not None and found_inf.item():
            if unscales and factor is not None:
                gradients.scale_(gradients.of_optimizer(self), factor)
            return
        handed: dict[str, Any] = {
            name: self.__dict__.pop(name) for name in ("grad_scale", "found_inf") if name in self.__dict__
        }
        watch = AtomicUpdate(self)
        try:
            with watch:
                grads = gradients.of_optimizer(self) if factor is not None else []
                if factor is not None and grads:
                    gradients.scale_(grads, factor)
                unhooked_step(self._torch_class)(self)
        except RuntimeError as error:
            if watch.has_rewritten_gradients:  # the next call would scale them again
                raise PartialUpdateError(self) from error
            raise
        finally:
            self.__dict__.update(handed)

    # Averages and copies

    @property
    def ema(self) -> Averages:
        """Averages of the weights in groups with ``ema_decay``."""
        return Averages(self)

    def copy_of(self, parameter: Tensor) -> Tensor:
        """Return the copy of a float32 parameter in its group's ``low_precision_copy`` dtype.

        Each step writes the copy, and so does this call. So the copy has the present values, rounded. The result is
        the same tensor as long as the parameter stays on its device and keeps its strides.

        Raises:
            ValueError: ``parameter`` is not in the optimizer or not float32, or its group has no
                ``low_precision_copy``.
        """
        for group in self.param_groups:
            if any(p is parameter for p in group["params"]):
                dtype = options.layout(group, parameter.dtype).extras.get("copy")
                if dtype is None:
                    break
                state = self.state[parameter]
                if "copy" not in state:
                    state["copy"] = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                with torch.no_grad():
                    return state["copy"].copy_(parameter)
        raise ValueError("parameter must be a float32 parameter in a group with low_precision_copy")

    # Saving and loading

    def state_dict(self) -> dict[str, Any]:
        """Return the state as in torch. Step counts are where torch has them. Low-precision copies are left out."""
        # This hook runs before the user's own hooks, which may change the form of the result.
        publish = self.register_state_dict_post_hook(lambda _, result: self._publish(result), prepend=True)
        try:
            return super().state_dict()
        finally:
            publish.remove()

    def _publish(self, result: dict[str, Any]) -> dict[str, Any]:
        entries = dict(result["state"])
        for group, packed in zip(self.param_groups, result["param_groups"], strict=True):
            for index in packed["params"]:
                if index in entries:
                    entries[index] = self._published(group, entries[index])
                    if not entries[index]:
                        del entries[index]
        return {**result, "state": entries, "param_groups": list(map(options.saved, result["param_groups"]))}

    def _published(self, group: dict[str, Any], state: dict[str, Any]) -> dict[str, Any]:
        """Return the state of one parameter in the form of ``state_dict``."""
        result = {name: value for name, value in state.items() if name != "copy"}
        if "step" in result and not (group.get("capturable") or group.get("fused")):
            result["step"] = result["step"].cpu()
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of this class, or of torch's class, as in torch.

        torch casts state to the dtype of the parameter. Here, each saved entry is converted to the dtype that the
        options require. Additional options that the saved groups lack do not change.

        Raises:
            ValueError: as in torch, or the saved options do not fit the parameters. Nothing is changed.
        """
        loaded: dict[str, Any] = {}
        groups, state = self.param_groups, self.state

        def look(_: Any, final: dict[str, Any]) -> None:  # after the user's own hooks
            loaded.update(final)
            for old, saved in zip(groups, final["param_groups"], strict=False):
                self._refuse_differentiable(saved)
                chosen = {**options.additions_of(old), **options.additions_of(saved), "params": old["params"]}
                options.normalize(chosen)
                for p, index in zip(old["params"], saved["params"], strict=False):
                    check_codes(final["state"].get(index, {}), self._streams({**old, **saved}), p)

        before = self.register_load_state_dict_pre_hook(look)
        after = self.register_load_state_dict_post_hook(
            lambda _: self._complete_load(loaded, groups, state), prepend=True
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            before.remove()
            after.remove()

    def _complete_load(self, loaded: dict[str, Any], groups: list[dict[str, Any]], state: dict[Any, Any]) -> None:
        self.__dict__.pop("_plan", None)
        for old, group, packed in zip(groups, self.param_groups, loaded["param_groups"], strict=True):
            for name, value in options.additions_of(old).items():
                group.setdefault(name, value)
            options.normalize(group)
            for p, index in zip(group["params"], packed["params"], strict=True):
                layout = options.layout(group, p.dtype, options.in_8_bits(group, p))
                saved = loaded["state"].get(index, {})
                moments = (*self._streams(group), *coded(saved))
                dtypes = {**dict.fromkeys(moments, layout.moments), **layout.extras}
                for name, value in saved.items():
                    if name in dtypes and isinstance(value, Tensor) and torch.uint8 in (value.dtype, dtypes[name]):
                        absmax = absmax_name(name)
                        self.state[p].update({key: saved[key] for key in (name, absmax) if key in saved})
                        keep_moment(self.state[p], name, p, dtypes[name])
                    elif name in dtypes and isinstance(value, Tensor):
                        self.state[p][name] = value.to(device=p.device, dtype=dtypes[name])
                    elif name in options.EXTRA_STATE:
                        del self.state[p][name]
                if "copy" in state.get(p, {}):
                    self.state[p]["copy"] = state[p]["copy"]  # the same tensor, which the user may hold

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what pickles and copies hold. What ``fuse`` converted without additional options is torch's there."""
        if self not in before_fuse or any(map(options.additions_of, self.param_groups)):
            return super().__reduce_ex__(protocol)
        groups = [{n: v for n, v in group.items() if n not in options.NEUTRAL} for group in self.param_groups]
        state = {p: self._published(g, self.state[p]) for g in groups for p in g["params"] if p in self.state}
        held = {**super().__getstate__(), "state": defaultdict(dict, state), "param_groups": groups}
        # A pickler accepts the `__newobj__` of an object's own class only.
        return copyreg._reconstructor, (self._torch_class, object, None), held  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        fused = {"_fused": True} if self in before_fuse else {}
        return {**super().__getstate__(), **fused}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state.pop("_fused", False):
            before_fuse[self] = None
        # torch's classes expect step counts in each entry. Averages and copies may exist before the first step.
        entries = state.get("state", {})
        extras = {p: e for p, e in entries.items() if isinstance(e, dict) and e.keys() <= set(options.EXTRA_STATE)}
        for p in extras:
            del entries[p]
        super().__setstate__(state)
        entries.update(extras)


def _learning_rate(lr: float | Tensor, device: torch.device) -> float | Tensor:
    """Return the rate as a number, or as a tensor on ``device`` if the host does not have the value."""
    if not isinstance(lr, Tensor) or lr.device.type == "cpu":
        return float(lr)
    moved = gradients.on_device(lr, device)
    assert moved is not None
    return moved.reshape(())

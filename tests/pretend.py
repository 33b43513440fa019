"""A pretend accelerator: tensors that say they are on `pretend:0`, compute on the CPU, and refuse what a GPU refuses.

    with pretend() as count:
        model.to(DEVICE)
        generate(...)
    count["waits"], count["copies to the device"]

Refused, with the kind of error that CUDA gives:

* tensors of both devices in one operation.  A CPU tensor without dimensions may stand for a number in an operation
  that works entry by entry, one at a time; a CPU tensor of indices may index a tensor on the device (it is copied);
* `.numpy()` and `np.asarray` of a tensor on the device;
* random numbers on the device from a generator of the CPU's.

Counted, in a `Counter`:

* `operations`: on the device.  On a GPU each is at least one kernel's launch;
* `waits`: what a GPU's host waits for: the value of a tensor in Python (`item`, `tolist`, `bool`, `int`, a tensor
  without dimensions as an index), `equal`, results whose shape depends on values (`nonzero`, `unique`, a mask as an
  index), each copy to the CPU, and `synchronize`;
* `copies to the device`, and of these the `blocking copies`: without `non_blocking=True` the host waits here as well
  (CUDA copies and then synchronises the stream).  `torch.tensor(list, device=...)` is one.

Not imitated: streams, memory, a GPU's rounding, half precision's own kernels, several devices.

It stands on experimental parts of torch (`REASON` says which are missing, empty where all are there), and, while it
is in force, `torch.inference_mode` only switches gradients off: tensors of this kind have no version in that mode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "pretend"
DEVICE = f"{NAME}:0"
CPU = torch.device("cpu")
NEEDED = {
    "torch.utils.backend_registration._setup_privateuseone_for_python_backend": hasattr(
        backend_registration, "_setup_privateuseone_for_python_backend"
    ),
    "torch._C._acc.PrivateUse1Hooks": hasattr(getattr(torch._C, "_acc", None), "PrivateUse1Hooks"),
    "torch._C._set_only_lift_cpu_tensors": hasattr(torch._C, "_set_only_lift_cpu_tensors"),
}
REASON = ", ".join(f"this torch has no {name}" for name, there in NEEDED.items() if not there)

counts: Counter[str] = Counter()
INDEXED = ("aten::index.", "aten::index_put", "aten::_index_put_impl_")
NUMBERS_TOO = ("aten::fill_.Tensor", "aten::fill.Tensor", "aten::masked_fill")  # a number may come as a CPU tensor
VALUES = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


class PretendTensor(torch.Tensor):
    """A tensor on the device; `held` has its numbers, and nobody but the device may look there."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> PretendTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, held.size(), held.stride(), held.storage_offset(), dtype=held.dtype, device=DEVICE
        )

    def __init__(self, held: torch.Tensor):
        self.held = held

    def tolist(self) -> Any:
        return self.cpu().tolist()  # torch's own reads the memory

    def numpy(self, **_: Any) -> Any:
        raise TypeError(
            f"can't convert {DEVICE} device type tensor to numpy. "
            "Use Tensor.cpu() to copy the tensor to host memory first."
        )

    def __array__(self, *_: Any, **__: Any) -> Any:
        return self.numpy()

    def __reduce_ex__(self, protocol: Any) -> Any:  # in a file it is a tensor of the CPU's
        return self.cpu().__reduce_ex__(protocol)

    def __repr__(self, **_: Any) -> str:  # for a failed test: nothing is counted
        return f"{self.held!r} on {DEVICE}"

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(operation, args, kwargs or {})


# `distributions.is_torch` asks for the name of the module that a tensor's class comes from
PretendTensor.__module__ = f"torch.{NAME}"


class Device(TorchDispatchMode):
    """Shows the device all operations, also those that make a tensor out of none."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(operation, args, kwargs or {})


def run(operation: Any, args: tuple, kwargs: dict) -> Any:
    """One operation: refused, or counted and computed on what the tensors hold."""
    leaves = list(leaves_of((*args, *kwargs.values())))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    given = {id(x.held): x for x in tensors if isinstance(x, PretendTensor)}
    asked = [x for x in leaves if isinstance(x, torch.device)]
    if not given and not any(x.type == NAME for x in asked):
        return operation(*args, **kwargs)
    name = operation.name()
    counts["operations"] += 1
    target = asked[0] if asked else torch.device(DEVICE)
    if name.startswith("aten::_to_copy"):
        count_copy(args[0], target if asked else args[0].device, bool(kwargs.get("non_blocking")))
    elif name.startswith("aten::copy_"):
        target = args[0].device
        count_copy(args[1], target, args[2:3] == (True,))
    else:
        check(operation, name, tensors, leaves, args)
        count_waits(operation, name, args)
    found = operation(*map(bare, args), **{key: bare(x) for key, x in kwargs.items()})
    for x in given.values():
        if x.shape != x.held.shape:
            raise NotImplementedError(f"{name} changes the shape of a tensor in place: not on {DEVICE}")
    if target.type != NAME:
        return found
    result = dressed(found, given)
    if name == "aten::scalar_tensor":
        result.number = True  # made of a number of Python's, which CUDA keeps on the CPU
    return result


def leaves_of(x: Any) -> Iterator[Any]:
    for part in x:
        if isinstance(part, (list, tuple)):
            yield from leaves_of(part)
        else:
            yield part


def bare(x: Any) -> Any:
    """An argument as the CPU takes it."""
    if isinstance(x, PretendTensor):
        return x.held
    if isinstance(x, torch.device):
        return CPU
    return type(x)(map(bare, x)) if type(x) in (list, tuple) else x


def dressed(x: Any, given: dict[int, PretendTensor]) -> Any:
    """A result on the device; what the operation wrote into is the tensor that was given."""
    if isinstance(x, torch.Tensor):
        return given[id(x)] if id(x) in given else PretendTensor(x)
    return type(x)([dressed(part, given) for part in x]) if isinstance(x, (list, tuple)) else x


def check(operation: Any, name: str, tensors: list, leaves: list, args: tuple) -> None:
    """Refuse two devices in one operation, but for the exceptions that CUDA makes."""
    foreign = [x for x in tensors if not isinstance(x, PretendTensor)]
    if any(isinstance(x, torch.Generator) and x.device.type != NAME for x in leaves):
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu' ({name})")
    if name.startswith(INDEXED) and isinstance(args[0], PretendTensor):
        moved = [x for x in args[1] if x is not None and not isinstance(x, PretendTensor)]
        counts["copies to the device"] += len(moved)
        counts["blocking copies"] += len(moved)
        foreign = [x for x in foreign if not any(x is index for index in moved)]
        numbers = 1  # one value for all the places that are written
    else:
        numbers = int(torch.Tag.pointwise in operation.tags or name.startswith(NUMBERS_TOO))
    written = args[:1] if name.split(".")[0].endswith("_") else ()
    if any(x.ndim or x is y for x in foreign for y in (*written, None)) or len(foreign) > numbers:
        shapes = [tuple(x.shape) for x in foreign]
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {DEVICE} and cpu! "
            f"({name}, on the CPU are {shapes})"
        )


def count_waits(operation: Any, name: str, args: tuple) -> None:
    """Count a wait where the operation needs values on the host."""
    if not name.startswith(INDEXED):
        counts["waits"] += any(tag in operation.tags for tag in VALUES)
    elif any(isinstance(x, PretendTensor) and x.dtype in (torch.bool, torch.uint8) for x in args[1]):
        # a number of Python's written through a mask needs no list of places
        counts["waits"] += len(args) < 3 or not getattr(args[2], "number", False)


def count_copy(source: torch.Tensor, target: torch.device, non_blocking: bool) -> None:
    """Count a copy between the devices; one within a device is an operation as any other."""
    if isinstance(source, PretendTensor) and target.type != NAME:
        counts["waits"] += 1  # also if it does not block: the host waits before it looks
    elif target.type == NAME and not isinstance(source, PretendTensor):
        counts["copies to the device"] += 1
        counts["blocking copies"] += not non_blocking


# -- being there ---------------------------------------------------------------------------------------

everything = torch.library.Library("_", "IMPL")  # for as long as the process lives
inside = 0  # how many `with pretend()` are open: outside of them torch sees no accelerator


@cache
def set_up() -> None:
    """Give torch's spare device its name, once in a process."""
    accelerator = torch._C._acc  # type: ignore[attr-defined]

    class Module(backend_registration._DummyBackendModule):
        def is_available(self) -> bool:
            return inside > 0

        def synchronize(self, device: Any = None) -> None:
            counts["waits"] += 1

        def get_amp_supported_dtype(self) -> list[torch.dtype]:  # it knows no operation to cast for
            return [torch.bfloat16, torch.float16]

        def get_rng_state(self, device: Any = 0) -> torch.Tensor:
            return torch.zeros(1, dtype=torch.uint8)

        def set_rng_state(self, state: torch.Tensor, device: Any = 0) -> None: ...

    class Hooks(accelerator.PrivateUse1Hooks):
        def is_available(self) -> bool:
            return inside > 0

        def has_primary_context(self, device: int) -> bool:
            return True

        def is_built(self) -> bool:
            return True

    backend_registration._setup_privateuseone_for_python_backend(NAME, Module(), Hooks())
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")  # under autocast it computes as it is


@contextmanager
def pretend() -> Iterator[Counter[str]]:
    """The device is there; gives the counts, which begin at 0 each time."""
    global inside
    set_up()
    counts.clear()

    def enter(self: Any) -> None:
        self.before = torch.is_grad_enabled()
        torch.set_grad_enabled(self.before and not self.mode)

    def leave(self: Any, *_: Any) -> None:
        torch.set_grad_enabled(self.before)

    inside += 1
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # `module.to` keeps its parameters, tied ones too
    torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor(..., device=...)` is made on the CPU and copied
    try:
        with Device(), patch.multiple(torch.inference_mode, __enter__=enter, __exit__=leave):
            yield counts
    finally:
        inside -= 1
        torch.__future__.set_swap_module_params_on_conversion(swaps)
        with suppress(AttributeError):
            torch._C._set_only_lift_cpu_tensors(bool(inside))


def prepare() -> None:
    """Let torch's autograd know the device: it counts devices when something is trained for the first time."""
    if not REASON:
        with pretend(), torch.enable_grad():
            torch.ones(1, requires_grad=True).sum().backward()

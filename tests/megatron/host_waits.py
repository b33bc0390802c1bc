"""Counts what an update would do on CUDA, on a CPU: kernels, the bytes they move, and what makes the host wait.

On a CPU, tensors of host and device are told apart by what they come from. On the device are the
role's tensors, the results of ``to_device``, what a call makes on or moves to a device that is given
as an object, and all that is computed from them. On the host is all else: what is made without a
device, or with the name "cpu", and NumPy's memory. Where it meets a tensor of the device, a copy of
pageable memory is counted; not where CUDA takes a single number as an argument of a kernel.

Limits: an operation counts as one kernel and moves its arguments and results once, whatever CUDA
does for it; operations that CUDA has in place of a CPU's are not known, nor waits for streams and
events, nor for memory.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megarl.megatron import staging
from megarl.megatron.platform import cpu

Side = Literal["device", "host"]
Wait = tuple[str, str]
"""Where (file and function), and what."""

# Some read a number of the device, the others return as many elements as they find.
_WAITING = {
    "_local_scalar_dense", "nonzero", "masked_select", "masked_scatter_backward", "_unique2", "unique_dim",
    "unique_consecutive", "bincount", "equal",
}  # fmt: skip
_NO_KERNEL = {"_unsafe_view", "detach", "lift_fresh", "set_", "resize_", "_local_scalar_dense"}
_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}
_WRITING = {"copy_", "fill_", "zero_"}
"""They do not read what they write; others that work in place do."""
_FACTORIES = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "randn", "zeros"}


class Counts:
    """By phase (forward, backward, or a name that ``phase`` sets); ``kernels`` has none of the ``products``."""

    def __init__(self) -> None:
        self.phase: str | None = None
        self.waits: dict[str, Counter[Wait]] = {}
        self.kernels: dict[str, Counter[str]] = {}
        self.products: dict[str, Counter[str]] = {}
        self.moved_bytes: dict[str, Counter[str]] = {}
        """Of kernels and products, by the same names."""

    def add(self, table: dict[str, Counter[Any]], entry: Any, number: int = 1) -> None:
        table.setdefault(self.current, Counter())[entry] += number

    @property
    def current(self) -> str:
        if self.phase is not None:
            return self.phase
        return "forward" if torch._C._current_graph_task_id() == -1 else "backward"


class Operations(TorchDispatchMode):
    """Counts operations; ``counting`` starts it."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.made_on: Side = "device"  # tensors made from nothing, as operations within operations do
        self._fused = False
        self._sides: dict[int, tuple[Side, Any]] = {}  # the storage is kept, so that no other gets its address

    def mark(self, tensor: Tensor, side: Side) -> None:
        storage = tensor.untyped_storage()
        self._sides[storage._cdata] = side, storage

    def side(self, tensor: Tensor) -> Side:
        return self._sides.get(tensor.untyped_storage()._cdata, ("host", None))[0]

    def wait(self, what: str) -> None:
        if not self._fused:
            self.counts.add(self.counts.waits, (_place(), what))

    def as_one(
        self, name: str, function: Callable[..., Any], *, product: bool = False, linear: bool = False
    ) -> Callable[..., Any]:
        """Returns the function of tensors, which counts as one kernel forward, and one backward.

        Args:
            linear: backward does not read the tensors that have gradients.
        """
        counter = self

        def alone(name: str, run: Callable[[], Any], read: Any) -> Any:
            counter._fused = True
            try:
                result = run()
            finally:
                counter._fused = False
            counter._kernel(name, product, _tensors(read), _tensors(result))
            return result

        class One(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, call: Any, args: tuple[Any, ...], places: list[int], *tensors: Tensor) -> Tensor:
                ctx.leaves = [x.detach().requires_grad_(x.requires_grad) for x in tensors]
                given = dict(enumerate(args)) | dict(zip(places, ctx.leaves, strict=True))

                def run() -> Tensor:
                    with torch.enable_grad():
                        ctx.result = call(*given.values())
                    return ctx.result.detach()

                return alone(name, run, tensors)

            @staticmethod
            def backward(ctx: Any, slope: Tensor) -> Any:
                wanted = [x for x in ctx.leaves if x.requires_grad]
                read = [slope, *(x for x in ctx.leaves if not (linear and x.requires_grad))]
                slopes = alone(f"{name} backward", lambda: torch.autograd.grad(ctx.result, wanted, slope), read)
                found = iter(slopes)
                return None, None, None, *(next(found) if x.requires_grad else None for x in ctx.leaves)

        def call(*args: Any, **kwargs: Any) -> Any:
            if counter._fused:
                return function(*args, **kwargs)
            places = [i for i, x in enumerate(args) if isinstance(x, Tensor)]
            tensors = [args[i] for i in places]
            if not torch.is_grad_enabled() or not any(x.requires_grad for x in tensors):
                return alone(name, lambda: function(*args, **kwargs), (args, kwargs))
            assert not any(isinstance(x, Tensor) for x in kwargs.values())
            return One.apply(functools.partial(function, **kwargs), args, places, *tensors)

        return call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = _tensors((args, kwargs))
        name = func._schema.name.removeprefix("aten::")
        sides: list[Side] = [self.side(x) for x in given]
        side: Side = self.made_on
        if given:
            side = "device" if "device" in sides else "host"
        if name == "lift_fresh":
            side = "host"
        if side == "device":
            self._note_waits(name, func, args, given, sides)
        result = func(*args, **kwargs)
        made = _tensors(result)
        for tensor in made:
            if tensor.untyped_storage()._cdata not in self._sides:
                self.mark(tensor, side)
        if side == "device" and not _is_view(func) and "empty" not in name and name not in _NO_KERNEL:
            self._kernel(name, name in _PRODUCTS or "attention" in name, given, made)
        return result

    def _kernel(self, name: str, product: bool, read: list[Tensor], written: list[Tensor]) -> None:
        if self._fused:
            return
        counts = self.counts
        counts.add(counts.products if product else counts.kernels, name)
        if name in _WRITING:
            read = [x for x in read if not any(x is y for y in written)]
        counts.add(counts.moved_bytes, name, sum(x.nbytes for x in [*read, *written]))

    def _note_waits(self, name: str, func: Any, args: Any, given: list[Tensor], sides: list[Side]) -> None:
        if name in _WAITING or (name == "repeat_interleave" and not func._schema.overload_name.startswith("self")):
            self.wait(name)
        if name in ("index", "index_put", "index_put_") and any(
            x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
        ):
            self.wait("boolean index")
        if name == "copy_" and sides[0] == "host":
            self.wait("copy to the host")
            return
        copied = name in ("where", "index_put", "index_put_", "index", "copy_")
        for tensor, side in zip(given, sides, strict=True):
            if side == "host" and (tensor.ndim > 0 or copied):
                self.wait("pageable copy to the device")


class Calls(TorchFunctionMode):
    """Copies between host and device that a CPU does not make, and so the dispatcher does not see."""

    def __init__(self, counter: Operations) -> None:
        super().__init__()
        self._counter = counter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        counter = self._counter
        name = getattr(func, "__name__", "")
        target = kwargs.get("device", args[1] if name == "to" and len(args) > 1 else None)
        to_host = name in ("cpu", "tolist", "numpy", "__array__") or (name == "to" and target == "cpu")
        tensor = args[0] if args and isinstance(args[0], Tensor) else None
        if to_host and tensor is not None and counter.side(tensor) == "device":
            counter.wait("copy to the host")
            if name in ("cpu", "to"):
                copy = tensor.detach().clone()
                counter.mark(copy, "host")
                return copy
        within = counter.made_on
        if name in _FACTORIES:
            counter.made_on = "host" if target in (None, "cpu") else "device"
        try:
            result = func(*args, **kwargs)
        finally:
            counter.made_on = within
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.cuda.", "torch.", 1)  # the shim's answer, to which the shim's call adds again
        if name == "new_tensor" and counter.side(args[0]) == "device":
            counter.wait("pageable copy to the device")
            counter.mark(result, "device")
        elif name in ("to", "tensor", "as_tensor") and isinstance(target, (torch.device, int)):
            if tensor is None or counter.side(tensor) == "host":
                counter.wait("pageable copy to the device")
                counter.mark(result, "device")
        return result


@contextmanager
def counting(on_device: Iterable[Tensor]) -> Iterator[Operations]:
    """Counts the operations in the block; the tensors, such as parameters, are on the device."""
    counter = Operations()
    for tensor in on_device:
        counter.mark(tensor, "device")
    original = staging.to_device

    def to_device(*args: Any) -> dict[str, Tensor]:
        tensors = original(*args)
        for tensor in tensors.values():
            counter.mark(tensor, "device")
        return tensors

    with ExitStack() as patches:
        for module in list(sys.modules.values()):
            if isinstance(module, ModuleType) and vars(module).get("to_device") is original:
                patches.enter_context(patch.object(module, "to_device", to_device))
        patches.enter_context(patch("torch.cuda.synchronize", lambda *_: counter.wait("synchronize")))
        patches.enter_context(counter)
        patches.enter_context(Calls(counter))
        yield counter


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _is_view(func: Any) -> bool:
    return any(x.alias_info is not None and not x.alias_info.is_write for x in func._schema.returns)


def _place() -> str:
    """The innermost function that is neither torch's nor this module's."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        for root in ("/megarl/", "/megatron/core/"):
            if root in path and path not in (__file__, cpu.__file__):
                return f"{(root + path.rpartition(root)[2]).lstrip('/')}:{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"

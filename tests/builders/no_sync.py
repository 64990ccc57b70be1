"""Tensor operations that make the host wait for a GPU, refused on a CPU too."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# What asks the device for a number, or for the size of its answer.
WAITS = ("_local_scalar_dense", "nonzero", "isin", "unique", "bincount", "masked_select", "item", "equal")


class NoSync(TorchDispatchMode):
    """Raises AssertionError where the host would wait; `torch.cuda.set_sync_debug_mode("error")` on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        if any(name.lstrip("_").startswith(each.lstrip("_")) for each in WAITS):
            raise AssertionError(f"{name} waits for the device")
        if name.startswith("index") and any(
            str(getattr(a, "dtype", "")) == "torch.bool" for a in _flat(args[1:])
        ):
            raise AssertionError(f"{name} by a mask waits for the device")
        return func(*args, **(kwargs or {}))


def _flat(values: Any) -> list[Any]:
    return [one for value in values for one in (value if isinstance(value, list | tuple) else [value])]

"""`compiled`: a function compiled by Numba on its first call, without Python's global lock.

Threads run simulations side by side. Kernels are kept on disk where the process has named a folder for them
(numba.config.CACHE_DIR, see dataplane/startup.py); by itself an import touches no file. They are filed by
module name: the folder's name holds a digest of the sources, so checkouts with equal kernels share it.

`by_reference`: a named tuple of arrays that kernels hand on to each other as one pointer. Numba hands tuples
on by value: seven words and more for each array, from every function to every other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir
from numba.core import caching, cgutils, imputils, types
from numba.core.datamodel import models, register_default
from numba.core.typing.templates import AttributeTemplate, infer_getattr
from numba.extending import NativeValue, lower_getattr_generic, typeof_impl, unbox

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T", bound=type)

# The folder's name digests the sources of these.
PACKAGES = ("controlplane.", "dataplane.simulated.", "tokenfleet.")


class _ByModule(caching.UserProvidedCacheLocator):  # type: ignore[misc]
    """Files a kernel by its module's name; Numba's own locators use paths, which differ by checkout."""

    def __init__(self, function: Callable[..., Any], file: str) -> None:
        super().__init__(function, file)
        self._cache_path = f"{numba.config.CACHE_DIR}/{function.__module__}"
        self._source = file

    def get_source_stamp(self) -> str:
        """A digest of the kernel's own file: a process may have inherited the folder of other sources."""
        return _digest(self._source)

    @classmethod
    def from_function(cls, function: Callable[..., Any], file: str) -> _ByModule | None:
        if not function.__module__.startswith(PACKAGES):
            return None
        return cast("_ByModule | None", super().from_function(function, file))


@lru_cache
def _digest(file: str) -> str:
    with open(file, "rb") as source:
        return hashlib.sha256(source.read()).hexdigest()


caching.CacheImpl._locator_classes.insert(0, _ByModule)


def compiled(function: F) -> F:
    """The function's kernel; raises what the function raises."""
    kernel = numba.njit(cache=bool(numba.config.CACHE_DIR), nogil=True, no_cfunc_wrapper=True)(function)
    template = kernel.get_call_template
    # Else Numba compiles it again for each constant that other kernels give it.
    kernel.get_call_template = lambda args, kws: template([types.unliteral(of) for of in args], kws)
    return cast(F, kernel)


def compile_now(kernel: Callable[..., Any], *args: Any) -> None:
    """Compile a kernel for such arguments, or load it from disk, without a call."""
    kernel.compile(tuple(numba.typeof(value) for value in args))  # type: ignore[attr-defined]


class Reference(types.Type):  # type: ignore[misc]
    """A named tuple whose fields lie where the kernel was called from Python."""

    def __init__(self, name: str, fields: tuple[tuple[str, types.Type], ...]) -> None:
        super().__init__(f"{name}({', '.join(f'{field}: {of}' for field, of in fields)})")
        self.fields = fields
        self.at = {field: i for i, (field, _) in enumerate(fields)}


def by_reference(cls: T) -> T:
    """Let kernels take this named tuple as a pointer to its fields, which they cannot replace."""

    @typeof_impl.register(cls)  # type: ignore[untyped-decorator]
    def typeof(value: Any, context: Any) -> Reference:
        of = (typeof_impl(field, context) for field in value)
        return Reference(cls.__name__, tuple(zip(cls._fields, of, strict=True)))  # type: ignore[attr-defined]

    return cls


def _fields_of(manager: Any, reference: Reference) -> ir.LiteralStructType:
    return ir.LiteralStructType([manager[of].get_value_type() for _, of in reference.fields])


@register_default(Reference)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, reference: Reference) -> None:
        super().__init__(manager, reference, ir.PointerType(_fields_of(manager, reference)))


@infer_getattr
class _Fields(AttributeTemplate):  # type: ignore[misc]
    key = Reference

    def generic_resolve(self, reference: Reference, field: str) -> types.Type | None:
        return reference.fields[reference.at[field]][1] if field in reference.at else None


@lower_getattr_generic(Reference)  # type: ignore[untyped-decorator]
def _read(context: Any, builder: Any, reference: Reference, pointer: Any, field: str) -> Any:
    at = reference.at[field]
    value = builder.load(cgutils.gep_inbounds(builder, pointer, 0, at))
    return imputils.impl_ret_borrowed(context, builder, reference.fields[at][1], value)


@unbox(Reference)  # type: ignore[untyped-decorator]
def _enter(reference: Reference, value: Any, c: Any) -> NativeValue:
    """Lay the fields out on the stack of the function that Python calls."""
    pointer = cgutils.alloca_once(c.builder, _fields_of(c.context.data_model_manager, reference))
    failed = cgutils.false_bit
    natives = []
    for i, (_, of) in enumerate(reference.fields):
        native = c.unbox(of, c.pyapi.tuple_getitem(value, i))
        c.builder.store(native.value, cgutils.gep_inbounds(c.builder, pointer, 0, i))
        failed = c.builder.or_(failed, native.is_error)
        natives.append((of, native))

    def leave() -> None:
        for of, native in reversed(natives):
            if native.cleanup is not None:
                native.cleanup()
            c.context.nrt.decref(c.builder, of, native.value)

    return NativeValue(pointer, cleanup=leave, is_error=failed)

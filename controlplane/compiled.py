"""`compiled`: a function compiled by Numba on its first call, without Python's global lock.

Threads run simulations side by side. Kernels are kept on disk where the process has named a folder for them
(numba.config.CACHE_DIR, see dataplane/startup.py); by itself an import touches no file. They are filed by
module name: the folder's name holds a digest of the sources, so checkouts with equal kernels share it. One
process at a time compiles for a folder; the others wait and load the result. A wheel brings kernels that
every CPU of an architecture runs; those that were compiled for this one go first.

`by_reference`: a named tuple of arrays that kernels hand on to each other as one pointer. Numba hands tuples
on by value: seven words and more for each array, from every function to every other. A kernel that Python
calls must copy what it hands back of such a record: a view of a field has no owner, and dangles.
"""

from __future__ import annotations

import fcntl
import hashlib
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import IO, Any, NamedTuple, TypeVar, cast

import numba
from llvmlite import ir
from numba.core import caching, cgutils, imputils, types
from numba.core.compiler_lock import global_compiler_lock
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
        """The kernel's place, also in a folder that nothing can be written to: it may be there already."""
        if not numba.config.CACHE_DIR or not function.__module__.startswith(PACKAGES):
            return None
        return cls(function, file)


@lru_cache
def _digest(file: str) -> str:
    with open(file, "rb") as source:
        return hashlib.sha256(source.read()).hexdigest()


caching.CacheImpl._locator_classes.insert(0, _ByModule)


class _Turn:
    """The turn to compile: taken at the first kernel that is missing, kept until the outermost is done."""

    def __init__(self) -> None:
        self._depth = 0
        self._held: IO[str] | None = None

    def __enter__(self) -> None:
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0 and self._held is not None:
            self._held.close()
            self._held = None

    def taken_now(self) -> bool:
        """Wait for the turn; False where it was taken before, or the folder cannot be written to."""
        if self._depth == 0 or self._held is not None:
            return False
        with suppress(OSError):
            self._held = open(f"{numba.config.CACHE_DIR}/compiling", "a")  # noqa: SIM115  (closed in __exit__)
            fcntl.flock(self._held, fcntl.LOCK_EX)
        return self._held is not None


_TURN = _Turn()


class _EveryCpu(NamedTuple):
    """The target of kernels that every CPU of an architecture runs; Numba asks for its `magic_tuple`."""

    triple: str

    def magic_tuple(self) -> tuple[str, str, str]:
        return self.triple, "generic", ""


class _Kept(caching.FunctionCache):  # type: ignore[misc]
    """The kernels of one function on disk."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        kept = super().load_overload(sig, target_context)
        if kept is None and _TURN.taken_now():
            kept = super().load_overload(sig, target_context)  # another process may have compiled it
        return kept

    def _load_overload(self, sig: Any, target_context: Any) -> Any:
        kept = super()._load_overload(sig, target_context)
        if kept is not None:
            return kept
        every_cpu = _EveryCpu(target_context.codegen().magic_tuple()[0])
        data = self._cache_file.load(self._index_key(sig, every_cpu))
        return None if data is None else self._impl.rebuild(target_context, data)

    def save_overload(self, sig: Any, data: Any) -> None:
        with suppress(OSError):  # a read-only folder: the kernel stays with this process
            super().save_overload(sig, data)


class _CalledFiles(caching.CompileResultCacheImpl):  # type: ignore[misc]
    """Files of the form of a kernel that other kernels call."""

    def get_filename_base(self, fullname: str, abiflags: str) -> str:
        return f"called.{super().get_filename_base(fullname, abiflags)}"


class _KeptCalled(_Kept):
    _impl_class = _CalledFiles


def compiled(function: F) -> F:
    """The function's kernel; raises what the function raises.

    It has two forms: one that Python calls, and one that other kernels call. What turns Python's arguments
    into numbers is half of the work to compile a kernel, and the second form does without.
    """
    kernel = numba.njit(nogil=True, no_cfunc_wrapper=True)(function)
    called = numba.njit(nogil=True, no_cfunc_wrapper=True, no_cpython_wrapper=True)(function)

    def enable_caching() -> None:
        kernel._cache, called._cache = _Kept(function), _KeptCalled(function)

    for form in (kernel, called):
        form.compile = _in_turn(form.compile)
    kernel.enable_caching = enable_caching
    if numba.config.CACHE_DIR:
        enable_caching()
    template = called.get_call_template
    # Else Numba compiles it again for each constant that other kernels give it.
    kernel.get_call_template = lambda args, kws: template([types.unliteral(of) for of in args], kws)
    kernel.get_overload = called.get_overload
    return cast(F, kernel)


def _in_turn(compile_it: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The same, by one process at a time."""

    def compile_in_turn(signature: Any) -> Any:
        with global_compiler_lock, _TURN:
            return compile_it(signature)

    return compile_in_turn


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
    if isinstance(reference.fields[at][1], types.Array):
        # Python holds the arrays while a kernel runs. Without an owner, uses of them are not counted: atomic
        # counts were a third of a simulation.
        owner = value.type.elements[0]
        return builder.insert_value(value, ir.Constant(owner, None), 0)
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

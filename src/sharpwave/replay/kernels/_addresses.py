"""Memory by its address, for Numba kernels that copy rows of fields of any dtype."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

_BYTE, _WORD = ir.IntType(8).as_pointer(), ir.IntType(32)


def _copy(_context, to, origin, size):
    def generate(context, builder, _signature, arguments):
        pointers = [builder.inttoptr(x, _BYTE) for x in arguments[:2]]
        cgutils.raw_memcpy(builder, *pointers, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(to, origin, size), generate


def _clear(_context, to, size):
    def generate(context, builder, _signature, arguments):
        cgutils.memset(builder, builder.inttoptr(arguments[0], _BYTE), arguments[1], 0)
        return context.get_dummy_value()

    return types.void(to, size), generate


def _prefetch(_context, address):
    def generate(context, builder, _signature, arguments):
        kind = ir.FunctionType(ir.VoidType(), [_BYTE, _WORD, _WORD, _WORD])
        call = builder.module.declare_intrinsic("llvm.prefetch", [_BYTE], kind)
        read, keep_in_every_cache, data_cache = _WORD(0), _WORD(3), _WORD(1)
        pointer = builder.inttoptr(arguments[0], _BYTE)
        builder.call(call, [pointer, read, keep_in_every_cache, data_cache])
        return context.get_dummy_value()

    return types.void(address), generate


copy_bytes: Any = intrinsic(_copy)
"""copy_bytes(to, origin, size): `size` bytes between int64 addresses."""
clear_bytes: Any = intrinsic(_clear)
"""clear_bytes(to, size): `size` zero bytes at an int64 address."""
prefetch_address: Any = intrinsic(_prefetch)
"""prefetch_address(address): ask for a cache line without waiting for it; an address out of range does no harm."""

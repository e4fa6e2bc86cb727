"""A cache prefetch for Numba kernels."""

from typing import Any

from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic


def _prefetch(_context, array, index):
    """Ask for the cache line of `array[index]` (flat index, not checked) without waiting for it."""

    def generate(context, builder, signature, arguments):
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte = ir.IntType(8).as_pointer()
        word = ir.IntType(32)
        pointer = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        kind = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        call = builder.module.declare_intrinsic("llvm.prefetch", [byte], kind)
        read, keep_in_every_cache, data_cache = word(0), word(3), word(1)
        builder.call(call, [pointer, read, keep_in_every_cache, data_cache])
        return context.get_dummy_value()

    return types.void(array, index), generate


# Any: Numba's own stubs count the context among the caller's arguments.
prefetch: Any = intrinsic(_prefetch)

"""Instructions on bits that numba has no function for."""

from __future__ import annotations

from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic


def _bits_code(instruction: str) -> Any:
    """An instruction that takes a word and gives a number of bits."""

    def code(typing_context: Any, word: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            if instruction == "ctpop":
                return builder.ctpop(arguments[0])
            return getattr(builder, instruction)(arguments[0], ir.Constant(ir.IntType(1), 0))

        return types.uint64(types.uint64), generate

    return code


def _differing_code(typing_context: Any, base: Any, new: Any, index: Any) -> Any:
    """Bit k is set where unit `index + k` of two arrays differs, for 64 units of any alignment."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.IntType(base.dtype.bitwidth), 64)
        loaded = []
        for kind, value in zip(signature.args[:2], arguments[:2], strict=True):
            data = context.make_array(kind)(context, builder, value).data
            place = builder.bitcast(builder.gep(data, [arguments[2]]), vector.as_pointer())
            units = builder.load(place)
            units.align = 1
            loaded.append(units)
        return builder.bitcast(builder.icmp_unsigned("!=", *loaded), ir.IntType(64))

    return types.uint64(base, new, types.int64), generate


trailing_zeros: Any = intrinsic(_bits_code("cttz"))
leading_zeros: Any = intrinsic(_bits_code("ctlz"))
ones: Any = intrinsic(_bits_code("ctpop"))
differing: Any = intrinsic(_differing_code)

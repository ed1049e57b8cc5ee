"""The calculator's child process: evaluates one arithmetic expression a line, under hard limits.

Runs by its path with nothing of this project imported. Each line of stdin is one expression; each
line of stdout is ``=`` and the value in decimal, or ``!`` and why there is none. The parser lets
integers and the operators ``+ - * // / ** << ( )`` through and nothing else: no names, calls,
attributes, strings or comparisons. What those operators can still do (numbers that fill the memory
or take for ever) meets the limits on memory and CPU time.
"""

import ast
import operator
import resource
import sys
from collections.abc import Callable

MEMORY_BYTES = 256 << 20  # address space; the bare interpreter needs about 20 MB
CPU_S = 1  # per expression
LIFETIME_CPU_S = 3600
MAX_LENGTH = 256
MAX_DIGITS = 32

BINARY: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Pow: operator.pow,
    ast.LShift: operator.lshift,
}
UNARY: dict[type, Callable[[int], int]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def evaluate(node: ast.AST) -> int:
    """The integer value of a parsed expression; ValueError for anything but arithmetic."""
    if isinstance(node, ast.Expression):
        return evaluate(node.body)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
        return UNARY[type(node.op)](evaluate(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        left, right = evaluate(node.left), evaluate(node.right)
        if isinstance(node.op, ast.Pow) and right < 0:
            raise ValueError("negative exponent")
        return BINARY[type(node.op)](left, right)
    raise ValueError("forbidden: " + type(node).__name__)


def without_leading_zeros(text: str) -> str:
    """``095+012`` as ``95+12``: the task writes fixed-width numbers, which Python refuses."""
    out, at_start = [], True
    for index, character in enumerate(text):
        following = text[index + 1 : index + 2]
        if at_start and character == "0" and following.isdigit():
            continue
        out.append(character)
        at_start = not character.isalnum()
    return "".join(out)


def answer(text: str) -> str:
    """The reply line for one expression."""
    if len(text) > MAX_LENGTH:
        return "!too long"
    try:
        value = evaluate(ast.parse(without_leading_zeros(text), mode="eval"))
        if value.bit_length() > 4 * MAX_DIGITS:
            return "!value too large"
        return "=" + str(value)
    except MemoryError:
        return "!out of memory"
    except ZeroDivisionError:
        return "!division by zero"
    except (ValueError, SyntaxError, OverflowError, RecursionError, TypeError) as error:
        return "!" + " ".join(str(error).split())[:80]


def allow_cpu() -> None:
    """Give the next expression its CPU time: the limit counts the whole life of the process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = int(usage.ru_utime + usage.ru_stime) + CPU_S + 1
    resource.setrlimit(resource.RLIMIT_CPU, (min(soft, LIFETIME_CPU_S), LIFETIME_CPU_S))


def main() -> None:
    """Set the limits, then answer until stdin ends."""
    ast.parse("1+1", mode="eval")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, 3))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for line in sys.stdin:
        allow_cpu()
        sys.stdout.write(answer(line.strip()) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()

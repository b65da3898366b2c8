"""Arithmetic that a model asks for: an expression's syntax tree is walked, and nothing of it is executed.

Sizes are checked before anything is computed, so that no expression takes long or much memory.
"""

import ast
import math
import operator
from collections.abc import Callable

Number = int | float

_MAX_CHARACTERS = 500
_MAX_BITS = 4096  # of an integer: 1,233 digits
_MAX_FACTORIAL = 500
_MAX_DIGITS = 300

_CONSTANTS = {"pi": math.pi, "e": math.e, "tau": math.tau}
_SIGNS: dict[type[ast.unaryop], Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculate(expression: str) -> str:
    """The value of an expression: integers exactly, other numbers to 15 digits.

    Raises: ValueError for what is no arithmetic, has no value, or has one too large; it says which.
    """
    if len(expression) > _MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression):,} characters; {_MAX_CHARACTERS} are allowed")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"{expression!r:.200} is no arithmetic expression: {error.msg}") from error
    except (MemoryError, RecursionError) as error:
        raise ValueError("the expression is nested too deeply") from error
    except ZeroDivisionError as error:
        raise ValueError("division by zero") from error
    except OverflowError as error:
        raise ValueError("a number is too large") from error
    return str(value) if isinstance(value, int) else format(value, ".15g")


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return _checked(number)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _SIGNS:
            return _SIGNS[type(sign)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _checked(_OPERATORS[type(op)](_value(left), _value(right)))
        case ast.BinOp(op=ast.BitXor()):
            raise ValueError("^ is not allowed; a power is written **")
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _checked(_call(name, [_value(argument) for argument in arguments]))
        case ast.Name(id=name) | ast.Call(func=ast.Name(id=name)):
            known = ", ".join([*_CONSTANTS, *_FUNCTIONS])
            raise ValueError(f"{name!r:.80} is unknown here; known are {known}")
        case _:
            raise ValueError(f"{ast.unparse(node)!r:.200} is no arithmetic; numbers, + - * / // % ** and ( ) are")


def _call(name: str, arguments: list[Number]) -> Number:
    try:
        return _FUNCTIONS[name](*arguments)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}({', '.join(map(str, arguments))}): {error}") from error


def _checked(number: Number) -> Number:
    if isinstance(number, int) and number.bit_length() > _MAX_BITS:
        raise OverflowError
    if isinstance(number, float) and not math.isfinite(number):
        raise OverflowError
    return number


def _power(base: Number, exponent: Number) -> Number:
    are_whole = isinstance(base, int) and isinstance(exponent, int)
    if are_whole and (abs(base).bit_length() - 1) * exponent > _MAX_BITS:
        raise OverflowError
    value = base**exponent
    if isinstance(value, complex):
        raise ValueError(f"{base} ** {exponent} is no real number")
    return value


def _factorial(number: Number) -> int:
    if number > _MAX_FACTORIAL:
        raise OverflowError
    return math.factorial(number)


def _round(number: Number, num_digits: Number = 0) -> Number:
    if abs(num_digits) > _MAX_DIGITS:
        raise OverflowError
    return round(number, num_digits) if num_digits else round(number)


_OPERATORS: dict[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
_FUNCTIONS: dict[str, Callable[..., Number]] = {
    **{
        name: getattr(math, name)
        for name in "sqrt exp log log2 log10 sin cos tan asin acos atan floor ceil gcd".split()
    },
    "factorial": _factorial,
    "abs": abs,
    "round": _round,
    "min": min,
    "max": max,
}

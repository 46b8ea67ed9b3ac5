"""The part of the pickle machine that plain data needs: it builds only what its rules allow, and runs no code.

`pickle.Unpickler` with a list of allowed names is not enough: BUILD on an allowed function or class changes torch
itself, a memo index of 2³¹ takes 32 GiB, and a tuple of tuples as a key takes for ever to hash. So this module
interprets only the few opcodes of a real DCP `.metadata` and, if the rules say so, those of a trainer's state.
"""

from __future__ import annotations

import pickletools
import struct
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

from ckpt_async.errors import UnsafePickleError

# The memo can repeat a value at a cost of two bytes, so values must be small, or the work would grow with the square of
# the file's size.
_MAX_TEXT_BYTES = 1 << 16
_MAX_ARGUMENTS = 128  # such as the components of a path
# What a pickle makes may take this many bytes for each of its own bytes, plus a fixed amount. The densest that torch
# writes, chunks of tensors of one dimension, take 25.
_BUDGET_FACTOR = 32
_BUDGET_BYTES = 16 << 20
CONTAINER_BYTES = 96  # an empty list, dict or tuple, or an object without fields
_MAX_MARKS = (
    10_000  # how deep unfinished containers may be nested; the pickler of Python stops at a tenth of it
)
_DICTS = frozenset({dict, OrderedDict})

# The exceptions that a truncated or nonsensical pickle leads to.
ILL_FORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error)

Value = Callable[[bytes, int], tuple[object, int]]


class Class:
    """A class that NEWOBJ may instantiate; `Rules.build` checks the state that is then set."""

    __slots__ = ("made",)

    def __init__(self, made: type) -> None:
        self.made = made


class Function:
    """A function that REDUCE may call, with arguments of one type (`object`: of any type).

    `make(*arguments)` runs nothing that the pickle could choose.
    """

    __slots__ = ("make", "type")

    def __init__(self, make: Callable[..., object], argument_type: type = object) -> None:
        self.make = make
        self.type = argument_type


def refuse(reason: str, hint: str = "") -> NoReturn:
    raise UnsafePickleError(reason, hint=hint)


class Rules:
    """What one kind of pickle may contain. The base class allows dicts and lists, and what `find` knows."""

    what = "a pickle of this kind"  # for error messages
    values: Mapping[int, Value]  # by opcode: the value that it pushes, and where the next opcode begins
    has_sets_and_storages = False  # whether EMPTY_SET, ADDITEMS, FROZENSET and BINPERSID are opcodes
    left_bytes = 0  # what may still be made; `interpret` sets it

    def spend(self, size_bytes: int) -> None:
        """Charge memory to the pickle: a byte of it can make a whole container, or repeat a value."""
        self.left_bytes -= size_bytes
        if self.left_bytes < 0:
            refuse("it expands to far more data than its size allows")

    def find(self, module: str, name: str) -> object:
        """Return what a global name stands for; None if it is not allowed."""
        raise NotImplementedError

    def build(self, target: object, state: object) -> object:
        """Set the state of an object that `new` or `call` has made, and return it."""
        raise NotImplementedError

    def check_keys(self, keys: list[Any]) -> None:
        raise NotImplementedError

    def new(self, class_: object, arguments: object) -> object:
        if type(class_) is not Class or type(arguments) is not tuple or arguments:
            refuse(f"it makes an object of something that is not a class of {self.what}")
        return object.__new__(class_.made)

    def call(self, function: object, arguments: object) -> object:
        if type(function) is not Function or type(arguments) is not tuple or len(arguments) > _MAX_ARGUMENTS:
            refuse(f"it calls something that {self.what} never calls")
        for each in arguments:
            if function.type is not object and type(each) is not function.type:
                refuse(f"it calls a function with argument types that {self.what} never has")
        return function.make(*arguments)

    def named(self, module: object, name: object) -> object:
        if type(module) is not str or type(name) is not str:
            refuse("it names a global without a name")
        found = self.find(module, name)
        return self.refuse_global(module[:200], name[:200]) if found is None else found

    def refuse_global(self, module: str, name: str) -> object:
        """Refuse a name, or return what stands for it until it is known whether it is wanted."""
        refuse(f"it names {module}.{name}, which is not part of {self.what}; nothing was run")

    def tuple_of(self, items: list[Any]) -> object:
        self.spend(CONTAINER_BYTES)
        return tuple(items)

    def set_items(self, target: object, items: list[Any]) -> None:
        if type(target) not in _DICTS:
            refuse("it sets items of something that is not a dict")
        assert isinstance(target, dict)
        self.check_keys(items[::2])
        target.update(zip(items[::2], items[1::2], strict=True))

    def extend(self, target: object, items: list[Any]) -> None:
        if type(target) is not list:
            refuse("it appends to something that is not a list")
        target.extend(items)

    def add(self, target: object, items: list[Any]) -> None:
        """Add items to a set (ADDITEMS)."""
        raise NotImplementedError

    def frozen(self, items: list[Any]) -> object:
        """Make a frozenset (FROZENSET)."""
        raise NotImplementedError

    def persistent(self, told: object) -> object:
        """Return an object that is stored outside of the pickle (BINPERSID)."""
        raise NotImplementedError


def interpret(data: bytes, rules: Rules) -> object:
    """Interpret a pickle of protocols 2 to 5 and return its object.

    Takes memory and time in proportion to the pickle's size. Raises UnsafePickleError for anything beyond plain data
    and the rules, and any of ILL_FORMED.
    """
    rules.left_bytes = _BUDGET_BYTES + _BUDGET_FACTOR * len(data)
    combined, fill = _combining(rules), _filling(rules)
    empty = _EMPTY | {0x8F: set} if rules.has_sets_and_storages else _EMPTY
    values, tuple_of, spend = rules.values, rules.tuple_of, rules.spend
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: list[Any] = []
    at = 0
    while True:  # the commonest come first
        code = data[at]
        at += 1
        if code == 0x94:  # MEMOIZE
            memo.append(stack[-1])
        elif code in (0x68, 0x6A):  # BINGET, LONG_BINGET
            index, at = _byte(data, at) if code == 0x68 else _unsigned(data, at)
            stack.append(memo[index])
        elif (read := values.get(code)) is not None:
            value, at = read(data, at)
            stack.append(value)
        elif (make := empty.get(code)) is not None:
            spend(CONTAINER_BYTES)
            stack.append(make())
        elif (size := _TUPLE_SIZES.get(code)) is not None:  # TUPLE1, TUPLE2, TUPLE3
            stack.append(tuple_of(_pop(stack, size)))
        elif code in (0x71, 0x72):  # BINPUT, LONG_BINPUT
            index, at = _byte(data, at) if code == 0x71 else _unsigned(data, at)
            _remember(memo, index, stack[-1])
        elif (combine := combined.get(code)) is not None:
            spend(CONTAINER_BYTES)
            argument = stack.pop()
            stack[-1] = combine(stack[-1], argument)
        elif code == 0x28:  # MARK
            _mark(marks, stack)
            stack = []
        elif code == 0x74:  # TUPLE
            items, stack = stack, marks.pop()
            stack.append(tuple_of(items))
        elif code in (0x73, 0x61):  # SETITEM, APPEND
            items = _pop(stack, 2 if code == 0x73 else 1)
            fill[code](stack[-1], items)
        elif code in fill:  # SETITEMS, APPENDS, ADDITEMS
            items, stack = stack, marks.pop()
            fill[code](stack[-1], items)
        elif code == 0x63:  # GLOBAL
            (module, name), at = _names(data, at)
            stack.append(rules.named(module, name))
        elif code in (0x80, 0x95):  # PROTO, FRAME
            at = _skip(code, data, at)
        elif code == 0x2E:  # STOP
            return stack.pop()
        elif code == 0x91 and rules.has_sets_and_storages:  # FROZENSET
            items, stack = stack, marks.pop()
            stack.append(rules.frozen(items))
        elif code == 0x51 and rules.has_sets_and_storages:  # BINPERSID
            stack[-1] = rules.persistent(stack[-1])
        else:
            _refuse_opcode(code, rules)


def _combining(rules: Rules) -> dict[int, Callable[[Any, Any], object]]:
    """Return, by opcode, what combines the two topmost values: REDUCE, NEWOBJ, BUILD, STACK_GLOBAL."""
    return {0x52: rules.call, 0x81: rules.new, 0x62: rules.build, 0x93: rules.named}


def _filling(rules: Rules) -> dict[int, Callable[[object, list[Any]], None]]:
    """Return, by opcode, what adds items to the container below them.

    These are SETITEMS and SETITEM, APPENDS and APPEND, ADDITEMS.
    """
    fill: dict[int, Callable[[object, list[Any]], None]] = {
        0x75: rules.set_items,
        0x73: rules.set_items,
        0x65: rules.extend,
        0x61: rules.extend,
    }
    if rules.has_sets_and_storages:
        fill[0x90] = rules.add
    return fill


def _refuse_opcode(code: int, rules: Rules) -> NoReturn:
    opcode = next((each for each in pickletools.opcodes if ord(each.code) == code), None)
    refuse(f"it has {opcode.name if opcode else hex(code)}, which {rules.what} never has")


def _skip(code: int, data: bytes, at: int) -> int:
    if code == 0x80:
        return at + 1
    size, at = _number("<Q", data, at)  # the length of the frame; all of its bytes are in `data` already
    if size > len(data) - at:
        refuse("it is cut short")
    return at


def _remember(memo: list[Any], index: int, value: Any) -> None:
    if index > len(memo):
        refuse("it numbers its values in another order than any pickler does")
    memo[index : index + 1] = [value]


def _mark(marks: list[list[Any]], stack: list[Any]) -> None:
    if len(marks) == _MAX_MARKS:
        refuse("it nests far deeper than any pickler does")
    marks.append(stack)


def _pop(stack: list[Any], count: int) -> list[Any]:
    if len(stack) < count:
        refuse("it takes more than the stack holds")
    items = stack[-count:]
    del stack[-count:]
    return items


def _byte(data: bytes, at: int) -> tuple[int, int]:
    return data[at], at + 1


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    return _number("<I", data, at)


def _number(layout: str, data: bytes, at: int) -> tuple[Any, int]:
    return struct.unpack_from(layout, data, at)[0], at + struct.calcsize(layout)


def _long(data: bytes, at: int) -> tuple[int, int]:
    start = at + 1
    end = start + data[at]
    return int.from_bytes(data[start:end], "little", signed=True), end


def _bytes(data: bytes, size: int, start: int) -> tuple[bytes, int]:
    end = start + size
    if end > len(data):
        refuse("it is cut short")
    return data[start:end], end


def _text(data: bytes, size: int, start: int) -> tuple[str, int]:
    if size > _MAX_TEXT_BYTES:
        refuse("it is cut short" if start + size > len(data) else f"it has a string of {size} bytes")
    return _long_text(data, size, start)


def _long_text(data: bytes, size: int, start: int) -> tuple[str, int]:
    found, end = _bytes(data, size, start)
    return str(found, "utf-8", "surrogatepass"), end


def _length(data: bytes, at: int) -> tuple[int, int]:
    return _number("<Q", data, at)


def _bytearray(data: bytes, at: int) -> tuple[bytearray, int]:
    found, end = _bytes(data, *_length(data, at))
    return bytearray(found), end


def _names(data: bytes, at: int) -> tuple[list[str], int]:
    """Read two lines."""
    middle = data.index(b"\n", at)
    end = data.index(b"\n", middle + 1)
    return str(data[at:end], "utf-8").split("\n"), end + 1


# The value that an opcode pushes, and where the next one begins.
VALUES: dict[int, Value] = {
    0x4B: _byte,  # BININT1
    0x29: lambda _, at: ((), at),  # EMPTY_TUPLE
    0x4D: partial(_number, "<H"),  # BININT2
    0x4A: partial(_number, "<i"),  # BININT
    0x8A: _long,  # LONG1
    0x8C: lambda data, at: _text(data, *_byte(data, at)),  # SHORT_BINUNICODE
    0x58: lambda data, at: _text(data, *_unsigned(data, at)),  # BINUNICODE
    0x4E: lambda _, at: (None, at),  # NONE
    0x89: lambda _, at: (False, at),  # NEWFALSE
    0x88: lambda _, at: (True, at),  # NEWTRUE
    0x47: partial(_number, ">d"),  # BINFLOAT
}
# A trainer's state may also have texts of any length, because what the memo repeats is copied only within a budget (see
# `plain`).
STATE_VALUES: dict[int, Value] = VALUES | {
    0x58: lambda data, at: _long_text(data, *_unsigned(data, at)),  # BINUNICODE
    0x8D: lambda data, at: _long_text(data, *_length(data, at)),  # BINUNICODE8
    0x43: lambda data, at: _bytes(data, *_byte(data, at)),  # SHORT_BINBYTES
    0x42: lambda data, at: _bytes(data, *_unsigned(data, at)),  # BINBYTES
    0x8E: lambda data, at: _bytes(data, *_length(data, at)),  # BINBYTES8
    0x96: _bytearray,  # BYTEARRAY8
}
_EMPTY: dict[int, Callable[[], object]] = {0x7D: dict, 0x5D: list}  # EMPTY_DICT, EMPTY_LIST
_TUPLE_SIZES = {0x85: 1, 0x86: 2, 0x87: 3}

Rules.values = VALUES

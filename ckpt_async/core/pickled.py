"""The pickle machine, as far as DCP's `.metadata` needs it: it makes what it is given tables for, and runs nothing.

`pickle.Unpickler` with a list of allowed names is not enough: BUILD on an allowed function or class changes torch
itself, a memo index of 2³¹ takes 32 GiB, and a tuple of tuples as a key hashes for ever. So the few opcodes that a real
`.metadata` has are interpreted here, as `torch.load(weights_only=True)` does for tensors.
"""

from __future__ import annotations

import pickletools
import struct
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from ckpt_async.errors import UnsafePickleError

# Whatever the memo can repeat for two bytes must be small, or work would grow with the square of the file's size.
_MAX_TEXT_BYTES = 1 << 16
_MAX_ARGUMENTS = 128  # components of a path
_DICTS = frozenset({dict, OrderedDict})

# What a pickle that is cut short or nonsense leads to.
ILL_FORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error)

Find = Callable[[str, str], object]
_Combine = dict[int, Callable[[Any, Any], object]]
_Fill = dict[int, Callable[[object, list[Any]], None]]


class Class:
    """A class that NEWOBJ may make; `build` checks what is then set."""

    __slots__ = ("made",)

    def __init__(self, made: type) -> None:
        self.made = made


class Function:
    """What REDUCE may call, with arguments of one type (`object`: of any): `make(*arguments)` runs nothing of the
    pickle's choosing.
    """

    __slots__ = ("make", "type")

    def __init__(self, make: Callable[..., object], argument_type: type) -> None:
        self.make = make
        self.type = argument_type


def refuse(reason: str) -> NoReturn:
    raise UnsafePickleError(reason)


def interpret(
    data: bytes, find: Find, build: Callable[[object, object], object], key_types: frozenset[type]
) -> object:
    """Run the pickle machine on the opcodes of protocols 2 to 5 that plain data has. `find` says what a name stands
    for, None for what has no place here; `build` gives an object that NEWOBJ has made its state, and returns it; keys
    of dicts are of `key_types`. Raises UnsafePickleError for what it does not do, and any of ILL_FORMED.
    """
    # REDUCE, NEWOBJ, BUILD, STACK_GLOBAL: what becomes of the two topmost.
    combined: _Combine = {0x52: _call, 0x81: _new, 0x62: build, 0x93: partial(_global, find)}
    set_items = partial(_set_items, key_types)
    fill: _Fill = {0x75: set_items, 0x73: set_items, 0x65: _extend, 0x61: _extend}
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: dict[int, Any] = {}
    at = 0
    while True:  # the commonest come first
        code = data[at]
        at += 1
        if code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif code in (0x68, 0x6A):  # BINGET, LONG_BINGET
            index, at = _byte(data, at) if code == 0x68 else _unsigned(data, at)
            stack.append(memo[index])
        elif (read := _VALUES.get(code)) is not None:
            value, at = read(data, at)
            stack.append(value)
        elif (size := _TUPLE_SIZES.get(code)) is not None:  # TUPLE1, TUPLE2, TUPLE3
            stack.append(tuple(_pop(stack, size)))
        elif (combine := combined.get(code)) is not None:
            argument = stack.pop()
            stack[-1] = combine(stack[-1], argument)
        elif code == 0x28:  # MARK
            marks.append(stack)
            stack = []
        elif code == 0x74:  # TUPLE
            items, stack = stack, marks.pop()
            stack.append(tuple(items))
        elif code in (0x75, 0x65):  # SETITEMS, APPENDS
            items, stack = stack, marks.pop()
            fill[code](stack[-1], items)
        elif code in (0x73, 0x61):  # SETITEM, APPEND
            items = _pop(stack, 2 if code == 0x73 else 1)
            fill[code](stack[-1], items)
        elif code == 0x63:  # GLOBAL
            (module, name), at = _names(data, at)
            stack.append(_global(find, module, name))
        elif code in (0x71, 0x72):  # BINPUT, LONG_BINPUT
            index, at = _byte(data, at) if code == 0x71 else _unsigned(data, at)
            memo[index] = stack[-1]
        elif code in (0x80, 0x95):  # PROTO, FRAME
            at = _skip(code, data, at)
        elif code == 0x2E:  # STOP
            return stack.pop()
        else:
            opcode = next((each for each in pickletools.opcodes if ord(each.code) == code), None)
            refuse(f"it has {opcode.name if opcode else hex(code)}, which DCP's metadata never has")


def _skip(code: int, data: bytes, at: int) -> int:
    if code == 0x80:
        return at + 1
    size, at = _number("<Q", data, at)  # a promise of bytes, all of which are here already
    if size > len(data) - at:
        refuse("it is cut short")
    return at


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


def _text(data: bytes, size: int, start: int) -> tuple[str, int]:
    end = start + size
    if end > len(data):
        refuse("it is cut short")
    if size > _MAX_TEXT_BYTES:
        refuse(f"it has a text of {size} bytes")
    return str(data[start:end], "utf-8", "surrogatepass"), end


def _names(data: bytes, at: int) -> tuple[list[str], int]:
    """Two lines."""
    middle = data.index(b"\n", at)
    end = data.index(b"\n", middle + 1)
    return str(data[at:end], "utf-8").split("\n"), end + 1


# The value that an opcode pushes, and where the next one begins.
_VALUES: dict[int, Callable[[bytes, int], tuple[object, int]]] = {
    0x4B: _byte,  # BININT1
    0x29: lambda _, at: ((), at),  # EMPTY_TUPLE
    0x7D: lambda _, at: ({}, at),  # EMPTY_DICT
    0x5D: lambda _, at: ([], at),  # EMPTY_LIST
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
_TUPLE_SIZES = {0x85: 1, 0x86: 2, 0x87: 3}


def _new(class_: object, arguments: object) -> object:
    if type(class_) is not Class or type(arguments) is not tuple or arguments:
        refuse("it makes an object of something that is not a class of DCP's metadata")
    return object.__new__(class_.made)


def _global(find: Find, module: object, name: object) -> object:
    if type(module) is not str or type(name) is not str:
        refuse("it names a global without a name")
    found = find(module, name)
    if found is None:
        refuse(f"it names {module[:200]}.{name[:200]}, which is not part of DCP's metadata; nothing was run")
    return found


def _call(function: object, arguments: object) -> object:
    if type(function) is not Function or type(arguments) is not tuple or len(arguments) > _MAX_ARGUMENTS:
        refuse("it calls something that DCP's metadata never calls")
    for each in arguments:
        if function.type is not object and type(each) is not function.type:
            refuse("it calls a function with arguments of other types than DCP's metadata has")
    return function.make(*arguments)


def _set_items(key_types: frozenset[type], target: object, items: list[Any]) -> None:
    if type(target) not in _DICTS:
        refuse("it sets items of something that is not a dict")
    assert isinstance(target, dict)
    for key in items[::2]:
        if type(key) not in key_types:
            refuse("it has a key that is neither a name nor an index")
    target.update(zip(items[::2], items[1::2], strict=True))


def _extend(target: object, items: list[Any]) -> None:
    if type(target) is not list:
        refuse("it appends to something that is not a list")
    target.extend(items)

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
from typing import Any, NoReturn

from ckpt_async.errors import UnsafePickleError

# Whatever the memo can repeat for two bytes must be small, or work would grow with the square of the file's size.
_MAX_TEXT_BYTES = 1 << 16
_MAX_ARGUMENTS = 128  # components of a path
_DICTS = frozenset({dict, OrderedDict})

# What a pickle that is cut short or nonsense leads to.
ILL_FORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, struct.error)

Find = Callable[[str, str], object]


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
    data: bytes, find: Find, build: Callable[[object, object], None], key_types: frozenset[type]
) -> object:
    """Run the pickle machine on the opcodes of protocols 2 to 5 that plain data has; the commonest come first. `find`
    says what a name stands for, None for what has no place here; `build` takes an object that NEWOBJ has made and the
    state that it is to have; keys of dicts are of `key_types`.

    Raises UnsafePickleError for what it does not do, and any of ILL_FORMED.
    """
    stack: list[Any] = []
    marks: list[list[Any]] = []
    memo: dict[int, Any] = {}
    at, end = 0, len(data)
    unpack = struct.unpack_from
    while True:
        code = data[at]
        at += 1
        if code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif code == 0x68:  # BINGET
            stack.append(memo[data[at]])
            at += 1
        elif code == 0x4B:  # BININT1
            stack.append(data[at])
            at += 1
        elif code == 0x6A:  # LONG_BINGET
            stack.append(memo[unpack("<I", data, at)[0]])
            at += 4
        elif code == 0x52:  # REDUCE
            arguments = stack.pop()
            stack[-1] = _call(stack[-1], arguments)
        elif code == 0x85:  # TUPLE1
            stack[-1] = (stack[-1],)
        elif code == 0x86:  # TUPLE2
            stack[-2:] = [(stack[-2], stack[-1])]
        elif code == 0x87:  # TUPLE3
            stack[-3:] = [(stack[-3], stack[-2], stack[-1])]
        elif code == 0x29:  # EMPTY_TUPLE
            stack.append(())
        elif code == 0x81:  # NEWOBJ
            arguments = stack.pop()
            if type(stack[-1]) is not Class or type(arguments) is not tuple or arguments:
                refuse("it makes an object of what is no class of DCP's metadata")
            stack[-1] = object.__new__(stack[-1].made)
        elif code == 0x62:  # BUILD
            state = stack.pop()
            build(stack[-1], state)
        elif code == 0x7D:  # EMPTY_DICT
            stack.append({})
        elif code == 0x28:  # MARK
            marks.append(stack)
            stack = []
        elif code == 0x75:  # SETITEMS
            items, stack = stack, marks.pop()
            _set_items(stack[-1], items, key_types)
        elif code == 0x4D:  # BININT2
            stack.append(unpack("<H", data, at)[0])
            at += 2
        elif code == 0x4A:  # BININT
            stack.append(unpack("<i", data, at)[0])
            at += 4
        elif code == 0x8A:  # LONG1
            size = data[at]
            at += 1
            stack.append(int.from_bytes(data[at : at + size], "little", signed=True))
            at += size
        elif code in (0x8C, 0x58):  # SHORT_BINUNICODE, BINUNICODE
            size, start = (data[at], at + 1) if code == 0x8C else (unpack("<I", data, at)[0], at + 4)
            at = start + size
            if at > end:
                refuse("it is cut short")
            if size > _MAX_TEXT_BYTES:
                refuse(f"it has a text of {size} bytes")
            stack.append(str(data[start:at], "utf-8", "surrogatepass"))
        elif code == 0x4E:  # NONE
            stack.append(None)
        elif code == 0x89:  # NEWFALSE
            stack.append(False)
        elif code == 0x88:  # NEWTRUE
            stack.append(True)
        elif code == 0x5D:  # EMPTY_LIST
            stack.append([])
        elif code == 0x61:  # APPEND
            item = stack.pop()
            _extend(stack[-1], [item])
        elif code == 0x65:  # APPENDS
            items, stack = stack, marks.pop()
            _extend(stack[-1], items)
        elif code == 0x73:  # SETITEM
            items = stack[-2:]
            del stack[-2:]
            _set_items(stack[-1], items, key_types)
        elif code == 0x74:  # TUPLE
            items, stack = stack, marks.pop()
            stack.append(tuple(items))
        elif code == 0x95:  # FRAME: a promise of bytes, all of which are here already
            if unpack("<Q", data, at)[0] > end - at - 8:
                refuse("it is cut short")
            at += 8
        elif code == 0x93:  # STACK_GLOBAL
            name = stack.pop()
            stack[-1] = _global(find, stack[-1], name)
        elif code == 0x63:  # GLOBAL
            middle = data.index(b"\n", at)
            stop = data.index(b"\n", middle + 1)
            stack.append(_global(find, str(data[at:middle], "utf-8"), str(data[middle + 1 : stop], "utf-8")))
            at = stop + 1
        elif code == 0x71:  # BINPUT
            memo[data[at]] = stack[-1]
            at += 1
        elif code == 0x72:  # LONG_BINPUT
            memo[unpack("<I", data, at)[0]] = stack[-1]
            at += 4
        elif code == 0x47:  # BINFLOAT
            stack.append(unpack(">d", data, at)[0])
            at += 8
        elif code == 0x80:  # PROTO
            at += 1
        elif code == 0x2E:  # STOP
            return stack.pop()
        else:
            opcode = next((each for each in pickletools.opcodes if ord(each.code) == code), None)
            refuse(f"it has {opcode.name if opcode else hex(code)}, which DCP's metadata never has")


def _global(find: Find, module: object, name: object) -> object:
    if type(module) is not str or type(name) is not str:
        refuse("it names something without a name")
    found = find(module, name)
    if found is None:
        refuse(f"it names {module[:200]}.{name[:200]}, which is not of DCP's metadata; nothing was run")
    return found


def _call(function: object, arguments: object) -> object:
    if type(function) is not Function or type(arguments) is not tuple or len(arguments) > _MAX_ARGUMENTS:
        refuse("it calls what DCP's metadata never calls")
    for each in arguments:
        if function.type is not object and type(each) is not function.type:
            refuse("it calls a function with arguments of other types than DCP's metadata has")
    return function.make(*arguments)


def _set_items(target: object, items: list[Any], key_types: frozenset[type]) -> None:
    if type(target) not in _DICTS:
        refuse("it sets items of what is no dict")
    assert isinstance(target, dict)
    for key in items[::2]:
        if type(key) not in key_types:
            refuse("it has a key that is neither a name nor an index")
    target.update(zip(items[::2], items[1::2], strict=True))


def _extend(target: object, items: list[Any]) -> None:
    if type(target) is not list:
        refuse("it appends to what is no list")
    target.extend(items)

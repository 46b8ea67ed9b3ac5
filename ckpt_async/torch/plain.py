"""Plain data in pickles: what a state may contain besides tensors, and how each piece of it is made.

A name in a pickle is only looked up in a table. Nothing is imported because a file says so, and only functions of this
module are called, which check their arguments first. What they copy is charged to a budget in proportion to the pickle,
because its memo can repeat an argument for two bytes.
"""

from __future__ import annotations

import collections
import datetime as dt
import enum
import io
import math
import pathlib
import re
import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from fractions import Fraction
from importlib import import_module
from typing import Any, NoReturn, cast

from ckpt_async.core import naming
from ckpt_async.core.pickled import CONTAINER_BYTES, STATE_VALUES, Class, Function, Rules, refuse
from ckpt_async.errors import SettingsError, UnsafePickleError
from ckpt_async.torch import arrays

Allow = Sequence[type | str]
Names = dict[tuple[str, str], object]

_OBJECT_BYTES = 256
_DEQUE_BYTES = 1024
_ITEM_BYTES = 64
_MAX_ARGUMENTS = 128
_MAX_DIGITS = 4000
_FRACTION = re.compile(rf"(-?[0-9]{{1,{_MAX_DIGITS}}})(?:/([0-9]{{1,{_MAX_DIGITS}}}))?")
# The writer of a file can make tuple keys collide, so that a dict of them takes quadratic time.
_MAX_TUPLE_KEYS = 20_000
_MAX_TUPLE_PARTS = 1000

_PATHS: dict[str, type[pathlib.PurePath]] = {
    "Path": pathlib.Path,
    "PosixPath": pathlib.Path if pathlib.Path is not pathlib.WindowsPath else pathlib.PurePosixPath,
    "WindowsPath": pathlib.PureWindowsPath,  # a `Path` pickled on Windows, of which only the name matters
    "PurePath": pathlib.PurePath,
    "PurePosixPath": pathlib.PurePosixPath,
    "PureWindowsPath": pathlib.PureWindowsPath,
}
_SIMPLE_KEYS: frozenset[type] = frozenset({str, bool, float, bytes, type(None), pathlib.PosixPath})


class Arguments(tuple[Any, ...]):
    """A tuple that contains something other than data (a function, a storage).

    It can be the arguments of a call and nothing else, so that it cannot get into the loaded state.
    """

    __slots__ = ()


_TUPLES = frozenset({tuple, Arguments})


class Refused:
    """Stands for what is not plain data, until it is known whether that is left out. It does nothing."""

    __slots__ = ("error",)

    def __init__(self, error: UnsafePickleError) -> None:
        self.error = error


def _refused_in(values: Iterable[Any]) -> Refused | None:
    return next((each for each in values if type(each) is Refused), None)


def allowed(allow: Allow) -> dict[tuple[str, str], type]:
    """Return the classes by the names that a pickle has for them.

    Raises SettingsError for anything that is not a class or cannot be found.
    """
    found: dict[tuple[str, str], type] = {}
    if isinstance(allow, str):
        naming.several(allow, "allow")  # raises, because it is not a list
    for each in allow:
        class_, where = _class_named(each) if isinstance(each, str) else (each, None)
        if not isinstance(class_, type):
            raise SettingsError(f"allow: {each!r} is not a class", hint="allow=[my.Class, 'my.module.Class']")
        found[class_.__module__, class_.__qualname__] = class_
        if where is not None:
            found[where] = class_
    return found


def _class_named(dotted: str) -> tuple[object, tuple[str, str]]:
    """Return the object `package.module.Outer.Inner`, and its name as a pickle spells it."""
    parts = dotted.split(".")
    for end in range(len(parts) - 1, 0, -1):
        try:
            found: object = import_module(module := ".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        try:
            for name in parts[end:]:
                found = getattr(found, name)
        except AttributeError:
            break
        return found, (module, ".".join(parts[end:]))
    raise SettingsError(f"allow: there is no class {dotted!r}", hint="allow=[my.Class, 'my.module.Class']")


def _spelled_today(module: str, name: str) -> tuple[str, str]:
    """Return Python 3's spelling of a name: protocol 2, in which torch writes, has Python 2's."""
    return NAME_MAPPING.get((module, name)) or (IMPORT_MAPPING.get(module, module), name)


def or_trusted(error: UnsafePickleError) -> UnsafePickleError:
    """Return the error of a function that has the argument `weights_only`, with that as a way out."""
    other = "if you wrote the file yourself, pass weights_only=False, which runs whatever the file says"
    return UnsafePickleError(error.without_hint, hint=f"{error.hint}; or, {other}" if error.hint else other)


class PlainRules(Rules):
    """The rules for one pickle."""

    what = "plain data"
    values = STATE_VALUES
    has_sets_and_storages = True
    # Types that are not data, and may not become part of it.
    internal: frozenset[type] = frozenset({Class, Function, Arguments})
    # Classes, with their subclasses, that are loaded in another way or not at all.
    never_allowed: tuple[type, ...] = ()

    def __init__(self, allow: Mapping[tuple[str, str], type]) -> None:
        self.is_patient = False  # what is refused becomes `Refused`; call `check_kept` in the end
        self._refused: dict[tuple[str, str], Refused] = {}
        self._tuple_keys_left = _MAX_TUPLE_KEYS
        self._unbuilt: dict[int, object] = {}  # objects to which BUILD may give a state, once
        self._factories: dict[object, type] = {}
        self._array_rules: arrays.ArrayRules | None = None
        self._allowed_types = frozenset(allow.values())
        self._names = self.names() | {name: Class(class_) for name, class_ in allow.items()}

    # --- for subclasses and `arrays` -------------------------------------------------------------------------

    def new_object(self, made: Any) -> Any:
        """Register an object that may be given a state."""
        self.spend(_OBJECT_BYTES)
        self._unbuilt[id(made)] = made
        return made

    # --- called by the interpreter ---------------------------------------------------------------------------

    def find(self, module: str, name: str) -> object:
        found = self._names.get((module, name)) or self._names.get(_spelled_today(module, name))
        if found is None and module.split(".", 1)[0] == "numpy" and arrays.is_there(module, name):
            if self._array_rules is None:
                self._array_rules = arrays.ArrayRules(self.new_object, self.spend)
                self._names |= self._array_rules.names()
            found = self._names.get((module, name))
        return found

    def check_kept(self, state: Any) -> None:
        """Refuse what was put off, if it is in what is left of the state."""
        pending, seen = [state] if self._refused else [], set[int]()
        while pending:
            value = pending.pop()
            if type(value) is Refused:
                raise value.error
            if id(value) in seen or type(value) in _SIMPLE_KEYS:
                continue
            seen.add(id(value))
            if isinstance(value, Mapping):
                pending += [*value.keys(), *value.values()]
            elif isinstance(value, list | tuple | set | frozenset | collections.deque):
                pending += value
            pending += getattr(value, "__dict__", {}).values()

    def refuse_global(self, module: str, name: str) -> object:
        if self.is_patient and (module, name) not in self._refused:
            try:
                self._refuse_global(module, name)
            except UnsafePickleError as error:
                self._refused[module, name] = Refused(error)
        return self._refused.get((module, name)) or self._refuse_global(module, name)

    def _refuse_global(self, module: str, name: str) -> NoReturn:
        module, name = _spelled_today(module, name)
        whole, hint = f"{module}.{name}", ""
        if self._may_be_allowed(module, name):
            hint = f"if that is a class whose code you trust with the content of the file, pass allow=[{whole!r}]"
        refuse(f"it names {whole}, which is not plain data; nothing was run", hint)

    def _may_be_allowed(self, module: str, name: str) -> bool:
        """Return whether it may be a class, as far as the modules that are loaded tell: nothing is imported or run."""
        found: object = sys.modules.get(module)
        if found is None:
            return True
        for part in name.split("."):
            found = getattr(found, "__dict__", {}).get(part)
        return isinstance(found, type) and not issubclass(found, self.never_allowed)

    def tuple_of(self, items: list[Any]) -> object:
        self.spend(CONTAINER_BYTES)
        if (refused := _refused_in(items)) is not None:
            return refused
        return tuple(items) if self.internal.isdisjoint(map(type, items)) else Arguments(items)

    def check_data(self, items: Iterable[Any]) -> None:
        if not self.internal.isdisjoint(map(type, items)):
            refuse("it has a function, a class or a storage where data belongs")

    def new(self, class_: object, arguments: object) -> object:
        if (refused := _refused_in((class_, arguments))) is not None:
            return refused
        if type(class_) is not Class or type(arguments) is not tuple:
            refuse("it makes an object of something that is not an allowed class")
        made: Any = class_.made
        return self.new_object(made.__new__(made, *arguments))

    def call(self, function: object, arguments: object) -> object:
        if (refused := _refused_in((function, arguments))) is not None:
            return refused
        if type(arguments) not in _TUPLES:
            refuse("it calls something without arguments")
        assert isinstance(arguments, tuple)
        if type(function) is Function and len(arguments) <= _MAX_ARGUMENTS:
            return function.make(*arguments)
        if type(function) is not Class or type(arguments) is not tuple:
            refuse("it calls something that is not a function")
        if issubclass(function.made, enum.Enum):
            return _member(function.made, arguments)
        return self.new_object(function.made(*arguments))

    def build(self, target: object, state: object) -> object:
        if type(target) is Refused:
            return target
        self.check_kept(state)
        if self._unbuilt.pop(id(target), None) is None:
            refuse("it modifies an object that it did not just create")
        self.check_data((state,))
        if self._array_rules is not None and self._array_rules.build(target, state):
            return target
        if type(target) is io.BytesIO:
            self._fill_buffer(target, state)
        elif type(target) is collections.OrderedDict:  # torch's state_dict() has `_metadata`
            _set_fields(vars(target), state, dir(collections.OrderedDict))
        elif type(target) not in self._allowed_types:
            refuse(f"it gives a state to a {type(target).__name__}, which has none")
        elif hasattr(type(target), "__setstate__"):
            target.__setstate__(state)  # type: ignore[attr-defined]
        else:
            fields, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
            if fields is not None:
                _set_fields(vars(target), fields)
            for name, value in _checked_fields(slots or {}).items():
                object.__setattr__(target, name, value)
        return target

    def persistent(self, told: object) -> object:
        refuse(f"it refers to something outside of it, {type(told)!s}")

    # --- containers ------------------------------------------------------------------------------------------

    def check_keys(self, keys: list[Any]) -> None:
        for key in keys:
            kind = type(key)
            if kind in _SIMPLE_KEYS or kind is Refused:
                continue
            if kind is int:
                if not -(1 << 63) <= key < 1 << 64:
                    refuse("it has a key that is a number of more than 64 bits")
            elif kind is tuple:
                self._check_tuple_key(key)
            elif not isinstance(key, (enum.Enum, pathlib.PurePath)) and not self.is_key(key):
                refuse(f"it has a key that is a {kind.__name__}")

    def is_key(self, key: object) -> bool:
        return self._array_rules is not None and self._array_rules.is_key(key)

    def _check_tuple_key(self, key: tuple[Any, ...]) -> None:
        """Bound tuples as keys: a tuple's hash is computed from all its parts each time, and can be predicted."""
        self._tuple_keys_left -= 1
        if self._tuple_keys_left < 0:
            refuse(f"it has more than {_MAX_TUPLE_KEYS} keys that are tuples")
        pending, left = list(key), _MAX_TUPLE_PARTS
        while pending:
            left -= 1
            if left < 0:
                refuse("it has a tuple with too many parts as a key")
            part = pending.pop()
            if type(part) is tuple:
                pending.extend(part[: left + 1])
            else:
                self.check_keys([part])

    def set_items(self, target: object, items: list[Any]) -> None:
        if type(target) is Refused:
            return
        self.check_keys(items[::2])
        self.check_data(items[1::2])
        pairs = zip(items[::2], items[1::2], strict=True)
        if type(target) is dict:
            target.update(pairs)
        elif isinstance(target, collections.OrderedDict):
            collections.OrderedDict.update(target, pairs)
        elif isinstance(target, dict):  # a Counter's own `update` would count
            dict.update(target, pairs)
        else:
            refuse("it sets items of something that is not a dict")

    def extend(self, target: object, items: list[Any]) -> None:
        if type(target) is Refused:
            return
        self.check_data(items)
        if isinstance(target, list):
            list.extend(target, items)
        elif isinstance(target, collections.deque):
            collections.deque.extend(target, items)
        else:
            refuse("it appends to something that is not a list")

    def add(self, target: object, items: list[Any]) -> None:
        if type(target) is not set:
            refuse("it adds to something that is not a set")
        self.check_keys(items)
        target.update(items)

    def frozen(self, items: list[Any]) -> object:
        self.spend(CONTAINER_BYTES)
        self.check_keys(items)
        return frozenset(items)

    # --- the table of names ----------------------------------------------------------------------------------

    def names(self) -> Names:
        found: Names = {
            ("_codecs", "encode"): Function(self._encoded),
            ("_io", "BytesIO"): Class(io.BytesIO),
            ("collections", "OrderedDict"): Function(self._ordered),
            ("collections", "defaultdict"): Function(self._defaultdict),
            ("collections", "Counter"): Function(self._counter),
            ("collections", "deque"): Function(self._deque),
            ("datetime", "timedelta"): Function(_timedelta),
            ("datetime", "date"): Function(_dated(dt.date, 4)),
            ("datetime", "time"): Function(_dated(dt.time, 6)),
            ("datetime", "datetime"): Function(_dated(dt.datetime, 10)),
            ("datetime", "timezone"): Function(_timezone),
            ("decimal", "Decimal"): Function(_decimal),
            ("fractions", "Fraction"): Function(_fraction),
        }
        made: dict[type, Callable[..., object]] = {
            set: self._set,
            frozenset: self._frozenset,
            bytes: self._bytes,
            bytearray: self._bytearray,
            list: self._list,
            dict: self._dict,
            complex: _complex,
            range: _range,
        }
        # Only as the factory of a defaultdict:
        made |= dict.fromkeys((int, float, str, bool, tuple), _never)
        for type_, make in made.items():
            found["builtins", type_.__name__] = found["__builtin__", type_.__name__] = Function(make)
            self._factories[found["builtins", type_.__name__]] = type_
        self._factories[found["collections", "OrderedDict"]] = collections.OrderedDict
        self._factories[found["collections", "Counter"]] = collections.Counter
        for old, new in {
            "xrange": "range",
            "long": "int",
            "unicode": "str",
        }.items():  # protocol 2 has Python 2's names
            found["__builtin__", old] = found["builtins", new]
        found["builtins", "getattr"] = found["__builtin__", "getattr"] = Function(member_by_name)
        for name, path in _PATHS.items():
            found["pathlib", name] = found["pathlib._local", name] = Function(self._path(path))
        return found

    def _encoded(self, text: object, encoding: object) -> bytes:
        """Make bytes as protocol 2 spells them."""
        if type(text) is not str or type(encoding) is not str or encoding not in ("latin1", "latin-1"):
            refuse("it encodes something other than bytes")
        self.spend(len(text))
        return text.encode("latin-1")

    def _fill_buffer(self, target: io.BytesIO, state: object) -> None:
        content, at, attributes = state if type(state) is tuple and len(state) == 3 else (None, None, None)
        if type(content) is not bytes or type(at) is not int or not 0 <= at < 1 << 63 or attributes:
            refuse("it has a BytesIO that is not its bytes and a position")
        self.spend(len(content))
        cast(Any, target).__setstate__((content, at, None))

    def _bytes(self, *content: object) -> bytes:
        if content and (len(content) > 1 or type(content[0]) is not bytes):
            refuse("it makes bytes from something else")
        return content[0] if content and type(content[0]) is bytes else b""

    def _bytearray(self, *content: object) -> bytearray:
        if len(content) == 2:
            return bytearray(self._encoded(*content))
        found = self._bytes(*content)
        self.spend(len(found))
        return bytearray(found)

    def _list(self, *content: object) -> list[Any]:
        if content:
            refuse("it makes a list from something else")
        return []

    def _dict(self, *content: object) -> dict[Any, Any]:
        if content:
            refuse("it makes a dict from something else")
        return {}

    def _items(self, content: tuple[object, ...]) -> list[Any]:
        """Return the items of a set, as protocols 2 and 3 spell it."""
        if not content:
            return []
        (items,) = content
        if type(items) is not list:
            refuse("it makes a set from something that is not a list")
        self.spend(_ITEM_BYTES * len(items))
        self.check_keys(items)
        return items

    def _set(self, *content: object) -> set[Any]:
        self.spend(_OBJECT_BYTES)
        return set(self._items(content))

    def _frozenset(self, *content: object) -> frozenset[Any]:
        self.spend(_OBJECT_BYTES)
        return frozenset(self._items(content))

    def _ordered(self, *content: object) -> object:
        if content:
            refuse("it makes an OrderedDict from something else")
        return self.new_object(collections.OrderedDict())

    def _defaultdict(self, factory: object = None) -> object:
        self.spend(_OBJECT_BYTES)
        if factory is None:
            return collections.defaultdict(None)
        if type(factory) is not Function or factory not in self._factories:
            refuse("it makes a defaultdict with a factory that is not a type of plain data")
        return collections.defaultdict(self._factories[factory])

    def _counter(self, content: object = None) -> object:
        self.spend(_OBJECT_BYTES)
        counter: collections.Counter[Any] = collections.Counter()
        if content is not None:
            if type(content) is not dict:
                refuse("it makes a Counter from something that is not a dict")
            self.spend(_ITEM_BYTES * len(content))
            dict.update(counter, content)
        return counter

    def _deque(self, content: object = (), max_length: object = None) -> object:
        self.spend(_DEQUE_BYTES)
        is_empty = type(content) in (tuple, list) and not content
        if not is_empty or not (max_length is None or (type(max_length) is int and max_length >= 0)):
            refuse("it makes a deque from something else")
        return collections.deque(maxlen=max_length)

    def _path(self, path: type[pathlib.PurePath]) -> Callable[..., object]:
        def make(*parts: object) -> pathlib.PurePath:
            if not all(type(each) is str for each in parts):
                refuse("it makes a path from something other than text")
            texts = [str(each) for each in parts]
            self.spend(2 * _OBJECT_BYTES + 4 * sum(map(len, texts)))
            return path(*texts)

        return make


def _never(*_: object) -> NoReturn:
    refuse("it calls a type of plain data, which needs no call")


def _complex(real: object, imaginary: object) -> complex:
    if type(real) is not float or type(imaginary) is not float:
        refuse("it makes a complex number from something other than two numbers")
    return complex(real, imaginary)


def _range(*bounds: object) -> range:
    if not 2 <= len(bounds) <= 3 or not all(type(each) is int for each in bounds):
        refuse("it makes a range from something other than numbers")
    return range(*(each for each in bounds if isinstance(each, int)))


def _dated(type_: Any, size_bytes: int) -> Callable[..., object]:
    def make(packed: object, zone: object = None) -> object:
        if type(packed) is not bytes or len(packed) != size_bytes:
            refuse(f"it makes a {type_.__name__} from something other than {size_bytes} bytes")
        if type(zone) is dt.timezone:
            return type_(packed, zone)
        if zone is not None:
            refuse(f"it has a {type_.__name__} whose time zone is not one of `datetime`")
        return type_(packed)

    return make


def _timedelta(*parts: object) -> dt.timedelta:
    if len(parts) > 3 or not all(type(each) is int for each in parts):
        refuse("it makes a timedelta from something other than numbers")
    return dt.timedelta(*(each for each in parts if isinstance(each, int)))


def _timezone(offset: object, name: object = None) -> dt.timezone:
    if type(offset) is not dt.timedelta or type(name) not in (str, type(None)):
        refuse("it makes a time zone from something other than an offset")
    return dt.timezone(offset) if name is None else dt.timezone(offset, str(name))


def _decimal(text: object) -> Decimal:
    if type(text) is not str or len(text) > _MAX_DIGITS:
        refuse("it makes a Decimal from something other than its digits")
    return Decimal(text)


def _fraction(*content: object) -> Fraction:
    """Make a Fraction from digits only: `Fraction("1e1000000000")` would use up all memory."""
    parts: Sequence[object] = content
    if len(content) == 1 and type(content[0]) is str:
        match = _FRACTION.fullmatch(content[0])
        parts = [int(each) for each in match.groups("1")] if match else ()
    if len(parts) != 2 or not all(type(each) is int for each in parts):
        refuse("it makes a Fraction from something other than two numbers")
    numerator, denominator = (each for each in parts if isinstance(each, int))
    return Fraction(numerator, denominator)


def _member(class_: type[enum.Enum], arguments: tuple[Any, ...]) -> enum.Enum:
    """Return the member with this value.

    Nothing of the class is called, except for a flag class, whose values may be sums.
    """
    if len(arguments) != 1:
        refuse(f"it makes a {class_.__name__} from {len(arguments)} values")
    (value,) = arguments
    for member in class_.__members__.values():
        if type(member.value) is type(value) and member.value == value:
            return member
    if not issubclass(class_, enum.Flag) or type(value) is not int:
        refuse(f"{class_.__name__} has no member with the value {str(value)[:100]!r}")
    return class_(value)


def member_by_name(class_: object, name: object) -> enum.Enum:
    """Emulate `getattr` on an enum, and on nothing else: some versions of Python pickle members that way."""
    if type(class_) is not Class or not issubclass(class_.made, enum.Enum) or type(name) is not str:
        refuse("it calls getattr on something that is not an enum")
    found: enum.Enum = class_.made.__members__[name]
    return found


def _checked_fields(state: object) -> dict[str, Any]:
    if type(state) is not dict:
        refuse("it has a state that is not an object's fields")
    for name in state:
        if type(name) is not str or (name.startswith("__") and name.endswith("__")):
            refuse(f"it sets {str(name)[:100]!r} of an object")
    return state


def _set_fields(fields: dict[str, Any], state: object, taken: Sequence[str] = ()) -> None:
    told = _checked_fields(state)
    if hidden := told.keys() & set(taken):
        refuse(f"it sets {min(hidden)!r} of an object")
    fields.update(told)


def natural_product(sizes: Sequence[object], max_dimensions: int = 64) -> int:
    """Return the number of elements of a shape; refuse anything that is not a shape."""
    if len(sizes) > max_dimensions or not all(type(each) is int and 0 <= each < 1 << 63 for each in sizes):
        refuse("it has a shape that does not consist of non-negative integers")
    numbers = [each for each in sizes if isinstance(each, int)]
    if math.prod(each or 1 for each in numbers) >= 1 << 63:  # also beside a 0, where the size reveals nothing
        refuse("it has a shape of more elements than there can be")
    return math.prod(numbers)

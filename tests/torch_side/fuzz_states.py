"""Mutants of torch files, read in a watched process.

    python -m tests.torch_side.fuzz_states COUNT SEED [--unsafe]

The unmodified states are read first, and all calls made on the way are recorded. After that, a mutant may raise what
`load` documents or yield data of the known types. It must call nothing beyond what was recorded (and what building
error messages takes), cause no `sys.audit` event, and take no more than MAX_BYTES. `--unsafe` reads with torch's
unrestricted reader instead, which must be caught.
"""

import collections
import contextlib
import datetime as dt
import decimal
import fractions
import io
import pathlib
import pickletools
import random
import resource
import sys
import warnings
from types import FrameType
from typing import Any

import numpy as np
import torch

from ckpt_async.errors import FormatError, UnsafePickleError
from ckpt_async.torch.plain import allowed
from ckpt_async.torch.torchfile import read_state
from tests.torch_side import states

MAX_BYTES = 400 << 20
# All harmless, because the unrestricted reader does call them.
SPLICED = [
    *(b"cposix\ngetcwd\n", b"cos\nlistdir\n", b"cplatform\nnode\n", b"cwave\nopen\n", b"cos.path\nexists\n"),
    *(b"cbuiltins\nlist\n", b"ccollections\ndefaultdict\n", b"cnumpy\nndarray\n", b"ctorch\nFloatStorage\n"),
    *(
        b"cbuiltins\ngetattr\n",
        b"ctorch._utils\n_rebuild_tensor_v2\n",
        b"cnumpy\ndtype\n",
        b"ccollections\ndeque\n",
    ),
    *(
        b"cbuiltins\nbytearray\n",
        b"c_codecs\nencode\n",
        b"cfractions\nFraction\n",
        b"ccopyreg\n_reconstructor\n",
    ),
    *(
        b"\x8a\x08" + bytes(6) + b"\x00\x40",
        b"\x8a\x04\xff\xff\xff\x7f",
        b"J\xff\xff\xff\xff",
        b"X\x02\0\0\0O8",
    ),
    *(
        b")R",
        b")\x81",
        b"}b",
        b"0",
        b"h\x00",
        b"\x85R",
        b"(",
        b"t",
        b"s",
        b"a",
        b"e",
        b"u",
        b"Q",
        b"]",
        b"}",
        b")",
    ),
]
# Calls made by error handling and other branches, beyond those that reading real states makes.
MORE_CALLS = {
    *(
        ("builtins", "hex"),
        ("builtins", "ord"),
        ("builtins", "str"),
        ("builtins", "repr"),
        ("builtins", "min"),
    ),
    *(("builtins", "dir"), ("builtins", "hash"), (None, "bytes.rfind"), (None, "str.lower")),
    ("_codecs", "charmap_decode"),  # by `zipfile`, for names that are not ASCII
    (None, "generator.throw"),
    *(
        (None, f"str.{name}")
        for name in ("format", "join", "startswith", "endswith", "removesuffix", "split")
    ),
}
# The last two are caused by watching itself.
OWN_EVENTS = {"builtins.id", "object.__getattr__", "sys.setprofile"}
FOLDERS = (
    "ckpt_async.",
    "zipfile",
    "struct",
    "enum",
    "fractions",
    "decimal",
    "pathlib",
    "collections",
    "encodings",
)
KNOWN_TYPES = {
    *(dict, list, tuple, set, frozenset, str, bytes, bytearray, int, float, complex, bool, type(None), range),
    *(collections.OrderedDict, collections.defaultdict, collections.Counter, collections.deque),
    *(dt.timedelta, dt.datetime, dt.date, dt.time, dt.timezone, decimal.Decimal, fractions.Fraction),
    *(
        torch.Tensor,
        torch.nn.Parameter,
        torch.Size,
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    ),
    *(torch.qscheme, np.ndarray, states.Progress, states.Stage),
}

calls: set[tuple[str | None, str]] = set()
events: set[str] = set()
is_watching = False


def on_event(event: str, arguments: tuple[Any, ...]) -> None:
    if is_watching and event not in OWN_EVENTS:
        events.add(f"{event} {str(arguments)[:200]}")


def on_call(frame: FrameType, what: str, called: Any) -> None:
    if what == "call":
        calls.add((frame.f_globals.get("__name__"), frame.f_code.co_qualname))
    elif what == "c_call":
        calls.add((getattr(called, "__module__", None), getattr(called, "__qualname__", str(called))))


@contextlib.contextmanager
def watched():  # type: ignore[no-untyped-def]
    global is_watching
    is_watching = True
    sys.setprofile(on_call)
    try:
        yield
    finally:
        sys.setprofile(None)
        is_watching = False


def strangers(found: object) -> set[type]:
    """Return the types found in a loaded state that do not belong in one."""
    pending, seen, kinds = [found], {id(found)}, set()
    while pending:
        each = pending.pop()
        kinds.add(type(each))
        inner: list[Any] = []
        if isinstance(each, dict):
            inner = [*each, *each.values(), *getattr(each, "__dict__", {}).values()]
        elif isinstance(each, list | tuple | set | frozenset | collections.deque):
            inner = list(each)
        elif isinstance(each, states.Progress | torch.Tensor):
            inner = list(vars(each).values())
        pending += [one for one in inner if id(one) not in seen]
        seen |= set(map(id, inner))
    return {
        kind for kind in kinds - KNOWN_TYPES if not issubclass(kind, np.generic | np.dtype | pathlib.PurePath)
    }


def boundaries(pickle: bytes) -> list[int]:
    """Return the positions at which opcodes begin."""
    return [position for _, _, position in pickletools.genops(pickle) if position is not None]


def mutant(pickle: bytes, places: list[int], chance: random.Random) -> bytes:
    data = bytearray(pickle)
    for _ in range(chance.choice((1, 1, 1, 2, 3, 8))):
        at = chance.choice(places) if chance.random() < 0.7 else chance.randrange(len(data))
        kind = chance.randrange(6)
        if kind == 0:  # change one byte
            data[at % len(data)] = chance.randrange(256)
        elif kind == 1:  # insert a copy of one or more opcodes from elsewhere in the pickle
            start = chance.choice(places)
            data[at:at] = data[start : start + chance.randrange(1, 40)]
        elif kind == 2:  # overwrite some bytes with a spliced call
            data[at : at + chance.randrange(1, 20)] = chance.choice(SPLICED)
        elif kind == 3:
            data[at:at] = chance.choice(SPLICED)
        elif kind == 4 and len(data) > 100:
            del data[at : at + chance.randrange(1, 20)]
        else:  # overwrite one byte with an opcode that consumes what is on the stack
            data[at % len(data)] = chance.choice(b"Rb\x81a\x85\x86\x87ts0hqQ\x93eu\x90\x91(.")
    return bytes(data)


def read(data: bytes, unsafe: bool) -> Any:
    if unsafe:
        return torch.load(io.BytesIO(data), weights_only=False)
    return read_state(io.BytesIO(data), "mutant", allow=allowed([states.Progress, states.Stage]))


def main(count: int, seed: int, unsafe: bool) -> int:
    warnings.simplefilter("ignore")
    b"\x80".decode("cp437")  # `zipfile` imports the codec once, for names that are not ASCII
    chance = random.Random(seed)
    small = {**states.everything(), "mine": states.Progress(1, states.Stage.DECAY)}
    parts = [{"a": value, "b": [value]} for value in small.values()]
    originals = [states.dumped(each, protocol) for each in (*parts, small) for protocol in (2, 5)]
    originals.append(states.dumped(states.olmo_state()))
    for original in originals:
        with watched():
            read(original, unsafe=False)
    known = calls | MORE_CALLS
    calls.clear()
    events.clear()
    sys.addaudithook(on_event)
    prepared = [(*states.unpacked(each), boundaries(states.unpacked(each)[0])) for each in originals]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: SIM115
    resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), resource.RLIM_INFINITY))
    loaded = 0
    for number in range(count):
        pickle, records, places = chance.choice(prepared)
        data = states.packed(mutant(pickle, places, chance), records)
        if chance.random() < 0.1:
            broken = bytearray(data)
            broken[chance.randrange(len(broken))] = chance.randrange(256)
            data = bytes(broken)
        strange: object = None
        try:
            with watched():
                found = read(data, unsafe)
        except (UnsafePickleError, FormatError):
            pass
        except Exception as error:
            strange = error
        else:
            loaded += 1
            strange = strangers(found) or None
        beyond = {each for each in calls - known if not (each[0] or "").startswith(FOLDERS)}
        if strange is not None or beyond or events:
            told = f"{strange!r} {sorted(events)} {sorted(map(str, beyond))}"
            print(f"escape in mutant {number}: {told[:3000]}")
            return 1
        calls.clear()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
    if grown > MAX_BYTES:
        print(f"escape: {grown} bytes of memory")
        return 1
    print(f"no escape in {count} mutants; {loaded} were loaded; {grown >> 20} MiB of memory")
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]), "--unsafe" in sys.argv))

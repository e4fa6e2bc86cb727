"""Plain data in and out of Python objects that simulate something, without pickle.

`take` walks the attributes of Gymnasium environments, vector environments and wrappers, and writes down numbers,
strings, arrays, containers of them and the state of random generators as one JSON-able tree beside one byte tensor.
What it cannot write down and might change as the environment runs (a simulator's handle, a window, a process) makes it
refuse, and name it. `restore` puts the data into objects made afresh with the same arguments. Only data is ever built
from a file: no class is looked up by name but enumerations already imported, and no code of the file's choosing runs.
"""

import dis
import math
import random
import sys
import types
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.wrappers.utils import RunningMeanStd
from torch import Tensor

WALKED = (gymnasium.Env, gymnasium.vector.VectorEnv, RunningMeanStd)
ARRAY_KINDS = "biufcSUmM"
BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
SKIPPED = frozenset({"env_fns"})  # What made the environments: not read again.


class NotPlainError(Exception):
    """Something that may carry state is not plain data; the message says what and where."""


class MismatchError(Exception):
    """The objects to restore into are not built as those the snapshot was taken from."""


def take(root: Any) -> tuple[Any, Tensor]:
    """The data of `root` and the environments below it: (JSON-able tree, uint8 tensor with the arrays' bytes).

    Raises:
        NotPlainError: naming the first thing that is not plain data.
    """
    writer = _Writer()
    try:
        tree = writer.encode(root, type(root).__name__)
    except RecursionError:
        raise NotPlainError(f"{type(root).__name__} holds data nested too deeply") from None
    outside = next((where for key, where in writer.referred.items() if key not in writer.seen), None)
    if outside is not None:
        raise NotPlainError(f"{outside} refers to an environment outside the wrappers")
    return tree, torch.frombuffer(bytearray(b"".join(writer.chunks)) or bytearray(1), dtype=torch.uint8)


def restore(root: Any, tree: Any, arrays: Tensor) -> None:
    """Put the data that `take` returned into `root`, and leave it untouched where that fails.

    Raises:
        MismatchError: `root` is built otherwise.
    """
    reader = _Reader(arrays.cpu().numpy().tobytes())
    reader.decode(tree, root, type(root).__name__)
    for target, attributes in reader.pending:
        kept = {name: value for name, value in vars(target).items() if name in SKIPPED}
        vars(target).clear()
        vars(target).update(attributes, **kept)


def _label(value: Any) -> str:
    kind = value if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType) else type(value)
    return f"{kind.__module__}.{kind.__qualname__}"


def _random_sources(space: gymnasium.Space) -> list[gymnasium.Space]:
    """The space and those within it: each holds a generator of its own once something was sampled from it."""
    spaces = getattr(space, "spaces", ())
    children = spaces.values() if isinstance(spaces, dict) else spaces
    return [space, *(inner for child in children for inner in _random_sources(child))]


class _Writer:
    def __init__(self):
        self.chunks: list[bytes] = []
        self.size = 0
        self.seen: dict[int, int] = {}  # id -> its number, in the order of first sight
        self.alive: list[Any] = []  # so that no id is given out twice
        self.owners: dict[int, str] = {}  # id of the memory behind an array -> where it was met
        self.referred: dict[int, str] = {}
        self.functions: dict[int, types.FunctionType] = {}  # those looked into: one may hold itself

    def number(self, value: Any) -> int:
        self.alive.append(value)
        return self.seen.setdefault(id(value), len(self.seen))

    def encode(self, value: Any, where: str) -> Any:
        if value is None or type(value) in (bool, int, str):
            return value
        if type(value) is float:
            return value if math.isfinite(value) else ["float", repr(value)]
        if id(value) in self.seen:
            return ["same", self.seen[id(value)]]
        if type(value) is tuple:
            return ["tuple", [self.encode(x, f"{where}[{i}]") for i, x in enumerate(value)]]
        if type(value) is list:
            return ["list", self.number(value), [self.encode(x, f"{where}[{i}]") for i, x in enumerate(value)]]
        if type(value) is dict:
            number = self.number(value)
            pairs = [[self.encode(k, where), self.encode(v, f"{where}[{k!r}]")] for k, v in value.items()]
            return ["dict", number, pairs]
        if type(value) is deque:
            number = self.number(value)
            return ["deque", number, value.maxlen, [self.encode(x, where) for x in value]]
        if isinstance(value, np.generic):
            if value.dtype.kind not in ARRAY_KINDS:
                raise NotPlainError(f"{where} is a NumPy scalar of dtype {value.dtype}")
            return ["scalar", value.dtype.str, value.tobytes().hex()]
        if type(value) is np.ndarray:
            return self.array(value, where)
        if type(value) is bytes:
            return ["bytes", value.hex()]
        if type(value) is complex:
            return ["complex", self.encode(value.real, where), self.encode(value.imag, where)]
        if type(value) is np.random.Generator:
            return ["generator", self.number(value), self.encode(value.bit_generator, where)]
        if type(value) is np.random.RandomState:
            bits, state = value._bit_generator, value.get_state(legacy=False)
            return ["random_state", self.number(value), self.encode(bits, where), self.encode(state, where)]
        if isinstance(value, np.random.BitGenerator):
            return self.bits(value, where)
        if type(value) is np.random.SeedSequence:
            entropy = value.entropy if value.entropy is None or isinstance(value.entropy, int) else list(value.entropy)
            parents = [entropy, list(value.spawn_key), value.pool_size, value.n_children_spawned]
            return ["seeds", self.number(value), self.encode(parents, where)]
        if type(value) is random.Random:
            return ["random", self.number(value), self.encode(value.getstate(), where)]
        if isinstance(value, Enum):
            return ["enum", type(value).__module__, type(value).__qualname__, value.name]
        if isinstance(value, EnvSpec):
            return ["kept"]  # made when asked for, so it may be there or not
        if isinstance(value, gymnasium.Space):
            return self.space(value, where)
        if isinstance(value, WALKED):
            return self.object(value, where)
        self.require_constant(value, where)
        return ["constant", _label(value)]

    def array(self, value: np.ndarray, where: str) -> Any:
        if value.dtype.kind not in ARRAY_KINDS:
            raise NotPlainError(f"{where} is an array of dtype {value.dtype}")
        owner = value
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        if self.owners.setdefault(id(owner), where) != where:
            raise NotPlainError(f"{where} shares its memory with {self.owners[id(owner)]}")
        self.alive.append(owner)
        # The layout decides in which order a sum is taken, so it is kept.
        fortran = value.flags.f_contiguous and not value.flags.c_contiguous
        if not (fortran or value.flags.c_contiguous):
            raise NotPlainError(f"{where} is a view with gaps")
        data = value.tobytes(order="F" if fortran else "C")
        self.chunks.append(data)
        self.size += len(data)
        place = [self.size - len(data), len(data)]
        flags = ["F" if fortran else "C", bool(value.flags.writeable)]
        return ["array", self.number(value), value.dtype.str, list(value.shape), *place, *flags]

    def bits(self, value: np.random.BitGenerator, where: str) -> Any:
        name, seeds = type(value).__name__, value.seed_seq
        # RandomState(seed) seeds its MT19937 by itself, and leaves no sequence.
        if name not in BIT_GENERATORS or not (type(seeds) is np.random.SeedSequence or seeds is None):
            raise NotPlainError(f"{where} is a random generator of an unknown kind, {name}")
        return ["bits", self.number(value), name, self.encode(value.state, where), self.encode(seeds, where)]

    def space(self, value: gymnasium.Space, where: str) -> Any:
        sources = [getattr(space, "_np_random", None) for space in _random_sources(value)]
        return ["space", self.number(value), _label(value), [self.encode(s, f"{where}.np_random") for s in sources]]

    def object(self, value: Any, where: str) -> Any:
        number = self.number(value)
        slots = [slot for kind in type(value).__mro__ for slot in _slots(kind) if hasattr(value, slot)]
        if slots:
            raise NotPlainError(f"{where}.{slots[0]} is held in a slot")
        attributes = vars(value).items()
        tree = {name: self.encode(x, f"{where}.{name}") for name, x in attributes if name not in SKIPPED}
        return ["object", number, _label(value), tree]

    def require_constant(self, value: Any, where: str) -> None:
        """Let through what cannot change: types, and functions that hold on to nothing that can."""
        if isinstance(value, types.FunctionType):
            if id(value) in self.functions:
                return
            self.functions[id(value)] = value
            rebound = _rebound(value.__code__, value.__code__.co_freevars)
            if rebound is not None:
                raise NotPlainError(f"{where} is a function that changes its {rebound}")
            attributes = dict(vars(value))
            held = [attributes.pop("__wrapped__", None)]
            if attributes:
                raise NotPlainError(f"{where} is a function with an attribute, {next(iter(attributes))}")
            held += [content for cell in value.__closure__ or () for content in _content(cell)]
            held += [*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            for inner in held:
                self.require_held(inner, where)
        elif isinstance(value, types.MethodType | types.BuiltinFunctionType):
            if not isinstance(value.__self__, types.ModuleType):
                self.require_held(value.__self__, where)
        elif not isinstance(value, type | np.dtype | np.ufunc):
            raise NotPlainError(f"{where} is a {_label(value)}")

    def require_held(self, value: Any, where: str) -> None:
        if isinstance(value, gymnasium.Env | gymnasium.vector.VectorEnv):
            self.alive.append(value)
            self.referred.setdefault(id(value), where)
        elif type(value) is tuple:
            for inner in value:
                self.require_held(inner, where)
        elif not (value is None or isinstance(value, bool | int | float | str | np.generic | Enum | EnvSpec)):
            if isinstance(value, gymnasium.Space):
                if all(getattr(space, "_np_random", None) is None for space in _random_sources(value)):
                    return
                raise NotPlainError(f"{where} holds a space that was sampled from")
            self.require_constant(value, where)


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    names = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))


def _content(cell: types.CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # it is empty
        return ()


def _rebound(code: types.CodeType, names: tuple[str, ...]) -> str | None:
    """The first of `names`, variables of an enclosing function, that `code` or a function within assigns to."""
    for step in dis.get_instructions(code):
        if step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in names:
            return step.argval
    inner = (_rebound(part, names) for part in code.co_consts if isinstance(part, types.CodeType))
    return next((name for name in inner if name is not None), None)


_ABSENT = object()


class _Reader:
    def __init__(self, data: bytes):
        self.data = data
        self.made: dict[int, Any] = {}
        self.pending: list[tuple[Any, dict[str, Any]]] = []

    def decode(self, node: Any, existing: Any, where: str) -> Any:
        """The value of `node`; `existing` is what stands at its place in the objects restored into."""
        if not isinstance(node, list):
            return node
        tag, *rest = node
        handler: Callable[..., Any] | None = None if tag.startswith("_") else getattr(self, f"_{tag}", None)
        if handler is None:
            raise MismatchError(f"{where}: unknown kind of data {tag!r}")
        return handler(existing, where, *rest)

    def _float(self, _existing, _where, text):
        return float(text)

    def _complex(self, _existing, where, real, imag):
        return complex(self.decode(real, None, where), self.decode(imag, None, where))

    def _bytes(self, _existing, _where, text):
        return bytes.fromhex(text)

    def _same(self, _existing, _where, number):
        return self.made[number]

    def _tuple(self, existing, where, nodes):
        return tuple(self.items(existing, where, nodes))

    def _list(self, existing, where, number, nodes):
        self.made[number] = result = []
        result.extend(self.items(existing, where, nodes))
        return result

    def _deque(self, existing, where, number, maxlen, nodes):
        self.made[number] = result = deque(maxlen=maxlen)
        result.extend(self.items(existing, where, nodes))
        return result

    def items(self, existing, where, nodes):
        there = list(existing) if isinstance(existing, list | tuple | deque) else []
        there += [_ABSENT] * (len(nodes) - len(there))
        return [self.decode(x, there[i], f"{where}[{i}]") for i, x in enumerate(nodes)]

    def _dict(self, existing, where, number, pairs):
        self.made[number] = result = {}
        there = existing if isinstance(existing, dict) else {}
        for k, v in pairs:
            key = self.decode(k, None, where)
            result[key] = self.decode(v, there.get(key, _ABSENT), f"{where}[{key!r}]")
        return result

    def _scalar(self, _existing, where, dtype, text):
        return np.frombuffer(bytes.fromhex(text), self.dtype(dtype, where))[0]

    def _array(self, _existing, where, number, dtype, shape, start, size, order, writeable):
        data = np.frombuffer(self.data[start : start + size], self.dtype(dtype, where))
        self.made[number] = result = data.reshape(shape, order=order).copy(order=order)
        result.flags.writeable = writeable
        return result

    def dtype(self, text: str, where: str) -> np.dtype:
        dtype = np.dtype(text)
        if dtype.kind not in ARRAY_KINDS:
            raise MismatchError(f"{where}: dtype {text!r} is not plain data")
        return dtype

    def _generator(self, _existing, where, number, bits):
        self.made[number] = result = np.random.Generator(self.decode(bits, None, where))
        return result

    def _random_state(self, _existing, where, number, bits, state):
        self.made[number] = result = np.random.RandomState(self.decode(bits, None, where))
        result.set_state(self.decode(state, None, where))
        return result

    def _bits(self, _existing, where, number, name, state, seeds):
        if name not in BIT_GENERATORS:
            raise MismatchError(f"{where}: unknown random generator {name!r}")
        state, seeds = self.decode(state, None, where), self.decode(seeds, None, where)
        made = np.random.RandomState(0)._bit_generator if seeds is None else getattr(np.random, name)(seeds)
        made.state = state
        self.made[number] = made
        return made

    def _seeds(self, _existing, where, number, parents):
        entropy, spawn_key, pool_size, n_children = self.decode(parents, None, where)
        self.made[number] = result = np.random.SeedSequence(
            entropy, spawn_key=tuple(spawn_key), pool_size=pool_size, n_children_spawned=n_children
        )
        return result

    def _random(self, _existing, where, number, state):
        self.made[number] = result = random.Random()
        result.setstate(self.decode(state, None, where))
        return result

    def _enum(self, _existing, where, module, qualname, name):
        kind: Any = sys.modules.get(module)
        for part in qualname.split("."):
            kind = getattr(kind, part, None)
        if not (isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__):
            raise MismatchError(f"{where}: {module}.{qualname}.{name} is not an enumeration's member here")
        return kind[name]

    def _kept(self, existing, _where):
        return None if existing is _ABSENT else existing

    def _constant(self, existing, where, label):
        self.require(existing, where, label)
        return existing

    def _space(self, existing, where, number, label, nodes):
        self.require(existing, where, label)
        spaces = _random_sources(existing)
        if len(spaces) != len(nodes):
            raise MismatchError(f"{where}: the space has {len(spaces)} parts, the snapshot's {len(nodes)}")
        for space, node in zip(spaces, nodes, strict=True):
            generator = self.decode(node, None, f"{where}.np_random")
            self.pending.append((space, {**vars(space), "_np_random": generator}))
        self.made[number] = existing
        return existing

    def _object(self, existing, where, number, label, attributes):
        self.require(existing, where, label)
        if not isinstance(existing, WALKED):
            raise MismatchError(f"{where}: {label} is not an environment or wrapper")
        self.made[number] = existing
        there = vars(existing)
        result: dict[str, Any] = {}
        self.pending.append((existing, result))
        for name, node in attributes.items():
            result[name] = self.decode(node, there.get(name, _ABSENT), f"{where}.{name}")
        return existing

    def require(self, existing: Any, where: str, label: str) -> None:
        found = "nothing" if existing is _ABSENT else _label(existing)
        if found != label:
            raise MismatchError(f"{where}: the snapshot has a {label}, here is {found}")

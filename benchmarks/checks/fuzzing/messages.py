"""Messages that a hostile client sends: built by their descriptors, from what it knows and from what should not be."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

_BOUNDS = {
    FieldDescriptor.TYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.TYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_SINT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.TYPE_UINT64: (0, (1 << 64) - 1),
    FieldDescriptor.TYPE_ENUM: (-(1 << 31), (1 << 31) - 1),
}
_INTEGERS = (0, 1, 2, 3, 4, 7, 15, 16, 17, 255, 256, 1000, 65_535, 65_536, 1 << 20, 1 << 31, 1 << 40, 1 << 62, -1, -7)
_DOUBLES = (0.0, -0.0, 1.0, -1.0, 0.001, 3600.0, 5e-324, 1e308, -1e308, float("nan"), float("inf"), float("-inf"))
_STRINGS = ("", "0", "nobody", "a" * 300, "\0", "ä☃\n\r\t", "%s%n%x", "../../etc/passwd", "'; DROP", "f" * 32, "0000")
_LONG, _GIANT = 20_000, 262_144
_FEW = (0, 1, 2, 3, 4, 5, 7, 8, 16, 17, 64)


@dataclass(slots=True)
class World:
    """What a hostile client knows, by the name of the field that takes it; the first value of each is right."""

    known: dict[str, list[Any]] = field(default_factory=dict)

    def learn(self, name: str, value: Any, *, right: bool = False) -> None:
        """Something new; `right`: what a valid message has from now on."""
        values = self.known.setdefault(name, [])
        values.insert(0 if right else len(values), value)
        del values[32:]


def build(kind: Descriptor, rng: random.Random, world: World, wildness: float) -> Any:
    """A message in which each field is wrong with probability `wildness`, and else as a well-behaved client has it."""
    made = GetMessageClass(kind)()
    for choice in kind.oneofs:
        options = [option for option in choice.fields if option.name in world.known or option.message_type]
        right = options if options and rng.random() >= wildness else list(choice.fields)
        if rng.random() >= wildness / 4:
            _fill(made, rng.choice(right), rng, world, wildness)
    for entry in kind.fields:
        if entry.containing_oneof is None:
            _fill(made, entry, rng, world, wildness)
    return made


def corrupt(raw: bytes, rng: random.Random) -> bytes:
    """What a broken or hostile encoder makes of a message."""
    damaged = bytearray(raw)
    for _ in range(rng.choice((1, 1, 2, 8))):
        where = rng.randrange(len(damaged) + 1)
        match rng.randrange(6):
            case 0 if damaged:
                damaged[where % len(damaged)] = rng.randrange(256)
            case 1:
                del damaged[where:]
            case 2:
                damaged[where:where] = rng.randbytes(rng.choice((1, 2, 9, 200)))
            case 3:
                damaged += damaged[:4096]
            case 4:  # a field of any number and kind, with a length that may be absurd
                damaged += bytes([rng.randrange(256), rng.choice((0, 1, 127, 255)), rng.randrange(256)])
            case _:
                damaged[where : where + 4] = b"\xff\xfe\xc0\x80"  # no UTF-8, where it meets a string
    return bytes(damaged)


def _known(entry: FieldDescriptor, world: World) -> list[Any]:
    """What there is for a field of this name and type."""
    kind: Any
    if entry.message_type is not None:
        kind = GetMessageClass(entry.message_type)
    else:
        kind = (str, bytes, int, list) if entry.is_repeated else (type(entry.default_value), list)
    return [value for value in world.known.get(entry.name, ()) if isinstance(value, kind)]


def _fill(made: Any, entry: FieldDescriptor, rng: random.Random, world: World, wildness: float) -> None:
    wild = rng.random() < wildness
    known = _known(entry, world)
    if not wild and not known and entry.message_type is None:
        return  # its default is right
    if entry.is_repeated:
        getattr(made, entry.name).extend(_values(entry, rng, world, wildness, wild))
    elif entry.message_type is None:
        setattr(made, entry.name, _value(entry, rng, world, wildness, wild))
    else:
        target = getattr(made, entry.name)
        target.CopyFrom(_value(entry, rng, world, wildness, wild))
        if known and not wild and rng.random() < wildness:
            spoilt = rng.choice(target.DESCRIPTOR.fields)
            target.ClearField(spoilt.name)
            _fill(target, spoilt, rng, world, 1.0)


def _values(entry: FieldDescriptor, rng: random.Random, world: World, wildness: float, wild: bool) -> list[Any]:
    known = _known(entry, world)
    if not wild and known:
        return known[0] if isinstance(known[0], list) else known[:1]
    count = rng.choice((0, 1, 1, 2, 5)) if rng.random() < 0.98 else rng.choice((1025, 5000))
    return [_value(entry, rng, world, wildness, wild) for _ in range(count)]


def _value(entry: FieldDescriptor, rng: random.Random, world: World, wildness: float, wild: bool) -> Any:
    known = _known(entry, world)
    if known and (not wild or rng.random() < 0.5):
        picked = rng.choice(known) if wild else known[0]
        return picked if not isinstance(picked, list) else rng.choice(picked or [""])
    if entry.message_type is not None:
        return build(entry.message_type, rng, world, wildness)
    match entry.type:
        case FieldDescriptor.TYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.TYPE_DOUBLE:
            return rng.choice(_DOUBLES)
        case FieldDescriptor.TYPE_STRING:
            return _text(rng)
        case FieldDescriptor.TYPE_BYTES:
            return _bytes(rng)
    low, high = _BOUNDS[entry.type]
    return min(max(rng.choice((*_INTEGERS, low, high)), low), high)


def _text(rng: random.Random) -> str:
    if rng.random() < 0.02:
        return rng.choice("aä☃0") * _LONG
    return rng.choice(_STRINGS) if rng.random() < 0.7 else rng.randbytes(rng.choice((2, 4, 16))).hex()


def _bytes(rng: random.Random) -> bytes:
    """Token ids of any number, whole or not; a salt; an id."""
    if rng.random() < 0.01:
        return rng.randbytes(4) * _GIANT
    return rng.randbytes(4 * rng.choice(_FEW) + rng.choice((0, 0, 0, 1, 2, 3)))

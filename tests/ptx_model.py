"""A model of the PTX that the Hopper kernels write by hand, for the few instructions that they use: it runs on 128 threads
at once, one after another in text order, over byte arrays for shared and global memory."""

import re

import numpy as np

THREADS = 128
LANES = np.arange(THREADS)


def bits(x):
    return np.asarray(x, np.float32).view(np.uint32).astype(np.int64)


def real(x):
    return (np.asarray(x) & 0xFFFFFFFF).astype(np.uint32).view(np.float32)


def to_bf16(x):
    """fp32 to the 16 bits of the nearest bf16, ties to even."""
    u = np.asarray(x, np.float32).view(np.uint32).astype(np.int64)
    nan = (u & 0x7FFFFFFF) > 0x7F800000
    return np.where(nan, 0x7FFF, ((u + 0x7FFF + ((u >> 16) & 1)) >> 16) & 0xFFFF)


class Machine:
    """`run` executes a text. `names` gives what its operands hold: ints, or arrays with a value per thread."""

    def __init__(self, shared, memory):
        self.shared, self.memory = shared, memory  # uint8
        self.prefetched = []  # addresses, by instruction
        self.arrived = []  # lanes on which copies have arrived, by instruction

    def run(self, text, names):
        self.registers = {k: np.broadcast_to(np.asarray(v, np.int64), THREADS).copy() for k, v in names.items()}
        self.registers |= {"%tid.x": LANES.copy()}
        body = text.strip().removeprefix("{").removesuffix("}")
        for statement in (s.strip() for s in body.replace("\n", " ").split(";")):
            if statement[:1] in ("{", "}"):  # of an inner scope, whose names are unique
                statement = statement.lstrip("{} ")
            if statement and not statement.startswith(".reg"):
                self._step(statement)

    def _step(self, statement):
        active = np.ones(THREADS, bool)
        if statement.startswith("@"):
            predicate, statement = statement[1:].split(None, 1)
            active = self.registers[predicate.lstrip("!")].astype(bool) ^ predicate.startswith("!")
        name, rest = statement.split(None, 1)
        operands = [o.strip() for o in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)]
        kind = name.split(".")
        if kind[0] in ("ld", "st"):
            return self._move(kind, operands, active)
        if kind[:3] == ["cp", "async", "mbarrier"]:
            return self.arrived.append(int(active.sum()))
        if kind[0] == "cp":
            return self._copy(*operands, active)
        if kind[0] == "prefetch":
            return self.prefetched.append(set(self.registers[operands[0].strip("[]")][active].tolist()))
        if kind[0] in ("stmatrix", "ldmatrix"):
            return self._matrices(kind[0], *operands[:: 1 if kind[0] == "stmatrix" else -1])
        target, *sources = operands
        value = self._compute(kind, [self._value(o, kind) for o in sources])
        old = self.registers.get(target, np.zeros(THREADS, np.int64))
        self.registers[target] = np.where(active, value, old)

    def _value(self, operand, kind):
        if operand.startswith("0f"):
            return np.full(THREADS, int(operand[2:], 16), np.int64)
        if re.fullmatch(r"-?(0x)?[0-9a-f]+", operand) and operand not in self.registers:
            return np.full(THREADS, int(operand, 0), np.int64)
        return self.registers[operand]

    def _compute(self, kind, v):
        op, last = kind[0], kind[-1]
        if last == "f32" and op in ("add", "sub", "mul", "fma", "neg"):
            f = [real(x).astype(np.float64) for x in v]  # a product of two fp32 is exact in fp64
            with np.errstate(all="ignore"):
                result = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
                          "fma": lambda a, b, c: a * b + c, "neg": lambda a: -a}[op](*f)  # fmt: skip
            return bits(result.astype(np.float32))
        mask = 0xFFFFFFFF if last.endswith("32") else -1
        if op == "cvt":
            if "bf16x2" in kind:
                return to_bf16(real(v[0])) << 16 | to_bf16(real(v[1]))
            return v[0]
        if op == "selp":
            return np.where(v[2].astype(bool), v[0], v[1])
        if op == "mad":
            return v[0] * v[1] + v[2]
        if op == "setp":
            a, b = v
            if last == "s32":
                a, b = ((x & 0xFFFFFFFF).astype(np.uint32).view(np.int32) for x in v)
            return {"lt": a < b, "ge": a >= b, "ne": a != b, "eq": a == b, "gt": a > b}[kind[1]]
        return {"mov": lambda a: a, "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "and": lambda a, b: a & b,
                "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "shl": lambda a, b: a << b,
                "shr": lambda a, b: a >> b}[op](*v) & mask  # fmt: skip

    def _copy(self, to, at, size, active):
        """From memory to shared memory."""
        places = []
        for address in (to, at):
            base, _, offset = address.strip("[]").partition("+")
            start = self.registers[base.strip()] + int(offset or 0)
            assert not (start[active] % int(size)).any(), "a copy is not aligned"
            places.append((start[:, None] + np.arange(int(size)))[active])
        self.shared[places[0]] = self.memory[places[1]]

    def _move(self, kind, operands, active):
        where = self.shared if "shared" in kind else self.memory
        size = int(kind[-1][1:]) // 8
        registers, address = operands if kind[0] == "ld" else operands[::-1]
        names = [n.strip() for n in registers.strip("{}").split(",")]
        base, _, offset = address.strip("[]").partition("+")
        at = self.registers[base.strip()] + int(offset or 0)
        assert not (at[active] % (size * len(names))).any(), f"{kind} is not aligned"
        for i, name in enumerate(names):
            places = (at + i * size)[:, None] + np.arange(size)
            if kind[0] == "st":
                words = self.registers[name].astype(np.uint64).view(np.uint8).reshape(THREADS, 8)[:, :size]
                where[places[active]] = words[active]
            else:
                words = np.zeros((THREADS, 8), np.uint8)
                words[active, :size] = where[places[active]]
                old = self.registers.get(name, np.zeros(THREADS, np.int64))
                self.registers[name] = np.where(active, words.view(np.int64)[:, 0], old)

    def _matrices(self, name, address, registers):
        """x4: lane l of a warp has the address of row l % 8 of matrix l / 8, and of each matrix two values of row l / 4."""
        names = [n.strip() for n in registers.strip("{}").split(",")]
        base, _, offset = address.strip("[]").partition("+")
        at = (self.registers[base.strip()] + int(offset or 0)).reshape(4, 32)
        if name == "ldmatrix":
            self.registers |= {n: np.zeros(THREADS, np.int64) for n in names}
        for warp in range(4):
            for lane in range(32):
                for matrix, register in enumerate(names):
                    place = at[warp, 8 * matrix + lane // 4] + 4 * (lane % 4)
                    if name == "ldmatrix":
                        word = self.shared[place : place + 4].view(np.uint32)[0]
                        self.registers[register][32 * warp + lane] = word
                    else:
                        word = np.uint32(self.registers[register][32 * warp + lane])
                        self.shared[place : place + 4] = np.frombuffer(word.tobytes(), np.uint8)


def unswizzled(data):
    pieces = data.view(np.uint16).reshape(2, 64, 8, 8)
    out = np.zeros((64, 2, 8, 8), np.uint16)
    for row in range(64):
        for piece in range(8):
            out[row, :, piece] = pieces[:, row, piece ^ (row & 7)]
    return out.reshape(64, 128)

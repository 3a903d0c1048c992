"""A model of the PTX that the Hopper kernels write by hand, for the few instructions that they use: it runs on 128 threads
at once, one after another in text order, over byte arrays for shared and global memory. Branches go forward only. Stores
by TMA are noted, a warp's barriers and fences passed over."""

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


def pair_of(words, kind):
    """The two 16-bit values of a register, in fp32: the lower first."""
    halves = [np.asarray(words) >> shift & 0xFFFF for shift in (0, 16)]
    if kind == "bf16":
        return [real(h << 16) for h in halves]
    return [h.astype(np.uint16).view(np.float16).astype(np.float32) for h in halves]


def to_fp16(x):
    with np.errstate(over="ignore"):
        return np.asarray(x, np.float32).astype(np.float16).view(np.uint16).astype(np.int64)


class Machine:
    """`run` executes a text. `names` gives what its operands hold: ints, or arrays with a value per thread."""

    def __init__(self, shared, memory):
        self.shared, self.memory = shared, memory  # uint8
        self.arrived = []  # lanes on which copies have arrived, by instruction
        self.tiles = []  # (thread, operands) of every store by TMA

    def run(self, text, names):
        self.registers = {k: np.broadcast_to(np.asarray(v, np.int64), THREADS).copy() for k, v in names.items()}
        self.registers |= {"%tid.x": LANES.copy()}
        self.beyond = {}  # label -> the threads that have branched to it
        body = text.strip().removeprefix("{").removesuffix("}")
        target = None  # of a jump forward
        for statement in (s.strip() for s in body.replace("\n", " ").split(";")):
            if statement[:1] in ("{", "}"):  # of an inner scope, whose names are unique
                statement = statement.lstrip("{} ")
            label, colon, after = statement.partition(":")
            if colon and label.isidentifier() and after[:1] != ":":
                target, statement = None if label == target else target, after.strip()
                self.beyond.pop(label, None)
            if target is not None:
                continue
            if "bra.uni" in statement:
                target = self._jump(*statement.split())
            elif statement and not statement.startswith(".reg"):
                self._step(statement)

    def _jump(self, predicate, _, label):
        """The label, if all threads jump."""
        active = self.registers[predicate.lstrip("@!")].astype(bool) ^ predicate.startswith("@!")
        assert active.all() or not active.any()
        return label if active[0] else None

    def _step(self, statement):
        active = np.ones(THREADS, bool)
        if statement.startswith("@"):
            predicate, statement = statement[1:].split(None, 1)
            active = self.registers[predicate.lstrip("!")].astype(bool) ^ predicate.startswith("!")
        for gone in self.beyond.values():
            active = active & ~gone
        name, _, rest = statement.partition(" ")
        if name == "bra":
            self.beyond[rest] = self.beyond.get(rest, False) | active
            return None
        if name.startswith("cp.async.bulk.tensor"):
            at = [self.registers[r] for r in re.findall(r"%?\w+", rest)]
            self.tiles += [(thread, *(int(a[thread]) for a in at)) for thread in np.flatnonzero(active)]
            return None
        if name.startswith(("cp.async.bulk", "fence", "bar.warp", "cvta")):
            return None
        operands = [o.strip() for o in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", rest)]
        kind = name.split(".")
        if kind[0] == "wgmma":  # at once: nothing waits
            return self._product(kind, operands) if kind[1] == "mma_async" else None
        if kind[0] in ("ld", "st"):
            return self._move(kind, operands, active)
        if kind[:3] == ["cp", "async", "mbarrier"]:
            return self.arrived.append(int(active.sum()))
        if kind[0] == "cp":
            return self._copy(*operands, active)
        if kind[0] in ("stmatrix", "ldmatrix"):
            return self._matrices(kind, *operands[:: 1 if kind[0] == "stmatrix" else -1])
        if kind[0] in ("shfl", "vote"):
            source, *more = (self._value(o, kind) for o in operands[1:])
            return self._among_lanes(kind, operands[0], source, more, active)
        target, *sources = operands
        if target.startswith("{"):  # mov of two halves
            value = self.registers[sources[0]]
            for i, part in enumerate(target.strip("{}").split(",")):
                self.registers[part.strip()] = value >> 16 * i & 0xFFFF
            return None
        value = self._compute(kind, [self._value(o, kind) for o in sources])
        old = self.registers.get(target, np.zeros(THREADS, np.int64))
        self.registers[target] = np.where(active, value, old)

    def _value(self, operand, kind):
        if operand.startswith("{"):  # two halves of a word
            low, high = (self._value(o.strip(), kind) for o in operand.strip("{}").split(","))
            return low & 0xFFFF | (high & 0xFFFF) << 16
        if operand.startswith("0f"):
            return np.full(THREADS, int(operand[2:], 16), np.int64)
        if re.fullmatch(r"-?(0x)?[0-9a-f]+", operand) and operand not in self.registers:
            return np.full(THREADS, int(operand, 0), np.int64)
        return self.registers[operand]

    def _compute(self, kind, v):
        op, last = kind[0], kind[-1]
        if last == "f32" and op in ("add", "sub", "mul", "fma"):
            f = [real(x).astype(np.float64) for x in v]  # a product of two fp32 is exact in fp64
            with np.errstate(all="ignore"):
                result = {"add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b,
                          "fma": lambda a, b, c: a * b + c}[op](*f)  # fmt: skip
            return bits(result.astype(np.float32))
        mask = 0xFFFFFFFF if last.endswith("32") else -1
        if op == "cvt":
            if "bf16x2" in kind:
                return to_bf16(real(v[0])) << 16 | to_bf16(real(v[1]))
            if "f16x2" in kind:
                return to_fp16(real(v[0])) << 16 | to_fp16(real(v[1]))
            if "bf16" in kind:
                return to_bf16(real(v[0])) if last == "f32" else v[0] << 16
            return bits(pair_of(v[0], "fp16")[0]) if kind[1:] == ["f32", "f16"] else v[0]
        if last == "f32" and op in ("rsqrt", "neg"):
            return bits(-real(v[0]) if op == "neg" else 1 / np.sqrt(real(v[0])))
        if last == "bf16x2":  # a product is exact in fp64, and its sum with a third close enough
            f = zip(*(pair_of(x, "bf16") for x in v))
            low, high = (to_bf16(np.float64(a) * b + sum(map(np.float64, c))) for a, b, *c in f)
            return high << 16 | low
        if op == "bfe":
            return v[0] >> v[1] & (1 << v[2]) - 1
        if "wide" in kind:
            return v[0] * v[1]
        if op == "selp":
            return np.where(v[2].astype(bool), v[0], v[1])
        if op == "mad":
            return v[0] * v[1] + v[2]
        if op == "setp":
            a, b, *more = v
            if last == "s32":
                a, b = ((x & 0xFFFFFFFF).astype(np.uint32).view(np.int32) for x in (a, b))
            if last == "f32":
                a, b = real(a), real(b)
            found = {"lt": a < b, "ge": a >= b, "ne": a != b, "eq": a == b, "gt": a > b}[kind[1]]
            return found & more[0].astype(bool) if "and" in kind else found
        return {"mov": lambda a: a, "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "and": lambda a, b: a & b,
                "or": lambda a, b: a | b, "xor": lambda a, b: a ^ b, "shl": lambda a, b: a << b,
                "shr": lambda a, b: a >> b}[op](*v) & mask  # fmt: skip

    def _among_lanes(self, kind, target, source, more, active):
        assert (active.reshape(4, 32) == active[::32, None]).all(), "a warp's lanes shuffle and vote together"
        if kind[0] == "vote":
            value = np.repeat(source.reshape(4, 32).astype(bool).any(1), 32)
        else:
            lane, bound = more[0], more[1]
            held = bound >> 8 & 31  # bits of a lane's number that stay
            lane = LANES ^ lane if "bfly" in kind else LANES & ~31 | LANES & held | lane & ~held
            value = source[lane]
        self.registers[target] = np.where(active, value, self.registers.get(target, np.zeros(THREADS, np.int64)))

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

    def _product(self, kind, operands):
        """64 rows from registers times 16 rows of shared memory, in panels of 64 columns with 128-byte swizzling."""
        acc, a = ([n.strip() for n in group.strip("{}").split(",")] for group in operands[:2])
        descriptor, more = int(self.registers[operands[2]][0]), bool(self.registers[operands[3]][0])
        assert operands[4:] == ["1", "1", "1"] and descriptor >> 62 == 1
        start, panel, group = (16 * (descriptor >> shift & 0x3FFF) for shift in (0, 16, 32))
        row, column = np.ogrid[:16, : 2 * len(acc)]
        at = start + column // 64 * panel + row // 8 * group + row % 8 * 128
        at = at + (column % 64 // 8 ^ row % 8) * 16 + column % 8 * 2
        x = pair_of(self.shared.view(np.uint16)[at // 2].astype(np.int64), "bf16" if "bf16" in kind else "fp16")[0]
        p, lane = np.zeros((64, 16)), LANES % 32
        for i, name in enumerate(a):
            for half, value in enumerate(pair_of(self.registers[name], "bf16" if "bf16" in kind else "fp16")):
                p[16 * (LANES // 32) + lane // 4 + 8 * (i & 1), 2 * (lane % 4) + half + 8 * (i >> 1)] = value
        result = p @ x.astype(np.float64)
        for i, name in enumerate(acc):
            value = result[16 * (LANES // 32) + lane // 4 + 8 * (i >> 1 & 1), 2 * (lane % 4) + (i & 1) + 8 * (i >> 2)]
            self.registers[name] = bits(value + real(self.registers[name]) if more else value)

    def _matrices(self, kind, address, registers):
        """x4: lane l of a warp has the address of row l % 8 of matrix l / 8, and of each matrix two values of row l / 4;
        of column l / 4 if it comes transposed."""
        name = kind[0]
        names = [n.strip() for n in registers.strip("{}").split(",")]
        base, _, offset = address.strip("[]").partition("+")
        at = (self.registers[base.strip()] + int(offset or 0)).reshape(4, 32)
        if name == "ldmatrix":
            self.registers |= {n: np.zeros(THREADS, np.int64) for n in names}
        for warp in range(4):
            for lane in range(32):
                for matrix, register in enumerate(names):
                    place = at[warp, 8 * matrix + lane // 4] + 4 * (lane % 4)
                    if "trans" in kind:
                        rows = at[warp, 8 * matrix + 2 * (lane % 4) + np.arange(2)] + lane // 4 * 2
                        low, high = (int(self.shared[r : r + 2].view(np.uint16)[0]) for r in rows)
                        self.registers[register][32 * warp + lane] = high << 16 | low
                    elif name == "ldmatrix":
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

"""What instructions of the cpu virtual machine cost, in nanoseconds on a slow core: bounds and shares of a step are counted in it."""

from __future__ import annotations

from collections.abc import Sequence

from pie_core.codegen.cpu_code import CHUNK, Instruction
from pie_core.codegen.cpu_source import opcodes
from pie_core.codegen.schedule import SMALL_SORT
from pie_core.eta.program import Node, Program
from pie_core.eta.rules import elements

# Bound of a lane's work: for so long the device's thread, and in the page the engine's worker, does nothing else, and everybody's token
# waits.
MAX_WORK = 400_000_000
CALL = 8  # an instruction on a chunk, however short
ROW = 40  # a row of a reduction, whose three parts start anew
HISTOGRAMS = 1_800  # a row whose masses need histograms: three of 2,048 sums are cleared and walked
RANKS = 400  # the same of counts
SORT = 60  # a row that is sorted
PLACE = 60  # a place of a short top_k
# Nanoseconds on four elements, where they are not 1: measured with arguments that are slow.
OP_COSTS = {
    "exp": 6, "log": 9, "neg_log": 9, "tanh": 11, "sin": 8, "cos": 8, "sqrt": 2, "rsqrt": 3, "recip": 2,
    "rng_uniform": 8, "rng_gumbel": 26, "rng_normal": 40,
    "view": 16, "gather": 20, "gather_rows": 50, "gather_row": 20, "mask_apply": 4, "pivot": 4,
}  # fmt: skip
TYPED_COSTS = {("rem", "f32"): 10, ("div", "i32"): 7, ("div", "u32"): 7, ("rem", "i32"): 7, ("rem", "u32"): 7}


def _costs() -> dict[int, int]:
    return {opcode: TYPED_COSTS.get(key, OP_COSTS.get(key[0], 1)) for key, opcode in opcodes().items()}


_BY_OPCODE = _costs()


def op_cost(node: Node) -> int:
    """Nanoseconds of an op on four elements."""
    return TYPED_COSTS.get((node.name, node.dtype), OP_COSTS.get(node.name, 1))


def block_work(block: Sequence[Instruction], rows: int, n: int) -> int:
    """Of a loop's instructions over `rows` rows of `n` elements."""
    each = sum(_BY_OPCODE[instruction[0]] for instruction in block)
    return rows * (each * -(-n // 4) + CALL * len(block) * -(-n // CHUNK))


def skeleton_work(program: Program, node: Node) -> int:
    """Of a skeleton."""
    shapes = [program.ops[a].shape for a in node.args]
    n = elements(shapes[0])
    rows = n // shapes[0][-1]
    match node.name:
        case "sort_desc":
            return 20 * n + SORT * rows
        case "top_k":
            return 20 * n + SORT * rows if node.shape[-1] > SMALL_SORT else 8 * n + (RANKS + PLACE * node.shape[-1]) * rows
        case "pivot_rank":
            return 6 * n + RANKS * rows
        case "pivot_mass":
            return 6 * n + HISTOGRAMS * rows
        case "matmul":
            columns = shapes[1][1]
            return n * (columns // 4 + columns % 4) + 10 * rows
        case "scatter_add" | "scatter_set":
            return n + 14 * elements(shapes[2])
    return 2 * n

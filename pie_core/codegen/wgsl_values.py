"""Values of an epilogue as WGSL expressions: lane words, loads from memory, scalars at function scope, elements inside loops."""

from __future__ import annotations

from collections.abc import Callable

from pie_core.codegen.access import access
from pie_core.codegen.layout import ROW
from pie_core.codegen.schedule import Place, Schedule, scalar_args, scalar_key, scalar_order
from pie_core.codegen.wgsl_index import grouped, modulo, over, view_index
from pie_core.codegen.wgsl_writer import Writer, constant, note_of, plus, region_value, value_name, value_of
from pie_core.eta.ops import OPS, variant
from pie_core.eta.program import Node
from pie_core.eta.rules import elements

ZERO = {"f32": "0.0", "i32": "0i", "u32": "0u", "bool": "false"}


class Values(Writer):
    """The body of one kernel over a schedule. `head` holds lets that depend on the lane table alone: they stand at the top of main, so
    that any line below may use them. `phase`: the phase whose loops and skeletons are being written."""

    def __init__(self, plan: Schedule) -> None:
        super().__init__()
        self.plan = plan
        self.phase = 0
        self.head: list[str] = []
        self.uses: set[str] = {"lanes", "results"}
        self.scalars: dict[tuple[int, int], str] = {}  # (value, element) -> name
        self._heads: dict[str, str] = {}  # expression -> name
        self._seeds: dict[int, str] = {}
        self._pivots: dict[int, tuple[str, str]] = {}
        self._pivot_words = {s.id: s.result[0] for p in plan.phases for s in p.skeletons if OPS[plan.node(s.id).name].kind == "pivot"}

    # What the lane table says

    def top(self, expr: str, wish: str) -> str:
        """The name of an expression over the lane table, computed at the top of main."""
        if expr not in self._heads:
            self._heads[expr] = self.name(wish, outer=True)
            self.head.append(f"  let {self._heads[expr]} = {expr};")
        return self._heads[expr]

    def lane(self, word: int) -> str:
        """Name of lane word `word`."""
        return self.top(f"lanes[{plus('lane', f'{word}u')}]", f"lane_{self.plan.layout.name(word)}")

    def base(self, place: Place, node: Node) -> str:
        """Index of a place's first element in its region."""
        self.uses.add(place.region)
        if place.region == "scratch":
            return plus("mine", f"{place.word}u")
        if place.region == "arena":
            return self.lane(place.word)
        row = f"lanes[{plus('lane', f'{ROW}u')}]"
        row = f"({row} + {place.word}u)" if place.word else row
        return self.top(f"{row} * {node.shape[-1]}u", f"{place.region}_{place.word}")

    def load(self, place: Place, node: Node, index: str) -> str:
        """The element of a value in memory."""
        return region_value(place.region, plus(self.base(place, node), index), node.dtype)

    def memory(self, value: int, index: str) -> str:
        """Element `index` of a value that lies in memory."""
        value = self.plan.resolve(value)
        place = self.plan.loads(value, self.phase)
        if place is None:
            raise AssertionError(f"%{value} is read at other elements in phase {self.phase}, but it is not in memory")
        return self.load(place, self.plan.node(value), index)

    # Scalars: emitted where first needed, at function scope

    def scalar(self, value: int, element: int = 0) -> str:
        """Name of element `element` of a value (0 for a scalar), as a function-scope let."""
        key = scalar_key(self.plan, value, element)
        for step in scalar_order(self.plan, *key, self.scalars, self.phase):
            node = self.plan.node(step[0])
            name = value_name(step[0], node, step[1] if node.shape else None)
            self.scalars[step] = self.let(self._scalar_expr(*step), name, note_of(step[0], node))
        return self.scalars[key]

    def _scalar_expr(self, value: int, element: int) -> str:
        plan, node = self.plan, self.plan.node(value)
        if node.name == "param":
            return value_of(self.lane(plan.layout.param(int(node.attrs["slot"]))), node.dtype)
        if node.name == "const":
            return constant(int(node.attrs["bits"]), node.dtype)
        self._special(value)

        def operand(position: int) -> str:
            arg = node.args[position]
            return self.scalar(arg, element if access(plan.program, value, position) == "same" else 0)

        return self.element(value, f"{element}u", operand)

    def prepare(self, value: int) -> None:
        """Emit what a vector value needs at function scope before its loop starts."""
        for arg, element in scalar_args(self.plan, value, self.phase):
            self.scalar(arg, element)
        if self.plan.loads(value, self.phase) is None:
            self._special(value)

    def _special(self, value: int) -> None:
        node = self.plan.node(value)
        if self.plan.loads(value, self.phase) is not None:
            return
        if node.name.startswith("rng_") and value not in self._seeds:
            key, counter = self.scalar(node.args[0], 0), self.scalar(node.args[0], 1)
            self._seeds[value] = self.let(f"rng_seed({key}, {counter})", f"seed_{value}")
        elif value in self._pivot_words and len(node.shape) == 1 and value not in self._pivots:
            self.uses.add("scratch")
            word = self._pivot_words[value]
            least = self.let(f"scratch[{plus('mine', f'{word}u')}]", f"least_{value}", f"least key kept of %{value}")
            last = self.let(f"scratch[mine + {word + 1}u]", f"last_{value}", "last index kept of those equal to it")
            self._pivots[value] = least, last

    # Elements

    def element(self, value: int, index: str, operand: Callable[[int], str]) -> str:
        """Expression of one element of a value; `operand(position)` is an operand's value there (or its scalar)."""
        plan, node = self.plan, self.plan.node(value)
        place = plan.loads(value, self.phase)
        if place is not None:
            return self.load(place, node, index)
        spec = OPS[node.name]
        if spec.kind == "generator":
            return str(variant(node.name, (), node.dtype, spec.wgsl).format(self._seeds.get(value, ""), i=index))
        if spec.kind == "view":
            return self._view(value, node, index, operand)
        if spec.kind == "lookup":
            return self._lookup(value, node, index, operand)
        if spec.kind == "pivot":
            return self._pivot(value, node, index, operand(0))
        dtypes = tuple(plan.program.ops[a].dtype for a in node.args)
        code = variant(node.name, dtypes, node.dtype, spec.wgsl)
        if node.name == "sub" and node.dtype == "f32" and plan.resolve(node.args[0]) == plan.resolve(node.args[1]):
            # Compilers take x - x for 0, which it is not for NaN and infinities; they do not look through the bits.
            return f"{operand(0)} + {variant('neg', dtypes, 'f32', OPS['neg'].wgsl).format(operand(1))}"
        return str(code.format(*[operand(position) for position in range(len(node.args))]))

    def _view(self, value: int, node: Node, index: str, operand: Callable[[int], str]) -> str:
        if access(self.plan.program, value, 0) != "memory":
            return operand(0)
        source = self.plan.program.ops[node.args[0]].shape
        return self.memory(node.args[0], view_index(node.name, index, source, node.shape))

    def _lookup(self, value: int, node: Node, index: str, operand: Callable[[int], str]) -> str:
        program = self.plan.program
        if node.name == "mask_apply":
            column = index if len(node.shape) == 1 else grouped(modulo(index, node.shape[-1]))
            word = self.memory(node.args[1], f"({column} >> 5u)")
            return f"mask_apply({operand(0)}, {word}, {column})"
        table, where = program.ops[node.args[0]], program.ops[node.args[1]]
        if node.name == "gather_row":
            rows, inner, first = table.shape[1], 1, f"{grouped(index)} * {table.shape[1]}u + "
        else:
            rows, inner, first = table.shape[0], elements(table.shape[1:]), ""
        apart = access(program, value, 1) == "memory"
        at = self.memory(node.args[1], grouped(over(index, inner))) if apart else operand(1)
        at = f"bitcast<u32>({at})" if where.dtype == "i32" else at
        inside = f"min({at}, {rows - 1}u)"
        element = f"{first}{inside}" if inner == 1 else f"{inside} * {inner}u + {modulo(grouped(index), inner)}"
        return f"select({ZERO[node.dtype]}, {self.memory(node.args[0], element)}, {at} < {rows}u)"

    def _pivot(self, value: int, node: Node, index: str, x: str) -> str:
        if value in self._pivots:
            least, last = self._pivots[value]
            return f"kept({x}, {least}, {last}, {index})"
        self.uses.add("scratch")
        n = node.shape[-1]
        at = f"mine + {self._pivot_words[value]}u + 2u * {grouped(over(index, n))}"
        return f"kept({x}, scratch[{at}], scratch[{at} + 1u], {modulo(index, n)})"

"""A Jinja environment for templates that came with a model file: no side effects, and time, text and structure bounded.

Jinja's sandbox keeps a template from reaching Python; it does not keep it from running for hours or filling memory. Here every loop
and macro body starts with a `tick` that ends the render when its time is over, and whatever can make a value larger than what it was
made from (operators, concatenation, literals, calls, filters, output) is measured before or as it happens.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any, Final

from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_context
from jinja2.visitor import NodeTransformer

from pie_core.text.stream import TextError

MAX_TEXT: Final = 4_000_000  # characters of one string
MAX_WORK: Final = 64_000_000  # characters of all strings made by one render
MAX_NODES: Final = 200_000  # values in one list or object, nested ones counted as often as they occur
MAX_BITS: Final = 10_000  # of an integer
MAX_FIELD: Final = 1_000  # width in a format or an indent

STRING_METHODS: Final = frozenset({
    "capitalize", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdecimal", "isdigit", "islower", "isnumeric",
    "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind",
    "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
})  # fmt: skip
METHODS: Final[dict[type, frozenset[str]]] = {
    str: STRING_METHODS,
    dict: frozenset({"get", "items", "keys", "values"}),
    list: frozenset({"count", "index"}),
    tuple: frozenset({"count", "index"}),
    int: frozenset(),
    float: frozenset({"is_integer"}),
}
# Jinja's filters that cannot enlarge what they are given; those that can have checked versions in this module.
PLAIN_FILTERS: Final = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "forceescape", "groupby", "int",
    "items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "safe", "select",
    "selectattr", "sort", "title", "trim", "unique", "upper",
)  # fmt: skip
_WIDE_FIELD: Final = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{4})")


def _clock() -> Callable[[], float]:
    """CPU time of the thread, so that a busy machine stops no honest template; wall time where there is none, as in a browser."""
    try:
        time.thread_time()
    except (AttributeError, OSError):
        return time.perf_counter
    return time.thread_time


_cpu_seconds: Final = _clock()


class TemplateError(TextError):
    """A chat template is invalid, over a limit, or failed on these messages."""


class TemplateRefused(TemplateError):
    """The template itself rejected the messages, by its `raise_exception`."""


class Budget:
    """What one render may still use. `seconds` is CPU time of the rendering thread."""

    __slots__ = ("deadline", "seconds", "work")

    def __init__(self, seconds: float) -> None:
        self.seconds, self.deadline, self.work = seconds, _cpu_seconds() + seconds, MAX_WORK

    def tick(self) -> None:
        if _cpu_seconds() > self.deadline:
            raise TemplateError(f"the chat template ran longer than {self.seconds:g} s and was stopped")

    def charge(self, characters: int) -> None:
        """Account for a string of `characters` that is made now."""
        self.work -= characters
        if characters > MAX_TEXT or self.work < 0:
            raise TemplateError(
                f"the chat template makes a string of {characters} characters; {MAX_TEXT} are allowed, {MAX_WORK} for all strings together",
                too_long=True,
            )


_budget: ContextVar[Budget | None] = ContextVar("template_budget", default=None)


def _current() -> Budget:
    budget = _budget.get()
    if budget is None:  # constant folding at compile time, which is off; a fresh allowance keeps any such call bounded
        budget = Budget(1.0)
    return budget


def measure(value: object, *, printable: bool = False) -> int:
    """The characters that printing `value` takes, about. Raises TemplateError over MAX_NODES values, and, when `printable`, for a
    value that is not JSON: others could print without bound."""
    budget, characters, count, stack = _current(), 0, 0, [value]
    while stack:
        item = stack.pop()
        count += 1
        if count > MAX_NODES:
            raise TemplateError(f"the chat template makes a list or object of more than {MAX_NODES} values")
        if count % 1000 == 0:
            budget.tick()
        if isinstance(item, str):
            characters += len(item) + 2
        elif isinstance(item, int):
            if item.bit_length() > MAX_BITS:
                raise TemplateError(f"the chat template makes a number of {item.bit_length()} bits; {MAX_BITS} are allowed")
            characters += item.bit_length() // 3 + 2
        elif isinstance(item, list | tuple):
            stack.extend(item)
        elif isinstance(item, dict):
            stack.extend(item)
            stack.extend(item.values())
        elif printable and not (item is None or isinstance(item, float | Undefined)):
            raise TemplateError(f"the chat template prints a value of type {type(item).__name__}")
        else:
            characters += 24
    return characters


def text_of(value: object) -> str:
    """`str(value)`, measured and charged."""
    budget = _current()
    if not isinstance(value, str):
        budget.charge(measure(value, printable=True))
        return str(value)
    budget.charge(len(value))
    return value


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False, separators: Any = None, sort_keys: bool = False) -> str:
    if indent is not None and not 0 <= indent <= 16:
        raise TemplateError(f"the chat template asks for an indent of {indent}; 0 to 16 are allowed")
    measure(value, printable=True)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, default=_no_json)
    budget, parts = _current(), []
    for part in encoder.iterencode(value):
        budget.charge(len(part))
        parts.append(part)
    return "".join(parts)


def _no_json(value: object) -> None:
    raise TemplateError("the chat template uses tojson on an undefined value")


def _join(values: Any, separator: str = "", attribute: str | None = None) -> str:
    parts, size, budget = [], 0, _current()
    for value in values:
        item = value.get(attribute, "") if attribute is not None and isinstance(value, Mapping) else value
        parts.append(text_of(item))
        size += len(parts[-1]) + len(separator)
        budget.tick()
        if size > MAX_TEXT:
            break
    budget.charge(size)
    return separator.join(parts)


def _replace(value: object, old: object, new: object, count: int | None = None) -> str:
    text, old_text, new_text = text_of(value), text_of(old), text_of(new)
    found = text.count(old_text) if count is None or count < 0 else min(count, text.count(old_text))
    _current().charge(len(text) + found * max(0, len(new_text) - len(old_text)))
    return text.replace(old_text, new_text, -1 if count is None else count)


def _indent(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    lead = width if isinstance(width, str) else " " * min(max(width, 0), MAX_FIELD + 1)
    if len(lead) > MAX_FIELD:
        raise TemplateError(f"the chat template indents by {len(lead)} characters or more; {MAX_FIELD} are allowed")
    lines = text_of(text).split("\n")
    _current().charge(len(lines) * len(lead))
    return "\n".join(lead + line if (line or blank) and (first or at) else line for at, line in enumerate(lines))


def _round(value: Any, precision: int = 0, method: str = "common") -> float:
    if not -20 <= precision <= 20:
        raise TemplateError(f"the chat template rounds to {precision} places; -20 to 20 are allowed")
    return float(FILTERS["round"](value, precision, method))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 200 or re.search(r"\d{3}", pattern):
        raise TemplateError(f"the chat template asks for a time format of {len(pattern)} characters or a wide field")
    return time.strftime(pattern)


def _raise_exception(message: object) -> None:
    raise TemplateRefused(f"the chat template refused the messages: {text_of(message)}")


class _Generation(Extension):
    """`{% generation %}` marks what a model wrote, for training; here it only lets its body through."""

    tags = {"generation"}  # noqa: RUF012 (Jinja reads a plain class attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """See the module's text. One environment serves many threads; the budget of a render is a context variable."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        # No constant folding: it would run operators and filters while a template is loaded.
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, finalize=_finalize, extensions=[loopcontrols, _Generation])
        own = {"tojson": _to_json, "join": _join, "replace": _replace, "indent": _indent, "round": _round, "string": text_of}
        self.filters = {name: _checked(FILTERS[name]) for name in PLAIN_FILTERS}
        self.filters |= {**own, "sum": self._sum, "format": lambda text, *args: self._operate("%", text, args)}
        limited_range = self.globals["range"]
        self.globals = {"range": limited_range, "namespace": Namespace, "dict": dict}
        self.globals |= {"strftime_now": _strftime_now, "raise_exception": _raise_exception}

    def load(self, source: str) -> tuple[Any, nodes.Template]:
        """Parse and compile `source`: (the template, its syntax tree). Raises what Jinja and the Python compiler raise."""
        tree = self.parse(source)
        code = self.compile(_Instrument(self).visit(tree))
        return self.template_class.from_code(self, code, self.make_globals(None)), tree

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        for kind, names in METHODS.items():
            if isinstance(obj, kind):
                return attr in names
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """Never wrapped: `is_safe_attribute` refuses str.format, whose field widths are unbounded."""

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        return self._operate(operator, left, right)

    def _operate(self, sign: str, left: Any, right: Any) -> Any:
        budget = _current()
        if sign == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                    if len(sequence) * max(times, 0) > (MAX_TEXT if isinstance(sequence, str) else MAX_NODES):
                        raise TemplateError(f"the chat template repeats {len(sequence)} items {times} times, which is over the limit")
                    break
            else:
                _check_number(left, right, sign)
        elif sign == "**":
            _check_number(left, right, sign)
        elif sign == "%" and isinstance(left, str):
            if _WIDE_FIELD.search(left):
                raise TemplateError(f"the chat template formats with a field wider than {MAX_FIELD - 1}")
            budget.charge(len(left) + measure(right, printable=True) + left.count("%") * MAX_FIELD)
        elif sign == "+" and isinstance(left, str) and isinstance(right, str):
            budget.charge(len(left) + len(right))
            return left + right
        return _grown(self.binop_table[sign](left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            if __obj.__name__ == "replace":
                return _replace(owner, *args, **kwargs)
            if __obj.__name__ == "join" and len(args) == 1:
                return _join(args[0], owner)
        return _grown(super().call(__context, __obj, *args, **kwargs))

    def _sum(self, values: Any, attribute: str | None = None, start: Any = 0) -> Any:
        total = start
        for value in values:
            total = self._operate("+", total, value[attribute] if attribute is not None else value)
        return total

    # Called by instrumented templates.
    def tick(self) -> str:
        _current().tick()
        return ""

    def charge(self, characters: int) -> str:
        _current().charge(characters)
        return ""

    def concat_checked(self, *values: Any) -> str:
        return "".join(map(text_of, values))

    def literal(self, value: Any) -> Any:
        return _grown(value)


@pass_context
def _finalize(context: Context, value: Any) -> str:
    """Every `{{ … }}` passes here. Taking the context keeps Jinja from calling it on constants at compile time."""
    return text_of(value)


def _check_number(left: Any, right: Any, sign: str) -> None:
    if isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 1) if sign == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_BITS:
            raise TemplateError(f"the chat template computes a number of {bits} bits; {MAX_BITS} are allowed")


def _grown(value: Any) -> Any:
    """Check a value that was just made; iterators are made to tick."""
    if isinstance(value, str):
        _current().charge(len(value))
    elif isinstance(value, list | tuple | dict):
        measure(value)
    elif isinstance(value, Iterator) and not hasattr(value, "index0"):  # not the loop variable
        return _ticking(value)
    return value


def _ticking(values: Iterator[Any]) -> Iterator[Any]:
    for value in values:
        _current().tick()
        yield value


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _current().tick()
        return _grown(function(*args, **kwargs))

    return wrapper


class _Instrument(NodeTransformer):
    """Puts the checks into a syntax tree: ticks into bodies, a charge before static text, checked concatenation and literals."""

    def __init__(self, environment: TemplateSandbox) -> None:
        self.environment = environment

    def _call(self, at: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Call:
        node = nodes.Call(nodes.EnvironmentAttribute(name), list(args), [], None, None, lineno=at.lineno)
        node.set_environment(self.environment)
        return node

    def _body(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(self._call(node, "tick"), lineno=node.lineno).set_environment(self.environment))
        return node  # type: ignore[no-any-return]

    visit_For = visit_Macro = visit_CallBlock = _body

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        static = sum(len(part.data) for part in node.nodes if isinstance(part, nodes.TemplateData))
        if static:
            node.nodes.insert(0, self._call(node, "charge", nodes.Const(static, lineno=node.lineno)))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._call(node, "concat_checked", *node.nodes)

    def _literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node, nodes.Tuple) and node.ctx != "load":
            return node
        return self._call(node, "literal", node)

    visit_List = visit_Dict = visit_Tuple = _literal


def run(seconds: float, body: Callable[[Budget], str]) -> str:
    """Call `body` with a fresh budget in force."""
    budget = Budget(seconds)
    token = _budget.set(budget)
    try:
        return body(budget)
    finally:
        _budget.reset(token)

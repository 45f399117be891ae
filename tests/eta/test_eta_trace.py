"""The tracer: what an author writes, what is recorded, and how mistakes are told."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import dataclass
from typing import Any

import pytest

from pie_core import eta
from pie_core.eta import (
    FUNCTIONS,
    OPS,
    Model,
    Program,
    ProgramError,
    Tensor,
    Trace,
    TraceError,
    intrinsics,
    is_tracing,
    trace_epilogue,
)
from pie_core.eta.dtypes import bits_f32, f32_bits
from pie_core.eta.tracing import tracing

MODEL = Model(vocab=100, hidden=16)
F = FUNCTIONS


@dataclass(eq=False)
class Chan:
    """What a trace needs of a channel, with the methods authors call."""

    dtype: str = "f32"
    shape: tuple[int, ...] = ()
    capacity: int = 1
    is_counter: bool = False

    def take(self) -> Tensor:
        return eta.channel.take(self)

    def read(self) -> Tensor:
        return eta.channel.read(self)

    def put(self, value: Any) -> None:
        eta.channel.put(self, value)


def names(program: Program) -> list[str]:
    return [n.name for n in program.ops]


def test_greedy_is_two_ops() -> None:
    traced = trace_epilogue(lambda: F["reduce_argmax"](intrinsics.output(0, "logits")), MODEL)
    assert traced.program.text == (
        '{"chans":[],"ops":[["output",[],{"index":0,"name":"logits"},"f32",[100]],["reduce_argmax",[0],{},"i32",[]]],'
        '"outs":[1],"params":[],"stage":"epilogue","v":1}'
    )
    assert traced.single and traced.params == () and traced.channels == ()
    assert traced.program.reads == 1 and traced.program.width("logits") == 100 and traced.program.width("hidden") is None


def test_temperatures_share_one_program() -> None:
    rng = Chan("u32", (2,), is_counter=True)

    def at(t: float) -> Any:
        return trace_epilogue(lambda: F["gumbel_max"](intrinsics.output(0, "logits") / t, rng.take()), MODEL)

    a, b = at(0.7), at(0.8)
    assert a.program == b.program and a.program.hash == b.program.hash and hash(a.program) == hash(b.program)
    assert a.params == (f32_bits(0.7),) and b.params == (f32_bits(0.8),)
    assert a.channels == (rng,)
    assert names(a.program)[:4] == ["take", "iota", "add", "put"], "the counter advances by state + iota(2)"
    (effect,) = a.program.effects
    assert (effect.first, effect.takes, effect.puts) == ("take", 1, 1)


def test_a_counter_taken_twice_gives_two_states() -> None:
    rng = Chan("u32", (2,), is_counter=True)
    traced = trace_epilogue(lambda: (F["uniform"](rng.take(), 3), F["uniform"](rng.take(), 3)), MODEL)
    (effect,) = traced.program.effects
    assert (effect.takes, effect.puts) == (1, 1) and not traced.single
    assert effect.put == max(i for i, n in enumerate(traced.program.ops) if n.name == "add")


OPERATORS = [
    (lambda x: x + 1, "add"), (lambda x: 1 + x, "add"), (lambda x: x - 1, "sub"), (lambda x: 1 - x, "sub"), (lambda x: x * 2, "mul"),
    (lambda x: 2 * x, "mul"), (lambda x: x / 0.7, "div"), (lambda x: 1 / x, "div"), (lambda x: x % 2, "rem"), (lambda x: 2 % x, "rem"),
    (lambda x: -x, "neg"), (abs, "abs"), (lambda x: x > 0, "gt"), (lambda x: x < 0, "lt"),
    (lambda x: x >= 0, "ge"), (lambda x: x <= 0, "le"), (lambda x: x == 0, "eq"), (lambda x: x != 0, "ne"),
    (lambda x: (x > 0) & (x < 1), "and"), (lambda x: (x > 0) | True, "or"), (lambda x: ~(x > 0), "not"),
    (lambda x: x.cast("i32"), "cast"), (lambda x: x.cast("i32") // 2, "div"),
    (lambda x: 7 // x.cast("u32"), "div"), (lambda x: True & (x > 0), "and"), (lambda x: False | (x > 0), "or"),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "name"), OPERATORS)
def test_operators(fn: Any, name: str) -> None:
    traced = trace_epilogue(lambda: fn(intrinsics.output(0)), MODEL)
    assert traced.program.ops[traced.program.outs[0]].name == name
    assert traced.program.out_types[0][1] == (100,)
    assert Program.parse(traced.program.text) == traced.program


def test_operand_order_is_kept() -> None:
    program = trace_epilogue(lambda: 1.0 - intrinsics.output(0), MODEL).program
    sub = program.ops[program.outs[0]]
    assert [program.ops[a].name for a in sub.args] == ["param", "output"]


def test_constants_take_the_dtype_beside_them() -> None:
    traced = trace_epilogue(lambda: (intrinsics.output(0) * 2, F["reduce_argmax"](intrinsics.output(0)) + -1), MODEL)
    assert traced.program.params == ("f32", "i32") and traced.params == (f32_bits(2.0), 0xFFFFFFFF)
    special = trace_epilogue(lambda: intrinsics.output(0) * float("-inf") + float("inf"), MODEL)
    assert [bits_f32(w) for w in special.params] == [float("-inf"), float("inf")]


def test_constants_that_mean_something_are_left_alone() -> None:
    def fn() -> Any:
        x = intrinsics.output(0)
        i = F["reduce_argmax"](x)
        return x / float("inf"), x / 1.2e-38, 0.0 / x, x + float("-inf"), F["select"](x > 0, x, float("nan")), 0 // i, i - i

    assert len(trace_epilogue(fn, MODEL).program.outs) == 7


def test_the_same_row_is_one_value_and_unused_ops_go() -> None:
    def fn() -> Any:
        x = intrinsics.output(0)
        _ = F["exp"](x) * 3.0
        return F["reduce_max"](intrinsics.output(0)) + 2.0

    traced = trace_epilogue(fn, MODEL)
    assert names(traced.program) == ["output", "reduce_max", "param", "add"]
    assert traced.params == (f32_bits(2.0),), "parameters of removed ops go with them"
    assert Program.parse(traced.program.text) == traced.program


def test_effects_are_never_removed() -> None:
    chan, out = Chan(), Chan("i32")

    def fn() -> None:
        chan.take()
        out.put(F["reduce_argmax"](intrinsics.output(0)))

    traced = trace_epilogue(fn, MODEL)
    assert names(traced.program) == ["take", "output", "reduce_argmax", "put"] and traced.program.outs == () and not traced.single
    assert [e.first for e in traced.program.effects] == ["take", "put"]


def test_a_take_after_a_put_sees_the_pending_value_and_the_last_put_wins() -> None:
    chan = Chan()

    def fn() -> Any:
        chan.put(1.0)
        chan.put(2.0)
        return chan.read()

    traced = trace_epilogue(fn, MODEL)
    (effect,) = traced.program.effects
    assert (effect.first, effect.takes, effect.puts, effect.uses_cell, effect.put) == ("put", 0, 1, False, 2)

    def drained() -> Any:
        chan.put(1.0)
        return chan.take()

    assert trace_epilogue(drained, MODEL).program.effects[0].puts == 0, "a value taken again is not committed"


def test_put_broadcasts_scalars_and_checks_types() -> None:
    chan = Chan("u32", (4,))
    assert names(trace_epilogue(lambda: chan.put(3), MODEL).program) == ["param", "broadcast", "put"]
    with pytest.raises(TraceError, match=r"channel holds u32\[4\], the value is f32\[100\]"):
        trace_epilogue(lambda: chan.put(intrinsics.output(0)), MODEL)


def bad_bool() -> Any:
    if intrinsics.output(0) > 0:
        return intrinsics.output(0)
    return None


async def bad_async() -> Any:
    await asyncio.sleep(0)


def a_generator() -> Any:
    yield intrinsics.output(0)


def a_tensor_in_a_loop() -> Any:
    x = F["reduce_max"](intrinsics.output(0))
    while x > 0:
        x = x - 1.0
    return x


class Later:
    """As an output of a pass."""

    def __await__(self) -> Any:
        yield


LATER = Later()
CHAN = Chan()
COUNTER = Chan("u32", (2,), is_counter=True)
MISTAKES = [
    (bad_bool, r"use select\(cond, a, b\) instead of if"),
    (lambda: int(F["reduce_argmax"](intrinsics.output(0))), "has no value while it is traced"),
    (lambda: float(intrinsics.output(0)), "has no value while it is traced"),
    (lambda: list(range(10))[F["reduce_argmax"](intrinsics.output(0))], "has no value"),
    (lambda: list(intrinsics.output(0)), "cannot be looped over"),
    (lambda: F["reduce_max"](intrinsics.output(0))[0], "a scalar cannot be indexed"),
    (lambda: intrinsics.output(0) + intrinsics.output(0, "hidden"), r"add operand shapes \[100\] and \[16\] differ"),
    (lambda: intrinsics.output(0) + F["iota"](100), r"operand dtypes differ: f32\[100\] and u32\[100\]; cast"),
    (lambda: F["iota"](4) / 2, "use // for integers"),
    (lambda: intrinsics.output(0) // 2, "use / for f32"),
    (lambda: F["iota"](4) * 0.5, r"mul: a float constant cannot be combined with a u32 tensor \(use cast"),
    (lambda: intrinsics.output(0) / 0.0, r"div: a division by 0 gives infinities or NaN; .* reduce_argmax"),
    (lambda: intrinsics.output(0) / 0, "div: a division by 0 gives"),
    (lambda: intrinsics.output(0) / -0.0, "div: a division by 0 gives"),
    (lambda: F["div"](1.0, F["constant"](0.0, "f32")), "div: a division by 0 gives"),
    (lambda: intrinsics.output(0) % 0.0, "rem: a division by 0 gives"),
    (lambda: intrinsics.output(0) / 1e-45, "div: a division by 1.4e-45, which devices may take as 0, gives infinities or NaN"),
    (lambda: intrinsics.output(0) / -1e-39, "div: a division by -1e-39, which devices"),
    (lambda: intrinsics.output(0) / float("nan"), "div: a constant is NaN, which makes every element NaN"),
    (lambda: intrinsics.output(0) * float("nan"), "mul: a constant is NaN"),
    (lambda: float("nan") - intrinsics.output(0), "sub: a constant is NaN"),
    (lambda: F["iota"](4) - -1, "sub: constant -1 does not fit u32"),
    (lambda: intrinsics.output(0) + True, "bool constant cannot be combined with a f32"),
    (lambda: intrinsics.output(0) + "x", "str constant"),
    (lambda: F["exp"](F["iota"](4)), r"exp takes f32, got u32\[4\]; cast"),
    (lambda: F["exp"](intrinsics.output(0), 1), "exp takes 1 operand, got 2"),
    (lambda: ~intrinsics.output(0), r"logical_not takes bool, got f32\[100\]; compare it first"),
    (lambda: F["reduce_sum"](F["reduce_sum"](intrinsics.output(0))), r"reduce_sum works along the last axis, got the scalar f32\[\]"),
    (lambda: F["select"](intrinsics.output(0), 1.0, 2.0), "select takes a bool condition"),
    (lambda: F["cast"](intrinsics.output(0), "f16"), "cast knows the dtypes f32, i32, u32, bool, not 'f16'"),
    (lambda: F["constant"](1, "f64"), "constant knows the dtypes"),
    (lambda: F["gumbel_max"](intrinsics.output(0), F["iota"](3)), r"takes a state u32\[2\] = \[key, counter\], got u32\[3\]"),
    (
        lambda: F["gumbel_max"](intrinsics.output(0), Chan("u32", (2,), is_counter=True)),
        r"rng_gumbel takes a state u32\[2\], got Chan; .*take",
    ),
    (lambda: F["exp"](CHAN), r"exp takes Tensors and Python numbers, got Chan; \.take\(\) gives its value"),
    (lambda: F["uniform"](7, 3), r"rng_uniform takes a state u32\[2\], got int"),
    (lambda: F["cast"](3, "f32"), r"cast takes a Tensor, got int; constant\(x, dtype\) makes a scalar one"),
    (lambda: F["exp"]([3.0]), "exp: a list constant cannot be combined with a f32 tensor"),
    (lambda: F["softmax"](F["iota"](4)), r"softmax takes f32 \[n\] or \[m, n\], got u32\[4\]"),
    (lambda: F["softmax"](3.0), "softmax takes a Tensor, got float"),
    (lambda: F["iota"](0), "a shape has at most 4 extents of 1 or more"),
    (lambda: F["iota"](10**9), "elements"),
    (lambda: F["broadcast"](intrinsics.output(0), 4), r"broadcast repeats f32\[100\] over \[4\]: extents are compared from the left"),
    (lambda: F["reshape"](intrinsics.output(0), (3, 3)), "keeps the number of elements"),
    (lambda: intrinsics.output(0, "attention"), "knows the names logits, hidden, not 'attention'"),
    (lambda: intrinsics.output(-1), "read-out row, 0 or more, got -1"),
    (lambda: intrinsics.outputs("logits"), r"call .read\(positions\) before .epilogue\(fn\), or use intrinsics.output\(i, 'logits'\)"),
    (lambda: 3, "returns Tensors, got int"),
    (lambda: (intrinsics.output(0), None), "returns Tensors, got NoneType"),
    (bad_async, "plain function, not async"),
    (lambda: [intrinsics.output(0)] * 65, "at most 64 tensors, got 65"),
    (lambda: CHAN.read() * 0 + CHAN.take() + CHAN.take(), "took the channel's value already"),
    (lambda: (CHAN.read(), CHAN.put(1.0)), "take it instead of read"),
    (lambda: Chan("u32", (2,), is_counter=True).read(), "a counter is taken, not read"),
    (lambda: Chan("u32", (2,), is_counter=True).put(1), "a counter advances by itself"),
    (lambda: Chan("f32", (1 << 21,)).take(), "over 1048576 elements"),
    (lambda: [Chan().take() for _ in range(33)], "at most 32 channels"),
    (lambda: sum(intrinsics.output(0) * float(i) for i in range(300)), "more than 256 scalar constants"),
    (lambda: [F["iota"](i + 1) for i in range(1100)], "more than 1024 ops"),
    (lambda: trace_epilogue(lambda: intrinsics.output(0), MODEL), "cannot be traced inside another"),
    # Python
    (lambda: 0 < intrinsics.output(0) < 1, r"\(0 < x\) & \(x < 1\) instead of 0 < x < 1"),
    (lambda: not (intrinsics.output(0) > 0), "& | ~ instead of and, or, not"),
    (lambda: max(intrinsics.output(0), 0.0), r"maximum\(a, b\) and minimum\(a, b\) instead of max\(a, b\)"),
    (a_tensor_in_a_loop, r"use select\(cond, a, b\) instead of if"),
    (lambda: range(F["reduce_argmax"](intrinsics.output(0))), "has no value while it is traced"),
    (
        lambda: math.exp(intrinsics.output(0)),
        r"exp\(x\), log\(x\) and so on of this language take Tensors where those of math take numbers",
    ),
    (lambda: round(intrinsics.output(0)), r"x\.cast\('i32'\) cuts off towards 0"),
    (lambda: math.floor(intrinsics.output(0)), r"x\.cast\('i32'\) cuts off towards 0"),
    (lambda: math.ceil(intrinsics.output(0)), r"x\.cast\('i32'\) cuts off towards 0"),
    (lambda: f"{intrinsics.output(0)}", r"nothing to format: await the output and format that; \{x!r\} shows dtype and shape"),
    (lambda: f"{F['reduce_max'](intrinsics.output(0)):.2f}", "nothing to format"),
    (lambda: F["iota"](4) << 1, r"<< and >> are not there: x \* 2 and x // 2"),
    (lambda: 1 >> F["iota"](4), "<< and >> are not there"),
    (lambda: divmod(F["iota"](4), 2), r"divmod is not there: x // y and x % y"),
    (lambda: F["iota"](4) // 0, "div: a division of integers by 0 gives nothing but 0"),
    (lambda: F["reduce_argmax"](intrinsics.output(0)) % 0, "rem: a division of integers by 0 gives nothing but 0"),
    (lambda: intrinsics.output(0) + [1.0] * 100, r"list constant .*; values enter through Channel\.of\(values\) and \.take\(\)"),
    # channels where their values belong
    (lambda: F["softmax"](CHAN), r"softmax takes a Tensor, got Chan; \.take\(\) gives its value"),
    (lambda: F["reshape"](CHAN, 1), r"reshape takes a Tensor, got Chan; \.take\(\) gives its value"),
    (lambda: F["top_p"](intrinsics.output(0), CHAN), r"top_p: p is a number or a Tensor of f32, got Chan; \.take\(\) gives its value"),
    (lambda: F["top_k_mask"](intrinsics.output(0), CHAN), r"top_k_mask: k is an int of 1 or more, got Chan; \.take\(\)"),
    (lambda: CHAN.put(CHAN), r"put: the channel holds f32\[\], the value is a Chan; .*\.take\(\) gives its value"),
    (lambda: CHAN, r"returns Tensors, got Chan; return what its \.take\(\) gave"),
    # what would have been awaited
    (lambda: intrinsics.output(0) + LATER, r"add takes Tensors and Python numbers, got Later; await it before the pass is made"),
    (lambda: F["top_p"](intrinsics.output(0), LATER), "got Later; await it before"),
    (lambda: F["softmax"](LATER), "got Later; await it before"),
    # arguments
    (lambda: F["cast"](intrinsics.output(0), [[1]]), "cast takes a dtype by name, 'f32', 'i32', 'u32', 'bool', got list"),
    (lambda: F["constant"](1, [[1]]), "constant knows the dtypes"),
    (lambda: F["top_p"](intrinsics.output(0), "0.9"), "top_p: p is a number or a Tensor of f32, got str"),
    (lambda: F["top_p"](intrinsics.output(0), None), "top_p: p is a number or a Tensor of f32, got nothing"),
    (lambda: F["min_p"](intrinsics.output(0), True), "min_p: p is a number or a Tensor of f32, got bool"),
    (lambda: F["typical"](intrinsics.output(0), "x"), "typical: mass is a number or a Tensor of f32, got str"),
    (lambda: F["sample"](intrinsics.output(0), COUNTER.take(), "hot"), "sample: temperature is a number or a Tensor of f32, got str"),
    (lambda: F["sample"](intrinsics.output(0), COUNTER.take(), None), "sample: temperature is a number or a Tensor of f32, got nothing"),
    (lambda: F["top_k_mask"](intrinsics.output(0), F["reduce_max"](intrinsics.output(0))), r"scalar Tensor of i32 or u32, got f32\[\]"),
    (
        lambda: F["pivot_threshold"](intrinsics.output(0), rank=F["reduce_max"](intrinsics.output(0))),
        r"pivot_threshold takes rank= as an int or a scalar Tensor of i32 or u32, got f32\[\]",
    ),
    (lambda: F["repetition_penalty"](intrinsics.output(0), F["iota"](100), 0), "repetition_penalty: penalty is over 0"),
    (
        lambda: F["reduce_sum"](intrinsics.output(0), axis=-1),
        "reduce_sum takes operands by position alone, got axis=; it works along the last",
    ),
    (lambda: F["iota"](5.0), "iota takes a shape as an int or a tuple of ints, got float"),
    (lambda: F["reshape"](intrinsics.output(0), None), "reshape takes a shape as an int or a tuple of ints, got NoneType"),
    (lambda: F["iota"](F["reduce_argmax"](intrinsics.output(0))), "iota: shapes are fixed while a program is traced"),
    (lambda: F["constant"](0.5, "i32"), r"constant: 0\.5 \(float\) is not i32; cast\(x, dtype\) converts a Tensor"),
    (lambda: Chan("i32").put(0.5), r"put: the channel holds i32\[\], the value is 0\.5 \(float\)"),
    (lambda: Chan("u32").put(-1), r"put: the channel holds u32\[\], the value is -1 \(int\)"),
    (lambda x: x, "an epilogue is a function without parameters, it reads intrinsics and channels; this one has x"),
    # results
    (lambda: {"token": intrinsics.output(0)}, "returns Tensors, got dict; return a tuple and name its outputs where the pass is made"),
    (lambda: (intrinsics.output(0), (intrinsics.output(0),)), "returns Tensors, got tuple; return one flat tuple"),
    (lambda: intrinsics.output(0).shape[0], r"returns Tensors, got int; constant\(x, dtype\) makes one"),
    (lambda: (intrinsics.output(0), None), "got NoneType; leave out what is None"),
    (a_generator, "returns Tensors, got generator; return a Tensor, a tuple of them, or nothing"),
]


@pytest.mark.parametrize(("fn", "message"), MISTAKES)
def test_mistakes_are_told_in_the_authors_terms(fn: Any, message: str) -> None:
    with pytest.raises(TraceError, match=message):
        trace_epilogue(fn, MODEL)
    assert not is_tracing(), "a failed trace leaves nothing behind"


ATTRIBUTES = [
    (lambda x: x.sum(), r"no attribute 'sum': reduce_sum\(x\)"), (lambda x: x.argmax(-1), r"reduce_argmax\(x\)"),
    (lambda x: x.softmax(-1), r"softmax is a function, softmax\(x\)"), (lambda x: x.T, r"transpose\(x\)"),
    (lambda x: x.item(), "await the output"), (lambda x: x.astype("f32"), "cast"),
    (lambda x: x.device, r"no attribute 'device': it has dtype, shape and cast\(dtype\), all else are functions"),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "message"), ATTRIBUTES)
def test_what_is_an_attribute_elsewhere_is_told_as_a_function(fn: Any, message: str) -> None:
    with pytest.raises(AttributeError, match=message):
        trace_epilogue(lambda: fn(intrinsics.output(0)), MODEL)


def test_a_function_with_defaults_needs_no_arguments() -> None:
    assert trace_epilogue(lambda t=0.7: intrinsics.output(0) / t, MODEL).params == (f32_bits(0.7),)


def test_an_error_is_raised_at_the_authors_line() -> None:
    def author() -> Any:
        x = intrinsics.output(0)
        return x + F["iota"](100)  # the wrong line

    with pytest.raises(TraceError) as caught:
        trace_epilogue(author, MODEL)
    lines = [entry.lineno - author.__code__.co_firstlineno for entry in caught.traceback if entry.frame.code.name == "author"]
    assert [int(n) + 1 for n in lines] == [2]


def test_outside_of_a_trace_and_across_traces() -> None:
    with pytest.raises(TraceError, match="only there inside a function given to"):
        intrinsics.output(0)
    with pytest.raises(TraceError, match="exp is only there"):
        F["exp"](1.0)
    with pytest.raises(TraceError, match="epilogue takes a function, got Tensor"):
        trace_epilogue(kept_tensor(), MODEL)  # type: ignore[arg-type]
    kept = kept_tensor()
    with pytest.raises(TraceError, match="tensor of another trace"):
        trace_epilogue(lambda: intrinsics.output(0) + kept, MODEL)
    with pytest.raises(TraceError, match="tensor of another trace"):
        trace_epilogue(lambda: kept, MODEL)
    for use in (lambda: kept + 1.0, lambda: kept + kept, lambda: kept.cast("i32"), lambda: kept[0], lambda: -kept):
        with pytest.raises(TraceError, match="the function that made this tensor has returned"):
            use()
        with pytest.raises(TraceError, match="the function that made this tensor has returned"):
            trace_epilogue(use, MODEL)


def test_an_epilogue_that_does_nothing_is_told() -> None:
    seen = Chan("i32", (4,))

    def forgotten() -> None:
        F["reduce_argmax"](intrinsics.output(0))

    for fn in (forgotten, lambda: None, lambda: (), lambda: (seen.read(), None)[1]):
        with pytest.raises(TraceError, match=r"return a Tensor or put one into a channel; .* is a return missing"):
            trace_epilogue(fn, MODEL)
    assert trace_epilogue(lambda: (seen.take(), None)[1], MODEL).program.outs == (), "a cell is used up: that is something"


def kept_tensor() -> Tensor:
    kept: list[Tensor] = []
    trace_epilogue(lambda: kept.append(intrinsics.output(0)) or kept[0], MODEL)
    return kept[0]


def test_authors_exceptions_pass_through() -> None:
    with pytest.raises(ZeroDivisionError):
        trace_epilogue(lambda: 1 // 0, MODEL)
    assert not is_tracing()


def test_map_stage_keeps_constants_in_the_text() -> None:
    trace = Trace("map")
    with tracing(trace):
        gate, up = trace.input(0, 8), trace.input(1, 8)
        out = gate / (F["exp"](-gate) + 1.0) * up
    program = trace.finish([out])
    assert program.params == () and [n.attrs for n in program.ops if n.name == "const"] == [{"bits": f32_bits(1.0)}]
    assert Program.parse(program.text) == program
    with pytest.raises(TraceError, match="channels are only there in an epilogue"):
        trace.take(CHAN)


def test_canonical_text_is_sorted_json_without_spaces() -> None:
    rng = Chan("u32", (2,), is_counter=True)
    gumbel = lambda: F["gumbel_max"](intrinsics.output(1), rng.take())  # noqa: E731
    for fn in (lambda: F["entropy"](intrinsics.output(0)), gumbel, lambda: (rng.take(), None)[1]):
        text = trace_epilogue(fn, MODEL).program.text
        assert json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")) == text
        spaced = Program.parse(json.dumps(json.loads(text), indent=2))
        assert spaced.text == text, "any JSON of a program has one canonical text"


KINDS = ("source", "elementwise", "generator", "view", "lookup", "pivot", "reduce", "skeleton", "pick", "effect")


def test_every_table_row_is_complete() -> None:
    for op in OPS.values():
        assert op.doc and op.kind in KINDS and op.dtypes, op.name
        if op.kind in ("elementwise", "generator", "reduce"):
            assert op.wgsl.keys() == op.c.keys() and op.wgsl, f"{op.name}: WGSL and C cover the same variants"
        assert (op.numpy is None) == (op.kind in ("source", "pick", "effect")), op.name
        if op.py:
            assert F[op.py].__doc__ == op.doc


def test_listing_is_for_people() -> None:
    program = trace_epilogue(lambda: F["reduce_argmax"](intrinsics.output(0)), MODEL).program
    assert program.listing() == "%0 = output(index=0, name=logits) : f32[100]\n%1 = reduce_argmax(%0) : i32[]"
    assert "2 ops" in repr(program)


def test_program_error_is_an_eta_error() -> None:
    assert issubclass(ProgramError, eta.EtaError) and issubclass(TraceError, eta.EtaError)

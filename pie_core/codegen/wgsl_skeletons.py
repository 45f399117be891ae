"""Skeletons in WGSL: sort, running sums and products, matrix product, scatter; each a function that one workgroup runs together."""

from __future__ import annotations

from pie_core.codegen.wgsl_folds import ONE_STEP
from pie_core.codegen.wgsl_loops import BARRIERS
from pie_core.codegen.wgsl_routines import Routine, Rows, again, fill, key_at, scan
from pie_core.codegen.wgsl_writer import region_value, region_word, value_of, word_of

SHORT_SUM = 64  # longest chain of roundings of a sum that is not cut into blocks
SERIAL_PRODUCT = 1024  # longest row whose running product one thread makes: parts alone may overflow where the whole does not

RANKS = """fn NAME(lid: u32, source: u32, values: u32, indices: u32) {  // rank of an element: how many of its row come before it
  for (var e = lid; e < $all; e += $wg) {
    let row = e / $n;
    let at = e % $n;
    let first = source + row * $n;
    let key = $own;
    var rank = 0u;
    for (var j = 0u; j < $n; j += 1u) {
      let other = $other;
      rank += select(0u, 1u, other > key || (other == key && j < at));
    }
    if (rank < $k) {
      scratch[values + row * $k + rank] = $word;
      scratch[indices + row * $k + rank] = at;
    }
  }
}"""

# Stable sort of $n (key, index) pairs at `work`, ascending, four bits of the keys a turn; they end where `turns` is odd or even.
RADIX = """  for (var turn = 0u; turn < $turns; turn += 1u) {
    let shift = 4u * turn;
    let keys = work + (turn & 1u) * $two_n;
    let sorted = work + (1u - (turn & 1u)) * $two_n;
    for (var d = 0u; d < 16u; d += 1u) { scratch[counts + d * $wg] = 0u; }
    for (var i = start; i < end; i += 1u) { scratch[counts + ((scratch[keys + i] >> shift) & 15u) * $wg] += 1u; }
    storageBarrier();
$places
    for (var i = start; i < end; i += 1u) {
      let key = scratch[keys + i];
      let digit = (key >> shift) & 15u;
      let to = min($place, $n - 1u);
      $place += 1u;
      scratch[sorted + to] = key;
      scratch[sorted + $n + to] = scratch[keys + $n + i];
    }
    storageBarrier();
  }"""
# Where the elements of each digit go in a thread's part. Each thread of a small workgroup walks all counts of a long row: no barrier.
WALK_COUNTS = """    var places: array<u32, 16>;
    var place = 0u;
    for (var j = 0u; j < $counts; j += 1u) {
      if (j % $wg == lid) { places[j / $wg] = place; }
      place += scratch[all + j];
    }"""
SHARE_COUNTS = """    var mine = 0u;
    for (var j = 0u; j < 16u; j += 1u) { mine += scratch[all + lid * 16u + j]; }
    var place = before(lid, mine);
    for (var j = all + lid * 16u; j < all + lid * 16u + 16u; j += 1u) {
      let count = scratch[j];
      scratch[j] = place;
      place += count;
    }
    storageBarrier();"""

SORT = """fn NAME(lid: u32, source: u32, values: u32, indices: u32, work: u32) {  // stable radix sort of each row, four bits a pass
  let start = min(lid * $part, $n);
  let end = min(start + $part, $n);
  let all = work + $four_n;  // of each digit, a count of each thread's part
  let counts = all + lid;
  for (var row = 0u; row < $rows; row += 1u) {
    let first = source + row * $n;
    for (var i = start; i < end; i += 1u) {
      scratch[work + i] = ~$key;
      scratch[work + $n + i] = i;
    }
$turns_of_keys
    for (var j = lid; j < $k; j += $wg) {
      let at = scratch[work + $n + j];
      scratch[values + row * $k + j] = $word;
      scratch[indices + row * $k + j] = at;
    }$again
  }
}"""

RUNNING_SERIAL = """fn NAME(lid: u32, source: u32, result: u32) {  // one row a thread, left to right
  for (var row = lid; row < $rows; row += $wg) {
    var run = $identity;
    for (var i = row * $n; i < row * $n + $n; i += 1u) {
      run = run $join $value;
      scratch[result + i] = $word;
    }
  }
}"""

RUNNING = """fn NAME_before(lid: u32, part: $dtype) -> $dtype {
$scan
}
fn NAME(lid: u32, source: u32, result: u32) {  // each thread a part of the row, from what the parts before it come to
  for (var row = 0u; row < $rows; row += 1u) {
    let start = row * $n + min(lid * $part, $n);
    let end = row * $n + min(lid * $part + $part, $n);
    var run = $identity;
    for (var i = start; i < end; i += 1u) { run = run $join $value; }
    run = NAME_before(lid, run);
    for (var i = start; i < end; i += 1u) {
      run = run $join $value;
      scratch[result + i] = $word;
    }$again
  }
}"""

# Sums of f32, block by block: chains of roundings stay short.
RUNNING_SERIAL_BLOCKS = """fn NAME(lid: u32, source: u32, result: u32) {  // one row a thread, left to right
  for (var row = lid; row < $rows; row += $wg) {
    var run = 0.0;
    var some = 0.0;  // of this block
    for (var j = 0u; j < $n; j += 1u) {
      let i = row * $n + j;
      some = some + $value;
      scratch[result + i] = bitcast<u32>(run + some);
      if ((j & $mask) == $mask) { run = run + some; some = 0.0; }
    }
  }
}"""

RUNNING_BLOCKS = """fn NAME_before(lid: u32, part: f32) -> f32 {
$scan
}
fn NAME(lid: u32, source: u32, result: u32) {  // each thread a part of the row, from what the parts before it come to
  for (var row = 0u; row < $rows; row += 1u) {
    let start = row * $n + min(lid * $part, $n);
    let end = row * $n + min(lid * $part + $part, $n);
    var run = 0.0;
    var some = 0.0;  // of this block
    for (var i = start; i < end; i += 1u) {
      some = some + $value;
      if (((i - start) & $mask) == $mask) { run = run + some; some = 0.0; }
    }
    run = NAME_before(lid, run + some);
    some = 0.0;
    for (var i = start; i < end; i += 1u) {
      some = some + $value;
      scratch[result + i] = bitcast<u32>(run + some);
      if (((i - start) & $mask) == $mask) { run = run + some; some = 0.0; }
    }$again
  }
}"""

MATMUL_SERIAL = """fn NAME(lid: u32, a: u32, b: u32, result: u32) {  // one element a thread
  for (var e = lid; e < $all; e += $wg) {
    let row = a + (e / $n) * $k;
    let column = b + e % $n;
    var sum = 0.0;
    for (var j = 0u; j < $k; j += 1u) { sum = fma($left, $right, sum); }
    scratch[result + e] = bitcast<u32>(sum);
  }
}"""

MATMUL = """fn NAME_before(lid: u32, part: f32) -> f32 {
$scan
}
fn NAME(lid: u32, a: u32, b: u32, result: u32) {  // one element at a time, all threads together
  for (var e = 0u; e < $all; e += 1u) {
    let row = a + (e / $n) * $k;
    let column = b + e % $n;
    var sum = 0.0;
    for (var j = lid; j < $k; j += $wg) { sum = fma($left, $right, sum); }
    let others = NAME_before(lid, sum);
    if (lid == $wg - 1u) { scratch[result + e] = bitcast<u32>(others + sum); }
    workgroupBarrier();
  }
}"""

SCATTER_SET = """fn NAME(lid: u32, base: u32, index: u32, values: u32, result: u32, work: u32) {  // the last update of each row, by sorting
  for (var i = lid; i < $all; i += $wg) { scratch[result + i] = $base_word; }
  for (var j = lid; j < $m; j += $wg) {
    scratch[work + j] = min($row, $n);  // n: out of range
    scratch[work + $m + j] = j;
  }
  storageBarrier();
  let start = min(lid * $part, $m);
  let end = min(start + $part, $m);
  let all = work + $four_m;  // of each digit, a count of each thread's part
  let counts = all + lid;
$turns_of_keys
  for (var k = lid; k < $m; k += $wg) {
    let row = scratch[work + $at + k];
    if (row < $n && (k + 1u == $m || scratch[work + $at + min(k + 1u, $m - 1u)] != row)) {
      let j = scratch[work + $at + $m + k];
      for (var column = 0u; column < $columns; column += 1u) { scratch[result + row * $columns + column] = $update; }
    }
  }
}"""

SCATTER_DISTINCT = """fn NAME(lid: u32, base: u32, index: u32, values: u32, result: u32) {  // no row is named twice
  for (var i = lid; i < $all; i += $wg) { scratch[result + i] = $base_word; }
  storageBarrier();
  for (var u = lid; u < $updates; u += $wg) {
    let j = u / $columns;
    let column = u % $columns;
    let row = $row;
    let to = result + row * $columns + column;
    if (row < $n) { scratch[to] = $update; }
  }
}"""

SCATTER = """fn NAME(lid: u32, base: u32, index: u32, values: u32, result: u32) {  // rows of a thread's own, updates in index order
  for (var i = lid; i < $all; i += $wg) { scratch[result + i] = $base_word; }
  storageBarrier();
  for (var unit = lid; unit < $units; unit += $wg) {
    let column = unit % $columns;
    let share = unit / $columns;
    for (var j = 0u; j < $m; j += 1u) {
      let row = $row;
      if (row < $n && row % $shares == share) {
        let to = result + row * $columns + column;
        scratch[to] = $update;
      }
    }
  }
}"""


def ranks(source: Rows, k: int, workgroup: int) -> Routine:
    """(lid, source, values, indices): the first k of each sorted row of at most SMALL_SORT elements."""
    region, dtype, rows, n = source
    text = fill(
        RANKS, all=rows * n, n=n, k=k, wg=workgroup, own=key_at(region, "source + e", dtype),
        other=key_at(region, "first + j", dtype), word=region_word(region, "source + e"),
    )  # fmt: skip
    return Routine(text, -(-rows * n // workgroup) * (1 + n))


def sort(source: Rows, k: int, workgroup: int) -> Routine:
    """(lid, source, values, indices, work of 4 n + HISTOGRAM_WORDS words): the first k of each sorted row."""
    region, dtype, rows, n = source
    part = -(-n // workgroup)
    text = fill(
        SORT, n=n, four_n=4 * n, k=k, rows=rows, wg=workgroup, part=part,
        key=key_at(region, "first + i", dtype), word=region_word(region, "first + at"), turns_of_keys=_radix(n, 8, workgroup, "    "),
        again=again(rows, "storageBarrier"),
    )  # fmt: skip
    return Routine(text, rows * (1 + part + _radix_iterations(n, 8, workgroup) + -(-k // workgroup)))


def _walks(n: int, workgroup: int) -> bool:
    """Whether walking all counts of a turn takes no longer than one of its two passes over the keys."""
    return workgroup <= ONE_STEP and 16 * workgroup <= n // workgroup


def _radix(n: int, turns: int, workgroup: int, indent: str) -> str:
    walks = _walks(n, workgroup)
    places = fill(WALK_COUNTS if walks else SHARE_COUNTS, counts=16 * workgroup, wg=workgroup)
    place = "places[digit]" if walks else fill("scratch[counts + digit * $wg]", wg=workgroup)
    text = fill(RADIX, n=n, two_n=2 * n, turns=turns, wg=workgroup, places=places, place=place)
    return "\n".join(indent + line[2:] for line in text.splitlines())


def _radix_iterations(n: int, turns: int, workgroup: int) -> int:
    counts = 16 + 16 * workgroup if _walks(n, workgroup) else 3 * 16 + workgroup
    return turns * (1 + 2 * -(-n // workgroup) + counts)


def scatter_set(base: Rows, index: Rows, values: str, workgroup: int) -> Routine:
    """(lid, base, index, values, result, work of 4 m + HISTOGRAM_WORDS words): `scatter` for many updates, whatever rows they name."""
    n, columns, m = base.rows, base.n, index.n
    turns = -(-n.bit_length() // 4)
    text = fill(
        SCATTER_SET, all=n * columns, wg=workgroup, n=n, m=m, columns=columns, part=-(-m // workgroup),
        four_m=4 * m, at=2 * m * (turns % 2),
        base_word=region_word(base.region, "base + i"), row=region_word(index.region, "index + j"),
        update=_update(False, base, values), turns_of_keys=_radix(m, turns, workgroup, "  "),
    )  # fmt: skip
    loops = -(-n * columns // workgroup) + -(-m // workgroup) * (2 + columns)
    return Routine(text, loops + _radix_iterations(m, turns, workgroup))


def running(product: bool, source: Rows, workgroup: int) -> Routine:
    """(lid, source, result): running sum or product of each row."""
    region, dtype, rows, n = source
    join = "*" if product else "+"
    identity = {"f32": "{}.0", "i32": "{}i", "u32": "{}u"}[dtype].format(int(product))
    value = region_value(region, "source + i", dtype)
    part = -(-n // workgroup)
    values = {"rows": rows, "n": n, "identity": identity, "join": join, "value": value, "word": word_of("run", dtype)}
    sums = dtype == "f32" and not product
    serial = -(-rows // workgroup) * (1 + n)
    together = rows * (1 + 2 * part + workgroup)
    if serial <= together + rows * BARRIERS or (product and dtype == "f32" and n <= SERIAL_PRODUCT):
        if sums and n > SHORT_SUM:
            return Routine(fill(RUNNING_SERIAL_BLOCKS, wg=workgroup, mask=_block(n) - 1, **values), serial)
        return Routine(fill(RUNNING_SERIAL, wg=workgroup, **values), serial)
    values |= {"part": part, "scan": scan("part", dtype, f"{{0}} {join} {{1}}", identity), "again": again(rows)}
    if sums and part > SHORT_SUM:
        return Routine(fill(RUNNING_BLOCKS, mask=_block(part) - 1, **values), together)
    return Routine(fill(RUNNING, dtype=dtype, **values), together)


def _block(n: int) -> int:
    """Elements of a block: a power of 2 about the square root of n, so that n has as many blocks."""
    return 1 << (n.bit_length() // 2)


def matmul(a: Rows, b: Rows, workgroup: int) -> Routine:
    """(lid, a, b, result): the product of two matrices of f32."""
    m, k, n = a.rows, a.n, b.n
    values = {"all": m * n, "k": k, "n": n, "wg": workgroup}
    code = {"left": region_value(a.region, "row + j", "f32"), "right": region_value(b.region, f"column + j * {n}u", "f32")}
    serial = -(-m * n // workgroup) * (1 + k)
    together = m * n * (1 + -(-k // workgroup) + workgroup)
    if serial <= together + m * n * BARRIERS:
        return Routine(fill(MATMUL_SERIAL, **values, **code), serial)
    return Routine(fill(MATMUL, scan=scan("part", "f32", "{0} + {1}", "0.0"), **values, **code), together)


def scatter_distinct(add: bool, base: Rows, index: Rows, values: str, workgroup: int) -> Routine:
    """(lid, base, index, values, result): `scatter` where the indices are known to differ."""
    n, columns, m = base.rows, base.n, index.n
    text = fill(
        SCATTER_DISTINCT, all=n * columns, wg=workgroup, n=n, columns=columns, updates=m * columns,
        base_word=region_word(base.region, "base + i"), row=region_word(index.region, "index + j"),
        update=_update(add, base, values),
    )  # fmt: skip
    return Routine(text, -(-n * columns // workgroup) + -(-m * columns // workgroup))


def _update(add: bool, base: Rows, values: str) -> str:
    """The word that update j leaves at `to`."""
    at = f"values + j * {base.n}u + column"
    if not add:
        return region_word(values, at)
    return word_of(f"{value_of('scratch[to]', base.dtype)} + {region_value(values, at, base.dtype)}", base.dtype)


def scatter(add: bool, base: Rows, index: Rows, values: str, workgroup: int) -> Routine:
    """(lid, base, index, values, result): updates of rows of a table, their values in region `values`. In the result, one thread owns a
    row of a column."""
    n, columns, m = base.rows, base.n, index.n
    shares = max(1, workgroup // columns)
    text = fill(
        SCATTER, all=n * columns, wg=workgroup, n=n, m=m, columns=columns, units=shares * columns, shares=shares,
        base_word=region_word(base.region, "base + i"), row=region_word(index.region, "index + j"), update=_update(add, base, values),
    )  # fmt: skip
    return Routine(text, -(-n * columns // workgroup) + -(-shares * columns // workgroup) * (1 + m))

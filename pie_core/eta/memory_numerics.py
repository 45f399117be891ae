"""NumPy lambdas of the views, lookups, pivots and skeletons of the op table; `np` is always passed in, never imported.

These state the exact results: order is that of `sort_key` (NaN lowest, -0 equals +0), ties go by lower index, masses are integers.
"""

from __future__ import annotations

from collections.abc import Sequence

from pie_core.eta.numerics import Array, NumPy, sort_key

MASS_ONE = 1 << 30  # pivot_mass counts probabilities in units of 2^-30


def broadcast(np: NumPy, a: Array, shape: Sequence[int]) -> Array:
    """a over `shape`; extents are left-aligned, missing ones are 1."""
    a = np.asarray(a)
    return np.broadcast_to(a.reshape(a.shape + (1,) * (len(shape) - a.ndim)), tuple(shape))


def _valid(np: NumPy, index: Array, n: int) -> tuple[Array, Array]:
    wide = np.asarray(index).astype(np.int64)
    return wide, (wide >= 0) & (wide < n)


def gather(np: NumPy, table: Array, index: Array) -> Array:
    """table[index] along axis 0; zeros where an index is out of range."""
    wide, valid = _valid(np, index, len(table))
    rows = np.asarray(table)[np.where(valid, wide, 0)]
    keep = valid.reshape(valid.shape + (1,) * (rows.ndim - valid.ndim))
    return np.where(keep, rows, np.zeros((), table.dtype)).astype(table.dtype)


def gather_row(np: NumPy, x: Array, index: Array) -> Array:
    """x[i, index[i]] for each row i; 0 where an index is out of range."""
    wide, valid = _valid(np, index, x.shape[1])
    found = np.take_along_axis(x, np.where(valid, wide, 0)[:, None], axis=1)[:, 0]
    return np.where(valid, found, np.zeros((), x.dtype)).astype(x.dtype)


def mask_apply(np: NumPy, x: Array, packed: Array) -> Array:
    """x where bit i % 32 of word i / 32 is set, else -inf."""
    i = np.arange(x.shape[-1])
    bits = (packed[i // 32] >> (i % 32).astype(np.uint32)) & np.uint32(1)
    return np.where(bits != 0, x, np.float32(-np.inf))


def running(np: NumPy, x: Array, name: str) -> Array:
    """cumsum or cumprod along the last axis, f32 in f64 so that one rounding an element is left."""
    wide = np.float64 if x.dtype.kind == "f" else x.dtype
    with np.errstate(over="ignore", invalid="ignore"):
        return getattr(np, name)(x, axis=-1, dtype=wide).astype(x.dtype)


def order_key(np: NumPy, x: Array) -> Array:
    """Any numeric dtype to u32 keys whose order is the order of sorting: larger is greater, NaN is 0."""
    if x.dtype.kind == "f":
        return sort_key(np, x)
    bits = np.ascontiguousarray(x).view(np.uint32)
    return bits ^ np.uint32(0x80000000) if x.dtype.kind == "i" else bits


def _descending(np: NumPy, x: Array) -> Array:
    return np.argsort(~order_key(np, x), axis=-1, kind="stable")


def sort_desc(np: NumPy, x: Array) -> tuple[Array, Array]:
    """(values, u32 indices) of each row in descending order, ties by lower index, NaN last."""
    order = _descending(np, x)
    return np.take_along_axis(x, order, axis=-1), order.astype(np.uint32)


def top_k(np: NumPy, x: Array, k: int) -> tuple[Array, Array]:
    """The first k columns of `sort_desc`."""
    values, order = sort_desc(np, x)
    return values[..., :k], order[..., :k]


def pivot_rank(np: NumPy, x: Array, k: Array) -> Array:
    """True where fewer than k elements of the row are strictly greater; never a NaN."""
    keys = sort_key(np, x).reshape(-1, x.shape[-1])
    greater = np.stack([len(row) - np.searchsorted(np.sort(row), row, side="right") for row in keys])
    return ((greater < int(k)) & (keys != 0)).reshape(x.shape)


def mass(np: NumPy, p: Array) -> Array:
    """Probabilities as u32 counts of 2^-30: trunc(min(max(p, 0), 1) * 2^30), NaN as 0."""
    clean = np.where(np.isnan(p), np.float32(0), p)
    return (np.clip(clean, np.float32(0), np.float32(1)) * np.float32(MASS_ONE)).astype(np.uint32)


def pivot_mass(np: NumPy, order: Array, x: Array, p: Array) -> Array:
    """True while the mass of x before an element, walked in descending `order`, is below that of p; never where the order is a NaN."""
    walk = _descending(np, order)
    masses = np.take_along_axis(mass(np, x), walk, axis=-1)
    before = np.cumsum(masses, axis=-1, dtype=np.uint32) - masses
    below = np.logical_and.accumulate(before < mass(np, np.asarray(p, np.float32)), axis=-1)  # a prefix: before it ends, nothing can wrap
    keep = np.empty(x.shape, bool)
    np.put_along_axis(keep, walk, below, axis=-1)
    return keep & ~np.isnan(order)


def matmul(np: NumPy, a: Array, b: Array) -> Array:
    """Matrix product, summed in float64 and rounded once."""
    return np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(np.float32)


def scatter_add(np: NumPy, base: Array, index: Array, values: Array) -> Array:
    """base with values added at rows `index`, one after the other; indices out of range are skipped."""
    wide, valid = _valid(np, index, len(base))
    result = np.array(base)
    np.add.at(result, wide[valid], values[valid])
    return result


def scatter_set(np: NumPy, base: Array, index: Array, values: Array) -> Array:
    """base with values stored at rows `index`, the last of equal indices wins; indices out of range are skipped."""
    wide, valid = _valid(np, index, len(base))
    result = np.array(base)
    for at in np.flatnonzero(valid):
        result[wide[at]] = values[at]
    return result

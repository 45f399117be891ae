"""Tile shapes by adapter class: how the work of a kernel is divided among invocations.

A software adapter (lavapipe, SwiftShader) runs the lanes of a workgroup in one SIMD register: barriers are dear, redundant
work among lanes is free. A GPU wants coalesced loads and shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearShape:
    """`rows`: an invocation owns tile_m rows x tile_t tokens. `split`: `lanes` invocations share the k of tile_m rows.
    `tile`: a workgroup of 64 stages 32-deep slices of 64 rows and tile_t * 8 tokens in shared memory."""

    style: str
    tile_m: int
    tile_t: int
    workgroup: int
    lanes: int = 1

    @property
    def rows_per_group(self) -> int:
        """Weight rows of one workgroup."""
        if self.style == "tile":
            return self.tile_m * 8
        return self.tile_m * self.workgroup // self.lanes

    @property
    def tokens_per_group(self) -> int:
        """Tokens of one workgroup."""
        return self.tile_t * 8 if self.style == "tile" else self.tile_t

    def iterations(self, blocks: int) -> int:
        """Loop iterations of one invocation for k = 32 * blocks."""
        if self.style == "rows":
            return blocks
        if self.style == "split":
            return -(-blocks // self.lanes) + self.lanes
        return blocks * (1 + self.tile_t + 8)


def linear(adapter: str, fmt: str, m: int, bucket: int) -> LinearShape:
    """The shape for [m, k] weights of `fmt` and at most `bucket` tokens."""
    if adapter == "software":
        if bucket == 1:
            return LinearShape("rows", 4, 1, 8)
        return LinearShape("rows", 4, min(bucket, 4), 8)
    if bucket <= 4:
        return LinearShape("split", 4, bucket, 64, lanes=16)
    return LinearShape("tile", 8, 1 if bucket <= 8 else 2 if bucket <= 16 else 4, 64)


@dataclass(frozen=True)
class AttentionShape:
    """`serial`: each lane scores every position and owns `slots` vec4 of the output, `step_positions` positions an iteration.
    `flash`: lanes score one position each, then sum `slices` interleaved position lists. `positions`: the most one token may see."""

    style: str
    workgroup: int
    step_positions: int
    positions: int
    slices: int
    slots: int

    def iterations(self) -> int:
        """Loop iterations of one invocation when `positions` are visible."""
        rounds = -(-self.positions // self.step_positions) + 2
        if self.style == "serial":
            return rounds
        return rounds * (1 + self.step_positions + -(-self.step_positions // self.slices)) + self.slices


def attention(adapter: str, head_dim: int) -> AttentionShape:
    """The shape for heads of `head_dim` (a multiple of 4, at most 256)."""
    vecs = head_dim // 4
    if adapter == "software":
        return AttentionShape("serial", 8, 4, 131_072, 1, -(-vecs // 8))
    return AttentionShape("flash", 64, 64, 16_384, max(1, 64 // vecs), 1)

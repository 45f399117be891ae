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
        # Loads are what costs there, and tile_m + tile_t loads serve tile_m * tile_t sums; 8 x 4 is as far as registers go.
        return LinearShape("rows", 4, 1, 8) if bucket == 1 else LinearShape("rows", 8, min(bucket, 4), 8)
    if bucket <= 4:
        return LinearShape("split", 4, bucket, 64, lanes=16)
    return LinearShape("tile", 8, 1 if bucket <= 8 else 2 if bucket <= 16 else 4, 64)


@dataclass(frozen=True)
class AttentionShape:
    """`lanes`: each of `lanes` invocations takes every `lanes`-th position for `heads_together` heads that share K and V, and looks up
    `ahead` masked keys at a time. `flash`: 64 invocations score one position each, then sum `slices` interleaved lists.
    `positions`: the most that one token may see and that its mask may cover, a multiple of 32."""

    style: str
    lanes: int
    positions: int
    heads_together: int = 1
    slices: int = 1
    ahead: int = 32

    def iterations(self, vecs: int) -> int:
        """Loop iterations of one invocation when `positions` are visible."""
        rounds = -(-self.positions // self.lanes)
        masked = rounds + 2 * (self.positions // 32)  # its words are counted, then walked: one look a round, one step a word
        if self.style == "lanes":
            masked += rounds + rounds // self.ahead + 2
            return masked + rounds + self.heads_together * (2 * self.lanes + -(-vecs // self.lanes) * (1 + self.lanes))
        return masked + rounds * (1 + self.lanes // 8 + -(-self.lanes // self.slices)) + self.slices


def attention(adapter: str, heads: int, kv_heads: int, head_dim: int) -> AttentionShape:
    """The shape for `heads` of `head_dim` (a multiple of 4, at most 256), a multiple of `kv_heads`."""
    vecs = head_dim // 4
    if adapter == "software":
        group = heads // kv_heads
        # Sharing loads of K and V pays as long as the accumulators stay few; the sums fit 16 KiB of workgroup memory.
        together = next(h for h in (4, 3, 2, 1) if group % h == 0 and (h * vecs <= 64 or h == 1))
        return AttentionShape("lanes", 8, 131_072, heads_together=together)
    return AttentionShape("flash", 64, 49_152, slices=max(1, 64 // vecs))

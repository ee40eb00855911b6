"""Attention in fixed tiles of keys, in torch ops: bitwise the same however a prompt is cut into chunks.

What makes it so, for fp32 on CPUs: matrix products have rows in multiples of 8, where a row's bits do not depend on the
others (see `intarsia.ops.linear`); weighted values are added up tile by tile, in order, in tiles of a fixed size that
begin at fixed positions; a tile that a query does not see adds zero to it, which changes no bit; and the maximum that
the exponentials are taken from is the same in any order.

Shape legend: n tokens of the row, H heads, K kv heads, G query heads a kv head, D head dim, M keys, B queries a block.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from intarsia.types import AttentionSpec

#: Keys a tile. A query's bits rest on it; so it is no option.
TILE = 128
#: Queries a block: bounds memory to block x keys. No query's bits rest on it.
BLOCK = 128
#: Rows of a matrix product come in multiples of it.
ROWS = 8


def tiled_row(
    q_nHD: torch.Tensor,
    keys_MKD: torch.Tensor,
    values_MKD: torch.Tensor,
    start: int,
    first: int,
    spec: AttentionSpec,
) -> torch.Tensor:
    """Return softmax(q k^T scale) v, (n, H, D), computed in fp32.

    Queries begin at position `start`, keys at position `first`.
    """
    num_queries, num_heads, head_dim = q_nHD.shape
    lead = first % TILE
    origin = first - lead
    keys_KDM = _whole_tiles(keys_MKD, lead).permute(1, 2, 0)
    values_KMD = _whole_tiles(values_MKD, lead).transpose(0, 1)
    padded = functional.pad(q_nHD.float() * spec.scale, (0, 0, 0, 0, 0, -num_queries % ROWS))
    q_KGnD = padded.view(len(padded), keys_MKD.shape[1], -1, head_dim).permute(1, 2, 0, 3)
    blocks = [
        _block(q_KGnD[:, :, begin : begin + BLOCK], keys_KDM, values_KMD, start + begin - origin, spec)
        for begin in range(0, len(padded), BLOCK)
    ]
    mixed_nHD = torch.cat(blocks, dim=2).permute(2, 0, 1, 3).reshape(len(padded), num_heads, head_dim)
    return mixed_nHD[:num_queries].to(q_nHD.dtype)


def _whole_tiles(x_MKD: torch.Tensor, lead: int) -> torch.Tensor:
    """Pad with zeros at both ends to whole tiles."""
    return functional.pad(x_MKD.float(), (0, 0, 0, 0, lead, -(lead + len(x_MKD)) % TILE))


def _block(
    q_KGBD: torch.Tensor, keys_KDM: torch.Tensor, values_KMD: torch.Tensor, start: int, spec: AttentionSpec
) -> torch.Tensor:
    """Attend for one block of queries; positions count from the first key."""
    kv_heads, groups, num_queries, head_dim = q_KGBD.shape
    stop = min(keys_KDM.shape[2], -(-(start + num_queries) // TILE) * TILE)
    begin = 0 if spec.window is None else max(0, start - spec.window + 1) // TILE * TILE
    scores = torch.bmm(q_KGBD.reshape(kv_heads, -1, head_dim), keys_KDM[:, :, begin:stop])
    if spec.soft_cap is not None:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    _hide(scores.view(kv_heads, groups, num_queries, -1), start, begin, spec.window)
    weights_KBM = scores.sub_(scores.amax(dim=-1, keepdim=True)).exp_()
    # cumsum adds in order, whatever the number of tiles.
    tiles_KBtS = weights_KBM.view(*weights_KBM.shape[:2], -1, TILE)
    total_KB1 = tiles_KBtS.sum(dim=-1).cumsum(dim=-1)[..., -1:]
    mixed_KBD = torch.bmm(weights_KBM[..., :TILE], values_KMD[:, begin : begin + TILE])
    for tile in range(TILE, stop - begin, TILE):
        mixed_KBD.baddbmm_(weights_KBM[..., tile : tile + TILE], values_KMD[:, begin + tile : begin + tile + TILE])
    return mixed_KBD.div_(total_KB1).view(kv_heads, groups, num_queries, head_dim)


def _hide(scores_KGBM: torch.Tensor, start: int, begin: int, window: int | None) -> None:
    """Set the scores of keys that a query does not see to -inf. Scores begin with the key at `begin`."""
    num_queries, stop = scores_KGBM.shape[2], begin + scores_KGBM.shape[3]
    # Without a window, every query of the block sees all keys before the block's first tile.
    edge = begin if window is not None else max(begin, start // TILE * TILE)
    queries = torch.arange(start, start + num_queries, device=scores_KGBM.device).unsqueeze(1)
    keys = torch.arange(edge, stop, device=scores_KGBM.device)
    hidden = keys > queries
    if window is not None:
        hidden |= keys <= queries - window
    scores_KGBM[..., edge - begin :].masked_fill_(hidden, -torch.inf)

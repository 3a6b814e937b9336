"""Attention in float64, as a textbook has it: what outputs are held against.

It shares no code with attnd.  q [rows, q_heads, dim], k [keys, kv_heads, dim], v [keys, kv_heads,
v_dim]; row i of q is token first + i of the sequence.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence, Tuple

import numpy as np


def rope(x: Any, positions: Any, inv_freq: Any, factor: float = 1.0, pairs: bool = False) -> Any:
    """Rotates [rows, heads, dim]: halves of the first 2 n dimensions, or pairs of neighbours."""
    x = np.asarray(x, np.float64).copy()
    n = len(inv_freq)
    angle = np.asarray(positions, np.float64)[:, None, None] * np.asarray(inv_freq, np.float64)
    cos, sin = np.cos(angle) * factor, np.sin(angle) * factor
    first = slice(0, 2 * n, 2) if pairs else slice(0, n)
    second = slice(1, 2 * n, 2) if pairs else slice(n, 2 * n)
    a, b = x[..., first].copy(), x[..., second].copy()
    x[..., first] = a * cos - b * sin
    x[..., second] = b * cos + a * sin
    return x


def attention(
    q: Any,
    k: Any,
    v: Any,
    first: int,
    *,
    causal: bool = True,
    scale: Optional[float] = None,
    softcap: float = 0.0,
    window: Tuple[int, int] = (-1, -1),
    sinks: Optional[Sequence[float]] = None,
    alibi: Optional[Sequence[float]] = None,
    visible: Any = None,
) -> Tuple[Any, Any]:
    """Returns out [rows, q_heads, v_dim] and the natural log of the sums [q_heads, rows], without
    sinks.  visible, bool [rows, keys], takes more away."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    rows, heads, dim = q.shape
    keys, kv_heads, v_dim = v.shape
    out, lse = np.zeros((rows, heads, v_dim)), np.full((heads, rows), -np.inf)
    for h in range(heads):
        own = h // (heads // kv_heads)
        for i in range(rows):
            x = k[:, own] @ q[i, h] * (1 / np.sqrt(dim) if scale is None else scale)
            if softcap:
                x = softcap * np.tanh(x / softcap)
            at, j = first + i, np.arange(keys)
            if alibi is not None:
                x = x - alibi[h] * np.abs(at - j)
            seen = np.ones(keys, bool) if not causal else j <= at
            if window[0] >= 0:
                seen &= j >= at - window[0]
            if window[1] >= 0:
                seen &= j <= at + window[1]
            if visible is not None:
                seen &= visible[i]
            if not seen.any():
                continue
            top = x[seen].max()
            p = np.where(seen, np.exp(np.where(seen, x - top, 0)), 0)
            total = p.sum()
            lse[h, i] = top + np.log(total)
            if sinks is not None:
                total += np.exp(sinks[h] - top)
            out[i, h] = p @ v[:, own] / total
    return out, lse

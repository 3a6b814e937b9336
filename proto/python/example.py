#!/usr/bin/env python3
"""First requests to attnd: a prompt, then three tokens, through two layers; each output is checked.
Usage: pip install proto/python; example.py [URL]"""

import sys

import attnd
import numpy as np

LAYERS, HEADS, KV_HEADS, DIM = 2, 4, 2, 16


def reference(q, k, v):
    """Causal attention in float64; the last row of q is the last token of k."""
    k, v = (np.repeat(x, HEADS // KV_HEADS, axis=1).astype(np.float64) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(DIM)
    scores[:, np.arange(len(k)) > np.arange(len(k) - len(q), len(k))[:, None]] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v)


def random(*shape):
    return np.random.standard_normal(shape).astype(np.float32)


with attnd.connect(sys.argv[1] if len(sys.argv) > 1 else "ipc:///run/attnd/attnd.sock") as client:
    model = client.open_model("example", layers=LAYERS, q_heads=HEADS, kv_heads=KV_HEADS,
                              head_dim=DIM, dtype="f32")
    seq = model.sequence()
    keys = [random(0, KV_HEADS, DIM) for _ in range(LAYERS)]
    values = list(keys)
    for tokens in (20, 1, 1, 1):
        with client.step([seq.append(tokens)], deadline=1.0) as step:
            for layer in range(LAYERS):
                q = random(tokens, HEADS, DIM)
                k, v = random(tokens, KV_HEADS, DIM), random(tokens, KV_HEADS, DIM)
                ran = attnd.Ran()
                out = step.attend(layer, q, k, v, ran=ran)
                keys[layer] = np.concatenate([keys[layer], k])
                values[layer] = np.concatenate([values[layer], v])
                error = np.abs(out - reference(q, keys[layer], values[layer])).max()
                assert error < 1e-5, error
            step.commit()
        print(f"{len(seq)} tokens cached, {ran.kernel}, max error {error:.1e}")
    print("ok over", client.transport)

#!/usr/bin/env python3
"""First requests to attnd with no library of ours: a prefill, three decodes, each output checked.
Usage: pip install pynng; example_wire.py [URL]
Message layouts are those of proto/proto_wire.h: little-endian, offsets from the message's start."""
import itertools, json, math, random, struct, sys
from array import array
import pynng

HELLO, MODEL_OPEN, SEQ_CREATE, SEQ_FREE, DECODE, PREFILL = 1, 2, 16, 19, 36, 37
HEADER, MAGIC = "<IHHQIIiI", 0x444E5441  # magic version op request flags body_bytes status reserved
HEADS, KV_HEADS, DIM = 4, 2, 16
sock = pynng.Req0(resend_time=-1, recv_timeout=10000, send_timeout=10000)  # never repeats by itself
request_ids = itertools.count(1)

def call(op, body):
    request = next(request_ids)
    sock.send(struct.pack(HEADER, MAGIC, 1, op, request, 0, len(body), 0, 0) + body)
    reply = sock.recv()
    magic, version, op_back, id_back, _, size, status, _ = struct.unpack_from(HEADER, reply)
    assert (magic, version, op_back, id_back, size) == (MAGIC, 1, op, request, len(reply) - 32)
    if status < 0:  # proto_error
        field, text = (reply[a:b].split(b"\0")[0].decode() for a, b in ((40, 72), (72, 264)))
        sys.exit(f"attnd refused: error {status}, field '{field}': {text}")
    return reply

def attend(op, model, seq, qkv):  # proto_attend1, one proto_attend1_seq, q, k, v [rows][floats]
    blobs = [array("f", itertools.chain(*rows)).tobytes() for rows in qkv]
    offs = list(itertools.accumulate([120] + [len(b) for b in blobs]))  # rows are 64 bytes or more
    tensors = b"".join(struct.pack("<IIII", off, 0, 0, 0) for off in offs[:3])
    entry = struct.pack("<QIIII", seq, len(qkv[0]), 0, 0, 0)  # seq, new_len, q_len, positions_off
    reply = call(op, struct.pack("<IIII", model, 1, 1000, 0) + tensors + entry + b"".join(blobs))
    rows, off = struct.unpack_from("<II", reply, 32)
    return array("f", reply[off : off + 4 * rows * HEADS * DIM]), reply[64:104].strip(b"\0")

def reference(q_row, keys, values):  # softmax(q k / sqrt(DIM)) v; HEADS / KV_HEADS share a KV head
    for h in range(HEADS):
        q, at = q_row[h * DIM : (h + 1) * DIM], h // (HEADS // KV_HEADS) * DIM
        p = [math.exp(sum(a * b for a, b in zip(q, k[at:])) / math.sqrt(DIM)) for k in keys]
        yield from (sum(w * v[at + d] for w, v in zip(p, values)) / sum(p) for d in range(DIM))

sock.dial(sys.argv[1] if len(sys.argv) > 1 else "ipc:///run/attnd/attnd.sock", block=True)
hello = json.loads(call(HELLO, json.dumps({"client": "example_wire.py"}).encode())[32:])
spec = {"name": "example-wire", "digest": "00" * 32, "dtype": "f32", "layers": 1, "q_heads": HEADS,
        "kv_heads": KV_HEADS, "head_dim": DIM}
model = json.loads(call(MODEL_OPEN, json.dumps(spec).encode())[32:])["model"]
seq = struct.unpack_from("<Q", call(SEQ_CREATE, struct.pack("<II", model, 0)), 32)[0]
keys, values = [], []
for op, tokens in ((PREFILL, 20), (DECODE, 1), (DECODE, 1), (DECODE, 1)):
    q, k, v = ([[random.gauss(0, 1) for _ in range(heads * DIM)] for _ in range(tokens)]
               for heads in (HEADS, KV_HEADS, KV_HEADS))
    out, kernel = attend(op, model, seq, (q, k, v))
    want = []
    for i in range(tokens):  # causal: token i sees what was there and tokens 0 to i
        keys, values = keys + [k[i]], values + [v[i]]
        want += reference(q[i], keys, values)
    error = max(abs(a - b) for a, b in zip(out, want, strict=True))
    print(f"op {op}: {tokens} tokens, {len(keys)} cached, {kernel.decode()}, max error {error:.1e}")
    assert error < 1e-5
call(SEQ_FREE, struct.pack("<QII", seq, 0, 0))
print("ok with", hello["daemon"])

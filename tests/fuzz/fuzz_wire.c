// The wire decoder under libFuzzer: header, fixed structs, arrays, tensors, names, JSON.  Every
// byte that a reader says is there is then read, in a block of just the message's size, so that the
// address sanitizer judges each answer.
#include "tests/fuzz/fuzz_wire.h"

#include <cjson/cJSON.h>
#include <stdlib.h>
#include <string.h>

#include "proto/proto_json.h"
#include "proto/proto_msg.h"
#include "proto/proto_region.h"

static volatile uint8_t sink;
static attnd_errinfo info;

static void touch(const void *from, uint64_t bytes) {
    const uint8_t *p = from;
    for (uint64_t i = 0; p && i < bytes; i++) {
        sink = p[i];
    }
}

static const void *touch_array(proto_view msg, const char *field, uint64_t off, uint64_t count,
                               uint64_t elem_bytes, size_t fixed) {
    const void *out = NULL;
    if (proto_array(msg, field, off, count, elem_bytes, fixed, &out, &info)) {
        return NULL;
    }
    touch(out, count * elem_bytes);
    return out;
}

static void touch_tensor(proto_view msg, const char *field, const proto_tensor *t, uint64_t rows,
                         uint64_t heads, uint64_t dim, attnd_dtype dtype, size_t fixed) {
    const proto_tensor_shape shape = {rows, heads, dim, dtype};
    const void *out = NULL;
    int64_t token = 0, head = 0;
    if (proto_read_tensor(msg, field, t, &shape, fixed, &out, &token, &head, &info) || !out) {
        return;
    }
    uint64_t elem = attnd_dtype_bytes(dtype);
    for (uint64_t row = 0; row < rows; row++) { // no stride is 0, so the message bounds rows
        for (uint64_t h = 0; h < heads; h++) {
            touch((const uint8_t *)out + (row * (uint64_t)token + h * (uint64_t)head) * elem,
                  dim * elem);
        }
    }
}

static void read_commit(proto_view msg, uint64_t off, size_t fixed) {
    proto_commit c;
    const void *at = touch_array(msg, "commit_off", off, 1, sizeof(c), fixed);
    if (!at) {
        return;
    }
    memcpy(&c, at, sizeof(c));
    proto_check_zero(c.reserved, "reserved", &info);
    const uint8_t *seqs =
        touch_array(msg, "num_seqs", off + sizeof(c), c.num_seqs, sizeof(proto_commit_seq), fixed);
    for (uint32_t i = 0; seqs && i < c.num_seqs; i++) {
        proto_commit_seq s;
        memcpy(&s, seqs + i * sizeof(s), sizeof(s));
        touch_array(msg, "path_off", s.path_off, s.accepted, 4, fixed);
    }
}

static void read_step(proto_view msg) {
    proto_step s;
    if (proto_read(msg, &s, sizeof(s), false, &info)) {
        return;
    }
    if (s.commit_off) {
        read_commit(msg, s.commit_off, sizeof(s));
    }
    const uint8_t *seqs = touch_array(msg, "num_seqs", PROTO_BODY + sizeof(s), s.num_seqs,
                                      sizeof(proto_step_seq), sizeof(s));
    for (uint32_t i = 0; seqs && i < s.num_seqs; i++) {
        proto_step_seq q;
        memcpy(&q, seqs + i * sizeof(q), sizeof(q));
        uint64_t n = q.new_len ? q.new_len : q.q_len;
        touch_array(msg, "tokens_off", q.tokens_off, q.new_len, 4, sizeof(s));
        touch_array(msg, "positions_off", q.positions_off, n, 4, sizeof(s));
        touch_array(msg, "tree_off", q.tree_off, n * ((n + 63) / 64), 8, sizeof(s));
    }
}

static void touch_mask(proto_view msg, uint64_t off, size_t fixed) {
    proto_block_mask b;
    const void *at = touch_array(msg, "block_mask_off", off, 1, sizeof(b), fixed);
    if (at) {
        memcpy(&b, at, sizeof(b));
        touch_array(msg, "block_mask", off + sizeof(b), (uint64_t)b.num_query_blocks + 1, 4, fixed);
    }
}

static void read_attend(proto_view msg) {
    proto_attend a;
    if (proto_read(msg, &a, sizeof(a), false, &info)) {
        return;
    }
    attnd_dtype dtype = (attnd_dtype)(a.layer % ATTND_NUM_DTYPES);
    uint64_t rows = a.step; // of any size
    proto_check_zero(a.reserved, "reserved", &info);
    touch_tensor(msg, "q", &a.q, rows, 4, 8, dtype, sizeof(a));
    touch_tensor(msg, "k", &a.k, rows, 2, 8, dtype, sizeof(a));
    touch_tensor(msg, "v", &a.v, rows, 2, 16, dtype, sizeof(a));
    touch_mask(msg, a.block_mask_off, sizeof(a));
}

static void read_attend1(proto_view msg) {
    proto_attend1 a;
    if (proto_read(msg, &a, sizeof(a), false, &info)) {
        return;
    }
    uint64_t rows = 0;
    const uint8_t *seqs = touch_array(msg, "num_seqs", PROTO_BODY + sizeof(a), a.num_seqs,
                                      sizeof(proto_attend1_seq), sizeof(a));
    for (uint32_t i = 0; seqs && i < a.num_seqs; i++) {
        proto_attend1_seq s;
        memcpy(&s, seqs + i * sizeof(s), sizeof(s));
        uint64_t n = s.new_len ? s.new_len : s.q_len;
        touch_array(msg, "positions_off", s.positions_off, n, 4, sizeof(a));
        rows += n;
    }
    touch_tensor(msg, "q", &a.q, rows, 4, 8, ATTND_F16, sizeof(a));
    touch_tensor(msg, "k", &a.k, rows, 2, 8, ATTND_F16, sizeof(a));
    touch_tensor(msg, "v", &a.v, rows, 2, 8, ATTND_F16, sizeof(a));
}

// read_attend_all touches what a tensor is said to have of a region, and a mask behind it.
static void read_attend_all(proto_view msg) {
    static uint8_t region[65536];
    proto_attend_all a;
    proto_region_view view;
    if (proto_read(msg, &a, sizeof(a), false, &info)) {
        return;
    }
    if (a.flags & PROTO_ATTEND_BLOCK_MASK) {
        touch_mask(msg, PROTO_BODY + sizeof(a), sizeof(a));
    }
    const proto_region_tensor *tensors[] = {&a.q, &a.k, &a.v};
    for (int i = 0; i < 3; i++) {
        const proto_tensor_shape shape = {a.step, 1 + a.num_layers % 8, 8 + a.flags % 8,
                                          (attnd_dtype)(a.first_layer % ATTND_NUM_DTYPES)};
        if (!proto_region_place(sizeof(region), "q", tensors[i], &shape, &view, &info)) {
            touch(region + view.off, view.bytes);
        }
    }
    if (!proto_region_array(sizeof(region), "out_off", a.out_off, a.lse_off, &info)) {
        touch(region + a.out_off, a.lse_off);
    }
}

static void read_names(proto_view msg) {
    proto_seq_keep keep;
    proto_seq_attach attach;
    if (proto_read(msg, &keep, sizeof(keep), true, &info) == ATTND_OK &&
        proto_check_name(keep.name, "name", true, &info) == ATTND_OK) {
        touch(keep.name, strlen(keep.name));
    }
    if (proto_read(msg, &attach, sizeof(attach), true, &info) == ATTND_OK) {
        proto_check_name(attach.name, "name", false, &info);
    }
}

// read_layer asks for every kind of value there is.
static void read_layer(proto_obj *o) {
    float f, fs[16];
    int32_t is[2];
    uint32_t u, num;
    bool b;
    proto_obj rope;
    proto_obj_float(o, "scale", &f);
    proto_obj_ints(o, "window", is, 2, &num);
    proto_obj_floats(o, "sinks", fs, 16, &num);
    proto_obj_u32(o, "kv_layer", 0, 8, &u);
    if (!proto_obj_null(o, "rope") && proto_obj_child(o, "rope", &rope)) {
        proto_obj_require(&rope, "inv_freq");
        proto_obj_floats(&rope, "inv_freq", fs, 16, &num);
        proto_obj_bool(&rope, "interleaved", &b);
        proto_obj_close(&rope);
    }
}

static void read_json(proto_view msg) {
    cJSON *doc;
    if (proto_json_parse(&doc, msg.data + PROTO_BODY, msg.bytes - PROTO_BODY, &info)) {
        return;
    }
    proto_obj o, item = {0};
    char text[16];
    uint64_t id;
    uint8_t hex[32];
    proto_obj_open(&o, doc, &info);
    proto_obj_text(&o, "name", text, sizeof(text));
    proto_obj_id(&o, "session", &id);
    proto_obj_hex(&o, "digest", hex, sizeof(hex));
    read_layer(&o);
    while (proto_obj_each(&o, "layer_overrides", &item)) {
        read_layer(&item);
    }
    proto_obj_close(&o);
    cJSON_Delete(doc);
}

static void read_request(proto_view msg) {
    proto_header h;
    if (proto_read_header(msg, &h, &info)) {
        return;
    }
    switch (h.op) {
    case PROTO_HELLO:
    case PROTO_MODEL_OPEN:
    case PROTO_DRAIN:
    case PROTO_CONFIG_GET:
    case PROTO_CONFIG_SET:
        read_json(msg);
        break;
    case PROTO_STEP:
        read_step(msg);
        break;
    case PROTO_ATTEND:
        read_attend(msg);
        break;
    case PROTO_ATTEND_ALL:
        read_attend_all(msg);
        break;
    case PROTO_COMMIT:
        read_commit(msg, PROTO_BODY, 0);
        break;
    case PROTO_DECODE:
    case PROTO_PREFILL:
        read_attend1(msg);
        break;
    default:
        read_names(msg);
        break;
    }
}

static void read_reply(proto_view msg) {
    proto_header h;
    if (msg.bytes < sizeof(h)) {
        return;
    }
    memcpy(&h, msg.data, sizeof(h));
    if (proto_read_reply(msg, h.op, h.request, &info)) {
        touch(info.text, strlen(info.text));
        touch(info.field, strlen(info.field));
        return;
    }
    proto_attend_reply r;
    if (proto_read(msg, &r, sizeof(r), false, &info) == ATTND_OK) {
        touch_array(msg, "out_off", r.out_off, r.rows, 128, sizeof(r));
        touch_array(msg, "lse_off", r.lse_off, r.rows, 4, sizeof(r));
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes) {
    uint8_t *block = malloc(bytes + 4);
    if (!block) {
        return 0;
    }
    proto_view msg = {block + 4, bytes}; // aligned as NNG aligns
    if (bytes > 0) {
        memcpy(block + 4, data, bytes);
    }
    read_request(msg);
    read_reply(msg);
    free(block);
    return 0;
}

// The checks of the wire format.  All arithmetic on sizes is 64-bit; what can overflow goes through
// the compiler's overflow builtins, so that an offset, a count or a stride of any value ends in an
// error and never in a pointer.
#include "proto/proto_msg.h"

#include <string.h>

static const struct {
    uint32_t op;
    const char *name;
} ops[] = {
#define XX(name, code, text) {code, text},
    PROTO_OP_MAP(XX)
#undef XX
};
enum { NUM_OPS = sizeof(ops) / sizeof(ops[0]) };

const char *proto_op_name(uint32_t op) {
    for (uint32_t i = 0; i < NUM_OPS; i++) {
        if (ops[i].op == op) {
            return ops[i].name;
        }
    }
    return "?";
}

uint32_t proto_op_parse(const char *name) {
    for (uint32_t i = 0; i < NUM_OPS; i++) {
        if (strcmp(ops[i].name, name) == 0) {
            return ops[i].op;
        }
    }
    return 0;
}

// read_frame checks what a request's and a reply's header have in common.
static attnd_err read_frame(proto_view msg, proto_header *out, attnd_errinfo *info) {
    proto_header h;
    if (msg.bytes < sizeof(h)) {
        return attnd_fail(info, ATTND_EPROTO, "header", "%zu bytes are no header", msg.bytes);
    }
    proto_copy(&h, msg.data, sizeof(h));
    if (h.magic != PROTO_MAGIC) {
        return attnd_fail(info, ATTND_EPROTO, "magic", "magic 0x%08x is not attnd's", h.magic);
    }
    if (h.version != PROTO_VERSION) {
        *out = h;
        return attnd_fail(info, ATTND_EVERSION, "version", "version %u; %u is spoken here",
                          h.version, PROTO_VERSION);
    }
    if (h.body_bytes != msg.bytes - sizeof(h)) {
        return attnd_fail(info, ATTND_EPROTO, "body_bytes", "body_bytes %u, but %zu came",
                          h.body_bytes, msg.bytes - sizeof(h));
    }
    if (h.request == 0) {
        return attnd_fail(info, ATTND_EPROTO, "request", "request id 0");
    }
    *out = h;
    return ATTND_OK;
}

attnd_err proto_read_header(proto_view msg, proto_header *out, attnd_errinfo *info) {
    attnd_err err = read_frame(msg, out, info);
    if (err) {
        return err;
    }
    if ((err = proto_check_zero(out->flags, "flags", info)) ||
        (err = proto_check_zero((uint32_t)out->status, "status", info))) {
        return err;
    }
    return proto_check_zero(out->reserved, "reserved", info);
}

// read_error takes the error out of a reply with status < 0.
static attnd_err read_error(proto_view msg, attnd_err status, attnd_errinfo *info) {
    proto_error e;
    attnd_err err = proto_read(msg, &e, sizeof(e), false, info);
    if (err || !info) {
        return err ? err : status;
    }
    info->code = status;
    info->detail = e.detail;
    proto_copy_text(info->field, e.field, sizeof(e.field));
    proto_copy_text(info->text, e.text, sizeof(e.text));
    return status;
}

attnd_err proto_read_reply(proto_view msg, uint32_t op, uint64_t request, attnd_errinfo *info) {
    proto_header h = {0};
    attnd_err err = read_frame(msg, &h, info);
    if (err) {
        return err;
    }
    if (h.op != op || h.request != request) {
        return attnd_fail(info, ATTND_EPROTO, h.op != op ? "op" : "request",
                          "reply to %s %llu, asked was %s %llu", proto_op_name(h.op),
                          (unsigned long long)h.request, proto_op_name(op),
                          (unsigned long long)request);
    }
    if (h.flags || h.reserved || h.status > 0) {
        return attnd_fail(info, ATTND_EPROTO, "header", "reply with flags, status or reserved set");
    }
    return h.status ? read_error(msg, (attnd_err)h.status, info) : ATTND_OK;
}

attnd_err proto_read(proto_view msg, void *out, size_t bytes, bool exact, attnd_errinfo *info) {
    size_t body = msg.bytes < PROTO_BODY ? 0 : msg.bytes - PROTO_BODY;
    if (body < bytes || (exact && body > bytes)) {
        return attnd_fail(info, ATTND_EPROTO, "body_bytes", "body of %zu bytes, needs %s%zu", body,
                          exact ? "" : "at least ", bytes);
    }
    if (bytes > 0) {
        proto_copy(out, msg.data + PROTO_BODY, bytes);
    }
    return ATTND_OK;
}

// place checks that num_bytes at off lie in the message behind the fixed part.
static attnd_err place(proto_view msg, const char *field, uint64_t off, uint64_t num_bytes,
                       size_t fixed, const void **out, attnd_errinfo *info) {
    if (off % 8 != 0) {
        return attnd_fail(info, ATTND_EPROTO, field, "%s: offset %llu is not a multiple of 8",
                          field, (unsigned long long)off);
    }
    if (off < PROTO_BODY + fixed || off > msg.bytes || num_bytes > msg.bytes - off) {
        return attnd_fail(info, ATTND_EPROTO, field,
                          "%s: %llu bytes at offset %llu do not lie in the message of %zu", field,
                          (unsigned long long)num_bytes, (unsigned long long)off, msg.bytes);
    }
    *out = msg.data + off;
    return ATTND_OK;
}

attnd_err proto_array(proto_view msg, const char *field, uint64_t off, uint64_t count,
                      uint64_t elem_bytes, size_t fixed, const void **out, attnd_errinfo *info) {
    if (off == 0) {
        *out = NULL;
        return ATTND_OK;
    }
    uint64_t num_bytes;
    if (__builtin_mul_overflow(count, elem_bytes, &num_bytes)) {
        num_bytes = UINT64_MAX; // fits in no message
    }
    return place(msg, field, off, num_bytes, fixed, out, info);
}

uint64_t proto_tensor_extent(const proto_tensor_shape *shape, uint64_t stride_token,
                             uint64_t stride_head) {
    if (shape->rows == 0) {
        return 0;
    }
    uint64_t rows, heads, elems, num_bytes;
    if (__builtin_mul_overflow(shape->rows - 1, stride_token, &rows) ||
        __builtin_mul_overflow(shape->heads - 1, stride_head, &heads) ||
        __builtin_add_overflow(rows, heads, &elems) ||
        __builtin_add_overflow(elems, shape->dim, &elems) ||
        __builtin_mul_overflow(elems, attnd_dtype_bytes(shape->dtype), &num_bytes)) {
        return UINT64_MAX;
    }
    return num_bytes;
}

attnd_err proto_read_tensor(proto_view msg, const char *field, const proto_tensor *t,
                            const proto_tensor_shape *shape, size_t fixed, const void **out,
                            int64_t *stride_token, int64_t *stride_head, attnd_errinfo *info) {
    attnd_err err = proto_check_zero(t->reserved, field, info);
    if (err) {
        return err;
    }
    uint64_t head = t->stride_head ? t->stride_head : shape->dim;
    uint64_t token = t->stride_token ? t->stride_token : shape->heads * shape->dim;
    if (t->off == 0) {
        *out = NULL;
    } else if ((err = place(msg, field, t->off, proto_tensor_extent(shape, token, head), fixed, out,
                            info))) {
        return err;
    }
    *stride_token = (int64_t)token;
    *stride_head = (int64_t)head;
    return ATTND_OK;
}

attnd_err proto_check_zero(uint64_t value, const char *field, attnd_errinfo *info) {
    if (value != 0) {
        return attnd_fail(info, ATTND_EINVAL, field, "%s: reserved bits 0x%llx must be 0", field,
                          (unsigned long long)value);
    }
    return ATTND_OK;
}

attnd_err proto_check_name(const char name[PROTO_NAME_BYTES], const char *field, bool may_be_empty,
                           attnd_errinfo *info) {
    size_t len = strnlen(name, PROTO_NAME_BYTES);
    if (len == PROTO_NAME_BYTES) {
        return attnd_fail(info, ATTND_EINVAL, field, "%s is longer than %d bytes", field,
                          PROTO_NAME_BYTES - 1);
    }
    if (len == 0 && !may_be_empty) {
        return attnd_fail(info, ATTND_EINVAL, field, "%s is empty", field);
    }
    for (size_t i = 0; i < PROTO_NAME_BYTES; i++) {
        if (i < len ? name[i] < ' ' || name[i] > '~' : name[i] != 0) {
            return attnd_fail(info, ATTND_EINVAL, field, "%s: byte %zu is not %s", field, i,
                              i < len ? "printable ASCII" : "0 behind the name");
        }
    }
    return ATTND_OK;
}

void proto_copy_text(char *out, const char *text, size_t bytes) {
    size_t i = 0;
    for (; i < bytes - 1 && text[i]; i++) {
        out[i] = (char)(text[i] >= ' ' && text[i] <= '~' ? text[i] : '?');
    }
    memset(out + i, 0, bytes - i);
}

void proto_write_header(void *msg, uint32_t op, uint64_t request, attnd_err status,
                        size_t msg_bytes) {
    proto_header h = {.magic = PROTO_MAGIC,
                      .version = PROTO_VERSION,
                      .op = (uint16_t)op,
                      .request = request,
                      .body_bytes = (uint32_t)(msg_bytes - sizeof(proto_header)),
                      .status = status};
    memcpy(msg, &h, sizeof(h));
}

void proto_write_error(void *msg, uint32_t op, uint64_t request, const attnd_errinfo *info) {
    proto_error e = {.detail = info->detail};
    proto_copy_text(e.field, info->field, sizeof(e.field));
    proto_copy_text(e.text, info->text, sizeof(e.text));
    proto_write_header(msg, op, request, info->code, PROTO_ERROR_BYTES);
    memcpy((uint8_t *)msg + PROTO_BODY, &e, sizeof(e));
}

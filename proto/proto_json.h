// proto_json reads the JSON bodies of rare ops.  Text is checked whole (size, grammar, depth,
// UTF-8) before cJSON builds a tree of it; objects are then read key by key, and a key that nobody
// asked for is refused by its name.  Any thread; one document is one thread's.
//
//     cJSON *doc;
//     TRY(proto_json_parse(&doc, text, bytes, &info));
//     proto_obj o, rope;
//     proto_obj_open(&o, doc, &info);
//     proto_obj_require(&o, "layers");
//     proto_obj_u32(&o, "layers", 1, PROTO_MAX_LAYERS, &layers);
//     if (proto_obj_child(&o, "rope", &rope)) {
//         proto_obj_floats(&rope, "inv_freq", freq, MAX_FREQ, &num_freq);
//         proto_obj_close(&rope);
//     }
//     err = proto_obj_close(&o);                      // the first error of all the above
//     cJSON_Delete(doc);
//
// Errors stick: after the first one of an object or its children, getters do nothing, so that one
// look at the end is enough.  Its field is the path of the key: "layer_overrides[3].rope.inv_freq".
//
// Getters return true when the key is there and was good, and then fill their output; else the
// output is untouched.  A wrong type or range, and null where it has no meaning, is EINVAL.
#ifndef ATTND_PROTO_PROTO_JSON_H
#define ATTND_PROTO_PROTO_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "proto/proto_wire.h"

struct cJSON;

enum { PROTO_MAX_JSON_KEYS = 64 }; // of one object

// proto_json_check says whether text [bytes] is one JSON object that proto_json_parse would take.
// EMSGSIZE: over PROTO_MAX_JSON_BYTES.  EPROTO: anything else; stricter than RFC 8259 in that
// "\u0000" and more than PROTO_MAX_JSON_DEPTH levels are refused.
attnd_err proto_json_check(const void *text, size_t bytes, attnd_errinfo *info);

// proto_json_parse: errors as above, and ENOMEM.  The caller owns *out: cJSON_Delete.  A tree takes
// up to some 50 times the bytes of its text.
attnd_err proto_json_parse(struct cJSON **out, const void *text, size_t bytes, attnd_errinfo *info);

// proto_obj reads one JSON object.  Lives on the caller's stack; private.
typedef struct proto_obj {
    const struct cJSON *node;
    struct proto_obj *parent;
    uint64_t used; // bit i: key i was asked for
    uint32_t idx;  // in the array that proto_obj_each walks
    attnd_err err; // first error of this object and its closed children
    attnd_errinfo *info;
    char path[ATTND_ERR_FIELD_BYTES];
} proto_obj;

// proto_obj_open begins to read doc, which the caller keeps.  info may be NULL.
void proto_obj_open(proto_obj *o, const struct cJSON *doc, attnd_errinfo *info);

// proto_obj_close ends it and returns the first error, else EINVAL for a key that no getter was
// called for (or one that is there twice).  A child must be closed before its parent; its error is
// the parent's too.
attnd_err proto_obj_close(proto_obj *o);

// proto_obj_fail makes an error of the caller's own stick, with the path of key.  Returns it.
attnd_err proto_obj_fail(proto_obj *o, const char *key, attnd_err code, const char *fmt, ...)
    __attribute__((format(printf, 4, 5)));

// proto_obj_require is EINVAL when the key is missing.
void proto_obj_require(proto_obj *o, const char *key);

// proto_obj_null returns true when the key is there and null; a getter of that key need not follow.
bool proto_obj_null(proto_obj *o, const char *key);

bool proto_obj_bool(proto_obj *o, const char *key, bool *out);
// Whole numbers within [min, max].
bool proto_obj_u32(proto_obj *o, const char *key, uint32_t min, uint32_t max, uint32_t *out);
// A finite float32.
bool proto_obj_float(proto_obj *o, const char *key, float *out);
// A 64-bit id: a string of 1 to 16 hexadecimal digits.
bool proto_obj_id(proto_obj *o, const char *key, uint64_t *out);
// Exactly `bytes` bytes as a string of hexadecimal digits, first byte first.
bool proto_obj_hex(proto_obj *o, const char *key, uint8_t *out, size_t bytes);
// A string that fits out [bytes] with its NUL.  May be empty; no control characters.
bool proto_obj_text(proto_obj *o, const char *key, char *out, size_t bytes);
// Arrays of at most max numbers; *num of them were written.  out may be written in part when a
// number in the middle is bad.
bool proto_obj_floats(proto_obj *o, const char *key, float *out, uint32_t max, uint32_t *num);
bool proto_obj_ints(proto_obj *o, const char *key, int32_t *out, uint32_t max, uint32_t *num);

// proto_obj_child opens the object under key as *child.
bool proto_obj_child(proto_obj *o, const char *key, proto_obj *child);

// proto_obj_each opens the objects of the array under key one after another, and closes the one
// before; false at the end or after an error:
//     proto_obj item = {0};
//     while (proto_obj_each(&o, "layer_overrides", &item)) { ... }
bool proto_obj_each(proto_obj *o, const char *key, proto_obj *item);

// proto_json_add_id and proto_json_add_hex add what proto_obj_id and proto_obj_hex read.
// ATTND_ENOMEM.  hex takes at most 32 bytes.
attnd_err proto_json_add_id(struct cJSON *o, const char *key, uint64_t id);
attnd_err proto_json_add_hex(struct cJSON *o, const char *key, const uint8_t *data, size_t bytes);

#endif

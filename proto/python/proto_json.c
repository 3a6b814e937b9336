// Reading of JSON objects on top of cJSON's tree.  An object remembers in a bitmap which of its
// keys were asked for; what nobody asked for is found when it is closed.  A key that is there twice
// is found in the same way, since a getter marks the first one only.
#include "proto/proto_json.h"

#include <cjson/cJSON.h>
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "proto/proto_msg.h"

static attnd_err no_memory(size_t bytes, attnd_errinfo *info) {
    return attnd_fail(info, ATTND_ENOMEM, "json", "no memory for %zu bytes of JSON", bytes);
}

// parse_copy parses text that nobody else can change.
static attnd_err parse_copy(cJSON **out, const char *text, size_t bytes, attnd_errinfo *info) {
    attnd_err err = proto_json_check(text, bytes, info);
    if (err) {
        return err;
    }
    cJSON *doc = cJSON_ParseWithLength(text, bytes);
    if (!doc) { // the grammar is right, so it is the memory
        return no_memory(bytes, info);
    }
    *out = doc;
    return ATTND_OK;
}

// The text is walked several times, and cJSON sizes its strings on the first of two walks: what
// lies in shared memory must not change between them.
attnd_err proto_json_parse(cJSON **out, const void *text, size_t bytes, attnd_errinfo *info) {
    if (bytes > PROTO_MAX_JSON_BYTES) {
        return proto_json_check(text, bytes, info); // says so without a look at it
    }
    char *copy = malloc(bytes + 1);
    if (!copy) {
        return no_memory(bytes, info);
    }
    proto_copy(copy, text, bytes);
    attnd_err err = parse_copy(out, copy, bytes, info);
    free(copy);
    return err;
}

// join writes the path of key under o, or of its element idx; a long one is cut.
static void join(char out[ATTND_ERR_FIELD_BYTES], const proto_obj *o, const char *key, int idx) {
    char path[2 * ATTND_ERR_FIELD_BYTES + 16];
    int len = snprintf(path, sizeof(path), "%s%s%.*s", o->path, o->path[0] ? "." : "",
                       ATTND_ERR_FIELD_BYTES, key);
    if (idx >= 0 && (size_t)len < sizeof(path)) {
        snprintf(path + len, sizeof(path) - (size_t)len, "[%d]", idx);
    }
    size_t i = 0;
    for (; i < ATTND_ERR_FIELD_BYTES - 1 && path[i]; i++) {
        out[i] = (char)(path[i] >= ' ' && path[i] <= '~' ? path[i] : '?'); // keys come from a peer
    }
    out[i] = '\0';
}

// stick makes err the error of o and of what it lies in.
static attnd_err stick(proto_obj *o, attnd_err err) {
    for (proto_obj *p = o; p; p = p->parent) {
        p->err = err;
    }
    return err;
}

attnd_err proto_obj_fail(proto_obj *o, const char *key, attnd_err code, const char *fmt, ...) {
    if (o->err) {
        return o->err;
    }
    char text[ATTND_ERR_TEXT_BYTES], path[ATTND_ERR_FIELD_BYTES];
    va_list args;
    va_start(args, fmt);
    vsnprintf(text, sizeof(text), fmt, args);
    va_end(args);
    join(path, o, key, -1);
    return stick(o, attnd_fail(o->info, code, path, "%s: %s", path, text));
}

// begin opens node as o, whose path is set already.
static bool begin(proto_obj *o, const cJSON *node, proto_obj *parent, attnd_errinfo *info) {
    o->node = node;
    o->parent = parent;
    o->used = 0;
    o->err = ATTND_OK;
    o->info = info;
    const char *name = o->path[0] ? o->path : "json";
    if (!cJSON_IsObject(node)) {
        stick(o, attnd_fail(info, ATTND_EINVAL, name, "%s is not an object", name));
    } else if (cJSON_GetArraySize(node) > PROTO_MAX_JSON_KEYS) {
        stick(o, attnd_fail(info, ATTND_EINVAL, name, "%s has more than %d keys", name,
                            PROTO_MAX_JSON_KEYS));
    }
    return o->err == ATTND_OK;
}

void proto_obj_open(proto_obj *o, const cJSON *doc, attnd_errinfo *info) {
    o->idx = 0;
    o->path[0] = '\0';
    begin(o, doc, NULL, info);
}

attnd_err proto_obj_close(proto_obj *o) {
    if (o->err) {
        return o->err;
    }
    uint32_t i = 0;
    for (const cJSON *item = o->node->child; item; item = item->next, i++) {
        if (!(o->used >> i & 1)) {
            return proto_obj_fail(o, item->string, ATTND_EINVAL, "unknown key, or given twice");
        }
    }
    return ATTND_OK;
}

// find returns the value of a key and marks the key as used; NULL when it is missing or o has an
// error.
static const cJSON *find(proto_obj *o, const char *key) {
    if (o->err) {
        return NULL;
    }
    uint32_t i = 0;
    for (const cJSON *item = o->node->child; item; item = item->next, i++) {
        if (strcmp(item->string, key) == 0) {
            o->used |= UINT64_C(1) << i;
            return item;
        }
    }
    return NULL;
}

void proto_obj_require(proto_obj *o, const char *key) {
    uint64_t used = o->used;
    if (!find(o, key)) {
        proto_obj_fail(o, key, ATTND_EINVAL, "missing");
    }
    o->used = used;
}

bool proto_obj_null(proto_obj *o, const char *key) {
    uint64_t used = o->used;
    if (cJSON_IsNull(find(o, key))) {
        return true;
    }
    o->used = used;
    return false;
}

bool proto_obj_bool(proto_obj *o, const char *key, bool *out) {
    const cJSON *item = find(o, key);
    if (!item) {
        return false;
    }
    if (!cJSON_IsBool(item)) {
        proto_obj_fail(o, key, ATTND_EINVAL, "not true or false");
        return false;
    }
    *out = cJSON_IsTrue(item);
    return true;
}

// whole reads a whole number within [min, max], which float64 holds exactly.
static bool whole(const cJSON *item, double min, double max, double *out) {
    double v = cJSON_IsNumber(item) ? item->valuedouble : NAN;
    if (!(v >= min && v <= max && v == floor(v))) {
        return false;
    }
    *out = v;
    return true;
}

bool proto_obj_u32(proto_obj *o, const char *key, uint32_t min, uint32_t max, uint32_t *out) {
    const cJSON *item = find(o, key);
    double v;
    if (!item) {
        return false;
    }
    if (!whole(item, min, max, &v)) {
        proto_obj_fail(o, key, ATTND_EINVAL, "not a whole number from %u to %u", min, max);
        return false;
    }
    *out = (uint32_t)v;
    return true;
}

static bool finite32(const cJSON *item, float *out) {
    if (!cJSON_IsNumber(item) || !(fabs(item->valuedouble) <= (double)FLT_MAX)) {
        return false;
    }
    *out = (float)item->valuedouble;
    return true;
}

bool proto_obj_float(proto_obj *o, const char *key, float *out) {
    const cJSON *item = find(o, key);
    if (!item) {
        return false;
    }
    if (!finite32(item, out)) {
        proto_obj_fail(o, key, ATTND_EINVAL, "not a finite float32");
        return false;
    }
    return true;
}

// text_of returns a string's bytes, NULL (and an error) when it is none.
static const char *text_of(proto_obj *o, const char *key, const char *what) {
    const cJSON *item = find(o, key);
    if (!item) {
        return NULL;
    }
    if (!cJSON_IsString(item)) {
        proto_obj_fail(o, key, ATTND_EINVAL, "not %s", what);
        return NULL;
    }
    return item->valuestring;
}

static int nibble(char c) {
    const char *const hex = "0123456789abcdef";
    const char *at = c ? strchr(hex, c >= 'A' && c <= 'F' ? c - 'A' + 'a' : c) : NULL;
    return at ? (int)(at - hex) : -1;
}

bool proto_obj_id(proto_obj *o, const char *key, uint64_t *out) {
    const char *text = text_of(o, key, "an id in hexadecimal");
    if (!text) {
        return false;
    }
    uint64_t id = 0;
    size_t len = 0;
    while (len <= 16 && nibble(text[len]) >= 0) {
        id = id << 4 | (uint64_t)nibble(text[len++]);
    }
    if (len < 1 || len > 16 || text[len]) {
        proto_obj_fail(o, key, ATTND_EINVAL, "not an id of 1 to 16 hexadecimal digits");
        return false;
    }
    *out = id;
    return true;
}

bool proto_obj_hex(proto_obj *o, const char *key, uint8_t *out, size_t bytes) {
    const char *text = text_of(o, key, "a string of hexadecimal digits");
    if (!text) {
        return false;
    }
    if (strlen(text) != 2 * bytes || strspn(text, "0123456789abcdefABCDEF") != 2 * bytes) {
        proto_obj_fail(o, key, ATTND_EINVAL, "not %zu hexadecimal digits", 2 * bytes);
        return false;
    }
    for (size_t i = 0; i < bytes; i++) {
        out[i] = (uint8_t)(nibble(text[2 * i]) * 16 + nibble(text[2 * i + 1]));
    }
    return true;
}

bool proto_obj_text(proto_obj *o, const char *key, char *out, size_t bytes) {
    const char *text = text_of(o, key, "a string");
    if (!text) {
        return false;
    }
    size_t len = strlen(text);
    if (len >= bytes) {
        proto_obj_fail(o, key, ATTND_EINVAL, "longer than %zu bytes", bytes - 1);
        return false;
    }
    for (size_t i = 0; i < len; i++) {
        if ((unsigned char)text[i] < ' ' || text[i] == '\x7f') {
            proto_obj_fail(o, key, ATTND_EINVAL, "control character at byte %zu", i);
            return false;
        }
    }
    memcpy(out, text, len + 1);
    return true;
}

// array_of returns an array of at most max elements, NULL (and perhaps an error) when it is none.
static const cJSON *array_of(proto_obj *o, const char *key, uint32_t max) {
    const cJSON *item = find(o, key);
    if (!item) {
        return NULL;
    }
    if (!cJSON_IsArray(item)) {
        proto_obj_fail(o, key, ATTND_EINVAL, "not an array");
        return NULL;
    }
    if ((uint32_t)cJSON_GetArraySize(item) > max) {
        proto_obj_fail(o, key, ATTND_EINVAL, "more than %u elements", max);
        return NULL;
    }
    return item;
}

bool proto_obj_floats(proto_obj *o, const char *key, float *out, uint32_t max, uint32_t *num) {
    const cJSON *array = array_of(o, key, max);
    if (!array) {
        return false;
    }
    uint32_t n = 0;
    for (const cJSON *item = array->child; item; item = item->next) {
        float v;
        if (!finite32(item, &v)) {
            proto_obj_fail(o, key, ATTND_EINVAL, "element %u is not a finite float32", n);
            return false;
        }
        out[n++] = v;
    }
    *num = n;
    return true;
}

bool proto_obj_ints(proto_obj *o, const char *key, int32_t *out, uint32_t max, uint32_t *num) {
    const cJSON *array = array_of(o, key, max);
    if (!array) {
        return false;
    }
    uint32_t n = 0;
    for (const cJSON *item = array->child; item; item = item->next) {
        double v;
        if (!whole(item, INT32_MIN, INT32_MAX, &v)) {
            proto_obj_fail(o, key, ATTND_EINVAL, "element %u is not a whole int32", n);
            return false;
        }
        out[n++] = (int32_t)v;
    }
    *num = n;
    return true;
}

bool proto_obj_child(proto_obj *o, const char *key, proto_obj *child) {
    const cJSON *item = find(o, key);
    if (!item) {
        return false;
    }
    child->idx = 0;
    join(child->path, o, key, -1);
    return begin(child, item, o, o->info);
}

bool proto_obj_each(proto_obj *o, const char *key, proto_obj *item) {
    const cJSON *next = NULL;
    if (o->err) {
        return false;
    }
    if (!item->node) {
        const cJSON *array = array_of(o, key, UINT32_MAX);
        next = array ? array->child : NULL;
        item->idx = 0;
    } else if (!proto_obj_close(item)) {
        next = item->node->next;
        item->idx++;
    }
    if (!next) {
        return false;
    }
    join(item->path, o, key, (int)item->idx);
    return begin(item, next, o, o->info);
}

attnd_err proto_json_add_id(cJSON *o, const char *key, uint64_t id) {
    char text[17];
    snprintf(text, sizeof(text), "%llx", (unsigned long long)id);
    return cJSON_AddStringToObject(o, key, text) ? ATTND_OK : ATTND_ENOMEM;
}

attnd_err proto_json_add_hex(cJSON *o, const char *key, const uint8_t *data, size_t bytes) {
    char text[65];
    ATTND_ASSERT(bytes * 2 < sizeof(text));
    for (size_t i = 0; i < bytes; i++) {
        snprintf(text + 2 * i, 3, "%02x", data[i]);
    }
    text[2 * bytes] = '\0';
    return cJSON_AddStringToObject(o, key, text) ? ATTND_OK : ATTND_ENOMEM;
}

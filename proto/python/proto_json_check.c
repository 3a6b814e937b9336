// The grammar of JSON (RFC 8259), checked before cJSON builds anything: cJSON reads numbers like
// "01" and "1.", control characters in strings and bytes that are no UTF-8, cuts strings at
// "\u0000", and descends 1000 levels.  A recursive descent whose depth is bounded by
// PROTO_MAX_JSON_DEPTH; every byte is looked at a fixed number of times; nothing is allocated.
#include <string.h>

#include "proto/proto_json.h"

enum { MAX_NUMBER_CHARS = 63 }; // what cJSON takes

typedef struct scan {
    const uint8_t *at, *end;
    const uint8_t *begin;
    const char *wrong; // what was wrong at `at`; NULL = nothing yet
} scan;

static bool value(scan *s, int depth);

static bool fail(scan *s, const char *wrong) {
    s->wrong = s->wrong ? s->wrong : wrong;
    return false;
}

static int peek(const scan *s) {
    return s->at < s->end ? *s->at : -1;
}

static bool accept(scan *s, int c) {
    if (peek(s) != c) {
        return false;
    }
    s->at++;
    return true;
}

static void space(scan *s) {
    while (s->at < s->end &&
           (*s->at == ' ' || *s->at == '\t' || *s->at == '\n' || *s->at == '\r')) {
        s->at++;
    }
}

static bool literal(scan *s, const char *word) {
    size_t len = strlen(word);
    if ((size_t)(s->end - s->at) < len || memcmp(s->at, word, len) != 0) {
        return fail(s, "a value is expected");
    }
    s->at += len;
    return true;
}

static bool digits(scan *s) {
    const uint8_t *first = s->at;
    while (peek(s) >= '0' && peek(s) <= '9') {
        s->at++;
    }
    return s->at > first || fail(s, "a digit is expected");
}

static bool number(scan *s) {
    const uint8_t *first = s->at;
    accept(s, '-');
    if (!accept(s, '0') && !digits(s)) {
        return false;
    }
    if (accept(s, '.') && !digits(s)) {
        return false;
    }
    if (accept(s, 'e') || accept(s, 'E')) {
        if (!accept(s, '+')) {
            accept(s, '-');
        }
        if (!digits(s)) {
            return false;
        }
    }
    return s->at - first <= MAX_NUMBER_CHARS || fail(s, "a number is too long");
}

// hex4 reads four hexadecimal digits; -1 when they are none.
static int hex4(scan *s) {
    int code = 0;
    for (int i = 0; i < 4; i++) {
        int c = peek(s), lower = c | 0x20;
        if (c >= '0' && c <= '9') {
            code = code * 16 + c - '0';
        } else if (lower >= 'a' && lower <= 'f') {
            code = code * 16 + lower - 'a' + 10;
        } else {
            return -1;
        }
        s->at++;
    }
    return code;
}

static bool escape(scan *s) {
    if (!accept(s, 'u')) {
        int c = peek(s);
        if (c <= 0 || !strchr("\"\\/bfnrt", c)) {
            return fail(s, "bad escape");
        }
        s->at++;
        return true;
    }
    int code = hex4(s);
    if (code >= 0xd800 && code <= 0xdbff && accept(s, '\\') && accept(s, 'u')) {
        int low = hex4(s);
        return (low >= 0xdc00 && low <= 0xdfff) || fail(s, "bad surrogate pair");
    }
    return (code > 0 && (code < 0xd800 || code > 0xdfff)) || fail(s, "bad \\u escape");
}

// utf8 reads one character of more than one byte: no overlong form, no surrogate, at most U+10FFFF.
static bool utf8(scan *s) {
    uint32_t lead = *s->at++;
    int more = lead >= 0xf0 ? 3 : lead >= 0xe0 ? 2 : 1;
    if (lead < 0xc2 || lead > 0xf4) {
        return fail(s, "not UTF-8");
    }
    uint32_t code = lead & (0x3fu >> more);
    for (int i = 0; i < more; i++) {
        int c = peek(s);
        if (c < 0x80 || c > 0xbf) {
            return fail(s, "not UTF-8");
        }
        code = code << 6 | ((uint32_t)c & 0x3fu);
        s->at++;
    }
    static const uint32_t least[] = {0, 0x80, 0x800, 0x10000};
    if (code < least[more] || (code >= 0xd800 && code <= 0xdfff) || code > 0x10ffff) {
        return fail(s, "not UTF-8");
    }
    return true;
}

static bool string(scan *s) {
    if (!accept(s, '"')) {
        return fail(s, "a string is expected");
    }
    for (;;) {
        int c = peek(s);
        if (c < 0x20) { // the end too
            return fail(s, c < 0 ? "a string has no end" : "control character in a string");
        }
        if (c >= 0x80) {
            if (!utf8(s)) {
                return false;
            }
            continue;
        }
        s->at++;
        if (c == '"') {
            return true;
        }
        if (c == '\\' && !escape(s)) {
            return false;
        }
    }
}

// members reads what lies between the brackets of an object (close = '}') or an array.
static bool members(scan *s, int close, int depth) {
    if (depth > PROTO_MAX_JSON_DEPTH) {
        return fail(s, "nested too deep");
    }
    s->at++;
    space(s);
    if (accept(s, close)) {
        return true;
    }
    do {
        space(s);
        if (close == '}') {
            if (!string(s)) {
                return false;
            }
            space(s);
            if (!accept(s, ':')) {
                return fail(s, "':' is expected");
            }
        }
        if (!value(s, depth)) {
            return false;
        }
        space(s);
    } while (accept(s, ','));
    return accept(s, close) || fail(s, "',' or a closing bracket is expected");
}

// value reads one value that lies inside `depth` levels.
static bool value(scan *s, int depth) {
    space(s);
    switch (peek(s)) {
    case '{':
        return members(s, '}', depth + 1);
    case '[':
        return members(s, ']', depth + 1);
    case '"':
        return string(s);
    case 't':
        return literal(s, "true");
    case 'f':
        return literal(s, "false");
    case 'n':
        return literal(s, "null");
    case '-':
    case '0':
    case '1':
    case '2':
    case '3':
    case '4':
    case '5':
    case '6':
    case '7':
    case '8':
    case '9':
        return number(s);
    default:
        return fail(s, "a value is expected");
    }
}

attnd_err proto_json_check(const void *text, size_t bytes, attnd_errinfo *info) {
    if (bytes > PROTO_MAX_JSON_BYTES) {
        return attnd_fail(info, ATTND_EMSGSIZE, "json", "JSON of %zu bytes, at most %d", bytes,
                          PROTO_MAX_JSON_BYTES);
    }
    const uint8_t *begin = text;
    scan s = {.at = begin, .end = begin + bytes, .begin = begin};
    space(&s);
    bool good = peek(&s) == '{' ? value(&s, 0) : fail(&s, "an object is expected");
    space(&s);
    if (good && s.at < s.end) {
        good = fail(&s, "something follows the object");
    }
    if (!good) {
        return attnd_fail(info, ATTND_EPROTO, "json", "JSON: %s at byte %zu", s.wrong,
                          (size_t)(s.at - s.begin));
    }
    return ATTND_OK;
}

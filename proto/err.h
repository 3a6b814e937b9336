// err is the one error table of attnd: every function that can fail returns an attnd_err, and the
// same codes travel on the wire.  Codes are only ever appended; a number never changes its meaning.
// Any thread.
#ifndef ATTND_PROTO_ERR_H
#define ATTND_PROTO_ERR_H

#include <stdarg.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// XX(name, code, text)
#define ATTND_ERR_MAP(XX)                                  \
    XX(OK, 0, "ok")                                        \
    XX(EINVAL, -1, "invalid argument")                     \
    XX(ENOMEM, -2, "out of memory")                        \
    XX(ENOSPC, -3, "no free blocks")                       \
    XX(EBUSY, -4, "busy or over a limit, try again later") \
    XX(EMSGSIZE, -5, "message too large")                  \
    XX(ENOTSUP, -6, "not supported")                       \
    XX(ESTALE, -7, "stale handle or request id")           \
    XX(EPERM, -8, "not permitted")                         \
    XX(ENOENT, -9, "no such thing")                        \
    XX(EEXIST, -10, "exists already")                      \
    XX(ETIMEDOUT, -11, "timed out")                        \
    XX(ECANCELED, -12, "canceled")                         \
    XX(ESHUTDOWN, -13, "daemon is draining")               \
    XX(EPROTO, -14, "malformed message")                   \
    XX(EVERSION, -15, "protocol version not spoken here")  \
    XX(ECONN, -16, "no connection to the daemon")          \
    XX(EIO, -17, "input/output error")                     \
    XX(ECUDA, -18, "CUDA error")

typedef enum attnd_err {
#define XX(name, code, text) ATTND_##name = code,
    ATTND_ERR_MAP(XX)
#undef XX
} attnd_err;

// attnd_errinfo says what an error was about.  field names the offending argument or message field
// ("" when there is none), text is one line for a person, detail is a number that the code defines
// (the first missing layer of a commit, a CUDA error code; else 0).
enum { ATTND_ERR_FIELD_BYTES = 32, ATTND_ERR_TEXT_BYTES = 192 };
typedef struct attnd_errinfo {
    attnd_err code;
    int32_t detail;
    char field[ATTND_ERR_FIELD_BYTES]; // NUL-terminated
    char text[ATTND_ERR_TEXT_BYTES];   // NUL-terminated
} attnd_errinfo;

// attnd_strerror returns the text of a code, "unknown error" for a number that is none.
const char *attnd_strerror(attnd_err err);

// attnd_errname returns the name of a code ("EINVAL"), "EUNKNOWN" for a number that is none.
const char *attnd_errname(attnd_err err);

// attnd_fail fills *info (which may be NULL), and returns code, so that a check is one line:
//     return attnd_fail(info, ATTND_EINVAL, "kv_len", "kv_len %d is negative", kv_len);
// field may be NULL.  A text that does not fit is cut.
attnd_err attnd_fail(attnd_errinfo *info, attnd_err code, const char *field, const char *fmt, ...)
    __attribute__((cold, format(printf, 4, 5)));

// ATTND_ASSERT is for bugs in attnd, stays on in release builds, prints and aborts.  What comes
// from a client, a file or a GPU is an error, never an assert.
#define ATTND_ASSERT(cond) ((cond) ? (void)0 : attnd_assert_failed(#cond, __FILE__, __LINE__))

void attnd_assert_failed(const char *cond, const char *file, int line) __attribute__((noreturn));

#ifdef __cplusplus
}
#endif

#endif

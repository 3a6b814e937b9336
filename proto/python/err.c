// The texts of the error table, the filling of attnd_errinfo, and the assert that stays on.
#include "proto/err.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

const char *attnd_strerror(attnd_err err) {
    switch (err) {
#define XX(name, code, text) \
    case ATTND_##name:       \
        return text;
        ATTND_ERR_MAP(XX)
#undef XX
    }
    return "unknown error";
}

const char *attnd_errname(attnd_err err) {
    switch (err) {
#define XX(name, code, text) \
    case ATTND_##name:       \
        return #name;
        ATTND_ERR_MAP(XX)
#undef XX
    }
    return "EUNKNOWN";
}

attnd_err attnd_fail(attnd_errinfo *info, attnd_err code, const char *field, const char *fmt, ...) {
    if (!info) {
        return code;
    }
    info->code = code;
    info->detail = 0;
    snprintf(info->field, sizeof(info->field), "%s", field ? field : "");
    va_list args;
    va_start(args, fmt);
    vsnprintf(info->text, sizeof(info->text), fmt, args);
    va_end(args);
    return code;
}

_Noreturn void attnd_assert_failed(const char *cond, const char *file, int line) {
    fprintf(stderr, "%s:%d: assertion failed: %s\n", file, line, cond);
    abort();
}

// The configuration file: INI, read by inih, and written back by --dump-config.
//
// inih's handler gets no line number as distributions build it, so the reader that feeds it lines
// counts them.  inih cuts a line at 199 bytes and takes the rest for a new one; the reader refuses
// such a line instead.
#include <errno.h>
#include <ini.h>
#include <stdlib.h>
#include <string.h>

#include "server/srv_conf.h"

enum { MAX_KEYS = 64 }; // rows of the table and tenants' keys; bits of `seen`

typedef struct loader {
    srv_conf *conf;
    FILE *file;
    int line;
    attnd_err err;
    attnd_errinfo info;                      // of the first error
    int error_line;                          // its line
    uint64_t seen[1 + SRV_CONF_MAX_TENANTS]; // keys set by this file: own sections, each tenant
} loader;

static void note_error(loader *l, attnd_err err) {
    l->err = err;
    l->error_line = l->line;
}

static char *read_line(char *buf, int bytes, void *arg) {
    loader *l = arg;
    if (!fgets(buf, bytes, l->file)) {
        return NULL;
    }
    l->line++;
    if (!strchr(buf, '\n') && !feof(l->file) && !l->err) {
        note_error(l, attnd_fail(&l->info, ATTND_EINVAL, "", "the line is longer than %d bytes",
                                 bytes - 2));
    }
    return buf;
}

// first_time marks a key as set and is false when the file has set it before.
static bool first_time(loader *l, const srv_conf_key *row, const char *section) {
    size_t who = 0;
    for (uint32_t i = 0; i < l->conf->num_tenants; i++) {
        if (strncmp(section, "tenant ", 7) == 0 && !strcmp(section + 7, l->conf->tenants[i].name)) {
            who = i + 1;
        }
    }
    size_t key_idx = (size_t)(row - srv_conf_keys);
    ATTND_ASSERT(key_idx < MAX_KEYS);
    uint64_t bit = 1ull << key_idx;
    bool first = !(l->seen[who] & bit);
    l->seen[who] |= bit;
    return first;
}

// take_key is inih's handler; 0 tells it of an error, and it goes on reading.
static int take_key(void *arg, const char *section, const char *name, const char *value) {
    loader *l = arg;
    if (l->err) {
        return 0;
    }
    char key[2 * SRV_CONF_NAME_BYTES + 64];
    int len = snprintf(key, sizeof(key), "%s.%s", section, name);
    attnd_err err = ATTND_OK;
    if (len < 0 || (size_t)len >= sizeof(key)) {
        err = attnd_fail(&l->info, ATTND_EINVAL, "", "the name of the key is too long");
    } else {
        err = srv_conf_set(l->conf, key, value, &l->info);
    }
    if (!err && !first_time(l, srv_conf_find(key), section)) {
        err = attnd_fail(&l->info, ATTND_EINVAL, name, "%.64s is set twice", key);
    }
    if (err) {
        note_error(l, err);
    }
    return err == ATTND_OK;
}

attnd_err srv_conf_load(srv_conf *conf, const char *path, attnd_errinfo *info) {
    loader l = {.conf = conf, .file = fopen(path, "re")};
    if (!l.file) {
        return attnd_fail(info, ATTND_EIO, "config", "%.120s: %s", path, strerror(errno));
    }
    int bad_line = ini_parse_stream(read_line, &l, take_key, &l);
    bool unreadable = ferror(l.file) != 0;
    fclose(l.file);
    if (unreadable) {
        return attnd_fail(info, ATTND_EIO, "config", "%.120s: cannot be read", path);
    }
    if (bad_line && (!l.err || bad_line < l.error_line)) {
        return attnd_fail(info, ATTND_EINVAL, "", "%.64s:%d: neither [section] nor key = value",
                          path, bad_line);
    }
    if (l.err) {
        return attnd_fail(info, ATTND_EINVAL, l.info.field, "%.64s:%d: %s", path, l.error_line,
                          l.info.text);
    }
    return ATTND_OK;
}

typedef struct dump {
    FILE *out;
    char section[2 * SRV_CONF_NAME_BYTES];
} dump;

static void dump_key(void *arg, const char *key, const char *value) {
    dump *d = arg;
    const char *dot = strrchr(key, '.');
    int len = (int)(dot - key);
    if (strncmp(d->section, key, (size_t)len) != 0 || d->section[len]) {
        fprintf(d->out, "%s[%.*s]\n", d->section[0] ? "\n" : "", len, key);
        snprintf(d->section, sizeof(d->section), "%.*s", len, key);
    }
    fprintf(d->out, "%s = %s\n", dot + 1, value);
}

void srv_conf_dump(const srv_conf *conf, FILE *out) {
    dump d = {.out = out};
    srv_conf_each(conf, dump_key, &d);
}

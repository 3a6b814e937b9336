// The configuration file: INI, read by inih, and written back by --dump-config.  Every line that is
// wrong is told of, in order.
//
// inih's handler gets no line number as distributions build it, so the reader that feeds it lines
// counts them.  inih cuts a line at 199 bytes and takes the rest for a new one; the reader refuses
// such a line instead.  And inih cuts a section's name at 49 bytes, so the reader keeps the whole.
#include <errno.h>
#include <ini.h>
#include <stdlib.h>
#include <string.h>

#include "server/srv_conf.h"

enum {
    MAX_KEYS = 64, // rows of the table and tenants' keys; bits of `seen`
};

typedef struct loader {
    srv_conf *conf;
    const char *path;
    FILE *file;
    int line;
    char section[SRV_CONF_SECTION_BYTES]; // that the line is in, "" before the first
    bool lost; // behind a section header that is none: whose keys these are is not known
    srv_conf_errors *errors;
    uint64_t seen[1 + SRV_CONF_MAX_TENANTS]; // keys set by this file: own sections, each tenant
} loader;

static void wrong(loader *l, const char *what) {
    srv_conf_error(l->errors, "%.64s:%d: %s", l->path, l->line, what);
}

// drop_rest reads the rest of a line that is too long, which is no line of its own.
static void drop_rest(FILE *file) {
    for (int c = 0; c != '\n' && c != EOF;) {
        c = fgetc(file);
    }
}

// take_section returns what is wrong with a section's header, NULL when it is one.  inih tells of
// no section, only of keys in one, so a tenant without any is added here; and it would cut a long
// name, stay in the section before when there is a comment in the name, and skip what is behind it.
static const char *take_section(loader *l, const char *text, attnd_errinfo *info) {
    size_t len = strcspn(text + 1, "];");
    const char *end = text + 1 + len;
    l->lost = true;
    if (*end != ']' || !strchr(";#", end[1 + strspn(end + 1, " \t\r\n")])) {
        return "a section has the form [NAME]";
    }
    if (len >= sizeof(l->section)) {
        return "a tenant's name is longer than 63 bytes";
    }
    memcpy(l->section, text + 1, len);
    l->section[len] = '\0';
    l->lost = srv_conf_section(l->conf, l->section, info) != ATTND_OK;
    return l->lost ? info->text : NULL;
}

// what_is_wrong returns why a line can be nothing, NULL when inih may see it; the text may be
// info's.
static const char *what_is_wrong(loader *l, const char *line, attnd_errinfo *info) {
    const char *text = line + (strncmp(line, "\xef\xbb\xbf", 3) == 0 ? 3 : 0);
    text += strspn(text, " \t\r\n");
    if (*text == '[') {
        return take_section(l, text, info);
    }
    bool is_key = !*text || strchr(";#", *text) || strpbrk(text, "=:");
    return is_key ? NULL : "neither [section] nor key = value";
}

// read_line feeds inih, which tells of the first line only that it does not understand; so these
// are told of here, and inih gets an empty one.
static char *read_line(char *buf, int bytes, void *arg) {
    loader *l = arg;
    if (!fgets(buf, bytes, l->file)) {
        return NULL;
    }
    l->line++;
    const char *why = NULL;
    attnd_errinfo info;
    if (!strchr(buf, '\n') && !feof(l->file)) {
        why = "the line is longer than 198 bytes";
        drop_rest(l->file);
    } else {
        why = what_is_wrong(l, buf, &info);
    }
    if (why) {
        wrong(l, why);
        strcpy(buf, "\n");
    }
    return buf;
}

// first_time marks a key as set and is false when the file has set it before.
static bool first_time(loader *l, const srv_conf_key *row) {
    const char *section = l->section;
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
static int take_key(void *arg, const char *cut, const char *name, const char *value) {
    (void)cut; // the section
    loader *l = arg;
    const char *section = l->section;
    if (l->lost) {
        return 1;
    }
    char key[2 * SRV_CONF_NAME_BYTES + 64];
    attnd_errinfo info;
    attnd_err err = ATTND_OK;
    int len = snprintf(key, sizeof(key), "%s%s%s", section, section[0] ? "." : "", name);
    if (len < 0 || (size_t)len >= sizeof(key)) {
        err = attnd_fail(&info, ATTND_EINVAL, "", "the name of the key is too long");
    } else {
        err = srv_conf_set(l->conf, key, value, &info);
    }
    if (!err && !first_time(l, srv_conf_find(key))) {
        err = attnd_fail(&info, ATTND_EINVAL, name, "%.64s is set twice", key);
    }
    if (err) {
        wrong(l, info.text);
    }
    return err == ATTND_OK;
}

attnd_err srv_conf_load(srv_conf *conf, const char *path, srv_conf_errors *errors) {
    uint32_t before = errors->num;
    loader l = {.conf = conf, .path = path, .file = fopen(path, "re"), .errors = errors};
    if (!l.file) {
        srv_conf_error(errors, "%.120s: %s", path, strerror(errno));
        return ATTND_EIO;
    }
    ini_parse_stream(read_line, &l, take_key, &l);
    bool unreadable = ferror(l.file) != 0;
    fclose(l.file);
    if (unreadable) {
        srv_conf_error(errors, "%.120s: cannot be read", path);
        return ATTND_EIO;
    }
    return errors->num == before ? ATTND_OK : ATTND_EINVAL;
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

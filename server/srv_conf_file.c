// The configuration file: INI, read by inih, and written back by --dump-config.  Every line that is
// wrong is told of, in order.
//
// inih's handler gets no line number as distributions build it, so the reader that feeds it lines
// counts them.  inih cuts a line at 199 bytes and takes the rest for a new one; the reader refuses
// such a line instead.  And inih cuts a section's name at 49 bytes, so the reader keeps the whole.
//
// A value may go on in lines that begin with a blank: each adds a space and what it holds.  They
// are joined here, since inih gives them away one by one.  A line that sets a key of its section is
// no such line, however far it is indented.
#include <errno.h>
#include <ini.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "server/srv_conf.h"

enum { LINE_BYTES = 198 }; // inih's, without the newline

static const char indent[] = "    "; // of lines that go on, in a dump

#define TOO_LONG \
    "the line is longer than 198 bytes; a value can go on in lines that begin with a space"

typedef struct loader {
    srv_conf *conf;
    const char *path;
    FILE *file;
    int line;
    char section[SRV_CONF_SECTION_BYTES]; // that the line is in, "" before the first
    bool lost; // behind a section header that is none: whose keys these are is not known
    srv_conf_errors *errors;
    bool pending; // key and value were read, on line `at`, and the next lines may add to the value
    int at;
    char key[2 * SRV_CONF_NAME_BYTES + 64], value[SRV_CONF_TEXT_BYTES + LINE_BYTES];
    bool *seen; // [1 + SRV_CONF_MAX_TENANTS, srv_conf_num_keys], keys set by this file: own
                // sections, then each tenant
} loader;

static void wrong(loader *l, const char *what) {
    srv_conf_error(l->errors, "%.64s:%d: %s", l->path, l->line, what);
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
    bool *seen = &l->seen[who * srv_conf_num_keys + (size_t)(row - srv_conf_keys)];
    bool first = !*seen;
    *seen = true;
    return first;
}

// settle sets the key whose value is complete.
static void settle(loader *l) {
    attnd_errinfo info;
    if (!l->pending) {
        return;
    }
    l->pending = false;
    attnd_err err = srv_conf_set(l->conf, l->key, l->value, &info);
    if (!err && !first_time(l, srv_conf_find(l->key))) {
        err = attnd_fail(&info, ATTND_EINVAL, "", "%.64s is set twice", l->key);
    }
    if (err) {
        srv_conf_error(l->errors, "%.64s:%d: %s", l->path, l->at, info.text);
    }
}

// sets_key is true for a line that sets a key of the section it is in.
static bool sets_key(const loader *l, const char *text) {
    char key[sizeof(l->key)];
    size_t len = strcspn(text, " \t=");
    return text[len + strspn(text + len, " \t")] == '=' &&
           snprintf(key, sizeof(key), "%s.%.*s", l->section, (int)len, text) < (int)sizeof(key) &&
           srv_conf_find(key);
}

// goes_on is true for a line that adds to the value before it.
static bool goes_on(const loader *l, const char *line) {
    const char *text = line + strspn(line, " \t");
    return l->pending && text > line && !strchr("[;#\r\n", *text) && !sets_key(l, text);
}

// add takes in such a line.  A value that is too long to be one stays so.
static void add(loader *l, char *text) {
    size_t len = strlen(l->value), end = 0;
    for (size_t i = 0; text[i] && !(text[i] == ';' && strchr(" \t", text[i - 1])); i++) {
        end = strchr(" \t\r\n", text[i]) ? end : i + 1;
    }
    snprintf(l->value + len, sizeof(l->value) - len, "%s%.*s", len ? " " : "", (int)end, text);
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

// too_long names the key that a line sets, or of the value that it goes on with.
static const char *too_long(const loader *l, const char *line, bool more, attnd_errinfo *info) {
    const char *text = line + strspn(line, " \t");
    size_t len = strcspn(text, " \t=:");
    if (more) {
        attnd_fail(info, ATTND_EINVAL, "", "%.64s: " TOO_LONG, l->key);
    } else if (strchr(";#[", *text) || !strchr("=:", text[len + strspn(text + len, " \t")])) {
        return TOO_LONG; // it is no key's
    } else {
        attnd_fail(info, ATTND_EINVAL, "", "%s.%.*s: " TOO_LONG, l->section, (int)len, text);
    }
    return info->text;
}

// read_line feeds inih, which tells of the first line only that it does not understand; so these
// are told of here, and inih gets an empty one.
static char *read_line(char *buf, int bytes, void *arg) {
    loader *l = arg;
    if (!fgets(buf, bytes, l->file)) {
        settle(l);
        return NULL;
    }
    l->line++;
    const char *why = NULL, *text = buf + strspn(buf, " \t");
    attnd_errinfo info;
    bool more = goes_on(l, buf);
    if (!more) {
        settle(l);
    }
    if (!strchr(buf, '\n') && !feof(l->file)) {
        why = too_long(l, buf, more, &info);
        l->pending = false;
        drop_rest(l->file);
    } else if (more) {
        add(l, buf + (text - buf));
        strcpy(buf, "\n"); // inih is told nothing of it
    } else {
        why = what_is_wrong(l, buf, &info);
        memmove(buf, text, strlen(text) + 1); // it would think that the value goes on
    }
    if (why) {
        wrong(l, why);
        strcpy(buf, "\n");
    }
    return buf;
}

// take_key is inih's handler; 0 tells it of an error, and it goes on reading.
static int take_key(void *arg, const char *cut, const char *name, const char *value) {
    (void)cut; // the section
    loader *l = arg;
    if (l->lost) {
        return 1;
    }
    int len =
        snprintf(l->key, sizeof(l->key), "%s%s%s", l->section, l->section[0] ? "." : "", name);
    if (len < 0 || (size_t)len >= sizeof(l->key)) {
        wrong(l, "the name of the key is too long");
        return 0;
    }
    snprintf(l->value, sizeof(l->value), "%s", value);
    l->at = l->line;
    l->pending = true; // until settle
    return 1;
}

attnd_err srv_conf_load(srv_conf *conf, const char *path, srv_conf_errors *errors) {
    uint32_t before = errors->num;
    loader l = {.conf = conf, .path = path, .file = fopen(path, "re"), .errors = errors};
    if (!l.file) {
        srv_conf_error(errors, "%.120s: %s", path, strerror(errno));
        return ATTND_EIO;
    }
    l.seen = calloc((1 + SRV_CONF_MAX_TENANTS) * srv_conf_num_keys, sizeof(*l.seen));
    if (l.seen) {
        ini_parse_stream(read_line, &l, take_key, &l);
    }
    bool unreadable = !l.seen || ferror(l.file) != 0;
    free(l.seen);
    fclose(l.file);
    if (unreadable) {
        srv_conf_error(errors, "%.120s: cannot be read", path);
        return ATTND_EIO;
    }
    return errors->num == before ? ATTND_OK : ATTND_EINVAL;
}

// can_begin is true for text that a line of its own can begin with, behind the indent.
static bool can_begin(const char *text) {
    size_t len = strcspn(text, " =");
    return !strchr(" [;#", *text) && text[len + strspn(text + len, " ")] != '=';
}

// piece_of returns how many bytes of text go on a line with so much room: all, or up to a single
// space behind which another line can begin; 0 when there is no such space.
static size_t piece_of(const char *text, size_t room) {
    if (strlen(text) <= room) {
        return strlen(text);
    }
    for (size_t i = room; i > 0; i--) {
        if (text[i] == ' ' && text[i - 1] != ' ' && can_begin(text + i + 1)) {
            return i;
        }
    }
    return 0;
}

// write_value writes a key and its value on as many lines as it takes, out = NULL: nowhere.  False:
// there is a piece of it that no line can hold.
static bool write_value(FILE *out, const char *name, const char *value) {
    size_t room = LINE_BYTES - strlen(name) - strlen(" = ");
    size_t piece = piece_of(value, room);
    if (piece == 0 && *value && !can_begin(value)) {
        return false;
    }
    if (out) {
        fprintf(out, "%s = %.*s\n", name, (int)piece, value);
    }
    for (value += piece; *value; value += piece) {
        value += piece > 0; // the space
        piece = piece_of(value, LINE_BYTES - strlen(indent));
        if (piece == 0) {
            return false;
        }
        if (out) {
            fprintf(out, "%s%.*s\n", indent, (int)piece, value);
        }
    }
    return true;
}

attnd_err srv_conf_check_text(const char *key, const char *value, attnd_errinfo *info) {
    size_t len = strlen(value);
    for (const unsigned char *c = (const unsigned char *)value; *c; c++) {
        bool comment = *c == ';' && (c == (const unsigned char *)value || c[-1] == ' ');
        if (*c < ' ' || *c == 127 || comment) {
            return attnd_fail(info, ATTND_EINVAL, "",
                              "%s: a file cannot hold control characters, nor a ; in front or "
                              "behind a space",
                              key);
        }
    }
    if (len > 0 && (value[0] == ' ' || value[len - 1] == ' ')) {
        return attnd_fail(info, ATTND_EINVAL, "", "%s: a space in front or at the end", key);
    }
    const char *dot = strrchr(key, '.');
    if (!write_value(NULL, dot ? dot + 1 : key, value)) {
        return attnd_fail(info, ATTND_EINVAL, "",
                          "%s: a file's lines have %d bytes at most, and the value has no space to "
                          "go on behind in the next one",
                          key, LINE_BYTES);
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
    write_value(d->out, dot + 1, value);
}

void srv_conf_dump(const srv_conf *conf, FILE *out) {
    dump d = {.out = out};
    srv_conf_each(conf, dump_key, &d);
}

int srv_conf_put(const srv_conf *conf) {
    int fd = memfd_create("attnd config", MFD_CLOEXEC), copy = fd < 0 ? -1 : dup(fd);
    FILE *out = copy < 0 ? NULL : fdopen(copy, "w");
    bool good = out != NULL;
    if (out) {
        srv_conf_dump(conf, out);
        good = !ferror(out);
        good = fclose(out) == 0 && good;
    } else if (copy >= 0) {
        close(copy);
    }
    if (!good && fd >= 0) {
        close(fd);
    }
    return good ? fd : -1;
}

attnd_err srv_conf_take(srv_conf *conf, int fd, srv_conf_errors *errors) {
    char path[64];
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    srv_conf_init(conf);
    return srv_conf_load(conf, path, errors);
}

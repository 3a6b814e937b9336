// Values of configuration keys: text to number and back, by the row of the table.
//
// A value is parsed into a local, checked against its row, and only then stored, so that a refused
// value changes nothing.  Printing gives the largest unit that divides the number, so that what is
// printed reads back as itself.  Errors name the key in full, as the caller wrote it.
#include "server/srv_conf.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct unit {
    const char *name;
    uint64_t factor;
} unit;

static const unit size_units[] = {
    {"GiB", 1ull << 30}, {"MiB", 1 << 20}, {"KiB", 1 << 10}, {"B", 1}, {"", 1}, {NULL, 0}};
static const unit time_units[] = {{"s", 1000}, {"ms", 1}, {"", 1}, {NULL, 0}};
static const unit no_units[] = {{"", 1}, {NULL, 0}};

static const unit *units_of(srv_conf_type type) {
    return type == SRV_CONF_SIZE ? size_units : type == SRV_CONF_TIME ? time_units : no_units;
}

static const char *what_it_is(srv_conf_type type) {
    return type == SRV_CONF_SIZE   ? "a whole number, of GiB, MiB, KiB or B"
           : type == SRV_CONF_TIME ? "a whole number, of s or ms"
           : type == SRV_CONF_MODE ? "an octal number"
                                   : "a whole number";
}

// print_number writes a number in the largest unit that divides it.
static void print_number(const srv_conf_key *key, uint64_t value, char *out, size_t bytes) {
    if (key->type == SRV_CONF_MODE) {
        snprintf(out, bytes, "%04" PRIo64, value);
        return;
    }
    const unit *u = units_of(key->type);
    while (u->factor > 1 && (value == 0 || value % u->factor)) {
        u++;
    }
    snprintf(out, bytes, "%" PRIu64 "%s", value / u->factor, u->name);
}

static attnd_err parse_number(const srv_conf_key *key, const char *name, const char *text,
                              uint64_t *out, attnd_errinfo *info) {
    char *end = NULL;
    errno = 0;
    uint64_t value = strtoull(text, &end, key->type == SRV_CONF_MODE ? 8 : 10);
    const unit *u = units_of(key->type);
    while (u->name && strcmp(u->name, end) != 0) {
        u++;
    }
    if (!isdigit((unsigned char)text[0]) || (errno && errno != ERANGE) || !u->name) {
        return attnd_fail(info, ATTND_EINVAL, key->name, "%s: \"%.64s\" is not %s", name, text,
                          what_it_is(key->type));
    }
    if (errno || __builtin_mul_overflow(value, u->factor, &value) || value < key->min ||
        value > key->max) {
        char min[32], max[32];
        print_number(key, key->min, min, sizeof(min));
        print_number(key, key->max, max, sizeof(max));
        return attnd_fail(info, ATTND_EINVAL, key->name, "%s: \"%.32s\" is not between %s and %s",
                          name, text, min, max);
    }
    *out = value;
    return ATTND_OK;
}

static attnd_err parse_bool(const srv_conf_key *key, const char *name, const char *text, bool *out,
                            attnd_errinfo *info) {
    if (strcmp(text, "on") != 0 && strcmp(text, "off") != 0) {
        return attnd_fail(info, ATTND_EINVAL, key->name, "%s: \"%.64s\" is neither on nor off",
                          name, text);
    }
    *out = strcmp(text, "on") == 0;
    return ATTND_OK;
}

static bool has_word(const char *words, const char *word) {
    size_t len = strcspn(word, " ");
    for (const char *p = words; len && !word[len] && (p = strstr(p, word)); p += len) {
        if ((p == words || p[-1] == ' ') && (p[len] == ' ' || !p[len])) {
            return true;
        }
    }
    return false;
}

static attnd_err check_text(const srv_conf_key *key, const char *name, const char *text,
                            attnd_errinfo *info) {
    if (strlen(text) >= SRV_CONF_TEXT_BYTES) {
        return attnd_fail(info, ATTND_EINVAL, key->name, "%s: longer than %d bytes", name,
                          SRV_CONF_TEXT_BYTES - 1);
    }
    if (key->choices && !has_word(key->choices, text)) {
        return attnd_fail(info, ATTND_EINVAL, key->name, "%s: \"%.64s\" is none of: %s", name, text,
                          key->choices);
    }
    return srv_conf_check_text(name, text, info);
}

static attnd_err parse_uids(const srv_conf_key *key, srv_conf_uids *out, const char *name,
                            const char *text, attnd_errinfo *info) {
    srv_conf_uids uids = {.num = 0};
    for (const char *p = text; *p;) {
        char *end = NULL;
        errno = 0;
        unsigned long long uid = strtoull(p, &end, 10);
        if (!isdigit((unsigned char)*p) || errno || uid >= UINT32_MAX || (*end && *end != ' ')) {
            return attnd_fail(info, ATTND_EINVAL, key->name, "%s: \"%.64s\" is not a user id", name,
                              p);
        }
        if (uids.num == SRV_CONF_MAX_UIDS) {
            return attnd_fail(info, ATTND_EINVAL, key->name, "%s: more than %d", name,
                              SRV_CONF_MAX_UIDS);
        }
        uids.list[uids.num++] = (uint32_t)uid;
        p = end + strspn(end, " ");
    }
    strcpy(uids.text, text);
    *out = uids;
    return ATTND_OK;
}

// store parses text and writes the value of a key into base (an srv_conf or an srv_conf_tenant).
// name is the key's name in full.
static attnd_err store(void *base, const srv_conf_key *key, const char *name, const char *text,
                       attnd_errinfo *info) {
    void *field = (char *)base + key->offset;
    switch (key->type) {
    case SRV_CONF_COUNT:
    case SRV_CONF_SIZE:
    case SRV_CONF_TIME:
    case SRV_CONF_MODE:
        return parse_number(key, name, text, field, info);
    case SRV_CONF_BOOL:
        return parse_bool(key, name, text, field, info);
    case SRV_CONF_TEXT:
    case SRV_CONF_CHOICE:
    case SRV_CONF_UIDS:
        break;
    }
    attnd_err err = check_text(key, name, text, info);
    if (!err && key->type == SRV_CONF_UIDS) {
        return parse_uids(key, field, name, text, info);
    }
    if (!err) {
        strcpy(field, text);
    }
    return err;
}

static void print(const void *base, const srv_conf_key *key, char out[SRV_CONF_TEXT_BYTES]) {
    const void *field = (const char *)base + key->offset;
    if (key->type == SRV_CONF_UIDS) {
        snprintf(out, SRV_CONF_TEXT_BYTES, "%s", ((const srv_conf_uids *)field)->text);
        return;
    }
    if (key->type == SRV_CONF_TEXT || key->type == SRV_CONF_CHOICE) {
        snprintf(out, SRV_CONF_TEXT_BYTES, "%s", (const char *)field);
        return;
    }
    if (key->type == SRV_CONF_BOOL) {
        snprintf(out, SRV_CONF_TEXT_BYTES, "%s", *(const bool *)field ? "on" : "off");
        return;
    }
    uint64_t value;
    memcpy(&value, field, sizeof(value));
    print_number(key, value, out, SRV_CONF_TEXT_BYTES);
}

// split cuts "section.key" at its last dot, so that a tenant's name may hold dots.
static bool split(const char *full, char section[SRV_CONF_SECTION_BYTES], const char **name) {
    const char *dot = strrchr(full, '.');
    if (!dot || (size_t)(dot - full) >= SRV_CONF_SECTION_BYTES) {
        return false;
    }
    memcpy(section, full, (size_t)(dot - full));
    section[dot - full] = '\0';
    *name = dot + 1;
    return true;
}

// tenant_name returns the NAME of "tenant NAME", NULL for another section.
static const char *tenant_name(const char *section) {
    return strncmp(section, "tenant ", 7) == 0 && section[7] ? section + 7 : NULL;
}

const srv_conf_key *srv_conf_find(const char *key) {
    char section[SRV_CONF_SECTION_BYTES];
    const char *name;
    if (!split(key, section, &name)) {
        return NULL;
    }
    if (strcmp(section, "tenant") == 0) {
        return NULL;
    }
    const char *wanted = tenant_name(section) ? "tenant" : section;
    for (const srv_conf_key *k = srv_conf_keys; k->section; k++) {
        if (strcmp(k->section, wanted) == 0 && strcmp(k->name, name) == 0) {
            return k;
        }
    }
    return NULL;
}

// distance is the number of letters to insert, delete or change from a to b (Levenshtein).
static size_t distance(const char *a, const char *b) {
    size_t row[2 * SRV_CONF_NAME_BYTES];
    size_t len = strlen(b);
    if (len >= sizeof(row) / sizeof(row[0])) {
        return SIZE_MAX;
    }
    for (size_t j = 0; j <= len; j++) {
        row[j] = j;
    }
    for (size_t i = 0; a[i]; i++) {
        size_t diagonal = row[0];
        row[0] = i + 1;
        for (size_t j = 0; j < len; j++) {
            size_t change = diagonal + (a[i] != b[j]);
            size_t shift = (row[j] < row[j + 1] ? row[j] : row[j + 1]) + 1;
            diagonal = row[j + 1];
            row[j + 1] = change < shift ? change : shift;
        }
    }
    return row[len];
}

// full_name writes how a row is called in the section that key names: the tenant's own, if any.
static void full_name(const srv_conf_key *row, const char *key, char *out, size_t bytes) {
    const char *dot = strrchr(key, '.');
    bool of_tenant = strcmp(row->section, "tenant") == 0;
    if (of_tenant && dot && strncmp(key, "tenant ", 7) == 0) {
        snprintf(out, bytes, "%.*s.%s", (int)(dot - key), key, row->name);
    } else {
        snprintf(out, bytes, "%s.%s", of_tenant ? "tenant NAME" : row->section, row->name);
    }
}

// unknown_key names the key that is spelt nearly so, or the same in another section.
static attnd_err unknown_key(const char *key, attnd_errinfo *info) {
    const char *dot = strrchr(key, '.');
    const char *name = dot ? dot + 1 : key;
    size_t best = strlen(key) / 4 + 2; // letters that may be wrong, and 1
    char nearest[2 * SRV_CONF_NAME_BYTES] = "";
    for (const srv_conf_key *k = srv_conf_keys; k->section; k++) {
        char full[2 * SRV_CONF_NAME_BYTES];
        full_name(k, key, full, sizeof(full));
        size_t d = strcmp(k->name, name) == 0 ? 1 : distance(full, key);
        if (d < best) {
            best = d;
            memcpy(nearest, full, sizeof(nearest));
        }
    }
    return attnd_fail(info, ATTND_ENOENT, "key", "unknown key %.64s%s%s", key,
                      nearest[0] ? ", the nearest is " : ": attnd --dump-config shows all of them",
                      nearest);
}

srv_conf_tenant *srv_conf_tenant_find(srv_conf *conf, const char *name) {
    for (uint32_t i = 0; i < conf->num_tenants; i++) {
        if (strcmp(conf->tenants[i].name, name) == 0) {
            return &conf->tenants[i];
        }
    }
    return NULL;
}

static void init_section(void *base, bool tenant) {
    for (const srv_conf_key *k = srv_conf_keys; k->section; k++) {
        if ((strcmp(k->section, "tenant") == 0) == tenant) {
            attnd_err err = store(base, k, k->name, k->fallback, NULL);
            ATTND_ASSERT(!err);
        }
    }
}

attnd_err srv_conf_tenant_add(srv_conf *conf, const char *name, attnd_errinfo *info) {
    if (strlen(name) >= SRV_CONF_NAME_BYTES) {
        return attnd_fail(info, ATTND_EINVAL, "tenant", "a tenant's name is longer than %d bytes",
                          SRV_CONF_NAME_BYTES - 1);
    }
    for (const unsigned char *c = (const unsigned char *)name; *c; c++) {
        if (*c < ' ' || *c == 127 || strchr("];", *c)) { // what a file's section could not say
            return attnd_fail(info, ATTND_EINVAL, "tenant",
                              "a tenant's name has no ], no ; and no control characters");
        }
    }
    if (conf->num_tenants == SRV_CONF_MAX_TENANTS) {
        return attnd_fail(info, ATTND_EINVAL, "tenant", "more than %d tenants",
                          SRV_CONF_MAX_TENANTS);
    }
    srv_conf_tenant *tenant = &conf->tenants[conf->num_tenants++];
    memset(tenant, 0, sizeof(*tenant));
    init_section(tenant, true);
    strcpy(tenant->name, name);
    return ATTND_OK;
}

void srv_conf_init(srv_conf *conf) {
    memset(conf, 0, sizeof(*conf));
    init_section(conf, false);
    attnd_err err = srv_conf_tenant_add(conf, "default", NULL);
    ATTND_ASSERT(!err);
}

attnd_err srv_conf_section(srv_conf *conf, const char *section, attnd_errinfo *info) {
    const char *who = tenant_name(section);
    if (who) {
        return srv_conf_tenant_find(conf, who) ? ATTND_OK : srv_conf_tenant_add(conf, who, info);
    }
    for (const srv_conf_key *k = srv_conf_keys; k->section; k++) {
        if (strcmp(k->section, section) == 0 && strcmp(section, "tenant") != 0) {
            return ATTND_OK;
        }
    }
    return attnd_fail(info, ATTND_ENOENT, "section", "there is no section [%.64s]", section);
}

attnd_err srv_conf_set(srv_conf *conf, const char *key, const char *value, attnd_errinfo *info) {
    const srv_conf_key *row = srv_conf_find(key);
    if (!row) {
        return unknown_key(key, info);
    }
    char section[SRV_CONF_SECTION_BYTES];
    const char *name;
    split(key, section, &name);
    const char *who = tenant_name(section);
    if (!who) {
        return store(conf, row, key, value, info);
    }
    srv_conf_tenant *tenant = srv_conf_tenant_find(conf, who);
    bool fresh = !tenant;
    if (fresh) {
        attnd_err err = srv_conf_tenant_add(conf, who, info);
        if (err) {
            return err;
        }
        tenant = &conf->tenants[conf->num_tenants - 1];
    }
    attnd_err err = store(tenant, row, key, value, info);
    conf->num_tenants -= fresh && err;
    return err;
}

attnd_err srv_conf_get(const srv_conf *conf, const char *key, char out[SRV_CONF_TEXT_BYTES],
                       attnd_errinfo *info) {
    const srv_conf_key *row = srv_conf_find(key);
    if (!row) {
        return unknown_key(key, info);
    }
    char section[SRV_CONF_SECTION_BYTES];
    const char *name;
    split(key, section, &name);
    const char *who = tenant_name(section);
    const void *base = who ? (const void *)srv_conf_tenant_find((srv_conf *)conf, who) : conf;
    if (!base) {
        return attnd_fail(info, ATTND_ENOENT, "key", "no tenant of that name is configured");
    }
    print(base, row, out);
    return ATTND_OK;
}

void srv_conf_each(const srv_conf *conf, void (*cb)(void *arg, const char *key, const char *value),
                   void *arg) {
    char full[2 * SRV_CONF_NAME_BYTES], value[SRV_CONF_TEXT_BYTES];
    for (const srv_conf_key *k = srv_conf_keys; k->section; k++) {
        if (strcmp(k->section, "tenant") != 0) {
            snprintf(full, sizeof(full), "%s.%s", k->section, k->name);
            print(conf, k, value);
            cb(arg, full, value);
        }
    }
    for (uint32_t i = 0; i < conf->num_tenants; i++) {
        for (const srv_conf_key *k = srv_conf_keys; k->section; k++) {
            if (strcmp(k->section, "tenant") == 0) {
                snprintf(full, sizeof(full), "tenant %s.%s", conf->tenants[i].name, k->name);
                print(&conf->tenants[i], k, value);
                cb(arg, full, value);
            }
        }
    }
}

attnd_err srv_conf_device(const srv_conf *conf, int32_t *ordinal, attnd_errinfo *info) {
    static const char prefix[] = "cuda:";
    if (strcmp(conf->device, "cpu") == 0) {
        *ordinal = -1;
        return ATTND_OK;
    }
    const char *number = conf->device + strlen(prefix);
    if (strncmp(conf->device, prefix, strlen(prefix)) != 0 || !number[0] || strlen(number) > 4 ||
        strspn(number, "0123456789") != strlen(number)) {
        return attnd_fail(info, ATTND_EINVAL, "device",
                          "compute.device: \"%.64s\" is neither cpu nor cuda:N", conf->device);
    }
    *ordinal = atoi(number);
    return ATTND_OK;
}

static bool has_uid(const srv_conf_uids *uids, uint32_t uid) {
    for (uint32_t i = 0; i < uids->num; i++) {
        if (uids->list[i] == uid) {
            return true;
        }
    }
    return false;
}

bool srv_conf_admits(const srv_conf_tenant *tenant, uint32_t uid) {
    return tenant->uids.num == 0 || has_uid(&tenant->uids, uid);
}

bool srv_conf_in_process(const srv_conf *conf, uint32_t uid) {
    return has_uid(&conf->in_process_uids, uid);
}

bool srv_conf_launch_ahead(const srv_conf *conf) {
    bool is_auto = strcmp(conf->launch_ahead, "auto") == 0;
    return is_auto ? sysconf(_SC_NPROCESSORS_ONLN) > 2 : strcmp(conf->launch_ahead, "on") == 0;
}

// srv_conf is the configuration of the daemon: one table of keys, from which the INI file, --set
// flags, config_get, config_set, --dump-config and deploy/attnd.conf all follow.  Order of
// precedence: defaults, file, flags.  Loop thread only.
//
// Values are text in the file's syntax: a count "64"; a size "512KiB", "64MiB", "2GiB" or plain
// bytes; a time "30s", "250ms" or plain milliseconds; "on" or "off"; an octal mode "0660"; a choice
// of words; user ids "0 1000"; text.
#ifndef ATTND_SERVER_SRV_CONF_H
#define ATTND_SERVER_SRV_CONF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "proto/err.h"

enum {
    SRV_CONF_TEXT_BYTES = 512,
    SRV_CONF_NAME_BYTES = 64,                         // of a tenant; also "section.key"
    SRV_CONF_SECTION_BYTES = SRV_CONF_NAME_BYTES + 8, // "tenant NAME"
    SRV_CONF_MAX_TENANTS = 64,
    SRV_CONF_MAX_UIDS = 32, // of one list
};

typedef struct srv_conf_uids {
    char text[SRV_CONF_TEXT_BYTES];   // as written
    uint32_t list[SRV_CONF_MAX_UIDS]; // [num]
    uint32_t num;
} srv_conf_uids;

typedef struct srv_conf_tenant {
    char name[SRV_CONF_NAME_BYTES];
    srv_conf_uids uids;    // none = any user may be this tenant
    uint64_t quota_blocks; // 0 = none
    uint64_t floor_blocks, cache_priority;
    uint64_t share;
} srv_conf_tenant;

typedef struct srv_conf {
    // [server]
    char listen[SRV_CONF_TEXT_BYTES]; // URLs, separated by spaces
    char admin[SRV_CONF_TEXT_BYTES];  // "" = the first ipc:// URL of listen with ".admin" appended
    char attach_socket[SRV_CONF_TEXT_BYTES]; // "" = its path with ".attach", "none" = no rings
    uint64_t spin_us, flag_spin_us;
    uint64_t socket_mode, admin_mode;
    srv_conf_uids in_process_uids; // none = nobody
    char log_level[SRV_CONF_TEXT_BYTES];
    uint64_t drain_timeout_ms;
    uint64_t reattach_timeout_ms;
    uint64_t restart_pause_ms;
    // [cache]
    uint64_t memory_bytes, slab_bytes;
    uint64_t block_tokens, max_blocks, max_sequences, max_seq_blocks, max_models;
    bool prefixes;
    uint64_t prefix_block_tokens;
    char eviction[SRV_CONF_TEXT_BYTES]; // name of a kv_policy
    // [tier]
    uint64_t tier_memory_bytes;
    char tier_file[SRV_CONF_TEXT_BYTES]; // "" = none
    uint64_t tier_file_bytes, tier_max_blocks, tier_queue, tier_wait_ms;
    // [compute]
    char device[SRV_CONF_TEXT_BYTES]; // srv_conf_device reads it
    uint64_t staging_bytes;
    uint64_t threads;
    char isa[SRV_CONF_TEXT_BYTES];
    bool deterministic;
    uint64_t prefill_chunk_tokens, prefill_alone_tokens;
    uint64_t decodes_in_a_row, launch_rows, inline_work;
    char launch_ahead[SRV_CONF_TEXT_BYTES]; // auto, on, off
    char wait_kernels[SRV_CONF_TEXT_BYTES]; // auto, off
    // [limits]
    uint64_t message_bytes, connection_bytes, connections, in_flight;
    uint64_t rings, ring_bytes, all_rings_bytes, region_bytes, all_regions_bytes;
    uint64_t send_timeout_ms, hello_timeout_ms;
    uint64_t session_steps, session_sequences;
    uint64_t steps, step_seqs, step_rows, step_bytes, queue, tenant_queue;
    // [tenant NAME]; the first one is "default", which is always there
    srv_conf_tenant tenants[SRV_CONF_MAX_TENANTS];
    uint32_t num_tenants;
} srv_conf;

typedef enum srv_conf_type {
    SRV_CONF_TEXT,
    SRV_CONF_COUNT,
    SRV_CONF_SIZE, // bytes
    SRV_CONF_TIME, // ms
    SRV_CONF_BOOL,
    SRV_CONF_MODE,   // octal
    SRV_CONF_CHOICE, // one of the words in `choices`
    SRV_CONF_UIDS,   // user ids, separated by spaces; an srv_conf_uids
} srv_conf_type;

// srv_conf_key is one row of the table.
typedef struct srv_conf_key {
    const char *section; // "tenant" stands for every [tenant NAME]
    const char *name;
    srv_conf_type type;
    size_t offset;        // in srv_conf, or in srv_conf_tenant
    const char *fallback; // the default, as text
    uint64_t min, max;
    const char *choices; // separated by spaces; NULL = none
    bool reloadable;     // takes effect on SIGHUP and config_set, else at the next start
    const char *doc;     // one sentence or two
} srv_conf_key;

extern const srv_conf_key srv_conf_keys[]; // [srv_conf_num_keys], and a row with section NULL
extern const size_t srv_conf_num_keys;

// srv_conf_errors collects what is wrong with a configuration, one line each, so that all of it is
// told at once.  Starts as zeros.
enum { SRV_CONF_MAX_ERRORS = 16, SRV_CONF_ERROR_BYTES = 256 };
typedef struct srv_conf_errors {
    uint32_t num; // may be more than there is room for
    char text[SRV_CONF_MAX_ERRORS][SRV_CONF_ERROR_BYTES];
} srv_conf_errors;

// srv_conf_error adds a line.
void srv_conf_error(srv_conf_errors *errors, const char *fmt, ...)
    __attribute__((format(printf, 2, 3)));

// srv_conf_init fills in the defaults.
void srv_conf_init(srv_conf *conf);

// srv_conf_load reads an INI file over conf.  ATTND_EINVAL or ATTND_EIO with "file:line: what" in
// errors, for each line that is wrong; the others have changed conf.
attnd_err srv_conf_load(srv_conf *conf, const char *path, srv_conf_errors *errors);

// srv_conf_check_text checks that a file can hold such a value of a key, perhaps on several lines.
// ATTND_EINVAL.
attnd_err srv_conf_check_text(const char *key, const char *value, attnd_errinfo *info);

// srv_conf_section adds the tenant that a section of a file is of, unless it is there.
// ATTND_ENOENT: no section has that name; ATTND_EINVAL: as srv_conf_tenant_add.
attnd_err srv_conf_section(srv_conf *conf, const char *section, attnd_errinfo *info);

// srv_conf_set sets one key, "section.key" or "tenant NAME.key".  ATTND_EINVAL, and ATTND_ENOENT
// for a key that does not exist (the text names one that is spelt nearly so, if any); conf is then
// as it was.
attnd_err srv_conf_set(srv_conf *conf, const char *key, const char *value, attnd_errinfo *info);

// srv_conf_get writes the value of a key as text.  ATTND_ENOENT.
attnd_err srv_conf_get(const srv_conf *conf, const char *key, char out[SRV_CONF_TEXT_BYTES],
                       attnd_errinfo *info);

// srv_conf_find returns the row of "section.key" or "tenant NAME.key", NULL for none.
const srv_conf_key *srv_conf_find(const char *key);

// srv_conf_tenant_find returns a tenant by name, NULL for none; srv_conf_tenant_add adds one with
// the defaults.  ATTND_EINVAL: the name, or too many.
srv_conf_tenant *srv_conf_tenant_find(srv_conf *conf, const char *name);
attnd_err srv_conf_tenant_add(srv_conf *conf, const char *name, attnd_errinfo *info);

// srv_conf_check checks what a value alone does not show: values that contradict each other, URLs
// that nobody can listen on, an instruction set that this machine lacks.  ATTND_EINVAL with a line
// in errors for each.
attnd_err srv_conf_check(const srv_conf *conf, srv_conf_errors *errors);

// srv_conf_device reads compute.device: *ordinal is N of "cuda:N", -1 for "cpu".  ATTND_EINVAL.
attnd_err srv_conf_device(const srv_conf *conf, int32_t *ordinal, attnd_errinfo *info);

// srv_conf_in_process is true when a user's processes may map the arena.
bool srv_conf_in_process(const srv_conf *conf, uint32_t uid);

// srv_conf_launch_ahead reads compute.launch_ahead: auto is on where a processor is left beside the
// loop's and the client's.
bool srv_conf_launch_ahead(const srv_conf *conf);

// srv_conf_each calls cb with every "section.key" and its value as text, in table order.
void srv_conf_each(const srv_conf *conf, void (*cb)(void *arg, const char *key, const char *value),
                   void *arg);

// srv_conf_dump writes the configuration as an INI file that reads back as itself.
void srv_conf_dump(const srv_conf *conf, FILE *out);

// srv_conf_put writes the same to a new memory file, which another process may inherit, and returns
// its descriptor, which the caller owns; -1 with errno.  srv_conf_take reads one.
int srv_conf_put(const srv_conf *conf);
attnd_err srv_conf_take(srv_conf *conf, int fd, srv_conf_errors *errors);

// srv_conf_admits is true when a user may be that tenant; uid UINT32_MAX = not known (tcp), which
// only a tenant without uids admits.
bool srv_conf_admits(const srv_conf_tenant *tenant, uint32_t uid);

#endif

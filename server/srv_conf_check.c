// What is wrong with a configuration beyond its single values, and the list of everything wrong.
#include <stdarg.h>
#include <string.h>

#include "attention/cpu/attn_cpu_ops.h"
#include "kvcache/kv_tier.h"
#include "server/srv_conf.h"
#include "server/srv_stage.h"
#include "server/srv_urls.h"

void srv_conf_error(srv_conf_errors *errors, const char *fmt, ...) {
    if (errors->num < SRV_CONF_MAX_ERRORS) {
        va_list args;
        va_start(args, fmt);
        vsnprintf(errors->text[errors->num], SRV_CONF_ERROR_BYTES, fmt, args);
        va_end(args);
    }
    errors->num++;
}

static void check_whole(const char *all, uint64_t all_bytes, const char *one, uint64_t one_bytes,
                        srv_conf_errors *errors) {
    if (all_bytes < one_bytes) {
        srv_conf_error(errors, "%s is less than %s: %llu and %llu bytes", all, one,
                       (unsigned long long)all_bytes, (unsigned long long)one_bytes);
    }
}

static void check_sizes(const srv_conf *conf, srv_conf_errors *errors) {
    if (conf->connection_bytes < 2 * conf->message_bytes) {
        srv_conf_error(errors, "limits.connection_memory is less than twice limits.message, for a "
                               "request and the reply before it");
    }
    check_whole("limits.all_rings_memory", conf->all_rings_bytes, "limits.ring_memory",
                conf->ring_bytes, errors);
    check_whole("limits.all_regions_memory", conf->all_regions_bytes, "limits.region_memory",
                conf->region_bytes, errors);
    if (conf->slab_bytes % 256) {
        srv_conf_error(errors, "cache.slab is not a multiple of 256 bytes");
    }
    check_whole("cache.memory", conf->memory_bytes, "cache.slab", conf->slab_bytes, errors);
    if (conf->launch_rows < conf->step_seqs) {
        srv_conf_error(errors,
                       "compute.launch_rows is less than limits.step_seqs: one attend would "
                       "not fit a launch");
    }
}

static void check_tiers(const srv_conf *conf, srv_conf_errors *errors) {
    attnd_errinfo info;
    if (!conf->prefixes && (conf->tier_memory_bytes || conf->tier_file[0])) {
        srv_conf_error(errors, "tier: there is nothing to keep, cache.prefixes is off");
    }
    if (conf->tier_memory_bytes && conf->tier_memory_bytes < conf->slab_bytes + KV_TIER_UNIT) {
        srv_conf_error(errors, "tier.memory is less than cache.slab and 4 KiB");
    }
    if (!conf->tier_file[0] && conf->tier_file_bytes) {
        srv_conf_error(errors, "tier.file_size is set, and tier.file is not");
    }
    if (conf->tier_file[0] && conf->tier_file_bytes < conf->slab_bytes + KV_TIER_UNIT) {
        srv_conf_error(errors, "tier.file_size is less than cache.slab and 4 KiB");
    }
    if (conf->tier_file[0] && conf->tier_file[0] != '/') {
        srv_conf_error(errors, "tier.file is no absolute path");
    }
    if (conf->tier_file[0] && kv_tier_file_check(&info)) {
        srv_conf_error(errors, "tier.file: %s", info.text);
    }
}

// check_device checks what a GPU needs, and that nothing is asked of the CPU beside it.
static void check_device(const srv_conf *conf, srv_conf_errors *errors) {
    int32_t ordinal;
    attnd_errinfo info;
    if (srv_conf_device(conf, &ordinal, &info)) {
        srv_conf_error(errors, "%s", info.text);
        return;
    }
    uint64_t least =
        srv_stage_min_bytes(conf->max_seq_blocks, conf->step_bytes, conf->message_bytes);
    if (ordinal >= 0 && conf->threads) {
        srv_conf_error(errors, "compute.threads is for the CPU, compute.device is %.32s",
                       conf->device);
    }
    if (ordinal >= 0 && conf->isa[0]) {
        srv_conf_error(errors, "compute.isa is for the CPU, compute.device is %.32s", conf->device);
    }
    if (ordinal >= 0 && conf->staging_bytes < least) {
        srv_conf_error(errors,
                       "compute.staging must be %llu bytes at least, for limits.message and "
                       "cache.max_seq_blocks",
                       (unsigned long long)least);
    }
}

attnd_err srv_conf_check(const srv_conf *conf, srv_conf_errors *errors) {
    uint32_t before = errors->num, features = 0;
    srv_urls urls;
    attnd_errinfo info;
    check_sizes(conf, errors);
    check_tiers(conf, errors);
    check_device(conf, errors);
    srv_urls_read(&urls, conf, errors);
    if (conf->isa[0] && attn_cpu_features_of(&features, conf->isa, attn_cpu_detect(), &info)) {
        srv_conf_error(errors, "compute.isa: %s", info.text);
    }
    return errors->num == before ? ATTND_OK : ATTND_EINVAL;
}

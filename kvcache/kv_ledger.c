// Lays the ledger out: one table of (array, number, size of an element) in the order of the picture
// in kv_ledger.h; each array begins on a page of its own.  Sizes are checked against overflow,
// since they come from a configuration file.  The tables come last: redo records name words by
// 32-bit index and never name a table entry.
#include "kvcache/kv_ledger.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "kvcache/kv_redo.h"
#include "kvcache/kv_sum.h"

enum { PAGE_BYTES = 4096 };
#define MAX_REGION_BYTES (UINT64_C(1) << 46)

typedef struct section {
    void *array; // a field of kv_cache
    uint64_t num, size;
} section;

// place moves *end behind the section; false when the region becomes too large.
static bool place(const section *s, uint64_t *end) {
    uint64_t bytes;
    if (__builtin_mul_overflow(s->num, s->size, &bytes) || bytes > MAX_REGION_BYTES) {
        return false;
    }
    *end += (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
    return *end <= MAX_REGION_BYTES;
}

// make_region makes and maps a new region; *what names the call that failed.
static void *make_region(uint64_t bytes, int *fd, const char **what) {
    void *base = MAP_FAILED;
    *what = "memfd_create";
    *fd = memfd_create("attnd-ledger", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (*fd < 0) {
        return base;
    }
    *what = "ftruncate";
    if (ftruncate(*fd, (off_t)bytes) == 0) {
        *what = "fcntl(F_ADD_SEALS)";
        if (fcntl(*fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0) {
            *what = "mmap";
            base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, *fd, 0);
        }
    }
    if (base == MAP_FAILED) {
        int err = errno;
        close(*fd);
        errno = err;
    }
    return base;
}

// check_region refuses a region of another size, or one that could shrink.
static attnd_err check_region(int fd, uint64_t bytes, attnd_errinfo *info) {
    struct stat st;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        return attnd_fail(info, ATTND_EINVAL, "ledger", "the descriptor is no memory file");
    }
    if ((uint64_t)st.st_size != bytes) {
        return attnd_fail(info, ATTND_EINVAL, "ledger", "it has %lld bytes, not %llu",
                          (long long)st.st_size, (unsigned long long)bytes);
    }
    int seals = fcntl(fd, F_GET_SEALS, 0);
    if (seals < 0 || !(seals & F_SEAL_SHRINK)) {
        return attnd_fail(info, ATTND_EINVAL, "ledger", "it is not sealed against shrinking");
    }
    return ATTND_OK;
}

static attnd_err map_region(kv_cache *kv, int fd, uint64_t bytes, attnd_errinfo *info) {
    const char *what = "mmap";
    void *base;
    if (fd < 0) {
        base = make_region(bytes, &fd, &what);
    } else {
        attnd_err err = check_region(fd, bytes, info);
        if (err) {
            return err;
        }
        base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    }
    if (base == MAP_FAILED) {
        bool sealed = errno == EPERM || errno == EACCES;
        return attnd_fail(info, sealed ? ATTND_EINVAL : ATTND_ENOMEM, "ledger",
                          "%s of a ledger of %llu bytes: %s", what, (unsigned long long)bytes,
                          strerror(errno));
    }
    kv->fd = fd;
    kv->base = base;
    kv->bytes = bytes;
    return ATTND_OK;
}

static void derive_sizes(kv_cache *kv) {
    const kv_opts *o = &kv->opts;
    kv->num_slabs = (uint32_t)(kv->arena->bytes / o->slab_bytes);
    kv->slab_units = (uint32_t)(o->slab_bytes / KV_BLOCK_UNIT);
    kv->slab_blocks = o->max_blocks / kv->num_slabs;
    if (kv->slab_blocks > kv->slab_units) {
        kv->slab_blocks = kv->slab_units;
    }
    kv->free_words = (kv->slab_blocks + 63) / 64;
    kv->free_sums = (kv->free_words + 63) / 64;
    kv->redo_cap = kv_redo_writes(o->max_step_seqs);
    kv->key_buckets = 1;
    while (kv->key_buckets <= o->prefix_blocks / 4) {
        kv->key_buckets *= 2;
    }
    kv->key_mask = UINT32_MAX;
    kv->name_buckets = 1;
    while (kv->name_buckets < o->max_seqs && kv->name_buckets < UINT32_C(1) << 31) {
        kv->name_buckets *= 2;
    }
}

// NOLINTNEXTLINE(readability-function-size): a table
attnd_err kv_ledger_open(kv_cache *kv, int fd, attnd_errinfo *info) {
    const kv_opts *o = &kv->opts;
    derive_sizes(kv);
    uint64_t step_copies = (uint64_t)o->max_step_seqs * KV_MAX_GROUPS;
    uint64_t max_classes = (uint64_t)o->max_models * KV_MAX_GROUPS;
    uint64_t num_replies = (uint64_t)o->max_sessions * KV_REPLIES;
#define ARRAY(field, number) {&kv->field, number, sizeof(*kv->field)}
    section sections[] = {
        ARRAY(head, 1),
        ARRAY(head_copy, 1),
        ARRAY(redo, 2 * kv_redo_record_words(kv->redo_cap)),
        ARRAY(tenants, o->max_tenants),
        ARRAY(models, o->max_models),
        ARRAY(slabs, kv->num_slabs),
        ARRAY(sessions, o->max_sessions),
        ARRAY(replies, num_replies),
        {&kv->values, num_replies, UINT64_C(8) * o->max_step_seqs},
        ARRAY(steps, o->max_steps),
        ARRAY(seqs, o->max_seqs),
        ARRAY(nodes, o->prefix_blocks),
        ARRAY(node_more, (uint64_t)o->prefix_blocks * (KV_MAX_GROUPS - 1)),
        ARRAY(spills, o->prefix_blocks),
        ARRAY(sums, 0), // as many as units stand before them
        ARRAY(lists, 1),
        ARRAY(tenant_aux, o->max_tenants),
        ARRAY(model_aux, o->max_models),
        ARRAY(session_aux, o->max_sessions),
        ARRAY(seq_aux, o->max_seqs),
        ARRAY(step_aux, o->max_steps),
        ARRAY(model_next, o->max_models),
        ARRAY(class_next, max_classes),
        ARRAY(slab_next, kv->num_slabs),
        ARRAY(session_next, o->max_sessions),
        ARRAY(step_next, o->max_steps),
        ARRAY(seq_next, o->max_seqs),
        ARRAY(node_next, o->prefix_blocks),
        ARRAY(node_aux, o->prefix_blocks),
        ARRAY(past, (uint64_t)o->prefix_blocks * KV_POLICY_PAST),
        ARRAY(keys, kv->key_buckets),
        ARRAY(names, kv->name_buckets),
        ARRAY(classes, max_classes),
        ARRAY(slab_aux, kv->num_slabs),
        ARRAY(free_sum, (uint64_t)kv->num_slabs * kv->free_sums),
        ARRAY(bits, (uint64_t)kv->num_slabs * kv->free_words),
        ARRAY(refs, (uint64_t)kv->num_slabs * kv->slab_blocks),
        {&kv->step_seqs, o->max_steps, sizeof(*kv->step_seqs) * o->max_step_seqs},
        {&kv->step_copies, o->max_steps, sizeof(*kv->step_copies) * step_copies},
        {&kv->copy_seqs, o->max_steps, sizeof(*kv->copy_seqs) * step_copies},
        {&kv->step_hits, o->max_steps, sizeof(*kv->step_hits) * o->max_step_seqs},
        {&kv->node_ids, o->prefix_blocks, sizeof(*kv->node_ids) * (uint64_t)o->prefix_block_tokens},
        {&kv->seq_ids, o->max_seqs, sizeof(*kv->seq_ids) * 2 * (uint64_t)o->prefix_block_tokens},
        {&kv->tables, (uint64_t)o->max_seqs * KV_MAX_GROUPS,
         sizeof(*kv->tables) * (uint64_t)o->max_seq_blocks},
    };
#undef ARRAY
    const size_t num = sizeof(sections) / sizeof(sections[0]);
    uint64_t at[sizeof(sections) / sizeof(sections[0])];
    uint64_t end = 0;
    for (size_t i = 0; i < num; i++) {
        at[i] = end;
        if (sections[i].array == &kv->sums) {
            sections[i].num = end / KV_SUM_BYTES;
            kv->num_units = (uint32_t)sections[i].num;
        }
        if (sections[i].array == &kv->lists && end / sizeof(uint32_t) > UINT32_MAX) {
            return attnd_fail(info, ATTND_EINVAL, NULL, "what records can name exceeds 16 GiB");
        }
        if (!place(&sections[i], &end)) {
            return attnd_fail(info, ATTND_EINVAL, NULL, "the ledger would be larger than 64 TiB");
        }
    }
    uint64_t *deltas = calloc(kv->num_units, sizeof(*deltas));
    if (!deltas) {
        return attnd_fail(info, ATTND_ENOMEM, NULL, "no memory for a ledger's checksums");
    }
    attnd_err err = map_region(kv, fd, end, info);
    if (err) {
        free(deltas);
        return err;
    }
    kv->sum_deltas = deltas;
    for (size_t i = 0; i < num; i++) {
        void *array = (char *)kv->base + at[i];
        memcpy(sections[i].array, &array, sizeof(array));
    }
    return ATTND_OK;
}

void kv_ledger_close(kv_cache *kv) {
    munmap(kv->base, kv->bytes);
    close(kv->fd);
    free(kv->sum_deltas);
}

// ---- the head

uint64_t kv_head_check(const kv_led_head *head) {
    return kv_sum_bytes(head, offsetof(kv_led_head, check), 0);
}

void kv_head_put(kv_cache *kv, kv_led_head head) {
    const size_t bytes = offsetof(kv_led_head, published);
    head.check = kv_head_check(&head);
    kv_redo_put_bytes(kv, kv->head, &head, bytes);
    kv_redo_put_bytes(kv, kv->head_copy, &head, bytes);
}

// Tops go up by large steps, so that nearly no record has to hold the heads.
uint32_t kv_next_generation(kv_cache *kv, kv_kind kind, uint32_t generation) {
    const uint32_t step = UINT32_C(1) << 20;
    uint32_t next = generation + 1;
    if (next > kv->head->tops[kind]) {
        kv_led_head head = *kv->head;
        head.tops[kind] = next < UINT32_MAX - step ? next + step : UINT32_MAX;
        kv_head_put(kv, head);
    }
    return next;
}

// The host arena: one memfd, mapped shared, sealed against shrinking and growing, so that nobody
// who is handed the descriptor can make a reader of it fault.
//
// Pages come in this order: reserved 2 MiB pages (MFD_HUGETLB; the mapping reserves them, so they
// cannot run out later), then small pages with a hint for transparent huge ones, which counts as
// "got" only when the kernel's switch for shared memory allows it.  Small pages are given out on
// first touch.
#include "kvcache/kv_arena.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <linux/memfd.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

enum { HUGE_PAGE_BYTES = 2 << 20 };

// open_pages makes, sizes, seals and maps a memfd; on failure nothing is left open and *what names
// the call that failed.
static int open_pages(kv_arena *arena, uint64_t bytes, unsigned int memfd_flags,
                      const char **what) {
    *what = "memfd_create";
    int fd = memfd_create("attnd-arena", MFD_CLOEXEC | MFD_ALLOW_SEALING | memfd_flags);
    if (fd < 0) {
        return errno;
    }
    int err = 0;
    void *base = MAP_FAILED;
    *what = "ftruncate";
    if (ftruncate(fd, (off_t)bytes) == 0) {
        *what = "fcntl(F_ADD_SEALS)";
        if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0) {
            *what = "mmap";
            base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        }
    }
    if (base == MAP_FAILED) {
        err = errno;
        close(fd);
        return err;
    }
    *arena = (kv_arena){.base = base, .bytes = bytes, .fd = fd, .ops = &kv_arena_host_ops};
    return 0;
}

static attnd_err move_host(const kv_arena *arena, const kv_move *move, attnd_errinfo *info) {
    (void)info;
    char *base = arena->base;
    for (uint64_t r = 0; r < move->num_rows; r++) {
        memcpy(base + move->dst + r * move->pitch, base + move->src + r * move->pitch,
               move->row_bytes);
    }
    return ATTND_OK;
}

static attnd_err read_host(const kv_arena *arena, void *dst, uint64_t off, uint64_t bytes,
                           attnd_errinfo *info) {
    (void)info;
    memcpy(dst, (const char *)arena->base + off, bytes);
    return ATTND_OK;
}

static attnd_err write_host(const kv_arena *arena, uint64_t off, const void *src, uint64_t bytes,
                            attnd_errinfo *info) {
    (void)info;
    memcpy((char *)arena->base + off, src, bytes);
    return ATTND_OK;
}

const kv_arena_ops kv_arena_host_ops = {
    .kind = "host", .move = move_host, .read = read_host, .write = write_host};

// transparent_pages_allowed reads the kernel's switch for huge pages of shared memory.
static bool transparent_pages_allowed(void) {
    FILE *f = fopen("/sys/kernel/mm/transparent_hugepage/shmem_enabled", "re");
    char line[128] = "";
    if (f) {
        if (!fgets(line, sizeof(line), f)) {
            line[0] = '\0';
        }
        fclose(f);
    }
    return strstr(line, "[always]") || strstr(line, "[within_size]") || strstr(line, "[advise]") ||
           strstr(line, "[force]");
}

static kv_pages pages_of(const kv_arena *arena) {
    struct statfs fs;
    if (fstatfs(arena->fd, &fs) == 0 && fs.f_type == HUGETLBFS_MAGIC) {
        return KV_PAGES_HUGE;
    }
    bool asked = madvise(arena->base, arena->bytes, MADV_HUGEPAGE) == 0;
    return asked && transparent_pages_allowed() ? KV_PAGES_TRANSPARENT_HUGE : KV_PAGES_SMALL;
}

attnd_err kv_arena_open_host(kv_arena *arena, uint64_t bytes, attnd_errinfo *info) {
    if (bytes == 0 || bytes > (uint64_t)INT64_MAX - HUGE_PAGE_BYTES) {
        return attnd_fail(info, ATTND_EINVAL, "bytes", "an arena of %llu bytes",
                          (unsigned long long)bytes);
    }
    bytes = (bytes + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    const char *what;
    if (open_pages(arena, bytes, MFD_HUGETLB | MFD_HUGE_2MB, &what) == 0) {
        arena->pages = KV_PAGES_HUGE;
        return ATTND_OK;
    }
    int err = open_pages(arena, bytes, 0, &what);
    if (err) {
        return attnd_fail(info, ATTND_ENOMEM, "bytes", "%s of an arena of %llu bytes: %s", what,
                          (unsigned long long)bytes, strerror(err));
    }
    arena->pages = pages_of(arena);
    return ATTND_OK;
}

attnd_err kv_arena_adopt_host(kv_arena *arena, int fd, uint64_t bytes, attnd_errinfo *info) {
    struct stat st;
    bytes = (bytes + HUGE_PAGE_BYTES - 1) / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES;
    if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
        return attnd_fail(info, ATTND_EINVAL, "bytes", "the descriptor is no memory file");
    }
    if ((uint64_t)st.st_size != bytes) {
        return attnd_fail(info, ATTND_EINVAL, "bytes", "it has %lld bytes, not %llu",
                          (long long)st.st_size, (unsigned long long)bytes);
    }
    int seals = fcntl(fd, F_GET_SEALS, 0);
    if (seals < 0 || !(seals & F_SEAL_SHRINK)) {
        return attnd_fail(info, ATTND_EINVAL, "bytes", "it is not sealed against shrinking");
    }
    void *base = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        return attnd_fail(info, errno == ENOMEM ? ATTND_ENOMEM : ATTND_EINVAL, "bytes",
                          "mmap of an arena of %llu bytes: %s", (unsigned long long)bytes,
                          strerror(errno));
    }
    *arena = (kv_arena){.base = base, .bytes = bytes, .fd = fd, .ops = &kv_arena_host_ops};
    arena->pages = pages_of(arena);
    return ATTND_OK;
}

void kv_arena_close_host(kv_arena *arena) {
    munmap(arena->base, arena->bytes);
    close(arena->fd);
    *arena = (kv_arena){.fd = -1};
}

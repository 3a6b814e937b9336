// The fake's loop polls, and wakes the client after each completion.
#include "tests/unit/proto/fake_ring.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

static void must(bool ok, const char *what) {
    if (!ok) {
        fprintf(stderr, "fake_ring: %s failed\n", what);
        abort();
    }
}

uint32_t fake_ring_body(uint8_t *reply, const uint8_t *msg, const void *body, size_t bytes) {
    proto_header h;
    memcpy(&h, msg, sizeof(h));
    proto_write_header(reply, h.op, h.request, ATTND_OK, PROTO_BODY + bytes);
    memcpy(reply + PROTO_BODY, body, bytes);
    return (uint32_t)(PROTO_BODY + bytes);
}

static void send_reply(const fake_ring *f, const proto_attach_reply *reply, int pass) {
    enum { MOST = 8 };
    union {
        struct cmsghdr align;
        char space[CMSG_SPACE(MOST * sizeof(int))];
    } control = {.space = {0}};
    size_t bytes = (1 + f->copies) * sizeof(int);
    struct iovec iov = {(void *)(uintptr_t)reply, sizeof(*reply)};
    struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
    if (pass >= 0) {
        msg.msg_control = control.space;
        must(f->copies < MOST, "few copies");
        msg.msg_controllen = CMSG_SPACE(bytes);
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(bytes);
        for (size_t at = 0; at < bytes; at += sizeof(int)) {
            memcpy(CMSG_DATA(c) + at, &pass, sizeof(int));
        }
    }
    (void)!sendmsg(f->fd, &msg, MSG_NOSIGNAL);
}

static void attach(fake_ring *f) {
    proto_attach ask;
    must(recv(f->fd, &ask, sizeof(ask), 0) == (ssize_t)sizeof(ask), "recv");
    must(!proto_ring_layout_make(&f->layout, ask.entries, ask.data_bytes, NULL), "layout");
    int region = memfd_create("fake", MFD_ALLOW_SEALING);
    must(ftruncate(region, (off_t)f->layout.bytes) == 0, "ftruncate");
    f->base = mmap(NULL, f->layout.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, region, 0);
    must(f->base != MAP_FAILED, "mmap");
    f->head = (proto_ring *)(void *)f->base;
    proto_attach_reply reply = {
        .magic = PROTO_RING_MAGIC, .bytes = f->layout.bytes, .data_off = f->layout.data_off};
    int pass = region;
    if (f->attach) {
        pass = f->attach(f, &reply, region);
    } else {
        fcntl(region, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);
    }
    send_reply(f, &reply, pass);
    close(region);
}

static void take(fake_ring *f) {
    proto_ring_submit s;
    memcpy(&s, f->base + f->layout.sq_off + f->sq_head % f->layout.entries * sizeof(s), sizeof(s));
    proto_ring_store(&f->head->sq_head, ++f->sq_head);
    proto_ring_complete c = {.user = s.user};
    const uint8_t *msg = f->base + s.msg_off;
    must(s.msg_off >= f->layout.data_off && s.msg_off + s.msg_bytes <= f->layout.bytes &&
             s.reply_off + s.reply_bytes <= f->layout.bytes &&
             s.reply_off >= s.msg_off + s.msg_bytes,
         "a submission in bounds");
    if (f->answer(f, msg, f->base + s.reply_off, &c)) {
        memcpy(f->base + f->layout.cq_off + f->cq_tail % f->layout.entries * sizeof(c), &c,
               sizeof(c));
        proto_ring_store(&f->head->cq_tail, ++f->cq_tail);
        proto_ring_fence();
        syscall(SYS_futex, &f->head->cq_tail, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
}

static void *serve(void *arg) {
    fake_ring *f = arg;
    f->fd = accept(f->listen_fd, NULL, NULL);
    if (f->fd < 0) {
        return NULL;
    }
    attach(f);
    while (!f->stop && !f->hang_up) {
        if (proto_ring_load(&f->head->sq_tail) != f->sq_head) {
            take(f);
        } else {
            usleep(20);
        }
    }
    close(f->fd);
    return NULL;
}

fake_ring *fake_ring_start(fake_ring_attach *attach_cb, fake_ring_answer *answer) {
    fake_ring *f = calloc(1, sizeof(*f));
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    pthread_t thread;
    must(f != NULL, "calloc");
    f->attach = attach_cb;
    f->answer = answer;
    snprintf(f->folder, sizeof(f->folder), "%s/attnd-fake-XXXXXX", P_tmpdir);
    must(mkdtemp(f->folder) != NULL, "mkdtemp");
    snprintf(f->url, sizeof(f->url), "ipc://%s/s", f->folder);
    snprintf(f->path, sizeof(f->path), "%s/s.attach", f->folder);
    memcpy(addr.sun_path, f->path, sizeof(f->path));
    f->listen_fd = socket(AF_UNIX, SOCK_SEQPACKET, 0);
    must(bind(f->listen_fd, (struct sockaddr *)&addr, sizeof(addr)) == 0, "bind");
    must(listen(f->listen_fd, 4) == 0, "listen");
    must(pthread_create(&thread, NULL, serve, f) == 0, "pthread_create");
    f->thread = thread;
    return f;
}

void fake_ring_stop(fake_ring *f) {
    f->stop = 1;
    shutdown(f->listen_fd, SHUT_RDWR);
    pthread_join(f->thread, NULL);
    close(f->listen_fd);
    unlink(f->path);
    rmdir(f->folder);
    if (f->base) {
        munmap(f->base, f->layout.bytes);
    }
    free(f);
}

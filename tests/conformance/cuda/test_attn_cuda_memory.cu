// The arena of a GPU outlives its process.  This process has no CUDA, as the keeper has none: it
// holds the descriptor, starts an owner, kills it in the middle of a kernel that writes without end
// (or lets it fault), reaps it, and has an heir look.
//
//     keeper            owner                              heir
//     start, take fd <- make memory, fill, launch writer
//     start, give fd ->                                    context, adopt, "prepared"
//     kill, reap
//     "go" ->                                              scribble over what the owner wrote to;
//                                                          nobody may have written there 1 s later
//
// So: what was committed is there, and nothing of a process writes after it was reaped, which is
// what a restart relies on (server/srv_resume.h).  Exit status 77: there is no GPU.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <cuda_runtime.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

extern "C" {
#include "attention/cuda/attn_cuda_memory.h"
}

enum { HELD = 100, KILLS = 5, NO_GPU = 77, SOCKET = 3 };
static const uint64_t kBytes = 1ull << 30, kHalf = kBytes / 2;
static const uint32_t kCommitted = 0xC0FFEE42u, kScribble = 0xABABABABu;

static double now_s() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void need(bool good, const char *what) {
    if (!good) {
        printf("FAIL: %s\n", what);
        exit(1);
    }
}

static void must(cudaError_t code, const char *what) {
    if (code != cudaSuccess) {
        printf("FAIL: %s: %s\n", what, cudaGetErrorString(code));
        exit(1);
    }
}

// ---- messages: a letter, and perhaps a descriptor

static void send_letter(int sock, char letter, int fd) {
    iovec part = {&letter, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr msg = {};
    msg.msg_iov = &part;
    msg.msg_iovlen = 1;
    if (fd >= 0) {
        msg.msg_control = control;
        msg.msg_controllen = sizeof(control);
        cmsghdr *head = CMSG_FIRSTHDR(&msg);
        head->cmsg_level = SOL_SOCKET;
        head->cmsg_type = SCM_RIGHTS;
        head->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(head), &fd, sizeof(fd));
    }
    need(sendmsg(sock, &msg, MSG_NOSIGNAL) == 1, "a message is not sent");
}

// take_letter returns the descriptor that came along, -1 for none.
static int take_letter(int sock, char letter) {
    char got = 0;
    iovec part = {&got, 1};
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
    msghdr msg = {};
    msg.msg_iov = &part;
    msg.msg_iovlen = 1;
    msg.msg_control = control;
    msg.msg_controllen = sizeof(control);
    need(recvmsg(sock, &msg, 0) == 1 && got == letter, "the other process has ended");
    int fd = -1;
    if (cmsghdr *head = CMSG_FIRSTHDR(&msg)) {
        memcpy(&fd, CMSG_DATA(head), sizeof(fd));
    }
    return fd;
}

// ---- owner

static __global__ void write_on(uint32_t *g_words, uint64_t num, uint64_t ns) {
    uint64_t start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        for (uint64_t i = blockIdx.x * (uint64_t)blockDim.x + threadIdx.x; i < num;
             i += (uint64_t)gridDim.x * blockDim.x) {
            g_words[i] = (uint32_t)i;
        }
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < ns);
}

static __global__ void fault(uint32_t *g_words) {
    *g_words = 0;
}

static int own(bool faults) {
    attn_cuda_memory m;
    attnd_errinfo info;
    must(cudaFree(0), "context");
    need(attn_cuda_memory_open(&m, 0, kBytes, &info) == ATTND_OK, info.text);
    uint32_t *words = (uint32_t *)m.address;
    write_on<<<1056, 256>>>(words, kBytes / 4, 0);
    must(cudaDeviceSynchronize(), "fill");
    uint32_t *pattern = (uint32_t *)malloc(kHalf);
    for (uint64_t i = 0; i < kHalf / 4; i++) {
        pattern[i] = kCommitted + (uint32_t)i;
    }
    must(cudaMemcpy(words, pattern, kHalf, cudaMemcpyHostToDevice), "pattern");
    if (faults) {
        fault<<<1, 1>>>((uint32_t *)16);
        need(cudaDeviceSynchronize() == cudaErrorIllegalAddress, "no fault");
        send_letter(SOCKET, 'm', m.fd);
        return HELD;
    }
    write_on<<<1056, 256>>>(words + kHalf / 4, kHalf / 4, 60ull * 1000000000);
    need(cudaStreamQuery(0) == cudaErrorNotReady, "the writer does not run");
    send_letter(SOCKET, 'm', m.fd);
    must(cudaDeviceSynchronize(), "the writer was not killed");
    return 1;
}

// ---- heir

static void check(const uint32_t *g_words, uint32_t *copy, uint32_t first, bool counts,
                  const char *what) {
    must(cudaMemcpy(copy, g_words, kHalf, cudaMemcpyDeviceToHost), "copy");
    for (uint64_t i = 0; i < kHalf / 4; i++) {
        need(copy[i] == first + (counts ? (uint32_t)i : 0), what);
    }
}

static int inherit() {
    attn_cuda_memory m;
    attnd_errinfo info;
    int fd = take_letter(SOCKET, 'm');
    must(cudaFree(0), "context");
    double from = now_s();
    attnd_err err = attn_cuda_memory_adopt(&m, 0, kBytes, fd, kBytes, &info);
    need(err == ATTND_OK, info.text);
    double adopted = now_s() - from;
    uint32_t *words = (uint32_t *)m.address, *copy = (uint32_t *)malloc(kHalf);
    memset(copy, 1, kHalf);
    send_letter(SOCKET, 'p', -1);
    take_letter(SOCKET, 'g');
    must(cudaMemset(words + kHalf / 4, 0xAB, kHalf), "scribble");
    must(cudaDeviceSynchronize(), "scribble");
    double until = now_s() + 1;
    int looks = 0;
    do {
        check(words + kHalf / 4, copy, kScribble, false, "a process that was reaped has written");
        looks++;
    } while (now_s() < until);
    check(words, copy, kCommitted, true, "what was committed is not there");
    printf("adopted in %.1f ms, nothing written in %d looks at %llu MiB\n", adopted * 1e3, looks,
           (unsigned long long)(kHalf >> 20));
    return 0;
}

// refuse: descriptors that are none of this memory.
static int refuse() {
    attn_cuda_memory m;
    attnd_errinfo info;
    int fd = take_letter(SOCKET, 'm'), file = memfd_create("no-gpu", 0);
    must(cudaFree(0), "context");
    need(ftruncate(file, (off_t)kBytes) == 0, "memfd");
    need(attn_cuda_memory_adopt(&m, 0, kBytes, file, kBytes, &info) == ATTND_EINVAL, "a file");
    need(attn_cuda_memory_adopt(&m, 0, kBytes, SOCKET, kBytes, &info) == ATTND_EINVAL, "a socket");
    need(attn_cuda_memory_adopt(&m, 0, kHalf, fd, kBytes, &info) == ATTND_EINVAL, "another size");
    attnd_err err = attn_cuda_memory_adopt(&m, 0, 2 * kBytes, fd, 2 * kBytes, &info);
    need(err != ATTND_OK, "more than there is");
    printf("refused: a file, a socket, another size; more than there is: %s\n", info.text);
    return 0;
}

// ---- keeper

static pid_t start(const char *role, int fd, int *sock) {
    int ends[2];
    need(socketpair(AF_UNIX, SOCK_STREAM, 0, ends) == 0, "socketpair");
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        close(ends[0]);
        dup2(ends[1], SOCKET);
        execl("/proc/self/exe", "test_attn_cuda_memory", role, nullptr);
        _exit(1);
    }
    close(ends[1]);
    *sock = ends[0];
    if (fd >= 0) {
        send_letter(*sock, 'm', fd);
    }
    return pid;
}

static int reap(pid_t pid) {
    int status = 0;
    need(waitpid(pid, &status, 0) == pid, "waitpid");
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// succeed has an heir look at what an owner left.
static void succeed(bool faults) {
    int from_owner, to_heir;
    pid_t owner = start(faults ? "fault" : "own", -1, &from_owner);
    int fd = take_letter(from_owner, 'm');
    fd = dup2(fd, HELD); // out of the way of what a child is given
    pid_t heir = start("inherit", fd, &to_heir);
    take_letter(to_heir, 'p');
    double from = now_s();
    if (!faults) {
        kill(owner, SIGKILL);
    }
    need(reap(owner) == (faults ? HELD : -SIGKILL), "the owner's end");
    send_letter(to_heir, 'g', -1);
    printf("%s: reaped in %.1f ms; ", faults ? "faulted" : "killed in a kernel",
           (now_s() - from) * 1e3);
    need(reap(heir) == 0, "the heir");
    if (faults) {
        need(reap(start("refuse", fd, &to_heir)) == 0, "refusals");
    }
    close(fd);
    close(from_owner);
    close(to_heir);
}

int main(int argc, char **argv) {
    const char *role = argc > 1 ? argv[1] : "";
    if (strcmp(role, "own") == 0 || strcmp(role, "fault") == 0) {
        return own(role[0] == 'f');
    }
    if (strcmp(role, "inherit") == 0) {
        return inherit();
    }
    if (strcmp(role, "refuse") == 0) {
        return refuse();
    }
    if (access("/dev/nvidiactl", F_OK) != 0) {
        printf("there is no GPU\n");
        return NO_GPU;
    }
    for (int i = 0; i < KILLS; i++) {
        succeed(false);
    }
    succeed(true);
    printf("all passed\n");
    return 0;
}

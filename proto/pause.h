// pause tells the processor that a thread looks at memory again and again, so that what shares the
// core with it runs faster, and the look that succeeds is not held up.
#ifndef ATTND_PROTO_PAUSE_H
#define ATTND_PROTO_PAUSE_H

static inline void attnd_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif

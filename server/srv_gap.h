// srv_gap foresees when the next layer's flag comes, from how long the last ones took to come after
// the layer before: a model's step is the same work again and again.  A gate (attn_device.h) that
// is launched some microseconds before saves what a launch takes to reach the device.
//
//     layer ends          gate is launched        flag comes
//         |--------------------|------- lead --------|
//         '------------------- gap ------------------'
//
// The lead is held where a gate waits for 7 us.  While it waits it takes a place on the
// device, and in the worst case a place that the work before the flag needs (a kernel all of whose
// blocks must be there at a time): then the flag cannot come before the gate has given up.  So
// after a gate in vain there is none for a while, and for longer after each in a row.
//
// One thread.
#ifndef ATTND_SERVER_SRV_GAP_H
#define ATTND_SERVER_SRV_GAP_H

#include <stdbool.h>
#include <stdint.h>

enum { SRV_GAP_SAMPLES = 4 };

// srv_gap: private, but for embedding.  All zero = nothing is known.
typedef struct srv_gap {
    uint64_t us[SRV_GAP_SAMPLES]; // the last gaps
    uint32_t num, next;
    int32_t more_us;       // lead above the least
    uint32_t mute, misses; // layers until the next gate; gates in vain since one was not
} srv_gap;

// srv_gap_note takes in a gap.
void srv_gap_note(srv_gap *g, uint64_t gap_us);

// srv_gap_is_due says whether to launch a gate now, since_us after the last layer's end: the last
// gaps are alike, and this one ends in about the lead.  Not when that is past: a flag that is late
// comes when it likes.
bool srv_gap_is_due(const srv_gap *g, uint64_t since_us);

// srv_gap_passed and srv_gap_missed take in what became of a gate.
void srv_gap_passed(srv_gap *g, uint32_t waited_us);
void srv_gap_missed(srv_gap *g);

#endif

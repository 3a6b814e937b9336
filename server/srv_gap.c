#include "server/srv_gap.h"

enum {
    LEAD_US = 10,      // least: launching takes so long
    MORE_US = 22,      // most above it
    WAITS_US = 7,      // that a gate is to wait: until the launch behind it has come, too
    ALIKE_US = 10,     // gaps are alike that differ by no more, or by an eighth of the shortest
    LATE_US = 5,       // behind the longest gap
    MUTE = 64,         // layers, after the first gate in vain
    MUTE_DOUBLES = 10, // most
};

void srv_gap_note(srv_gap *g, uint64_t gap_us) {
    g->us[g->next] = gap_us;
    g->next = (g->next + 1) % SRV_GAP_SAMPLES;
    g->num += g->num < SRV_GAP_SAMPLES;
    g->mute -= g->mute > 0;
}

bool srv_gap_is_due(const srv_gap *g, uint64_t since_us) {
    if (g->num < SRV_GAP_SAMPLES || g->mute > 0) {
        return false;
    }
    uint64_t least = g->us[0], most = g->us[0];
    for (uint32_t i = 1; i < SRV_GAP_SAMPLES; i++) {
        least = g->us[i] < least ? g->us[i] : least;
        most = g->us[i] > most ? g->us[i] : most;
    }
    uint64_t lead = LEAD_US + (uint64_t)g->more_us;
    uint64_t apart = least / 8 > ALIKE_US ? least / 8 : ALIKE_US;
    return most - least <= apart && least >= 2 * lead && since_us + lead >= least &&
           since_us <= most + LATE_US;
}

void srv_gap_passed(srv_gap *g, uint32_t waited_us) {
    g->misses = 0;
    g->more_us += waited_us < WAITS_US && g->more_us < MORE_US;
    g->more_us -= waited_us > WAITS_US && g->more_us > 0;
}

void srv_gap_missed(srv_gap *g) {
    g->mute = MUTE << (g->misses < MUTE_DOUBLES ? g->misses : MUTE_DOUBLES);
    g->misses++;
    g->more_us = 0;
}

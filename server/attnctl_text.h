// attnctl_text prints what the daemon answers in JSON as text for people.  A key that is missing
// (an older daemon) reads as 0 or "-".
#ifndef ATTND_SERVER_ATTNCTL_TEXT_H
#define ATTND_SERVER_ATTNCTL_TEXT_H

#include <stdio.h>

struct cJSON;

// Each takes the whole reply of its op.
void attnctl_print_status(const struct cJSON *doc, FILE *out);
void attnctl_print_models(const struct cJSON *doc, FILE *out);
void attnctl_print_sequences(const struct cJSON *doc, FILE *out);
void attnctl_print_sessions(const struct cJSON *doc, FILE *out);
void attnctl_print_drain(const struct cJSON *doc, FILE *out);
void attnctl_print_config(const struct cJSON *doc, FILE *out);
void attnctl_print_ping(const struct cJSON *doc, FILE *out);

#endif

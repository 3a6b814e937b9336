// The table of eviction policies.
#include "kvcache/kv_policy.h"

#include <stddef.h>
#include <string.h>

const kv_policy *const kv_policies[] = {
    &kv_policy_lru,
    &kv_policy_reuse,
    NULL,
};

uint32_t kv_policy_find(const char *name) {
    for (uint32_t i = 0; kv_policies[i]; i++) {
        if (strcmp(kv_policies[i]->name, name) == 0) {
            return i;
        }
    }
    return UINT32_MAX;
}
